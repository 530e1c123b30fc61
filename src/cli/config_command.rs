//! `legorl-rank config`: what a run config comes to.

use super::ConfigArgs;
use crate::config::{self, show, values::RunKind};
use clap::{Args, Subcommand};
use std::process::ExitCode;

/// Commands on configurations.
#[derive(Subcommand)]
pub enum ConfigCommand {
    /// Print every value and where it comes from
    Show(ShowArgs),
    /// Print the page docs/configuration.md
    Reference,
}

/// Arguments of `config show`.
#[derive(Args)]
pub struct ShowArgs {
    #[command(flatten)]
    config: ConfigArgs,
    /// For machines
    #[arg(long)]
    json: bool,
    /// What the run config is for
    #[arg(long, value_name = "KIND", default_value = "train", value_parser = kind)]
    kind: RunKind,
}

fn kind(text: &str) -> Result<RunKind, String> {
    RunKind::from_name(text).ok_or_else(|| format!("must be one of {}", RunKind::NAMES.join(", ")))
}

/// Runs the command.
pub fn run(command: &ConfigCommand) -> anyhow::Result<ExitCode> {
    match command {
        ConfigCommand::Reference => super::print(&config::reference::markdown()),
        ConfigCommand::Show(args) => {
            let loaded = args.config.load(args.kind)?;
            for warning in &loaded.warnings {
                super::print_warning(warning);
            }
            super::print(&if args.json {
                show::json(&loaded)
            } else {
                show::text(&loaded)
            });
        }
    }
    Ok(ExitCode::SUCCESS)
}
