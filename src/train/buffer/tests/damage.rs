//! Torn tails are cut; damage to what was acknowledged is an error with file, byte and trial.

use super::super::{salvage, shard, BufferError};
use super::*;
use crate::base::{PolicyVersion, TrialSink};
use std::{fs, path::PathBuf};

/// A folder with one complete step in one shard, and the shard's records.
fn stored() -> (
    tempfile::TempDir,
    BufferConfig,
    PathBuf,
    Vec<(u64, u64, TrialKey)>,
) {
    let dir = quick_dir();
    let config = config(dir.path());
    let buffer = open(&config, None);
    for trial in run_all(&*buffer) {
        buffer.submit(finished(trial.key, 0)).expect("stored");
    }
    drop(buffer);
    let path = shard::path(dir.path(), 1);
    let scan = shard::scan(dir.path(), 1, true, |_| true).expect("whole");
    assert_eq!(scan.torn_bytes, 0);
    let records = scan
        .records
        .iter()
        .map(|(header, location)| (location.offset, location.len, header.key()))
        .collect();
    (dir, config, path, records)
}

fn flip(path: &Path, at: u64) {
    let mut bytes = fs::read(path).expect("readable");
    bytes[at as usize] ^= 0x10;
    fs::write(path, bytes).expect("writable");
}

#[test]
fn a_tail_torn_at_any_byte_is_cut_and_only_its_trial_runs_again() {
    let (_dir, config, path, records) = stored();
    let whole = fs::read(&path).expect("readable");
    let (offset, len, last) = records[3];
    for cut in (0..len).step_by(13).chain([len - 1]) {
        fs::write(&path, &whole[..(offset + cut) as usize]).expect("writable");
        let buffer = open(&config, None);
        let again: Vec<TrialKey> = run_all(&*buffer).iter().map(|t| t.key).collect();
        assert_eq!(again, [last], "cut after {cut} bytes of the record");
        assert_eq!(fs::metadata(&path).expect("there").len(), offset);
        buffer.submit(finished(last, 0)).expect("stored");
        drop(buffer);
        assert_eq!(
            open(&config, None)
                .next_batch(1, soon())
                .expect("whole again")
                .groups
                .len(),
            2
        );
        fs::remove_file(config.dir.join("deliveries.log")).expect("there");
    }
}

#[test]
fn a_tail_of_zeros_or_of_a_wrong_body_is_torn_too() {
    let (_dir, config, path, records) = stored();
    let whole = fs::read(&path).expect("readable");
    let mut zeros = whole.clone();
    zeros.resize(whole.len() + 4096, 0);
    fs::write(&path, zeros).expect("writable");
    assert_eq!(run_all(&*open(&config, None)), []);
    assert_eq!(fs::read(&path).expect("readable"), whole);
    flip(&path, records[3].0 + 100);
    assert_eq!(run_all(&*open(&config, None)).len(), 1);
}

/// Two records of one flush, of which the power failure left only the second: neither was acknowledged.
#[test]
fn a_hole_in_the_last_flush_is_torn_and_not_corrupt() {
    let (_dir, config, path, records) = stored();
    let mut bytes = fs::read(&path).expect("readable");
    let (first, second) = (records[2], records[3]);
    // As if they had been written together: the second knows of nothing durable behind the first.
    super::super::record::set_durable_before(&mut bytes[second.0 as usize..], first.0);
    bytes[first.0 as usize..(first.0 + first.1) as usize].fill(0);
    fs::write(&path, bytes).expect("writable");
    let again: Vec<TrialKey> = run_all(&*open(&config, None)).iter().map(|t| t.key).collect();
    assert_eq!(again, [first.2, second.2]);
}

#[test]
fn a_damaged_body_is_named_and_the_rest_stays_readable() {
    let (dir, config, path, records) = stored();
    let (offset, _, damaged) = records[1];
    flip(&path, offset + 120);
    let error = Buffer::open(config, None).expect_err("corrupt");
    let BufferError::Corrupt {
        path: p,
        offset: o,
        trial,
        ..
    } = &error
    else {
        panic!("{error}")
    };
    assert_eq!((p, *o, trial), (&path, offset, &damaged.to_string()));
    let text = error.to_string();
    assert!(
        text.contains("shard-000001.lrb") && text.contains("legorl-rank buffer salvage"),
        "{text}"
    );
    let scan = shard::scan(dir.path(), 1, true, |_| true).expect("scannable");
    let readable: Vec<TrialKey> = scan.records.iter().map(|(header, _)| header.key()).collect();
    assert_eq!(readable, [records[0].2, records[2].2, records[3].2]);
}

#[test]
fn a_damaged_header_is_skipped_to_the_next_record() {
    let (dir, config, path, records) = stored();
    flip(&path, records[1].0 + 9);
    let error = Buffer::open(config, None).expect_err("corrupt");
    assert!(
        matches!(&error, BufferError::Corrupt { offset, .. } if *offset == records[1].0),
        "{error}"
    );
    let scan = shard::scan(dir.path(), 1, true, |_| true).expect("scannable");
    assert_eq!(scan.records.len(), 3);
}

#[test]
fn salvage_keeps_what_is_readable_and_lets_the_rest_run_again() {
    let (dir, config, path, records) = stored();
    flip(&path, records[1].0 + 120);
    let report = salvage(dir.path()).expect("salvaged");
    assert_eq!(
        (report.kept, report.lost.len(), report.set_aside.len()),
        (3, 1, 1)
    );
    assert!(
        report.lost[0].contains(&records[1].2.to_string()),
        "{:?}",
        report.lost
    );
    assert!(report.set_aside[0].exists());
    let buffer = open(&config, None);
    let again: Vec<TrialKey> = run_all(&*buffer).iter().map(|t| t.key).collect();
    assert_eq!(again, [records[1].2]);
    buffer.submit(finished(records[1].2, 0)).expect("stored");
    let batch = buffer.next_batch(1, soon()).expect("complete");
    for (record, read) in records
        .iter()
        .zip(batch.groups.iter().flat_map(|g| &g.trajectories))
    {
        assert_eq!(*read, trajectory(record.2, 0, 40));
    }
    drop(buffer);
    assert_eq!(salvage(dir.path()).expect("nothing to do"), Default::default());
}

#[test]
fn damage_to_a_trial_that_is_trained_does_not_stop_the_run() {
    let (_dir, config, path, records) = stored();
    let buffer = open(&config, None);
    buffer.next_batch(1, soon()).expect("complete");
    buffer.step_done(PolicyVersion(1)).expect("in order");
    let checkpoint = buffer.manifest();
    drop(buffer);
    flip(&path, records[1].0 + 120);
    assert_eq!(run_all(&*open(&config, Some(&checkpoint))).len(), 4);
    assert!(matches!(
        Buffer::open(config, None),
        Err(BufferError::Corrupt { .. })
    ));
}

#[test]
fn damage_while_the_run_goes_on_is_found_when_it_is_read() {
    let (_dir, config, path, records) = stored();
    let buffer = open(&config, None);
    flip(&path, records[2].0 + 120);
    let error = buffer.next_batch(1, soon()).expect_err("corrupt");
    assert!(
        matches!(&error, BufferError::Corrupt { offset, .. } if *offset == records[2].0),
        "{error}"
    );
}

#[test]
fn foreign_and_newer_files_are_refused() {
    let (_dir, config, path, _) = stored();
    let whole = fs::read(&path).expect("readable");
    let mut newer = whole.clone();
    newer[8] = 3;
    fs::write(&path, newer).expect("writable");
    let error = Buffer::open(config.clone(), None).expect_err("newer");
    assert!(
        error
            .to_string()
            .contains("format version 3, and this program reads versions 1 to 2"),
        "{error}"
    );
    fs::write(&path, b"something else, longer than a header").expect("writable");
    let error = Buffer::open(config.clone(), None).expect_err("foreign");
    assert!(error.to_string().contains("not a shard"), "{error}");
    // A shard that was renamed.
    fs::write(&path, whole).expect("writable");
    fs::rename(&path, shard::path(&config.dir, 4)).expect("renamed");
    assert!(matches!(
        Buffer::open(config, None),
        Err(BufferError::Format { .. })
    ));
}

/// Version 1 differs from 2 by the rows of routing, which it never has.
#[test]
fn a_shard_of_version_1_is_read_and_not_continued() {
    let (_dir, config, path, records) = stored();
    let mut old = fs::read(&path).expect("readable");
    old[8] = 1;
    let crc = crc32fast::hash(&old[..28]);
    old[28..32].copy_from_slice(&crc.to_le_bytes());
    old.extend_from_slice(&[7; 30]); // a torn tail
    fs::write(&path, &old).expect("writable");
    let buffer = open(&config, None);
    assert_eq!(run_all(&*buffer), [], "all of its trials are there");
    buffer.next_batch(1, soon()).expect("complete");
    buffer.step_done(PolicyVersion(1)).expect("in order");
    let trial = run_all(&*buffer)[0];
    buffer.submit(finished(trial.key, 1)).expect("stored");
    drop(buffer);
    let in_shard = |number, last| {
        let scan = shard::scan(&config.dir, number, last, |_| true).expect("whole");
        assert_eq!((scan.damage.len(), scan.torn_bytes), (0, 0));
        scan.records.len()
    };
    assert_eq!((in_shard(1, false), in_shard(2, true)), (records.len(), 1));
    assert_eq!(fs::read(&path).expect("readable"), old[..old.len() - 30]);
}

#[test]
fn a_shard_whose_creation_was_interrupted_is_made_anew() {
    let (_dir, config, _, records) = stored();
    fs::write(shard::path(&config.dir, 2), b"LRB").expect("writable");
    let buffer = open(&config, None);
    assert_eq!(run_all(&*buffer), []);
    buffer.next_batch(1, soon()).expect("complete");
    buffer.step_done(PolicyVersion(1)).expect("in order");
    let trial = run_all(&*buffer)[0];
    buffer.submit(finished(trial.key, 1)).expect("stored");
    drop(buffer);
    assert_eq!(
        shard::scan(&config.dir, 2, true, |_| true)
            .expect("whole")
            .records
            .len(),
        1
    );
    assert_eq!(records.len(), 4);
}

/// Runs two steps, and gives the log's text.
fn two_steps() -> (tempfile::TempDir, BufferConfig, PathBuf, String) {
    let (dir, config, _, _) = stored();
    let buffer = open(&config, None);
    buffer.next_batch(1, soon()).expect("complete");
    buffer.step_done(PolicyVersion(1)).expect("in order");
    for trial in run_all(&*buffer) {
        buffer.submit(finished(trial.key, 1)).expect("stored");
    }
    buffer.next_batch(2, soon()).expect("complete");
    let path = dir.path().join("deliveries.log");
    let text = fs::read_to_string(&path).expect("readable");
    assert_eq!(text.lines().count(), 3);
    (dir, config, path, text)
}

#[test]
fn a_torn_line_of_the_log_was_never_a_batch() {
    let (_dir, config, path, text) = two_steps();
    for cut in [1, 2, 40] {
        fs::write(&path, &text[..text.len() - cut]).expect("writable");
        let buffer = open(&config, None);
        assert_eq!(fs::read_to_string(&path).expect("readable").lines().count(), 2);
        buffer.next_batch(1, Instant::now()).expect("logged");
        buffer.step_done(PolicyVersion(1)).expect("in order");
        buffer.next_batch(2, soon()).expect("complete");
        drop(buffer);
        assert_eq!(fs::read_to_string(&path).expect("readable"), text);
    }
}

#[test]
fn a_damaged_line_in_the_middle_of_the_log_is_an_error_with_its_number() {
    let (_dir, config, path, text) = two_steps();
    fs::write(&path, text.replacen("\"id\":0", "\"id\":7", 1)).expect("writable");
    let error = Buffer::open(config, None).expect_err("corrupt");
    assert!(
        matches!(&error, BufferError::CorruptLog { line: 2, .. }),
        "{error}"
    );
}
