//! The host's side of the control socket: requests out, replies back to whoever asked.
//!
//! Frames are written whole by one task, so a caller that stops waiting never tears one.

use bytes::Bytes;
use legorl_agent::protocol::{self, Kind, Reply, Request, HEADER};
use std::collections::HashMap;
use std::io;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::UnixStream;
use tokio::sync::mpsc::{self, UnboundedReceiver, UnboundedSender};

/// Frames on their way to the sandbox; bounds the memory of a large upload.
const QUEUE_FRAMES: usize = 32;

/// What arrives for a request.
#[derive(Debug)]
pub enum Event {
    /// A message.
    Reply(Reply),
    /// Output or file content.
    Raw(Bytes),
}

/// Connection to the first process of a sandbox.
pub struct Channel {
    outgoing: mpsc::Sender<Vec<u8>>,
    shared: Arc<Shared>,
    next_id: AtomicU32,
}

#[derive(Default)]
struct Shared {
    waiting: Mutex<Waiting>,
}

#[derive(Default)]
struct Waiting {
    by_id: HashMap<u32, UnboundedSender<Event>>,
    /// Set once nothing will arrive any more.
    ended: Option<String>,
}

impl Channel {
    /// Takes over a connected socket; must be called in a tokio runtime.
    pub fn new(socket: std::os::unix::net::UnixStream) -> io::Result<Self> {
        socket.set_nonblocking(true)?;
        let (read, write) = UnixStream::from_std(socket)?.into_split();
        let (outgoing, frames) = mpsc::channel(QUEUE_FRAMES);
        let shared = Arc::new(Shared::default());
        tokio::spawn(write_frames(write, frames));
        tokio::spawn(read_frames(read, shared.clone()));
        Ok(Self {
            outgoing,
            shared,
            next_id: AtomicU32::new(1),
        })
    }

    /// Opens a request with an id of its own.
    pub fn open(self: &Arc<Self>) -> Pending {
        self.open_as(self.next_id.fetch_add(1, Ordering::Relaxed))
    }

    /// Listens to what the sandbox says of itself.
    pub fn open_boot(self: &Arc<Self>) -> Pending {
        self.open_as(0)
    }

    fn open_as(self: &Arc<Self>, id: u32) -> Pending {
        let (sender, events) = mpsc::unbounded_channel();
        let mut waiting = self.shared.lock();
        if waiting.ended.is_none() {
            waiting.by_id.insert(id, sender);
        }
        drop(waiting);
        Pending {
            id,
            events,
            channel: self.clone(),
            kill_on_drop: false,
        }
    }

    /// Why nothing arrives any more.
    pub fn end_reason(&self) -> String {
        let ended = self.shared.lock().ended.clone();
        ended.unwrap_or_else(|| "its control socket closed".into())
    }
}

/// A request that is not complete yet.
pub struct Pending {
    id: u32,
    events: UnboundedReceiver<Event>,
    channel: Arc<Channel>,
    /// Ask for the command's end when nobody waits for it any more.
    pub kill_on_drop: bool,
}

impl Pending {
    /// Sends a message of this request; `None` when the sandbox is gone.
    pub async fn send(&self, request: &Request) -> io::Result<Option<()>> {
        let frame = protocol::encode_message(self.id, request)?;
        Ok(self.channel.outgoing.send(frame).await.ok())
    }

    /// A way to send frames of this request from a thread that may block.
    pub fn blocking_sender(&self) -> BlockingSender {
        BlockingSender {
            id: self.id,
            outgoing: self.channel.outgoing.clone(),
        }
    }

    /// The next event; `None` when the sandbox is gone.
    pub async fn next(&mut self) -> Option<Event> {
        self.events.recv().await
    }
}

impl Drop for Pending {
    fn drop(&mut self) {
        self.channel.shared.lock().by_id.remove(&self.id);
        if self.kill_on_drop {
            let (id, outgoing) = (self.id, self.channel.outgoing.clone());
            if let Ok(frame) = protocol::encode_message(id, &Request::Kill) {
                // A full queue is waited for elsewhere; without a runtime the sandbox is ending anyway.
                if let Err(mpsc::error::TrySendError::Full(frame)) = outgoing.try_send(frame) {
                    if let Ok(runtime) = tokio::runtime::Handle::try_current() {
                        runtime.spawn(async move { outgoing.send(frame).await });
                    }
                }
            }
        }
    }
}

/// See [`Pending::blocking_sender`].
pub struct BlockingSender {
    id: u32,
    outgoing: mpsc::Sender<Vec<u8>>,
}

impl BlockingSender {
    /// Sends a message.
    pub fn message(&self, request: &Request) -> io::Result<()> {
        self.frame(protocol::encode_message(self.id, request)?)
    }

    /// Sends file content.
    pub fn raw(&self, bytes: &[u8]) -> io::Result<()> {
        self.frame(protocol::encode_raw(self.id, bytes))
    }

    fn frame(&self, frame: Vec<u8>) -> io::Result<()> {
        self.outgoing
            .blocking_send(frame)
            .map_err(|_| io::Error::from(io::ErrorKind::BrokenPipe))
    }
}

impl Shared {
    fn lock(&self) -> std::sync::MutexGuard<'_, Waiting> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn deliver(&self, id: u32, event: Event) {
        if let Some(waiting) = self.lock().by_id.get(&id) {
            // A caller that stopped waiting is no fault.
            let _ = waiting.send(event);
        }
    }
}

async fn write_frames(mut socket: OwnedWriteHalf, mut frames: mpsc::Receiver<Vec<u8>>) {
    while let Some(frame) = frames.recv().await {
        if socket.write_all(&frame).await.is_err() {
            return; // The reading side learns why.
        }
    }
}

async fn read_frames(mut socket: OwnedReadHalf, shared: Arc<Shared>) {
    let mut said = None;
    let problem = loop {
        match read_frame(&mut socket).await {
            Ok(Some((_, Event::Reply(Reply::Ending { reason })))) => said = Some(reason),
            Ok(Some((id, event))) => shared.deliver(id, event),
            Ok(None) => break None,
            Err(e) => break Some(format!("its control socket failed: {e}")),
        }
    };
    let mut waiting = shared.lock();
    let silent = || "its first process was killed".to_string();
    waiting.ended = Some(said.or(problem).unwrap_or_else(silent));
    waiting.by_id.clear();
}

async fn read_frame(socket: &mut OwnedReadHalf) -> io::Result<Option<(u32, Event)>> {
    let mut header = [0; HEADER];
    match socket.read_exact(&mut header).await {
        Ok(_) => {}
        Err(e) if e.kind() == io::ErrorKind::UnexpectedEof => return Ok(None),
        Err(e) if e.kind() == io::ErrorKind::ConnectionReset => return Ok(None),
        Err(e) => return Err(e),
    }
    let (kind, id, len) = protocol::decode_header(&header)?;
    let mut payload = vec![0; len];
    socket.read_exact(&mut payload).await?;
    let event = match kind {
        Kind::Raw => Event::Raw(payload.into()),
        Kind::Message => Event::Reply(protocol::decode_message(&payload)?),
    };
    Ok(Some((id, event)))
}
