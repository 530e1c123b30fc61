//! Slurm's signals as a flag that is polled at safe points. Nothing happens inside a handler.
//!
//! SIGUSR1 (`--signal=B:USR1@lead`, forwarded by the batch script), SIGTERM (preemption, `scancel`) and
//! SIGINT (Ctrl-C) ask for an orderly end: the step in progress is finished, a checkpoint is written and
//! the process exits with [`EXIT_REQUEUE`]. A second SIGINT or SIGTERM ends the process at once; what is
//! durable stays durable.

use signal_hook::consts::{SIGINT, SIGTERM, SIGUSR1};
use std::sync::{
    atomic::{AtomicBool, Ordering},
    Arc,
};

/// Exit code after an orderly stop before the last step: the batch script requeues the job.
pub const EXIT_REQUEUE: u8 = 85;

/// Set once a stop was asked for.
#[derive(Clone, Debug, Default)]
pub struct StopFlag(Arc<AtomicBool>);

impl StopFlag {
    /// Installs the handlers; later calls of the process share nothing with this flag.
    pub fn install() -> std::io::Result<Self> {
        let flag = Arc::new(AtomicBool::new(false));
        for signal in [SIGTERM, SIGINT] {
            // Armed by the first signal: the second one ends the process.
            signal_hook::flag::register_conditional_shutdown(signal, 128 + signal, Arc::clone(&flag))?;
        }
        for signal in [SIGTERM, SIGINT, SIGUSR1] {
            signal_hook::flag::register(signal, Arc::clone(&flag))?;
        }
        Ok(Self(flag))
    }

    /// True once a stop was asked for.
    pub fn is_set(&self) -> bool {
        self.0.load(Ordering::SeqCst)
    }

    /// Asks for a stop from inside the process.
    pub fn set(&self) {
        self.0.store(true, Ordering::SeqCst);
    }
}
