//! One slow trial costs itself, not the step: under async the trainer goes on without it, and no batch is
//! older than `STALENESS` allows.

use crate::support::{demo_inputs, legorl_rank, must, root, Experiment, Turn};
use std::{fs, path::Path, time::Duration};

/// Seconds that the slow task's sandbox takes to be set up; far longer than a step.
const SLOW_SECS: u64 = 40;

fn copy_folder(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for entry in fs::read_dir(from).unwrap().flatten() {
        let target = to.join(entry.file_name());
        if entry.path().is_dir() {
            copy_folder(&entry.path(), &target);
        } else {
            fs::copy(entry.path(), target).unwrap();
        }
    }
}

#[test]
fn a_slow_trial_does_not_stall_the_trainer() {
    let _turn = Turn::take();
    let inputs = demo_inputs(1);
    let mut experiment = Experiment::new("slow-trial", "configs/demo_async.env", &inputs);
    let tasks = experiment.dir.join("tasks");
    for name in ["write-01", "write-02", "copy-01", "rename-01", "folders-01"] {
        copy_folder(&root().join("jobs/demo/tasks").join(name), &tasks.join(name));
    }
    let slow = tasks.join("write-02/environment/Dockerfile");
    let dockerfile = fs::read_to_string(&slow).unwrap();
    fs::write(&slow, format!("{dockerfile}RUN sleep {SLOW_SECS}\n")).unwrap();
    let index = experiment.dir.join("slow.parquet");
    must(
        legorl_rank()
            .args(["index", "build"])
            .arg(&tasks)
            .arg("--output")
            .arg(&index),
    );

    experiment
        .ranks(2)
        .set("TRAIN_FILES", index.display())
        .set("TOTAL_TRAINING_STEPS", 8)
        .set("TRAIN_BSZ", 2)
        .set("TRAIN_MINI_BSZ", 2)
        .set("N_RESP", 4)
        .set("N_CONCURRENT", 16)
        .set("STALENESS", "1.0")
        .set("TRAINER_VAL_BEFORE_TRAIN", "False")
        .set("VAL_N", 1);
    experiment.finish(Duration::from_secs(600));

    let rows = experiment.metrics();
    assert_eq!(rows.keys().next_back(), Some(&8));
    let lags: Vec<f64> = rows
        .values()
        .filter_map(|r| r.get("staleness/max").copied())
        .collect();
    assert_eq!(lags.len(), 8, "every step reports its staleness");
    assert!(
        lags.iter().all(|lag| *lag <= 1.0),
        "lags of the batches: {lags:?}"
    );
    let cut = rows[&8]["buffer/cut_trials"];
    assert!(cut > 0.0, "the slow trials were cut off, not waited for");
    let waits: Vec<f64> = rows
        .values()
        .filter_map(|r| r.get("timing_s/gen").copied())
        .collect();
    // The last step has nothing that could take the slow group's place.
    let waits = &waits[..waits.len() - 1];
    let longest = waits.iter().copied().fold(0.0, f64::max);
    eprintln!("slow trial: {cut} trials cut off, longest wait for a batch {longest:.1} s, lags {lags:?}");
    assert!(
        longest < SLOW_SECS as f64,
        "the trainer waited {longest:.1} s for a batch: {waits:?}"
    );
    assert!(
        rows.values()
            .all(|r| r.get("trajectory/dropped").is_none_or(|d| *d <= cut)),
        "nothing else was dropped"
    );
}
