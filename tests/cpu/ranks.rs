//! A run with several trainer ranks makes the steps of a run with one, and goes on with another number.

use crate::support::{demo_inputs, legorl_rank, must, Experiment, Turn};
use std::{collections::BTreeMap, path::PathBuf, time::Duration};

fn experiment(name: &str, ranks: u32) -> Experiment {
    let mut experiment = Experiment::new(name, "configs/demo.env", &demo_inputs(1));
    for (key, value) in [
        ("TRAIN_BSZ", "4"),
        ("TRAIN_MINI_BSZ", "4"),
        ("N_RESP", "4"),
        ("N_CONCURRENT", "4"),
        ("TORCH_NUM_THREADS", "1"),
        ("TRAINER_VAL_BEFORE_TRAIN", "False"),
        ("TRAINER_TEST_FREQ", "100"),
        ("VAL_N", "1"),
    ] {
        experiment.set(key, value);
    }
    on(&mut experiment, ranks, 2);
    experiment
}

fn on(experiment: &mut Experiment, ranks: u32, steps: u32) {
    experiment
        .ranks(ranks)
        .set("NGPUS_PER_NODE", ranks)
        .set("TOTAL_TRAINING_STEPS", steps);
}

fn same(step: u64, one: &BTreeMap<u64, BTreeMap<String, f64>>, many: &BTreeMap<u64, BTreeMap<String, f64>>) {
    for key in [
        "perf/sampled_tokens",
        "actor/loss",
        "actor/grad_norm",
        "actor/entropy",
    ] {
        let (a, b) = (one[&step][key], many[&step][key]);
        assert!(
            (a - b).abs() <= 1e-5 * (1.0 + a.abs()),
            "step {step}, {key}: {a} {b}"
        );
    }
    assert!(one[&step]["actor/grad_norm"] > 0.0, "step {step} learned nothing");
}

/// Folder of a checkpoint.
fn step(experiment: &Experiment, step: u32) -> PathBuf {
    let mut folders: Vec<PathBuf> = vec![experiment.dir.join("checkpoints")];
    let name = format!("global_step_{step}");
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder).unwrap().flatten() {
            if entry.file_name() == name.as_str() {
                return entry.path();
            }
            folders.extend(entry.path().is_dir().then(|| entry.path()));
        }
    }
    panic!(
        "no {name} of {}:\n{}",
        experiment.dir.display(),
        experiment.tail()
    );
}

/// Files of weights in a folder of a checkpoint.
fn weights(experiment: &Experiment, number: u32, folder: &str) -> Vec<String> {
    let files = std::fs::read_dir(step(experiment, number).join(folder))
        .unwrap()
        .flatten();
    let names = files.map(|file| file.file_name().into_string().unwrap());
    let mut names: Vec<String> = names.filter(|name| name.ends_with(".safetensors")).collect();
    names.sort();
    names
}

/// The same seed samples the same trials, so two runs see the same batches.
#[test]
fn two_ranks_make_the_steps_of_one_and_checkpoints_move_between_them() {
    let _turn = Turn::take();
    let (mut one, mut two) = (experiment("one-rank", 1), experiment("two-ranks", 2));
    let limit = Duration::from_secs(600);
    one.finish(limit);
    two.finish(limit);
    let (a, b) = (one.metrics(), two.metrics());
    same(1, &a, &b);
    same(2, &a, &b);
    // Each rank wrote its part; the export is the whole policy all the same.
    assert_eq!(weights(&one, 2, "actor"), ["model.safetensors"]);
    let parts = [
        "model-rank-00001-of-00002.safetensors",
        "model-rank-00002-of-00002.safetensors",
    ];
    assert_eq!(weights(&two, 2, "actor"), parts);
    for experiment in [&one, &two] {
        assert_eq!(weights(experiment, 2, "huggingface"), ["model.safetensors"]);
        let mut info = legorl_rank();
        must(
            info.args(["model", "info"])
                .arg(step(experiment, 2).join("huggingface")),
        );
    }
    // The other way round: two ranks go on where one stopped, one where two stopped.
    on(&mut one, 2, 3);
    on(&mut two, 1, 3);
    one.finish(limit);
    two.finish(limit);
    same(3, &one.metrics(), &two.metrics());
    assert_eq!(weights(&one, 3, "actor"), parts);
    assert_eq!(weights(&two, 3, "actor"), ["model.safetensors"]);
}
