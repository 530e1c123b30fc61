//! Leases: who runs which trial, and until when without a sign of life.
//!
//! ```text
//! plan.next() ──> leased ──────────── done ──> ended (the sink has it)
//!                  │  ▲ ▲                        ▲
//!          failed, │  │ │ acquire                │ drop_submitted
//!          expired │  │ │                        │
//!                  ▼  │ │                        │
//!            plan.retry ──> waiting (not before its time)
//!                  └─ none left ──> dropping ────┘
//! ```
//!
//! Invariant: a trial that the plan has admitted and that has not ended is in exactly one of `leased`, `waiting`
//! and `dropping`. A trial whose result is no longer wanted may be forgotten from `waiting`, since the plan
//! has already counted its end.
//!
//! An owner that loses its lease may still deliver: the sink takes the first end of a trial and tells the others
//! that they are duplicates. The table decides who works, the sink decides what counts.
//!
//! All decisions are synchronous and take the time as an argument.

use super::trial::AttemptFailure;
use crate::base::{DropReason, TrialAssignment, TrialEnd, TrialKey, TrialPlan, TrialPlanStep};
use std::{
    collections::BTreeMap,
    fmt,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};
use tokio::sync::Notify;

/// Names one lease; never used twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LeaseId(u64);

impl fmt::Display for LeaseId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "lease-{}", self.0)
    }
}

/// Times of a table.
#[derive(Clone, Copy, Debug)]
pub struct LeaseConfig {
    /// A lease without a heartbeat for this long is lost.
    pub time_to_live: Duration,
    /// Pause before the first repetition of a failed trial; doubles with every attempt up to a minute, so that
    /// a short outage does not use up all attempts.
    pub retry_delay: Duration,
}

impl Default for LeaseConfig {
    fn default() -> Self {
        Self {
            time_to_live: Duration::from_secs(60),
            retry_delay: Duration::from_secs(1),
        }
    }
}

const RETRY_DELAY_MAX: Duration = Duration::from_secs(60);

/// A trial to run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lease {
    /// For all further calls.
    pub id: LeaseId,
    /// What to run.
    pub assignment: TrialAssignment,
}

/// Answer to [`LeaseTable::acquire`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Grant {
    /// Run this.
    Run(Lease),
    /// Nothing can start now; [`LeaseTable::changed`] or [`LeaseTable::next_event`] tells when to ask again.
    Wait,
    /// Every trial has ended and none will start.
    Finished,
}

/// Answer to [`LeaseTable::heartbeat`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Standing {
    /// Go on; the deadline has moved.
    Held,
    /// The lease ran out and the trial was given away: stop.
    Lost,
    /// The trial's result is no longer wanted: stop, and submit the drop.
    Unwanted,
}

/// Answer to [`LeaseTable::failed`].
#[derive(Clone, Debug, PartialEq)]
pub enum AfterFailure {
    /// The next attempt will be leased in its turn.
    Again(TrialAssignment),
    /// No attempt is left: submit this end, then call [`LeaseTable::done`].
    Drop(TrialEnd),
    /// The lease was lost before; the trial is somebody else's.
    NotHeld,
}

/// A lease that ran out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Expired {
    /// The lease.
    pub lease: Lease,
    /// Who had it.
    pub owner: String,
}

/// Sizes of the table.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LeaseStatus {
    /// Trials being run.
    pub leased: usize,
    /// Trials waiting for their next attempt.
    pub waiting: usize,
    /// Drops that are not yet durable.
    pub dropping: usize,
}

struct Held {
    assignment: TrialAssignment,
    owner: String,
    deadline: Instant,
}

struct Waiting {
    assignment: TrialAssignment,
    not_before: Instant,
}

struct Dropping {
    end: TrialEnd,
    taken: bool,
}

#[derive(Default)]
struct State {
    next_id: u64,
    leased: BTreeMap<LeaseId, Held>,
    waiting: BTreeMap<TrialKey, Waiting>,
    dropping: BTreeMap<TrialKey, Dropping>,
}

/// The table. See the module head.
pub struct LeaseTable {
    plan: Arc<dyn TrialPlan>,
    config: LeaseConfig,
    state: Mutex<State>,
    changed: Notify,
}

impl LeaseTable {
    /// An empty table over a plan.
    pub fn new(plan: Arc<dyn TrialPlan>, config: LeaseConfig) -> Self {
        Self {
            plan,
            config,
            state: Mutex::default(),
            changed: Notify::new(),
        }
    }

    /// The plan behind the table.
    pub fn plan(&self) -> &Arc<dyn TrialPlan> {
        &self.plan
    }

    /// The times of the table.
    pub fn config(&self) -> LeaseConfig {
        self.config
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // A panic under the lock leaves complete entries: every change is one map operation after the other.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Leases the next trial to `owner`: repetitions first, in the order of their keys, then the plan's next.
    pub fn acquire(&self, owner: &str, now: Instant) -> Grant {
        self.expire(now);
        let mut state = self.lock();
        state.waiting.retain(|key, _| self.plan.is_wanted(key));
        let due = state
            .waiting
            .iter()
            .find(|(_, waiting)| waiting.not_before <= now)
            .map(|(key, _)| *key);
        let assignment = match due.and_then(|key| state.waiting.remove(&key)) {
            Some(waiting) => waiting.assignment,
            None => match self.plan.next() {
                TrialPlanStep::Run(assignment) => assignment,
                TrialPlanStep::Wait => return Grant::Wait,
                TrialPlanStep::Finished => {
                    let empty =
                        state.leased.is_empty() && state.waiting.is_empty() && state.dropping.is_empty();
                    return if empty { Grant::Finished } else { Grant::Wait };
                }
            },
        };
        let id = LeaseId(state.next_id);
        state.next_id += 1;
        state.leased.insert(
            id,
            Held {
                assignment,
                owner: owner.to_owned(),
                deadline: now + self.config.time_to_live,
            },
        );
        state.debug_check();
        Grant::Run(Lease { id, assignment })
    }

    /// A sign of life. A lease whose deadline has passed is held as long as nobody took note of it.
    pub fn heartbeat(&self, id: LeaseId, now: Instant) -> Standing {
        let mut state = self.lock();
        let Some(held) = state.leased.get_mut(&id) else {
            return Standing::Lost;
        };
        held.deadline = now + self.config.time_to_live;
        if self.plan.is_wanted(&held.assignment.key) {
            Standing::Held
        } else {
            Standing::Unwanted
        }
    }

    /// The trial's end is durable. Gives false for a lease that was lost before.
    pub fn done(&self, id: LeaseId) -> bool {
        let held = self.lock().leased.remove(&id).is_some();
        self.changed.notify_waiters();
        held
    }

    /// The attempt ended without a verdict. The lease ends, unless the answer is [`AfterFailure::Drop`].
    pub fn failed(&self, id: LeaseId, failure: AttemptFailure, now: Instant) -> AfterFailure {
        let mut state = self.lock();
        let Some(held) = state.leased.get(&id) else {
            return AfterFailure::NotHeld;
        };
        let assignment = held.assignment;
        let Some(next) = self.plan.retry(&assignment) else {
            return AfterFailure::Drop(failure.into_drop());
        };
        state.leased.remove(&id);
        state.wait(next, now + self.delay(&next));
        state.debug_check();
        drop(state);
        self.changed.notify_waiters();
        AfterFailure::Again(next)
    }

    /// Gives a trial back unharmed: the same attempt will be leased again. For an owner that stops in order.
    pub fn release(&self, id: LeaseId, now: Instant) {
        let mut state = self.lock();
        if let Some(held) = state.leased.remove(&id) {
            state.wait(held.assignment, now);
        }
        state.debug_check();
        drop(state);
        self.changed.notify_waiters();
    }

    /// Treats a lease as run out now: its owner is known to be gone.
    pub fn abandon(&self, id: LeaseId, now: Instant) {
        let mut state = self.lock();
        if let Some(held) = state.leased.remove(&id) {
            self.give_away(&mut state, id, held, now);
        }
        state.debug_check();
        drop(state);
        self.changed.notify_waiters();
    }

    /// Takes away the leases whose deadline has passed.
    pub fn expire(&self, now: Instant) -> Vec<Expired> {
        let mut state = self.lock();
        let late: Vec<_> = state
            .leased
            .iter()
            .filter(|(_, held)| held.deadline <= now)
            .map(|(id, _)| *id)
            .collect();
        let mut expired = Vec::new();
        for id in late {
            let Some(held) = state.leased.remove(&id) else {
                continue;
            };
            expired.push(Expired {
                lease: Lease {
                    id,
                    assignment: held.assignment,
                },
                owner: held.owner.clone(),
            });
            self.give_away(&mut state, id, held, now);
        }
        state.debug_check();
        drop(state);
        if !expired.is_empty() {
            self.changed.notify_waiters();
        }
        expired
    }

    fn give_away(&self, state: &mut State, id: LeaseId, held: Held, now: Instant) {
        let key = held.assignment.key;
        if !self.plan.is_wanted(&key) {
            return;
        }
        match self.plan.retry(&held.assignment) {
            Some(next) => state.wait(next, now + self.delay(&next)),
            None => {
                let end = TrialEnd::Dropped {
                    key,
                    attempt: held.assignment.attempt,
                    task: String::new(),
                    reason: DropReason::LeaseLost,
                    detail: format!(
                        "`{}` gave no sign of life on {id} for {} s, and no attempt is left",
                        held.owner,
                        self.config.time_to_live.as_secs()
                    ),
                };
                state.dropping.insert(key, Dropping { end, taken: false });
            }
        }
    }

    fn delay(&self, next: &TrialAssignment) -> Duration {
        let doublings = next.attempt.saturating_sub(1).min(16);
        (self.config.retry_delay * (1 << doublings)).min(RETRY_DELAY_MAX)
    }

    /// Drops of trials that have no owner left. The caller submits each and then calls
    /// [`LeaseTable::drop_submitted`]; one that could not be submitted goes back with [`LeaseTable::return_drop`].
    pub fn take_drops(&self) -> Vec<TrialEnd> {
        self.lock()
            .dropping
            .values_mut()
            .filter(|dropping| !dropping.taken)
            .map(|dropping| {
                dropping.taken = true;
                dropping.end.clone()
            })
            .collect()
    }

    /// The drop is durable.
    pub fn drop_submitted(&self, key: &TrialKey) {
        self.lock().dropping.remove(key);
        self.changed.notify_waiters();
    }

    /// The drop could not be submitted; [`LeaseTable::take_drops`] gives it out again.
    pub fn return_drop(&self, key: &TrialKey) {
        if let Some(dropping) = self.lock().dropping.get_mut(key) {
            dropping.taken = false;
        }
        self.changed.notify_waiters();
    }

    /// The next moment after `now` at which time alone changes something: a lease runs out or a repetition
    /// becomes due.
    pub fn next_event(&self, now: Instant) -> Option<Instant> {
        let state = self.lock();
        let deadlines = state.leased.values().map(|held| held.deadline);
        let due = state.waiting.values().map(|waiting| waiting.not_before);
        deadlines.chain(due).filter(|time| *time > now).min()
    }

    /// Sizes.
    pub fn status(&self) -> LeaseStatus {
        let state = self.lock();
        LeaseStatus {
            leased: state.leased.len(),
            waiting: state.waiting.len(),
            dropping: state.dropping.len(),
        }
    }

    /// Returns when another call to the table may answer differently. To miss nothing, poll the future once
    /// before asking the table.
    pub async fn changed(&self) {
        tokio::select! {
            () = self.changed.notified() => {}
            () = self.plan.changed() => {}
        }
    }
}

impl State {
    fn wait(&mut self, assignment: TrialAssignment, not_before: Instant) {
        self.waiting.insert(
            assignment.key,
            Waiting {
                assignment,
                not_before,
            },
        );
    }

    /// The invariant of the module head, as far as the table alone can see it.
    fn debug_check(&self) {
        if cfg!(debug_assertions) {
            let mut seen = std::collections::BTreeSet::new();
            let leased = self.leased.values().map(|held| &held.assignment.key);
            for key in leased.chain(self.waiting.keys()).chain(self.dropping.keys()) {
                assert!(seen.insert(*key), "trial {key} is in two places");
            }
        }
    }
}

#[cfg(test)]
pub(super) mod tests;
