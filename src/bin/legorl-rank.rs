//! `legorl-rank`: the program that people type. It does not link libtorch; what needs tensors is done
//! by `legorl-rank-torch`, which lies beside it and takes its place.

use legorl_front::cli;
use std::process::ExitCode;

fn main() -> ExitCode {
    cli::main(&cli::Parts {
        tensors: cli::Tensors::In("legorl-rank-torch"),
    })
}
