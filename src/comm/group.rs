//! Collectives on numbers in memory, over groups of ranks: what sharded tensors travel by.
//!
//! A [`Collectives`] is one rank's place in one group. An operation is started and waited for
//! separately, so that a gather may be under way while something else is computed:
//!
//! ```text
//! let next = group.all_gather(..)?;     posts what this rank has, returns at once
//! compute();
//! next.wait()?;                         has what the others posted
//! ```
//!
//! | Operation | Reads | Writes |
//! |---|---|---|
//! | all-gather | n numbers | `size` x n: those of all ranks, in their order |
//! | reduce-scatter | `size` x n numbers | n: this rank's part of the sum over ranks |
//! | all-to-all | a run of numbers for every rank | the runs of all ranks for this one, in their order |
//! | all-reduce | n numbers | n: the sum over ranks |
//!
//! Sums are made in rank order, so that every rank gets the same bits, whatever the timing. bf16 is summed
//! in f32 and rounded once.
//!
//! All ranks of a group start the same operations in the same order; they may wait in any order. Each
//! message carries the number and the name of its operation, and a rank that finds another name reports
//! both places of the program.
//!
//! [`group`] builds one on the messages of a [`Communicator`], for memory of the host. An implementation
//! for devices takes device addresses; it starts behind the work that is queued on the current stream
//! of the calling thread, and its `wait` makes that stream wait.

use super::{collective::PART_BYTES, CommError, Communicator, Inbox, InboxError, Tag};
use bytes::{BufMut, Bytes, BytesMut};
use std::{
    collections::{HashMap, VecDeque},
    ffi::c_void,
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

/// Type of the numbers in a piece of memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Element {
    /// Bytes: moved, never summed.
    U8,
    /// 64-bit integers.
    I64,
    /// bfloat16.
    Bf16,
    /// f32.
    F32,
    /// f64.
    F64,
}

impl Element {
    /// Bytes of a number.
    pub fn size_bytes(self) -> usize {
        match self {
            Element::U8 => 1,
            Element::Bf16 => 2,
            Element::F32 => 4,
            Element::I64 | Element::F64 => 8,
        }
    }
}

/// Numbers in a row, on the host or on the device that the implementation works on.
#[derive(Clone, Copy, Debug)]
pub struct Memory {
    /// Of the first number. May be null when `count` is 0.
    pub address: *mut c_void,
    /// Numbers.
    pub count: usize,
    /// Their type.
    pub element: Element,
}

// SAFETY: an address is a number; whoever reads or writes there has promised that it is valid.
unsafe impl Send for Memory {}

impl Memory {
    /// The numbers of a slice of bytes.
    pub fn of_bytes(bytes: &mut [u8]) -> Self {
        Self {
            address: bytes.as_mut_ptr().cast(),
            count: bytes.len(),
            element: Element::U8,
        }
    }

    /// The numbers of a slice.
    pub fn of_f64(values: &mut [f64]) -> Self {
        Self {
            address: values.as_mut_ptr().cast(),
            count: values.len(),
            element: Element::F64,
        }
    }

    /// The numbers of a slice.
    pub fn of_i64(values: &mut [i64]) -> Self {
        Self {
            address: values.as_mut_ptr().cast(),
            count: values.len(),
            element: Element::I64,
        }
    }

    fn size_bytes(&self) -> usize {
        self.count * self.element.size_bytes()
    }

    /// # Safety
    /// The memory is readable, on the host, and nobody writes to it while the slice is used.
    unsafe fn bytes<'a>(&self) -> &'a [u8] {
        if self.count == 0 {
            return &[];
        }
        // SAFETY: the caller's promise.
        unsafe { std::slice::from_raw_parts(self.address.cast(), self.size_bytes()) }
    }

    /// # Safety
    /// The memory is writable, on the host, and nobody else uses it while the slice is used.
    unsafe fn bytes_mut<'a>(&self) -> &'a mut [u8] {
        if self.count == 0 {
            return &mut [];
        }
        // SAFETY: the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.address.cast(), self.size_bytes()) }
    }
}

/// An operation under way. One that is dropped is never completed on this rank, and leaves its memory
/// alone from then on.
pub trait Pending: Send {
    /// Returns when the result is in its place (for a device: when the current stream will wait for it).
    ///
    /// # Errors
    /// [`CommError::Deadline`] names the ranks that did not come; the group is of no use after an error.
    fn wait(self: Box<Self>) -> Result<(), CommError>;
}

/// One rank's place in a group of ranks.
///
/// # Safety of the operations
/// The memory that is read and written stays valid until the handle has been waited for or dropped, and
/// until then nobody writes to either or reads the result.
#[allow(clippy::missing_safety_doc, reason = "said once, for all operations, above")]
pub trait Collectives: Send + Sync {
    /// Ranks of the world that are in the group, in the group's order.
    fn members(&self) -> &[u32];

    /// This rank's place in the group.
    fn place(&self) -> usize;

    /// Ranks in the group.
    fn size(&self) -> usize {
        self.members().len()
    }

    /// `receive` has `size` times the numbers of `send`.
    unsafe fn all_gather(
        &self,
        phase: &str,
        send: Memory,
        receive: Memory,
    ) -> Result<Box<dyn Pending>, CommError>;

    /// `send` has `size` times the numbers of `receive`.
    unsafe fn reduce_scatter(
        &self,
        phase: &str,
        send: Memory,
        receive: Memory,
    ) -> Result<Box<dyn Pending>, CommError>;

    /// Numbers for each rank and from each rank, in the group's order. What rank a sends to rank b is what
    /// rank b expects from rank a.
    unsafe fn all_to_all(
        &self,
        phase: &str,
        send: Memory,
        send_counts: &[usize],
        receive: Memory,
        receive_counts: &[usize],
    ) -> Result<Box<dyn Pending>, CommError>;

    /// In place.
    unsafe fn all_reduce(&self, phase: &str, data: Memory) -> Result<Box<dyn Pending>, CommError>;
}

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

    fn check(&self, phase: &str, got: usize, want: usize) -> Result<(), CommError> {
        if got == want {
            return Ok(());
        }
        let rank = self.members[self.place];
        Err(CommError::Mismatch {
            rank,
            phase: phase.to_owned(),
            peer: rank,
            peer_phase: format!("the same phase with room for {got} numbers instead of {want}"),
        })
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
        self.check(phase, receive.count, send.count * self.size())?;
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
        self.check(phase, send.count, receive.count * self.size())?;
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
        self.check(phase, send.count, send_counts.iter().sum())?;
        self.check(phase, receive.count, receive_counts.iter().sum())?;
        self.check(phase, send_counts.len(), self.size())?;
        self.check(phase, receive_counts.len(), self.size())?;
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
        Element::U8 => unreachable!("bytes are moved and never summed"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::comm::inprocess;

    const SOON: Duration = Duration::from_secs(20);

    fn f32s(values: &mut [f32]) -> Memory {
        Memory {
            address: values.as_mut_ptr().cast(),
            count: values.len(),
            element: Element::F32,
        }
    }

    /// Runs `body` on every rank of a world of threads, in a group of all of them.
    fn on_threads(size: u32, body: impl Fn(Arc<dyn Collectives>) + Sync) {
        let members: Vec<u32> = (0..size).collect();
        std::thread::scope(|scope| {
            for comm in inprocess::world(size) {
                let (members, body) = (&members, &body);
                scope.spawn(move || body(group(comm, members, Tag::group(0), SOON).unwrap()));
            }
        });
    }

    #[test]
    fn every_operation_gives_what_its_table_says() {
        on_threads(3, |group| {
            let me = group.place();
            let mut own = [me as f32, 10.0 + me as f32];
            let mut all = [0.0; 6];
            let mut both: Vec<f32> = (0..6).map(|i| (i * (me + 1)) as f32).collect();
            let mut part = [0.0; 2];
            // To rank p go 2p copies of this rank's number: nothing to the first.
            let counts = [0, 2, 4];
            let mut runs = [me as f32; 6];
            let expected = vec![2 * me; 3];
            let mut arrived = vec![0.0; 6 * me];
            let mut total = [0.1 * me as f64];
            // SAFETY: all of it lives until the handles are waited for.
            let handles = unsafe {
                [
                    group.all_gather("gather", f32s(&mut own), f32s(&mut all)),
                    group.reduce_scatter("scatter", f32s(&mut both), f32s(&mut part)),
                    group.all_to_all(
                        "exchange",
                        f32s(&mut runs),
                        &counts,
                        f32s(&mut arrived),
                        &expected,
                    ),
                    group.all_reduce("sum", Memory::of_f64(&mut total)),
                ]
            };
            // In another order than they were started in.
            for handle in handles.into_iter().rev() {
                handle.unwrap().wait().unwrap();
            }
            assert_eq!(all, [0.0, 10.0, 1.0, 11.0, 2.0, 12.0]);
            assert_eq!(part, [12.0 * me as f32, 6.0 * (2 * me + 1) as f32]);
            let want: Vec<f32> = (0..3).flat_map(|from| vec![from as f32; 2 * me]).collect();
            assert_eq!(arrived, want);
            // In rank order, so exactly this.
            assert_eq!(total, [0.0 + 0.1 + 0.2]);
        });
    }

    #[test]
    fn large_data_travels_in_parts_and_bf16_is_summed_in_f32() {
        on_threads(2, |group| {
            let count = 2 * PART_BYTES / 4 + 3;
            let mut own = vec![group.place() as f32 + 1.0; count];
            let mut all = vec![0.0; 2 * count];
            // SAFETY: both live until the handle is waited for.
            let handle = unsafe { group.all_gather("large", f32s(&mut own), f32s(&mut all)) };
            handle.unwrap().wait().unwrap();
            assert!(all[..count].iter().all(|x| *x == 1.0) && all[count..].iter().all(|x| *x == 2.0));
            let mut narrow = [half::bf16::from_f32(256.0 + 2.0 * group.place() as f32)];
            let memory = Memory {
                address: narrow.as_mut_ptr().cast(),
                count: 1,
                element: Element::Bf16,
            };
            // SAFETY: it lives until the handle is waited for.
            unsafe { group.all_reduce("narrow", memory) }
                .unwrap()
                .wait()
                .unwrap();
            // 514 lies between two numbers of bf16; the even one is taken.
            assert_eq!(narrow[0].to_f32(), 512.0);
        });
    }

    #[test]
    fn an_absent_rank_and_another_phase_are_named() {
        let mut world = inprocess::world(2);
        let other = world.pop().unwrap();
        let short = Duration::from_millis(50);
        let here = group(world.pop().unwrap(), &[0, 1], Tag::group(0), short).unwrap();
        let mut own = [1.0f32];
        // SAFETY: it lives until the handle is waited for.
        let wait = |own: &mut [f32]| unsafe { here.all_reduce("norm", f32s(own)) }.unwrap().wait();
        let error = wait(&mut own).unwrap_err();
        assert!(
            matches!(&error, CommError::Deadline { missing, .. } if *missing == [1]),
            "{error}"
        );
        let there = group(other, &[0, 1], Tag::group(0), short).unwrap();
        // SAFETY: nobody waits for these.
        let mut theirs = [1.0f32];
        for phase in ["norm", "loss"] {
            drop(unsafe { there.all_reduce(phase, f32s(&mut theirs)) });
        }
        let error = wait(&mut own).unwrap_err().to_string();
        assert!(error.contains("`norm`") && error.contains("`loss`"), "{error}");
    }

    #[test]
    fn groups_of_some_ranks_do_not_see_each_other() {
        std::thread::scope(|scope| {
            for comm in inprocess::world(4) {
                scope.spawn(move || {
                    let rank = comm.rank();
                    let rows = [2 * (rank / 2), 2 * (rank / 2) + 1];
                    let columns = [rank % 2, rank % 2 + 2];
                    let row = group(comm.clone(), &rows, Tag::group(0), SOON).unwrap();
                    let column = group(comm, &columns, Tag::group(1), SOON).unwrap();
                    let mut sums = [f64::from(rank); 2];
                    let (a, b) = sums.split_at_mut(1);
                    // SAFETY: both live until the handles are waited for.
                    let (a, b) = unsafe {
                        (
                            row.all_reduce("row", Memory::of_f64(a)),
                            column.all_reduce("column", Memory::of_f64(b)),
                        )
                    };
                    b.unwrap().wait().unwrap();
                    a.unwrap().wait().unwrap();
                    assert_eq!(
                        sums,
                        [f64::from(rows[0] + rows[1]), f64::from(columns[0] + columns[1])]
                    );
                });
            }
        });
    }
}
