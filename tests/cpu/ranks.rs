//! A run with several trainer ranks makes the steps of a run with one, and goes on with another number.

use crate::support::{demo_inputs, Experiment, Turn};
use std::{collections::BTreeMap, time::Duration};

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
    // The other way round: two ranks go on where one stopped, one where two stopped.
    on(&mut one, 2, 3);
    on(&mut two, 1, 3);
    one.finish(limit);
    two.finish(limit);
    same(3, &one.metrics(), &two.metrics());
}
