//! The APIs that agents speak. Each reads a request into one [`Ask`] and writes a reply, whole or as
//! server-sent events; everything in between is the same for all.

mod chat;
mod messages;
mod responses;

use super::{
    body::{self, Known},
    capture::{Form, Item},
    error::ApiError,
    live::{Finished, Part},
    turn::TurnSpec,
    Shared,
};
use crate::base::SampledToken;
use serde_json::Value;
use std::sync::Arc;

/// One of the APIs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Protocol {
    /// OpenAI `/v1/chat/completions`.
    Chat,
    /// Anthropic `/v1/messages`.
    Messages,
    /// OpenAI `/v1/responses`, stateless.
    Responses,
}

/// What the reply shall contain.
#[derive(Clone, Copy, Debug, Default)]
pub struct Extras {
    /// Server-sent events.
    pub stream: bool,
    /// Log-prob of every sampled token (chat).
    pub logprobs: bool,
    /// Token ids of prompt and reply (chat).
    pub token_ids: bool,
    /// A last chunk with token counts (streams of chat; all others always have them).
    pub usage: bool,
    /// No reasoning, since the request switched it off (messages).
    pub no_reasoning: bool,
    /// Reasoning items carry something to send back (responses).
    pub encrypted_reasoning: bool,
}

/// A request, read.
#[derive(Debug)]
pub struct Ask<'b> {
    /// Its messages.
    pub items: Vec<Item<'b>>,
    /// Its tools.
    pub tools: Option<Item<'b>>,
    /// What it asks of the turn.
    pub spec: TurnSpec,
    /// What it asks of the reply.
    pub extras: Extras,
}

impl Protocol {
    /// Reads a request; `known` tells which messages need not be looked at.
    pub fn read<'b>(self, body: &'b [u8], known: &mut dyn Known) -> Result<Ask<'b>, ApiError> {
        match self {
            Self::Chat => chat::read(body, known),
            Self::Messages => messages::read(body, known),
            Self::Responses => responses::read(body, known),
        }
    }

    /// The object of a reply that is not streamed.
    pub fn whole(self, reply: &Reply, finished: &Finished) -> Value {
        match self {
            Self::Chat => chat::whole(reply, finished),
            Self::Messages => messages::whole(reply, finished),
            Self::Responses => responses::whole(reply, finished),
        }
    }

    /// The events of a reply.
    pub fn encoder(self, reply: Reply) -> Box<dyn Encoder> {
        match self {
            Self::Chat => Box::new(chat::Events::new(reply)),
            Self::Messages => Box::new(messages::Events::new(reply)),
            Self::Responses => Box::new(responses::Events::new(reply)),
        }
    }
}

/// What all parts of one reply share.
pub struct Reply {
    /// Random part of its ids.
    pub id: String,
    /// Unix seconds.
    pub created: u64,
    /// The proxy.
    pub shared: Arc<Shared>,
    /// What it contains.
    pub extras: Extras,
    /// Length of the prompt.
    pub prompt_tokens: usize,
    /// The prompt's ids, if they are asked for.
    pub prompt: Option<Arc<[u32]>>,
}

/// More of a part of a reply.
#[derive(Debug)]
pub struct Delta<'p> {
    /// Number of the part.
    pub index: usize,
    /// What came; a text holds the new end only.
    pub part: Part,
    /// The part as far as it is known.
    pub whole: &'p Part,
}

/// Writes a reply as events. The calls come in this order: `begin`, any number of `update`, then `end` or
/// `error`.
pub trait Encoder: Send {
    /// Before the first token.
    fn begin(&mut self, out: &mut Vec<u8>);
    /// New parts of the reply and the tokens that came with them.
    fn update(&mut self, out: &mut Vec<u8>, deltas: &[Delta<'_>], tokens: &[SampledToken]);
    /// The end; everything else was updated before.
    fn end(&mut self, out: &mut Vec<u8>, finished: &Finished);
    /// The turn failed.
    fn error(&mut self, out: &mut Vec<u8>, error: &ApiError);
    /// What is sent in silence.
    fn ping(&self) -> &'static [u8];
}

/// One event without a name. JSON text has no line breaks, so it is always one `data` line.
fn data(out: &mut Vec<u8>, value: &Value) {
    out.extend_from_slice(b"data: ");
    out.extend_from_slice(value.to_string().as_bytes());
    out.extend_from_slice(b"\n\n");
}

/// One event that is named by its `type`.
fn event(out: &mut Vec<u8>, value: &Value) {
    out.extend_from_slice(b"event: ");
    out.extend_from_slice(value["type"].as_str().unwrap_or("message").as_bytes());
    out.push(b'\n');
    data(out, value);
}

/// The list of messages as items; `name` is the field's.
fn items<'b>(list: Option<body::List<'b>>, form: Form, name: &str) -> Result<Vec<Item<'b>>, ApiError> {
    match list {
        Some(body::List::Elements(list)) if list.is_empty() => {
            Err(ApiError::BadRequest(format!("`{name}` is empty")))
        }
        Some(body::List::Elements(list)) => Ok(list.iter().map(|e| Item { form, raw: e.raw }).collect()),
        _ => Err(ApiError::BadRequest(format!("`{name}` must be a list"))),
    }
}

/// A limit on sampled tokens from a request's field.
fn max_tokens(name: &str, value: Option<i64>) -> Result<Option<u32>, ApiError> {
    match value {
        None => Ok(None),
        Some(n) if n >= 1 => Ok(Some(u32::try_from(n).unwrap_or(u32::MAX))),
        Some(n) => Err(ApiError::BadRequest(format!(
            "`{name}` is {n}; it must be at least 1"
        ))),
    }
}
