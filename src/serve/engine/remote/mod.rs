//! An engine replica on another rank.
//!
//! ```text
//! head (rank 0)                                   engine rank r
//!   proxy, balancer ─ RemoteEngine ══ ENGINE_REQUEST ══▶ EngineServer ─ dyn Engine
//!   train::weights  ─     ▲                                   │
//!                         └═══════════ ENGINE_REPLY ══════════┘
//! ```
//!
//! [`RemoteEngine`] is a [`crate::base::Engine`] like any other: its calls return at once. The server
//! streams events back in order and pushes its status every [`RemoteConfig::status_interval`], which is
//! also its heartbeat; the head pings. Silence for [`RemoteConfig::heartbeat_timeout`] means that the
//! peer is lost: on the head every request fails with [`crate::base::EngineError::ReplicaLost`] and every
//! later one does too; on the engine's rank all generations are aborted and [`EngineServer::run`] ends
//! with an error. A lost replica never comes back: its rank is restarted with the job.
//!
//! Both sides start with a handshake that refuses another protocol or another version of the program.
//!
//! Weights travel in buckets of [`RemoteConfig::bucket_bytes`], each with a checksum, and no more than
//! [`BUCKETS_IN_FLIGHT`] are unanswered: besides the update itself, the head holds that many buckets and
//! the engine's rank one. The engine's own checksum of the whole update comes back in the answer.
//!
//! `resident_prefix` cannot ask the other rank and return at once. Both sides remember the tokens that a
//! session had after its last generation; the server reports how many of them its cache still holds, and
//! the head answers from the last report.

mod head;
mod server;
#[cfg(test)]
mod tests;
mod wire;

pub use head::RemoteEngine;
pub use server::{EngineServer, ServerEnd};

use crate::comm::CommError;
use std::time::Duration;

/// Buckets that may be on their way at a time.
pub const BUCKETS_IN_FLIGHT: usize = 2;

/// Settings of both sides.
#[derive(Clone, Debug)]
pub struct RemoteConfig {
    /// Program and version; the two sides must be equal.
    pub program: String,
    /// How long a side waits for the other one's first word.
    pub hello_timeout: Duration,
    /// Silence after which the peer is lost.
    pub heartbeat_timeout: Duration,
    /// Time between two reports of the engine's load.
    pub status_interval: Duration,
    /// How long the engine may take to answer to a bucket, or to put a whole update in use.
    pub weights_timeout: Duration,
    /// Largest piece of weights in one message.
    pub bucket_bytes: usize,
}

impl Default for RemoteConfig {
    fn default() -> Self {
        Self {
            program: concat!("legorl ", env!("CARGO_PKG_VERSION")).to_owned(),
            hello_timeout: Duration::from_secs(600),
            heartbeat_timeout: Duration::from_secs(30),
            status_interval: Duration::from_millis(50),
            weights_timeout: Duration::from_secs(600),
            bucket_bytes: 32 << 20,
        }
    }
}

/// A failure between the head and an engine's rank.
#[derive(Debug, thiserror::Error)]
pub enum RemoteError {
    /// The communicator refused.
    #[error(transparent)]
    Comm(#[from] CommError),
    /// The other side never said a word.
    #[error(
        "rank {peer} did not say hello within {} s: look at its log, it may still load the model",
        waited.as_secs()
    )]
    NoHello {
        /// Other rank.
        peer: u32,
        /// How long this side waited.
        waited: Duration,
    },
    /// The other side is another program.
    #[error("rank {peer} runs `{theirs}`, and this rank runs `{ours}`: start all ranks from the same build")]
    Version {
        /// Other rank.
        peer: u32,
        /// Its program and protocol.
        theirs: String,
        /// This side's.
        ours: String,
    },
    /// The other side fell silent.
    #[error("rank {peer} has been silent for {} s", waited.as_secs())]
    Silent {
        /// Other rank.
        peer: u32,
        /// How long.
        waited: Duration,
    },
    /// The world ended.
    #[error("rank {peer}: the world of ranks has ended")]
    Ended {
        /// Other rank.
        peer: u32,
    },
    /// A message that nobody of this version sends.
    #[error("rank {peer} sent a message that cannot be read: {problem}")]
    Wire {
        /// Other rank.
        peer: u32,
        /// What is wrong with it.
        problem: String,
    },
}
