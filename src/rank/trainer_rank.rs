//! A rank that trains under the head's lead, and in a colocated pool serves an engine replica as well.

use super::{engine_rank, roles::RoleMap, team};
use crate::{comm::Communicator, config::settings::Settings};
use anyhow::{bail, Context};
use std::{process::ExitCode, sync::Arc, thread::JoinHandle};

/// Works until the head says that the run is over.
pub fn run(settings: &Settings, comm: Arc<dyn Communicator>, roles: &RoleMap) -> anyhow::Result<ExitCode> {
    let engine = roles
        .engine_ranks
        .contains(&comm.rank())
        .then(|| start_engine(settings, &comm))
        .transpose()?;
    let is_serving = || match &engine {
        Some(engine) if engine.is_finished() => bail!("the engine replica of this rank ended early"),
        _ => Ok(()),
    };
    let trained = team::follow(settings, &comm, &roles.trainer_ranks, is_serving);
    match engine {
        // Its error says more than that it ended.
        Some(engine) if trained.is_ok() || engine.is_finished() => match engine.join() {
            Ok(served) => served.and_then(|_| trained)?,
            Err(_) => bail!("the thread of the engine replica panicked"),
        },
        _ => trained?,
    }
    Ok(ExitCode::SUCCESS)
}

/// The replica on a thread of its own: it generates while this rank waits for a batch.
fn start_engine(
    settings: &Settings,
    comm: &Arc<dyn Communicator>,
) -> anyhow::Result<JoinHandle<anyhow::Result<ExitCode>>> {
    let (settings, comm) = (settings.clone(), comm.clone());
    std::thread::Builder::new()
        .name("engine-replica".to_owned())
        .spawn(move || engine_rank::run(&settings, comm))
        .context("no thread for the engine replica")
}
