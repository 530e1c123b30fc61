//! No room: a full file system, and a file-size limit. Both in a process of their own.

use super::super::{shard, BufferError};
use super::*;
use crate::base::{PolicyVersion, Submitted, TrialSink};
use std::process::Command;

const ROLE: &str = "LEGORL_TEST_BUFFER_DIR";

fn big(key: TrialKey) -> TrialEnd {
    TrialEnd::Finished(trajectory(key, 0, 4000))
}

/// Fills `dir` until a submit fails; makes room; goes on as if nothing had happened.
fn fill(dir: &Path, errno: i32, make_room: impl FnOnce()) {
    let mut config = config(dir);
    config.n_resp = 16;
    config.train_bsz = 4;
    let buffer = open(&config, None);
    let trials = run_all(&*buffer);
    let (mut stored, mut refused) = (Vec::new(), Vec::new());
    for trial in &trials {
        match buffer.submit(big(trial.key)) {
            Ok(answer) => {
                assert_eq!(answer, Submitted::Stored);
                stored.push(trial.key);
            }
            Err(error) => {
                assert_eq!(
                    error.source.as_ref().and_then(|e| e.raw_os_error()),
                    Some(errno),
                    "{error}"
                );
                assert!(error.to_string().contains("shard-000001.lrb"), "{error}");
                refused.push(trial.key);
            }
        }
    }
    assert!(stored.len() > 2 && refused.len() > 2, "{} stored", stored.len());
    assert!(refused.iter().all(|key| buffer.is_wanted(key)));
    // What did not fit left no trace.
    let scan = shard::scan(dir, 1, true, |_| true).expect("whole");
    assert_eq!(scan.records.len(), stored.len());
    assert_eq!(scan.torn_bytes, 0);

    make_room();
    for key in &refused {
        assert_eq!(
            buffer.submit(big(*key)).expect("there is room"),
            Submitted::Stored
        );
    }
    drop(buffer);
    let buffer = open(&config, None);
    let batch = buffer.next_batch(1, soon()).expect("all are stored");
    for (trial, read) in trials
        .iter()
        .zip(batch.groups.iter().flat_map(|g| &g.trajectories))
    {
        assert_eq!(*read, trajectory(trial.key, 0, 4000));
    }
}

#[test]
fn a_full_file_system_keeps_the_trial_for_later() {
    if let Ok(dir) = std::env::var(ROLE) {
        let dir = Path::new(&dir);
        let ballast = dir.join("ballast");
        std::fs::write(&ballast, vec![1; 3 << 20]).expect("room for it");
        fill(&dir.join("buffer"), libc::ENOSPC, || {
            std::fs::remove_file(&ballast).expect("it is there");
        });
        a_full_log(dir);
        return;
    }
    let dir = tempfile::tempdir().expect("a folder");
    let probe = "mount -t tmpfs -o size=3500k tmpfs \"$0\"";
    let works = Command::new("unshare")
        .args(["-Urm", "sh", "-c", probe])
        .arg(dir.path())
        .output()
        .is_ok_and(|output| output.status.success());
    if !works {
        eprintln!("skipped: no file system can be mounted in a namespace here");
        return;
    }
    let child = this_test("full_disk::a_full_file_system_keeps_the_trial_for_later");
    let output = Command::new("unshare")
        .args(["-Urm", "sh", "-c", &format!("{probe} && shift 0 && exec \"$@\"")])
        .arg(dir.path())
        .arg(child.get_program())
        .args(child.get_args())
        .env(ROLE, dir.path())
        .output()
        .expect("it starts");
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(
        output.status.success() && text.contains("1 passed"),
        "{text}{}",
        String::from_utf8_lossy(&output.stderr)
    );
}

/// The delivery log has no room: the batch is not handed out; then it is, the same.
fn a_full_log(dir: &Path) {
    let config = config(&dir.join("other"));
    let buffer = open(&config, None);
    for trial in run_all(&*buffer) {
        buffer.submit(finished(trial.key, 0)).expect("stored");
    }
    let ballast = dir.join("ballast");
    // tmpfs gives space by pages: fill the log's last page first, then the file system.
    let log = config.dir.join("deliveries.log");
    let taken = std::fs::metadata(&log).expect("there").len() as usize;
    let mut text = std::fs::read(&log).expect("readable");
    let name_end = text.len() - 1;
    text.splice(name_end..name_end, vec![b' '; 4090 - taken]);
    drop(buffer);
    std::fs::write(&log, text).expect("room for it");
    let buffer = open(&config, None);
    let mut size = 8 << 20;
    while size > 0 {
        let written = std::fs::OpenOptions::new()
            .create(true)
            .append(true)
            .open(&ballast)
            .and_then(|mut file| std::io::Write::write_all(&mut file, &vec![1; size]));
        if written.is_err() {
            size /= 2;
        }
    }
    let error = buffer.next_batch(1, soon()).expect_err("no room for the line");
    let BufferError::Io { path, source, .. } = &error else {
        panic!("{error}")
    };
    assert_eq!((path, source.raw_os_error()), (&log, Some(libc::ENOSPC)));
    assert!(super::super::read_history(&config.dir)
        .expect("readable")
        .is_empty());
    std::fs::remove_file(&ballast).expect("it is there");
    buffer.next_batch(1, soon()).expect("there is room");
    buffer.step_done(PolicyVersion(1)).expect("in order");
    assert_eq!(buffer.history().expect("readable").len(), 1);
}

#[test]
fn a_file_size_limit_is_an_error_and_no_signal() {
    let limit = |bytes: u64| {
        let limit = libc::rlimit {
            rlim_cur: bytes,
            rlim_max: libc::RLIM_INFINITY,
        };
        // SAFETY: a plain call with a valid argument, in a process that runs this test alone.
        assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_FSIZE, &limit) }, 0);
    };
    if let Ok(dir) = std::env::var(ROLE) {
        limit(300_000);
        fill(Path::new(&dir), libc::EFBIG, || limit(libc::RLIM_INFINITY));
        return;
    }
    let dir = quick_dir();
    let output = this_test("full_disk::a_file_size_limit_is_an_error_and_no_signal")
        .env(ROLE, dir.path())
        .output()
        .expect("it starts");
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(
        output.status.success() && text.contains("1 passed"),
        "{text}{}",
        String::from_utf8_lossy(&output.stderr)
    );
}
