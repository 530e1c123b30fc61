//! `legorl-rank init-policy`: a small starting policy.

use super::{exec, Parts, Tensors};
use clap::Args;
use std::{path::PathBuf, process::ExitCode};

/// Arguments of `init-policy`.
#[derive(Args, Clone, Debug)]
pub struct InitPolicyArgs {
    /// Folder to write, in Hugging Face layout
    #[arg(long, value_name = "DIR")]
    pub output: PathBuf,
    /// Training index; held-out tasks are never shown to the policy
    #[arg(long, value_name = "FILE.parquet")]
    pub train_files: PathBuf,
    /// Held-out index, to prove that no transcript equals one of its solutions
    #[arg(long, value_name = "FILE.parquet")]
    pub val_files: Option<PathBuf>,
    /// Optimizer steps of the supervised start
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub steps: Option<u32>,
    /// Seed of weights and transcripts
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    /// CPU threads; 0 takes the cores that the process may use
    #[arg(long, default_value_t = 0)]
    pub threads: u32,
}

/// Runs the command.
pub fn run(parts: &Parts, args: &InitPolicyArgs) -> anyhow::Result<ExitCode> {
    match parts.tensors {
        Tensors::Here { init_policy, .. } => init_policy(args).map(|()| ExitCode::SUCCESS),
        Tensors::In(name) => Err(exec::replace(name)),
    }
}
