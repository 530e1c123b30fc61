//! The seam to an inference engine: token ids in, sampled tokens out.

use super::{PolicyVersion, RequestId, SamplingParams, SessionId, WeightTarget};
use serde::{Deserialize, Serialize};
use std::sync::Arc;
use tokio::sync::mpsc::UnboundedSender;

/// One generation. The engine never sees text.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct GenerateRequest {
    /// Names the request in [`Engine::abort`].
    pub id: RequestId,
    /// Session whose prefix may be reused from the cache.
    pub session: SessionId,
    /// The whole prompt, tokens of earlier turns included.
    pub prompt: Arc<[u32]>,
    /// How to draw.
    pub sampling: SamplingParams,
    /// Generation ends after one of these was sampled; the stop token is part of the output.
    pub stop_token_ids: Vec<u32>,
    /// Upper bound on sampled tokens; at least 1.
    pub max_new_tokens: u32,
    /// Report the experts of all tokens from this position on, prompt and reply; None reports nothing.
    pub routing_from: Option<u32>,
}

/// Which experts computed tokens, so that the trainer can take the same ones.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RoutedExperts {
    /// Position of the first token.
    pub first: u32,
    /// Experts of a token: sparse layers times experts of a layer.
    pub width: u32,
    /// `[tokens][sparse layers][k]`, the most likely first. The last sampled token was never computed, so
    /// it has no entry.
    pub experts: Vec<u16>,
}

/// A token as it was sampled.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct SampledToken {
    /// Vocabulary id.
    pub id: u32,
    /// Log-probability at the sampling temperature (see [`SamplingParams`]).
    pub logprob: f32,
    /// Weights that produced it.
    pub version: PolicyVersion,
}

/// Why a generation ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FinishReason {
    /// A stop token was sampled.
    Stop,
    /// `max_new_tokens` or the engine's context length was reached.
    Length,
    /// [`Engine::abort`] was called; the tokens so far were delivered.
    Abort,
}

/// What a generation reports, in order: any number of `Tokens`, then one `Finished` or `Failed`.
#[derive(Clone, Debug)]
pub enum EngineEvent {
    /// Newly sampled tokens, never empty.
    Tokens(Vec<SampledToken>),
    /// The end. `cached_tokens` of the prompt came from the prefix cache.
    Finished {
        /// Why it ended.
        reason: FinishReason,
        /// Prompt tokens that were not computed again.
        cached_tokens: u32,
        /// How often new weights arrived in the middle of it.
        interruptions: u32,
        /// What [`GenerateRequest::routing_from`] asked for, of models with experts. After new weights a
        /// token keeps the experts that computed it first.
        routing: Option<RoutedExperts>,
    },
    /// The engine could not go on; nothing of this generation may be trained on.
    Failed(EngineError),
}

/// A failed generation.
#[derive(Clone, Debug, thiserror::Error, Serialize, Deserialize)]
pub enum EngineError {
    /// The prompt leaves no room for one token.
    #[error("the prompt has {prompt_tokens} tokens and the engine's context holds {max_model_len}")]
    ContextOverflow {
        /// Tokens of the prompt.
        prompt_tokens: u32,
        /// Context length of the engine (`ROLLOUT_MAX_MODEL_LEN`).
        max_model_len: u32,
    },
    /// The replica is gone; another one may serve the request.
    #[error("the engine replica is lost: {0}")]
    ReplicaLost(String),
    /// A fault inside the engine.
    #[error("engine fault: {0}")]
    Internal(String),
}

/// A snapshot for balancing and admission.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct EngineStatus {
    /// Sequences in the running batch.
    pub running: u32,
    /// Requests not yet in the batch.
    pub waiting: u32,
    /// KV cache tokens in use, cached prefixes included.
    pub kv_tokens_used: u64,
    /// KV cache tokens of running sequences alone (not evictable).
    pub kv_tokens_active: u64,
    /// KV cache capacity in tokens.
    pub kv_tokens_total: u64,
    /// Weights in use.
    pub version: PolicyVersion,
    /// Tokens sampled since start.
    pub generated_tokens: u64,
    /// Prompt tokens computed since start (cache hits not counted).
    pub prefill_tokens: u64,
}

/// One engine replica. All calls return at once; results arrive as events.
pub trait Engine: WeightTarget {
    /// Queues a generation. Events go to `events`; a closed receiver aborts it.
    fn submit(&self, request: GenerateRequest, events: UnboundedSender<EngineEvent>);
    /// Ends a generation early with [`FinishReason::Abort`]; unknown ids are ignored.
    fn abort(&self, id: RequestId);
    /// Current load.
    fn status(&self) -> EngineStatus;
    /// How many leading tokens of `prompt` the cache holds at this moment.
    fn resident_prefix(&self, session: &SessionId, prompt: &[u32]) -> usize;
    /// The session ended; its cached prefix may be evicted first.
    fn end_session(&self, session: &SessionId);
}
