//! `legorl-rank task`: task folders.

use crate::rollout::task::{check_tasks, find_tasks};
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
pub fn run(command: &TaskCommand) -> anyhow::Result<ExitCode> {
    let TaskCommand::Check(args) = command;
    let mut folders = Vec::new();
    for folder in &args.folders {
        folders.extend(find_tasks(folder)?);
    }
    let report = check_tasks(&folders);
    super::print(&format!("{report}\n"));
    Ok(if report.is_ok() {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}
