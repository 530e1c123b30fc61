//! Writing in the background, on rank 0: its own part, the reports of the other ranks, the rest.
//!
//! One thread, one checkpoint at a time. [`CheckpointWriter::ready`] waits until the one before it is written,
//! with a deadline, so that a rank never holds two snapshots; [`CheckpointWriter::submit`] then returns at once.
//! A failed write, of whatever rank, is reported and the run goes on: older checkpoints stay, and the next save
//! tries again.

use super::{
    background::{Background, Job},
    parts::PartInboxes,
    CheckpointError, CheckpointHead, CheckpointStore, CommittedCheckpoint, FileRecord, Place, SavedTensors,
};
use std::time::{Duration, Instant};

/// How a write ended.
#[derive(Debug)]
pub struct WriteReport {
    /// Global step.
    pub step: u32,
    /// The published checkpoint, or why there is none.
    pub result: Result<CommittedCheckpoint, CheckpointError>,
    /// Duration of the write.
    pub elapsed: Duration,
    /// Published steps after removal of surplus ones, oldest first; empty after a failure.
    pub kept: Vec<u32>,
}

/// A checkpoint to be written.
pub struct Save {
    /// Number of the save, which the reports of the other ranks carry.
    pub number: u64,
    /// What rank 0 has of the tensors.
    pub tensors: SavedTensors,
    /// The rest.
    pub head: CheckpointHead,
}

impl Job for Save {
    fn step(&self) -> u32 {
        self.head.state.global_step
    }
}

/// The writer thread's handle. Dropping it lets a queued write finish in the background.
pub struct CheckpointWriter {
    store: CheckpointStore,
    thread: Background<Save, WriteReport>,
}

impl CheckpointWriter {
    /// Starts the thread. `keep` is `MAX_CKPT_TO_KEEP`; `None` keeps all. `others` are the ranks that write
    /// parts of the same checkpoints with a [`super::PartWriter`].
    pub fn start(store: CheckpointStore, keep: Option<usize>, others: PartInboxes) -> std::io::Result<Self> {
        let mut writer = Writer {
            store: store.clone(),
            keep,
            others,
        };
        let root = store.root().to_owned();
        let thread = Background::start("checkpoint-writer", &root, move |save| writer.write(save))?;
        Ok(Self { store, thread })
    }

    /// Waits until everything before is written.
    pub fn ready(&self, deadline: Duration) -> Result<(), CheckpointError> {
        self.thread.idle(deadline)
    }

    /// Makes the temporary folder, which must be there before any rank writes. False when that is not
    /// possible: there is a report then, and nothing to be submitted.
    pub fn begin(&self, step: u32, has_critic: bool) -> bool {
        let started = Instant::now();
        let begun = self.store.begin(step, has_critic);
        if let Err(error) = begun {
            self.store.discard(step);
            self.thread.add(failed(step, error, started));
            return false;
        }
        true
    }

    /// Queues a checkpoint that was begun. Waits at most `deadline` for room.
    pub fn submit(&self, save: Save, deadline: Duration) -> Result<(), CheckpointError> {
        self.thread.submit(save, deadline)
    }

    /// Ended writes since the last call.
    pub fn reports(&self) -> Vec<WriteReport> {
        self.thread.results()
    }

    /// Waits until nothing is queued or being written, and returns the reports.
    pub fn drain(&self, deadline: Duration) -> Result<Vec<WriteReport>, CheckpointError> {
        self.thread.drain(deadline)
    }

    /// Waits for the last write and ends the thread.
    pub fn finish(self, deadline: Duration) -> Result<Vec<WriteReport>, CheckpointError> {
        self.thread.finish(deadline)
    }
}

struct Writer {
    store: CheckpointStore,
    keep: Option<usize>,
    others: PartInboxes,
}

impl Writer {
    fn write(&mut self, save: Save) -> WriteReport {
        let (step, started) = (save.step(), Instant::now());
        let published = match self.write_and_publish(save) {
            Ok(published) => published,
            Err(error) => {
                self.store.discard(step);
                return failed(step, error, started);
            }
        };
        tracing::info!(step, path = %published.path.display(), bytes = published.size_bytes, "checkpoint published");
        let kept = match self.store.retain(self.keep.unwrap_or(usize::MAX)) {
            Ok(steps) => steps,
            Err(error) => {
                tracing::warn!(step, %error, "cannot remove surplus checkpoints");
                Vec::new()
            }
        };
        WriteReport {
            step,
            result: Ok(published),
            elapsed: started.elapsed(),
            kept,
        }
    }

    fn write_and_publish(&mut self, save: Save) -> Result<CommittedCheckpoint, CheckpointError> {
        let Save {
            number,
            tensors,
            head,
        } = save;
        let step = head.state.global_step;
        let own = self.write_own(step, &tensors);
        // The rest is read from the files: the snapshot's memory is given back.
        drop(tensors);
        // Also after an error of its own: the folder cannot be removed while others write there.
        let others = self.others.gather(number, step);
        let mut files = own?;
        files.extend(others?);
        self.store.publish(files, &head)
    }

    fn write_own(&self, step: u32, tensors: &SavedTensors) -> Result<Vec<FileRecord>, CheckpointError> {
        let place = Place {
            index: 0,
            of: self.others.len() + 1,
        };
        let written = self.store.write_part(step, place, tensors);
        if place == Place::ALONE {
            return written;
        }
        written.map_err(|error| CheckpointError::Part {
            rank: self.others.own_rank(),
            step,
            is_disk_full: error.is_disk_full(),
            problem: error.to_string(),
        })
    }
}

fn failed(step: u32, error: CheckpointError, started: Instant) -> WriteReport {
    tracing::error!(step, %error, "checkpoint was not written; training goes on");
    WriteReport {
        step,
        result: Err(error),
        elapsed: started.elapsed(),
        kept: Vec::new(),
    }
}
