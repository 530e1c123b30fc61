//! Tests on a real Slurm of two nodes, which they start themselves (`slurm.sh`), and on a real Kubernetes
//! API server ([`kubernetes`]). Needs root and Debian's packages; on other machines the tests say SKIP and
//! why.

mod kubernetes;
#[path = "../support/mod.rs"]
mod support;

use std::{
    path::PathBuf,
    process::{Command, Output},
    time::{Duration, Instant},
};
use support::{bin_dir, demo_inputs, long, root, skip, Experiment, Turn};

/// A cluster for one test; taken down when dropped.
struct Slurm {
    dir: PathBuf,
}

impl Slurm {
    /// Starts it, or says why this machine cannot.
    fn up(name: &str) -> Option<Self> {
        // SAFETY: geteuid has no preconditions.
        if unsafe { libc::geteuid() } != 0 {
            skip("slurm", "starting slurmd and network namespaces needs root");
            return None;
        }
        for program in ["slurmctld", "slurmd", "munged", "ip", "mpirun"] {
            let found = Command::new("sh")
                .args(["-c", &format!("command -v {program}")])
                .output()
                .unwrap();
            if !found.status.success() {
                skip(
                    "slurm",
                    &format!("{program} is not installed; `make setup-test` installs it"),
                );
                return None;
            }
        }
        let dir = std::env::temp_dir().join(format!("legorl-slurm-{name}"));
        let slurm = Self { dir };
        let output = slurm.script("up", &[]);
        assert!(
            output.status.success(),
            "{}",
            String::from_utf8_lossy(&output.stderr)
        );
        Some(slurm)
    }

    fn script(&self, verb: &str, arguments: &[&str]) -> Output {
        Command::new(root().join("tests/cluster/slurm.sh"))
            .arg(verb)
            .arg(&self.dir)
            .args(arguments)
            .current_dir(root())
            .env("LEGORL_RANK", bin_dir().join("legorl-rank"))
            .env("NO_COLOR", "1")
            .output()
            .unwrap()
    }

    /// Runs a Slurm command and returns what it printed.
    fn run(&self, arguments: &[&str]) -> String {
        let output = self.script("run", arguments);
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(
            output.status.success(),
            "{arguments:?}: {}\n{text}{}",
            output.status,
            String::from_utf8_lossy(&output.stderr)
        );
        text
    }

    /// Submits a template with an experiment's overrides; the job's number.
    fn submit(&self, template: &str, experiment: &Experiment) -> String {
        let output = format!("--output={}", experiment.dir.join("batch.out").display());
        let mut arguments = vec![
            "sbatch",
            "--parsable",
            "--chdir",
            root().to_str().unwrap(),
            &output,
            template,
        ];
        let overrides = experiment.arguments();
        arguments.extend(overrides.iter().map(String::as_str));
        self.run(&arguments).trim().to_owned()
    }

    /// State of a job and how often it was restarted.
    fn state(&self, job: &str) -> (String, String) {
        let text = self.run(&["scontrol", "show", "job", job]);
        let field = |name: &str| {
            let at = text
                .find(&format!("{name}="))
                .unwrap_or_else(|| panic!("no {name} in {text}"));
            text[at + name.len() + 1..]
                .split_whitespace()
                .next()
                .unwrap_or("")
                .to_owned()
        };
        (field("JobState"), field("Restarts"))
    }

    /// Waits until the job is COMPLETED.
    fn wait(&self, job: &str, experiment: &Experiment, limit: Duration) {
        let end = Instant::now() + limit;
        loop {
            let (state, _) = self.state(job);
            match state.as_str() {
                "COMPLETED" => return,
                "PENDING" | "RUNNING" | "COMPLETING" | "CONFIGURING" | "REQUEUED" => {}
                other => panic!("job {job} is {other}:\n{}", batch_output(experiment)),
            }
            assert!(
                Instant::now() < end,
                "job {job} is {state} after {limit:?}:\n{}",
                batch_output(experiment)
            );
            std::thread::sleep(Duration::from_millis(250));
        }
    }
}

impl Drop for Slurm {
    fn drop(&mut self) {
        let output = self.script("down", &[]);
        if !output.status.success() {
            eprintln!("slurm.sh down: {}", String::from_utf8_lossy(&output.stderr));
        }
    }
}

fn batch_output(experiment: &Experiment) -> String {
    std::fs::read_to_string(experiment.dir.join("batch.out")).unwrap_or_default()
}

fn demo(name: &str, config: &str) -> Experiment {
    let mut experiment = Experiment::new(name, config, &demo_inputs(1));
    if !long() {
        experiment
            .set("TOTAL_TRAINING_STEPS", 3)
            .set("TRAIN_BSZ", 4)
            .set("TRAIN_MINI_BSZ", 4)
            .set("N_RESP", 4)
            .set("VAL_N", 1);
    }
    experiment
}

const LIMIT: Duration = Duration::from_secs(1500);

#[test]
fn train_sync_runs_on_two_nodes_and_a_second_submission_has_nothing_to_do() {
    let _turn = Turn::take();
    let Some(slurm) = Slurm::up("sync") else { return };
    let mut experiment = demo("slurm-sync", "configs/demo.env");
    experiment.set("NNODES", 2).set("N_NODES_TRAIN", 2);
    let job = slurm.submit("slurm/train_sync.sbatch", &experiment);
    slurm.wait(&job, &experiment, LIMIT);
    let rows = experiment.metrics();
    let steps = if long() { 20 } else { 3 };
    assert_eq!(
        rows.keys().next_back(),
        Some(&steps),
        "{}",
        batch_output(&experiment)
    );
    let log = std::fs::read_to_string(root().join(format!("logs/slurm/{job}/attempt-0/rank-0.log"))).unwrap();
    assert!(log.contains("2 of 2 ranks"), "both nodes take part:\n{log}");
    if long() {
        let reward = |s: u64| rows[&s]["critic/score/mean"];
        let last = (reward(18) + reward(19) + reward(20)) / 3.0;
        eprintln!(
            "slurm sync: reward {:.3} in step 1, {last:.3} over the last three",
            reward(1)
        );
        assert!(last >= 0.85 && last >= reward(1) + 0.4);
    }

    // The same line again: the run is complete, so the job ends at once and changes nothing.
    let again = slurm.submit("slurm/train_sync.sbatch", &experiment);
    slurm.wait(&again, &experiment, LIMIT);
    assert_eq!(experiment.metrics(), rows);
}

#[test]
fn train_async_runs_on_two_nodes_and_a_signal_requeues_it() {
    let _turn = Turn::take();
    let Some(slurm) = Slurm::up("async") else { return };
    let mut experiment = demo("slurm-async", "configs/demo_async.env");
    if !long() {
        experiment.set("TOTAL_TRAINING_STEPS", 8);
    }
    let steps = if long() { 20 } else { 8 };
    let job = slurm.submit("slurm/train_async.sbatch", &experiment);

    // What Slurm sends ahead of the time limit, here after the first step.
    let end = Instant::now() + Duration::from_secs(300);
    while !experiment.dir.join("logs/test.jsonl").exists() || experiment.metrics().keys().max() < Some(&1) {
        assert!(
            Instant::now() < end,
            "no step within 300 s:\n{}",
            batch_output(&experiment)
        );
        std::thread::sleep(Duration::from_millis(100));
    }
    slurm.run(&["scancel", "--signal=USR1", "--batch", &job]);
    let end = Instant::now() + Duration::from_secs(180);
    loop {
        let (state, restarts) = slurm.state(&job);
        if restarts == "1" {
            break;
        }
        assert!(
            Instant::now() < end,
            "job {job} is {state} with {restarts} restarts:\n{}",
            batch_output(&experiment)
        );
        std::thread::sleep(Duration::from_millis(250));
    }
    let before = experiment.metrics().keys().copied().max().unwrap();
    assert!(before < steps, "the run was over before the signal came");
    // Slurm holds a requeued job for two minutes; tests wait only until the nodes have cleaned up.
    std::thread::sleep(Duration::from_secs(8));
    let _ = slurm.script(
        "run",
        &["scontrol", "update", &format!("jobid={job}"), "StartTime=now"],
    );
    slurm.wait(&job, &experiment, LIMIT);
    assert_eq!(
        experiment.metrics().keys().next_back(),
        Some(&steps),
        "{}",
        batch_output(&experiment)
    );
    let attempts = root().join(format!("logs/slurm/{job}"));
    assert!(
        attempts.join("attempt-0").is_dir() && attempts.join("attempt-1").is_dir(),
        "one log folder per attempt"
    );
    let log = std::fs::read_to_string(attempts.join("attempt-1/rank-0.log")).unwrap();
    assert!(
        log.contains("resuming after step"),
        "the second attempt goes on from a checkpoint:\n{log}"
    );
}
