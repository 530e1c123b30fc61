//! The command line: arguments in, exit code out. One file a command.
//!
//! | Exit code | Meaning |
//! |---|---|
//! | 0 | done |
//! | 1 | a FATAL check, or a run that failed |
//! | 2 | wrong usage |
//!
//! Two binaries share this module. `legorl-rank` does not link libtorch: it answers everything that
//! needs no tensors, and replaces itself by `legorl-rank-torch`, which lies beside it, for the rest.
//! What each binary can do itself is the table [`Parts`] that its `main` passes in.
//!
//! Under `mpirun` or `srun` every rank runs the same command; only rank 0 prints ([`place::Place`]).

pub mod buffer;
pub mod config_command;
pub mod exec;
pub mod explain;
pub mod index;
pub mod init_policy;
pub mod place;
pub mod report;
pub mod serve;
pub mod task;
pub mod train;
pub mod trajectory;

use crate::config::Loaded;
use clap::{Parser, Subcommand};
use std::{ffi::OsString, io::Write, process::ExitCode};

/// Commands that need tensors.
#[derive(Clone, Copy)]
pub enum Tensors {
    /// This binary has them.
    Here {
        /// Runs a training run to its end. The checks have passed.
        train: fn(&Loaded) -> anyhow::Result<ExitCode>,
        /// Writes a starting policy.
        init_policy: fn(&init_policy::InitPolicyArgs) -> anyhow::Result<()>,
    },
    /// They are in the binary of this name, beside this one.
    In(&'static str),
}

/// What a binary does itself.
#[derive(Clone, Copy)]
pub struct Parts {
    /// Training and starting policies.
    pub tensors: Tensors,
}

#[derive(Parser)]
#[command(
    name = "legorl-rank",
    version,
    about = "Online reinforcement learning for coding agents as a Slurm batch job",
    after_help = "`legorl-rank CONFIG` is short for `legorl-rank train CONFIG`."
)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Train a policy as a run config says (the default command)
    Train(train::TrainArgs),
    /// Work with task indexes
    #[command(subcommand)]
    Index(index::IndexCommand),
    /// Work with task folders
    #[command(subcommand)]
    Task(task::TaskCommand),
    /// Write a small starting policy
    InitPolicy(init_policy::InitPolicyArgs),
    /// Look at configurations
    #[command(subcommand)]
    Config(config_command::ConfigCommand),
    /// Run the proxy alone, in front of one engine
    Serve(serve::ServeArgs),
    /// Look at what trials said
    #[command(subcommand)]
    Trajectory(trajectory::TrajectoryCommand),
    /// Repair a run's buffer
    #[command(subcommand)]
    Buffer(buffer::BufferCommand),
    /// Explain a preflight rule
    Explain(explain::ExplainArgs),
}

const COMMANDS: [&str; 10] = [
    "buffer",
    "serve",
    "trajectory",
    "train",
    "index",
    "task",
    "init-policy",
    "config",
    "explain",
    "help",
];

/// Runs the command of this process and returns its exit code.
pub fn main(parts: &Parts) -> ExitCode {
    run(parts, std::env::args_os().collect())
}

/// Runs a command line, program name first.
pub fn run(parts: &Parts, arguments: Vec<OsString>) -> ExitCode {
    let parsed = match Arguments::try_parse_from(with_default_command(arguments)) {
        Ok(parsed) => parsed,
        Err(error) => {
            // A closed pipe is no reason to fail.
            let _ = error.print();
            return ExitCode::from(error.exit_code().clamp(0, 2) as u8);
        }
    };
    let outcome = match &parsed.command {
        Command::Train(args) => train::run(parts, args),
        Command::Index(command) => index::run(command),
        Command::Task(command) => task::run(command),
        Command::InitPolicy(args) => init_policy::run(parts, args),
        Command::Config(command) => config_command::run(command),
        Command::Serve(args) => serve::run(parts, args),
        Command::Trajectory(command) => trajectory::run(command),
        Command::Buffer(command) => buffer::run(command),
        Command::Explain(args) => explain::run(args),
    };
    match outcome {
        Ok(code) => code,
        Err(error) => {
            let place = place::Place::of_process();
            let rank = if place.is_head() {
                String::new()
            } else {
                format!("[rank {}] ", place.rank)
            };
            let _ = writeln!(std::io::stderr(), "{rank}[FATAL] {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Puts `train` in front where the command is left out: `legorl-rank --strict run.env`.
fn with_default_command(mut arguments: Vec<OsString>) -> Vec<OsString> {
    let Some(first) = arguments.get(1).and_then(|a| a.to_str()) else {
        return arguments;
    };
    if COMMANDS.contains(&first) || ["-h", "--help", "-V", "--version"].contains(&first) {
        return arguments;
    }
    // `legorl-rank --strict train run.env`: the command may follow its flags.
    let mut at = 1;
    while let Some(text) = arguments.get(at).and_then(|a| a.to_str()) {
        if !text.starts_with('-') {
            break;
        }
        at += if text == "--set" { 2 } else { 1 };
    }
    if arguments.get(at).is_some_and(|a| a == "train") {
        arguments.remove(at);
    }
    arguments.insert(1, "train".into());
    arguments
}

/// Prints to standard output; a reader that went away (`| head`) is not an error.
pub(crate) fn print(text: &str) {
    let mut out = std::io::stdout().lock();
    let _ = out.write_all(text.as_bytes()).and_then(|()| out.flush());
}

#[cfg(test)]
mod tests {
    use super::with_default_command;
    use std::ffi::OsString;

    fn complete(line: &str) -> String {
        let arguments = std::iter::once("legorl-rank").chain(line.split_whitespace());
        let arguments = with_default_command(arguments.map(OsString::from).collect());
        let words: Vec<_> = arguments[1..].iter().map(|a| a.to_string_lossy()).collect();
        words.join(" ")
    }

    #[test]
    fn train_is_the_default_command() {
        assert_eq!(complete("run.env"), "train run.env");
        assert_eq!(
            complete("--structure-only run.env"),
            "train --structure-only run.env"
        );
        assert_eq!(complete("--strict train run.env"), "train --strict run.env");
        assert_eq!(complete("--set train=1 run.env"), "train --set train=1 run.env");
        assert_eq!(complete("config show run.env"), "config show run.env");
        assert_eq!(complete("--help"), "--help");
        assert_eq!(complete(""), "");
    }
}
