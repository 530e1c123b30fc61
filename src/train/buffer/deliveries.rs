//! The delivery log: which trials each step was trained on.
//!
//! One text file, `deliveries.log`, appended and made durable *before* a batch is handed out. It is the
//! record of exactly-once training and small (some kB a step), so it is kept for the whole run.
//!
//! ```text
//! legorl-deliveries 1 n_resp=8 train_bsz=64 n_rows=500 seed=42
//! 5f2a9c01 {"step":1,"groups":[{"id":0,"start":0,"finished":[0,1,3],"dropped":[[2,"lease_lost"]],"cut":[]}]}
//! ```
//! A line is the CRC-32 of its JSON in eight hexadecimal digits, a blank, the JSON, a newline. Steps
//! count up from 1 without a gap. A last line that is not whole was never acknowledged and is cut.

use super::{error::BufferError, BufferConfig};
use crate::base::{DropReason, GroupId, Purpose, TrialKey};
use serde::{Deserialize, Serialize};
use std::{
    fs::{File, OpenOptions},
    io::{self, Read},
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
};

pub(super) const FILE_NAME: &str = "deliveries.log";
const MAGIC: &str = "legorl-deliveries";
const VERSION: &str = "1";

/// One group of a delivered batch.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeliveredGroup {
    /// Group.
    pub id: u64,
    /// Weight version at its start.
    pub start: u32,
    /// Samples that the step was trained on.
    pub finished: Vec<u32>,
    /// Samples without a verdict.
    pub dropped: Vec<(u32, DropReason)>,
    /// Samples that still ran; later results of them are refused.
    pub cut: Vec<u32>,
}

/// The batch of one step.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Delivery {
    /// Global step, from 1.
    pub step: u32,
    /// Its groups in the order in which the trainer saw them.
    pub groups: Vec<DeliveredGroup>,
}

impl Delivery {
    /// Trials that contributed to the step.
    pub fn trials(&self) -> impl Iterator<Item = TrialKey> + '_ {
        self.groups.iter().flat_map(|group| {
            group.finished.iter().map(|sample| TrialKey {
                purpose: Purpose::Train,
                group: GroupId(group.id),
                sample: *sample,
            })
        })
    }
}

/// The open log.
#[derive(Debug)]
pub(super) struct DeliveryLog {
    path: PathBuf,
    file: File,
    /// Bytes of whole lines.
    len: u64,
    /// A failed append may have left bytes beyond `len`.
    dirty: bool,
}

/// A delivery and the log's length after it.
pub(super) struct Logged {
    pub delivery: Delivery,
    pub end: u64,
}

impl DeliveryLog {
    /// Opens or creates the log in `dir` and returns what it holds.
    pub fn open(dir: &Path, config: &BufferConfig) -> Result<(Self, Vec<Logged>), BufferError> {
        let path = dir.join(FILE_NAME);
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .open(&path)
            .map_err(BufferError::io(&path, "open"))?;
        let mut text = Vec::new();
        (&file)
            .read_to_end(&mut text)
            .map_err(BufferError::io(&path, "read"))?;
        let mut log = Self {
            path,
            file,
            len: 0,
            dirty: false,
        };
        if !text.contains(&b'\n') {
            // New, or the very first line was torn: nothing was ever delivered.
            log.dirty = !text.is_empty();
            log.write(header(config).as_bytes())?;
            return Ok((log, Vec::new()));
        }
        let (entries, whole) = parse(&log.path, &text, Some(config))?;
        log.len = whole;
        if whole < text.len() as u64 {
            tracing::warn!(
                file = %log.path.display(),
                bytes = text.len() as u64 - whole,
                "cut the torn last line of the delivery log; its batch was never handed out"
            );
            log.dirty = true;
        }
        log.clean()?;
        Ok((log, entries))
    }

    /// Appends a delivery; it is durable on return. Returns the log's new length.
    pub fn append(&mut self, delivery: &Delivery) -> Result<u64, BufferError> {
        let json = serde_json::to_string(delivery).map_err(|e| BufferError::Format {
            path: self.path.clone(),
            problem: e.to_string(),
        })?;
        self.write(format!("{:08x} {json}\n", crc32fast::hash(json.as_bytes())).as_bytes())?;
        Ok(self.len)
    }

    fn write(&mut self, line: &[u8]) -> Result<(), BufferError> {
        self.clean()?;
        self.dirty = true;
        self.file
            .write_all_at(line, self.len)
            .and_then(|()| self.file.sync_data())
            .map_err(BufferError::io(&self.path, "write"))?;
        self.len += line.len() as u64;
        self.dirty = false;
        Ok(())
    }

    fn clean(&mut self) -> Result<(), BufferError> {
        if self.dirty {
            self.file
                .set_len(self.len)
                .and_then(|()| self.file.sync_data())
                .map_err(BufferError::io(&self.path, "cut the torn line of"))?;
            self.dirty = false;
        }
        Ok(())
    }

    pub fn path(&self) -> &Path {
        &self.path
    }
}

/// All deliveries of the log in `dir`, in step order; the log may be in use. This is the history that
/// proves that every trial was trained on at most once.
pub fn read_history(dir: &Path) -> Result<Vec<Delivery>, BufferError> {
    let path = dir.join(FILE_NAME);
    let text = match std::fs::read(&path) {
        Ok(text) => text,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(e) => return Err(BufferError::io(&path, "read")(e)),
    };
    if !text.contains(&b'\n') {
        return Ok(Vec::new());
    }
    let (entries, _) = parse(&path, &text, None)?;
    Ok(entries.into_iter().map(|logged| logged.delivery).collect())
}

fn header(config: &BufferConfig) -> String {
    let identity: Vec<String> = config
        .identity()
        .iter()
        .map(|(name, value)| format!("{name}={value}"))
        .collect();
    format!("{MAGIC} {VERSION} {}\n", identity.join(" "))
}

fn parse(path: &Path, text: &[u8], config: Option<&BufferConfig>) -> Result<(Vec<Logged>, u64), BufferError> {
    let mut entries: Vec<Logged> = Vec::new();
    let mut at = 0usize;
    for (i, line) in text.split_inclusive(|byte| *byte == b'\n').enumerate() {
        let end = at + line.len();
        let parsed = if i == 0 {
            check_header(path, line, config)?;
            Ok(None)
        } else {
            let next = entries.last().map_or(1, |logged| logged.delivery.step + 1);
            parse_line(line, next).map(Some)
        };
        match parsed {
            Ok(delivery) => entries.extend(delivery.map(|delivery| Logged {
                delivery,
                end: end as u64,
            })),
            Err(_) if end == text.len() => return Ok((entries, at as u64)),
            Err(problem) => {
                return Err(BufferError::CorruptLog {
                    path: path.to_owned(),
                    line: i + 1,
                    problem,
                })
            }
        }
        at = end;
    }
    Ok((entries, at as u64))
}

fn check_header(path: &Path, line: &[u8], config: Option<&BufferConfig>) -> Result<(), BufferError> {
    let format = |problem: String| BufferError::Format {
        path: path.to_owned(),
        problem,
    };
    let line = std::str::from_utf8(line)
        .map_err(|e| format(e.to_string()))?
        .trim_end();
    let mut words = line.split(' ');
    if words.next() != Some(MAGIC) {
        return Err(format(format!(
            "the first line is `{line}` and not a delivery log's"
        )));
    }
    match words.next() {
        Some(VERSION) => {}
        other => {
            return Err(format(format!(
                "format version {} and this program reads {VERSION}",
                other.unwrap_or("(none)")
            )))
        }
    }
    let Some(config) = config else { return Ok(()) };
    for ((name, wanted), word) in config.identity().into_iter().zip(words) {
        let stored = word
            .strip_prefix(name)
            .and_then(|w| w.strip_prefix('='))
            .and_then(|w| w.parse().ok())
            .ok_or_else(|| format(format!("`{word}` stands where {name} belongs")))?;
        if stored != wanted {
            return Err(BufferError::Identity {
                path: path.to_owned(),
                name,
                stored,
                wanted,
            });
        }
    }
    Ok(())
}

fn parse_line(line: &[u8], next: u32) -> Result<Delivery, String> {
    let line = line.strip_suffix(b"\n").ok_or("the newline is missing")?;
    let (crc, json) = line.split_at_checked(9).ok_or("it is too short")?;
    let crc = std::str::from_utf8(crc)
        .ok()
        .and_then(|crc| u32::from_str_radix(crc.trim_end(), 16).ok())
        .ok_or("it does not start with a checksum")?;
    if crc != crc32fast::hash(json) {
        return Err("the checksum is wrong".to_owned());
    }
    let delivery: Delivery = serde_json::from_slice(json).map_err(|e| e.to_string())?;
    if delivery.step != next {
        return Err(format!("step {} follows where {next} belongs", delivery.step));
    }
    Ok(delivery)
}
