//! The commit marker: which files a checkpoint has, with size and checksum of each.

use super::{storage::StoredFile, CheckpointError};
use serde::{Deserialize, Serialize};
use std::{
    fs::{self, File},
    io::{self, Read, Write},
    path::Path,
    sync::atomic::{AtomicUsize, Ordering},
};

/// Name of the marker.
pub(super) const MARKER: &str = "COMMITTED";
/// Every tensor whole: one file of weights, one of moments, an export of one file.
const FORMAT_WHOLE: u32 = 1;
/// Files may hold pieces of tensors, and the export may have several files.
const FORMAT_PIECES: u32 = 2;
/// Files are read side by side when a checkpoint is verified: a parallel file system is faster for several.
const READERS_MAX: usize = 8;

/// Content of the marker.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Marker {
    format: u32,
    step: u32,
    pub(super) files: Vec<FileRecord>,
}

/// A file that was written and synced.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileRecord {
    /// Below the checkpoint's folder.
    pub path: String,
    /// Bytes.
    pub size: u64,
    /// CRC-32 of its content.
    pub crc32: u32,
}

impl Marker {
    /// The marker of these files, in the oldest format that describes them.
    pub(super) fn new(step: u32, files: Vec<FileRecord>) -> Self {
        let has = |name: &str| files.iter().any(|file| file.path == name);
        let is_whole = has("actor/model.safetensors") && has("huggingface/model.safetensors");
        Self {
            format: if is_whole { FORMAT_WHOLE } else { FORMAT_PIECES },
            step,
            files,
        }
    }

    /// Reads the marker of a folder; the text says what is wrong.
    pub(super) fn read(folder: &Path, step: u32) -> Result<Self, String> {
        let text = match fs::read(folder.join(MARKER)) {
            Ok(text) => text,
            Err(e) if e.kind() == io::ErrorKind::NotFound => {
                return Err(format!("no {MARKER} marker: it was never completely written"));
            }
            Err(e) => return Err(format!("{MARKER}: {e}")),
        };
        let marker: Marker =
            serde_json::from_slice(&text).map_err(|e| format!("{MARKER} is damaged: {e}"))?;
        if !(FORMAT_WHOLE..=FORMAT_PIECES).contains(&marker.format) {
            return Err(format!(
                "{MARKER} has format {}, this program reads {FORMAT_WHOLE} and {FORMAT_PIECES}",
                marker.format
            ));
        }
        if marker.step != step {
            return Err(format!("{MARKER} is of step {}", marker.step));
        }
        Ok(marker)
    }

    /// Bytes of all files.
    pub(super) fn size_bytes(&self) -> u64 {
        self.files.iter().map(|file| file.size).sum()
    }
}

/// Whether the marker can be read and every file that it names has its size. Cheap: contents are not read.
pub(super) fn marked_sizes_match(folder: &Path, step: u32) -> bool {
    let size_matches =
        |record: &FileRecord| fs::metadata(folder.join(&record.path)).is_ok_and(|m| m.len() == record.size);
    Marker::read(folder, step).is_ok_and(|marker| marker.files.iter().all(size_matches))
}

/// Checks every file of a folder against its marker; the text names the first one that is not as it was
/// written.
pub(super) fn verify(folder: &Path, step: u32) -> Result<u64, String> {
    let marker = Marker::read(folder, step)?;
    let next = AtomicUsize::new(0);
    let work = || {
        let mut problems = Vec::new();
        loop {
            let place = next.fetch_add(1, Ordering::Relaxed);
            let Some(record) = marker.files.get(place) else {
                return problems;
            };
            problems.extend(problem_of(folder, record).map(|problem| (place, problem)));
        }
    };
    let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    let readers = marker.files.len().min(cores).min(READERS_MAX);
    let problems: Vec<(usize, String)> = std::thread::scope(|scope| {
        let others: Vec<_> = (1..readers).map(|_| scope.spawn(work)).collect();
        let mut found = work();
        for other in others {
            match other.join() {
                Ok(problems) => found.extend(problems),
                Err(panic) => std::panic::resume_unwind(panic),
            }
        }
        found
    });
    match problems.into_iter().min() {
        Some((_, problem)) => Err(problem),
        None => Ok(marker.size_bytes()),
    }
}

fn problem_of(folder: &Path, record: &FileRecord) -> Option<String> {
    let (size, crc32) = match fingerprint(&folder.join(&record.path)) {
        Ok(found) => found,
        Err(e) => return Some(format!("{}: {e}", record.path)),
    };
    if size != record.size {
        return Some(format!(
            "{} has {size} bytes instead of {}",
            record.path, record.size
        ));
    }
    (crc32 != record.crc32).then(|| {
        format!(
            "{} has checksum {crc32:08x} instead of {:08x}",
            record.path, record.crc32
        )
    })
}

fn fingerprint(path: &Path) -> io::Result<(u64, u32)> {
    let mut file = File::open(path)?;
    let mut hasher = crc32fast::Hasher::new();
    let mut buffer = vec![0; 1 << 20];
    let mut size = 0;
    loop {
        let count = file.read(&mut buffer)?;
        if count == 0 {
            return Ok((size, hasher.finalize()));
        }
        hasher.update(&buffer[..count]);
        size += count as u64;
    }
}

/// Writes and syncs a file whose size and checksum are taken on the way; `name` is its name in the marker.
pub(super) fn write_recorded(
    file: &mut dyn StoredFile,
    name: &str,
    path: &Path,
    write: &dyn Fn(&mut dyn Write) -> io::Result<()>,
) -> Result<FileRecord, CheckpointError> {
    let failed = |action| {
        move |source| CheckpointError::Io {
            action,
            path: path.to_owned(),
            source,
        }
    };
    let mut counted = Counted {
        out: file,
        size: 0,
        hasher: crc32fast::Hasher::new(),
    };
    write(&mut counted).map_err(failed("write"))?;
    let record = FileRecord {
        path: name.to_owned(),
        size: counted.size,
        crc32: counted.hasher.finalize(),
    };
    file.sync().map_err(failed("sync"))?;
    Ok(record)
}

struct Counted<'a> {
    out: &'a mut dyn StoredFile,
    size: u64,
    hasher: crc32fast::Hasher,
}

impl Write for Counted<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let count = self.out.write(bytes)?;
        self.hasher.update(&bytes[..count]);
        self.size += count as u64;
        Ok(count)
    }
    fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }
}
