//! Reading shards through memory maps. The only `unsafe` of the buffer is here.
//!
//! Shards are written with `pwrite` and read through maps; on Linux both see the same page cache. The
//! writer never touches a map, so a full disk is an error code and never a SIGBUS.

use super::{error::BufferError, shard};
use crate::base::{routing::read_slice, RoutingStore};
use std::{
    collections::HashMap,
    fs::File,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
};

/// Where a durable record lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Location {
    pub shard: u32,
    pub offset: u64,
    /// Header, body and padding.
    pub len: u64,
}

/// A mapped shard as the place of its rows of routing.
#[derive(Debug)]
pub(super) struct MappedShard(pub Arc<memmap2::Mmap>);

impl RoutingStore for MappedShard {
    fn read(&self, at: u64, out: &mut [u8]) -> std::io::Result<()> {
        read_slice(&self.0, at, out)
    }

    fn bytes(&self) -> Option<&[u8]> {
        Some(&self.0)
    }
}

/// Maps of the shards that were read last.
#[derive(Debug)]
pub(super) struct ShardReader {
    dir: PathBuf,
    maps: Mutex<HashMap<u32, Arc<memmap2::Mmap>>>,
}

impl ShardReader {
    pub fn new(dir: &Path) -> Self {
        Self {
            dir: dir.to_owned(),
            maps: Mutex::default(),
        }
    }

    /// A map of the shard that covers at least `end` bytes.
    pub fn map(&self, shard: u32, end: u64) -> Result<Arc<memmap2::Mmap>, BufferError> {
        let mut maps = self.maps.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(map) = maps.get(&shard).filter(|map| map.len() as u64 >= end) {
            return Ok(map.clone());
        }
        let path = shard::path(&self.dir, shard);
        let map = Arc::new(map_file(&path)?);
        if (map.len() as u64) < end {
            return Err(BufferError::Format {
                path,
                problem: format!(
                    "it has {} bytes, and records were stored up to byte {end}",
                    map.len()
                ),
            });
        }
        maps.insert(shard, map.clone());
        Ok(map)
    }

    /// Forgets a shard that is deleted. Batches that still read it keep their map.
    pub fn forget(&self, shard: u32) {
        self.maps
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .remove(&shard);
    }
}

/// Maps a whole shard, as long as it is at this moment.
pub(super) fn map_file(path: &Path) -> Result<memmap2::Mmap, BufferError> {
    let file = File::open(path).map_err(BufferError::io(path, "open"))?;
    // SAFETY: the map is only read inside the ranges of durable records. The writer appends behind them,
    // and cuts the file back to the end of the last durable record at most, so those bytes neither
    // change nor disappear while the map lives; the folder is locked against other writers, and a
    // deleted file stays mapped.
    unsafe { memmap2::Mmap::map(&file) }.map_err(BufferError::io(path, "map"))
}
