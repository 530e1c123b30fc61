//! Rows of routing between the engine and the shard: one file a session.
//!
//! A turn's rows are appended when its reply is complete, and the record keeps only where they lie, so that a
//! session that waits for its agent holds none of them in memory. The file lives as long as something refers
//! to it: the session's record, then the trajectory until its trial is stored. Files that a killed process left
//! behind are deleted when the proxy starts.
//!
//! What a turn asks the engine for begins where the rows of its conversation end, so neighbouring turns fit
//! together whatever came from the engine's cache: the last sampled token of a turn is computed by the next
//! one, and so is what a turn that was cut off (by a stop text or the time limit) could not report.

use crate::base::{routing::RoutingShape, RoutingStore};
use std::{
    fs::OpenOptions,
    io,
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
    sync::{
        atomic::{AtomicU64, Ordering},
        Arc, Mutex, PoisonError,
    },
};

const EXTENSION: &str = "rows";

/// What the proxy records of routing, for sessions that are trained on.
#[derive(Clone, Debug)]
pub struct RoutingCapture {
    /// Folder of the files; it belongs to this proxy alone.
    pub dir: PathBuf,
    /// Sizes of the served model.
    pub shape: RoutingShape,
}

impl RoutingCapture {
    /// Makes the folder and deletes what an earlier process left there.
    pub(super) fn prepare(&self) -> io::Result<()> {
        std::fs::create_dir_all(&self.dir)?;
        for entry in std::fs::read_dir(&self.dir)? {
            let path = entry?.path();
            if path.extension().is_some_and(|e| e == EXTENSION) {
                std::fs::remove_file(path)?;
            }
        }
        Ok(())
    }
}

/// Rows of one turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TurnRows {
    /// Position of the first token in its conversation.
    pub first: u32,
    /// Tokens.
    pub tokens: u32,
    /// First byte in the session's file.
    pub at: u64,
}

/// The file of a session. It is open only while it is read or written.
#[derive(Debug)]
pub struct RoutingFile {
    path: PathBuf,
    shape: RoutingShape,
    /// Bytes given out.
    len: Mutex<u64>,
}

impl RoutingFile {
    /// A file that appears with its first rows.
    pub(super) fn new(capture: &RoutingCapture) -> Arc<Self> {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        Arc::new(Self {
            path: capture.dir.join(format!("{number:06}.{EXTENSION}")),
            shape: capture.shape,
            len: Mutex::new(0),
        })
    }

    /// Sizes of a row.
    pub fn shape(&self) -> RoutingShape {
        self.shape
    }

    /// Its path, for messages.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Appends rows and says where they begin. Blocking.
    pub(super) fn append(&self, bytes: &[u8]) -> io::Result<u64> {
        let at = {
            let mut len = self.len.lock().unwrap_or_else(PoisonError::into_inner);
            let at = *len;
            *len += bytes.len() as u64;
            at
        };
        let mut options = OpenOptions::new();
        let file = options
            .create(true)
            .truncate(false)
            .write(true)
            .open(&self.path)?;
        file.write_all_at(bytes, at)?;
        Ok(at)
    }
}

impl RoutingStore for RoutingFile {
    fn read(&self, at: u64, out: &mut [u8]) -> io::Result<()> {
        std::fs::File::open(&self.path)?.read_exact_at(out, at)
    }
}

impl Drop for RoutingFile {
    fn drop(&mut self) {
        let len = *self.len.lock().unwrap_or_else(PoisonError::into_inner);
        if len == 0 {
            return;
        }
        if let Err(error) = std::fs::remove_file(&self.path) {
            tracing::debug!(%error, path = %self.path.display(), "rows of a session");
        }
    }
}
