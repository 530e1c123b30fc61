//! `legorl-rank index`: task indexes.

use crate::rollout::task::build_index;
use clap::{Args, Subcommand};
use std::{path::PathBuf, process::ExitCode};

/// Commands on task indexes.
#[derive(Subcommand)]
pub enum IndexCommand {
    /// Write the index of a folder of tasks
    Build(IndexBuildArgs),
}

/// Arguments of `index build`.
#[derive(Args, Clone, Debug)]
pub struct IndexBuildArgs {
    /// Folder whose sub-folders are tasks
    #[arg(value_name = "DIR")]
    pub tasks: PathBuf,
    /// Parquet file to write
    #[arg(long, value_name = "FILE.parquet")]
    pub output: PathBuf,
    /// Share of the tasks for training; the rest goes to a held-out index beside the output
    #[arg(long, value_name = "R", value_parser = ratio)]
    pub split_ratio: Option<f64>,
    /// Seed of the split
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
}

fn ratio(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(r) if r > 0.0 && r < 1.0 => Ok(r),
        _ => Err("must be a number between 0 and 1, both excluded".into()),
    }
}

/// Runs the command.
pub fn run(command: &IndexCommand) -> anyhow::Result<ExitCode> {
    let IndexCommand::Build(args) = command;
    let report = build_index(&args.tasks, &args.output, args.split_ratio, args.seed)?;
    super::print(&format!("{report}\n"));
    Ok(ExitCode::SUCCESS)
}
