//! What can go wrong with the buffer, and what the reader can do about it.

use std::{io, path::PathBuf, time::Duration};

/// A failure of the buffer.
#[derive(Debug, thiserror::Error)]
pub enum BufferError {
    /// The operating system refused something.
    #[error("cannot {action} `{}`", path.display())]
    Io {
        /// File or folder.
        path: PathBuf,
        /// What was tried.
        action: &'static str,
        /// The system's answer.
        #[source]
        source: io::Error,
    },
    /// Another process has the folder open.
    #[error(
        "the buffer `{}` is in use by another process: end that run, or give this one its own CKPTS_DIR",
        path.display()
    )]
    Locked {
        /// Lock file.
        path: PathBuf,
    },
    /// A setting makes no sense.
    #[error("buffer setting {name}: {problem}")]
    Setting {
        /// Setting.
        name: &'static str,
        /// What is wrong with it.
        problem: String,
    },
    /// The folder belongs to a run with other settings.
    #[error(
        "the buffer `{}` was filled with {name}={stored}, and this run has {name}={wanted}: \
         set it back, or start with an empty folder",
        path.display()
    )]
    Identity {
        /// File that holds the stored value.
        path: PathBuf,
        /// Setting that differs.
        name: &'static str,
        /// Value in the folder.
        stored: u64,
        /// Value of this run.
        wanted: u64,
    },
    /// The file is not what its name says, or is of another format version.
    #[error("`{}`: {problem}", path.display())]
    Format {
        /// File.
        path: PathBuf,
        /// What was found.
        problem: String,
    },
    /// A stored record is damaged. All other records of the file are readable.
    #[error(
        "`{}` is damaged at byte {offset} ({problem}); the record belongs to {trial}. Restore the file \
         from a copy, or set the damaged record aside with `legorl-rank buffer salvage {}`: every \
         readable trial stays, and the damaged one runs again if no batch has used it",
        path.display(), dir.display()
    )]
    Corrupt {
        /// Shard.
        path: PathBuf,
        /// Its folder.
        dir: PathBuf,
        /// Start of the record.
        offset: u64,
        /// The trial, or how much is known about it.
        trial: String,
        /// What does not fit.
        problem: String,
    },
    /// A line of the delivery log is damaged and is not the last one.
    #[error(
        "`{}` line {line} is damaged ({problem}): the history of the batches is broken there; restore \
         the file from a copy, or start again with an empty folder",
        path.display()
    )]
    CorruptLog {
        /// Log file.
        path: PathBuf,
        /// Line, from 1.
        line: usize,
        /// What does not fit.
        problem: String,
    },
    /// The delivery log and the checkpoint tell different stories.
    #[error("`{}` does not fit the checkpoint of step {step}: {problem}", path.display())]
    History {
        /// Log file.
        path: PathBuf,
        /// Step of the checkpoint.
        step: u32,
        /// What differs.
        problem: String,
    },
    /// A batch that was delivered before the restart needs a trial that no shard has.
    #[error("the batch of step {step} contains {trial}, and no shard in `{}` holds it", dir.display())]
    MissingTrial {
        /// Step.
        step: u32,
        /// Trial.
        trial: String,
        /// Folder of the shards.
        dir: PathBuf,
    },
    /// The run was resumed with a smaller staleness bound than the stored groups allow.
    #[error(
        "group {group} was started at version {start_version} and cannot be delivered within \
         STALENESS={staleness} any more: resume with the value that the run had before"
    )]
    Bound {
        /// Group.
        group: u64,
        /// Version at its start.
        start_version: u32,
        /// Bound of this run.
        staleness: f64,
    },
    /// Not enough groups were complete in time.
    #[error(
        "step {step}: {ready} of {wanted} groups are complete after {} s. Waiting for: {missing}",
        waited.as_secs()
    )]
    Deadline {
        /// Step.
        step: u32,
        /// Complete groups.
        ready: usize,
        /// `TRAIN_BSZ`.
        wanted: u32,
        /// How long the trainer waited.
        waited: Duration,
        /// Groups and the samples that they miss.
        missing: String,
    },
    /// Steps are delivered and finished in order.
    #[error("step {asked} was asked for, and the next step is {next}")]
    OutOfOrder {
        /// Step that was asked for.
        asked: u32,
        /// Step that is possible.
        next: u32,
    },
    /// [`super::Buffer::close`] was called.
    #[error("the buffer is closed: {0}")]
    Closed(String),
}

impl BufferError {
    /// Turns a system error into one with file and action.
    pub(super) fn io(path: &std::path::Path, action: &'static str) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_owned();
        move |source| Self::Io { path, action, source }
    }
}
