//! A group of [`Collectives`] on the messages of a [`Communicator`], for memory of the host.
//!
//! Sums are made in rank order, so that every rank gets the same bits, whatever the timing. bf16 is summed
//! in f32 and rounded once.
//!
//! Each message carries the number and the name of its operation, and a rank that finds another name reports
//! both places of the program.

use super::{
    collective::PART_BYTES, collectives::Call, Collectives, CommError, Communicator, Element, Inbox,
    InboxError, Memory, Pending, Tag,
};
use bytes::{BufMut, Bytes, BytesMut};
use std::{
    collections::{HashMap, VecDeque},
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

/// A group on the messages of `comm`, for memory of the host. `members` are ranks of the world that all
/// make the same call; `tag` belongs to this group alone among those that a rank is in.
///
/// # Errors
/// This rank is not a member, a member does not exist, or the tag is taken.
pub fn group(
    comm: Arc<dyn Communicator>,
    members: &[u32],
    tag: Tag,
    timeout: Duration,
) -> Result<Arc<dyn Collectives>, CommError> {
    let Some(place) = members.iter().position(|rank| *rank == comm.rank()) else {
        return Err(CommError::NoSuchRank {
            rank: comm.rank(),
            size: members.len() as u32,
        });
    };
    let peers = members
        .iter()
        .map(|rank| (*rank != comm.rank()).then(|| comm.inbox(*rank, tag)).transpose())
        .collect::<Result<_, _>>()?;
    Ok(Arc::new(MessageGroup {
        members: members.to_vec(),
        place,
        tag,
        timeout,
        comm,
        started: Mutex::new(0),
        arrivals: Arc::new(Arrivals {
            state: Mutex::new(State {
                peers,
                early: HashMap::new(),
            }),
        }),
    }))
}

struct MessageGroup {
    members: Vec<u32>,
    place: usize,
    tag: Tag,
    timeout: Duration,
    comm: Arc<dyn Communicator>,
    /// Number of the next operation.
    started: Mutex<u64>,
    arrivals: Arc<Arrivals>,
}

struct Arrivals {
    state: Mutex<State>,
}

struct State {
    /// By place; `None` for this rank.
    peers: Vec<Option<Inbox>>,
    /// Messages of operations that nobody waits for yet, by place and number.
    early: HashMap<(usize, u64), VecDeque<Bytes>>,
}

/// What is done with the parts that arrive.
enum Finish {
    /// Written one after the other.
    Place,
    /// Added in rank order.
    Sum,
}

struct Waiting {
    arrivals: Arc<Arrivals>,
    members: Vec<u32>,
    place: usize,
    number: u64,
    name: String,
    timeout: Duration,
    /// What this rank keeps for itself.
    own: Vec<u8>,
    receive: Memory,
    /// Bytes from every rank.
    lengths: Vec<usize>,
    finish: Finish,
}

impl MessageGroup {
    /// Posts `part(place)` to every other rank.
    fn start<'a>(
        &self,
        phase: &str,
        part: impl Fn(usize) -> &'a [u8],
        receive: Memory,
        lengths: Vec<usize>,
        finish: Finish,
    ) -> Result<Box<dyn Pending>, CommError> {
        let number = {
            let mut started = self.started.lock().unwrap_or_else(PoisonError::into_inner);
            *started += 1;
            *started
        };
        let mut last: Option<(*const [u8], Vec<Bytes>)> = None;
        for (place, rank) in self.members.iter().enumerate() {
            if place == self.place {
                continue;
            }
            let data = part(place);
            // The same bytes for all are packed once.
            let known = last.as_ref().filter(|(slice, _)| std::ptr::eq(*slice, data));
            let messages = match known {
                Some((_, messages)) => messages.clone(),
                None => messages(number, phase, data),
            };
            for message in &messages {
                self.comm.send(*rank, self.tag, message.clone())?;
            }
            last = Some((std::ptr::from_ref(data), messages));
        }
        Ok(Box::new(Waiting {
            arrivals: self.arrivals.clone(),
            members: self.members.clone(),
            place: self.place,
            number,
            name: phase.to_owned(),
            timeout: self.timeout,
            own: part(self.place).to_vec(),
            receive,
            lengths,
            finish,
        }))
    }

    fn call<'a>(&self, phase: &'a str) -> Call<'a> {
        Call {
            rank: self.members[self.place],
            ranks: self.members.len(),
            phase,
        }
    }
}

impl Collectives for MessageGroup {
    fn members(&self) -> &[u32] {
        &self.members
    }

    fn place(&self) -> usize {
        self.place
    }

    unsafe fn all_gather(
        &self,
        phase: &str,
        send: Memory,
        receive: Memory,
    ) -> Result<Box<dyn Pending>, CommError> {
        self.call(phase).all_gather(send, receive)?;
        // SAFETY: the caller's promise about the memory of an operation.
        let data = unsafe { send.bytes() };
        let lengths = vec![data.len(); self.size()];
        self.start(phase, |_| data, receive, lengths, Finish::Place)
    }

    unsafe fn reduce_scatter(
        &self,
        phase: &str,
        send: Memory,
        receive: Memory,
    ) -> Result<Box<dyn Pending>, CommError> {
        self.call(phase).reduce_scatter(send, receive)?;
        // SAFETY: the caller's promise about the memory of an operation.
        let data = unsafe { send.bytes() };
        let length = receive.size_bytes();
        let part = |place: usize| &data[place * length..(place + 1) * length];
        self.start(phase, part, receive, vec![length; self.size()], Finish::Sum)
    }

    unsafe fn all_to_all(
        &self,
        phase: &str,
        send: Memory,
        send_counts: &[usize],
        receive: Memory,
        receive_counts: &[usize],
    ) -> Result<Box<dyn Pending>, CommError> {
        self.call(phase)
            .all_to_all((send, send_counts), (receive, receive_counts))?;
        // SAFETY: the caller's promise about the memory of an operation.
        let data = unsafe { send.bytes() };
        let bytes = send.element.size_bytes();
        let starts: Vec<usize> = send_counts
            .iter()
            .scan(0, |at, count| {
                *at += count;
                Some((*at - count) * bytes)
            })
            .collect();
        let part = |place: usize| &data[starts[place]..starts[place] + send_counts[place] * bytes];
        let lengths = receive_counts.iter().map(|count| count * bytes).collect();
        self.start(phase, part, receive, lengths, Finish::Place)
    }

    unsafe fn all_reduce(&self, phase: &str, data: Memory) -> Result<Box<dyn Pending>, CommError> {
        self.call(phase).all_reduce(data)?;
        // SAFETY: the caller's promise about the memory of an operation.
        let bytes = unsafe { data.bytes() };
        self.start(
            phase,
            |_| bytes,
            data,
            vec![bytes.len(); self.size()],
            Finish::Sum,
        )
    }
}

/// The head of every message of an operation.
fn head(number: u64, name: &str) -> BytesMut {
    let mut head = BytesMut::with_capacity(18 + name.len());
    head.put_u64_le(number);
    head.put_u16_le(name.len() as u16);
    head.put_slice(name.as_bytes());
    head
}

/// `data` in messages: the first says how many bytes there are.
fn messages(number: u64, name: &str, data: &[u8]) -> Vec<Bytes> {
    let mut parts = data.chunks(PART_BYTES);
    let first = parts.next().unwrap_or_default();
    let mut message = head(number, name);
    message.reserve(8 + first.len());
    message.put_u64_le(data.len() as u64);
    message.put_slice(first);
    let mut all = vec![message.freeze()];
    all.extend(parts.map(|part| {
        let mut message = head(number, name);
        message.extend_from_slice(part);
        message.freeze()
    }));
    all
}

impl Pending for Waiting {
    fn wait(self: Box<Self>) -> Result<(), CommError> {
        let since = Instant::now();
        let mut state = self.arrivals.state.lock().unwrap_or_else(PoisonError::into_inner);
        let mut parts = Vec::with_capacity(self.members.len());
        let mut missing = Vec::new();
        for (place, rank) in self.members.iter().enumerate() {
            if place == self.place {
                parts.push(Vec::new());
                continue;
            }
            match self.receive(&mut state, place, since) {
                Some(part) => parts.push(part?),
                None => missing.push(*rank),
            }
        }
        drop(state);
        if !missing.is_empty() {
            return Err(CommError::Deadline {
                rank: self.members[self.place],
                phase: self.name.clone(),
                missing,
                waited: since.elapsed(),
            });
        }
        parts[self.place].clone_from(&self.own);
        // SAFETY: whoever started the operation keeps this memory for it until now.
        let out = unsafe { self.receive.bytes_mut() };
        match self.finish {
            Finish::Place => {
                let mut at = 0;
                for part in &parts {
                    out[at..at + part.len()].copy_from_slice(part);
                    at += part.len();
                }
            }
            Finish::Sum => sum(self.receive.element, out, &parts),
        }
        Ok(())
    }
}

impl Waiting {
    /// This operation's bytes of one rank; `None` when the deadline passed.
    fn receive(&self, state: &mut State, place: usize, since: Instant) -> Option<Result<Vec<u8>, CommError>> {
        let want = self.lengths[place];
        let head = head(self.number, &self.name);
        let mut data: Option<Vec<u8>> = None;
        loop {
            if let Some(data) = data.take_if(|data| data.len() == want) {
                return Some(Ok(data));
            }
            let message = match self.message(state, place, since)? {
                Ok(message) => message,
                Err(error) => return Some(Err(error)),
            };
            let Some(body) = message.strip_prefix(&head[..]) else {
                return Some(Err(self.mismatch(place, &message)));
            };
            match &mut data {
                Some(data) => data.extend_from_slice(body),
                None => {
                    let Some((len, part)) = body.split_at_checked(8) else {
                        return Some(Err(self.mismatch(place, &message)));
                    };
                    let len = len.iter().rev().fold(0u64, |n, byte| n << 8 | u64::from(*byte));
                    if len != want as u64 {
                        return Some(Err(CommError::Mismatch {
                            rank: self.members[self.place],
                            phase: self.name.clone(),
                            peer: self.members[place],
                            peer_phase: format!("the same phase with {len} bytes instead of {want}"),
                        }));
                    }
                    let mut whole = Vec::with_capacity(want);
                    whole.extend_from_slice(part);
                    data = Some(whole);
                }
            }
        }
    }

    /// The next message of this operation from one rank; those of others are put aside.
    fn message(&self, state: &mut State, place: usize, since: Instant) -> Option<Result<Bytes, CommError>> {
        if let Some(message) = state
            .early
            .get_mut(&(place, self.number))
            .and_then(VecDeque::pop_front)
        {
            return Some(Ok(message));
        }
        state.early.remove(&(place, self.number));
        loop {
            let inbox = state.peers.get(place)?.as_ref()?;
            let message = match inbox.recv(self.timeout.saturating_sub(since.elapsed())) {
                Ok(message) => message,
                Err(InboxError::Timeout) => return None,
                Err(InboxError::Closed) => {
                    return Some(Err(CommError::Closed {
                        rank: self.members[self.place],
                        reason: format!("the world ended in phase `{}`", self.name),
                    }))
                }
            };
            let number = message
                .get(..8)
                .map(|n| n.iter().rev().fold(0u64, |n, byte| n << 8 | u64::from(*byte)));
            match number {
                Some(number) if number != self.number => {
                    state.early.entry((place, number)).or_default().push_back(message);
                }
                _ => return Some(Ok(message)),
            }
        }
    }

    fn mismatch(&self, place: usize, message: &[u8]) -> CommError {
        let name = (|| {
            let len = u16::from_le_bytes(message.get(8..10)?.try_into().ok()?) as usize;
            std::str::from_utf8(message.get(10..10 + len)?).ok()
        })();
        CommError::Mismatch {
            rank: self.members[self.place],
            phase: self.name.clone(),
            peer: self.members[place],
            peer_phase: match name {
                Some(name) => format!("phase `{name}`, its operation number {}", self.number),
                None => "a phase whose name cannot be read".to_owned(),
            },
        }
    }
}

/// Adds the parts, in order, to zero.
fn sum(element: Element, out: &mut [u8], parts: &[Vec<u8>]) {
    macro_rules! add {
        ($type:ty, $wide:ty, $widen:expr, $narrow:expr) => {{
            const BYTES: usize = std::mem::size_of::<$type>();
            let read = |bytes: &[u8]| -> $wide {
                let mut number = [0; BYTES];
                number.copy_from_slice(bytes);
                $widen(<$type>::from_le_bytes(number))
            };
            for (i, out) in out.chunks_exact_mut(BYTES).enumerate() {
                let at = i * BYTES..(i + 1) * BYTES;
                let total = parts[1..].iter().fold(read(&parts[0][at.clone()]), |sum, part| {
                    sum + read(&part[at.clone()])
                });
                out.copy_from_slice(&$narrow(total).to_le_bytes());
            }
        }};
    }
    match element {
        Element::F32 => add!(f32, f32, |x| x, |x: f32| x),
        Element::F64 => add!(f64, f64, |x| x, |x: f64| x),
        Element::I64 => add!(i64, i64, |x| x, |x: i64| x),
        Element::Bf16 => add!(half::bf16, f32, |x: half::bf16| x.to_f32(), half::bf16::from_f32),
        Element::U8 => unreachable!("`Call` refuses sums of bytes"),
    }
}

#[cfg(test)]
mod tests;
