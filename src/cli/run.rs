//! `legorl-rank [train|eval|infer] CONFIG`: check a run, and launch it.

use super::{block, dry_run, exec, place::Place, report, ConfigArgs, Parts, Tensors};
use crate::{
    config::{self, values::RunKind, Settings},
    preflight::{self, Facts},
};
use anyhow::bail;
use clap::Args;
use std::process::ExitCode;

/// Arguments of `train`, `eval` and `infer`.
#[derive(Args)]
pub struct RunArgs {
    #[command(flatten)]
    config: ConfigArgs,
    /// Check what the configuration alone tells, and stop
    #[arg(long, conflicts_with_all = ["preflight_only", "dry_run"])]
    structure_only: bool,
    /// Check everything, files and machine too, and stop
    #[arg(long, conflicts_with = "dry_run")]
    preflight_only: bool,
    /// Check everything, print every value and the launch of every rank, and stop
    #[arg(long)]
    dry_run: bool,
    /// Refuse unknown variables
    #[arg(long)]
    strict: bool,
}

impl RunArgs {
    fn launches(&self) -> bool {
        !(self.structure_only || self.preflight_only || self.dry_run)
    }
}

/// Runs the command.
pub fn run(parts: &Parts, args: &RunArgs, kind: RunKind) -> anyhow::Result<ExitCode> {
    let place = Place::of_process();
    // The checks were printed by the program that this one replaced; they run again all the same.
    let prints = place.is_head() && std::env::var_os(exec::SHOWN).is_none();
    let print = |text: &str| {
        if prints {
            super::print(text);
        }
    };

    let loaded = match args.config.load(kind) {
        Ok(loaded) => loaded,
        // Every rank reads the same configuration, so one of them says what is wrong with it. A launch
        // that fails because only some nodes lack a file is explained by each of them.
        Err(error) => {
            let explains = place.is_head() || (args.launches() && differs_by_node(&error));
            return if explains {
                Err(error.into())
            } else {
                Ok(ExitCode::FAILURE)
            };
        }
    };
    let (warnings, refused) = report::warnings(&loaded.warnings, args.strict);
    print(&warnings);
    if refused {
        if place.is_head() {
            bail!("--strict refuses unknown variables");
        }
        return Ok(ExitCode::FAILURE);
    }

    // In a launch the first rank's verdict is the run's: what another one would judge without facts, or by those
    // of its own node, may differ. A launcher ends the others when the first one refuses (mpirun by itself, srun
    // with --kill-on-bad-exit, which the batch scripts set).
    if args.launches() && !place.is_head() {
        return launch(parts, kind, place, &loaded);
    }
    let facts = probe(args, place, &loaded.settings);
    let checks = preflight::check(&loaded.settings, facts.as_ref());
    print(&block::text(&loaded, facts.as_ref()));
    print(&report::checks(&checks, report::Style::of_stdout()));
    if args.dry_run {
        print(&dry_run::text(&loaded, &args.config.to_words()));
    }
    if !checks.passes() {
        if args.dry_run {
            print("[dry-run] this run would not start: the checks above say why.\n");
        }
        if place.is_head() && !prints {
            super::print(&report::checks(&checks, report::Style::of_stdout()));
        }
        return Ok(ExitCode::FAILURE);
    }
    if args.structure_only {
        print(&report::structure_only(&checks));
        return Ok(ExitCode::SUCCESS);
    }
    if args.preflight_only {
        print("[preflight-only] this run can start here; nothing was launched.\n");
        return Ok(ExitCode::SUCCESS);
    }
    if args.dry_run {
        print("[dry-run] nothing was launched.\n");
        return Ok(ExitCode::SUCCESS);
    }
    launch(parts, kind, place, &loaded)
}

fn launch(parts: &Parts, kind: RunKind, place: Place, loaded: &config::Loaded) -> anyhow::Result<ExitCode> {
    match (kind, parts.tensors) {
        (RunKind::Train, Tensors::Here { train, .. }) => train(loaded),
        (RunKind::Train, Tensors::In(name)) => Err(exec::replace(name, loaded.read_at)),
        (RunKind::Eval | RunKind::Infer, _) if !place.is_head() => Ok(ExitCode::FAILURE),
        (RunKind::Eval | RunKind::Infer, _) => bail!(
            "`legorl-rank {kind}` cannot launch a run in this version; \
             --structure-only, --preflight-only and --dry-run check its configuration"
        ),
    }
}

/// What the checks need to know of this machine. Ranks besides the first look as well, so that all end
/// with the same code, except that only the first one tries the proxy's port: two would collide.
fn probe(args: &RunArgs, place: Place, settings: &Settings) -> Option<Facts> {
    if args.structure_only {
        return None;
    }
    let world_size = args.launches().then_some(place.size).flatten();
    if place.is_head() {
        return Some(Facts::probe(settings, world_size));
    }
    let mut quiet = settings.clone();
    quiet.proxy.port = 0;
    Some(Facts::probe(&quiet, world_size))
}

fn differs_by_node(error: &config::ConfigError) -> bool {
    use config::ConfigError::{ModuleNotFound, Named, NotFound, Read};
    matches!(
        error,
        NotFound { .. } | Read { .. } | ModuleNotFound { .. } | Named { .. }
    )
}
