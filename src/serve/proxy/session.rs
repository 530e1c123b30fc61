//! One open session: admission of its requests, its running turns, its record.

use super::{
    capture::{self, Asked, Place, Tree},
    error::ApiError,
    live::{End, Finished, Live, Subscription},
    turn::{self, TurnSpec},
    Shared,
};
use crate::base::{BranchKind, CapturedSession, Purpose, SessionId, SessionSpec};
use std::{
    collections::HashMap,
    sync::{
        atomic::{AtomicU32, AtomicUsize, Ordering},
        Arc, Mutex, MutexGuard, PoisonError, TryLockError,
    },
    time::Instant,
};
use tokio::sync::watch;

/// Answered when a session may not generate any more; agents take it as the end of their work.
pub const TURN_LIMIT_NOTICE: &str =
    "The turn limit of this session is reached. No further reply is generated.";
/// The same for sampled tokens.
pub const TOKEN_LIMIT_NOTICE: &str =
    "The token limit of this session is reached. No further reply is generated.";
/// The same for wall time.
pub const TIME_LIMIT_NOTICE: &str =
    "The time limit of this session has passed. No further reply is generated.";

/// An agent that asks on after so many notices gets errors.
const MAX_NOTICES: u32 = 20;

/// Why a session takes no more requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Closed {
    /// The trial took its record.
    ByTrial,
    /// Its group was cut off.
    Cancelled,
}

/// What becomes of a request.
pub enum Started {
    /// A turn that runs: a new one, or the one that the same request started.
    Running(Subscription),
    /// The same request was answered before.
    Answered {
        /// Its reply.
        finished: Arc<Finished>,
        /// Its prompt, if the request asks for token ids.
        prompt: Option<Arc<[u32]>>,
    },
    /// The session has used up what it may use: a reply of the proxy itself, which is not recorded.
    Notice(&'static str),
}

/// A session; see the module documentation.
pub struct Session {
    /// Name in the URL.
    pub id: SessionId,
    /// What the agent must know.
    pub secret: String,
    /// What the trial asked for.
    pub spec: SessionSpec,
    /// Set once; running turns watch it.
    pub closed: watch::Sender<Option<Closed>>,
    /// Length of the largest body so far: what is beyond is new and has to be encoded.
    pub seen_bytes: AtomicUsize,
    /// Requests with the right secret.
    pub requests: AtomicU32,
    /// Requests of these that were refused or failed.
    pub refused: AtomicU32,
    state: Mutex<State>,
}

/// The record of a session.
#[derive(Default)]
pub struct State {
    /// Turns.
    pub tree: Tree,
    /// Turns that are generated now.
    pub live: HashMap<capture::NodeId, Arc<Live>>,
    /// Answered turns.
    pub finished: HashMap<capture::NodeId, Arc<Finished>>,
    /// Counters of the hand-over.
    pub captured: CapturedSession,
    /// Requests answered again from the record.
    pub replays: u32,
    /// Notices given.
    pub notices: u32,
    /// Answered turns in a row that could have called a tool and did not.
    pub turns_without_tool: u32,
}

impl Session {
    /// An open session without turns.
    pub fn new(spec: SessionSpec, secret: String) -> Self {
        Self {
            id: SessionId::from(spec.name.as_str()),
            secret,
            spec,
            closed: watch::Sender::new(None),
            seen_bytes: AtomicUsize::new(0),
            requests: AtomicU32::new(0),
            refused: AtomicU32::new(0),
            state: Mutex::default(),
        }
    }

    /// Its tokens are trained on.
    pub fn is_trained(&self) -> bool {
        self.spec.key.purpose == Purpose::Train
    }

    /// URL path with the secret in it.
    pub fn path(&self) -> String {
        format!("/sess/{}~{}", self.id, self.secret)
    }

    /// The record, from a thread that may block.
    pub fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Runs `work` on the record without ever blocking a thread of the runtime: heavy work, and work that
    /// would wait for heavy work of the same session, goes to a blocking thread.
    pub async fn with_state<R: Send + 'static>(
        self: &Arc<Self>,
        heavy: bool,
        work: impl FnOnce(&mut State) -> R + Send + 'static,
    ) -> Result<R, ApiError> {
        if !heavy {
            match self.state.try_lock() {
                Ok(mut state) => return Ok(work(&mut state)),
                Err(TryLockError::Poisoned(state)) => return Ok(work(&mut state.into_inner())),
                Err(TryLockError::WouldBlock) => {}
            }
        }
        let this = self.clone();
        tokio::task::spawn_blocking(move || work(&mut this.lock()))
            .await
            .map_err(|error| ApiError::Engine(format!("a task of session {} failed: {error}", self.id)))
    }

    /// Refuses requests of a session that is over.
    pub fn check_open(&self) -> Result<(), ApiError> {
        match *self.closed.borrow() {
            Some(Closed::ByTrial) => Err(ApiError::UnknownSession(self.id.to_string())),
            Some(Closed::Cancelled) => Err(ApiError::Ended(format!(
                "session `{}` was cancelled: its group goes on without it",
                self.id
            ))),
            None => Ok(()),
        }
    }

    /// Finds or starts the turn of a request. Runs under the session's lock.
    pub fn begin(
        self: &Arc<Self>,
        state: &mut State,
        shared: &Arc<Shared>,
        mut request: TurnSpec,
        asked: Asked<'_>,
    ) -> Result<Started, ApiError> {
        self.check_open()?;
        let limits = &self.spec.limits;
        let window = limits.max_total_tokens as usize;
        if Instant::now() >= limits.deadline {
            return self.notice(state, TIME_LIMIT_NOTICE);
        }
        let place = state.tree.place(
            &shared.renderer,
            &Asked {
                options: request.options(),
                limit: window,
                ..asked
            },
        );
        let (node, prompt) = match place {
            Ok(Place::Known(node)) => {
                if let Some(live) = state.live.get(&node) {
                    return Ok(Started::Running(Subscription::new(live)));
                }
                if state.captured.turns + state.replays >= limits.max_turns.saturating_mul(2) {
                    return self.notice(state, TURN_LIMIT_NOTICE);
                }
                let Some(finished) = state.finished.get(&node).cloned() else {
                    return Err(ApiError::Engine(format!(
                        "turn {node} of session `{}` has no record",
                        self.id
                    )));
                };
                state.replays += 1;
                let prompt = request.echo_prompt.then(|| state.tree.prompt(node));
                return Ok(Started::Answered { finished, prompt });
            }
            Ok(Place::New { node, prompt }) => (node, prompt),
            Err(error) => {
                let error = ApiError::from(error);
                if matches!(error, ApiError::ContextOverflow { .. }) {
                    state.captured.context_overflow = true;
                }
                return Err(error);
            }
        };
        let used_up = state.captured.turns as usize + state.live.len() >= limits.max_turns as usize;
        let silent = limits.max_consecutive_no_tool;
        if used_up || (silent > 0 && state.turns_without_tool >= silent) {
            state.tree.remove(node);
            state.captured.turn_limit_hit |= used_up;
            return self.notice(state, TURN_LIMIT_NOTICE);
        }
        if shared
            .max_session_tokens
            .is_some_and(|cap| state.captured.completion_tokens >= cap)
        {
            state.tree.remove(node);
            state.captured.token_limit_hit = true;
            return self.notice(state, TOKEN_LIMIT_NOTICE);
        }
        if prompt.len() >= window {
            state.tree.remove(node);
            state.captured.context_overflow = true;
            return Err(ApiError::ContextOverflow {
                prompt_tokens: prompt.len(),
                limit: window,
            });
        }
        if let Some(tools) = asked
            .tools
            .filter(|_| request.parse_tools && shared.format.needs_schema())
        {
            match shared.renderer.tools(tools) {
                Ok(list) => request.schema = Some(list),
                Err(error) => {
                    state.tree.remove(node);
                    return Err(error.into());
                }
            }
        }
        let live = Arc::new(Live::new(prompt));
        let subscription = Subscription::new(&live);
        state.live.insert(node, live.clone());
        let place = state.tree.node(node);
        let job = turn::Job {
            shared: shared.clone(),
            session: self.clone(),
            live,
            node,
            routing_from: state.tree.routing_from(node),
            routing_file: state.tree.routing_file(),
            seed: super::mix_seed(
                self.spec.sampling.seed,
                u64::from(place.branch),
                u64::from(place.depth),
            ),
            request,
        };
        shared.handle.spawn(turn::drive(job));
        Ok(Started::Running(subscription))
    }

    fn notice(&self, state: &mut State, text: &'static str) -> Result<Started, ApiError> {
        state.notices += 1;
        if state.notices > MAX_NOTICES {
            return Err(ApiError::Ended(format!("session `{}` is over: {text}", self.id)));
        }
        Ok(Started::Notice(text))
    }

    /// Closes the session for requests and running turns; the first reason stays.
    pub fn shut(&self, reason: Closed) {
        self.closed.send_if_modified(|closed| {
            let open = closed.is_none();
            if open {
                *closed = Some(reason);
            }
            open
        });
    }

    /// Everything that was recorded; branches of the kinds in `train` are trainable.
    pub fn hand_over(&self, train: &[BranchKind]) -> CapturedSession {
        let mut state = self.lock();
        for live in std::mem::take(&mut state.live).into_values() {
            live.finish(End::Failed(ApiError::UnknownSession(self.id.to_string())));
        }
        let mut captured = std::mem::take(&mut state.captured);
        captured.branches = capture::branches(&state.tree, train);
        captured.sequences = capture::trainable(&captured.branches);
        captured.requests = self.requests.load(Ordering::Relaxed);
        captured.refused = self.refused.load(Ordering::Relaxed);
        let versions = captured.sequences.iter().flat_map(|s| {
            let pairs = s.versions.iter().zip(&s.loss_mask);
            pairs
                .filter(|(_, sampled)| **sampled)
                .map(|(version, _)| *version)
        });
        captured.min_version = versions.clone().min().map(crate::base::PolicyVersion);
        captured.max_version = versions.max().map(crate::base::PolicyVersion);
        captured
    }
}
