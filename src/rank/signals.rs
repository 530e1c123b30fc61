//! Slurm's signals as a flag that is polled at safe points.
//!
//! SIGUSR1 (`--signal=B:USR1@lead`, forwarded by the batch script), SIGTERM (preemption, `scancel`) and
//! SIGINT (Ctrl-C) ask for an orderly end: the step in progress is finished, a checkpoint is written and
//! the process exits with [`EXIT_REQUEUE`]. SIGINT or SIGTERM once more ends the process at once, says so,
//! and loses nothing that is durable. Slurm, `mpirun` and a batch script may each pass on the same
//! request, so a repetition within [`SAME_REQUEST`] is not a second one. `legorl-rank serve` takes the same
//! signals, with its own words ([`Answers`]).
//!
//! The handler only wakes a thread; everything is decided there.

use signal_hook::{
    consts::{SIGINT, SIGTERM, SIGUSR1},
    iterator::Signals,
};
use std::{
    io::Write,
    sync::{
        atomic::{AtomicBool, Ordering},
        Arc,
    },
    time::{Duration, Instant},
};

/// Exit code after an orderly stop before the last step: the batch script requeues the job.
pub const EXIT_REQUEUE: u8 = 85;

/// Signals that arrive this close together are one request.
pub const SAME_REQUEST: Duration = Duration::from_secs(2);

/// Set once a stop was asked for.
#[derive(Clone, Debug, Default)]
pub struct StopFlag(Arc<AtomicBool>);

/// What is said to the first request and to the one that ends the process.
#[derive(Clone, Copy, Debug)]
pub struct Answers {
    /// What happens before the end.
    pub orderly: &'static str,
    /// What an end at once leaves.
    pub now: &'static str,
}

impl Answers {
    /// Of a training run.
    pub const TRAINING: Self = Self {
        orderly: "the step in progress is finished and a checkpoint is written; once more ends at once",
        now: "ending at once; the same command goes on from the last published checkpoint",
    };
    /// Of a proxy that stands alone.
    pub const SERVING: Self = Self {
        orderly: "new requests are refused and running turns end; once more ends at once",
        now: "ending at once; what open sessions recorded is lost",
    };
}

/// What a signal asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Request {
    /// Finish the step, write a checkpoint, end.
    Orderly,
    /// Already asked for.
    Known,
    /// End now.
    Now,
}

/// Decides what a signal means that arrives at `now`, when the first one arrived at `first`.
fn judge(signal: i32, first: &mut Option<Instant>, now: Instant) -> Request {
    let Some(before) = *first else {
        *first = Some(now);
        return Request::Orderly;
    };
    if signal == SIGUSR1 || now.duration_since(before) < SAME_REQUEST {
        Request::Known
    } else {
        Request::Now
    }
}

fn tell(signal: i32, text: &str) {
    let name = match signal {
        SIGINT => "SIGINT",
        SIGTERM => "SIGTERM",
        _ => "SIGUSR1",
    };
    // Standard error may be gone with the terminal that sent the signal.
    let _ = writeln!(std::io::stderr(), "{name}: {text}");
}

impl StopFlag {
    /// Installs the handlers and the thread that judges signals.
    pub fn install(answers: Answers) -> std::io::Result<Self> {
        let flag = Self::default();
        let mut signals = Signals::new([SIGTERM, SIGINT, SIGUSR1])?;
        let asked = flag.clone();
        std::thread::Builder::new()
            .name("signals".into())
            .spawn(move || {
                let mut first = None;
                for signal in signals.forever() {
                    match judge(signal, &mut first, Instant::now()) {
                        Request::Known => {}
                        Request::Orderly => {
                            asked.set();
                            tell(signal, answers.orderly);
                        }
                        Request::Now => {
                            tell(signal, answers.now);
                            // SAFETY: no preconditions. Exit handlers of MPI and libtorch would wait for
                            // threads that are still at work.
                            unsafe { libc::_exit(128 + signal) };
                        }
                    }
                }
            })?;
        Ok(flag)
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_later_term_or_interrupt_ends_at_once() {
        let begin = Instant::now();
        let at = |secs: u64| begin + Duration::from_secs(secs);
        let mut first = None;
        assert_eq!(judge(SIGTERM, &mut first, at(0)), Request::Orderly);
        assert_eq!(
            judge(SIGTERM, &mut first, at(1)),
            Request::Known,
            "passed on twice"
        );
        assert_eq!(
            judge(SIGUSR1, &mut first, at(30)),
            Request::Known,
            "Slurm's lead signal"
        );
        assert_eq!(judge(SIGTERM, &mut first, at(30)), Request::Now);
        let mut first = None;
        assert_eq!(judge(SIGUSR1, &mut first, at(0)), Request::Orderly);
        assert_eq!(judge(SIGINT, &mut first, at(3)), Request::Now);
    }
}
