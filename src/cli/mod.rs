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

pub mod block;
pub mod buffer;
pub mod check;
pub mod completion;
mod config_args;
pub mod config_command;
pub mod dry_run;
pub mod exec;
pub mod explain;
pub mod index;
pub mod init_policy;
pub mod model;
pub mod place;
pub mod report;
pub mod run;
pub mod serve;
pub mod task;
pub mod trajectory;

pub use config_args::ConfigArgs;

use crate::{
    base::error_chain,
    config::{values::RunKind, Loaded},
    observe::Redactor,
};
use clap::{CommandFactory, Parser, Subcommand};
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
        /// Runs a model folder on given tokens.
        model_run: fn(&model::ModelRunArgs) -> anyhow::Result<()>,
    },
    /// They are in the binary of this name, beside this one.
    In(&'static str),
}

/// What a binary does itself.
#[derive(Clone, Copy)]
pub struct Parts {
    /// Training, starting policies, running models.
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
    Train(run::RunArgs),
    /// Score a checkpoint on a data set (this version checks its configuration)
    Eval(run::RunArgs),
    /// Sample trials of many tasks (this version checks its configuration)
    Infer(run::RunArgs),
    /// Work with task indexes
    #[command(subcommand)]
    Index(index::IndexCommand),
    /// Work with task folders
    #[command(subcommand)]
    Task(task::TaskCommand),
    /// Write a small starting policy
    InitPolicy(init_policy::InitPolicyArgs),
    /// Look at a model folder, run it, write it back
    #[command(subcommand)]
    Model(model::ModelCommand),
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
    /// Say whether a run can start on this machine now, and change nothing
    Check(check::CheckArgs),
    /// Explain a preflight rule
    Explain(explain::ExplainArgs),
    /// Print the lines that make a shell complete commands and variables
    Completion(completion::CompletionArgs),
    /// Print candidates for a command line
    #[command(hide = true)]
    Complete(completion::CompleteArgs),
}

/// The definition of the command line.
fn definition() -> clap::Command {
    let mut definition = Arguments::command();
    definition.build();
    definition
}

/// Runs the command of this process and returns its exit code.
pub fn main(parts: &Parts) -> ExitCode {
    std::panic::set_hook(Box::new(report_panic));
    run(parts, std::env::args_os().collect())
}

/// A defect of the program: where and what, without secrets.
fn report_panic(panic: &std::panic::PanicHookInfo<'_>) {
    let thread = std::thread::current();
    let mut text = format!("thread '{}': {panic}", thread.name().unwrap_or("unnamed"));
    let trace = std::backtrace::Backtrace::capture();
    if trace.status() == std::backtrace::BacktraceStatus::Captured {
        text.push_str(&format!("\n{trace}"));
    }
    let _ = writeln!(
        std::io::stderr(),
        "[FATAL] defect in legorl-rank, please report it: {}",
        Redactor::global().clean(&text)
    );
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
        Command::Train(args) => run::run(parts, args, RunKind::Train),
        Command::Eval(args) => run::run(parts, args, RunKind::Eval),
        Command::Infer(args) => run::run(parts, args, RunKind::Infer),
        Command::Index(command) => index::run(command),
        Command::Task(command) => task::run(command),
        Command::InitPolicy(args) => init_policy::run(parts, args),
        Command::Model(command) => model::run(parts, command),
        Command::Config(command) => config_command::run(command),
        Command::Serve(args) => serve::run(parts, args),
        Command::Trajectory(command) => trajectory::run(command),
        Command::Buffer(command) => buffer::run(command),
        Command::Check(args) => check::run(args),
        Command::Explain(args) => explain::run(args),
        Command::Completion(args) => Ok(completion::script(args)),
        Command::Complete(args) => Ok(completion::complete(args, &definition())),
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
            let text = format!("{rank}[FATAL] {}", error_chain(error.as_ref()));
            let _ = writeln!(std::io::stderr(), "{}", Redactor::global().clean(&text));
            ExitCode::FAILURE
        }
    }
}

/// Puts `train` in front where the command is left out: `legorl-rank --strict run.env`. The command may
/// also follow its flags: `legorl-rank --strict eval run.env`.
fn with_default_command(mut arguments: Vec<OsString>) -> Vec<OsString> {
    const GENERAL: [&str; 5] = ["-h", "--help", "-V", "--version", "help"];
    let text = |at: usize| arguments.get(at).and_then(|a| a.to_str());
    let is_command = |name: &str| Arguments::command().find_subcommand(name).is_some();
    match text(1) {
        None => return arguments,
        Some(first) if GENERAL.contains(&first) || is_command(first) => return arguments,
        // A mistyped command is for clap to explain.
        Some(first) if !first.starts_with('-') && is_nearly_a_command(first) => return arguments,
        Some(_) => {}
    }
    let mut at = 1;
    while let Some(flag) = text(at).filter(|word| word.starts_with('-')) {
        at += if ["--set", "--site", "--templates"].contains(&flag) {
            2
        } else {
            1
        };
    }
    let command = match text(at) {
        Some(name) if RunKind::from_name(name).is_some() => arguments.remove(at),
        _ => RunKind::Train.name().into(),
    };
    arguments.insert(1, command);
    arguments
}

/// True for a word that looks like a command with a typing mistake and is no file.
fn is_nearly_a_command(word: &str) -> bool {
    let near = |name: &str| strsim::damerau_levenshtein(name, word) <= 2;
    word.len() > 3
        && !word.contains(['.', '/'])
        && !std::path::Path::new(word).exists()
        && Arguments::command()
            .get_subcommands()
            .any(|command| near(command.get_name()))
}

/// Prints to standard output, without secrets; a reader that went away (`| head`) is not an error.
pub(crate) fn print(text: &str) {
    let text = Redactor::global().clean(text);
    let mut out = std::io::stdout().lock();
    let _ = out.write_all(text.as_bytes()).and_then(|()| out.flush());
}

/// Prints a warning to standard error, without secrets.
pub(crate) fn print_warning(warning: impl std::fmt::Display) {
    let text = format!("warning: {warning}");
    let _ = writeln!(std::io::stderr(), "{}", Redactor::global().clean(&text));
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

    /// A panic's message may quote any value.
    #[test]
    fn a_crash_report_holds_no_secret() {
        const CHILD: &str = "LEGORL_TEST_CRASH";
        if std::env::var_os(CHILD).is_some() {
            super::Redactor::global().add("from-the-config-1234");
            std::panic::set_hook(Box::new(super::report_panic));
            panic!(
                "{} and from-the-config-1234",
                std::env::var("SOME_API_KEY").unwrap()
            );
        }
        let output = std::process::Command::new(std::env::current_exe().unwrap())
            .args([
                "--exact",
                "cli::tests::a_crash_report_holds_no_secret",
                "--nocapture",
            ])
            .env(CHILD, "1")
            .env("SOME_API_KEY", "from-the-environment-1234")
            .env("RUST_BACKTRACE", "1")
            .output()
            .unwrap();
        let text = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
        assert!(text.contains("[FATAL] defect in legorl-rank"), "{text}");
        assert!(text.contains("<redacted> and <redacted>"), "{text}");
        assert!(!text.contains("1234"), "{text}");
    }

    #[test]
    fn train_is_the_default_command() {
        assert_eq!(complete("run.env"), "train run.env");
        assert_eq!(
            complete("--structure-only run.env"),
            "train --structure-only run.env"
        );
        assert_eq!(complete("--strict train run.env"), "train --strict run.env");
        assert_eq!(complete("eval run.env"), "eval run.env");
        assert_eq!(complete("--dry-run infer run.env"), "infer --dry-run run.env");
        assert_eq!(complete("--site s.env run.env"), "train --site s.env run.env");
        assert_eq!(complete("trian run.env"), "trian run.env");
        assert_eq!(complete("--set train=1 run.env"), "train --set train=1 run.env");
        assert_eq!(complete("config show run.env"), "config show run.env");
        assert_eq!(complete("--help"), "--help");
        assert_eq!(complete(""), "");
    }
}
