//! One turn while it is generated, and what remains of it: shared by the task that drives it and by every
//! request that waits for it.
//!
//! Each waiting request holds a receiver of [`Live::changed`]. When the last one is gone (the client went
//! away), the sender's `closed` resolves and the driver cancels the generation.

use super::error::ApiError;
use crate::{
    base::SampledToken,
    model::tool_calls::{Piece, ToolCall},
};
use serde_json::{json, Value};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tokio::sync::watch;

/// A part of a reply, in order; neighbours differ in kind.
#[derive(Clone, Debug, PartialEq)]
pub enum Part {
    /// Thoughts.
    Reasoning(String),
    /// Text.
    Text(String),
    /// A tool call with its id.
    Call(String, ToolCall),
}

/// Adds a piece to the parts; `id` makes ids of calls.
pub fn add(parts: &mut Vec<Part>, piece: Piece, id: impl FnOnce(usize) -> String) {
    match (parts.last_mut(), piece) {
        (Some(Part::Reasoning(text)), Piece::Reasoning(more)) => text.push_str(&more),
        (Some(Part::Text(text)), Piece::Text(more)) => text.push_str(&more),
        (_, Piece::Reasoning(text)) => parts.push(Part::Reasoning(text)),
        (_, Piece::Text(text)) => parts.push(Part::Text(text)),
        (_, Piece::Call(call)) => {
            let number = parts.iter().filter(|p| matches!(p, Part::Call(..))).count();
            parts.push(Part::Call(id(number), call));
        }
    }
}

/// Why a reply ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Ending {
    /// The model ended its turn.
    Stop,
    /// One of the request's stop texts.
    StopText(String),
    /// The limit on tokens.
    Length,
    /// It ends with tool calls.
    ToolCalls,
}

/// A finished reply.
#[derive(Debug)]
pub struct Finished {
    /// What it says.
    pub parts: Vec<Part>,
    /// Why it ended.
    pub ending: Ending,
    /// Sampled tokens.
    pub tokens: Arc<[SampledToken]>,
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Of these, taken from the cache.
    pub cached_tokens: u32,
    /// Tokens sampled inside of reasoning, as far as it is told apart.
    pub reasoning_tokens: usize,
}

impl Finished {
    /// A reply of the proxy itself.
    pub fn notice(text: &str) -> Self {
        Self {
            parts: vec![Part::Text(text.to_owned())],
            ending: Ending::Stop,
            tokens: Arc::new([]),
            prompt_tokens: 0,
            cached_tokens: 0,
            reasoning_tokens: 0,
        }
    }

    /// The text, without reasoning and calls.
    pub fn text(&self) -> String {
        let texts = self.parts.iter().filter_map(|part| match part {
            Part::Text(text) => Some(text.as_str()),
            _ => None,
        });
        texts.collect()
    }

    /// The reasoning.
    pub fn reasoning(&self) -> String {
        let texts = self.parts.iter().filter_map(|part| match part {
            Part::Reasoning(text) => Some(text.as_str()),
            _ => None,
        });
        texts.collect()
    }

    /// The calls with their ids.
    pub fn calls(&self) -> impl Iterator<Item = (&str, &ToolCall)> {
        self.parts.iter().filter_map(|part| match part {
            Part::Call(id, call) => Some((id.as_str(), call)),
            _ => None,
        })
    }

    /// The reply as a message of chat completions.
    pub fn message(&self) -> Value {
        let (text, reasoning) = (self.text(), self.reasoning());
        let calls: Vec<Value> = self.calls().map(|(id, call)| tool_call(id, call)).collect();
        let content = if text.is_empty() && !calls.is_empty() {
            Value::Null
        } else {
            Value::String(text)
        };
        let mut message = json!({"role": "assistant", "content": content});
        if !reasoning.is_empty() {
            message["reasoning_content"] = json!(reasoning);
        }
        if !calls.is_empty() {
            message["tool_calls"] = Value::Array(calls);
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
    /// Without one; nothing of it is recorded.
    Failed(ApiError),
}

/// What is known of a running turn.
#[derive(Debug, Default)]
pub struct Progress {
    /// Sampled so far.
    pub tokens: Vec<SampledToken>,
    /// What is certain of the reply.
    pub parts: Vec<Part>,
    /// Set once.
    pub end: Option<End>,
}

/// A running turn.
pub struct Live {
    /// Its prompt.
    pub prompt: Arc<[u32]>,
    progress: Mutex<Progress>,
    /// Wakes who waits; the driver watches for the last receiver to go.
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
