//! The schedule under random durations: the claims of the module head, one assertion each.

use super::super::{
    schedule::{earliest_due_first_fits, Admission, GroupSet, Schedule, Slot},
    BufferConfig,
};
use crate::base::{DropReason, Submitted, TrialAssignment, TrialKey, TrialPlanStep};
use proptest::prelude::*;
use std::collections::{BTreeMap, BTreeSet, HashMap};

fn config(n_resp: u32, train_bsz: u32, staleness: f64, total_steps: u32) -> BufferConfig {
    BufferConfig {
        dir: "unused".into(),
        n_resp,
        train_bsz,
        staleness,
        total_steps,
        n_rows: 7,
        seed: 1,
        max_attempts: 2,
        roll_bytes: 1,
    }
}

fn new_schedule(config: &BufferConfig) -> Schedule {
    Schedule::new(config.clone(), 0, 0, GroupSet::default(), BTreeMap::new())
}

/// A run in simulated time: a fixed number of runners, each trial with a duration of its own, a trainer
/// that takes `train_ticks` a step. Returns per step the lags, and the number of cut trials.
struct Outcome {
    lags: Vec<Vec<u32>>,
    cut: usize,
    ended: usize,
}

fn simulate(config: &BufferConfig, runners: usize, train_ticks: u64, durations: &[u64]) -> Outcome {
    let mut schedule = new_schedule(config);
    let mut running: Vec<(u64, TrialAssignment)> = Vec::new();
    let mut ends: HashMap<TrialKey, u32> = HashMap::new();
    let mut training_until: Option<u64> = None;
    let mut outcome = Outcome {
        lags: Vec::new(),
        cut: 0,
        ended: 0,
    };
    let mut seen = BTreeSet::new();
    let mut drawn = 0;
    for now in 0.. {
        assert!(now < 1_000_000, "the run does not end: {}", schedule.missing());
        // Runners: ends, then new trials.
        let (over, rest): (Vec<_>, Vec<_>) = running.into_iter().partition(|(end, _)| *end <= now);
        running = rest;
        for (_, trial) in over {
            // Every tenth attempt fails, like infrastructure does.
            let failed = trial.seed % 10 == 0;
            if failed {
                if let Some(again) = schedule.retry(&trial) {
                    assert_eq!(again.attempt, trial.attempt + 1);
                    running.push((now + 1, again));
                    continue;
                }
            }
            match schedule.admit_end(&trial.key, None) {
                Admission::Store { .. } => {
                    let slot = match failed {
                        true => Slot::Dropped(DropReason::LeaseLost),
                        false => Slot::Finished,
                    };
                    assert_eq!(schedule.record_end(&trial.key, slot), Submitted::Stored);
                    *ends.entry(trial.key).or_default() += 1;
                }
                // A cut trial that goes on until it is told: its end was counted at the cut.
                Admission::Answer(_) => {}
                other => panic!("{other:?}"),
            }
        }
        running.retain(|(_, trial)| schedule.is_wanted(&trial.key));
        while running.len() < runners {
            let TrialPlanStep::Run(trial) = schedule.next() else {
                break;
            };
            assert!(seen.insert(trial.key), "{} was handed out twice", trial.key);
            assert!(schedule.outstanding() <= config.outstanding_max());
            running.push((now + durations[drawn % durations.len()], trial));
            drawn += 1;
        }
        // Trainer.
        if training_until.is_some_and(|until| until <= now) {
            training_until = None;
            assert_eq!(schedule.step_done().len(), config.train_bsz as usize);
        }
        if schedule.version == config.total_steps {
            break;
        }
        if training_until.is_none() {
            let complete = schedule.ready() >= config.train_bsz as usize;
            let chosen = schedule.select();
            assert_eq!(
                chosen.is_some(),
                complete,
                "B complete groups are a batch, fewer are none"
            );
            if let Some(groups) = chosen {
                assert_eq!(groups.len(), config.train_bsz as usize);
                let step = schedule.decided + 1;
                outcome.lags.push(
                    groups
                        .iter()
                        .map(|id| step - 1 - schedule.groups[id].start_version)
                        .collect(),
                );
                for id in &groups {
                    for (sample, slot) in schedule.groups[id].slots.iter().enumerate() {
                        if !slot.has_ended() {
                            *ends.entry(super::key(*id, sample)).or_default() += 1;
                            outcome.cut += 1;
                        }
                    }
                }
                schedule.deliver(&groups);
                training_until = Some(now + train_ticks);
            }
        }
    }
    assert_eq!(schedule.next(), TrialPlanStep::Finished);
    assert_eq!(schedule.outstanding(), 0);
    assert!(ends.values().all(|count| *count == 1), "a trial ended twice");
    outcome.ended = ends.len();
    outcome
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn bound_holds_batches_are_full_and_every_trial_ends_once(
        n_resp in 1u32..4,
        train_bsz in 1u32..5,
        staleness in prop_oneof![Just(0.0), Just(0.5), Just(1.0), Just(1.7), Just(2.0), Just(3.0)],
        total_steps in 1u32..9,
        runners in 1usize..20,
        train_ticks in 0u64..30,
        durations in prop::collection::vec(prop_oneof![4 => 0u64..10, 1 => 50u64..400], 1..40),
    ) {
        let config = config(n_resp, train_bsz, staleness, total_steps);
        let outcome = simulate(&config, runners, train_ticks, &durations);
        prop_assert_eq!(outcome.lags.len(), total_steps as usize);
        for lags in &outcome.lags {
            prop_assert!(lags.iter().all(|lag| f64::from(*lag) <= staleness), "{:?}", lags);
        }
        prop_assert_eq!(outcome.ended, (n_resp * train_bsz * total_steps) as usize);
        if staleness < 1.0 {
            prop_assert_eq!(outcome.cut, 0);
        }
    }
}

#[test]
fn one_slow_trial_costs_itself_and_not_the_step() {
    let config = config(2, 4, 1.0, 10);
    let mut durations = vec![5; 1000];
    durations[3] = 100_000;
    // A stalled run would pass the simulation's end of time.
    let outcome = simulate(&config, 16, 5, &durations);
    assert_eq!(outcome.cut, 1);
}

#[test]
fn sync_starts_a_step_only_when_the_one_before_is_done() {
    let config = config(1, 2, 0.0, 2);
    let mut schedule = new_schedule(&config);
    for _ in 0..2 {
        let TrialPlanStep::Run(trial) = schedule.next() else {
            panic!("two groups start")
        };
        schedule.record_end(&trial.key, Slot::Finished);
    }
    assert_eq!(schedule.next(), TrialPlanStep::Wait);
    let groups = schedule.select().expect("both are complete");
    schedule.deliver(&groups);
    assert_eq!(
        schedule.next(),
        TrialPlanStep::Wait,
        "the step is still in training"
    );
    schedule.step_done();
    assert!(matches!(schedule.next(), TrialPlanStep::Run(trial) if trial.key.group.0 == 2));
}

#[test]
fn tokens_older_than_the_group_age_it_or_drop_the_trial() {
    let config = config(1, 1, 1.0, 9);
    let mut schedule = new_schedule(&config);
    let train = |schedule: &mut Schedule| {
        let TrialPlanStep::Run(trial) = schedule.next() else {
            panic!("a group starts")
        };
        schedule.record_end(&trial.key, Slot::Finished);
        let groups = schedule.select().expect("it is complete");
        schedule.deliver(&groups);
        schedule.step_done();
    };
    for _ in 0..3 {
        train(&mut schedule);
    }
    let TrialPlanStep::Run(first) = schedule.next() else {
        panic!("a group starts")
    };
    let TrialPlanStep::Run(second) = schedule.next() else {
        panic!("a second group starts")
    };
    // Version 3: the group may be delivered in step 4 or 5. One token of version 2 leaves step 4 only.
    assert_eq!(
        schedule.admit_end(&first.key, Some(2)),
        Admission::Store { start_version: 2 }
    );
    // Two groups that both need step 4 do not fit, and neither does version 1 at all.
    assert_eq!(
        schedule.admit_end(&second.key, Some(2)),
        Admission::TooOld { start_version: 3 }
    );
    assert_eq!(
        schedule.admit_end(&second.key, Some(3)),
        Admission::Store { start_version: 3 }
    );
}

#[test]
fn after_a_restart_missing_trials_wait_for_weights_as_new_as_their_group() {
    let config = config(2, 1, 1.0, 9);
    let started = super::super::schedule::Group {
        start_version: 2,
        row: 0,
        slots: vec![Slot::Finished, Slot::Pending],
        delivered: None,
    };
    let delivered = |step| super::super::schedule::Group {
        start_version: 0,
        row: 0,
        slots: vec![Slot::Finished, Slot::Cut],
        delivered: Some(step),
    };
    let groups = BTreeMap::from([(0, delivered(1)), (1, delivered(2)), (3, started)]);
    let mut schedule = Schedule::new(config, 0, 2, GroupSet::default(), groups);
    assert_eq!(schedule.next(), TrialPlanStep::Wait);
    schedule.step_done();
    assert_eq!(schedule.next(), TrialPlanStep::Wait);
    schedule.step_done();
    // Version 2, as new as group 3. Group 2, which left nothing behind, is started anew.
    assert!(matches!(schedule.next(), TrialPlanStep::Run(trial) if trial.key == super::key(3, 1)));
    assert!(matches!(schedule.next(), TrialPlanStep::Run(trial) if trial.key == super::key(2, 0)));
    assert!(matches!(schedule.next(), TrialPlanStep::Run(trial) if trial.key == super::key(2, 1)));
    assert_eq!(schedule.next(), TrialPlanStep::Wait);
}

#[test]
fn retries_end_with_the_attempts_and_with_the_group() {
    let config = config(1, 1, 0.0, 1);
    let mut schedule = new_schedule(&config);
    let TrialPlanStep::Run(trial) = schedule.next() else {
        panic!("a trial starts")
    };
    let again = schedule.retry(&trial).expect("two attempts");
    assert_eq!((again.attempt, again.row), (1, trial.row));
    assert_ne!(again.seed, trial.seed);
    assert_eq!(schedule.retry(&again), None);
    assert!(schedule.is_wanted(&trial.key));
    schedule.record_end(&trial.key, Slot::Dropped(DropReason::LeaseLost));
    assert!(!schedule.is_wanted(&trial.key));
    assert_eq!(schedule.retry(&trial), None);
}

#[test]
fn a_group_that_nobody_runs_is_named() {
    let config = config(3, 1, 0.0, 1);
    let mut schedule = new_schedule(&config);
    assert!(schedule.missing().contains("no group is started"));
    let TrialPlanStep::Run(trial) = schedule.next() else {
        panic!("a trial starts")
    };
    schedule.next();
    schedule.record_end(&trial.key, Slot::Finished);
    assert_eq!(
        schedule.missing(),
        "group 0 runs samples 1 has not started samples 2"
    );
}

#[test]
fn fitting_counts_places_by_step() {
    // After step 3, one place a step: dues 4, 5, 6 fit; two groups due in step 4 do not.
    assert!(earliest_due_first_fits(vec![6, 4, 5], 3, 1));
    assert!(!earliest_due_first_fits(vec![4, 4, 6], 3, 1));
    assert!(earliest_due_first_fits(vec![4, 4, 5, 5], 3, 2));
    assert!(!earliest_due_first_fits(vec![3], 3, 2));
}
