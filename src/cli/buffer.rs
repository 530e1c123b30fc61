//! `legorl-rank buffer salvage`: set damaged records aside, so that a run can go on without them.

use crate::train::buffer::salvage;
use clap::Subcommand;
use std::{path::PathBuf, process::ExitCode};

/// Commands on a buffer folder.
#[derive(Subcommand)]
pub enum BufferCommand {
    /// Move damaged shards aside and keep every record that is whole; the lost trials run again
    Salvage {
        /// `RUN_DIR/buffer` of a run that is not running
        #[arg(value_name = "DIR")]
        dir: PathBuf,
    },
}

/// Runs the command.
pub fn run(command: &BufferCommand) -> anyhow::Result<ExitCode> {
    let BufferCommand::Salvage { dir } = command;
    let report = salvage(dir)?;
    if report.set_aside.is_empty() {
        super::print(&format!("{}: no damaged shard, nothing to do\n", dir.display()));
        return Ok(ExitCode::SUCCESS);
    }
    let mut text = format!("{}: {} records kept\n", dir.display(), report.kept);
    for lost in &report.lost {
        text.push_str(&format!("  lost: {lost}\n"));
    }
    for file in &report.set_aside {
        text.push_str(&format!("  set aside: {}\n", file.display()));
    }
    super::print(&text);
    Ok(ExitCode::SUCCESS)
}
