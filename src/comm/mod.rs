//! Messages between the ranks of a run.
//!
//! [`Communicator`] is what the rest of the program sees: addressed byte messages that return at once,
//! and collectives with a deadline. Behind it one of
//!
//! | World | Ranks | Made by |
//! |---|---|---|
//! | single | this process alone | [`single`], or [`launch_world`] without a launcher |
//! | in-process | threads of one process | [`inprocess::world`], for tests |
//! | MPI | processes of one `mpirun` or `srun` | [`launch_world`] under a launcher |
//!
//! Delivery: messages of one sender and one [`Tag`] arrive complete and in order, in the one [`Inbox`]
//! that is opened for this pair; what arrives before the inbox is opened waits for it. A message to a
//! rank that is gone is not an error by itself: MPI does not say so. It shows as a deadline that passes,
//! and every such error names this rank, the phase and the ranks that are missing.
//!
//! Collectives are built on these messages (see `collective`), so that one code serves all worlds, a
//! missing rank has a name, and engine traffic flows while a rank waits in a barrier. [`Collectives`] are
//! those on tensors, over groups of ranks, that are started and waited for separately.
//!
//! [`nccl_group`] gives those between the memories of GPUs.
//!
//! Invariant: only the module `mpi` calls MPI, and there from one thread that owns it from
//! `MPI_Init_thread` to `MPI_Finalize`.

mod collective;
mod collectives;
mod error;
mod group;
pub mod inprocess;
#[cfg(any(feature = "cuda", test))]
mod late;
mod launch;
mod mailbox;
#[cfg(feature = "mpi")]
mod mpi;
#[cfg(feature = "cuda")]
mod nccl;
#[cfg(test)]
mod tests;

pub use collectives::{Collectives, Element, Memory, Pending};
pub use error::CommError;
pub use group::group;
pub use launch::{launch_world, local_rank, LaunchKind, World};
pub use mailbox::{Inbox, InboxError};
#[cfg(feature = "cuda")]
pub use nccl::nccl_group;

use bytes::Bytes;
use std::{sync::Arc, time::Duration};

/// Largest message; larger ones are refused. Callers that move more (weights) send it in pieces.
pub const MESSAGE_BYTES_MAX: usize = 1 << 30;

/// What a message is for. Messages of different tags do not wait for each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Tag(pub u16);

impl Tag {
    /// Collectives of the communicator itself.
    pub(crate) const COLLECTIVE: Tag = Tag(0);
    /// From the head to an engine.
    pub const ENGINE_REQUEST: Tag = Tag(1);
    /// From an engine to the head.
    pub const ENGINE_REPLY: Tag = Tag(2);
    /// Free for the wiring of ranks: run control from the head to the others.
    pub const CONTROL: Tag = Tag(3);
    /// Answers to [`Tag::CONTROL`].
    pub const CONTROL_REPLY: Tag = Tag(4);
    /// From the head to the trainer ranks.
    pub const TRAINER: Tag = Tag(5);
    /// From trainer ranks to the head: their parts of a checkpoint are written.
    pub const CHECKPOINT: Tag = Tag(6);

    /// The `number`-th kind of [`group`] that a rank is in.
    pub const fn group(number: u16) -> Tag {
        Tag(16 + number)
    }

    /// What the ranks of that group tell each other about operations on their devices that take long.
    pub const fn notes(number: u16) -> Tag {
        Tag(Self::group(number).0 + 1024)
    }
}

/// One rank's access to all others. Methods may be called from any thread; collectives must be called
/// by all ranks in the same order, from one thread at a time.
pub trait Communicator: Send + Sync {
    /// This rank, below [`Communicator::size`].
    fn rank(&self) -> u32;

    /// Number of ranks.
    fn size(&self) -> u32;

    /// Sends `payload` to `dest` (which may be this rank) and returns at once.
    ///
    /// # Errors
    /// No such rank, more than [`MESSAGE_BYTES_MAX`] bytes, or the world has ended.
    fn send(&self, dest: u32, tag: Tag, payload: Bytes) -> Result<(), CommError>;

    /// Opens the inbox for messages of `tag` from `from`; each pair can be opened once.
    fn inbox(&self, from: u32, tag: Tag) -> Result<Inbox, CommError>;

    /// Returns when all ranks have called it.
    ///
    /// # Errors
    /// [`CommError::Deadline`] names the ranks that did not come within `timeout`. After any failed
    /// collective the world can do no other one: ranks no longer agree where they are.
    fn barrier(&self, phase: &str, timeout: Duration) -> Result<(), CommError>;

    /// Gives every rank the bytes of `root`; the other ranks' `data` is replaced.
    fn broadcast(
        &self,
        phase: &str,
        root: u32,
        data: &mut Vec<u8>,
        timeout: Duration,
    ) -> Result<(), CommError>;

    /// Replaces `data` on all ranks by its sum over ranks, added in rank order: every rank gets the same
    /// bits. All ranks pass the same length.
    fn all_reduce_sum_f32(&self, phase: &str, data: &mut [f32], timeout: Duration) -> Result<(), CommError>;

    /// As [`Communicator::all_reduce_sum_f32`], for `f64`.
    fn all_reduce_sum_f64(&self, phase: &str, data: &mut [f64], timeout: Duration) -> Result<(), CommError>;
}

/// The world of one rank.
pub fn single() -> Arc<dyn Communicator> {
    inprocess::world(1).remove(0)
}
