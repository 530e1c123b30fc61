//! Tests of the buffer. `pacing` drives the schedule alone, `record` the bytes, `files` whole runs on
//! real files, `damage` torn tails and corruption, `full_disk` and `kill` processes of their own, and
//! `model` random runs with restarts.

mod damage;
mod files;
mod full_disk;
mod kill;
mod model;
mod pacing;
mod record;

use super::{schedule, Buffer, BufferConfig, BufferManifest};
use crate::base::{
    DropReason, StopReason, TokenSequence, Trajectory, TrialAssignment, TrialEnd, TrialKey, TrialOutcome,
    TrialPlan, TrialPlanStep, TrialTiming,
};
use std::{
    collections::BTreeMap,
    path::Path,
    sync::Arc,
    time::{Duration, Instant},
};

fn config(dir: &Path) -> BufferConfig {
    BufferConfig {
        dir: dir.to_owned(),
        n_resp: 2,
        train_bsz: 2,
        staleness: 0.0,
        total_steps: 3,
        n_rows: 5,
        seed: 11,
        max_attempts: 2,
        roll_bytes: 1 << 20,
    }
}

fn open(config: &BufferConfig, resume: Option<&BufferManifest>) -> Arc<Buffer> {
    Buffer::open(config.clone(), resume).expect("the buffer opens")
}

fn soon() -> Instant {
    Instant::now() + Duration::from_secs(20)
}

/// A trial of `tokens` tokens, two prompt tokens, sampled by `version`; its contents depend on the key.
fn trajectory(key: TrialKey, version: u32, tokens: usize) -> Trajectory {
    let sampled = |i: usize| i >= 2 && i % 7 != 5;
    let salt = (key.group.0 as u32).wrapping_mul(31) + key.sample;
    let sequence = TokenSequence {
        token_ids: (0..tokens as u32).map(|i| (i * 17).wrapping_add(salt)).collect(),
        loss_mask: (0..tokens).map(sampled).collect(),
        logprobs: (0..tokens)
            .map(|i| {
                if sampled(i) {
                    -0.125 * (1 + i % 9) as f32
                } else {
                    0.0
                }
            })
            .collect(),
        versions: (0..tokens)
            .map(|i| if sampled(i) { version } else { 0 })
            .collect(),
        prompt_len: 2,
        weight: 1.0,
        routing: None,
    };
    Trajectory {
        key,
        attempt: 0,
        task: format!("task-{}", key.group),
        session: format!("session-{key}"),
        outcome: TrialOutcome {
            reward: 0.1 + 0.2,
            rewards: BTreeMap::from([("reward".to_owned(), 0.1 + 0.2), ("style".to_owned(), -1.5)]),
            stop: StopReason::AgentCompleted,
        },
        sequences: vec![sequence],
        turns: 3,
        malformed_tool_calls: 1,
        timing: TrialTiming {
            env_setup: 0.5,
            total: 12.25,
            ..TrialTiming::default()
        },
    }
}

fn finished(key: TrialKey, version: u32) -> TrialEnd {
    TrialEnd::Finished(trajectory(key, version, 40))
}

fn dropped(key: TrialKey) -> TrialEnd {
    TrialEnd::Dropped {
        key,
        attempt: 1,
        task: "task".to_owned(),
        reason: DropReason::LeaseLost,
        detail: "the sidecar went away".to_owned(),
    }
}

/// All trials that may start now.
fn run_all(plan: &dyn TrialPlan) -> Vec<TrialAssignment> {
    std::iter::from_fn(|| match plan.next() {
        TrialPlanStep::Run(assignment) => Some(assignment),
        _ => None,
    })
    .collect()
}

fn key(group: u64, sample: usize) -> TrialKey {
    schedule::key(group, sample)
}

/// A folder in memory where there is one: these tests flush a lot, and are not about the disk.
fn quick_dir() -> tempfile::TempDir {
    let shm = Path::new("/dev/shm");
    match shm.is_dir() {
        true => tempfile::tempdir_in(shm),
        false => tempfile::tempdir(),
    }
    .expect("a folder")
}

/// This test binary, set to run one test of this module alone in a process of its own.
fn this_test(name: &str) -> std::process::Command {
    let mut command = std::process::Command::new(std::env::current_exe().expect("this binary has a path"));
    command.args([&format!("train::buffer::tests::{name}"), "--exact", "--nocapture"]);
    command
}
