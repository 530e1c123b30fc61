//! Whole runs on real files: delivery, restart, exactly once, retention, concurrent submits.

use super::super::{read_history, shard, BufferError};
use super::*;
use crate::base::{PolicyVersion, Purpose, Submitted, TrialSink};
use std::collections::BTreeSet;

/// Trains one step from whatever can run.
fn train_step(buffer: &Buffer, step: u32) -> crate::train::batch::TrainBatch {
    for trial in run_all(buffer) {
        let version = buffer.status().version.0;
        assert_eq!(
            buffer.submit(finished(trial.key, version)).expect("stored"),
            Submitted::Stored
        );
    }
    let batch = buffer.next_batch(step, soon()).expect("complete");
    buffer.step_done(PolicyVersion(step)).expect("in order");
    batch
}

#[test]
fn three_sync_steps_end_to_end() {
    let dir = quick_dir();
    let config = config(dir.path());
    let buffer = open(&config, None);
    for step in 1..=3u32 {
        let trials = run_all(&*buffer);
        assert_eq!(trials.len(), 4);
        for trial in &trials {
            assert_eq!(trial.row, crate::base::order::row_of(trial.key.group, 5, 11));
            assert_eq!(
                buffer.submit(finished(trial.key, step - 1)).expect("stored"),
                Submitted::Stored
            );
            assert_eq!(
                buffer.submit(finished(trial.key, step - 1)).expect("known"),
                Submitted::Duplicate
            );
        }
        let batch = buffer.next_batch(step, soon()).expect("complete");
        let keys: Vec<TrialKey> = batch
            .groups
            .iter()
            .flat_map(|g| g.trajectories.iter().map(|t| t.key))
            .collect();
        assert_eq!(keys, trials.iter().map(|t| t.key).collect::<Vec<_>>());
        assert_eq!(
            batch.groups[0].trajectories[0],
            trajectory(trials[0].key, step - 1, 40)
        );
        assert_eq!(
            buffer.next(),
            if step < 3 {
                TrialPlanStep::Wait
            } else {
                TrialPlanStep::Finished
            }
        );
        buffer.step_done(PolicyVersion(step)).expect("in order");
    }
    assert_eq!(buffer.next(), TrialPlanStep::Finished);
    let history = buffer.history().expect("readable");
    assert_eq!(history.len(), 3);
    assert_eq!(history.values().flatten().count(), 12);
    assert_eq!(read_history(dir.path()).expect("readable").len(), 3);
}

#[test]
fn a_missed_deadline_names_groups_and_samples() {
    let dir = quick_dir();
    let buffer = open(&config(dir.path()), None);
    let trials = run_all(&*buffer);
    for trial in &trials[..3] {
        buffer.submit(finished(trial.key, 0)).expect("stored");
    }
    let error = buffer
        .next_batch(1, Instant::now())
        .expect_err("one trial is missing");
    assert!(matches!(
        error,
        BufferError::Deadline {
            ready: 1,
            wanted: 2,
            ..
        }
    ));
    assert!(error.to_string().contains("group 1 runs samples 1"), "{error}");
    buffer.submit(dropped(trials[3].key)).expect("stored");
    let batch = buffer.next_batch(1, soon()).expect("complete with a drop");
    assert_eq!(batch.groups[1].trajectories.len(), 1);
    assert_eq!(batch.groups[1].dropped, [(trials[3].key, DropReason::LeaseLost)]);
    let status = buffer.status();
    assert_eq!(
        (status.thin_groups, status.empty_groups, status.dropped_trials),
        (1, 0, 1)
    );
}

#[test]
fn a_waiting_trainer_is_woken_by_the_last_trial() {
    let dir = quick_dir();
    let buffer = open(&config(dir.path()), None);
    let trials = run_all(&*buffer);
    let trainer = {
        let buffer = buffer.clone();
        std::thread::spawn(move || buffer.next_batch(1, Instant::now() + Duration::from_secs(600)))
    };
    for trial in trials {
        buffer.submit(finished(trial.key, 0)).expect("stored");
    }
    assert_eq!(
        trainer.join().expect("no panic").expect("a batch").groups.len(),
        2
    );
}

#[test]
fn closing_ends_the_wait_and_the_plan_but_not_the_submits() {
    let dir = quick_dir();
    let buffer = open(&config(dir.path()), None);
    let trial = run_all(&*buffer)[0];
    let trainer = {
        let buffer = buffer.clone();
        std::thread::spawn(move || buffer.next_batch(1, Instant::now() + Duration::from_secs(600)))
    };
    buffer.close("SIGUSR1");
    let error = trainer.join().expect("no panic").expect_err("closed");
    assert_eq!(error.to_string(), "the buffer is closed: SIGUSR1");
    assert_eq!(buffer.next(), TrialPlanStep::Finished);
    assert_eq!(buffer.retry(&trial), None);
    assert_eq!(
        buffer.submit(finished(trial.key, 0)).expect("stored"),
        Submitted::Stored
    );
}

#[test]
fn finished_trials_survive_a_restart_and_do_not_run_again() {
    let dir = quick_dir();
    let config = config(dir.path());
    let buffer = open(&config, None);
    let trials = run_all(&*buffer);
    buffer.submit(finished(trials[0].key, 0)).expect("stored");
    buffer.submit(dropped(trials[2].key)).expect("stored");
    drop(buffer);

    let buffer = open(&config, None);
    let again: Vec<TrialKey> = run_all(&*buffer).iter().map(|t| t.key).collect();
    assert_eq!(again, [trials[1].key, trials[3].key]);
    assert_eq!(
        buffer.submit(finished(trials[0].key, 0)).expect("known"),
        Submitted::Duplicate
    );
    for key in again {
        buffer.submit(finished(key, 0)).expect("stored");
    }
    let batch = buffer.next_batch(1, soon()).expect("complete");
    assert_eq!(batch.groups[0].trajectories.len(), 2);
    assert_eq!(batch.groups[1].dropped, [(trials[2].key, DropReason::LeaseLost)]);
}

#[test]
fn deliveries_beyond_the_checkpoint_come_again_as_they_were() {
    let dir = quick_dir();
    let mut config = config(dir.path());
    config.staleness = 1.0;
    config.total_steps = 6;
    let buffer = open(&config, None);
    train_step(&buffer, 1);
    let checkpoint = buffer.manifest();
    let lost = [train_step(&buffer, 2), train_step(&buffer, 3)];
    let ahead = buffer.next_batch(4, soon());
    drop(buffer);

    let text = serde_json::to_string(&checkpoint).expect("it is serde");
    let checkpoint: BufferManifest = serde_json::from_str(&text).expect("it is serde");
    let buffer = open(&config, Some(&checkpoint));
    assert_eq!(buffer.status().version, PolicyVersion(1));
    assert_eq!(
        buffer
            .history()
            .expect("readable")
            .keys()
            .copied()
            .collect::<Vec<_>>(),
        [1]
    );
    for (step, lost) in (2..).zip(&lost) {
        let again = buffer.next_batch(step, Instant::now()).expect("it was logged");
        assert_eq!(format!("{again:?}"), format!("{lost:?}"));
        buffer.step_done(PolicyVersion(step)).expect("in order");
    }
    let again = buffer
        .next_batch(4, soon())
        .expect("it was logged or is complete");
    if let Ok(ahead) = ahead {
        assert_eq!(format!("{again:?}"), format!("{ahead:?}"));
    }
    buffer.step_done(PolicyVersion(4)).expect("in order");
    train_step(&buffer, 5);
    train_step(&buffer, 6);
    let history = buffer.history().expect("readable");
    let keys: Vec<&TrialKey> = history.values().flatten().collect();
    assert_eq!(keys.len(), 24);
    assert_eq!(
        keys.iter().collect::<BTreeSet<_>>().len(),
        24,
        "a trial was trained twice"
    );
}

#[test]
fn a_batch_that_was_handed_out_comes_again_until_its_step_is_done() {
    let dir = quick_dir();
    let buffer = open(&config(dir.path()), None);
    for trial in run_all(&*buffer) {
        buffer.submit(finished(trial.key, 0)).expect("stored");
    }
    let first = buffer.next_batch(1, soon()).expect("complete");
    let second = buffer.next_batch(1, soon()).expect("complete");
    assert_eq!(format!("{first:?}"), format!("{second:?}"));
    assert!(matches!(
        buffer.next_batch(3, soon()),
        Err(BufferError::OutOfOrder { asked: 3, next: 2 })
    ));
    assert!(matches!(
        buffer.step_done(PolicyVersion(2)),
        Err(BufferError::OutOfOrder { asked: 2, next: 1 })
    ));
    buffer.step_done(PolicyVersion(1)).expect("in order");
    assert!(matches!(
        buffer.next_batch(1, soon()),
        Err(BufferError::OutOfOrder { .. })
    ));
}

#[test]
fn a_slow_trial_is_cut_off_and_its_result_refused() {
    let dir = quick_dir();
    let mut config = config(dir.path());
    config.staleness = 1.0;
    config.total_steps = 6;
    let buffer = open(&config, None);
    let first = run_all(&*buffer);
    assert_eq!(first.len(), 8, "two steps' groups may run");
    let slow = first[1].key;
    for trial in first.iter().filter(|t| t.key != slow) {
        buffer.submit(finished(trial.key, 0)).expect("stored");
    }
    // Step 1 takes the complete groups 1 and 2; group 0 is due in step 2.
    let batch = buffer.next_batch(1, soon()).expect("complete");
    assert_eq!(batch.groups.iter().map(|g| g.id.0).collect::<Vec<_>>(), [1, 2]);
    buffer.step_done(PolicyVersion(1)).expect("in order");
    assert!(buffer.is_wanted(&slow));
    for trial in run_all(&*buffer) {
        buffer.submit(finished(trial.key, 1)).expect("stored");
    }
    let batch = buffer.next_batch(2, soon()).expect("two groups are complete");
    assert_eq!(batch.groups.iter().map(|g| g.id.0).collect::<Vec<_>>(), [0, 3]);
    assert_eq!(batch.groups[0].dropped, [(slow, DropReason::Stale)]);
    assert!(!buffer.is_wanted(&slow));
    assert_eq!(
        buffer.submit(finished(slow, 0)).expect("refused"),
        Submitted::CutOff
    );
    let status = buffer.status();
    assert_eq!(
        (status.last_lag.min, status.last_lag.mean, status.last_lag.max),
        (1, 1.0, 1)
    );
    assert_eq!(status.cut_trials, 1);
    // Also after a restart that has not seen step 2.
    drop(buffer);
    let buffer = open(&config, None);
    assert_eq!(
        buffer.submit(finished(slow, 0)).expect("refused"),
        Submitted::CutOff
    );
}

#[tokio::test]
async fn changed_returns_when_a_step_is_done() {
    let dir = quick_dir();
    let buffer = open(&config(dir.path()), None);
    for trial in run_all(&*buffer) {
        buffer.submit(finished(trial.key, 0)).expect("stored");
    }
    buffer.next_batch(1, soon()).expect("complete");
    assert_eq!(buffer.next(), TrialPlanStep::Wait);
    let waiting = tokio::spawn({
        let buffer = buffer.clone();
        async move {
            while buffer.next() == TrialPlanStep::Wait {
                buffer.changed().await;
            }
        }
    });
    buffer.step_done(PolicyVersion(1)).expect("in order");
    tokio::time::timeout(Duration::from_secs(20), waiting)
        .await
        .expect("the plan goes on")
        .expect("no panic");
}

#[test]
fn shards_roll_and_are_deleted_when_no_checkpoint_needs_them() {
    let dir = quick_dir();
    let mut config = config(dir.path());
    config.roll_bytes = 1500;
    config.total_steps = 5;
    let buffer = open(&config, None);
    let mut checkpoints = vec![buffer.manifest()];
    for step in 1..=4 {
        train_step(&buffer, step);
        checkpoints.push(buffer.manifest());
    }
    let before = shard::list(dir.path()).expect("a list");
    assert!(before.len() > 4, "{before:?}");
    assert_eq!(buffer.retain(&checkpoints[0]).expect("nothing to do"), 0);
    let bytes = buffer.status().shard_bytes;
    let freed = buffer.retain(&checkpoints[2]).expect("deleted");
    assert!(freed > 0);
    assert_eq!(buffer.status().shard_bytes, bytes - freed);
    assert!(shard::list(dir.path()).expect("a list").len() < before.len());
    drop(buffer);
    // The oldest checkpoint that is kept can still be resumed, and so can every later one.
    for step in 2..=4u32 {
        let buffer = open(&config, Some(&checkpoints[step as usize]));
        for replayed in step + 1..=4 {
            buffer
                .next_batch(replayed, Instant::now())
                .expect("its trials are there");
            buffer.step_done(PolicyVersion(replayed)).expect("in order");
        }
    }
    // An older one cannot, and says which trial it lacks.
    let buffer = Buffer::open(config, Some(&checkpoints[0]));
    let Err(BufferError::MissingTrial { step: 1, trial, .. }) = buffer else {
        panic!("{buffer:?}")
    };
    assert_eq!(trial, "train-g000000-s0");
}

#[test]
fn submits_that_meet_are_all_durable() {
    let dir = tempfile::tempdir().expect("a folder");
    let mut config = config(dir.path());
    config.n_resp = 16;
    config.train_bsz = 4;
    config.roll_bytes = 40_000;
    let buffer = open(&config, None);
    let trials = run_all(&*buffer);
    assert_eq!(trials.len(), 64);
    std::thread::scope(|scope| {
        for share in trials.chunks(8) {
            let buffer = &buffer;
            scope.spawn(move || {
                for trial in share {
                    buffer.submit(finished(trial.key, 0)).expect("stored");
                }
            });
        }
        // Twice at the same time: one is stored.
        for _ in 0..2 {
            scope.spawn(|| {
                buffer
                    .submit(finished(trials[5].key, 0))
                    .expect("stored or known")
            });
        }
    });
    drop(buffer);
    let buffer = open(&config, None);
    let batch = buffer.next_batch(1, soon()).expect("all are stored");
    for (trial, read) in trials
        .iter()
        .zip(batch.groups.iter().flat_map(|g| &g.trajectories))
    {
        assert_eq!(*read, trajectory(trial.key, 0, 40));
    }
    let records: usize = shard::list(dir.path())
        .expect("a list")
        .iter()
        .map(|n| {
            shard::scan(dir.path(), *n, true, |_| true)
                .expect("whole")
                .records
                .len()
        })
        .sum();
    assert_eq!(records, 64);
}

#[test]
fn trials_that_were_never_handed_out_are_refused() {
    let dir = quick_dir();
    let buffer = open(&config(dir.path()), None);
    run_all(&*buffer);
    let val = TrialKey {
        purpose: Purpose::Val { step: 1 },
        ..key(0, 0)
    };
    for key in [key(2, 0), key(0, 2), val] {
        let error = buffer.submit(finished(key, 0)).expect_err("unknown");
        assert!(error.to_string().contains("never handed"), "{error}");
    }
    let mut broken = trajectory(key(0, 0), 0, 10);
    broken.sequences[0].versions.pop();
    let error = buffer
        .submit(TrialEnd::Finished(broken))
        .expect_err("its lengths differ");
    assert!(error.to_string().contains("lengths differ"), "{error}");
    assert!(buffer.is_wanted(&key(0, 0)));
    buffer.submit(finished(key(0, 0), 0)).expect("stored");
}

#[test]
fn a_folder_in_use_or_of_another_run_is_refused() {
    let dir = quick_dir();
    let config = config(dir.path());
    let buffer = open(&config, None);
    assert!(matches!(
        Buffer::open(config.clone(), None),
        Err(BufferError::Locked { .. })
    ));
    drop(buffer);
    let other = BufferConfig {
        n_resp: 8,
        ..config.clone()
    };
    let error = Buffer::open(other, None).expect_err("another run");
    assert!(
        error.to_string().contains("n_resp=2") && error.to_string().contains("n_resp=8"),
        "{error}"
    );
    for (name, broken) in [
        (
            "TRAIN_BSZ",
            BufferConfig {
                train_bsz: 0,
                ..config.clone()
            },
        ),
        (
            "STALENESS",
            BufferConfig {
                staleness: -1.0,
                ..config.clone()
            },
        ),
        (
            "STALENESS",
            BufferConfig {
                staleness: f64::NAN,
                ..config.clone()
            },
        ),
    ] {
        let error = Buffer::open(broken, None).expect_err("no such setting");
        assert!(error.to_string().contains(name), "{error}");
    }
}

#[test]
fn a_smaller_bound_on_resume_is_refused_when_stored_groups_would_pass_it() {
    let dir = quick_dir();
    let mut config = config(dir.path());
    config.staleness = 2.0;
    let buffer = open(&config, None);
    for trial in run_all(&*buffer) {
        buffer.submit(finished(trial.key, 0)).expect("stored");
    }
    drop(buffer);
    config.staleness = 1.0;
    let error = Buffer::open(config, None).expect_err("six groups of version 0");
    assert!(error.to_string().contains("STALENESS=1"), "{error}");
}

#[test]
fn a_checkpoint_of_another_history_is_refused() {
    let dir = quick_dir();
    let config = config(dir.path());
    let buffer = open(&config, None);
    train_step(&buffer, 1);
    let checkpoint = buffer.manifest();
    drop(buffer);
    let mut other = checkpoint.clone();
    other.step = 2;
    other.trained_below = 4;
    let error = Buffer::open(config.clone(), Some(&other)).expect_err("the log ends before");
    assert!(matches!(error, BufferError::History { step: 2, .. }), "{error}");
    let mut other = checkpoint.clone();
    other.trained_below = 1;
    other.trained_beyond = vec![5];
    let error = Buffer::open(config.clone(), Some(&other)).expect_err("other groups");
    assert!(error.to_string().contains("other groups"), "{error}");
    let mut other = checkpoint.clone();
    other.seed = 12;
    let error = Buffer::open(config.clone(), Some(&other)).expect_err("another seed");
    assert!(
        matches!(error, BufferError::Identity { name: "seed", .. }),
        "{error}"
    );
    drop(open(&config, Some(&checkpoint)));
}
