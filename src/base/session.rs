//! The seam between a trial and the proxy: open a captured session, run an agent, take the tokens.

use super::{GroupId, PolicyVersion, SamplingParams, SessionId, TokenSequence, TrialKey};
use serde::{Deserialize, Serialize};
use std::{net::SocketAddr, path::PathBuf, time::Instant};

/// Bounds that the proxy enforces on a session, whatever the agent does.
#[derive(Clone, Debug)]
pub struct SessionLimits {
    /// Model calls that are answered (`HARBOR_AGENT_MAX_ITERATIONS`).
    pub max_turns: u32,
    /// Prompt plus response tokens of a branch (`MAX_PROMPT + MAX_RESP`).
    pub max_total_tokens: u32,
    /// Sampled tokens of one turn, when the request asks for more or for nothing.
    pub max_tokens_per_turn: u32,
    /// Turns in a row without a tool call before the session is closed; 0 = no limit.
    pub max_consecutive_no_tool: u32,
    /// Requests after this moment are refused.
    pub deadline: Instant,
}

/// What a trial asks for.
#[derive(Clone, Debug)]
pub struct SessionSpec {
    /// Trial that owns the session.
    pub key: TrialKey,
    /// Attempt of the trial, from 0.
    pub attempt: u32,
    /// Name shown in logs and used as the session id: `<task slug>__<random>`.
    pub name: String,
    /// Sampling of every turn; `seed` is mixed with the turn number. What the agent asks for
    /// (temperature, top_p) is ignored in training, since the trainer must know the distribution.
    pub sampling: SamplingParams,
    /// Bounds.
    pub limits: SessionLimits,
}

/// How an agent reaches its session.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct SessionEndpoint {
    /// Session id.
    pub session: SessionId,
    /// Unguessable secret; accepted as path segment, bearer token or `x-api-key`.
    pub secret: String,
    /// URL path of the session with the secret in it: `/sess/{id}.{secret}`; append `/v1/…`.
    pub path: String,
    /// Name of the served model (`SERVED_MODEL_NAME`).
    pub model: String,
    /// TCP address of the proxy.
    pub tcp: Option<SocketAddr>,
    /// Unix socket of the proxy, bound into sandboxes that have no network.
    pub unix_socket: PathBuf,
}

/// What the proxy recorded between open and close.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct CapturedSession {
    /// One sequence per trainable leaf; weights sum to one; empty when no turn was sampled.
    pub sequences: Vec<TokenSequence>,
    /// Answered model calls.
    pub turns: u32,
    /// Prompt tokens over all turns, cache hits included.
    pub prompt_tokens: u64,
    /// Sampled tokens over all turns.
    pub completion_tokens: u64,
    /// Generations that were cancelled because the client went away.
    pub aborted: u32,
    /// Replies whose tool call could not be parsed.
    pub malformed_tool_calls: u32,
    /// A request exceeded the context window.
    pub context_overflow: bool,
    /// A request was refused by `max_turns`.
    pub turn_limit_hit: bool,
    /// A turn ended with [`super::FinishReason::Length`].
    pub length_finishes: u32,
    /// The engine failed during the session: an infrastructure failure, never a zero reward.
    pub engine_failure: Option<String>,
    /// Oldest weights that sampled a token.
    pub min_version: Option<PolicyVersion>,
    /// Newest weights that sampled a token.
    pub max_version: Option<PolicyVersion>,
    /// Seconds spent inside model calls.
    pub model_inference_secs: f64,
    /// Seconds of it spent waiting for admission.
    pub admission_wait_secs: f64,
    /// The conversation as the agent saw it, one list of messages per branch, for `trajectory.json`.
    pub conversations: Vec<serde_json::Value>,
}

/// A session that cannot be opened or closed.
#[derive(Debug, thiserror::Error)]
pub enum SessionError {
    /// The proxy is draining.
    #[error("the proxy accepts no new sessions: {0}")]
    Closed(String),
    /// The id was never opened or is already closed.
    #[error("session `{0}` is not open")]
    Unknown(SessionId),
}

/// The proxy, as a trial sees it.
#[async_trait::async_trait]
pub trait SessionHost: Send + Sync {
    /// Opens a session; requests are served until [`SessionHost::close`].
    fn open(&self, spec: SessionSpec) -> Result<SessionEndpoint, SessionError>;
    /// Ends a session: running generations are cancelled, later requests refused, and the capture is
    /// handed over. No state stays behind.
    async fn close(&self, session: &SessionId) -> Result<CapturedSession, SessionError>;
    /// Cancels the running generations of all sessions of a group (it was cut off); later requests are
    /// refused. The trials then close their sessions as usual.
    fn cancel_group(&self, group: GroupId);
}
