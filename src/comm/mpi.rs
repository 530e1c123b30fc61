//! The world of MPI processes: one thread owns MPI, all others talk to it through a queue.
//!
//! The thread never blocks inside MPI. It posts sends and receives as non-blocking requests, tests them,
//! probes for new messages, and waits on its queue in between: not at all while bytes move, up to a
//! millisecond when nothing has happened for a while. So a peer that is gone costs a request that never
//! completes and not a hung process, and MPI needs no more than `MPI_THREAD_FUNNELED`.
//!
//! MPI matches messages of one sender, tag and communicator in order, but a large one may complete after
//! a small one that follows it. Arrived messages are therefore handed on in the order in which they were
//! matched.
//!
//! JUSTIFICATION for `unsafe`: the safe interface ties a request to a borrowed buffer and a scope, which
//! a queue of requests of different ages cannot express. Each request here owns its buffer.

use super::{
    collective::{Linked, Transport},
    mailbox::Mailbox,
    CommError, Communicator, Tag,
};
use bytes::Bytes;
use mpi::{environment::Universe, ffi, Threading};
use std::{
    collections::VecDeque,
    ffi::{c_int, c_void},
    mem::MaybeUninit,
    ptr,
    sync::{
        mpsc::{channel, Receiver, RecvTimeoutError, Sender, TryRecvError},
        Arc, Mutex, PoisonError,
    },
    thread::JoinHandle,
    time::{Duration, Instant},
};

/// `MPI_Init_thread` waits for all ranks; they start within seconds of each other or not at all.
const INIT_TIMEOUT: Duration = Duration::from_secs(300);
/// At the end: for messages to be taken, then for `MPI_Finalize`.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(30);
const FINALIZE_TIMEOUT: Duration = Duration::from_secs(60);

enum Command {
    Send { dest: u32, tag: Tag, payload: Bytes },
    Shutdown,
    Abort(i32),
}

struct MpiTransport {
    rank: u32,
    size: u32,
    mailbox: Arc<Mailbox>,
    commands: Sender<Command>,
    ended: Arc<Mutex<Option<String>>>,
}

impl Transport for MpiTransport {
    fn rank(&self) -> u32 {
        self.rank
    }

    fn size(&self) -> u32 {
        self.size
    }

    fn mailbox(&self) -> &Mailbox {
        &self.mailbox
    }

    fn post(&self, dest: u32, tag: Tag, payload: Bytes) -> Result<(), CommError> {
        self.commands
            .send(Command::Send { dest, tag, payload })
            .map_err(|_| CommError::Closed {
                rank: self.rank,
                reason: reason(&self.ended),
            })
    }
}

/// The thread that owns MPI.
pub(super) struct MpiWorld {
    rank: u32,
    commands: Sender<Command>,
    ended: Arc<Mutex<Option<String>>>,
    /// A message when the thread is about to end.
    finished: Mutex<Receiver<()>>,
    thread: JoinHandle<()>,
}

impl MpiWorld {
    /// Sends what is queued, then leaves MPI.
    pub fn shutdown(self) -> Result<(), CommError> {
        let closed = |reason: String| CommError::Closed {
            rank: self.rank,
            reason,
        };
        // An error means that the thread has ended already; `ended` says why.
        let _ = self.commands.send(Command::Shutdown);
        let finished = self.finished.lock().unwrap_or_else(PoisonError::into_inner);
        match finished.recv_timeout(DRAIN_TIMEOUT + FINALIZE_TIMEOUT) {
            Ok(()) | Err(RecvTimeoutError::Disconnected) => {}
            Err(RecvTimeoutError::Timeout) => {
                return Err(closed(format!(
                    "MPI_Finalize has waited {} s for the other ranks",
                    FINALIZE_TIMEOUT.as_secs()
                )))
            }
        }
        if self.thread.join().is_err() {
            return Err(closed("the MPI thread panicked".to_owned()));
        }
        let ended = self.ended.lock().unwrap_or_else(PoisonError::into_inner).clone();
        ended.map_or(Ok(()), |reason| Err(closed(reason)))
    }

    /// Asks MPI to end all ranks. Returns when that did not happen within five seconds.
    pub fn abort(&self, code: i32) {
        if self.commands.send(Command::Abort(code)).is_ok() {
            std::thread::sleep(Duration::from_secs(5));
        }
    }
}

fn reason(ended: &Mutex<Option<String>>) -> String {
    let ended = ended.lock().unwrap_or_else(PoisonError::into_inner);
    ended
        .clone()
        .unwrap_or_else(|| "the world was shut down".to_owned())
}

/// Starts MPI on its thread.
pub(super) fn start() -> Result<(Arc<dyn Communicator>, MpiWorld), CommError> {
    let (commands, queue) = channel();
    let (ready, started) = channel();
    let (finish, finished) = channel();
    let mailbox = Arc::new(Mailbox::default());
    let ended = Arc::new(Mutex::new(None));
    let thread = std::thread::Builder::new()
        .name("mpi".to_owned())
        .spawn({
            let (mailbox, ended) = (mailbox.clone(), ended.clone());
            move || {
                if let Err(problem) = own_mpi(&ready, &queue, &mailbox) {
                    tracing::error!(problem, "MPI failed on this rank");
                    *ended.lock().unwrap_or_else(PoisonError::into_inner) = Some(problem);
                }
                mailbox.close();
                let _ = finish.send(());
            }
        })
        .map_err(|e| CommError::Launch(format!("no thread for MPI: {e}")))?;
    let (rank, size) = match started.recv_timeout(INIT_TIMEOUT) {
        Ok(place) => place,
        Err(RecvTimeoutError::Timeout) => {
            return Err(CommError::Launch(format!(
                "MPI_Init has waited {} s for the other ranks; did one of them fail to start?",
                INIT_TIMEOUT.as_secs()
            )))
        }
        Err(RecvTimeoutError::Disconnected) => return Err(CommError::Launch(reason(&ended))),
    };
    let comm = Linked::new(MpiTransport {
        rank,
        size,
        mailbox,
        commands: commands.clone(),
        ended: ended.clone(),
    })?;
    let world = MpiWorld {
        rank,
        commands,
        ended,
        finished: Mutex::new(finished),
        thread,
    };
    Ok((Arc::new(comm), world))
}

/// The life of the MPI thread.
fn own_mpi(ready: &Sender<(u32, u32)>, queue: &Receiver<Command>, mailbox: &Mailbox) -> Result<(), String> {
    let (universe, _) = mpi::initialize_with_threading(Threading::Funneled)
        .ok_or("MPI was initialized by something else in this process")?;
    let process = Process::new(universe)?;
    let place = process.place()?;
    let _ = ready.send(place);
    let mut traffic = Traffic {
        process: &process,
        mailbox,
        sending: Vec::new(),
        receiving: VecDeque::new(),
    };
    let outcome = traffic.serve(queue);
    let is_clean = outcome.is_ok() && traffic.sending.is_empty() && traffic.receiving.is_empty();
    if is_clean {
        return Ok(());
    }
    // MPI may still use the buffers of requests that never completed, and MPI_Finalize would wait for
    // them: give both to the end of the process.
    let ranks: Vec<u32> = traffic.sending.iter().map(|s| s.dest).collect();
    std::mem::forget(std::mem::take(&mut traffic.sending));
    std::mem::forget(std::mem::take(&mut traffic.receiving));
    std::mem::forget(process);
    outcome.and(Err(format!(
        "messages to ranks {ranks:?} were not taken within {} s of the end",
        DRAIN_TIMEOUT.as_secs()
    )))
}

struct Sending {
    request: ffi::MPI_Request,
    dest: u32,
    /// Read by MPI until the request completes.
    _payload: Bytes,
}

struct Receiving {
    request: ffi::MPI_Request,
    from: u32,
    tag: Tag,
    /// Written by MPI until the request completes.
    buffer: Vec<u8>,
    is_done: bool,
}

struct Traffic<'a> {
    process: &'a Process,
    mailbox: &'a Mailbox,
    sending: Vec<Sending>,
    /// In the order in which the messages were matched.
    receiving: VecDeque<Receiving>,
}

impl Traffic<'_> {
    fn serve(&mut self, queue: &Receiver<Command>) -> Result<(), String> {
        let mut last_progress = Instant::now();
        let mut ending: Option<Instant> = None;
        loop {
            let mut progress = false;
            // A bounded number, so that a flood of sends does not stop receiving.
            for _ in 0..256 {
                match queue.try_recv() {
                    Ok(command) => {
                        progress = true;
                        ending = self.obey(command)?.or(ending);
                    }
                    Err(TryRecvError::Empty) => break,
                    Err(TryRecvError::Disconnected) => {
                        ending = ending.or_else(|| Some(Instant::now() + DRAIN_TIMEOUT));
                        break;
                    }
                }
            }
            progress |= self.match_arrivals()?;
            progress |= self.test_sends()?;
            progress |= self.test_receives()?;
            if progress {
                last_progress = Instant::now();
            }
            let is_idle = self.sending.is_empty() && self.receiving.is_empty();
            if ending.is_some_and(|end| is_idle || Instant::now() > end) {
                return Ok(());
            }
            if progress {
                continue;
            }
            let Some(pause) = pause(last_progress.elapsed(), is_idle) else {
                std::thread::yield_now();
                continue;
            };
            match queue.recv_timeout(pause) {
                Ok(command) => {
                    last_progress = Instant::now();
                    ending = self.obey(command)?.or(ending);
                }
                Err(RecvTimeoutError::Timeout) => {}
                // Nobody holds the communicator any more, and `ending` is set by now.
                Err(RecvTimeoutError::Disconnected) => std::thread::sleep(pause),
            }
        }
    }

    /// Carries a command out; a moment means that the world ends by then.
    fn obey(&mut self, command: Command) -> Result<Option<Instant>, String> {
        match command {
            Command::Send { dest, tag, payload } => {
                let request = self.process.isend(dest, tag, &payload)?;
                self.sending.push(Sending {
                    request,
                    dest,
                    _payload: payload,
                });
                Ok(None)
            }
            Command::Shutdown => Ok(Some(Instant::now() + DRAIN_TIMEOUT)),
            Command::Abort(code) => {
                self.process.abort(code);
                Ok(None)
            }
        }
    }

    fn match_arrivals(&mut self) -> Result<bool, String> {
        for arrived in 0..256 {
            match self.process.match_one()? {
                Some(receiving) => self.receiving.push_back(receiving),
                None => return Ok(arrived > 0),
            }
        }
        Ok(true)
    }

    fn test_sends(&mut self) -> Result<bool, String> {
        let before = self.sending.len();
        let mut failure = Ok(());
        let process = self.process;
        self.sending
            .retain_mut(|sending| match process.test(&mut sending.request) {
                Ok(is_done) => !is_done,
                Err(problem) => {
                    failure = Err(format!("sending to rank {}: {problem}", sending.dest));
                    true
                }
            });
        failure.map(|()| self.sending.len() < before)
    }

    fn test_receives(&mut self) -> Result<bool, String> {
        for receiving in self.receiving.iter_mut().filter(|r| !r.is_done) {
            receiving.is_done = self
                .process
                .test(&mut receiving.request)
                .map_err(|problem| format!("receiving from rank {}: {problem}", receiving.from))?;
        }
        let mut delivered = false;
        // The oldest of each sender and tag goes first; one that is not done holds back its followers.
        let mut held: Vec<(u32, Tag)> = Vec::new();
        let mut i = 0;
        while i < self.receiving.len() {
            let stream = (self.receiving[i].from, self.receiving[i].tag);
            if !self.receiving[i].is_done || held.contains(&stream) {
                held.push(stream);
                i += 1;
                continue;
            }
            if let Some(done) = self.receiving.remove(i) {
                self.mailbox
                    .deliver(done.from, done.tag, Bytes::from(done.buffer));
                delivered = true;
            }
        }
        Ok(delivered)
    }
}

/// How long to sleep after `quiet` without any progress; `None` is not at all.
fn pause(quiet: Duration, is_idle: bool) -> Option<Duration> {
    let micros = |n| Some(Duration::from_micros(n));
    let quiet_ms = quiet.as_millis();
    if !is_idle && quiet_ms < 20 {
        // A large message moves by being tested: do not sleep between its fragments.
        None
    } else if quiet_ms < 2 {
        micros(50)
    } else if quiet_ms < 100 {
        micros(200)
    } else {
        micros(1000)
    }
}

/// `MPI_COMM_WORLD`, used by the thread that initialized MPI alone: the type is not `Send`, as
/// [`Universe`] and raw requests stay on that thread.
struct Process {
    comm: ffi::MPI_Comm,
    byte: ffi::MPI_Datatype,
    _universe: Universe,
    _not_send: std::marker::PhantomData<*const ()>,
}

impl Process {
    fn new(universe: Universe) -> Result<Self, String> {
        // SAFETY: MPI is initialized (`universe` proves it), so its constants are valid.
        let (comm, byte, handler) = unsafe {
            (
                ffi::RSMPI_COMM_WORLD,
                ffi::RSMPI_UINT8_T,
                ffi::RSMPI_ERRORS_RETURN,
            )
        };
        let process = Self {
            comm,
            byte,
            _universe: universe,
            _not_send: std::marker::PhantomData,
        };
        // SAFETY: a valid communicator and a predefined handler, on the thread that owns MPI.
        process.check(unsafe { ffi::MPI_Comm_set_errhandler(comm, handler) })?;
        Ok(process)
    }

    /// Rank and size.
    fn place(&self) -> Result<(u32, u32), String> {
        let (mut rank, mut size) = (0, 0);
        // SAFETY: a valid communicator and two places to write to.
        unsafe {
            self.check(ffi::MPI_Comm_rank(self.comm, &mut rank))?;
            self.check(ffi::MPI_Comm_size(self.comm, &mut size))?;
        }
        Ok((rank as u32, size as u32))
    }

    /// Starts to send. The caller keeps `payload` until the request completes.
    fn isend(&self, dest: u32, tag: Tag, payload: &Bytes) -> Result<ffi::MPI_Request, String> {
        let mut request = MaybeUninit::uninit();
        // SAFETY: the pointer covers `len` bytes, which fit a C int (MESSAGE_BYTES_MAX); the bytes of a
        // `Bytes` never move or change, and the caller holds a clone of it until the request is done.
        self.check(unsafe {
            ffi::MPI_Isend(
                payload.as_ptr().cast::<c_void>(),
                payload.len() as c_int,
                self.byte,
                dest as c_int,
                c_int::from(tag.0),
                self.comm,
                request.as_mut_ptr(),
            )
        })?;
        // SAFETY: MPI_Isend succeeded and wrote the request.
        Ok(unsafe { request.assume_init() })
    }

    /// Matches a message that has arrived, if any, and starts to receive it.
    fn match_one(&self) -> Result<Option<Receiving>, String> {
        let mut flag = 0;
        let mut message = MaybeUninit::uninit();
        let mut status = MaybeUninit::<ffi::MPI_Status>::uninit();
        // SAFETY: constants of an initialized MPI and three places to write to.
        self.check(unsafe {
            ffi::MPI_Improbe(
                ffi::RSMPI_ANY_SOURCE,
                ffi::RSMPI_ANY_TAG,
                self.comm,
                &mut flag,
                message.as_mut_ptr(),
                status.as_mut_ptr(),
            )
        })?;
        if flag == 0 {
            return Ok(None);
        }
        // SAFETY: the flag says that MPI wrote both.
        let (mut message, status) = unsafe { (message.assume_init(), status.assume_init()) };
        let mut len = 0;
        // SAFETY: the status of the matched message, and a place to write to.
        self.check(unsafe { ffi::MPI_Get_count(&status, self.byte, &mut len) })?;
        let mut buffer = vec![0u8; len as usize];
        let mut request = MaybeUninit::uninit();
        // SAFETY: the buffer has `len` bytes on the heap; it moves into `Receiving`, which moves the
        // pointer and not the bytes, is not touched before the request completes, and is leaked when it
        // never does. `message` is the matched one and used once.
        self.check(unsafe {
            ffi::MPI_Imrecv(
                buffer.as_mut_ptr().cast::<c_void>(),
                len,
                self.byte,
                &mut message,
                request.as_mut_ptr(),
            )
        })?;
        Ok(Some(Receiving {
            // SAFETY: MPI_Imrecv succeeded and wrote the request.
            request: unsafe { request.assume_init() },
            from: status.MPI_SOURCE as u32,
            tag: Tag(status.MPI_TAG as u16),
            buffer,
            is_done: false,
        }))
    }

    /// True when the request has completed; it is spent then.
    fn test(&self, request: &mut ffi::MPI_Request) -> Result<bool, String> {
        let mut flag = 0;
        // SAFETY: a request that MPI gave us and that has not completed; the status is not wanted.
        self.check(unsafe { ffi::MPI_Test(request, &mut flag, ffi::RSMPI_STATUS_IGNORE) })?;
        Ok(flag != 0)
    }

    fn abort(&self, code: i32) {
        // SAFETY: a valid communicator; the call ends the process.
        unsafe { ffi::MPI_Abort(self.comm, code) };
    }

    fn check(&self, code: c_int) -> Result<(), String> {
        if code == 0 {
            return Ok(());
        }
        let mut text = [0 as std::ffi::c_char; 1024];
        let mut len = 0;
        // SAFETY: the text is longer than MPI_MAX_ERROR_STRING (256 in Open MPI, 512 in MPICH).
        let known = unsafe { ffi::MPI_Error_string(code, text.as_mut_ptr(), ptr::from_mut(&mut len)) } == 0;
        let bytes: Vec<u8> = text[..len.clamp(0, 1024) as usize]
            .iter()
            .map(|c| *c as u8)
            .collect();
        match known {
            true => Err(String::from_utf8_lossy(&bytes).into_owned()),
            false => Err(format!("MPI error {code}")),
        }
    }
}
