//! `legorl-rank config`: what a run config comes to.

use crate::config::{self, show, LoadRequest};
use clap::{Args, Subcommand};
use std::{path::PathBuf, process::ExitCode};

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
    /// Run config
    #[arg(value_name = "CONFIG")]
    config: PathBuf,
    /// For machines
    #[arg(long)]
    json: bool,
    /// Override a variable
    #[arg(long = "set", value_name = "NAME=VALUE")]
    set: Vec<String>,
}

/// Runs the command.
pub fn run(command: &ConfigCommand) -> anyhow::Result<ExitCode> {
    match command {
        ConfigCommand::Reference => super::print(&config::reference::markdown()),
        ConfigCommand::Show(args) => {
            let loaded = config::load(&LoadRequest::from_process(&args.config, args.set.clone()))?;
            for warning in &loaded.warnings {
                eprintln!("warning: {warning}");
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
