//! Collectives over addressed messages.
//!
//! Each message starts with the number of the collective (all ranks count alike), what it is, and the
//! name of the phase; a rank that finds another number or name reports both places of the program
//! instead of mixing up data.
//!
//! - barrier: every rank tells every other one. `size - 1` small messages a rank, and each rank knows by
//!   itself who is missing.
//! - broadcast: the root sends to each rank, in parts of [`PART_BYTES`].
//! - all-reduce: rank r owns the r-th of `size` slices. All send it their share, it adds them in rank
//!   order and sends the sum to all: each rank moves `2 (size - 1) / size` of the data, and all ranks
//!   get the same bits.

use super::{mailbox::Mailbox, CommError, Communicator, Inbox, InboxError, Tag, MESSAGE_BYTES_MAX};
use bytes::{BufMut, Bytes, BytesMut};
use std::{
    ops::Range,
    sync::{Mutex, PoisonError},
    time::{Duration, Instant},
};

/// Payload of one message of a collective.
pub(super) const PART_BYTES: usize = 16 << 20;

/// What moves bytes.
pub(super) trait Transport: Send + Sync {
    fn rank(&self) -> u32;
    fn size(&self) -> u32;
    fn mailbox(&self) -> &Mailbox;
    /// Takes a message that is addressed to another rank and not too large.
    fn post(&self, dest: u32, tag: Tag, payload: Bytes) -> Result<(), CommError>;
}

/// A communicator over a transport.
pub(super) struct Linked<T> {
    transport: T,
    state: Mutex<State>,
}

struct State {
    /// Number of the next collective.
    number: u64,
    /// Phase that failed.
    failed: Option<String>,
    /// By rank; `None` for this rank.
    inboxes: Vec<Option<Inbox>>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
enum Operation {
    Barrier = 1,
    Broadcast = 2,
    Scatter = 3,
    Gather = 4,
}

/// One collective on its way.
struct Phase<'a, T> {
    transport: &'a T,
    inboxes: &'a [Option<Inbox>],
    number: u64,
    name: &'a str,
    since: Instant,
    timeout: Duration,
}

impl<T: Transport> Linked<T> {
    pub fn new(transport: T) -> Result<Self, CommError> {
        let inboxes = (0..transport.size())
            .map(|from| {
                (from != transport.rank())
                    .then(|| transport.mailbox().open(from, Tag::COLLECTIVE))
                    .transpose()
            })
            .collect::<Result<_, _>>()?;
        Ok(Self {
            transport,
            state: Mutex::new(State {
                number: 0,
                failed: None,
                inboxes,
            }),
        })
    }

    fn run(
        &self,
        name: &str,
        timeout: Duration,
        collective: impl FnOnce(&Phase<T>) -> Result<(), CommError>,
    ) -> Result<(), CommError> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(failed) = &state.failed {
            return Err(CommError::Broken {
                rank: self.transport.rank(),
                phase: name.to_owned(),
                failed: failed.clone(),
            });
        }
        let number = state.number;
        state.number += 1;
        let result = collective(&Phase {
            transport: &self.transport,
            inboxes: &state.inboxes,
            number,
            name,
            since: Instant::now(),
            timeout,
        });
        if result.is_err() {
            state.failed = Some(name.to_owned());
        }
        result
    }

    fn all_reduce<E: Element>(&self, name: &str, data: &mut [E], timeout: Duration) -> Result<(), CommError> {
        self.run(name, timeout, |phase| {
            let (rank, size) = (self.transport.rank(), self.transport.size());
            let len = data.len();
            let slice_of = |rank: u32| slice(len, rank as usize, size as usize);
            let own = slice_of(rank);
            for peer in phase.peers() {
                phase.send(peer, Operation::Scatter, &to_bytes(&data[slice_of(peer)]))?;
            }
            let mut shares = phase.receive_all(Operation::Scatter)?;
            let mut sum = vec![E::ZERO; own.len()];
            for from in 0..size {
                if from == rank {
                    add(&mut sum, data[own.clone()].iter().copied());
                } else {
                    let share = std::mem::take(&mut shares[from as usize]);
                    phase.check_len(from, share.len(), own.len() * E::BYTES)?;
                    add(&mut sum, share.chunks_exact(E::BYTES).map(E::read));
                }
            }
            let bytes = to_bytes(&sum);
            for peer in phase.peers() {
                phase.send(peer, Operation::Gather, &bytes)?;
            }
            let sums = phase.receive_all(Operation::Gather)?;
            for from in phase.peers() {
                let slice = slice_of(from);
                let received = &sums[from as usize];
                phase.check_len(from, received.len(), slice.len() * E::BYTES)?;
                for (value, bytes) in data[slice].iter_mut().zip(received.chunks_exact(E::BYTES)) {
                    *value = E::read(bytes);
                }
            }
            data[own].copy_from_slice(&sum);
            Ok(())
        })
    }
}

impl<T: Transport> Communicator for Linked<T> {
    fn rank(&self) -> u32 {
        self.transport.rank()
    }

    fn size(&self) -> u32 {
        self.transport.size()
    }

    fn send(&self, dest: u32, tag: Tag, payload: Bytes) -> Result<(), CommError> {
        let size = self.transport.size();
        if dest >= size {
            return Err(CommError::NoSuchRank { rank: dest, size });
        }
        if payload.len() > MESSAGE_BYTES_MAX {
            return Err(CommError::TooLarge { bytes: payload.len() });
        }
        if dest == self.transport.rank() {
            self.transport.mailbox().deliver(dest, tag, payload);
            return Ok(());
        }
        self.transport.post(dest, tag, payload)
    }

    fn inbox(&self, from: u32, tag: Tag) -> Result<Inbox, CommError> {
        let size = self.transport.size();
        if from >= size {
            return Err(CommError::NoSuchRank { rank: from, size });
        }
        self.transport.mailbox().open(from, tag)
    }

    fn barrier(&self, phase: &str, timeout: Duration) -> Result<(), CommError> {
        self.run(phase, timeout, |phase| {
            for peer in phase.peers() {
                phase.send(peer, Operation::Barrier, &[])?;
            }
            phase.receive_all(Operation::Barrier).map(|_| ())
        })
    }

    fn broadcast(
        &self,
        phase: &str,
        root: u32,
        data: &mut Vec<u8>,
        timeout: Duration,
    ) -> Result<(), CommError> {
        let size = self.transport.size();
        if root >= size {
            return Err(CommError::NoSuchRank { rank: root, size });
        }
        self.run(phase, timeout, |phase| {
            if root == self.transport.rank() {
                return phase
                    .peers()
                    .try_for_each(|peer| phase.send(peer, Operation::Broadcast, data));
            }
            *data = phase.receive(root, Operation::Broadcast)?;
            Ok(())
        })
    }

    fn all_reduce_sum_f32(&self, phase: &str, data: &mut [f32], timeout: Duration) -> Result<(), CommError> {
        self.all_reduce(phase, data, timeout)
    }

    fn all_reduce_sum_f64(&self, phase: &str, data: &mut [f64], timeout: Duration) -> Result<(), CommError> {
        self.all_reduce(phase, data, timeout)
    }
}

impl<T: Transport> Phase<'_, T> {
    fn peers(&self) -> impl Iterator<Item = u32> {
        let rank = self.transport.rank();
        (0..self.transport.size()).filter(move |peer| *peer != rank)
    }

    fn head(&self, operation: Operation) -> BytesMut {
        let mut head = BytesMut::with_capacity(32 + self.name.len());
        head.put_u64_le(self.number);
        head.put_u8(operation as u8);
        head.put_u16_le(self.name.len() as u16);
        head.put_slice(self.name.as_bytes());
        head
    }

    /// Sends `data` in parts: first the number of bytes, then the bytes.
    fn send(&self, dest: u32, operation: Operation, data: &[u8]) -> Result<(), CommError> {
        let mut parts = data.chunks(PART_BYTES);
        let first = parts.next().unwrap_or_default();
        let mut message = self.head(operation);
        message.put_u64_le(data.len() as u64);
        message.put_slice(first);
        self.transport.post(dest, Tag::COLLECTIVE, message.freeze())?;
        parts.try_for_each(|part| {
            let mut message = self.head(operation);
            message.put_slice(part);
            self.transport.post(dest, Tag::COLLECTIVE, message.freeze())
        })
    }

    /// What [`Phase::send`] sent, from one rank.
    fn receive(&self, from: u32, operation: Operation) -> Result<Vec<u8>, CommError> {
        self.receive_from(from, operation)
            .ok_or_else(|| self.deadline(vec![from]))?
    }

    /// What every other rank sent, by rank; empty for this rank.
    fn receive_all(&self, operation: Operation) -> Result<Vec<Vec<u8>>, CommError> {
        let mut received = vec![Vec::new(); self.transport.size() as usize];
        let mut missing = Vec::new();
        for peer in self.peers() {
            match self.receive_from(peer, operation) {
                Some(data) => received[peer as usize] = data?,
                None => missing.push(peer),
            }
        }
        match missing.is_empty() {
            true => Ok(received),
            false => Err(self.deadline(missing)),
        }
    }

    /// `None` when the deadline passed.
    fn receive_from(&self, from: u32, operation: Operation) -> Option<Result<Vec<u8>, CommError>> {
        let first = match self.message(from)? {
            Ok(message) => message,
            Err(error) => return Some(Err(error)),
        };
        let head = self.head(operation);
        let Some(body) = first.strip_prefix(&head[..]).filter(|body| body.len() >= 8) else {
            return Some(Err(self.mismatch(from, &first)));
        };
        let (len, part) = body.split_at(8);
        let len =
            u64::from_le_bytes([len[0], len[1], len[2], len[3], len[4], len[5], len[6], len[7]]) as usize;
        let mut data = part.to_vec();
        while data.len() < len {
            let message = match self.message(from)? {
                Ok(message) => message,
                Err(error) => return Some(Err(error)),
            };
            match message.strip_prefix(&head[..]).filter(|part| !part.is_empty()) {
                Some(part) => data.extend_from_slice(part),
                None => return Some(Err(self.mismatch(from, &message))),
            }
        }
        Some(Ok(data))
    }

    fn message(&self, from: u32) -> Option<Result<Bytes, CommError>> {
        let inbox = self.inboxes.get(from as usize)?.as_ref()?;
        match inbox.recv(self.timeout.saturating_sub(self.since.elapsed())) {
            Ok(message) => Some(Ok(message)),
            Err(InboxError::Timeout) => None,
            Err(InboxError::Closed) => Some(Err(CommError::Closed {
                rank: self.transport.rank(),
                reason: format!("the world ended in phase `{}`", self.name),
            })),
        }
    }

    fn check_len(&self, peer: u32, got: usize, want: usize) -> Result<(), CommError> {
        if got == want {
            return Ok(());
        }
        Err(CommError::Mismatch {
            rank: self.transport.rank(),
            phase: self.name.to_owned(),
            peer,
            peer_phase: format!("the same phase with {got} bytes instead of {want}"),
        })
    }

    fn deadline(&self, missing: Vec<u32>) -> CommError {
        CommError::Deadline {
            rank: self.transport.rank(),
            phase: self.name.to_owned(),
            missing,
            waited: self.since.elapsed(),
        }
    }

    fn mismatch(&self, peer: u32, message: &[u8]) -> CommError {
        let peer_phase = (|| {
            let number = u64::from_le_bytes(message.get(..8)?.try_into().ok()?);
            let len = u16::from_le_bytes(message.get(9..11)?.try_into().ok()?) as usize;
            let name = std::str::from_utf8(message.get(11..11 + len)?).ok()?;
            Some(format!(
                "phase `{name}`, its collective number {number} (here {})",
                self.number
            ))
        })();
        CommError::Mismatch {
            rank: self.transport.rank(),
            phase: self.name.to_owned(),
            peer,
            peer_phase: peer_phase.unwrap_or_else(|| "a phase whose name cannot be read".to_owned()),
        }
    }
}

/// The part of `len` elements that rank `rank` of `size` adds up.
fn slice(len: usize, rank: usize, size: usize) -> Range<usize> {
    len * rank / size..len * (rank + 1) / size
}

trait Element: Copy + std::ops::AddAssign {
    const ZERO: Self;
    const BYTES: usize;
    /// Reads [`Element::BYTES`] bytes.
    fn read(bytes: &[u8]) -> Self;
    fn write(self, out: &mut [u8]);
}

impl Element for f32 {
    const ZERO: Self = 0.0;
    const BYTES: usize = 4;
    fn read(b: &[u8]) -> Self {
        f32::from_le_bytes([b[0], b[1], b[2], b[3]])
    }
    fn write(self, out: &mut [u8]) {
        out.copy_from_slice(&self.to_le_bytes());
    }
}

impl Element for f64 {
    const ZERO: Self = 0.0;
    const BYTES: usize = 8;
    fn read(b: &[u8]) -> Self {
        f64::from_le_bytes([b[0], b[1], b[2], b[3], b[4], b[5], b[6], b[7]])
    }
    fn write(self, out: &mut [u8]) {
        out.copy_from_slice(&self.to_le_bytes());
    }
}

fn to_bytes<E: Element>(data: &[E]) -> Vec<u8> {
    let mut bytes = vec![0; data.len() * E::BYTES];
    for (out, value) in bytes.chunks_exact_mut(E::BYTES).zip(data) {
        value.write(out);
    }
    bytes
}

fn add<E: Element>(sum: &mut [E], values: impl Iterator<Item = E>) {
    for (sum, value) in sum.iter_mut().zip(values) {
        *sum += value;
    }
}
