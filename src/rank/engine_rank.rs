//! A rank that serves an engine replica and nothing else.

use super::{placement::placement, stages, wiring::engine_config};
use crate::{
    comm::Communicator,
    config::settings::Settings,
    serve::engine::{native::NativeEngine, remote::EngineServer},
};
use anyhow::Context;
use std::{process::ExitCode, sync::Arc};
use tokio::runtime::Builder;

/// Serves until the head says that the run is over. The weights of `MODEL_PATH` are only the start: the
/// head sends its own before the first trial.
pub fn run(settings: &Settings, comm: Arc<dyn Communicator>) -> anyhow::Result<ExitCode> {
    let rank = comm.rank();
    let place = placement(settings)?;
    tracing::info!("{}", place.describe());
    let engine = NativeEngine::start(engine_config(settings, place), &settings.model.path)
        .with_context(|| format!("engine replica on rank {rank}"))?;
    let runtime = Builder::new_multi_thread()
        .worker_threads(1)
        .thread_name("engine-server")
        .enable_all()
        .build()
        .context("cannot start the engine server's thread")?;
    EngineServer::new(comm, 0, engine, runtime.handle().clone(), stages::remote())?.run()?;
    Ok(ExitCode::SUCCESS)
}
