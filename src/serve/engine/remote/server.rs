//! The engine rank's side: drives a local engine for a head on another rank.

use super::{
    wire::{self, Hello, Reply, Request, TensorShape, PROTOCOL},
    RemoteConfig, RemoteError,
};
use crate::base::{
    Engine, EngineEvent, EngineStatus, GenerateRequest, PolicyVersion, RequestId, SessionId, WeightAck,
    WeightError, WeightTensor, WeightUpdate,
};
use crate::comm::{Communicator, Inbox, InboxError, Tag};
use bytes::Bytes;
use std::{
    collections::{HashMap, HashSet},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};
use tokio::{
    runtime::Handle,
    sync::mpsc::{unbounded_channel, UnboundedReceiver},
};

/// Time between two reports of what the cache holds; each costs a comparison of every session's tokens.
const RESIDENT_INTERVAL: Duration = Duration::from_millis(500);

/// Why [`EngineServer::run`] ended without an error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ServerEnd {
    /// The head said so.
    Stopped,
}

/// Serves a local engine to the head.
pub struct EngineServer {
    link: Arc<Link>,
    inbox: Inbox,
    config: RemoteConfig,
    engine: Arc<dyn Engine>,
    runtime: Handle,
    received: u64,
    incoming: Option<Incoming>,
}

/// What the tasks of single generations share.
struct Link {
    comm: Arc<dyn Communicator>,
    head: u32,
    /// Requests whose end was not yet reported.
    running: Mutex<HashSet<RequestId>>,
    sessions: Mutex<HashMap<SessionId, KeptSession>>,
}

/// A session between two generations.
struct KeptSession {
    /// Its tokens after the last one.
    tokens: Vec<u32>,
    /// How many of them the head was told that the cache holds.
    reported: Option<usize>,
}

/// An update whose buckets are arriving.
struct Incoming {
    version: PolicyVersion,
    checksum: u32,
    tensors: Vec<TensorShape>,
    /// Bytes of `tensors`, in order.
    buffers: Vec<Vec<u8>>,
    /// Tensor that the next byte belongs to.
    at: usize,
    next_index: u32,
}

impl EngineServer {
    /// Prepares to serve `engine` to rank `head`; its generations run on `runtime`.
    pub fn new(
        comm: Arc<dyn Communicator>,
        head: u32,
        engine: Arc<dyn Engine>,
        runtime: Handle,
        config: RemoteConfig,
    ) -> Result<Self, RemoteError> {
        let inbox = comm.inbox(head, Tag::ENGINE_REQUEST)?;
        Ok(Self {
            link: Arc::new(Link {
                comm,
                head,
                running: Mutex::default(),
                sessions: Mutex::default(),
            }),
            inbox,
            config,
            engine,
            runtime,
            received: 0,
            incoming: None,
        })
    }

    /// Serves until the head stops it or is lost. Blocking: give it a thread. When it returns, all of its
    /// generations are aborted.
    pub fn run(mut self) -> Result<ServerEnd, RemoteError> {
        let end = self.shake_hands().and_then(|()| self.serve());
        let running: Vec<RequestId> = lock(&self.link.running).iter().copied().collect();
        for id in running {
            self.engine.abort(id);
        }
        end
    }

    fn shake_hands(&mut self) -> Result<(), RemoteError> {
        let peer = self.link.head;
        let hello = self.inbox.recv(self.config.hello_timeout).map_err(|e| match e {
            InboxError::Timeout => RemoteError::NoHello {
                peer,
                waited: self.config.hello_timeout,
            },
            InboxError::Closed => RemoteError::Ended { peer },
        })?;
        let ours = Hello {
            protocol: PROTOCOL,
            program: self.config.program.clone(),
        };
        // Answered before it is judged, so that the head can name both versions too.
        self.link.send(&Reply::Hello(ours.clone()), &[])?;
        match wire::decode(&hello) {
            Ok((Request::Hello(theirs), _)) if theirs == ours => Ok(()),
            Ok((Request::Hello(theirs), _)) => Err(RemoteError::Version {
                peer,
                theirs: theirs.describe(),
                ours: ours.describe(),
            }),
            Ok(_) => Err(self.unreadable("it does not start with hello".to_owned())),
            Err(problem) => Err(self.unreadable(problem)),
        }
    }

    fn serve(&mut self) -> Result<ServerEnd, RemoteError> {
        let peer = self.link.head;
        let mut last_word = Instant::now();
        let mut last_status: Option<Instant> = None;
        let mut last_resident = Instant::now();
        loop {
            if last_status.is_none_or(|at| at.elapsed() >= self.config.status_interval) {
                last_status = Some(Instant::now());
                self.report_status()?;
            }
            if last_resident.elapsed() >= RESIDENT_INTERVAL {
                last_resident = Instant::now();
                self.report_resident()?;
            }
            match self.inbox.recv(self.config.status_interval) {
                Ok(message) => {
                    last_word = Instant::now();
                    let (request, raw) =
                        wire::decode(&message).map_err(|problem| self.unreadable(problem))?;
                    if let Request::Stop = request {
                        return Ok(ServerEnd::Stopped);
                    }
                    self.obey(request, raw)?;
                }
                Err(InboxError::Timeout) => {
                    let waited = last_word.elapsed();
                    if waited > self.config.heartbeat_timeout {
                        return Err(RemoteError::Silent { peer, waited });
                    }
                }
                Err(InboxError::Closed) => return Err(RemoteError::Ended { peer }),
            }
        }
    }

    fn obey(&mut self, request: Request, raw: Bytes) -> Result<(), RemoteError> {
        match request {
            Request::Hello(_) => return Err(self.unreadable("a second hello".to_owned())),
            Request::Ping | Request::Stop => {}
            Request::Submit {
                id,
                session,
                sampling,
                stop_token_ids,
                max_new_tokens,
                routing_from,
            } => {
                let prompt = wire::take_u32s(&raw).map_err(|problem| self.unreadable(problem))?;
                self.received += 1;
                lock(&self.link.running).insert(id);
                let (events, stream) = unbounded_channel();
                let link = self.link.clone();
                let tokens = prompt.clone();
                self.runtime
                    .spawn(forward(link, id, session.clone(), tokens, stream));
                self.engine.submit(
                    GenerateRequest {
                        id,
                        session,
                        prompt: prompt.into(),
                        sampling,
                        stop_token_ids,
                        max_new_tokens,
                        routing_from,
                    },
                    events,
                );
            }
            Request::Abort { id } => self.engine.abort(id),
            Request::EndSession { session } => {
                lock(&self.link.sessions).remove(&session);
                self.engine.end_session(&session);
            }
            Request::WeightsBegin {
                version,
                checksum,
                tensors,
            } => {
                let buffers = tensors.iter().map(|t| Vec::with_capacity(t.bytes)).collect();
                self.incoming = Some(Incoming {
                    version,
                    checksum,
                    tensors,
                    buffers,
                    at: 0,
                    next_index: 0,
                });
                self.finish_weights()?;
            }
            Request::WeightsBucket { version, index, crc } => self.take_bucket(version, index, crc, &raw)?,
        }
        Ok(())
    }

    fn take_bucket(
        &mut self,
        version: PolicyVersion,
        index: u32,
        crc: u32,
        raw: &[u8],
    ) -> Result<(), RemoteError> {
        // Buckets that follow a refused one are still on their way.
        let Some(incoming) = self.incoming.as_mut().filter(|i| i.version == version) else {
            return Ok(());
        };
        let got = crc32fast::hash(raw);
        let refusal = if got != crc {
            Some(WeightError::Checksum {
                version,
                want: crc,
                got,
            })
        } else if index != incoming.next_index {
            Some(incoming.refuse(format!("bucket {index} came instead of {}", incoming.next_index)))
        } else {
            incoming.add(raw).err()
        };
        if let Some(error) = refusal {
            self.incoming = None;
            let result = Err(error);
            return self.link.send(&Reply::Weights { version, result }, &[]);
        }
        self.link.send(&Reply::BucketTaken { version }, &[])?;
        self.finish_weights()
    }

    /// Hands a complete update to the engine.
    fn finish_weights(&mut self) -> Result<(), RemoteError> {
        let Some(incoming) = self.incoming.take_if(|incoming| incoming.is_complete()) else {
            return Ok(());
        };
        let (engine, link) = (self.engine.clone(), self.link.clone());
        self.runtime.spawn(async move {
            let version = incoming.version;
            let result = put_in_use(engine.as_ref(), incoming).await;
            // Status first: when the head learns that the weights are in use, its view of the load says so.
            let told = link
                .send_status(engine.status(), None)
                .and_then(|()| link.send(&Reply::Weights { version, result }, &[]));
            if let Err(error) = told {
                tracing::warn!(%version, %error, "the head cannot be told about its weights");
            }
        });
        Ok(())
    }

    fn report_status(&self) -> Result<(), RemoteError> {
        self.link.send_status(self.engine.status(), Some(self.received))
    }

    /// Tells the head where the cache holds another part of a session than it was told before.
    fn report_resident(&self) -> Result<(), RemoteError> {
        let mut changed = Vec::new();
        for (session, kept) in lock(&self.link.sessions).iter_mut() {
            let resident = self.engine.resident_prefix(session, &kept.tokens);
            if kept.reported.replace(resident) != Some(resident) {
                changed.push((session.clone(), resident));
            }
        }
        if changed.is_empty() {
            return Ok(());
        }
        self.link.send(&Reply::Resident { sessions: changed }, &[])
    }

    fn unreadable(&self, problem: String) -> RemoteError {
        RemoteError::Wire {
            peer: self.link.head,
            problem,
        }
    }
}

async fn put_in_use(engine: &dyn Engine, incoming: Incoming) -> Result<WeightAck, WeightError> {
    let (version, want) = (incoming.version, incoming.checksum);
    // A pass over all bytes: not on the threads that pass tokens on, nor on the one that is the heartbeat.
    let update = tokio::task::spawn_blocking(move || WeightUpdate::new(version, incoming.into_tensors()))
        .await
        .map_err(|e| WeightError::ReplicaLost(e.to_string()))?;
    if update.checksum != want {
        return Err(WeightError::Checksum {
            version,
            want,
            got: update.checksum,
        });
    }
    engine.update_weights(Arc::new(update)).await
}

/// Sends the events of one generation to the head, in order; tokens that wait are sent together.
async fn forward(
    link: Arc<Link>,
    id: RequestId,
    session: SessionId,
    mut tokens: Vec<u32>,
    mut stream: UnboundedReceiver<EngineEvent>,
) {
    let mut next = stream.recv().await;
    while let Some(event) = next.take() {
        let sent = match event {
            EngineEvent::Tokens(mut sampled) => {
                loop {
                    match stream.try_recv() {
                        Ok(EngineEvent::Tokens(more)) => sampled.extend(more),
                        Ok(other) => {
                            next = Some(other);
                            break;
                        }
                        Err(_) => break,
                    }
                }
                tokens.extend(sampled.iter().map(|t| t.id));
                link.send(&Reply::Tokens { id }, &wire::put_tokens(&sampled))
            }
            EngineEvent::Finished {
                reason,
                cached_tokens,
                interruptions,
                routing,
            } => {
                let kept = KeptSession {
                    tokens,
                    reported: None,
                };
                lock(&link.sessions).insert(session, kept);
                let (routing, raw) = wire::put_routing(routing.as_ref());
                let reply = Reply::Finished {
                    id,
                    reason,
                    cached_tokens,
                    interruptions,
                    routing,
                };
                link.end(id, &reply, &raw);
                return;
            }
            EngineEvent::Failed(error) => {
                link.end(id, &Reply::Failed { id, error }, &[]);
                return;
            }
        };
        if let Err(error) = sent {
            tracing::warn!(request = %id, %error, "the head cannot be told about new tokens");
        }
        if next.is_none() {
            next = stream.recv().await;
        }
    }
    let error = crate::base::EngineError::Internal("the engine dropped the generation".to_owned());
    link.end(id, &Reply::Failed { id, error }, &[]);
}

impl Link {
    fn send(&self, reply: &Reply, raw: &[u8]) -> Result<(), RemoteError> {
        let message = wire::encode(reply, raw).map_err(|problem| RemoteError::Wire {
            peer: self.head,
            problem,
        })?;
        Ok(self.comm.send(self.head, Tag::ENGINE_REPLY, message)?)
    }

    fn end(&self, id: RequestId, reply: &Reply, raw: &[u8]) {
        lock(&self.running).remove(&id);
        if let Err(error) = self.send(reply, raw) {
            tracing::warn!(request = %id, %error, "the head cannot be told about the end of a generation");
        }
    }

    fn send_status(&self, status: EngineStatus, received: Option<u64>) -> Result<(), RemoteError> {
        self.send(&Reply::Status { status, received }, &[])
    }
}

impl Incoming {
    fn refuse(&self, problem: String) -> WeightError {
        let name = self.tensors.get(self.at).map_or("(end)", |t| &t.name).to_owned();
        WeightError::Tensor { name, problem }
    }

    fn add(&mut self, mut raw: &[u8]) -> Result<(), WeightError> {
        self.next_index += 1;
        while !raw.is_empty() {
            let (Some(tensor), Some(buffer)) = (self.tensors.get(self.at), self.buffers.get_mut(self.at))
            else {
                return Err(self.refuse(format!("{} bytes more than announced", raw.len())));
            };
            let taken = raw.len().min(tensor.bytes - buffer.len());
            buffer.extend_from_slice(&raw[..taken]);
            raw = &raw[taken..];
            if buffer.len() == tensor.bytes {
                self.at += 1;
            }
        }
        Ok(())
    }

    fn is_complete(&self) -> bool {
        self.tensors
            .iter()
            .zip(&self.buffers)
            .all(|(t, b)| t.bytes == b.len())
    }

    fn into_tensors(self) -> Vec<WeightTensor> {
        self.tensors
            .into_iter()
            .zip(self.buffers)
            .map(|(tensor, buffer)| WeightTensor {
                name: tensor.name,
                dtype: tensor.dtype,
                shape: tensor.shape,
                data: Bytes::from(buffer),
            })
            .collect()
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Maps that are changed by one insert or remove at a time.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
