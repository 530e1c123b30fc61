//! What a process of the run does, from launch to exit code.
//!
//! [`run_train`] joins the world, takes the settings of rank 0, and runs this rank's role ([`roles`]):
//! the head ([`wiring`] puts it together, [`head`] is its loop), a trainer under its lead ([`trainer_rank`],
//! [`team`]) or an engine replica ([`engine_rank`]).
//!
//! | Exit code | Meaning |
//! |---|---|
//! | 0 | the last step was made and is in a published checkpoint |
//! | 85 | stopped by a signal before the last step; the same command goes on |
//! | 1 | failed; the message says why, and the same command goes on from the last checkpoint |

#[cfg(feature = "torch")]
pub mod checkpointing;
#[cfg(feature = "torch")]
pub mod control;
#[cfg(feature = "torch")]
pub mod engine_rank;
#[cfg(feature = "torch")]
pub mod head;
#[cfg(feature = "torch")]
pub mod placement;
#[cfg(feature = "torch")]
pub mod report;
pub mod roles;
pub mod run_lock;
pub mod serving;
pub mod signals;
#[cfg(feature = "torch")]
pub mod stages;
#[cfg(feature = "torch")]
pub mod team;
#[cfg(feature = "torch")]
pub mod trainer_rank;
pub mod validation;
#[cfg(feature = "torch")]
pub mod wiring;

#[cfg(feature = "torch")]
pub use launch::run_train;

#[cfg(feature = "torch")]
mod launch {
    use super::{
        engine_rank,
        roles::RoleMap,
        signals::{Answers, StopFlag},
        trainer_rank, wiring,
    };
    use crate::{
        base::error_chain,
        comm::{launch_world, Communicator},
        config::{settings::Settings, Loaded},
        observe::{logging, Attempt, Redactor},
    };
    use anyhow::Context;
    use serde::{Deserialize, Serialize};
    use std::{path::PathBuf, process::ExitCode, sync::Arc, time::Duration};

    /// All ranks have started and read their files within this time.
    const START_DEADLINE: Duration = Duration::from_secs(300);

    /// Runs this process's part of a training run whose checks have passed.
    pub fn run_train(loaded: &Loaded) -> anyhow::Result<ExitCode> {
        // On every rank: Slurm signals all tasks of a step. Engine ranks go on until the head stops them.
        let stop = StopFlag::install(Answers::TRAINING).context("cannot install signal handlers")?;
        let world = launch_world()?;
        let (rank, size) = (world.comm.rank(), world.comm.size());
        let outcome = run_rank(loaded, &world.comm, stop);
        match outcome {
            Ok(code) => {
                world.shutdown()?;
                Ok(code)
            }
            Err(error) if size > 1 => {
                // The other ranks wait for this one: without it the job only burns its allocation.
                eprintln!("[FATAL] rank {rank} of {size}: {}", error_chain(error.as_ref()));
                world.abort(1)
            }
            Err(error) => Err(error),
        }
    }

    fn run_rank(loaded: &Loaded, comm: &Arc<dyn Communicator>, stop: StopFlag) -> anyhow::Result<ExitCode> {
        let run = run_of_rank_0(&loaded.settings, comm)?;
        let (settings, rank) = (&run.settings, comm.rank());
        logging::start(&run.attempt, rank, Redactor::global().clone())?;
        let roles = RoleMap::new(settings.run.training_mode, comm.size(), settings.train_ranks());
        if rank == 0 {
            wiring::run_head(settings, &run.attempt, comm, &roles, stop)
        } else if roles.trainer_ranks.contains(&rank) {
            trainer_rank::run(settings, comm.clone(), &roles)
        } else {
            engine_rank::run(settings, comm.clone())
        }
    }

    /// What all ranks must agree on.
    #[derive(Serialize, Deserialize)]
    struct Run {
        settings: Settings,
        /// Folder of this attempt's messages.
        attempt: PathBuf,
    }

    /// `$(date …)` and the environment may differ between nodes: what rank 0 resolved is the run.
    fn run_of_rank_0(own: &Settings, comm: &Arc<dyn Communicator>) -> anyhow::Result<Run> {
        let mut bytes = Vec::new();
        if comm.rank() == 0 {
            let logs = &own.paths.logs;
            let attempt = Attempt::start(logs, &own.run.exp_name)
                .with_context(|| format!("LOG_DIR {}", logs.display()))?;
            bytes = serde_json::to_vec(&Run {
                settings: own.clone(),
                attempt: attempt.folder,
            })?;
        }
        comm.broadcast("the settings of rank 0", 0, &mut bytes, START_DEADLINE)?;
        serde_json::from_slice(&bytes)
            .context("the settings of rank 0 are not readable here; do all ranks run the same build?")
    }
}
