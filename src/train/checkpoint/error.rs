//! What can go wrong with a checkpoint.

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
    /// The writer thread is gone.
    #[error("the checkpoint writer has ended after a panic; see the log")]
    WriterGone,
}

impl CheckpointError {
    /// True when there is no room for the data.
    pub fn is_disk_full(&self) -> bool {
        matches!(self, Self::Io { source, .. } if is_full(source))
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

fn seconds(duration: &Duration) -> String {
    format!("{:.0} s", duration.as_secs_f64())
}
