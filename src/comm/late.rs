//! Who did not come to an operation between devices.
//!
//! A library for devices waits without end and without saying for whom. So ranks tell each other by messages, about
//! nothing but operations that take long:
//!
//! ```text
//! rank 0   operation 7 ····· note "7" ──┬─▶ rank 1 ──▶ is in 7 as well: note "7" at once
//!                                       └─▶ rank 2     is not: says nothing
//!          deadline: rank 2 did not come
//! ```
//!
//! A rank sends a note when its oldest operation has run for [`LateNotes::PATIENCE`], and when it has begun the
//! operation of a note that it hears. At the deadline those that have sent none about this operation or a later one
//! are missing. Invariant: a group whose operations take less than that sends nothing.

use super::{CommError, Communicator, Inbox, Tag};
use bytes::{BufMut, BytesMut};
use std::{sync::Arc, time::Duration};

/// What a rank said last about itself.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Note {
    /// Number of the operation that it is in.
    number: u64,
    phase: String,
}

/// One rank's side of the notes of one group.
pub(super) struct LateNotes {
    comm: Arc<dyn Communicator>,
    tag: Tag,
    members: Vec<u32>,
    /// By place; `None` for this rank.
    inboxes: Vec<Option<Inbox>>,
    heard: Vec<Option<Note>>,
    /// Last operation that this rank sent a note about.
    said: u64,
}

impl LateNotes {
    /// Operations that take less are not talked about.
    const PATIENCE: Duration = Duration::from_secs(2);

    /// `tag` belongs to this group's notes alone.
    pub fn new(comm: Arc<dyn Communicator>, members: &[u32], tag: Tag) -> Result<Self, CommError> {
        let inbox = |rank: &u32| (*rank != comm.rank()).then(|| comm.inbox(*rank, tag)).transpose();
        Ok(Self {
            inboxes: members.iter().map(inbox).collect::<Result<_, _>>()?,
            heard: vec![None; members.len()],
            members: members.to_vec(),
            comm,
            tag,
            said: 0,
        })
    }

    /// Looks at this rank's oldest operation, which has run for `age` of at most `limit`: reads the notes of
    /// others and sends one if it is time.
    ///
    /// # Errors
    /// The limit has passed: who did not come, or came to something else.
    pub fn look(
        &mut self,
        number: u64,
        phase: &str,
        age: Duration,
        limit: Duration,
    ) -> Result<(), CommError> {
        self.read();
        let is_asked = self.heard.iter().flatten().any(|note| note.number == number);
        if self.said < number && (is_asked || age >= Self::PATIENCE.min(limit / 4)) {
            self.said = number;
            self.send(number, phase)?;
        }
        if age < limit {
            return Ok(());
        }
        Err(self.verdict(number, phase, age))
    }

    fn send(&self, number: u64, phase: &str) -> Result<(), CommError> {
        let mut note = BytesMut::with_capacity(8 + phase.len());
        note.put_u64_le(number);
        note.put_slice(phase.as_bytes());
        let note = note.freeze();
        let mut others = self.members.iter().filter(|rank| **rank != self.comm.rank());
        others.try_for_each(|rank| self.comm.send(*rank, self.tag, note.clone()))
    }

    fn read(&mut self) {
        for (inbox, heard) in self.inboxes.iter().zip(&mut self.heard) {
            // A world that has ended has nothing more to say; whoever sends notices.
            while let Some(Ok(message)) = inbox.as_ref().map(|inbox| inbox.recv(Duration::ZERO)) {
                if let Some((number, phase)) = message.split_first_chunk() {
                    *heard = Some(Note {
                        number: u64::from_le_bytes(*number),
                        phase: String::from_utf8_lossy(phase).into_owned(),
                    });
                }
            }
        }
    }

    fn verdict(&self, number: u64, phase: &str, waited: Duration) -> CommError {
        let rank = self.comm.rank();
        let phase = phase.to_owned();
        let peers = || self.members.iter().zip(&self.heard).filter(|(r, _)| **r != rank);
        let other = peers().find_map(|(peer, note)| {
            let note = note.as_ref().filter(|n| n.number == number && n.phase != phase)?;
            Some((*peer, note))
        });
        if let Some((peer, note)) = other {
            return CommError::Mismatch {
                rank,
                phase,
                peer,
                peer_phase: format!("phase `{}`, its operation number {number}", note.phase),
            };
        }
        let is_missing = |note: &Option<Note>| note.as_ref().is_none_or(|note| note.number < number);
        let missing: Vec<u32> = peers()
            .filter(|(_, note)| is_missing(note))
            .map(|(peer, _)| *peer)
            .collect();
        if missing.is_empty() {
            return CommError::Device {
                rank,
                phase,
                problem: format!(
                    "all ranks came and nothing moved between their devices in {} s \
                     (NCCL_DEBUG=INFO in the environment says which links NCCL uses)",
                    waited.as_secs()
                ),
            };
        }
        CommError::Deadline {
            rank,
            phase,
            missing,
            waited,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::comm::inprocess;

    const LIMIT: Duration = Duration::from_secs(30);
    const LATE: Duration = Duration::from_secs(3);

    fn notes(size: u32) -> Vec<LateNotes> {
        let members: Vec<u32> = (0..size).collect();
        inprocess::world(size)
            .into_iter()
            .map(|comm| LateNotes::new(comm, &members, Tag::notes(0)).unwrap())
            .collect()
    }

    #[test]
    fn who_has_said_nothing_about_the_operation_is_missing() {
        let mut ranks = notes(4);
        // Rank 3 was late once, in an operation that has ended since.
        ranks[3].look(6, "block 0", LATE, LIMIT).unwrap();
        ranks[0].look(7, "block 1", LATE, LIMIT).unwrap();
        // Rank 1 has just begun the same, hears of it, and answers; rank 2 never comes.
        ranks[1].look(7, "block 1", Duration::ZERO, LIMIT).unwrap();
        let error = ranks[0].look(7, "block 1", LIMIT, LIMIT).unwrap_err();
        let CommError::Deadline { missing, phase, .. } = &error else {
            panic!("{error}")
        };
        assert_eq!((&missing[..], &phase[..]), (&[2, 3][..], "block 1"));
    }

    #[test]
    fn another_place_of_the_program_is_named_and_a_silent_link_as_well() {
        let mut ranks = notes(2);
        ranks[0].look(3, "block 1", LATE, LIMIT).unwrap();
        ranks[1].look(3, "block 2", LATE, LIMIT).unwrap();
        let error = ranks[0].look(3, "block 1", LIMIT, LIMIT).unwrap_err().to_string();
        assert!(error.contains("rank 1") && error.contains("`block 2`"), "{error}");
        ranks[1].look(5, "block 2", LATE, LIMIT).unwrap();
        let error = ranks[0].look(4, "block 1", LIMIT, LIMIT).unwrap_err().to_string();
        assert!(error.contains("all ranks came"), "{error}");
    }

    #[test]
    fn operations_that_end_soon_are_not_talked_about() {
        let mut ranks = notes(2);
        for number in 1..100 {
            ranks[0]
                .look(number, "block", Duration::from_millis(900), LIMIT)
                .unwrap();
        }
        ranks[1].read();
        assert_eq!(ranks[1].heard, [None, None]);
    }
}
