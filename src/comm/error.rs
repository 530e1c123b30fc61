//! What can go wrong between ranks.

use super::{Tag, MESSAGE_BYTES_MAX};
use std::time::Duration;

/// A failure of a communicator.
#[derive(Clone, Debug, thiserror::Error)]
pub enum CommError {
    /// Somebody did not come.
    #[error(
        "rank {rank} waited {} s in phase `{phase}` for {}: look at the logs of the ranks that are missing",
        waited.as_secs(), ranks(missing)
    )]
    Deadline {
        /// This rank.
        rank: u32,
        /// Phase.
        phase: String,
        /// Ranks that did not answer.
        missing: Vec<u32>,
        /// How long it waited.
        waited: Duration,
    },
    /// Two ranks are in different places of the program.
    #[error("rank {rank} is in phase `{phase}`, and rank {peer} is in {peer_phase}")]
    Mismatch {
        /// This rank.
        rank: u32,
        /// Its phase.
        phase: String,
        /// Other rank.
        peer: u32,
        /// Its phase, or what it sent.
        peer_phase: String,
    },
    /// A collective of this world failed before.
    #[error("rank {rank} cannot enter phase `{phase}`: phase `{failed}` failed before")]
    Broken {
        /// This rank.
        rank: u32,
        /// Phase that was to be entered.
        phase: String,
        /// Phase that failed.
        failed: String,
    },
    /// The destination does not exist.
    #[error("there is no rank {rank} among {size} ranks")]
    NoSuchRank {
        /// Destination.
        rank: u32,
        /// Ranks of the world.
        size: u32,
    },
    /// The message must be sent in pieces.
    #[error("a message of {bytes} bytes; at most {MESSAGE_BYTES_MAX} are sent at once")]
    TooLarge {
        /// Size.
        bytes: usize,
    },
    /// Each inbox has one owner.
    #[error("the inbox for messages of tag {} from rank {from} is already open", tag.0)]
    InboxTaken {
        /// Sender.
        from: u32,
        /// Tag.
        tag: Tag,
    },
    /// The world has ended.
    #[error("rank {rank} can send no more: {reason}")]
    Closed {
        /// This rank.
        rank: u32,
        /// Why.
        reason: String,
    },
    /// The pieces of memory of an operation do not fit each other: a fault of this program.
    #[error("rank {rank} cannot start phase `{phase}`: {problem}; please report it")]
    Call {
        /// This rank.
        rank: u32,
        /// Phase.
        phase: String,
        /// What does not fit.
        problem: String,
    },
    /// Something between the devices of the ranks.
    #[error("rank {rank}, phase `{phase}`: {problem}")]
    Device {
        /// This rank.
        rank: u32,
        /// Phase.
        phase: String,
        /// What is wrong.
        problem: String,
    },
    /// The world could not be started.
    #[error("cannot join the other ranks: {0}")]
    Launch(String),
}

fn ranks(missing: &[u32]) -> String {
    let names: Vec<String> = missing.iter().take(16).map(u32::to_string).collect();
    let more = missing.len().saturating_sub(names.len());
    let plural = if missing.len() == 1 { "rank" } else { "ranks" };
    match more {
        0 => format!("{plural} {}", names.join(", ")),
        more => format!("{plural} {} and {more} more", names.join(", ")),
    }
}
