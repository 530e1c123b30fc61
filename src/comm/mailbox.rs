//! Arrived messages, sorted by sender and tag until somebody reads them.

use super::{CommError, Tag};
use bytes::Bytes;
use std::{
    collections::HashMap,
    sync::{
        mpsc::{channel, Receiver, RecvTimeoutError, Sender},
        Mutex, PoisonError,
    },
    time::Duration,
};

/// Messages of one sender and one tag, in the order in which they were sent.
#[derive(Debug)]
pub struct Inbox {
    from: u32,
    tag: Tag,
    messages: Receiver<Bytes>,
}

/// Why an [`Inbox`] has no message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum InboxError {
    /// Nothing arrived in time.
    #[error("no message arrived in time")]
    Timeout,
    /// The world has ended.
    #[error("the world has ended")]
    Closed,
}

impl Inbox {
    /// The next message, waiting for it at most `timeout`.
    pub fn recv(&self, timeout: Duration) -> Result<Bytes, InboxError> {
        self.messages.recv_timeout(timeout).map_err(|e| match e {
            RecvTimeoutError::Timeout => InboxError::Timeout,
            RecvTimeoutError::Disconnected => InboxError::Closed,
        })
    }

    /// Sender of its messages.
    pub fn from(&self) -> u32 {
        self.from
    }

    /// Tag of its messages.
    pub fn tag(&self) -> Tag {
        self.tag
    }
}

#[derive(Debug)]
struct Slot {
    sender: Sender<Bytes>,
    /// Taken by the one who opens the inbox.
    receiver: Option<Receiver<Bytes>>,
}

/// All inboxes of a rank.
#[derive(Debug, Default)]
pub(super) struct Mailbox {
    slots: Mutex<HashMap<(u32, Tag), Slot>>,
}

impl Mailbox {
    /// A message arrived. When its inbox's owner is gone, nobody wants it.
    pub fn deliver(&self, from: u32, tag: Tag, payload: Bytes) {
        let mut slots = self.slots.lock().unwrap_or_else(PoisonError::into_inner);
        let _ = slots
            .entry((from, tag))
            .or_insert_with(new_slot)
            .sender
            .send(payload);
    }

    /// Opens the inbox of a pair.
    pub fn open(&self, from: u32, tag: Tag) -> Result<Inbox, CommError> {
        let mut slots = self.slots.lock().unwrap_or_else(PoisonError::into_inner);
        let slot = slots.entry((from, tag)).or_insert_with(new_slot);
        let messages = slot.receiver.take().ok_or(CommError::InboxTaken { from, tag })?;
        Ok(Inbox { from, tag, messages })
    }

    /// The world has ended: readers see [`InboxError::Closed`] once they have read what arrived.
    #[cfg(feature = "mpi")]
    pub fn close(&self) {
        self.slots.lock().unwrap_or_else(PoisonError::into_inner).clear();
    }
}

fn new_slot() -> Slot {
    let (sender, receiver) = channel();
    Slot {
        sender,
        receiver: Some(receiver),
    }
}
