//! An engine that answers from a script: for tests of everything in front of an engine, and for load
//! tests of the proxy alone.
//!
//! A [`Script`] is a function from the request to a [`ScriptedReply`]. Log-probs are made up but
//! deterministic ([`scripted_logprob`]), so a test can tell that each one arrived at its token. Replies
//! with delays run as tasks of the runtime that calls [`Engine::submit`]; others are sent at once.

mod file;
#[cfg(test)]
mod tests;
mod timer;

pub use file::{read_replies, ReplyFileError};

use crate::base::{
    Engine, EngineError, EngineEvent, EngineStatus, FinishReason, GenerateRequest, PolicyVersion, RequestId,
    SampledToken, SessionId, WeightAck, WeightError, WeightTarget, WeightUpdate,
};
use async_trait::async_trait;
use std::{
    collections::HashMap,
    sync::{
        atomic::{AtomicU32, AtomicU64, Ordering},
        Arc, Mutex, MutexGuard, PoisonError,
    },
    time::Duration,
};
use tokio::sync::{mpsc::UnboundedSender, Notify};

/// What the engine answers to one request.
#[derive(Clone, Debug, Default)]
pub struct ScriptedReply {
    /// Sampled ids. Cut at `max_new_tokens` and after the first stop id; a reply that ends in neither
    /// finishes with [`FinishReason::Length`].
    pub tokens: Vec<u32>,
    /// Time before the first token.
    pub first_delay: Duration,
    /// Time before each further token.
    pub token_delay: Duration,
    /// Fails after this many tokens.
    pub failure: Option<(usize, EngineError)>,
    /// The weight version of tokens from this index on changes; counts as one interruption.
    pub new_version: Option<(usize, PolicyVersion)>,
}

impl From<Vec<u32>> for ScriptedReply {
    fn from(tokens: Vec<u32>) -> Self {
        Self {
            tokens,
            ..Self::default()
        }
    }
}

/// Gives the reply to a request; the number counts requests from 0, of all sessions or of the request's own
/// ([`ScriptedEngine::by_session`]).
pub type Script = Box<dyn Fn(&GenerateRequest, u64) -> ScriptedReply + Send + Sync>;

/// The log-probability that a scripted token carries: a function of its id and its place in the reply.
pub fn scripted_logprob(id: u32, index: usize) -> f32 {
    -0.001 - (id % 97) as f32 / 64.0 - (index % 31) as f32 / 2048.0
}

struct Shared {
    script: Script,
    capacity: u64,
    version: AtomicU32,
    requests: AtomicU64,
    generated: AtomicU64,
    prefilled: AtomicU64,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    running: HashMap<RequestId, (Arc<Notify>, u64)>,
    resident: HashMap<SessionId, Resident>,
    log: Option<Vec<GenerateRequest>>,
    /// Requests by session, if they are counted so.
    served: Option<HashMap<SessionId, u64>>,
}

/// What a session's last turn left in the pretended cache.
struct Resident {
    prompt: Arc<[u32]>,
    reply: Vec<u32>,
}

impl Resident {
    /// Leading tokens of `prompt` that are here.
    fn prefix(&self, prompt: &[u32]) -> usize {
        let common = |held: &[u32], asked: &[u32]| {
            let length = held.len().min(asked.len());
            if held[..length] == asked[..length] {
                return length;
            }
            held.iter().zip(asked).take_while(|(a, b)| a == b).count()
        };
        let first = common(&self.prompt, prompt);
        if first < self.prompt.len() {
            return first;
        }
        first + common(&self.reply, &prompt[first..])
    }
}

/// See the module documentation.
pub struct ScriptedEngine {
    shared: Arc<Shared>,
}

impl ScriptedEngine {
    /// An engine with `capacity` KV tokens.
    pub fn new(capacity: u64, script: Script) -> Self {
        Self {
            shared: Arc::new(Shared {
                script,
                capacity,
                version: AtomicU32::new(0),
                requests: AtomicU64::new(0),
                generated: AtomicU64::new(0),
                prefilled: AtomicU64::new(0),
                state: Mutex::default(),
            }),
        }
    }

    /// Answers the n-th request with the n-th reply; further requests fail.
    pub fn replies(replies: Vec<ScriptedReply>) -> Self {
        Self::new(
            1 << 20,
            Box::new(move |_, n| match replies.get(n as usize) {
                Some(reply) => reply.clone(),
                None => ScriptedReply {
                    failure: Some((
                        0,
                        EngineError::Internal(format!("the script has no reply number {n}")),
                    )),
                    ..ScriptedReply::default()
                },
            }),
        )
    }

    /// Counts requests by session: each session's script begins at 0.
    pub fn by_session(self) -> Self {
        self.shared.lock().served = Some(HashMap::new());
        self
    }

    /// Keeps every request for [`ScriptedEngine::requests`] (and its memory).
    pub fn recording(self) -> Self {
        self.shared.lock().log = Some(Vec::new());
        self
    }

    /// The requests so far, if [`ScriptedEngine::recording`].
    pub fn requests(&self) -> Vec<GenerateRequest> {
        self.shared.lock().log.clone().unwrap_or_default()
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn play(
        self: Arc<Self>,
        request: GenerateRequest,
        reply: ScriptedReply,
        cached: u32,
        abort: Arc<Notify>,
        events: UnboundedSender<EngineEvent>,
    ) {
        let mut version = PolicyVersion(self.version.load(Ordering::Relaxed));
        let mut interruptions = 0;
        let mut reason = FinishReason::Length;
        let mut sent = 0;
        let timed = !(reply.first_delay.is_zero() && reply.token_delay.is_zero());
        let mut batch = Vec::new();
        for (index, id) in reply.tokens.iter().enumerate() {
            let delay = if index == 0 {
                reply.first_delay
            } else {
                reply.token_delay
            };
            if !delay.is_zero() {
                tokio::select! {
                    () = timer::sleep(delay) => {}
                    () = abort.notified() => { reason = FinishReason::Abort; break }
                    () = events.closed() => { reason = FinishReason::Abort; break }
                }
            }
            if reply.failure.as_ref().is_some_and(|(after, _)| index >= *after) {
                break;
            }
            if let Some((at, new)) = reply.new_version {
                if at == index {
                    version = new;
                    interruptions += 1;
                }
            }
            batch.push(SampledToken {
                id: *id,
                logprob: scripted_logprob(*id, index),
                version,
            });
            sent += 1;
            let stop = request.stop_token_ids.contains(id);
            let end = stop || sent == request.max_new_tokens as usize;
            if stop {
                reason = FinishReason::Stop;
            }
            if timed || end {
                let _ = events.send(EngineEvent::Tokens(std::mem::take(&mut batch)));
            }
            if end {
                break;
            }
        }
        if !batch.is_empty() {
            let _ = events.send(EngineEvent::Tokens(batch));
        }
        self.generated.fetch_add(sent as u64, Ordering::Relaxed);
        {
            let mut state = self.lock();
            state.running.remove(&request.id);
            let mut tokens = reply.tokens;
            tokens.truncate(sent);
            let resident = Resident {
                prompt: request.prompt,
                reply: tokens,
            };
            state.resident.insert(request.session, resident);
        }
        let failed = reply
            .failure
            .filter(|(after, _)| sent >= *after && reason != FinishReason::Abort);
        // A receiver that is gone has nobody left to tell.
        let _ = events.send(match failed {
            Some((_, error)) => EngineEvent::Failed(error),
            None => EngineEvent::Finished {
                reason,
                cached_tokens: cached,
                interruptions,
                routing: None,
            },
        });
    }
}

impl Engine for ScriptedEngine {
    fn submit(&self, request: GenerateRequest, events: UnboundedSender<EngineEvent>) {
        let mut number = self.shared.requests.fetch_add(1, Ordering::Relaxed);
        if let Some(served) = &mut self.shared.lock().served {
            let count = served.entry(request.session.clone()).or_default();
            number = *count;
            *count += 1;
        }
        let reply = (self.shared.script)(&request, number);
        let cached = self.resident_prefix(&request.session, &request.prompt) as u32;
        self.shared
            .prefilled
            .fetch_add(request.prompt.len() as u64 - u64::from(cached), Ordering::Relaxed);
        let abort = Arc::new(Notify::new());
        {
            let mut state = self.shared.lock();
            if let Some(log) = &mut state.log {
                log.push(request.clone());
            }
            state
                .running
                .insert(request.id, (abort.clone(), request.prompt.len() as u64));
        }
        let timed = !(reply.first_delay.is_zero() && reply.token_delay.is_zero());
        let play = self.shared.clone().play(request, reply, cached, abort, events);
        if timed {
            tokio::spawn(play);
        } else {
            // Without delays the future never waits.
            futures::FutureExt::now_or_never(play);
        }
    }

    fn abort(&self, id: RequestId) {
        if let Some((abort, _)) = self.shared.lock().running.get(&id) {
            abort.notify_one();
        }
    }

    fn status(&self) -> EngineStatus {
        let state = self.shared.lock();
        let active = state.running.values().map(|(_, tokens)| tokens).sum();
        EngineStatus {
            running: state.running.len() as u32,
            waiting: 0,
            kv_tokens_used: active,
            kv_tokens_active: active,
            kv_tokens_total: self.shared.capacity,
            version: PolicyVersion(self.shared.version.load(Ordering::Relaxed)),
            generated_tokens: self.shared.generated.load(Ordering::Relaxed),
            prefill_tokens: self.shared.prefilled.load(Ordering::Relaxed),
        }
    }

    fn resident_prefix(&self, session: &SessionId, prompt: &[u32]) -> usize {
        let state = self.shared.lock();
        let Some(held) = state.resident.get(session) else {
            return 0;
        };
        held.prefix(prompt)
    }

    fn end_session(&self, session: &SessionId) {
        let mut state = self.shared.lock();
        state.resident.remove(session);
        if let Some(served) = &mut state.served {
            served.remove(session);
        }
    }
}

#[async_trait]
impl WeightTarget for ScriptedEngine {
    /// Takes the version number; there are no weights to replace.
    async fn update_weights(&self, update: Arc<WeightUpdate>) -> Result<WeightAck, WeightError> {
        self.shared.version.store(update.version.0, Ordering::Relaxed);
        Ok(WeightAck {
            version: update.version,
            checksum: WeightUpdate::checksum_of(&update.tensors),
        })
    }
}
