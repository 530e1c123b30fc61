//! Real files.

use super::super::{read_history, BufferError};
use super::*;
use crate::base::{PolicyVersion, Submitted, TrialSink};

#[test]
fn three_sync_steps_end_to_end() {
    let dir = tempfile::tempdir().expect("a folder");
    let config = config(dir.path());
    let buffer = open(&config, None);
    for step in 1..=3u32 {
        let trials = run_all(&*buffer);
        assert_eq!(trials.len(), 4);
        for trial in &trials {
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
    let dir = tempfile::tempdir().expect("a folder");
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
}
