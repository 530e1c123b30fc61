//! One turn while it is generated, and what remains of it: shared by the task that drives it and by every
//! request that waits for it.
//!
//! Each waiting request holds a receiver of [`Live::changed`]. When the last one is gone (the client went
//! away), the sender's `closed` resolves and the driver cancels the generation.

use super::error::ApiError;
use crate::{base::SampledToken, model::tool_calls::ToolCall};
use serde_json::{json, Value};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tokio::sync::watch;

/// A finished reply.
#[derive(Debug)]
pub struct Finished {
    /// Text of the reply, without calls.
    pub content: String,
    /// Calls with their ids.
    pub calls: Vec<(String, ToolCall)>,
    /// OpenAI's finish reason.
    pub finish_reason: &'static str,
    /// Sampled tokens.
    pub tokens: Vec<SampledToken>,
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Of these, taken from the cache.
    pub cached_tokens: u32,
}

impl Finished {
    /// The reply as a message of the conversation.
    pub fn message(&self) -> Value {
        let content = if self.content.is_empty() && !self.calls.is_empty() {
            Value::Null
        } else {
            Value::String(self.content.clone())
        };
        let mut message = json!({"role": "assistant", "content": content});
        if !self.calls.is_empty() {
            message["tool_calls"] = self.calls.iter().map(|(id, call)| tool_call(id, call)).collect();
        }
        message
    }
}

/// A call in OpenAI form.
pub fn tool_call(id: &str, call: &ToolCall) -> Value {
    json!({"id": id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}})
}

/// How a turn ended.
#[derive(Clone, Debug)]
pub enum End {
    /// With a reply.
    Reply(Arc<Finished>),
    /// Without one.
    Failed(ApiError),
}

/// What exists of a running turn.
#[derive(Debug, Default)]
pub struct Progress {
    /// Tokens so far.
    pub tokens: Vec<SampledToken>,
    /// Text that certainly belongs to the content.
    pub content: String,
    /// Set once, at the end.
    pub end: Option<End>,
}

/// See the module documentation.
#[derive(Debug)]
pub struct Live {
    /// Tokens from the root to where the assistant begins.
    pub prompt: Arc<[u32]>,
    progress: Mutex<Progress>,
    /// Signals changes; its receivers are the requests that wait.
    pub changed: watch::Sender<()>,
}

impl Live {
    /// A turn without tokens.
    pub fn new(prompt: Arc<[u32]>) -> Self {
        Self {
            prompt,
            progress: Mutex::default(),
            changed: watch::Sender::new(()),
        }
    }

    /// The state; never held across a wait.
    pub fn progress(&self) -> MutexGuard<'_, Progress> {
        self.progress.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Ends the turn for everyone who waits.
    pub fn finish(&self, end: End) {
        self.progress().end = Some(end);
        self.changed.send_replace(());
    }
}

/// A request's hold on its turn. Dropping it is how a client leaves.
pub struct Subscription {
    /// The turn.
    pub live: Arc<Live>,
    /// Wakes on changes.
    pub receiver: watch::Receiver<()>,
}

impl Subscription {
    /// Joins a turn.
    pub fn new(live: &Arc<Live>) -> Self {
        Self {
            receiver: live.changed.subscribe(),
            live: live.clone(),
        }
    }

    /// Waits for the end.
    pub async fn end(mut self) -> Result<Arc<Finished>, ApiError> {
        loop {
            if let Some(end) = self.live.progress().end.clone() {
                return match end {
                    End::Reply(finished) => Ok(finished),
                    End::Failed(error) => Err(error),
                };
            }
            if self.receiver.changed().await.is_err() {
                return Err(ApiError::Engine("the turn was given up".into()));
            }
        }
    }
}
