//! `legorl-rank [train] CONFIG`: check a run, and launch it.

use super::{exec, place::Place, report, Parts, Tensors};
use crate::{
    config::{self, LoadRequest},
    preflight::{self, Facts},
};
use anyhow::bail;
use clap::Args;
use std::{path::PathBuf, process::ExitCode};

/// Arguments of `train`.
#[derive(Args)]
pub struct TrainArgs {
    /// Run config
    #[arg(value_name = "CONFIG")]
    config: PathBuf,
    /// Check what the configuration alone tells, and stop
    #[arg(long, conflicts_with_all = ["preflight_only", "dry_run"])]
    structure_only: bool,
    /// Check everything, files and machine too, and stop
    #[arg(long, conflicts_with = "dry_run")]
    preflight_only: bool,
    /// Check everything, print every value and the launch, and stop
    #[arg(long)]
    dry_run: bool,
    /// Refuse unknown variables
    #[arg(long)]
    strict: bool,
    /// Override a variable; may be given several times
    #[arg(long = "set", value_name = "NAME=VALUE")]
    set: Vec<String>,
}

impl TrainArgs {
    fn launches(&self) -> bool {
        !(self.structure_only || self.preflight_only || self.dry_run)
    }
}

/// Runs the command.
pub fn run(parts: &Parts, args: &TrainArgs) -> anyhow::Result<ExitCode> {
    let place = Place::of_process();
    // The checks were printed by the program that this one replaced; they run again all the same.
    let prints = place.is_head() && std::env::var_os(exec::SHOWN).is_none();
    let print = |text: &str| {
        if prints {
            super::print(text);
        }
    };

    let loaded = match config::load(&LoadRequest::from_process(&args.config, args.set.clone())) {
        Ok(loaded) => loaded,
        // Every rank reads the same configuration, so one of them says what is wrong with it. A file
        // that only some nodes lack is said by each.
        Err(error) if !place.is_head() && !differs_by_node(&error) => return Ok(ExitCode::FAILURE),
        Err(error) => return Err(error.into()),
    };
    let (warnings, refused) = report::warnings(&loaded.warnings, args.strict);
    print(&warnings);
    if refused {
        if place.is_head() {
            bail!("--strict refuses unknown variables");
        }
        return Ok(ExitCode::FAILURE);
    }

    // Other ranks leave the machine of rank 0 alone: two of them probing one port would collide.
    let facts = (place.is_head() && !args.structure_only)
        .then(|| Facts::probe(&loaded.settings, args.launches().then_some(place.size).flatten()));
    let checks = preflight::check(&loaded.settings, facts.as_ref());
    print(&report::run_configuration(&loaded, facts.as_ref()));
    print(&report::checks(&checks, report::Style::of_stdout()));
    if !checks.passes() {
        if place.is_head() && !prints {
            super::print(&report::checks(&checks, report::Style::of_stdout()));
        }
        return Ok(ExitCode::FAILURE);
    }
    if args.structure_only {
        print("[structure-only] the configuration holds together; nothing was launched.\n");
        return Ok(ExitCode::SUCCESS);
    }
    if args.preflight_only {
        print("[preflight-only] this run can start here; nothing was launched.\n");
        return Ok(ExitCode::SUCCESS);
    }
    if args.dry_run {
        print(&report::resolved(&loaded));
        print("[dry-run] nothing was launched.\n");
        return Ok(ExitCode::SUCCESS);
    }
    match parts.tensors {
        Tensors::Here { train, .. } => train(&loaded),
        Tensors::In(name) => Err(exec::replace(name)),
    }
}

fn differs_by_node(error: &config::ConfigError) -> bool {
    use config::ConfigError::{ModuleNotFound, NotFound, Read};
    matches!(error, NotFound { .. } | Read { .. } | ModuleNotFound { .. })
}
