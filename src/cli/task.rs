//! `legorl-rank task`: task folders.

use super::Parts;
use clap::{Args, Subcommand};
use std::{path::PathBuf, process::ExitCode};

/// Commands on task folders.
#[derive(Subcommand)]
pub enum TaskCommand {
    /// Check that task folders are complete and well formed
    Check(TaskCheckArgs),
}

/// Arguments of `task check`.
#[derive(Args, Clone, Debug)]
pub struct TaskCheckArgs {
    /// Task folders, or folders of task folders
    #[arg(value_name = "DIR", required = true)]
    pub folders: Vec<PathBuf>,
}

/// Runs the command.
pub fn run(parts: &Parts, command: &TaskCommand) -> anyhow::Result<ExitCode> {
    let TaskCommand::Check(args) = command;
    let (report, complete) = (parts.task_check)(args)?;
    super::print(&report);
    Ok(if complete { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
