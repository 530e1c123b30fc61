//! `legorl-rank-torch`: the same commands with libtorch linked in. `legorl-rank` replaces itself by it
//! for training runs, starting policies and `model run`; nobody needs to type its name.

use legorl::{cli, rank};
use std::process::ExitCode;

fn main() -> ExitCode {
    cli::main(&cli::Parts {
        tensors: cli::Tensors::Here {
            train: rank::run_train,
            init_policy: cli::init_policy::make,
            model_run: cli::model::run_network,
        },
    })
}
