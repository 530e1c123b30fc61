//! The head's side: an [`Engine`] whose work is done on another rank.

use super::{
    wire::{self, Hello, Reply, Request, TensorShape, PROTOCOL},
    RemoteConfig, RemoteError, BUCKETS_IN_FLIGHT,
};
use crate::base::{
    Engine, EngineError, EngineEvent, EngineStatus, GenerateRequest, PolicyVersion, RequestId, SessionId,
    WeightAck, WeightError, WeightTarget, WeightUpdate,
};
use crate::comm::{Communicator, Inbox, InboxError, Tag};
use bytes::Bytes;
use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError, Weak},
    time::{Duration, Instant},
};
use tokio::sync::mpsc::{unbounded_channel, UnboundedReceiver, UnboundedSender};

/// How often the receiving thread looks for closed receivers and sends a sign of life.
const TICK: Duration = Duration::from_millis(50);

/// An engine on another rank. Dropping it stops the server there.
pub struct RemoteEngine {
    shared: Arc<Shared>,
    /// One update at a time.
    updating: tokio::sync::Mutex<()>,
}

struct Shared {
    comm: Arc<dyn Communicator>,
    peer: u32,
    config: RemoteConfig,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    requests: HashMap<RequestId, Running>,
    sessions: HashMap<SessionId, KnownSession>,
    status: EngineStatus,
    /// Submits that were sent, and those that `status` knows of.
    sent: u64,
    received: u64,
    /// Where answers to the update under way go.
    weights: Option<(PolicyVersion, UnboundedSender<WeightAnswer>)>,
    /// Why the replica is lost.
    lost: Option<String>,
}

struct Running {
    session: SessionId,
    /// Prompt and sampled tokens.
    tokens: Vec<u32>,
    events: UnboundedSender<EngineEvent>,
}

/// A session between two generations.
struct KnownSession {
    tokens: Vec<u32>,
    resident: usize,
}

enum WeightAnswer {
    BucketTaken,
    Done(Result<WeightAck, WeightError>),
}

impl RemoteEngine {
    /// Shakes hands with the server on rank `peer`. Blocking, at most [`RemoteConfig::hello_timeout`].
    pub fn connect(
        comm: Arc<dyn Communicator>,
        peer: u32,
        config: RemoteConfig,
    ) -> Result<Arc<Self>, RemoteError> {
        let inbox = comm.inbox(peer, Tag::ENGINE_REPLY)?;
        let shared = Arc::new(Shared {
            comm,
            peer,
            config,
            state: Mutex::default(),
        });
        let ours = Hello {
            protocol: PROTOCOL,
            program: shared.config.program.clone(),
        };
        shared.send(&Request::Hello(ours.clone()), &[])?;
        let hello = inbox.recv(shared.config.hello_timeout).map_err(|e| match e {
            InboxError::Timeout => RemoteError::NoHello {
                peer,
                waited: shared.config.hello_timeout,
            },
            InboxError::Closed => RemoteError::Ended { peer },
        })?;
        let theirs = match wire::decode(&hello) {
            Ok((Reply::Hello(theirs), _)) => theirs,
            Ok(_) => return Err(shared.unreadable("it does not start with hello".to_owned())),
            Err(problem) => return Err(shared.unreadable(problem)),
        };
        if theirs != ours {
            return Err(RemoteError::Version {
                peer,
                theirs: theirs.describe(),
                ours: ours.describe(),
            });
        }
        let receiver = Arc::downgrade(&shared);
        std::thread::Builder::new()
            .name(format!("engine-{peer}"))
            .spawn(move || receive_loop(&receiver, &inbox))
            .map_err(|e| RemoteError::Wire {
                peer,
                problem: format!("no thread to receive it: {e}"),
            })?;
        Ok(Arc::new(Self {
            shared,
            updating: tokio::sync::Mutex::new(()),
        }))
    }

    /// Rank of the engine.
    pub fn peer(&self) -> u32 {
        self.shared.peer
    }

    /// Why the replica is lost, if it is.
    pub fn lost(&self) -> Option<String> {
        self.shared.state().lost.clone()
    }

    /// Tells the server on the other rank to end. Requests that still run fail there and here.
    pub fn stop(&self) {
        // When the message cannot be sent, the server ends by the missing heartbeat.
        let _ = self.shared.send(&Request::Stop, &[]);
        self.shared.lose("the engine was stopped".to_owned());
    }
}

impl Drop for RemoteEngine {
    fn drop(&mut self) {
        if self.lost().is_none() {
            self.stop();
        }
    }
}

impl Engine for RemoteEngine {
    fn submit(&self, request: GenerateRequest, events: UnboundedSender<EngineEvent>) {
        let mut state = self.shared.state();
        if let Some(lost) = &state.lost {
            let _ = events.send(EngineEvent::Failed(EngineError::ReplicaLost(lost.clone())));
            return;
        }
        state.requests.insert(
            request.id,
            Running {
                session: request.session.clone(),
                tokens: request.prompt.to_vec(),
                events,
            },
        );
        state.sent += 1;
        // Sent under the lock, so that submits reach the engine in the order in which they are counted.
        let sent = self.shared.send(
            &Request::Submit {
                id: request.id,
                session: request.session,
                sampling: request.sampling,
                stop_token_ids: request.stop_token_ids,
                max_new_tokens: request.max_new_tokens,
                routing_from: request.routing_from,
            },
            &wire::put_u32s(&request.prompt),
        );
        drop(state);
        if let Err(error) = sent {
            self.shared.lose(error.to_string());
        }
    }

    fn abort(&self, id: RequestId) {
        if self.shared.state().requests.contains_key(&id) {
            self.shared.send_or_lose(&Request::Abort { id });
        }
    }

    fn status(&self) -> EngineStatus {
        let state = self.shared.state();
        let unseen = state.sent.saturating_sub(state.received) as u32;
        EngineStatus {
            waiting: state.status.waiting + unseen,
            ..state.status
        }
    }

    fn resident_prefix(&self, session: &SessionId, prompt: &[u32]) -> usize {
        let state = self.shared.state();
        state.sessions.get(session).map_or(0, |known| {
            let common = known
                .tokens
                .iter()
                .zip(prompt)
                .take_while(|(a, b)| a == b)
                .count();
            common.min(known.resident)
        })
    }

    fn end_session(&self, session: &SessionId) {
        let is_lost = {
            let mut state = self.shared.state();
            state.sessions.remove(session);
            state.lost.is_some()
        };
        if !is_lost {
            self.shared.send_or_lose(&Request::EndSession {
                session: session.clone(),
            });
        }
    }
}

#[async_trait::async_trait]
impl WeightTarget for RemoteEngine {
    async fn update_weights(&self, update: Arc<WeightUpdate>) -> Result<WeightAck, WeightError> {
        let _turn = self.updating.lock().await;
        let (answers, mut answered) = unbounded_channel();
        {
            let mut state = self.shared.state();
            if let Some(lost) = &state.lost {
                return Err(WeightError::ReplicaLost(lost.clone()));
            }
            state.weights = Some((update.version, answers));
        }
        let result = self.shared.transfer(&update, &mut answered).await;
        let mut state = self.shared.state();
        state.weights = None;
        if let Ok(ack) = &result {
            state.status.version = state.status.version.max(ack.version);
        }
        result
    }
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        // Every change below the lock is whole by itself, also when a caller panics.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn unreadable(&self, problem: String) -> RemoteError {
        RemoteError::Wire {
            peer: self.peer,
            problem,
        }
    }

    fn send(&self, request: &Request, raw: &[u8]) -> Result<(), RemoteError> {
        let message = wire::encode(request, raw).map_err(|problem| self.unreadable(problem))?;
        Ok(self.comm.send(self.peer, Tag::ENGINE_REQUEST, message)?)
    }

    fn send_or_lose(&self, request: &Request) {
        if let Err(error) = self.send(request, &[]) {
            self.lose(error.to_string());
        }
    }

    /// The replica is gone: everything that waits for it ends.
    fn lose(&self, why: String) {
        let mut state = self.state();
        let why = state.lost.get_or_insert(why).clone();
        for (_, running) in state.requests.drain() {
            let _ = running
                .events
                .send(EngineEvent::Failed(EngineError::ReplicaLost(why.clone())));
        }
        state.sessions.clear();
        // Dropping the sender ends a transfer.
        state.weights = None;
    }

    async fn transfer(
        &self,
        update: &WeightUpdate,
        answered: &mut UnboundedReceiver<WeightAnswer>,
    ) -> Result<WeightAck, WeightError> {
        let version = update.version;
        let lost = |error: RemoteError| WeightError::ReplicaLost(error.to_string());
        let tensors = update
            .tensors
            .iter()
            .map(|t| TensorShape {
                name: t.name.clone(),
                dtype: t.dtype,
                shape: t.shape.clone(),
                bytes: t.data.len(),
            })
            .collect();
        let begin = Request::WeightsBegin {
            version,
            checksum: update.checksum,
            tensors,
        };
        self.send(&begin, &[]).map_err(lost)?;
        let mut in_flight = 0;
        let pieces: Vec<&Bytes> = update.tensors.iter().map(|t| &t.data).collect();
        for (index, raw) in Buckets::new(&pieces, self.config.bucket_bytes).enumerate() {
            while in_flight >= BUCKETS_IN_FLIGHT {
                match self.answer(version, answered).await? {
                    WeightAnswer::BucketTaken => in_flight -= 1,
                    // An answer before the last bucket is a refusal.
                    WeightAnswer::Done(result) => return result,
                }
            }
            let bucket = Request::WeightsBucket {
                version,
                index: index as u32,
                crc: crc32fast::hash(&raw),
            };
            self.send(&bucket, &raw).map_err(lost)?;
            in_flight += 1;
        }
        loop {
            if let WeightAnswer::Done(result) = self.answer(version, answered).await? {
                return result;
            }
        }
    }

    async fn answer(
        &self,
        version: PolicyVersion,
        answered: &mut UnboundedReceiver<WeightAnswer>,
    ) -> Result<WeightAnswer, WeightError> {
        match tokio::time::timeout(self.config.weights_timeout, answered.recv()).await {
            Ok(Some(answer)) => Ok(answer),
            Ok(None) => {
                let why = self.state().lost.clone();
                Err(WeightError::ReplicaLost(
                    why.unwrap_or_else(|| "the transfer ended".to_owned()),
                ))
            }
            Err(_) => {
                let why = format!(
                    "rank {} has not taken the weights of version {version} within {} s",
                    self.peer,
                    self.config.weights_timeout.as_secs()
                );
                // It sits on an unknown part of the update: nothing that it samples can be trusted.
                self.lose(why.clone());
                Err(WeightError::ReplicaLost(why))
            }
        }
    }

    /// Handles one message of the server.
    fn on_reply(&self, message: &Bytes) -> Result<(), String> {
        let (reply, raw) = wire::decode(message)?;
        let mut state = self.state();
        match reply {
            Reply::Hello(_) => return Err("a second hello".to_owned()),
            Reply::Tokens { id } => {
                let tokens = wire::take_tokens(&raw)?;
                if let Some(running) = state.requests.get_mut(&id) {
                    running.tokens.extend(tokens.iter().map(|t| t.id));
                    // A closed receiver is found by the next tick.
                    let _ = running.events.send(EngineEvent::Tokens(tokens));
                }
            }
            Reply::Finished {
                id,
                reason,
                cached_tokens,
                interruptions,
                routing,
            } => {
                let routing = wire::take_routing(routing, &raw)?;
                if let Some(running) = state.requests.remove(&id) {
                    // Until the server reports: what was just computed is in the cache.
                    let resident = running.tokens.len();
                    state.sessions.insert(
                        running.session,
                        KnownSession {
                            tokens: running.tokens,
                            resident,
                        },
                    );
                    let _ = running.events.send(EngineEvent::Finished {
                        reason,
                        cached_tokens,
                        interruptions,
                        routing,
                    });
                }
            }
            Reply::Failed { id, error } => {
                if let Some(running) = state.requests.remove(&id) {
                    let _ = running.events.send(EngineEvent::Failed(error));
                }
            }
            Reply::Status { status, received } => {
                state.status = status;
                state.received = received.unwrap_or(state.received);
            }
            Reply::Resident { sessions } => {
                for (session, resident) in sessions {
                    if let Some(known) = state.sessions.get_mut(&session) {
                        known.resident = resident;
                    }
                }
            }
            Reply::BucketTaken { version } => state.answer_weights(version, WeightAnswer::BucketTaken),
            Reply::Weights { version, result } => state.answer_weights(version, WeightAnswer::Done(result)),
        }
        Ok(())
    }

    /// Aborts generations that nobody listens to any more.
    fn abort_unheard(&self) {
        let unheard: Vec<RequestId> = {
            let mut state = self.state();
            let ids: Vec<RequestId> = state
                .requests
                .iter()
                .filter(|(_, running)| running.events.is_closed())
                .map(|(id, _)| *id)
                .collect();
            for id in &ids {
                state.requests.remove(id);
            }
            ids
        };
        for id in unheard {
            self.send_or_lose(&Request::Abort { id });
        }
    }
}

impl State {
    fn answer_weights(&mut self, version: PolicyVersion, answer: WeightAnswer) {
        // Answers to an update that was given up are late news.
        if let Some((_, answers)) = self
            .weights
            .as_ref()
            .filter(|(under_way, _)| *under_way == version)
        {
            let _ = answers.send(answer);
        }
    }
}

/// Receives until the engine is dropped or lost.
fn receive_loop(shared: &Weak<Shared>, inbox: &Inbox) {
    let mut last_word = Instant::now();
    let mut last_tick = Instant::now();
    loop {
        let message = inbox.recv(TICK);
        let Some(shared) = shared.upgrade() else { return };
        if shared.state().lost.is_some() {
            return;
        }
        match message {
            Ok(message) => {
                last_word = Instant::now();
                if let Err(problem) = shared.on_reply(&message) {
                    shared.lose(shared.unreadable(problem).to_string());
                    return;
                }
            }
            Err(InboxError::Timeout) => {
                let waited = last_word.elapsed();
                if waited > shared.config.heartbeat_timeout {
                    let peer = shared.peer;
                    shared.lose(RemoteError::Silent { peer, waited }.to_string());
                    return;
                }
            }
            Err(InboxError::Closed) => {
                shared.lose(RemoteError::Ended { peer: shared.peer }.to_string());
                return;
            }
        }
        if last_tick.elapsed() >= TICK {
            last_tick = Instant::now();
            shared.abort_unheard();
            shared.send_or_lose(&Request::Ping);
        }
    }
}

/// The bytes of all tensors in order, cut into pieces of one size; empty tensors leave no trace.
struct Buckets<'a> {
    pieces: &'a [&'a Bytes],
    at: usize,
    bucket_bytes: usize,
}

impl<'a> Buckets<'a> {
    fn new(pieces: &'a [&'a Bytes], bucket_bytes: usize) -> Self {
        Self {
            pieces,
            at: 0,
            bucket_bytes: bucket_bytes.max(1),
        }
    }
}

impl Iterator for Buckets<'_> {
    type Item = Vec<u8>;

    fn next(&mut self) -> Option<Vec<u8>> {
        let mut bucket = Vec::new();
        while let Some((piece, rest)) = self.pieces.split_first() {
            let left = &piece[self.at..];
            let taken = left.len().min(self.bucket_bytes - bucket.len());
            bucket.extend_from_slice(&left[..taken]);
            self.at += taken;
            if self.at == piece.len() {
                self.pieces = rest;
                self.at = 0;
            }
            if bucket.len() == self.bucket_bytes {
                break;
            }
        }
        (!bucket.is_empty()).then_some(bucket)
    }
}
