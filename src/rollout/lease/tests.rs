//! Lives of leases, and that every admitted trial ends once.

use super::*;
use crate::base::{GroupId, Purpose, Submitted};
use proptest::prelude::*;
use std::collections::{BTreeMap, BTreeSet};

/// A plan over a fixed number of trials that knows which ones ended.
pub(in crate::rollout) struct Plan {
    state: Mutex<PlanState>,
    num_trials: u64,
    max_attempts: u32,
    changed: Notify,
}

#[derive(Default)]
struct PlanState {
    admitted: u64,
    ended: BTreeSet<TrialKey>,
    cut: BTreeSet<TrialKey>,
}

impl Plan {
    pub(in crate::rollout) fn new(num_trials: u64, max_attempts: u32) -> Arc<Self> {
        Arc::new(Self {
            state: Mutex::default(),
            num_trials,
            max_attempts,
            changed: Notify::new(),
        })
    }

    /// What a sink does: the first end of a trial counts, later ones do not.
    pub(in crate::rollout) fn submit(&self, key: TrialKey) -> Submitted {
        let mut state = self.state.lock().unwrap();
        let submitted = if state.cut.contains(&key) {
            Submitted::CutOff
        } else if state.ended.insert(key) {
            Submitted::Stored
        } else {
            Submitted::Duplicate
        };
        drop(state);
        self.changed.notify_waiters();
        submitted
    }

    /// The trial's group goes on without it.
    pub(in crate::rollout) fn cut(&self, key: TrialKey) {
        self.state.lock().unwrap().cut.insert(key);
        self.changed.notify_waiters();
    }
}

#[async_trait::async_trait]
impl TrialPlan for Plan {
    fn next(&self) -> TrialPlanStep {
        let mut state = self.state.lock().unwrap();
        if state.admitted == self.num_trials {
            return TrialPlanStep::Finished;
        }
        state.admitted += 1;
        TrialPlanStep::Run(TrialAssignment {
            key: key(state.admitted - 1),
            attempt: 0,
            row: 0,
            seed: 0,
        })
    }

    fn retry(&self, failed: &TrialAssignment) -> Option<TrialAssignment> {
        (failed.attempt + 1 < self.max_attempts).then(|| TrialAssignment {
            attempt: failed.attempt + 1,
            ..*failed
        })
    }

    fn is_wanted(&self, key: &TrialKey) -> bool {
        let state = self.state.lock().unwrap();
        !state.ended.contains(key) && !state.cut.contains(key)
    }

    async fn changed(&self) {
        self.changed.notified().await;
    }
}

pub(in crate::rollout) fn key(n: u64) -> TrialKey {
    TrialKey {
        purpose: Purpose::Train,
        group: GroupId(n),
        sample: 0,
    }
}

fn config() -> LeaseConfig {
    LeaseConfig {
        time_to_live: Duration::from_secs(10),
        retry_delay: Duration::from_secs(2),
    }
}

fn failure(lease: &Lease) -> AttemptFailure {
    AttemptFailure {
        assignment: lease.assignment,
        task: "t".to_owned(),
        reason: DropReason::EngineFailed,
        detail: "replica lost".to_owned(),
    }
}

fn granted(grant: Grant) -> Lease {
    match grant {
        Grant::Run(lease) => lease,
        other => panic!("{other:?} instead of a lease"),
    }
}

#[test]
fn a_silent_owner_loses_the_trial_and_hears_of_it() {
    let table = LeaseTable::new(Plan::new(1, 3), config());
    let start = Instant::now();
    let at = |secs| start + Duration::from_secs(secs);
    let first = granted(table.acquire("a", at(0)));
    assert_eq!(table.heartbeat(first.id, at(8)), Standing::Held);
    // 8 + 10 s have not passed yet.
    assert_eq!(table.acquire("b", at(17)), Grant::Wait);
    let expired = table.expire(at(18));
    assert_eq!(
        expired,
        [Expired {
            lease: first,
            owner: "a".to_owned()
        }]
    );
    assert_eq!(table.heartbeat(first.id, at(19)), Standing::Lost);
    assert_eq!(
        table.acquire("b", at(19)),
        Grant::Wait,
        "the pause before a repetition"
    );
    let second = granted(table.acquire("b", at(20)));
    assert_eq!((second.assignment.key, second.assignment.attempt), (key(0), 1));
    assert!(!table.done(first.id));
    assert!(table.done(second.id));
    assert_eq!(table.acquire("b", at(21)), Grant::Finished);
}

#[test]
fn used_up_attempts_end_in_a_drop_with_its_reason() {
    let table = LeaseTable::new(Plan::new(2, 1), config());
    let now = Instant::now();
    let (one, two) = (granted(table.acquire("a", now)), granted(table.acquire("a", now)));

    let AfterFailure::Drop(end) = table.failed(one.id, failure(&one), now) else {
        panic!("no attempt is left");
    };
    assert!(matches!(
        &end,
        TrialEnd::Dropped { reason: DropReason::EngineFailed, detail, .. } if detail == "replica lost"
    ));
    assert_eq!(table.status().leased, 2, "held until the drop is durable");
    assert!(table.done(one.id));

    table.abandon(two.id, now);
    let drops = table.take_drops();
    assert!(matches!(
        drops.as_slice(),
        [TrialEnd::Dropped { key: k, reason: DropReason::LeaseLost, .. }] if *k == key(1)
    ));
    assert!(table.take_drops().is_empty(), "given out once");
    assert_eq!(
        table.acquire("a", now),
        Grant::Wait,
        "not finished before the drop is durable"
    );
    table.return_drop(&key(1));
    assert_eq!(table.take_drops().len(), 1);
    table.drop_submitted(&key(1));
    assert_eq!(table.acquire("a", now), Grant::Finished);
}

#[test]
fn a_released_trial_keeps_its_attempt() {
    let table = LeaseTable::new(Plan::new(1, 1), config());
    let now = Instant::now();
    let lease = granted(table.acquire("a", now));
    table.release(lease.id, now);
    assert_eq!(granted(table.acquire("b", now)).assignment, lease.assignment);
}

#[test]
fn a_cut_trial_is_told_to_stop_and_not_repeated() {
    let plan = Plan::new(2, 5);
    let table = LeaseTable::new(Arc::clone(&plan) as Arc<dyn TrialPlan>, config());
    let now = Instant::now();
    let running = granted(table.acquire("a", now));
    let failed = granted(table.acquire("a", now));
    table.failed(failed.id, failure(&failed), now);
    plan.cut(key(0));
    plan.cut(key(1));
    assert_eq!(table.heartbeat(running.id, now), Standing::Unwanted);
    assert!(table.done(running.id));
    assert_eq!(table.acquire("a", now + Duration::from_secs(60)), Grant::Finished);
}

#[test]
fn pauses_double_up_to_a_minute() {
    let table = LeaseTable::new(Plan::new(1, 20), config());
    let mut now = Instant::now();
    let mut pauses = Vec::new();
    for _ in 0..8 {
        let lease = granted(table.acquire("a", now));
        table.failed(lease.id, failure(&lease), now);
        let due = table.next_event(now).unwrap();
        pauses.push((due - now).as_secs());
        now = due;
    }
    assert_eq!(pauses, [2, 4, 8, 16, 32, 60, 60, 60]);
}

#[derive(Clone, Debug)]
enum Action {
    Acquire,
    Pass { secs: u64 },
    Heartbeat { pick: usize },
    Finish { pick: usize },
    Fail { pick: usize },
    Release { pick: usize },
    Abandon { pick: usize },
    Cut { pick: usize },
    SubmitDrops { works: bool },
}

fn action() -> impl Strategy<Value = Action> {
    let pick = 0usize..8;
    prop_oneof![
        4 => Just(Action::Acquire),
        2 => (0u64..8).prop_map(|secs| Action::Pass { secs }),
        2 => pick.clone().prop_map(|pick| Action::Heartbeat { pick }),
        2 => pick.clone().prop_map(|pick| Action::Finish { pick }),
        2 => pick.clone().prop_map(|pick| Action::Fail { pick }),
        1 => pick.clone().prop_map(|pick| Action::Release { pick }),
        1 => pick.clone().prop_map(|pick| Action::Abandon { pick }),
        1 => pick.prop_map(|pick| Action::Cut { pick }),
        1 => any::<bool>().prop_map(|works| Action::SubmitDrops { works }),
    ]
}

/// In how many places of the table each admitted trial is.
fn places(table: &LeaseTable) -> BTreeMap<TrialKey, usize> {
    let state = table.lock();
    let mut places = BTreeMap::new();
    let leased = state.leased.values().map(|held| held.assignment.key);
    for key in leased
        .chain(state.waiting.keys().copied())
        .chain(state.dropping.keys().copied())
    {
        *places.entry(key).or_default() += 1;
    }
    places
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    /// Owners act on leases that they may long have lost, as real ones do.
    #[test]
    fn every_admitted_trial_ends_once_or_is_in_one_place(
        actions in proptest::collection::vec(action(), 1..120),
        max_attempts in 1u32..4,
    ) {
        let plan = Plan::new(6, max_attempts);
        let table = LeaseTable::new(Arc::clone(&plan) as Arc<dyn TrialPlan>, config());
        let mut now = Instant::now();
        let mut seen: Vec<Lease> = Vec::new();
        let submit_drops = |works: bool| {
            for end in table.take_drops() {
                if works {
                    plan.submit(end.key());
                    table.drop_submitted(&end.key());
                } else {
                    table.return_drop(&end.key());
                }
            }
        };
        let check = || {
            let places = places(&table);
            let state = plan.state.lock().unwrap();
            for key in (0..state.admitted).map(key) {
                let num_places = places.get(&key).copied().unwrap_or(0);
                let over = state.ended.contains(&key) || state.cut.contains(&key);
                assert!(num_places == 1 || (over && num_places == 0), "{key}: {num_places} places, over: {over}");
            }
        };
        for action in actions {
            let lease = |pick: usize| seen.get(seen.len().wrapping_sub(1 + pick)).copied();
            match action {
                Action::Acquire => {
                    if let Grant::Run(lease) = table.acquire("a", now) {
                        prop_assert!(lease.assignment.attempt < max_attempts);
                        seen.push(lease);
                    }
                }
                Action::Pass { secs } => {
                    now += Duration::from_secs(secs);
                    table.expire(now);
                }
                Action::Heartbeat { pick } => {
                    if let Some(lease) = lease(pick) {
                        table.heartbeat(lease.id, now);
                    }
                }
                Action::Finish { pick } => {
                    if let Some(lease) = lease(pick) {
                        plan.submit(lease.assignment.key);
                        table.done(lease.id);
                    }
                }
                Action::Fail { pick } => {
                    if let Some(lease) = lease(pick) {
                        if let AfterFailure::Drop(end) = table.failed(lease.id, failure(&lease), now) {
                            plan.submit(end.key());
                            table.done(lease.id);
                        }
                    }
                }
                Action::Release { pick } => {
                    if let Some(lease) = lease(pick) {
                        table.release(lease.id, now);
                    }
                }
                Action::Abandon { pick } => {
                    if let Some(lease) = lease(pick) {
                        table.abandon(lease.id, now);
                    }
                }
                Action::Cut { pick } => {
                    if let Some(lease) = lease(pick) {
                        plan.cut(lease.assignment.key);
                    }
                }
                Action::SubmitDrops { works } => submit_drops(works),
            }
            check();
        }

        // A diligent owner brings everything to its end.
        for _ in 0..1000 {
            submit_drops(true);
            match table.acquire("z", now) {
                Grant::Run(lease) => {
                    plan.submit(lease.assignment.key);
                    table.done(lease.id);
                }
                Grant::Wait => now += Duration::from_secs(11),
                Grant::Finished => break,
            }
        }
        prop_assert_eq!(table.acquire("z", now), Grant::Finished);
        let state = plan.state.lock().unwrap();
        for key in (0..6).map(key) {
            prop_assert!(state.ended.contains(&key) || state.cut.contains(&key), "{} never ended", key);
        }
    }
}
