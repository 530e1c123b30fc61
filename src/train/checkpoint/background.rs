//! A thread that does one job after the other while its owner goes on.

use super::CheckpointError;
use std::{
    path::{Path, PathBuf},
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    thread::JoinHandle,
    time::{Duration, Instant},
};

/// What a job is for, for messages.
pub(super) trait Job: Send + 'static {
    /// Global step.
    fn step(&self) -> u32;
}

struct State<J, R> {
    queued: Option<J>,
    working: Option<u32>,
    results: Vec<R>,
    closed: bool,
    dead: bool,
}

struct Shared<J, R> {
    state: Mutex<State<J, R>>,
    changed: Condvar,
}

impl<J, R> Shared<J, R> {
    fn lock(&self) -> MutexGuard<'_, State<J, R>> {
        // The state is plain data that is valid between any two statements.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The thread's handle. Dropping it lets a queued job be done in the background.
pub(super) struct Background<J, R> {
    shared: Arc<Shared<J, R>>,
    root: PathBuf,
    thread: Option<JoinHandle<()>>,
}

impl<J: Job, R: Send + 'static> Background<J, R> {
    /// Starts the thread. `root` is the folder that it works in, for messages.
    pub(super) fn start(
        name: &str,
        root: &Path,
        work: impl FnMut(J) -> R + Send + 'static,
    ) -> std::io::Result<Self> {
        let shared = Arc::new(Shared {
            state: Mutex::new(State {
                queued: None,
                working: None,
                results: Vec::new(),
                closed: false,
                dead: false,
            }),
            changed: Condvar::new(),
        });
        let thread = std::thread::Builder::new().name(name.to_owned()).spawn({
            let shared = shared.clone();
            move || {
                let _guard = DeathNotice(&*shared);
                run(&shared, work);
            }
        })?;
        Ok(Self {
            shared,
            root: root.to_owned(),
            thread: Some(thread),
        })
    }

    /// Queues a job. Waits at most `deadline` for room.
    pub(super) fn submit(&self, job: J, deadline: Duration) -> Result<(), CheckpointError> {
        let mut state = self.wait(deadline, |state| state.queued.is_none())?;
        state.queued = Some(job);
        self.shared.changed.notify_all();
        Ok(())
    }

    /// Waits until there is nothing to do.
    pub(super) fn idle(&self, deadline: Duration) -> Result<(), CheckpointError> {
        self.wait(deadline, State::is_idle).map(drop)
    }

    /// Adds a result of a job that its owner could not even queue.
    pub(super) fn add(&self, result: R) {
        self.shared.lock().results.push(result);
    }

    /// Results since the last call.
    pub(super) fn results(&self) -> Vec<R> {
        std::mem::take(&mut self.shared.lock().results)
    }

    /// Waits until there is nothing to do, and returns the results.
    pub(super) fn drain(&self, deadline: Duration) -> Result<Vec<R>, CheckpointError> {
        let mut state = self.wait(deadline, State::is_idle)?;
        Ok(std::mem::take(&mut state.results))
    }

    fn wait(
        &self,
        deadline: Duration,
        ready: impl Fn(&State<J, R>) -> bool,
    ) -> Result<MutexGuard<'_, State<J, R>>, CheckpointError> {
        let end = Instant::now() + deadline;
        let mut state = self.shared.lock();
        loop {
            if state.dead {
                return Err(CheckpointError::WriterGone);
            }
            if ready(&state) {
                return Ok(state);
            }
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                let queued = state.queued.as_ref().map(Job::step);
                return Err(CheckpointError::Deadline {
                    step: state.working.or(queued).unwrap_or_default(),
                    root: self.root.clone(),
                    waited: deadline,
                });
            }
            state = self
                .shared
                .changed
                .wait_timeout(state, left)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
    }

    /// Waits for the last job and ends the thread.
    pub(super) fn finish(mut self, deadline: Duration) -> Result<Vec<R>, CheckpointError> {
        let results = self.drain(deadline)?;
        self.close();
        if let Some(thread) = self.thread.take() {
            thread.join().map_err(|_| CheckpointError::WriterGone)?;
        }
        Ok(results)
    }
}

impl<J, R> Background<J, R> {
    fn close(&self) {
        self.shared.lock().closed = true;
        self.shared.changed.notify_all();
    }
}

impl<J, R> State<J, R> {
    fn is_idle(&self) -> bool {
        self.queued.is_none() && self.working.is_none()
    }
}

impl<J, R> Drop for Background<J, R> {
    fn drop(&mut self) {
        self.close();
    }
}

/// Wakes waiters when the thread ends for whatever reason.
struct DeathNotice<'a, J, R>(&'a Shared<J, R>);

impl<J, R> Drop for DeathNotice<'_, J, R> {
    fn drop(&mut self) {
        self.0.lock().dead = true;
        self.0.changed.notify_all();
    }
}

fn run<J: Job, R>(shared: &Shared<J, R>, mut work: impl FnMut(J) -> R) {
    loop {
        let job = {
            let mut state = shared.lock();
            loop {
                if let Some(job) = state.queued.take() {
                    state.working = Some(job.step());
                    break job;
                }
                if state.closed {
                    return;
                }
                state = shared.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
            }
        };
        shared.changed.notify_all();
        let result = work(job);
        let mut state = shared.lock();
        state.working = None;
        state.results.push(result);
        drop(state);
        shared.changed.notify_all();
    }
}
