//! Workers: keep a number of trials running until the plan is finished or a stop is asked for.
//!
//! ```text
//! LeaseTable ──lease──> attempt (TrialRunner) ──end──> TrialSink ──> lease done
//!      ▲                    │ failed: back to the table, or dropped when no attempt is left
//!      └── heartbeat ───────┘ unwanted or lost: cancelled
//! ```
//!
//! - An end that the sink cannot store (a full disk) is kept and submitted again with growing pauses. Its trial
//!   stays leased meanwhile, so it is neither lost nor run twice.
//! - A stop cancels the running trials and gives their leases back; no attempt is used up.
//! - Sandboxes of cancelled trials are deleted before [`run_workers`] returns.

use super::lease::{AfterFailure, Grant, Lease, LeaseId, LeaseTable, Standing};
use super::task::{IndexError, TaskIndex, TaskSpec};
use super::trial::{AttemptEnd, AttemptFailure, TrialRunner};
use crate::base::{
    DropReason, Purpose, SinkError, Submitted, Trajectory, TrialAssignment, TrialEnd, TrialKey, TrialSink,
};
use std::{
    collections::HashMap,
    sync::Arc,
    time::{Duration, Instant},
};
use tokio::{
    sync::watch,
    task::{self, JoinSet},
};

/// Runs attempts for the workers.
#[async_trait::async_trait]
pub trait AttemptRunner: Send + Sync {
    /// Runs one attempt; ends it soon after `cancel` turned true.
    async fn run(
        &self,
        assignment: &TrialAssignment,
        task: &TaskSpec,
        cancel: watch::Receiver<bool>,
    ) -> AttemptEnd;
}

#[async_trait::async_trait]
impl AttemptRunner for TrialRunner {
    async fn run(
        &self,
        assignment: &TrialAssignment,
        task: &TaskSpec,
        cancel: watch::Receiver<bool>,
    ) -> AttemptEnd {
        TrialRunner::run(self, assignment, task, cancel).await
    }
}

/// The indexes that assignments refer to by row.
#[derive(Clone, Debug)]
pub struct TaskIndexes {
    /// Rows of training trials (`TRAIN_FILES`).
    pub train: Arc<TaskIndex>,
    /// Rows of validation trials (`VAL_FILES`); the training index where there is none.
    pub val: Option<Arc<TaskIndex>>,
}

impl TaskIndexes {
    /// Loads the task of an assignment.
    pub fn load(&self, assignment: &TrialAssignment) -> Result<TaskSpec, IndexError> {
        let index = match (assignment.key.purpose, &self.val) {
            (Purpose::Val { .. }, Some(val)) => val,
            _ => &self.train,
        };
        index.load(assignment.row)
    }
}

/// How the workers work.
#[derive(Clone, Debug)]
pub struct WorkersConfig {
    /// Trials in flight (`N_CONCURRENT`), at least 1.
    pub n_concurrent: usize,
    /// Owner of the leases.
    pub owner: String,
    /// First pause after a sink error; doubles up to `submit_pause_max`.
    pub submit_pause: Duration,
    /// Longest pause between two tries.
    pub submit_pause_max: Duration,
}

impl WorkersConfig {
    /// With pauses from half a second to 30 seconds.
    pub fn new(n_concurrent: usize, owner: impl Into<String>) -> Self {
        Self {
            n_concurrent,
            owner: owner.into(),
            submit_pause: Duration::from_millis(500),
            submit_pause_max: Duration::from_secs(30),
        }
    }
}

/// Why a trial was cancelled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CancelReason {
    /// Its result is no longer wanted; it was submitted as dropped.
    Unwanted,
    /// Its lease ran out; somebody else has the trial.
    LeaseLost,
    /// The workers stop; the trial will be leased again.
    Stopping,
}

/// What happens to trials, for progress and journal.
#[derive(Debug)]
pub enum WorkerEvent<'a> {
    /// An attempt starts.
    Started {
        /// The attempt.
        assignment: &'a TrialAssignment,
        /// Task name.
        task: &'a str,
    },
    /// A trial ended with a verdict and is durable.
    Finished {
        /// The result.
        trajectory: &'a Trajectory,
        /// What the sink made of it.
        submitted: Submitted,
    },
    /// A trial ended without a verdict and its drop is durable.
    Dropped {
        /// [`TrialEnd::Dropped`].
        end: &'a TrialEnd,
        /// What the sink made of it.
        submitted: Submitted,
    },
    /// An attempt failed and the trial will run again.
    Retried {
        /// What failed.
        failure: &'a AttemptFailure,
        /// The next attempt.
        next: &'a TrialAssignment,
    },
    /// An attempt was cancelled.
    Cancelled {
        /// The attempt.
        assignment: &'a TrialAssignment,
        /// Why.
        reason: CancelReason,
    },
    /// An end could not be stored and will be submitted again.
    SinkFailed {
        /// What went wrong.
        error: &'a SinkError,
        /// The pause before the next try.
        retry_in: Duration,
    },
    /// A worker panicked; its trial goes back to the table.
    Panicked {
        /// The panic.
        detail: &'a str,
    },
}

/// Receives events; called from many tasks.
pub type OnEvent = Arc<dyn Fn(&WorkerEvent<'_>) + Send + Sync>;

/// Why [`run_workers`] returned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WorkersEnd {
    /// Every trial of the plan has ended.
    Finished,
    /// The stop signal came.
    Stopped,
}

/// What every worker needs.
struct Shared {
    config: WorkersConfig,
    leases: Arc<LeaseTable>,
    runner: Arc<dyn AttemptRunner>,
    tasks: TaskIndexes,
    sink: Arc<dyn TrialSink>,
    stop: watch::Receiver<bool>,
    on_event: OnEvent,
}

/// The end could not be made durable before the workers were stopped.
struct Undelivered;

/// Runs trials until the plan is finished or `stop` turns true (or its sender is dropped). All running
/// trials have ended, and their sandboxes are deleted, when it returns.
pub async fn run_workers(
    config: WorkersConfig,
    leases: Arc<LeaseTable>,
    runner: Arc<dyn AttemptRunner>,
    tasks: TaskIndexes,
    sink: Arc<dyn TrialSink>,
    stop: watch::Receiver<bool>,
    on_event: OnEvent,
) -> WorkersEnd {
    let mut stop_signal = stop.clone();
    let shared = Arc::new(Shared {
        config,
        leases,
        runner,
        tasks,
        sink,
        stop,
        on_event,
    });
    let mut running = JoinSet::new();
    let mut held: HashMap<task::Id, LeaseId> = HashMap::new();
    loop {
        shared.leases.expire(Instant::now());
        // Polled before the table is asked, so that no change between the two is missed.
        let changed = shared.leases.changed();
        tokio::pin!(changed);
        let changed_already = futures::poll!(changed.as_mut()).is_ready();

        let stopping = shared.is_stopping();
        let mut finished = false;
        while !stopping && held.len() < shared.config.n_concurrent.max(1) {
            match shared.leases.acquire(&shared.config.owner, Instant::now()) {
                Grant::Run(lease) => {
                    let worker = running.spawn(work(Arc::clone(&shared), lease));
                    held.insert(worker.id(), lease.id);
                }
                Grant::Wait => break,
                Grant::Finished => {
                    finished = true;
                    break;
                }
            }
        }
        for end in shared.leases.take_drops() {
            running.spawn(submit_ownerless(Arc::clone(&shared), end));
        }
        if running.is_empty() {
            if stopping {
                return WorkersEnd::Stopped;
            }
            if finished {
                return WorkersEnd::Finished;
            }
        }
        if changed_already {
            task::yield_now().await;
            continue;
        }

        let by_time = shared.leases.next_event(Instant::now());
        tokio::select! {
            Some(joined) = running.join_next_with_id() => match joined {
                Ok((id, ())) => {
                    held.remove(&id);
                }
                Err(error) => {
                    shared.tell(&WorkerEvent::Panicked { detail: &error.to_string() });
                    if let Some(lease) = held.remove(&error.id()) {
                        shared.leases.abandon(lease, Instant::now());
                    }
                }
            },
            () = &mut changed => {}
            () = wait_until(by_time) => {}
            _ = stop_signal.wait_for(|stop| *stop), if !stopping => {}
        }
    }
}

async fn wait_until(time: Option<Instant>) {
    match time {
        // A moment more than needed, so that what is due at that time is due afterwards.
        Some(time) => tokio::time::sleep_until((time + Duration::from_millis(5)).into()).await,
        None => std::future::pending().await,
    }
}

/// Runs one leased attempt and brings its end to the sink or back to the table.
async fn work(shared: Arc<Shared>, lease: Lease) {
    let (cancel, cancelled) = watch::channel(false);
    tokio::select! {
        () = attempt_and_conclude(&shared, lease, cancelled) => {}
        () = keep_alive(&shared, lease.id, &cancel) => {}
    }
}

/// Heartbeats for as long as it is polled; turns `cancel` true once the attempt should end.
async fn keep_alive(shared: &Shared, id: LeaseId, cancel: &watch::Sender<bool>) {
    let period = shared.leases.config().time_to_live / 4;
    let mut stop = shared.stop.clone();
    loop {
        let changed = shared.leases.changed();
        tokio::pin!(changed);
        let changed_already = futures::poll!(changed.as_mut()).is_ready();
        let standing = shared.leases.heartbeat(id, Instant::now());
        if standing != Standing::Held || shared.is_stopping() {
            cancel.send_replace(true);
        }
        if changed_already {
            task::yield_now().await;
            continue;
        }
        let cancelling = *cancel.borrow();
        tokio::select! {
            () = &mut changed => {}
            () = tokio::time::sleep(period) => {}
            _ = stop.wait_for(|stop| *stop), if !cancelling => {}
        }
    }
}

async fn attempt_and_conclude(shared: &Arc<Shared>, lease: Lease, cancelled: watch::Receiver<bool>) {
    let assignment = lease.assignment;
    let ended = match load(shared, assignment).await {
        Ok(task) => {
            shared.tell(&WorkerEvent::Started {
                assignment: &assignment,
                task: &task.name,
            });
            let ended = shared.runner.run(&assignment, &task, cancelled).await;
            (ended, task.name)
        }
        Err(detail) => {
            let failure = AttemptFailure {
                assignment,
                task: String::new(),
                reason: DropReason::EnvSetupFailed,
                detail,
            };
            (AttemptEnd::Failed(failure), String::new())
        }
    };
    match ended {
        (AttemptEnd::Finished(trajectory), _) => {
            let end = TrialEnd::Finished(*trajectory);
            match submit(shared, &end).await {
                Ok(submitted) => {
                    shared.leases.done(lease.id);
                    if let TrialEnd::Finished(trajectory) = &end {
                        shared.tell(&WorkerEvent::Finished {
                            trajectory,
                            submitted,
                        });
                    }
                }
                Err(Undelivered) => shared.give_back(lease),
            }
        }
        (AttemptEnd::Failed(failure), _) => {
            match shared.leases.failed(lease.id, failure.clone(), Instant::now()) {
                AfterFailure::Again(next) => shared.tell(&WorkerEvent::Retried {
                    failure: &failure,
                    next: &next,
                }),
                AfterFailure::Drop(end) => submit_drop(shared, lease, end).await,
                AfterFailure::NotHeld => shared.cancelled(&assignment, CancelReason::LeaseLost),
            }
        }
        (AttemptEnd::Unwanted, task) => match shared.leases.heartbeat(lease.id, Instant::now()) {
            Standing::Lost => shared.cancelled(&assignment, CancelReason::LeaseLost),
            Standing::Unwanted => {
                shared.cancelled(&assignment, CancelReason::Unwanted);
                let end = TrialEnd::Dropped {
                    key: assignment.key,
                    attempt: assignment.attempt,
                    task,
                    reason: DropReason::Stale,
                    detail: "its group went on without it while it still ran".to_owned(),
                };
                submit_drop(shared, lease, end).await;
            }
            Standing::Held => shared.give_back(lease),
        },
    }
}

/// Task folders may lie on slow network storage.
async fn load(shared: &Arc<Shared>, assignment: TrialAssignment) -> Result<TaskSpec, String> {
    let shared = Arc::clone(shared);
    match task::spawn_blocking(move || shared.tasks.load(&assignment)).await {
        Ok(Ok(task)) => Ok(task),
        Ok(Err(error)) => Err(error.to_string()),
        Err(error) => Err(format!("loading the task failed: {error}")),
    }
}

async fn submit_drop(shared: &Arc<Shared>, lease: Lease, end: TrialEnd) {
    match submit(shared, &end).await {
        Ok(submitted) => {
            shared.leases.done(lease.id);
            shared.tell(&WorkerEvent::Dropped { end: &end, submitted });
        }
        Err(Undelivered) => shared.give_back(lease),
    }
}

async fn submit_ownerless(shared: Arc<Shared>, end: TrialEnd) {
    let key: TrialKey = end.key();
    match submit(&shared, &end).await {
        Ok(submitted) => {
            shared.leases.drop_submitted(&key);
            shared.tell(&WorkerEvent::Dropped { end: &end, submitted });
        }
        Err(Undelivered) => shared.leases.return_drop(&key),
    }
}

/// Submits until the end is durable or the workers are stopped.
async fn submit(shared: &Arc<Shared>, end: &TrialEnd) -> Result<Submitted, Undelivered> {
    let mut pause = shared.config.submit_pause;
    loop {
        let (sink, copy) = (Arc::clone(&shared.sink), end.clone());
        let error = match task::spawn_blocking(move || sink.submit(copy)).await {
            Ok(Ok(submitted)) => return Ok(submitted),
            Ok(Err(error)) => error,
            Err(panic) => SinkError {
                key: end.key(),
                problem: format!("the sink failed: {panic}"),
                source: None,
            },
        };
        shared.tell(&WorkerEvent::SinkFailed {
            error: &error,
            retry_in: pause,
        });
        let mut stop = shared.stop.clone();
        tokio::select! {
            () = tokio::time::sleep(pause) => {}
            _ = stop.wait_for(|stop| *stop) => return Err(Undelivered),
        }
        pause = (pause * 2).min(shared.config.submit_pause_max);
    }
}

impl Shared {
    fn tell(&self, event: &WorkerEvent<'_>) {
        (self.on_event)(event);
    }

    /// True once stopped; a dropped sender counts.
    fn is_stopping(&self) -> bool {
        *self.stop.borrow() || self.stop.has_changed().is_err()
    }

    fn cancelled(&self, assignment: &TrialAssignment, reason: CancelReason) {
        self.tell(&WorkerEvent::Cancelled { assignment, reason });
    }

    fn give_back(&self, lease: Lease) {
        self.leases.release(lease.id, Instant::now());
        self.cancelled(&lease.assignment, CancelReason::Stopping);
    }
}

#[cfg(test)]
mod tests;
