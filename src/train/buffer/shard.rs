//! Shard files: their header, the scan that recovers them, and the writer with group commit.
//!
//! ```text
//! shard-000001.lrb
//!   0  8 bytes  MAGIC
//!   8  u32      FORMAT_VERSION
//!  12  u32      number of the shard
//!  16  12 bytes zero
//!  28  u32      CRC-32 of bytes 0..28
//!  32  records (see `record`)
//! ```
//!
//! Writer: one at a time, `pwrite` then `fdatasync`. Submits that meet while a flush is on its way are
//! written together by the next one. A shard that reached `roll_bytes` is closed and the next number
//! begins. Deleter: [`super::Buffer::retain`].
//!
//! Recovery tells two kinds of damage apart. Every record carries `durable_before`, the length that was
//! flushed before it was written. A bad record at or beyond the largest such mark of the last shard was
//! never acknowledged: it and what follows is the torn tail, and is cut. A bad record before the mark
//! was acknowledged once: that is corruption, and reported; the scan goes on at the next whole record.

use super::{
    error::BufferError,
    mmap::{map_file, Location},
    record::{set_durable_before, RecordHeader, HEADER_BYTES, RECORD_MARK},
};
use std::{
    fs::{File, OpenOptions},
    io,
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
    sync::{Condvar, Mutex, MutexGuard, PoisonError},
};

pub(super) const MAGIC: &[u8; 8] = b"LRBSHARD";
/// What this program writes. Version 1 had no rows of routing; its shards are read, and not continued.
pub(super) const FORMAT_VERSION: u32 = 2;
const OLDEST_VERSION: u32 = 1;
pub(super) const SHARD_HEADER_BYTES: u64 = 32;

/// Path of a shard.
pub(super) fn path(dir: &Path, shard: u32) -> PathBuf {
    dir.join(format!("shard-{shard:06}.lrb"))
}

/// Numbers of the shards in `dir`, ascending.
pub(super) fn list(dir: &Path) -> Result<Vec<u32>, BufferError> {
    let mut shards = Vec::new();
    for entry in std::fs::read_dir(dir).map_err(BufferError::io(dir, "list"))? {
        let name = entry.map_err(BufferError::io(dir, "list"))?.file_name();
        let number: Option<u32> = name
            .to_str()
            .and_then(|name| name.strip_prefix("shard-")?.strip_suffix(".lrb")?.parse().ok());
        shards.extend(number);
    }
    shards.sort_unstable();
    Ok(shards)
}

fn header(shard: u32, version: u32) -> [u8; SHARD_HEADER_BYTES as usize] {
    let mut bytes = [0; SHARD_HEADER_BYTES as usize];
    bytes[..8].copy_from_slice(MAGIC);
    bytes[8..12].copy_from_slice(&version.to_le_bytes());
    bytes[12..16].copy_from_slice(&shard.to_le_bytes());
    let crc = crc32fast::hash(&bytes[..28]);
    bytes[28..].copy_from_slice(&crc.to_le_bytes());
    bytes
}

/// A damaged stretch of a shard.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Damage {
    pub offset: u64,
    /// The record's header, when that is whole.
    pub header: Option<RecordHeader>,
    pub problem: String,
}

/// What a shard holds.
#[derive(Debug, Default)]
pub(super) struct Scan {
    /// Whole records in file order.
    pub records: Vec<(RecordHeader, Location)>,
    /// Acknowledged records that cannot be read.
    pub damage: Vec<Damage>,
    /// Length up to the end of the last whole record.
    pub end: u64,
    /// Bytes beyond `end` that were never acknowledged; 0 unless this is the last shard.
    pub torn_bytes: u64,
    /// What the torn part starts with, when its header is whole.
    pub torn: Option<RecordHeader>,
}

/// Reads a whole shard. `check_body` says whether a record's body is worth its checksum pass: trials
/// that are already trained are not. `is_last` allows a torn tail.
pub(super) fn scan(
    dir: &Path,
    shard: u32,
    is_last: bool,
    check_body: impl Fn(&RecordHeader) -> bool,
) -> Result<Scan, BufferError> {
    let path = path(dir, shard);
    let file_len = std::fs::metadata(&path)
        .map_err(BufferError::io(&path, "read the length of"))?
        .len();
    if file_len < SHARD_HEADER_BYTES {
        // Creation was interrupted. The header is flushed before the first record is written.
        if is_last {
            return Ok(Scan {
                torn_bytes: file_len,
                ..Scan::default()
            });
        }
        return Err(BufferError::Format {
            path,
            problem: format!("it has {file_len} bytes, less than a shard's header; {REMEDY}"),
        });
    }
    let map = map_file(&path)?;
    let bytes: &[u8] = &map;
    check_header(&path, shard, bytes)?;

    let mut scan = Scan {
        end: SHARD_HEADER_BYTES,
        ..Scan::default()
    };
    let mut bad: Vec<Damage> = Vec::new();
    let mut durable = SHARD_HEADER_BYTES;
    let mut at = SHARD_HEADER_BYTES;
    let len = bytes.len() as u64;
    while at < len {
        match record_at(bytes, at, &check_body) {
            Ok(header) => {
                durable = durable.max(header.durable_before);
                let location = Location {
                    shard,
                    offset: at,
                    len: header.record_bytes(),
                };
                scan.records.push((header, location));
                at += header.record_bytes();
            }
            Err((header, problem)) => {
                bad.push(Damage {
                    offset: at,
                    header,
                    problem,
                });
                // A whole header with a bad body says where the next record starts.
                at = header
                    .map(|header| at + header.record_bytes())
                    .filter(|next| *next < len && RecordHeader::parse(&bytes[*next as usize..]).is_some())
                    .or_else(|| find_record(bytes, at + 8))
                    .unwrap_or(len);
            }
        }
    }
    if !is_last {
        durable = len;
    }
    match bad.iter().position(|damage| damage.offset >= durable) {
        Some(first) => {
            let torn_at = bad[first].offset;
            scan.records.retain(|(_, location)| location.offset < torn_at);
            scan.torn = bad[first].header;
            scan.torn_bytes = len - torn_at;
            scan.end = torn_at;
            bad.truncate(first);
        }
        None => scan.end = len,
    }
    scan.damage = bad;
    Ok(scan)
}

/// What to do about a file that is no readable shard.
const REMEDY: &str = "restore it from a copy, or move it out of the folder: its trials run again unless a \
                      batch behind the last checkpoint used them";

/// Format version in a shard's header.
fn version_of(bytes: &[u8]) -> u32 {
    u32::from_le_bytes([bytes[8], bytes[9], bytes[10], bytes[11]])
}

fn check_header(path: &Path, shard: u32, bytes: &[u8]) -> Result<(), BufferError> {
    let found = version_of(bytes);
    let problem = if &bytes[..8] != MAGIC {
        format!("it is not a shard of a Lego-RL buffer, or its start is damaged; {REMEDY}")
    } else if !(OLDEST_VERSION..=FORMAT_VERSION).contains(&found) {
        format!(
            "format version {found}, and this program reads versions {OLDEST_VERSION} to {FORMAT_VERSION}; finish \
             the run with the build that wrote it, or start with another RUN_DIR"
        )
    } else if bytes[..SHARD_HEADER_BYTES as usize] != header(shard, found) {
        format!("its header is damaged, or the file was renamed; {REMEDY}")
    } else {
        return Ok(());
    };
    Err(BufferError::Format {
        path: path.to_owned(),
        problem,
    })
}

type BadRecord = (Option<RecordHeader>, String);

fn record_at(
    bytes: &[u8],
    at: u64,
    check_body: &impl Fn(&RecordHeader) -> bool,
) -> Result<RecordHeader, BadRecord> {
    let rest = &bytes[at as usize..];
    let header = RecordHeader::parse(rest).ok_or((None, "the record's header is not whole".to_owned()))?;
    let body = rest
        .get(HEADER_BYTES..HEADER_BYTES + header.body_len as usize)
        .filter(|_| rest.len() as u64 >= header.record_bytes())
        .ok_or((Some(header), "the file ends inside the record".to_owned()))?;
    if check_body(&header) && crc32fast::hash(body) != header.body_crc {
        return Err((Some(header), "the checksum is wrong".to_owned()));
    }
    Ok(header)
}

/// The first whole record header at or behind `from`.
fn find_record(bytes: &[u8], from: u64) -> Option<u64> {
    let mark = RECORD_MARK.to_le_bytes();
    (from as usize..bytes.len())
        .step_by(8)
        .find(|at| bytes[*at..].starts_with(&mark) && RecordHeader::parse(&bytes[*at..]).is_some())
        .map(|at| at as u64)
}

/// Writes the whole records of `scan` to a new file of the same number and keeps the old one as
/// `….damaged`, whose path is returned.
pub(super) fn rewrite(dir: &Path, shard: u32, scan: &Scan) -> Result<PathBuf, BufferError> {
    let old = path(dir, shard);
    let damaged = old.with_extension("lrb.damaged");
    let fresh = old.with_extension("lrb.new");
    let map = map_file(&old)?;
    let mut bytes = header(shard, version_of(&map)).to_vec();
    for (_, location) in &scan.records {
        let at = bytes.len();
        bytes.extend_from_slice(&map[location.offset as usize..(location.offset + location.len) as usize]);
        // All of them were acknowledged; the marks must not point behind the shorter file.
        set_durable_before(&mut bytes[at..], at as u64);
    }
    let write = || -> io::Result<()> {
        let file = File::create(&fresh)?;
        file.write_all_at(&bytes, 0)?;
        file.sync_all()?;
        std::fs::hard_link(&old, &damaged)?;
        std::fs::rename(&fresh, &old)?;
        sync_dir(dir)
    };
    write().map_err(BufferError::io(&old, "rewrite"))?;
    Ok(damaged)
}

/// Whether a shard has the format that this program writes.
fn is_current(path: &Path) -> Result<bool, BufferError> {
    let mut start = [0; SHARD_HEADER_BYTES as usize];
    let file = File::open(path).map_err(BufferError::io(path, "open"))?;
    file.read_exact_at(&mut start, 0)
        .map_err(BufferError::io(path, "read"))?;
    Ok(version_of(&start) == FORMAT_VERSION)
}

/// The file that takes new records.
#[derive(Debug)]
struct Active {
    number: u32,
    path: PathBuf,
    file: File,
    /// End of the last durable record.
    len: u64,
    /// A failed write may have left bytes beyond `len`.
    dirty: bool,
}

#[derive(Debug, Default)]
struct Queue {
    /// Records that wait for the next flush, by ticket.
    waiting: Vec<(u64, Vec<u8>)>,
    /// Results of flushed records, until their submitter takes them.
    done: Vec<(u64, Result<Location, WriteError>)>,
    next_ticket: u64,
    flushing: bool,
}

/// Why a record is not durable.
#[derive(Debug)]
pub(super) struct WriteError {
    pub path: PathBuf,
    pub action: &'static str,
    pub source: io::Error,
}

/// Appends records from many threads with one `fdatasync` for all that wait.
#[derive(Debug)]
pub(super) struct ShardWriter {
    dir: PathBuf,
    roll_bytes: u64,
    queue: Mutex<Queue>,
    flushed: Condvar,
    active: Mutex<Option<Active>>,
    /// Number of the next shard that is created.
    next_number: Mutex<u32>,
}

impl ShardWriter {
    /// Continues in shard `last` of `len` bytes, cutting what lies behind; or starts a first one.
    pub fn open(dir: &Path, roll_bytes: u64, last: Option<(u32, u64)>) -> Result<Self, BufferError> {
        let active = match last {
            Some((number, len)) if len >= SHARD_HEADER_BYTES => {
                let path = path(dir, number);
                let file = OpenOptions::new()
                    .write(true)
                    .open(&path)
                    .map_err(BufferError::io(&path, "open"))?;
                let mut active = Active {
                    number,
                    path,
                    file,
                    len,
                    dirty: true,
                };
                active
                    .clean()
                    .map_err(BufferError::io(&active.path, "cut the torn tail of"))?;
                is_current(&active.path)?.then_some(active)
            }
            _ => None,
        };
        let next_number = match (&active, last) {
            (None, Some((number, len))) if len < SHARD_HEADER_BYTES => number,
            (_, Some((number, _))) => number + 1,
            (_, None) => 1,
        };
        Ok(Self {
            dir: dir.to_owned(),
            roll_bytes,
            queue: Mutex::default(),
            flushed: Condvar::new(),
            active: Mutex::new(active),
            next_number: Mutex::new(next_number),
        })
    }

    /// Makes `record` durable and says where it lies.
    pub fn append(&self, record: Vec<u8>) -> Result<Location, WriteError> {
        let mut queue = lock(&self.queue);
        let ticket = queue.next_ticket;
        queue.next_ticket += 1;
        queue.waiting.push((ticket, record));
        loop {
            if let Some(i) = queue.done.iter().position(|(t, _)| *t == ticket) {
                return queue.done.swap_remove(i).1;
            }
            if queue.flushing {
                queue = self.flushed.wait(queue).unwrap_or_else(PoisonError::into_inner);
                continue;
            }
            queue.flushing = true;
            let batch = std::mem::take(&mut queue.waiting);
            drop(queue);
            let results = self.flush(batch);
            queue = lock(&self.queue);
            queue.done.extend(results);
            queue.flushing = false;
            self.flushed.notify_all();
        }
    }

    fn flush(&self, batch: Vec<(u64, Vec<u8>)>) -> Vec<(u64, Result<Location, WriteError>)> {
        let mut active = lock(&self.active);
        let (tickets, mut records): (Vec<u64>, Vec<Vec<u8>>) = batch.into_iter().unzip();
        match self.write(&mut active, &mut records) {
            Ok(locations) => tickets.into_iter().zip(locations.into_iter().map(Ok)).collect(),
            Err(error) if records.len() == 1 => vec![(tickets[0], Err(error))],
            // The disk may have room for some of them.
            Err(_) => tickets
                .into_iter()
                .zip(&mut records)
                .map(|(ticket, record)| {
                    let written = self.write(&mut active, std::slice::from_mut(record));
                    (ticket, written.map(|locations| locations[0]))
                })
                .collect(),
        }
    }

    /// Writes all of `records` to one shard and flushes it, or leaves the shard as it was.
    fn write(
        &self,
        active: &mut Option<Active>,
        records: &mut [Vec<u8>],
    ) -> Result<Vec<Location>, WriteError> {
        if active
            .as_ref()
            .is_some_and(|a| a.len >= self.roll_bytes && !a.dirty)
        {
            *active = None;
        }
        let active = match active {
            Some(active) => active,
            none => none.insert(self.create()?),
        };
        let error = |action: &'static str, path: &Path| {
            let path = path.to_owned();
            move |source| WriteError { path, action, source }
        };
        active
            .clean()
            .map_err(error("cut the unfinished record of", &active.path))?;
        let start = active.len;
        let mut at = start;
        let mut locations = Vec::with_capacity(records.len());
        active.dirty = true;
        let written = records.iter_mut().try_for_each(|record| {
            set_durable_before(record, start);
            active.file.write_all_at(record, at)?;
            locations.push(Location {
                shard: active.number,
                offset: at,
                len: record.len() as u64,
            });
            at += record.len() as u64;
            Ok(())
        });
        if let Err(source) = written.and_then(|()| active.file.sync_data()) {
            // Back to the last whole record now, so that a full disk gets its space back; when even that
            // fails, `dirty` makes the next submit try again before it writes.
            if let Err(problem) = active.clean() {
                tracing::warn!(file = %active.path.display(), %problem, "cannot cut the unfinished record");
            }
            return Err(error("append to", &active.path)(source));
        }
        active.len = at;
        active.dirty = false;
        Ok(locations)
    }

    fn create(&self) -> Result<Active, WriteError> {
        let mut next_number = lock(&self.next_number);
        let number = *next_number;
        let path = path(&self.dir, number);
        let created = (|| {
            let file = OpenOptions::new()
                .write(true)
                .create(true)
                .truncate(true)
                .open(&path)?;
            file.write_all_at(&header(number, FORMAT_VERSION), 0)?;
            file.sync_all()?;
            sync_dir(&self.dir)?;
            Ok(file)
        })();
        match created {
            Ok(file) => {
                *next_number += 1;
                Ok(Active {
                    number,
                    path,
                    file,
                    len: SHARD_HEADER_BYTES,
                    dirty: false,
                })
            }
            Err(source) => Err(WriteError {
                path,
                action: "create",
                source,
            }),
        }
    }

    /// Number of the shard that takes new records; it must not be deleted.
    pub fn active_number(&self) -> Option<u32> {
        lock(&self.active).as_ref().map(|active| active.number)
    }
}

impl Active {
    fn clean(&mut self) -> io::Result<()> {
        if self.dirty {
            self.file.set_len(self.len)?;
            self.file.sync_all()?;
            self.dirty = false;
        }
        Ok(())
    }
}

/// Makes creations and deletions in `dir` durable.
pub(super) fn sync_dir(dir: &Path) -> io::Result<()> {
    File::open(dir)?.sync_all()
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // A panic elsewhere leaves no half-made state: every change below a lock is one assignment.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
