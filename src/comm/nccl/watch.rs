//! The thread that sees operations of a group end, or not.
//!
//! NCCL itself waits for ever. An operation that does not end within the group's limit, and a group that NCCL
//! reports an error of, is aborted on this rank: what is queued behind it goes on, with memory whose contents are
//! undefined, and every later call of the group is the error that [`LateNotes`] found. A caller notices at its next
//! call at the latest, and a step has several.

use super::{driver, library::Library, Event};
use crate::comm::{late::LateNotes, CommError};
use cudarc::{
    driver::{result::event, sys::CUstream, CudaContext},
    nccl::sys::{ncclComm_t, ncclResult_t},
};
use std::{
    collections::VecDeque,
    ptr::null_mut,
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

/// How often the thread looks while operations are under way.
const POLL: Duration = Duration::from_millis(50);

/// What callers and the watching thread see.
pub struct Shared {
    /// Of the device; a thread that uses the driver makes it its current one.
    pub context: Arc<CudaContext>,
    pub library: &'static Library,
    /// This rank of the world.
    pub rank: u32,
    pub timeout: Duration,
    pub state: Mutex<State>,
    /// An operation was started, or the group is over.
    pub changed: Condvar,
}

pub struct State {
    /// Null once it was aborted.
    pub comm: ncclComm_t,
    pub stream: CUstream,
    /// Operations so far.
    pub started: u64,
    /// Those that were not yet seen to end, oldest first.
    pub running: VecDeque<Running>,
    /// Why the group is of no use any more.
    pub failed: Option<CommError>,
    pub over: bool,
}

// SAFETY: NCCL communicators, streams and events may be used from any thread, one at a time: the mutex
// around the state sees to it.
unsafe impl Send for State {}

pub struct Running {
    pub number: u64,
    pub phase: String,
    pub done: Arc<Event>,
    pub since: Instant,
}

impl Shared {
    pub fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn bind(&self) -> Result<(), String> {
        self.context.bind_to_thread().map_err(driver("use the device"))
    }

    pub fn error(&self, phase: &str, problem: String) -> CommError {
        CommError::Device {
            rank: self.rank,
            phase: phase.to_owned(),
            problem,
        }
    }

    /// Ends the communicator on this rank, without waiting for others.
    pub fn abort(&self, state: &mut State) {
        if !state.comm.is_null() {
            // SAFETY: the communicator is alive, and this is its last use.
            let _ = unsafe { (self.library.abort)(state.comm) };
            state.comm = null_mut();
        }
    }

    /// The life of the thread.
    pub fn watch(&self, mut notes: LateNotes) {
        if let Err(problem) = self.bind() {
            self.lock().failed = Some(self.error("start of NCCL", problem));
            return;
        }
        let mut state = self.lock();
        while !state.over {
            // SAFETY: the events are alive.
            state
                .running
                .retain(|r| unsafe { event::query(r.done.0) }.is_err());
            if state.failed.is_none() {
                if let Err(error) = self.look(&state, &mut notes) {
                    tracing::error!("{error}");
                    state.failed = Some(error);
                    self.abort(&mut state);
                }
            }
            let wait = if state.running.is_empty() {
                Duration::from_secs(3600)
            } else {
                POLL
            };
            state = self
                .changed
                .wait_timeout(state, wait)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
    }

    fn look(&self, state: &State, notes: &mut LateNotes) -> Result<(), CommError> {
        let Some(oldest) = state.running.front() else {
            return Ok(());
        };
        let mut code = ncclResult_t::ncclSuccess;
        // SAFETY: the communicator is alive while nothing failed, and NCCL fills in the code.
        let asked = unsafe { (self.library.async_error)(state.comm, &mut code) };
        for code in [asked, code] {
            if code != ncclResult_t::ncclInProgress {
                let checked = self.library.check(code);
                checked.map_err(|problem| self.error(&oldest.phase, problem))?;
            }
        }
        notes.look(oldest.number, &oldest.phase, oldest.since.elapsed(), self.timeout)
    }
}
