//! `kill -9` at random moments, and the same command again, until the run is over.
//!
//! The child is a whole run in small: four runners, a trainer, a checkpoint every second step. It writes
//! down what it saw the moment it saw it; the parent reads the notes of all lives together.

use super::*;
use crate::base::{PolicyVersion, Submitted, TrialSink};
use std::{
    collections::BTreeSet,
    fs::{File, OpenOptions},
    io::Write,
    os::unix::process::ExitStatusExt,
    sync::atomic::{AtomicBool, Ordering},
};

const ROLE: &str = "LEGORL_TEST_KILL_DIR";
const STEPS: u32 = 12;

fn kill_config(dir: &Path) -> BufferConfig {
    BufferConfig {
        n_resp: 3,
        staleness: 1.0,
        total_steps: STEPS,
        roll_bytes: 4000,
        ..config(&dir.join("buffer"))
    }
}

/// One run, from the last checkpoint to the end.
fn live(dir: &Path) {
    let checkpoint = dir.join("checkpoint.json");
    let saved = std::fs::read(&checkpoint).ok();
    let resume = saved.map(|text| serde_json::from_slice::<BufferManifest>(&text).expect("published whole"));
    let buffer = open(&kill_config(dir), resume.as_ref());
    let notes = OpenOptions::new()
        .create(true)
        .append(true)
        .open(dir.join("notes"))
        .expect("writable");
    // One write call a line: a kill leaves whole lines.
    let note = |line: String| (&notes).write_all(format!("{line}\n").as_bytes()).expect("room");
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                while !is_over.load(Ordering::Relaxed) {
                    let TrialPlanStep::Run(trial) = buffer.next() else {
                        std::thread::sleep(Duration::from_micros(300));
                        continue;
                    };
                    note(format!("run {}", trial.key));
                    let version = buffer.status().version.0;
                    std::thread::sleep(Duration::from_micros(trial.seed % 3000));
                    let answer = buffer.submit(finished(trial.key, version)).expect("stored");
                    if answer == Submitted::Stored {
                        note(format!("ack {}", trial.key));
                    }
                }
            });
        }
        let first = buffer.status().version.0 + 1;
        for step in first..=STEPS {
            let batch = buffer.next_batch(step, soon()).expect("complete");
            let digest = crc32fast::hash(format!("{batch:?}").as_bytes());
            note(format!("batch {step} {digest:08x}"));
            std::thread::sleep(Duration::from_millis(2));
            buffer.step_done(PolicyVersion(step)).expect("in order");
            if step % 2 == 0 {
                let manifest = buffer.manifest();
                let fresh = dir.join("checkpoint.new");
                let mut file = File::create(&fresh).expect("writable");
                file.write_all(&serde_json::to_vec(&manifest).expect("it is serde"))
                    .expect("room");
                file.sync_all().expect("durable");
                std::fs::rename(&fresh, &checkpoint).expect("published");
                buffer.retain(&manifest).expect("deleted");
            }
        }
        is_over.store(true, Ordering::Relaxed);
    });
    note("over".to_owned());
}

#[test]
fn a_run_that_is_killed_at_random_trains_on_every_trial_once() {
    if let Ok(dir) = std::env::var(ROLE) {
        live(Path::new(&dir));
        return;
    }
    let dir = tempfile::tempdir().expect("a folder");
    let mut kills = 0;
    for life in 0u64.. {
        assert!(life < 200, "the run does not come to its end");
        let mut child = this_test("kill::a_run_that_is_killed_at_random_trains_on_every_trial_once")
            .env(ROLE, dir.path())
            .stdout(std::process::Stdio::null())
            .stderr(File::create(dir.path().join("stderr")).expect("writable"))
            .spawn()
            .expect("it starts");
        // Longer and longer, so that the run gets on; after twenty kills it is left alone.
        let patience = match kills < 20 {
            true => Duration::from_millis(15 + life * 7919 % 60 + life * 4),
            false => Duration::from_secs(120),
        };
        let end = Instant::now() + patience;
        let status = loop {
            if let Some(status) = child.try_wait().expect("it is ours") {
                break status;
            }
            if Instant::now() > end {
                child.kill().expect("it is ours");
                break child.wait().expect("it is ours");
            }
            std::thread::sleep(Duration::from_millis(1));
        };
        if status.success() {
            break;
        }
        let stderr = std::fs::read_to_string(dir.path().join("stderr")).expect("readable");
        assert_eq!(status.signal(), Some(libc::SIGKILL), "{stderr}");
        kills += 1;
    }
    assert!(kills > 3, "{kills} kills");

    let notes = std::fs::read_to_string(dir.path().join("notes")).expect("readable");
    let mut acknowledged = BTreeSet::new();
    let mut batches = BTreeMap::new();
    for line in notes.lines() {
        match line.split_once(' ').unwrap_or((line, "")) {
            ("run", key) => assert!(!acknowledged.contains(key), "{key} was stored and ran again"),
            ("ack", key) => assert!(acknowledged.insert(key), "{key} was stored twice"),
            ("batch", batch) => {
                let (step, digest) = batch.split_once(' ').expect("two words");
                let first = *batches.entry(step).or_insert(digest);
                assert_eq!(first, digest, "step {step} differs after a restart");
            }
            _ => assert_eq!(line, "over"),
        }
    }
    assert_eq!(batches.len(), STEPS as usize);
    let history = super::super::read_history(&dir.path().join("buffer")).expect("readable");
    let trained: Vec<String> = history
        .iter()
        .flat_map(|d| d.trials())
        .map(|k| k.to_string())
        .collect();
    let distinct: BTreeSet<&str> = trained.iter().map(String::as_str).collect();
    assert_eq!(distinct.len(), trained.len(), "a trial was trained twice");
    assert!(
        acknowledged.iter().all(|key| distinct.contains(key)),
        "a stored trial was lost"
    );
}
