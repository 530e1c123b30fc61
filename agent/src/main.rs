//! The helper inside a sandbox. It is linked statically, so it runs in a root that holds only a shell.
//!
//! - `legorl-agent init`: first process of a sandbox (see [`init`]); started by the host alone.
//! - `legorl-agent mini`: a small coding agent (see [`mini`]).

mod init;
mod mini;
mod poll;

use std::process::ExitCode;

const USAGE: &str = "usage: legorl-agent init | mini [options]   (legorl-agent mini --help)";

fn main() -> ExitCode {
    let mut args = std::env::args().skip(1);
    match args.next().as_deref() {
        Some("init") => init::main(),
        Some("mini") => mini::main(args),
        Some("--version") => {
            println!("legorl-agent {}", env!("CARGO_PKG_VERSION"));
            ExitCode::SUCCESS
        }
        _ => {
            eprintln!("{USAGE}");
            ExitCode::from(2)
        }
    }
}
