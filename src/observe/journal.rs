//! The journal: an append-only file of JSON lines, one an event, over all attempts of a run.
//!
//! ```text
//! {"time":"2026-05-01T12:00:00.123Z","event":"trial_finished","trial":"train-g000003-s1","reward":1.0}
//! ```
//!
//! Each line is written with one call and reaches the operating system before [`Journal::record`]
//! returns, so a killed process loses no event that it recorded. A line that a crash has cut is
//! removed when the journal is opened. It is not synced: after a power failure the last lines may be
//! missing, and nothing that a resumed run needs is kept here alone.

use chrono::{SecondsFormat, Utc};
use serde_json::{Map, Value};
use std::{
    fs::{self, File, OpenOptions},
    io::{self, Read, Seek, SeekFrom, Write},
    path::{Path, PathBuf},
    sync::{
        atomic::{AtomicU64, Ordering},
        Mutex,
    },
};

/// The open journal; it may be shared by threads.
#[derive(Debug)]
pub struct Journal {
    path: PathBuf,
    file: Mutex<File>,
    lost: AtomicU64,
}

impl Journal {
    /// Opens or creates the file, and cuts a torn last line.
    pub fn open(path: &Path) -> io::Result<Self> {
        if let Some(parent) = path.parent() {
            fs::create_dir_all(parent)?;
        }
        let mut file = OpenOptions::new()
            .create(true)
            .append(true)
            .read(true)
            .open(path)?;
        cut_torn_line(&mut file)?;
        Ok(Self {
            path: path.to_path_buf(),
            file: Mutex::new(file),
            lost: AtomicU64::new(0),
        })
    }

    /// The file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Appends an event. `fields` is a JSON object whose members follow `time` and `event`. An event
    /// that cannot be written is counted and reported once; the run goes on.
    pub fn record(&self, event: &str, fields: Value) {
        let mut line = Map::new();
        let now = Utc::now().to_rfc3339_opts(SecondsFormat::Millis, true);
        line.insert("time".into(), now.into());
        line.insert("event".into(), event.into());
        match fields {
            Value::Object(members) => line.extend(members),
            Value::Null => {}
            other => {
                line.insert("value".into(), other);
            }
        }
        let mut text = Value::Object(line).to_string();
        text.push('\n');
        let written = self
            .file
            .lock()
            .unwrap_or_else(|poisoned| poisoned.into_inner())
            .write_all(text.as_bytes());
        if let Err(error) = written {
            if self.lost.fetch_add(1, Ordering::Relaxed) == 0 {
                tracing::warn!("the journal {} cannot be written: {error}", self.path.display());
            }
        }
    }

    /// Events that could not be written.
    pub fn lost(&self) -> u64 {
        self.lost.load(Ordering::Relaxed)
    }
}

/// Reads the whole lines of a journal; a torn last line is left out.
pub fn read(path: &Path) -> io::Result<Vec<Map<String, Value>>> {
    let text = fs::read_to_string(path)?;
    let whole = text.rfind('\n').map_or("", |end| &text[..end]);
    whole
        .lines()
        .enumerate()
        .map(|(number, line)| {
            serde_json::from_str(line).map_err(|error| {
                let place = format!("{}:{}: {error}", path.display(), number + 1);
                io::Error::new(io::ErrorKind::InvalidData, place)
            })
        })
        .collect()
}

fn cut_torn_line(file: &mut File) -> io::Result<()> {
    let length = file.metadata()?.len();
    // An event is far shorter than this; without a line end in it the file is no journal.
    let window = length.min(1 << 20);
    file.seek(SeekFrom::End(-(window as i64)))?;
    let mut tail = vec![0; window as usize];
    file.read_exact(&mut tail)?;
    let keep = match tail.iter().rposition(|b| *b == b'\n') {
        Some(end) => length - window + end as u64 + 1,
        None if window == length => 0,
        None => {
            return Err(io::Error::new(
                io::ErrorKind::InvalidData,
                "the journal has a line of more than 1 MiB",
            ))
        }
    };
    if keep < length {
        file.set_len(keep)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn events_survive_reopening_and_a_torn_line_does_not() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("run/journal.jsonl");
        Journal::open(&path)
            .unwrap()
            .record("started", json!({"attempt": 1}));
        OpenOptions::new()
            .append(true)
            .open(&path)
            .unwrap()
            .write_all(b"{\"time\":\"20")
            .unwrap();
        assert_eq!(read(&path).unwrap().len(), 1, "readers leave a torn line out");

        let journal = Journal::open(&path).unwrap();
        journal.record("step", json!({"step": 1}));
        let lines = read(&path).unwrap();
        assert_eq!(lines.len(), 2);
        assert_eq!(lines[0]["event"], "started");
        assert_eq!(lines[1]["step"], 1);
        assert_eq!(journal.lost(), 0);
    }

    #[test]
    fn a_damaged_line_in_the_middle_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("journal.jsonl");
        fs::write(&path, "{\"event\":\"a\"}\nnot json\n{\"event\":\"b\"}\n").unwrap();
        let error = read(&path).unwrap_err().to_string();
        assert!(error.contains("journal.jsonl:2"), "{error}");
    }
}
