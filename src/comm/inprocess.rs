//! Several ranks inside one process, each used by threads of its own: the world of tests, and of a run
//! that is one process.

use super::{
    collective::{Linked, Transport},
    mailbox::Mailbox,
    CommError, Communicator, Tag,
};
use bytes::Bytes;
use std::sync::Arc;

struct InProcess {
    rank: u32,
    mailboxes: Arc<[Mailbox]>,
}

impl Transport for InProcess {
    fn rank(&self) -> u32 {
        self.rank
    }

    fn size(&self) -> u32 {
        self.mailboxes.len() as u32
    }

    fn mailbox(&self) -> &Mailbox {
        &self.mailboxes[self.rank as usize]
    }

    fn post(&self, dest: u32, tag: Tag, payload: Bytes) -> Result<(), CommError> {
        self.mailboxes[dest as usize].deliver(self.rank, tag, payload);
        Ok(())
    }
}

/// A world of `size` ranks, by rank. Payloads are shared and not copied.
///
/// # Panics
/// When `size` is 0.
pub fn world(size: u32) -> Vec<Arc<dyn Communicator>> {
    assert!(size > 0, "a world has at least one rank");
    let mailboxes: Arc<[Mailbox]> = (0..size).map(|_| Mailbox::default()).collect();
    (0..size)
        .map(|rank| {
            let transport = InProcess {
                rank,
                mailboxes: mailboxes.clone(),
            };
            let linked = Linked::new(transport).expect("nobody has opened an inbox of a new world");
            Arc::new(linked) as Arc<dyn Communicator>
        })
        .collect()
}
