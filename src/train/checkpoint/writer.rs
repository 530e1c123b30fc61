//! Writing in the background.
//!
//! One thread, one checkpoint at a time. [`CheckpointWriter::submit`] returns as soon as the snapshot is
//! queued; only when the previous one is still being written does it wait, with a deadline. A failed
//! write is reported and the run goes on: older checkpoints stay, and the next save tries again.

use super::{CheckpointContent, CheckpointError, CheckpointStore, CommittedCheckpoint};
use std::{
    path::PathBuf,
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    thread::JoinHandle,
    time::{Duration, Instant},
};

/// How a write ended.
#[derive(Debug)]
pub struct WriteReport {
    /// Global step.
    pub step: u32,
    /// The published checkpoint, or why there is none.
    pub result: Result<CommittedCheckpoint, CheckpointError>,
    /// Duration of the write.
    pub elapsed: Duration,
    /// Published steps after removal of surplus ones, oldest first; empty after a failure.
    pub kept: Vec<u32>,
}

#[derive(Default)]
struct State {
    queued: Option<CheckpointContent>,
    writing: Option<u32>,
    reports: Vec<WriteReport>,
    closed: bool,
    dead: bool,
}

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        // The state is plain data that is valid between any two statements.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The writer thread's handle. Dropping it lets a queued write finish in the background.
pub struct CheckpointWriter {
    shared: Arc<Shared>,
    root: PathBuf,
    thread: Option<JoinHandle<()>>,
}

impl CheckpointWriter {
    /// Starts the thread. `keep` is `MAX_CKPT_TO_KEEP`; `None` keeps all.
    pub fn start(store: CheckpointStore, keep: Option<usize>) -> std::io::Result<Self> {
        let shared = Arc::new(Shared::default());
        let root = store.root().to_owned();
        let thread = std::thread::Builder::new()
            .name("checkpoint-writer".into())
            .spawn({
                let shared = shared.clone();
                move || {
                    let _guard = DeathNotice(&shared);
                    run(&store, keep, &shared);
                }
            })?;
        Ok(Self {
            shared,
            root,
            thread: Some(thread),
        })
    }

    /// Queues a snapshot. Waits at most `deadline` for room.
    pub fn submit(&self, content: CheckpointContent, deadline: Duration) -> Result<(), CheckpointError> {
        let mut state = self.wait(deadline, |state| state.queued.is_none())?;
        state.queued = Some(content);
        self.shared.changed.notify_all();
        Ok(())
    }

    /// Ended writes since the last call.
    pub fn reports(&self) -> Vec<WriteReport> {
        std::mem::take(&mut self.shared.lock().reports)
    }

    /// Waits until nothing is queued or being written, and returns the reports.
    pub fn drain(&self, deadline: Duration) -> Result<Vec<WriteReport>, CheckpointError> {
        let mut state = self.wait(deadline, |state| {
            state.queued.is_none() && state.writing.is_none()
        })?;
        Ok(std::mem::take(&mut state.reports))
    }

    fn wait(
        &self,
        deadline: Duration,
        ready: impl Fn(&State) -> bool,
    ) -> Result<MutexGuard<'_, State>, CheckpointError> {
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
                let queued = state.queued.as_ref().map(|c| c.state.global_step);
                return Err(CheckpointError::Deadline {
                    step: state.writing.or(queued).unwrap_or_default(),
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

    /// Waits for the last write and ends the thread.
    pub fn finish(mut self, deadline: Duration) -> Result<Vec<WriteReport>, CheckpointError> {
        let reports = self.drain(deadline)?;
        self.close();
        if let Some(thread) = self.thread.take() {
            thread.join().map_err(|_| CheckpointError::WriterGone)?;
        }
        Ok(reports)
    }

    fn close(&self) {
        self.shared.lock().closed = true;
        self.shared.changed.notify_all();
    }
}

impl Drop for CheckpointWriter {
    fn drop(&mut self) {
        self.close();
    }
}

/// Wakes waiters when the thread ends for whatever reason.
struct DeathNotice<'a>(&'a Shared);

impl Drop for DeathNotice<'_> {
    fn drop(&mut self) {
        self.0.lock().dead = true;
        self.0.changed.notify_all();
    }
}

fn run(store: &CheckpointStore, keep: Option<usize>, shared: &Shared) {
    loop {
        let content = {
            let mut state = shared.lock();
            loop {
                if let Some(content) = state.queued.take() {
                    state.writing = Some(content.state.global_step);
                    break content;
                }
                if state.closed {
                    return;
                }
                state = shared.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
            }
        };
        shared.changed.notify_all();
        let report = write(store, keep, &content);
        // The snapshot's memory is given back before anyone is told that the write is over.
        drop(content);
        let mut state = shared.lock();
        state.writing = None;
        state.reports.push(report);
        drop(state);
        shared.changed.notify_all();
    }
}

fn write(store: &CheckpointStore, keep: Option<usize>, content: &CheckpointContent) -> WriteReport {
    let step = content.state.global_step;
    let started = Instant::now();
    let result = store.write(content);
    let mut kept = Vec::new();
    match &result {
        Ok(published) => {
            tracing::info!(step, path = %published.path.display(), bytes = published.size_bytes, "checkpoint published");
            match store.retain(keep.unwrap_or(usize::MAX)) {
                Ok(steps) => kept = steps,
                Err(error) => tracing::warn!(step, %error, "cannot remove surplus checkpoints"),
            }
        }
        Err(error) => tracing::error!(step, %error, "checkpoint was not written; training goes on"),
    }
    WriteReport {
        step,
        result,
        elapsed: started.elapsed(),
        kept,
    }
}
