//! [`Collectives`] on the memory of CUDA devices, by NCCL.
//!
//! ```text
//! current stream   … compute ─┬─ event ──────────────────┬─ waits ─ uses the result
//! stream of the group         └─ waits ─ NCCL ─ event ───┘
//! ```
//!
//! *Which NCCL.* libtorch's CUDA half brings one (`libnccl.so.2`), and its functions are taken from
//! there. A second one in the same process, of another version, answers with errors: the symbols of the
//! first are visible to it. cudarc's own loader asks for `libnccl.so`, which is such a second one on many
//! systems, so cudarc gives the types here and not the functions.
//!
//! *Who is late.* NCCL itself waits for ever. A thread a group looks whether started operations come to
//! an end; one that does not within the group's time limit is aborted on this rank, and every later call of
//! the group is an error. What the aborted operation was to write is undefined, and a caller notices at
//! its next operation at the latest: a step has several.
//!
//! The order of sums is NCCL's: the same on all ranks, and the same from run to run on the same topology.

use super::{Collectives, CommError, Element, Memory, Pending};
use cudarc::{
    driver::{
        result::{event, stream, DriverError},
        sys::{CUevent, CUevent_flags, CUevent_wait_flags, CUstream},
        CudaContext,
    },
    nccl::sys::{ncclComm_t, ncclDataType_t, ncclRedOp_t, ncclResult_t, ncclUniqueId},
};
use std::{
    ffi::{c_char, c_int, c_void, CStr},
    mem::transmute,
    ptr::null_mut,
    sync::{Arc, Condvar, Mutex, OnceLock, PoisonError},
    time::{Duration, Instant},
};

/// How often the thread of a group looks.
const POLL: Duration = Duration::from_millis(50);

const DEFAULT_WAIT: CUevent_wait_flags = CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT;

type Stream = *mut c_void;

/// Functions of the NCCL that libtorch brought, and libtorch's own for its current stream.
struct Library {
    error_string: unsafe extern "C" fn(ncclResult_t) -> *const c_char,
    unique_id: unsafe extern "C" fn(*mut ncclUniqueId) -> ncclResult_t,
    init_rank: unsafe extern "C" fn(*mut ncclComm_t, c_int, ncclUniqueId, c_int) -> ncclResult_t,
    abort: unsafe extern "C" fn(ncclComm_t) -> ncclResult_t,
    group_start: unsafe extern "C" fn() -> ncclResult_t,
    group_end: unsafe extern "C" fn() -> ncclResult_t,
    all_gather: unsafe extern "C" fn(
        *const c_void,
        *mut c_void,
        usize,
        ncclDataType_t,
        ncclComm_t,
        Stream,
    ) -> ncclResult_t,
    reduce_scatter: Reduce,
    all_reduce: Reduce,
    send:
        unsafe extern "C" fn(*const c_void, usize, ncclDataType_t, c_int, ncclComm_t, Stream) -> ncclResult_t,
    recv: unsafe extern "C" fn(*mut c_void, usize, ncclDataType_t, c_int, ncclComm_t, Stream) -> ncclResult_t,
    current_stream: unsafe extern "C" fn(i32, *mut Stream) -> i32,
}

type Reduce = unsafe extern "C" fn(
    *const c_void,
    *mut c_void,
    usize,
    ncclDataType_t,
    ncclRedOp_t,
    ncclComm_t,
    Stream,
) -> ncclResult_t;

/// The functions, once libtorch's CUDA half is loaded.
fn library() -> Result<&'static Library, String> {
    static LIBRARY: OnceLock<Result<Library, String>> = OnceLock::new();
    LIBRARY.get_or_init(load).as_ref().map_err(Clone::clone)
}

#[allow(
    clippy::missing_transmute_annotations,
    reason = "the fields of `Library` say the signatures"
)]
fn load() -> Result<Library, String> {
    let name = c"libnccl.so.2";
    // SAFETY: a name that ends in a zero byte; only a library that is loaded already is opened.
    let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_NOLOAD) };
    if handle.is_null() {
        return Err(
            "no libnccl.so.2 is loaded: libtorch's CUDA half, which brings it, must be loaded first".into(),
        );
    }
    let find = |handle: *mut c_void, name: &CStr| {
        // SAFETY: an open library and a name that ends in a zero byte.
        let symbol = unsafe { libc::dlsym(handle, name.as_ptr()) };
        let missing = || format!("the loaded libraries have no {}", name.to_string_lossy());
        (!symbol.is_null()).then_some(symbol).ok_or_else(missing)
    };
    let nccl = |name: &CStr| find(handle, name);
    let stream = find(libc::RTLD_DEFAULT, c"aoti_torch_get_current_cuda_stream")?;
    // SAFETY: the signatures are those of nccl.h (2.28) and of libtorch 2.11's C interface.
    unsafe {
        Ok(Library {
            error_string: transmute::<*mut c_void, _>(nccl(c"ncclGetErrorString")?),
            unique_id: transmute::<*mut c_void, _>(nccl(c"ncclGetUniqueId")?),
            init_rank: transmute::<*mut c_void, _>(nccl(c"ncclCommInitRank")?),
            abort: transmute::<*mut c_void, _>(nccl(c"ncclCommAbort")?),
            group_start: transmute::<*mut c_void, _>(nccl(c"ncclGroupStart")?),
            group_end: transmute::<*mut c_void, _>(nccl(c"ncclGroupEnd")?),
            all_gather: transmute::<*mut c_void, _>(nccl(c"ncclAllGather")?),
            reduce_scatter: transmute::<*mut c_void, Reduce>(nccl(c"ncclReduceScatter")?),
            all_reduce: transmute::<*mut c_void, Reduce>(nccl(c"ncclAllReduce")?),
            send: transmute::<*mut c_void, _>(nccl(c"ncclSend")?),
            recv: transmute::<*mut c_void, _>(nccl(c"ncclRecv")?),
            current_stream: transmute::<*mut c_void, _>(stream),
        })
    }
}

impl Library {
    fn check(&self, code: ncclResult_t) -> Result<(), String> {
        if code == ncclResult_t::ncclSuccess {
            return Ok(());
        }
        // SAFETY: NCCL gives a constant string for every code.
        let text = unsafe { CStr::from_ptr((self.error_string)(code)) };
        Err(format!(
            "NCCL: {} (NCCL_DEBUG=WARN in the environment says more)",
            text.to_string_lossy()
        ))
    }
}

fn kind(element: Element) -> ncclDataType_t {
    match element {
        Element::U8 => ncclDataType_t::ncclUint8,
        Element::I64 => ncclDataType_t::ncclInt64,
        Element::Bf16 => ncclDataType_t::ncclBfloat16,
        Element::F32 => ncclDataType_t::ncclFloat32,
        Element::F64 => ncclDataType_t::ncclFloat64,
    }
}

fn driver(what: &str) -> impl Fn(DriverError) -> String + '_ {
    move |error| format!("the CUDA driver cannot {what}: {error:?}")
}

/// A group over the ranks of `host`, which it uses to start; each rank with the device of this number in
/// its process, and no two with the same one. Operations that are not done after `timeout` are
/// aborted. libtorch's CUDA half must be loaded.
///
/// # Errors
/// NCCL is not there, two ranks share a device, or a rank did not come.
pub fn nccl_group(
    host: &dyn Collectives,
    device: usize,
    timeout: Duration,
) -> Result<Arc<dyn Collectives>, CommError> {
    let rank = host.members()[host.place()];
    let failed = |problem: String| CommError::Device {
        rank,
        phase: "start of NCCL".into(),
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
    unsafe {
        host.all_gather(
            "start of NCCL",
            Memory::of_bytes(&mut bytes),
            Memory::of_bytes(&mut all),
        )
    }?
    .wait()?;
    let mut id = own;
    for (to, from) in id.internal.iter_mut().zip(&all) {
        *to = *from as c_char;
    }
    let group = Group::start(library, host, device, id, timeout).map_err(failed)?;
    Ok(Arc::new(group))
}

struct Group {
    members: Vec<u32>,
    place: usize,
    device: usize,
    shared: Arc<Shared>,
    watch: Option<std::thread::JoinHandle<()>>,
}

/// What the watching thread sees as well.
struct Shared {
    /// Of the device; a thread that uses the driver makes it its current one.
    context: Arc<CudaContext>,
    library: &'static Library,
    state: Mutex<State>,
    changed: Condvar,
    timeout: Duration,
}

struct State {
    comm: ncclComm_t,
    stream: CUstream,
    /// Operations that were started and were not yet seen to end.
    running: Vec<Running>,
    /// Why the group is of no use any more.
    failed: Option<String>,
    over: bool,
}

// SAFETY: NCCL communicators, streams and events may be used from any thread, one at a time: the mutex
// around the state sees to it.
unsafe impl Send for State {}

struct Running {
    done: Arc<Event>,
    phase: String,
    since: Instant,
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

impl Group {
    fn start(
        library: &'static Library,
        host: &dyn Collectives,
        device: usize,
        id: ncclUniqueId,
        timeout: Duration,
    ) -> Result<Self, String> {
        // The primary context, which libtorch uses as well; it becomes this thread's current one.
        let context = CudaContext::new(device).map_err(driver("use the device"))?;
        let stream = stream::create(stream::StreamKind::NonBlocking).map_err(driver("make a stream"))?;
        let mut comm: ncclComm_t = null_mut();
        let (size, place) = (host.size() as c_int, host.place() as c_int);
        // SAFETY: NCCL fills in the handle; the device is the current one of this thread.
        library.check(unsafe { (library.init_rank)(&mut comm, size, id, place) })?;
        let shared = Arc::new(Shared {
            context,
            library,
            state: Mutex::new(State {
                comm,
                stream,
                running: Vec::new(),
                failed: None,
                over: false,
            }),
            changed: Condvar::new(),
            timeout,
        });
        let watched = shared.clone();
        let watch = std::thread::Builder::new()
            .name("nccl-watch".into())
            .spawn(move || watched.watch())
            .map_err(|e| format!("no thread can be started: {e}"))?;
        Ok(Self {
            members: host.members().to_vec(),
            place: host.place(),
            device,
            shared,
            watch: Some(watch),
        })
    }

    fn error(&self, phase: &str, problem: String) -> CommError {
        CommError::Device {
            rank: self.members[self.place],
            phase: phase.to_owned(),
            problem,
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
        let started = || -> Result<Arc<Event>, String> {
            self.shared.bind()?;
            let current = self.current_stream()?;
            let (ready, done) = (Event::new()?, Arc::new(Event::new()?));
            let mut state = self.shared.lock();
            if let Some(failed) = &state.failed {
                return Err(failed.clone());
            }
            // SAFETY: events and streams are alive; the context is that of the device.
            unsafe {
                event::record(ready.0, current).map_err(driver("record an event"))?;
                stream::wait_event(state.stream, ready.0, DEFAULT_WAIT)
                    .map_err(driver("wait for an event"))?;
            }
            operation(self.shared.library, state.comm, state.stream.cast())?;
            // SAFETY: as above.
            unsafe { event::record(done.0, state.stream) }.map_err(driver("record an event"))?;
            state.running.push(Running {
                done: done.clone(),
                phase: phase.to_owned(),
                since: Instant::now(),
            });
            self.shared.changed.notify_one();
            Ok(done)
        };
        let done = started().map_err(|problem| self.error(phase, problem))?;
        Ok(Box::new(Started {
            done,
            shared: self.shared.clone(),
            stream: self
                .current_stream()
                .map_err(|problem| self.error(phase, problem))? as usize,
            phase: phase.to_owned(),
            rank: self.members[self.place],
        }))
    }

    fn check(&self, phase: &str, got: usize, want: usize) -> Result<(), CommError> {
        if got == want {
            return Ok(());
        }
        Err(self.error(
            phase,
            format!("there is room for {got} numbers instead of {want}"),
        ))
    }
}

impl Shared {
    fn lock(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn bind(&self) -> Result<(), String> {
        self.context.bind_to_thread().map_err(driver("use the device"))
    }

    fn watch(&self) {
        if let Err(problem) = self.bind() {
            self.lock().failed = Some(problem);
            return;
        }
        let mut state = self.lock();
        while !state.over {
            // SAFETY: the events are alive.
            state
                .running
                .retain(|r| unsafe { event::query(r.done.0) }.is_err());
            let late = state.running.first().filter(|r| r.since.elapsed() > self.timeout);
            if let (Some(late), None) = (late, &state.failed) {
                let failed = format!(
                    "phase `{}` did not end within {} s: look at the logs of the other ranks",
                    late.phase,
                    self.timeout.as_secs()
                );
                tracing::error!("{failed}");
                state.failed = Some(failed);
                // SAFETY: the communicator is alive; nothing is started on it from here on.
                let _ = unsafe { (self.library.abort)(state.comm) };
                state.comm = null_mut();
            }
            let wait = if state.running.is_empty() {
                Duration::from_secs(3600)
            } else {
                POLL
            };
            state = self
                .changed
                .wait_timeout(state, wait)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        let mut state = self.shared.lock();
        state.over = true;
        if !state.comm.is_null() {
            // SAFETY: the last use of the communicator. Aborting does not wait for other ranks, and
            // operations that somebody waited for are done.
            let _ = unsafe { (self.shared.library.abort)(state.comm) };
            state.comm = null_mut();
        }
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
    rank: u32,
}

impl Pending for Started {
    fn wait(self: Box<Self>) -> Result<(), CommError> {
        let error = |problem| CommError::Device {
            rank: self.rank,
            phase: self.phase.clone(),
            problem,
        };
        if let Some(failed) = &self.shared.lock().failed {
            return Err(error(failed.clone()));
        }
        self.shared.bind().map_err(error)?;
        // SAFETY: the event is alive, the stream is libtorch's.
        unsafe { stream::wait_event(self.stream as CUstream, self.done.0, DEFAULT_WAIT) }
            .map_err(|e| error(driver("wait for an event")(e)))
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
        self.check(phase, receive.count, send.count * self.size())?;
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
        self.check(phase, send.count, receive.count * self.size())?;
        self.run(phase, |library, comm, stream| {
            let (kind, sum) = (kind(send.element), ncclRedOp_t::ncclSum);
            // SAFETY: the caller's promise about the memory of an operation.
            library.check(unsafe {
                (library.reduce_scatter)(
                    send.address,
                    receive.address,
                    receive.count,
                    kind,
                    sum,
                    comm,
                    stream,
                )
            })
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
        self.check(phase, send.count, send_counts.iter().sum())?;
        self.check(phase, receive.count, receive_counts.iter().sum())?;
        self.check(phase, send_counts.len(), self.size())?;
        self.check(phase, receive_counts.len(), self.size())?;
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
        self.run(phase, |library, comm, stream| {
            let (kind, sum) = (kind(data.element), ncclRedOp_t::ncclSum);
            // SAFETY: the caller's promise about the memory of an operation.
            library.check(unsafe {
                (library.all_reduce)(data.address, data.address, data.count, kind, sum, comm, stream)
            })
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::comm::{group, single, Tag};

    /// With a GPU, `tests/gpu` runs the operations.
    #[test]
    fn without_libtorchs_cuda_half_the_error_says_what_is_missing() {
        let host = group(single(), &[0], Tag::group(0), Duration::from_secs(5)).unwrap();
        match nccl_group(host.as_ref(), 0, Duration::from_secs(5)) {
            Ok(_) => eprintln!("skipped: libnccl.so.2 is loaded"),
            Err(error) => {
                let text = error.to_string();
                assert!(text.contains("libnccl.so.2") && text.contains("rank 0"), "{text}");
            }
        }
    }
}
