//! `legorl-rank-torch`: the same commands with libtorch linked in. `legorl-rank` replaces itself by it
//! for training runs and starting policies; nobody needs to type its name.

use legorl::{cli, config::Loaded};
use std::process::ExitCode;

fn main() -> ExitCode {
    cli::main(&cli::Parts {
        tensors: cli::Tensors::Here { train, init_policy },
    })
}

fn train(_: &Loaded) -> anyhow::Result<ExitCode> {
    anyhow::bail!("this build has no trainer")
}

fn init_policy(_: &cli::init_policy::InitPolicyArgs) -> anyhow::Result<()> {
    anyhow::bail!("this build makes no policies")
}
