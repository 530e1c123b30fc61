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
    /// Optimizer steps of the supervised start; without it 400, about three minutes on two cores
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub steps: Option<u32>,
    /// Family of the network: llama, qwen3, qwen3_moe, qwen3_next, qwen3_5 or qwen3_5_moe
    #[arg(long, value_name = "TYPE", default_value = "qwen3")]
    pub model_type: String,
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
        Tensors::In(name) => Err(exec::replace(name, std::time::SystemTime::now())),
    }
}

/// Writes the policy: the command in a program that has tensors.
#[cfg(feature = "torch")]
pub fn make(args: &InitPolicyArgs) -> anyhow::Result<()> {
    use crate::{
        rollout::task::TaskIndex,
        train::supervised::{init_policy, Habits, InitPolicyOptions},
    };
    let mut kept_out = Vec::new();
    for file in std::iter::once(&args.train_files).chain(&args.val_files) {
        kept_out.extend(TaskIndex::open(file)?.rows().iter().map(|row| row.dir.clone()));
    }
    let options = InitPolicyOptions {
        output: args.output.clone(),
        kept_out,
        model_type: args.model_type.parse().map_err(anyhow::Error::msg)?,
        steps: args.steps.unwrap_or(InitPolicyOptions::DEFAULT_STEPS),
        seed: args.seed,
        threads: args.threads,
        habits: Habits::default(),
    };
    let progress = crate::observe::Progress::new(options.steps.into(), 0);
    let report = init_policy(&options, |at| {
        if at.step % 20 == 0 || at.step == options.steps {
            progress.step_done(at.step.into(), &format!("loss {:.3} nats a token", at.loss));
        }
    })?;
    progress.finish();
    super::print(&format!(
        "{}: {:.2} million parameters, vocabulary {}; {} transcripts, {} tokens, last loss {:.3}; {} tasks kept out; {:.0} s\n",
        report.output.display(),
        report.parameters as f64 / 1e6,
        report.vocab_size,
        report.transcripts,
        report.tokens,
        report.last_loss,
        report.tasks_kept_out,
        report.elapsed.as_secs_f64()
    ));
    Ok(())
}
