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
    /// URL path of the session with the secret in it: `/sess/{id}~{secret}`; append `/v1/…`.
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
    /// One sequence per trainable leaf; weights sum to one; empty when no trainable turn was sampled.
    pub sequences: Vec<TokenSequence>,
    /// Every branch with its kind, trainable or not, in order of creation.
    pub branches: Vec<CapturedBranch>,
    /// Requests with the session's secret, whatever became of them.
    pub requests: u32,
    /// Requests of these that were refused or failed.
    pub refused: u32,
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
    /// A request exceeded the context window, and no later one was answered: the agent did not sum up and go on.
    pub context_overflow: bool,
    /// A request was answered with a notice because `max_turns` was reached.
    pub turn_limit_hit: bool,
    /// A request was answered with a notice because the session's cap on sampled tokens was reached.
    pub token_limit_hit: bool,
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
}

/// Why a branch of a session exists.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum BranchKind {
    /// The agent's main conversation.
    Main,
    /// A conversation of its own inside the trial: the agent said so, or its tools or system prompt differ
    /// from the main one's.
    SubAgent,
    /// The main conversation started anew with the same system prompt and tools, as agents do after they
    /// have summed up a conversation that grew too long.
    Compaction,
    /// A request for a summary: a later conversation begins with what it was answered.
    Summary,
    /// Another request without tools beside a conversation with tools: a title.
    Side,
    /// The same messages asked again with other options.
    Retry,
    /// It repeats a part of another branch and goes on differently.
    Rewritten,
}

impl BranchKind {
    /// Every kind.
    pub const ALL: [Self; 7] = [
        Self::Main,
        Self::SubAgent,
        Self::Compaction,
        Self::Summary,
        Self::Side,
        Self::Retry,
        Self::Rewritten,
    ];

    /// The name in files and in `PROXY_TRAIN_BRANCHES`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Main => "main",
            Self::SubAgent => "sub_agent",
            Self::Compaction => "compaction",
            Self::Summary => "summary",
            Self::Side => "side",
            Self::Retry => "retry",
            Self::Rewritten => "rewritten",
        }
    }

    /// The kind with this name.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.name() == name)
    }
}

/// One leaf of a session's tree, from the first prompt token to the last sampled one.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct CapturedBranch {
    /// Why it exists.
    pub kind: BranchKind,
    /// It is one of [`CapturedSession::sequences`].
    pub trainable: bool,
    /// Branch (index in [`CapturedSession::branches`]) whose turns it shares; `None` for a conversation of
    /// its own.
    pub parent: Option<usize>,
    /// Turns on its path.
    pub turns: u32,
    /// Its tokens. The mask covers what was sampled, except turns that an earlier trainable branch holds;
    /// the weight of a branch that is not trainable is 0.
    pub tokens: TokenSequence,
    /// The conversation as the agent saw it, in OpenAI form; replies of the policy have `"sampled": true`.
    pub messages: Vec<serde_json::Value>,
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
