//! The parts of a checkpoint that the other ranks write, and their reports to rank 0.
//!
//! ```text
//! rank 0       begin ─ order ─▶ snapshot ─▶ own part ─▶ reports of all ─▶ export, state, marker
//! other ranks             └───▶ snapshot ─▶ own part ─────┘ report
//! ```
//!
//! A report is one message, [`Tag::CHECKPOINT`]: the files with size and checksum, or why there are none. It
//! carries the number of the save, so that a report that comes too late is not taken for one of a later save of
//! the same step. Nothing here waits for training, and training waits for nothing here: parts are written and
//! reports are sent and awaited by threads of their own, by addressed messages, beside the collectives.

use super::{
    background::{Background, Job},
    CheckpointError, CheckpointStore, FileRecord, Place, SavedTensors,
};
use crate::comm::{Communicator, Inbox, InboxError, Tag};
use bytes::Bytes;
use serde::{Deserialize, Serialize};
use std::{
    sync::Arc,
    time::{Duration, Instant},
};

/// A report follows the end of the write at once; this only bridges the moment between the two.
const MOMENT: Duration = Duration::from_secs(10);

/// A rank's report.
#[derive(Debug, Serialize, Deserialize)]
struct PartReport {
    save: u64,
    files: Result<Vec<FileRecord>, PartFailure>,
}

#[derive(Debug, Serialize, Deserialize)]
struct PartFailure {
    problem: String,
    is_disk_full: bool,
}

/// Reports of the other ranks, as rank 0 receives them.
pub struct PartInboxes {
    inboxes: Vec<Inbox>,
    own_rank: u32,
    timeout: Duration,
}

impl PartInboxes {
    /// Nobody else writes.
    pub fn none() -> Self {
        Self {
            inboxes: Vec::new(),
            own_rank: 0,
            timeout: Duration::ZERO,
        }
    }

    /// Opens the inboxes of those `ranks` that are not this one. After its own part a save waits for reports at
    /// most `timeout`.
    ///
    /// # Errors
    /// No such rank, or an inbox is open already.
    pub fn open(comm: &dyn Communicator, ranks: &[u32], timeout: Duration) -> Result<Self, CheckpointError> {
        let own_rank = comm.rank();
        let others = ranks.iter().filter(|rank| **rank != own_rank);
        let inboxes: Result<_, _> = others.map(|rank| comm.inbox(*rank, Tag::CHECKPOINT)).collect();
        Ok(Self {
            inboxes: inboxes?,
            own_rank,
            timeout,
        })
    }

    /// Ranks besides this one.
    pub(super) fn len(&self) -> usize {
        self.inboxes.len()
    }

    pub(super) fn own_rank(&self) -> u32 {
        self.own_rank
    }

    /// The files of all other ranks. Waits for every report, also after one of a failure.
    pub(super) fn gather(&mut self, save: u64, step: u32) -> Result<Vec<FileRecord>, CheckpointError> {
        let end = Instant::now() + self.timeout;
        let mut files = Vec::new();
        let mut silent = Vec::new();
        let mut failure = None;
        for inbox in &self.inboxes {
            let rank = inbox.from();
            match wait_for(inbox, save, end) {
                None => silent.push(rank),
                Some(Ok(more)) => files.extend(more),
                Some(Err(PartFailure {
                    problem,
                    is_disk_full,
                })) => {
                    tracing::error!(step, rank, problem, "a part of a checkpoint was not written");
                    failure.get_or_insert(CheckpointError::Part {
                        rank,
                        step,
                        problem,
                        is_disk_full,
                    });
                }
            }
        }
        match failure {
            Some(failure) => Err(failure),
            None if silent.is_empty() => Ok(files),
            None => Err(CheckpointError::PartDeadline {
                ranks: silent,
                step,
                waited: self.timeout,
            }),
        }
    }
}

/// The report of one rank about a save; nothing when it does not come.
fn wait_for(inbox: &Inbox, save: u64, end: Instant) -> Option<Result<Vec<FileRecord>, PartFailure>> {
    loop {
        let left = end.saturating_duration_since(Instant::now());
        let message = match inbox.recv(left) {
            Ok(message) => message,
            Err(InboxError::Timeout | InboxError::Closed) => return None,
        };
        match serde_json::from_slice::<PartReport>(&message) {
            Ok(report) if report.save == save => return Some(report.files),
            Ok(late) => tracing::warn!(
                rank = inbox.from(),
                save = late.save,
                "a report of an earlier save arrived late"
            ),
            Err(error) => {
                return Some(Err(PartFailure {
                    problem: format!(
                        "its report is not readable on rank 0 ({error}); do all ranks run the same build?"
                    ),
                    is_disk_full: false,
                }))
            }
        }
    }
}

struct Part {
    save: u64,
    step: u32,
    tensors: SavedTensors,
}

impl Job for Part {
    fn step(&self) -> u32 {
        self.step
    }
}

/// Writes this rank's parts in the background, and reports to rank 0.
pub struct PartWriter {
    comm: Arc<dyn Communicator>,
    head: u32,
    thread: Background<Part, ()>,
}

impl PartWriter {
    /// Starts the thread of a rank at this place among those that save; `head` is the rank that publishes.
    pub fn start(
        store: CheckpointStore,
        comm: Arc<dyn Communicator>,
        head: u32,
        place: Place,
    ) -> std::io::Result<Self> {
        let sender = comm.clone();
        let root = store.root().to_owned();
        let thread = Background::start("checkpoint-part", &root, move |part: Part| {
            let Part { save, step, tensors } = part;
            let started = Instant::now();
            let written = store.write_part(step, place, &tensors);
            // The snapshot's memory is given back before anyone is told that the write is over.
            drop(tensors);
            match &written {
                Ok(files) => {
                    let bytes: u64 = files.iter().map(|file| file.size).sum();
                    let secs = started.elapsed().as_secs_f64();
                    tracing::info!(step, bytes, secs, "part of a checkpoint written");
                }
                Err(error) => tracing::error!(step, %error, "part of a checkpoint was not written"),
            }
            let files = written.map_err(|error| PartFailure {
                is_disk_full: error.is_disk_full(),
                problem: error.to_string(),
            });
            tell(&*sender, head, &PartReport { save, files });
        })?;
        Ok(Self { comm, head, thread })
    }

    /// Writes what `snapshot` gives and reports; returns as soon as the snapshot is taken. When the part before
    /// is still being written, which rank 0 has given up, no snapshot is taken and that is reported.
    pub fn save<E>(
        &self,
        save: u64,
        step: u32,
        snapshot: impl FnOnce() -> Result<SavedTensors, E>,
    ) -> Result<(), E> {
        let queued = match self.thread.idle(MOMENT) {
            Ok(()) => {
                let tensors = snapshot()?;
                self.thread.submit(Part { save, step, tensors }, MOMENT)
            }
            Err(busy) => Err(busy),
        };
        if let Err(error) = queued {
            tracing::error!(step, %error, "no part of this checkpoint is written");
            let files = Err(PartFailure {
                problem: format!("its part of an earlier checkpoint is not done yet: {error}"),
                is_disk_full: false,
            });
            tell(&*self.comm, self.head, &PartReport { save, files });
        }
        Ok(())
    }

    /// Waits until everything is written and reported.
    pub fn finish(self, deadline: Duration) -> Result<(), CheckpointError> {
        self.thread.finish(deadline).map(drop)
    }
}

/// What cannot be sent is noticed by rank 0, which waits with a deadline.
fn tell(comm: &dyn Communicator, head: u32, report: &PartReport) {
    let sent = match serde_json::to_vec(report) {
        Ok(text) => comm
            .send(head, Tag::CHECKPOINT, Bytes::from(text))
            .map_err(|error| error.to_string()),
        Err(error) => Err(error.to_string()),
    };
    if let Err(error) = sent {
        tracing::error!(%error, "cannot report a part of a checkpoint to rank {head}");
    }
}
