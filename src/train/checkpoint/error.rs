//! What can go wrong with a checkpoint.

use crate::comm::CommError;
use std::{io, path::PathBuf, time::Duration};

/// A failed checkpoint operation. What was published before it is untouched.
#[derive(Debug, thiserror::Error)]
pub enum CheckpointError {
    /// The operating system refused.
    #[error("cannot {action} {path}: {source}{}", advice(source))]
    Io {
        /// Verb.
        action: &'static str,
        /// File or folder.
        path: PathBuf,
        /// Cause.
        #[source]
        source: io::Error,
    },
    /// A file does not hold what it should.
    #[error("{path}: {problem}")]
    Damaged {
        /// File or folder.
        path: PathBuf,
        /// What is wrong.
        problem: String,
    },
    /// The run that wrote the checkpoint was configured otherwise.
    #[error(
        "{path} was written with another configuration: {differences}; \
         start with a new EXP_NAME, or set the values back"
    )]
    OtherConfiguration {
        /// `state.json`.
        path: PathBuf,
        /// `KEY=THEN, now NOW` of each value that differs.
        differences: String,
    },
    /// The background writer did not finish in time.
    #[error(
        "the checkpoint of step {step} was not written within {}; the disk under {root} is too slow or hangs",
        seconds(waited)
    )]
    Deadline {
        /// Step being written.
        step: u32,
        /// Folder of all checkpoints.
        root: PathBuf,
        /// How long was waited.
        waited: Duration,
    },
    /// A rank could not write its part.
    #[error("rank {rank} did not write its part of the checkpoint of step {step}: {problem}")]
    Part {
        /// Rank of the world.
        rank: u32,
        /// Step being written.
        step: u32,
        /// What it reports.
        problem: String,
        /// There was no room for the data.
        is_disk_full: bool,
    },
    /// Ranks did not say that their part is written.
    #[error(
        "{} did not report within {} that their part of the checkpoint of step {step} is written: look at \
         their logs and at the file system of CKPTS_DIR on their nodes",
        named(ranks),
        seconds(waited)
    )]
    PartDeadline {
        /// Ranks of the world.
        ranks: Vec<u32>,
        /// Step being written.
        step: u32,
        /// How long was waited.
        waited: Duration,
    },
    /// The other ranks cannot be reached.
    #[error("between the ranks that write a checkpoint: {0}")]
    Ranks(#[from] CommError),
    /// The writer thread is gone.
    #[error("the checkpoint writer has ended after a panic; see the log")]
    WriterGone,
}

impl CheckpointError {
    /// True when there is no room for the data.
    pub fn is_disk_full(&self) -> bool {
        match self {
            Self::Io { source, .. } => is_full(source),
            Self::Part { is_disk_full, .. } => *is_disk_full,
            _ => false,
        }
    }
}

fn is_full(error: &io::Error) -> bool {
    matches!(
        error.raw_os_error(),
        Some(libc::ENOSPC | libc::EDQUOT | libc::EFBIG)
    )
}

fn advice(source: &io::Error) -> &'static str {
    if is_full(source) {
        " (free space under CKPTS_DIR, or lower MAX_CKPT_TO_KEEP; older checkpoints are untouched and the \
         next save tries again)"
    } else {
        ""
    }
}

fn named(ranks: &[u32]) -> String {
    let names: Vec<String> = ranks.iter().map(u32::to_string).collect();
    let plural = if ranks.len() == 1 { "rank" } else { "ranks" };
    format!("{plural} {}", names.join(", "))
}

fn seconds(duration: &Duration) -> String {
    format!("{:.0} s", duration.as_secs_f64())
}
