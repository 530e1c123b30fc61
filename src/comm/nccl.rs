//! [`Collectives`] on the memory of CUDA devices, by NCCL.
//!
//! ```text
//! current stream   … compute ─┬─ event ──────────────────┬─ waits ─ uses the result
//! stream of the group         └─ waits ─ NCCL ─ event ───┘
//! ```
//!
//! An operation whose handle is dropped still writes to its memory, so dropping makes the current stream wait as
//! well: what is computed next in that memory comes behind it.
//!
//! The order of sums is NCCL's: the same on all ranks, and the same from run to run on the same topology.
//!
//! Who does not come is named by [`watch`]; which NCCL it is, says [`library`].

mod library;
mod watch;

use self::{
    library::{kind, library, Library, Stream},
    watch::{Running, Shared, State},
};
use super::{collectives::Call, late::LateNotes, Collectives, CommError, Communicator, Memory, Pending, Tag};
use cudarc::{
    driver::{
        result::{event, stream, DriverError},
        sys::{CUevent, CUevent_flags, CUevent_wait_flags, CUstream},
        CudaContext,
    },
    nccl::sys::{ncclComm_t, ncclRedOp_t, ncclUniqueId},
};
use std::{
    collections::VecDeque,
    ffi::{c_char, c_int},
    ptr::null_mut,
    sync::{mpsc::channel, Arc, Condvar, Mutex},
    time::{Duration, Instant},
};

const DEFAULT_WAIT: CUevent_wait_flags = CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT;
const START: &str = "start of NCCL";

fn driver(what: &str) -> impl Fn(DriverError) -> String + '_ {
    move |error| format!("the CUDA driver cannot {what}: {error:?}")
}

/// A group over the ranks of `host`, which it uses to start; each rank with the device of this number in
/// its process, and no two with the same one. Operations that are not done after `timeout` are
/// aborted, and the ranks that did not come are asked for by messages of `tag`, which belongs to this group alone.
/// libtorch's CUDA half must be loaded.
///
/// # Errors
/// NCCL is not there, two ranks share a device, or a rank did not come.
pub fn nccl_group(
    comm: Arc<dyn Communicator>,
    host: &dyn Collectives,
    tag: Tag,
    device: usize,
    timeout: Duration,
) -> Result<Arc<dyn Collectives>, CommError> {
    let failed = |problem: String| CommError::Device {
        rank: comm.rank(),
        phase: START.into(),
        problem,
    };
    let library = library().map_err(failed)?;
    let mut own = ncclUniqueId { internal: [0; 128] };
    if host.place() == 0 {
        // SAFETY: NCCL fills in the struct.
        let code = unsafe { (library.unique_id)(&mut own) };
        library.check(code).map_err(failed)?;
    }
    let mut bytes: Vec<u8> = own.internal.iter().map(|b| *b as u8).collect();
    let mut all = vec![0u8; bytes.len() * host.size()];
    // SAFETY: both live until the handle is waited for.
    unsafe { host.all_gather(START, Memory::of_bytes(&mut bytes), Memory::of_bytes(&mut all)) }?.wait()?;
    let mut id = own;
    for (to, from) in id.internal.iter_mut().zip(&all) {
        *to = *from as c_char;
    }
    let notes = LateNotes::new(comm.clone(), host.members(), tag)?;
    let group = Group::start(library, host, device, id, timeout, notes).map_err(failed)?;
    Ok(Arc::new(group))
}

struct Group {
    members: Vec<u32>,
    place: usize,
    device: usize,
    shared: Arc<Shared>,
    watch: Option<std::thread::JoinHandle<()>>,
}

/// An event that is destroyed with its last user.
struct Event(CUevent);

// SAFETY: events of the driver API may be used from any thread.
unsafe impl Send for Event {}
// SAFETY: as above.
unsafe impl Sync for Event {}

impl Event {
    fn new() -> Result<Self, String> {
        event::create(CUevent_flags::CU_EVENT_DISABLE_TIMING)
            .map(Event)
            .map_err(driver("make an event"))
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: made by `Event::new`; the driver keeps what is still needed of it.
        let _ = unsafe { event::destroy(self.0) };
    }
}

/// A communicator on its way from the thread that made it.
struct Joined(ncclComm_t);

// SAFETY: the thread that made it does not use it any more.
unsafe impl Send for Joined {}

/// This rank's communicator. NCCL waits for all ranks without end, so a thread does it that may be left behind.
fn join(
    library: &'static Library,
    context: &Arc<CudaContext>,
    (size, place): (usize, usize),
    id: ncclUniqueId,
    timeout: Duration,
) -> Result<ncclComm_t, String> {
    let (sender, receiver) = channel();
    let context = context.clone();
    let start = move || {
        context.bind_to_thread().map_err(driver("use the device"))?;
        let mut comm: ncclComm_t = null_mut();
        // SAFETY: NCCL fills in the handle; the device is the current one of this thread.
        library.check(unsafe { (library.init_rank)(&mut comm, size as c_int, id, place as c_int) })?;
        Ok(Joined(comm))
    };
    std::thread::Builder::new()
        .name("nccl-start".into())
        .spawn(move || sender.send(start()))
        .map_err(|e| format!("no thread can be started: {e}"))?;
    match receiver.recv_timeout(timeout) {
        Ok(joined) => joined.map(|Joined(comm)| comm),
        Err(_) => Err(format!(
            "the ranks' devices have not found each other within {} s: look at the logs of the other ranks \
             (NCCL_DEBUG=INFO in the environment says more)",
            timeout.as_secs()
        )),
    }
}

impl Group {
    fn start(
        library: &'static Library,
        host: &dyn Collectives,
        device: usize,
        id: ncclUniqueId,
        timeout: Duration,
        notes: LateNotes,
    ) -> Result<Self, String> {
        // The primary context, which libtorch uses as well; it becomes this thread's current one.
        let context = CudaContext::new(device).map_err(driver("use the device"))?;
        let stream = stream::create(stream::StreamKind::NonBlocking).map_err(driver("make a stream"))?;
        let comm = join(library, &context, (host.size(), host.place()), id, timeout)?;
        let shared = Arc::new(Shared {
            context,
            library,
            rank: host.members()[host.place()],
            timeout,
            state: Mutex::new(State {
                comm,
                stream,
                started: 0,
                running: VecDeque::new(),
                failed: None,
                over: false,
            }),
            changed: Condvar::new(),
        });
        let watched = shared.clone();
        let watch = std::thread::Builder::new()
            .name("nccl-watch".into())
            .spawn(move || watched.watch(notes))
            .map_err(|e| format!("no thread can be started: {e}"))?;
        Ok(Self {
            members: host.members().to_vec(),
            place: host.place(),
            device,
            shared,
            watch: Some(watch),
        })
    }

    fn call<'a>(&self, phase: &'a str) -> Call<'a> {
        Call {
            rank: self.shared.rank,
            ranks: self.members.len(),
            phase,
        }
    }

    /// Current stream of the calling thread in libtorch.
    fn current_stream(&self) -> Result<CUstream, String> {
        let mut current: Stream = null_mut();
        // SAFETY: libtorch fills in the handle; null is the default stream.
        match unsafe { (self.shared.library.current_stream)(self.device as i32, &mut current) } {
            0 => Ok(current.cast()),
            _ => Err("libtorch does not say what its current stream is".into()),
        }
    }

    /// Runs `operation` on the group's stream, behind what is queued on the current one.
    fn run(
        &self,
        phase: &str,
        operation: impl FnOnce(&Library, ncclComm_t, Stream) -> Result<(), String>,
    ) -> Result<Box<dyn Pending>, CommError> {
        let started = |state: &mut State| -> Result<Started, String> {
            let current = self.current_stream()?;
            let (ready, done) = (Event::new()?, Arc::new(Event::new()?));
            // SAFETY: events and streams are alive; the context is that of the device.
            unsafe {
                event::record(ready.0, current).map_err(driver("record an event"))?;
                stream::wait_event(state.stream, ready.0, DEFAULT_WAIT)
                    .map_err(driver("wait for an event"))?;
            }
            operation(self.shared.library, state.comm, state.stream.cast())?;
            // SAFETY: as above.
            unsafe { event::record(done.0, state.stream) }.map_err(driver("record an event"))?;
            state.started += 1;
            state.running.push_back(Running {
                number: state.started,
                phase: phase.to_owned(),
                done: done.clone(),
                since: Instant::now(),
            });
            Ok(Started {
                done,
                shared: self.shared.clone(),
                stream: current as usize,
                phase: phase.to_owned(),
                is_ordered: false,
            })
        };
        let device = |problem| self.shared.error(phase, problem);
        self.shared.bind().map_err(device)?;
        let mut state = self.shared.lock();
        if let Some(failed) = &state.failed {
            return Err(failed.clone());
        }
        let started = started(&mut state).map_err(device)?;
        self.shared.changed.notify_one();
        Ok(Box::new(started))
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        let mut state = self.shared.lock();
        state.over = true;
        // Aborting does not wait for other ranks, and operations that somebody waited for are done.
        self.shared.abort(&mut state);
        drop(state);
        self.shared.changed.notify_all();
        if let Some(watch) = self.watch.take() {
            let _ = watch.join();
        }
    }
}

struct Started {
    done: Arc<Event>,
    shared: Arc<Shared>,
    /// Current stream of the thread that started it.
    stream: usize,
    phase: String,
    /// The stream waits for it.
    is_ordered: bool,
}

impl Started {
    /// What is queued on the stream from here on comes behind the operation.
    fn order(&mut self) -> Result<(), String> {
        self.is_ordered = true;
        self.shared.bind()?;
        // SAFETY: the event is alive, the stream is libtorch's.
        unsafe { stream::wait_event(self.stream as CUstream, self.done.0, DEFAULT_WAIT) }
            .map_err(driver("wait for an event"))
    }
}

impl Pending for Started {
    fn wait(mut self: Box<Self>) -> Result<(), CommError> {
        let ordered = self.order();
        if let Some(failed) = &self.shared.lock().failed {
            return Err(failed.clone());
        }
        ordered.map_err(|problem| self.shared.error(&self.phase, problem))
    }
}

impl Drop for Started {
    fn drop(&mut self) {
        if !self.is_ordered {
            if let Err(problem) = self.order() {
                tracing::error!(
                    phase = self.phase,
                    problem,
                    "memory of an operation is given back early"
                );
            }
        }
    }
}

impl Collectives for Group {
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
        self.run(phase, |library, comm, stream| {
            let kind = kind(send.element);
            // SAFETY: the caller's promise about the memory of an operation.
            library.check(unsafe {
                (library.all_gather)(send.address, receive.address, send.count, kind, comm, stream)
            })
        })
    }

    unsafe fn reduce_scatter(
        &self,
        phase: &str,
        send: Memory,
        receive: Memory,
    ) -> Result<Box<dyn Pending>, CommError> {
        self.call(phase).reduce_scatter(send, receive)?;
        let (kind, sum) = (kind(send.element), ncclRedOp_t::ncclSum);
        let (from, to, count) = (send.address, receive.address, receive.count);
        self.run(phase, |library, comm, stream| {
            // SAFETY: the caller's promise about the memory of an operation.
            library.check(unsafe { (library.reduce_scatter)(from, to, count, kind, sum, comm, stream) })
        })
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
        let (kind, bytes) = (kind(send.element), send.element.size_bytes());
        let (mut from, mut to) = (send.address.cast::<u8>(), receive.address.cast::<u8>());
        self.run(phase, |library, comm, stream| {
            // SAFETY: the caller's promise about the memory of an operation; the counts were checked.
            unsafe {
                library.check((library.group_start)())?;
                for (peer, (out, into)) in send_counts.iter().zip(receive_counts).enumerate() {
                    let peer = peer as c_int;
                    if *out > 0 {
                        library.check((library.send)(from.cast(), *out, kind, peer, comm, stream))?;
                    }
                    if *into > 0 {
                        library.check((library.recv)(to.cast(), *into, kind, peer, comm, stream))?;
                    }
                    from = from.wrapping_add(out * bytes);
                    to = to.wrapping_add(into * bytes);
                }
                library.check((library.group_end)())
            }
        })
    }

    unsafe fn all_reduce(&self, phase: &str, data: Memory) -> Result<Box<dyn Pending>, CommError> {
        self.call(phase).all_reduce(data)?;
        let (kind, sum) = (kind(data.element), ncclRedOp_t::ncclSum);
        let (at, count) = (data.address, data.count);
        self.run(phase, |library, comm, stream| {
            // SAFETY: the caller's promise about the memory of an operation.
            library.check(unsafe { (library.all_reduce)(at, at, count, kind, sum, comm, stream) })
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::comm::{group, single};

    /// With a GPU, `tests/gpu` runs the operations.
    #[test]
    fn without_libtorchs_cuda_half_the_error_says_what_is_missing() {
        let (comm, soon) = (single(), Duration::from_secs(5));
        let host = group(comm.clone(), &[0], Tag::group(0), soon).unwrap();
        match nccl_group(comm, host.as_ref(), Tag::notes(0), 0, soon) {
            Ok(_) => eprintln!("skipped: libnccl.so.2 is loaded"),
            Err(error) => {
                let text = error.to_string();
                assert!(text.contains("libnccl.so.2") && text.contains("rank 0"), "{text}");
            }
        }
    }
}
