//! `kill -9` of any process at any moment, then the same command again: nothing finished is lost, and
//! every trial contributes exactly once to the weights that survive.

use crate::support::{demo_inputs, long, process_tree, Experiment, Turn};
use legorl::train::buffer::read_history;
use rand::{rngs::StdRng, Rng, SeedableRng};
use std::{
    collections::{BTreeMap, BTreeSet},
    time::{Duration, Instant},
};

const STEPS: u32 = 6;
const GROUPS: u32 = 4;
const SAMPLES: u32 = 4;

/// Trials whose end the journal calls stored, in order.
fn stored(experiment: &Experiment) -> Vec<String> {
    let journal =
        legorl::observe::journal::read(&experiment.dir.join("run/journal.jsonl")).unwrap_or_default();
    journal
        .iter()
        .filter(|e| e["event"] == "trial_finished" && e["submitted"] == "Stored")
        .filter_map(|e| e["trial"].as_str())
        .filter(|t| t.starts_with("train-"))
        .map(str::to_owned)
        .collect()
}

/// Starts the run again and again, killing one process of it each time, until it is done or was killed
/// `kills` times; then it runs to its end. Returns how often it was killed.
fn run_with_kills(experiment: &Experiment, kills: usize, random: &mut StdRng) -> usize {
    let limit = Instant::now() + Duration::from_secs(1500);
    let mut killed = 0;
    loop {
        assert!(
            Instant::now() < limit,
            "not done after {killed} kills:\n{}",
            experiment.tail()
        );
        let mut child = experiment.start();
        let mut tree = Vec::new();
        let fatal = killed < kills;
        let moment = Instant::now() + Duration::from_millis(random.random_range(300..7000));
        let status = loop {
            if let Some(status) = child.try_wait().unwrap() {
                break status;
            }
            if fatal && Instant::now() >= moment {
                tree = process_tree(child.id());
                let victim = tree[random.random_range(0..tree.len())] as i32;
                // SAFETY: kill has no memory effects; the process may be gone already.
                unsafe { libc::kill(victim, libc::SIGKILL) };
                killed += 1;
                // A sandbox or a helper may die without ending the run; the head's death always does.
                if victim as u32 != child.id() {
                    std::thread::sleep(Duration::from_millis(500));
                    let _ = child.kill();
                }
                break child.wait().unwrap();
            }
            std::thread::sleep(Duration::from_millis(10));
        };
        if status.success() {
            return killed;
        }
        assert!(
            fatal,
            "without a kill the run ended with {status}:\n{}",
            experiment.tail()
        );
        // Nothing of a killed run may live on and write.
        wait_until_gone(&tree);
    }
}

/// Descendants of a killed process end by themselves: the kernel ends sandboxes, MPI its ranks.
fn wait_until_gone(tree: &[u32]) {
    let end = Instant::now() + Duration::from_secs(30);
    let alive = || -> Vec<String> {
        let command = |pid: &u32| std::fs::read_to_string(format!("/proc/{pid}/cmdline")).ok();
        tree.iter()
            .filter_map(command)
            .filter(|c| c.contains("legorl"))
            .collect()
    };
    while !alive().is_empty() {
        assert!(
            Instant::now() < end,
            "processes of a killed run live on: {:?}",
            alive()
        );
        std::thread::sleep(Duration::from_millis(50));
    }
}

fn check_exactly_once(experiment: &Experiment) {
    let history = read_history(&experiment.dir.join("run/buffer")).unwrap();
    let steps: Vec<u32> = history.iter().map(|d| d.step).collect();
    assert_eq!(
        steps,
        (1..=STEPS).collect::<Vec<_>>(),
        "steps of the surviving weights"
    );
    let mut contributions: BTreeMap<String, u32> = BTreeMap::new();
    for delivery in &history {
        for trial in delivery.trials() {
            *contributions.entry(trial.to_string()).or_default() += 1;
        }
    }
    let twice: Vec<_> = contributions.iter().filter(|(_, n)| **n != 1).collect();
    assert!(
        twice.is_empty(),
        "trials that contributed more than once: {twice:?}"
    );
    // Under async a trial that still ran when its group was due is cut off: it is accounted for as well.
    for delivery in &history {
        let samples = delivery
            .groups
            .iter()
            .map(|g| g.finished.len() + g.dropped.len() + g.cut.len());
        assert_eq!(
            samples.sum::<usize>() as u32,
            GROUPS * SAMPLES,
            "trials of step {}",
            delivery.step
        );
    }

    // A trial is stored once over all attempts of the run, and what was stored is what was trained on.
    let stored = stored(experiment);
    let distinct: BTreeSet<_> = stored.iter().collect();
    assert_eq!(distinct.len(), stored.len(), "a trial was stored twice");
    let lost: Vec<_> = distinct
        .iter()
        .filter(|t| !contributions.contains_key(t.as_str()))
        .collect();
    assert!(
        lost.is_empty(),
        "finished trials that no step was trained on: {lost:?}"
    );

    let rows = experiment.metrics();
    let rows: Vec<u64> = rows.keys().copied().filter(|s| *s > 0).collect();
    assert_eq!(
        rows,
        (1..=u64::from(STEPS)).collect::<Vec<_>>(),
        "rows of metrics"
    );
}

fn small(name: &str, config: &str) -> Experiment {
    let mut experiment = Experiment::new(name, config, &demo_inputs(1));
    experiment
        .set("TOTAL_TRAINING_STEPS", STEPS)
        .set("TRAIN_BSZ", GROUPS)
        .set("TRAIN_MINI_BSZ", GROUPS)
        .set("N_RESP", SAMPLES)
        .set("TRAINER_SAVE_FREQ", 2)
        .set("TRAINER_VAL_BEFORE_TRAIN", "False")
        .set("TRAINER_TEST_FREQ", -1)
        .set("VAL_N", 1);
    experiment
}

/// Runs of the demo, killed `kills` times in all.
fn kill_runs(name: &str, config: &str, ranks: u32, kills: usize) {
    let _turn = Turn::take();
    let mut random = StdRng::seed_from_u64(kills as u64);
    let (mut killed, mut runs) = (0, 0);
    while killed < kills {
        let mut experiment = small(&format!("{name}-{runs}"), config);
        experiment.ranks(ranks).set("SEED", 1 + runs);
        killed += run_with_kills(&experiment, kills - killed, &mut random);
        runs += 1;
        check_exactly_once(&experiment);
    }
    eprintln!("{name}: {killed} kills over {runs} runs, every trial counted once");
}

#[test]
fn a_killed_run_goes_on_and_counts_every_trial_once() {
    kill_runs("kills-sync", "configs/demo.env", 1, if long() { 20 } else { 5 });
}

#[test]
fn a_killed_run_of_two_ranks_goes_on_and_counts_every_trial_once() {
    kill_runs(
        "kills-async",
        "configs/demo_async.env",
        2,
        if long() { 20 } else { 2 },
    );
}
