//! What can go wrong with a sandbox, and what the reader can do about it.

use std::path::PathBuf;
use std::time::Duration;

/// A sandbox that could not do what was asked.
#[derive(Debug, thiserror::Error)]
pub enum SandboxError {
    /// A program or kernel feature is missing; found before launch.
    #[error("{what}: {detail}\n  fix: {fix}")]
    Unavailable {
        /// What cannot be used.
        what: String,
        /// What was observed.
        detail: String,
        /// What the reader can do.
        fix: String,
    },
    /// The specification asks for something that the backend cannot give.
    #[error("sandbox `{name}`: {problem}")]
    Spec {
        /// Sandbox.
        name: String,
        /// What cannot be given.
        problem: String,
    },
    /// A line of the task's Dockerfile cannot be applied.
    #[error("{}:{line}: {problem}", file.display())]
    Dockerfile {
        /// The Dockerfile.
        file: PathBuf,
        /// Line, from 1.
        line: usize,
        /// What is wrong, with the end of the output for a failed `RUN`.
        problem: String,
    },
    /// A file on the host, or inside (the message says which), could not be read or written.
    #[error("{action} `{}`", path.display())]
    Io {
        /// What was tried.
        action: String,
        /// Which file.
        path: PathBuf,
        /// The operating system's error.
        #[source]
        source: std::io::Error,
    },
    /// The sandbox refused a request; the text names the path inside.
    #[error("sandbox `{name}`: {action}: {problem}")]
    Refused {
        /// Sandbox.
        name: String,
        /// What was tried.
        action: String,
        /// Why not.
        problem: String,
    },
    /// The sandbox is gone: killed, out of its wall time, or its helper died.
    #[error("sandbox `{name}` ended while {during}: {reason}")]
    Ended {
        /// Sandbox.
        name: String,
        /// What was going on.
        during: String,
        /// What is known about the end.
        reason: String,
    },
    /// A wait came to its deadline.
    #[error("sandbox `{name}`: waited {} s for {what}", waited.as_secs_f64())]
    Timeout {
        /// Sandbox.
        name: String,
        /// What it waited for.
        what: String,
        /// How long.
        waited: Duration,
    },
}

impl SandboxError {
    /// An I/O error with its file.
    pub fn io(action: impl Into<String>, path: impl Into<PathBuf>, source: std::io::Error) -> Self {
        Self::Io {
            action: action.into(),
            path: path.into(),
            source,
        }
    }
}
