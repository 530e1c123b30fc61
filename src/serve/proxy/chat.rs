//! `/v1/chat/completions`: from the request's bytes to a turn, and its reply in one piece.

use super::{
    body::{self, Stop},
    error::ApiError,
    live::{tool_call, Finished, Subscription},
    session::{Session, Started, TURN_LIMIT_NOTICE},
    stream,
    turn::TurnSpec,
    Shared,
};
use crate::{base::SampledToken, model::tokenizer::Tokenizer};
use axum::{
    body::{Body, Bytes},
    http::{header, HeaderValue},
    response::Response,
};
use serde_json::{json, Value};
use std::sync::{atomic::Ordering, Arc};

/// New bytes of a body up to which it is handled on the runtime's threads; more may take long to encode.
const INLINE_NEW_BYTES: usize = 128 << 10;

/// What the reply shall contain.
#[derive(Clone, Copy, Debug, Default)]
pub struct Extras {
    /// Server-sent events.
    pub stream: bool,
    /// Log-prob of every sampled token.
    pub logprobs: bool,
    /// Token ids of prompt and reply.
    pub token_ids: bool,
    /// A last chunk with token counts (streams; whole replies always have them).
    pub usage: bool,
}

/// Where a reply comes from.
pub enum Source {
    /// A running turn.
    Live(Subscription),
    /// The record.
    Done(Arc<Finished>),
}

/// What all parts of one reply share.
pub struct Reply {
    /// `chatcmpl-…`.
    pub id: String,
    /// Unix seconds.
    pub created: u64,
    /// The proxy.
    pub shared: Arc<Shared>,
    /// What it contains.
    pub extras: Extras,
    /// The prompt's ids, if they are asked for.
    pub prompt: Option<Arc<[u32]>>,
}

/// Serves one request.
pub async fn completions(
    shared: Arc<Shared>,
    session: Arc<Session>,
    body: Bytes,
) -> Result<Response, ApiError> {
    session.check_open()?;
    let seen = session.seen_bytes.fetch_max(body.len(), Ordering::Relaxed);
    let heavy = body.len().saturating_sub(seen) > INLINE_NEW_BYTES;
    let (owner, proxy) = (session.clone(), shared.clone());
    let begun = session.with_state(heavy, move |state| -> Result<(Started, Extras), ApiError> {
        let split = body::split(&body)?;
        let (request, extras) = read_fields(split.fields, split.tools)?;
        let tools = split.tools.filter(|raw| *raw != b"[]");
        let started = owner.begin(state, &proxy, request, &split.messages, tools);
        match started {
            Ok(started) => Ok((started, extras)),
            // A value that was skipped may not be JSON: say where it is in the body.
            Err(ApiError::BadRequest(text)) => Err(body::locate(&body, &text)),
            Err(error) => Err(error),
        }
    });
    let (started, extras) = begun.await??;
    let (source, prompt) = match started {
        Started::Running(subscription) => {
            let prompt = subscription.live.prompt.clone();
            (Source::Live(subscription), Some(prompt))
        }
        Started::Answered { finished, prompt } => (Source::Done(finished), prompt),
        Started::TurnLimit => (Source::Done(notice()), None),
    };
    let reply = Reply {
        id: format!("chatcmpl-{}", super::random_hex(12)),
        created: std::time::SystemTime::now()
            .duration_since(std::time::UNIX_EPOCH)
            .map_or(0, |d| d.as_secs()),
        shared,
        prompt: prompt.filter(|_| extras.token_ids),
        extras,
    };
    if extras.stream {
        return Ok(stream::response(reply, source));
    }
    let finished = match source {
        Source::Done(finished) => finished,
        Source::Live(subscription) => subscription.end().await?,
    };
    let mut response = Response::new(Body::from(reply.whole(&finished).to_string()));
    let json = HeaderValue::from_static("application/json");
    response.headers_mut().insert(header::CONTENT_TYPE, json);
    Ok(response)
}

fn read_fields(fields: body::Fields, tools: Option<&[u8]>) -> Result<(TurnSpec, Extras), ApiError> {
    if let Some(n) = fields.n.filter(|n| *n != 1) {
        return Err(ApiError::BadRequest(format!(
            "`n` is {n}; only one reply is served"
        )));
    }
    let max_tokens = match fields.max_completion_tokens.or(fields.max_tokens) {
        None => None,
        Some(n) if n >= 1 => Some(u32::try_from(n).unwrap_or(u32::MAX)),
        Some(n) => {
            return Err(ApiError::BadRequest(format!(
                "`max_tokens` is {n}; it must be at least 1"
            )))
        }
    };
    let no_calls = fields.tool_choice.is_some_and(|choice| choice == "none");
    let tools = tools.filter(|raw| *raw != b"[]");
    let extras = Extras {
        stream: fields.stream.unwrap_or(false),
        logprobs: fields.logprobs.unwrap_or(false),
        token_ids: fields.return_token_ids.unwrap_or(false),
        usage: fields
            .stream_options
            .and_then(|o| o.include_usage)
            .unwrap_or(false),
    };
    let spec = TurnSpec {
        max_tokens,
        stop: fields.stop.map(Stop::texts).unwrap_or_default(),
        parse_tools: tools.is_some() && !no_calls,
        echo_prompt: extras.token_ids,
        tools: tools.map(<[u8]>::to_vec),
    };
    Ok((spec, extras))
}

/// The clean ending of a session whose turns are used up: agents stop at a reply without tool calls.
fn notice() -> Arc<Finished> {
    Arc::new(Finished {
        content: TURN_LIMIT_NOTICE.into(),
        calls: Vec::new(),
        finish_reason: "stop",
        tokens: Vec::new(),
        prompt_tokens: 0,
        cached_tokens: 0,
    })
}

impl Reply {
    /// The object of a reply that is not streamed.
    fn whole(&self, finished: &Finished) -> Value {
        let calls = finished.calls.iter().map(|(id, call)| tool_call(id, call));
        let calls: Vec<Value> = calls.collect();
        let content = if finished.content.is_empty() && !calls.is_empty() {
            Value::Null
        } else {
            json!(finished.content)
        };
        let mut message = json!({"role": "assistant", "content": content});
        if !calls.is_empty() {
            message["tool_calls"] = json!(calls);
        }
        let mut choice = json!({"index": 0, "message": message, "finish_reason": finished.finish_reason,
                                "logprobs": null});
        self.add_tokens(&mut choice, &finished.tokens);
        let mut whole = json!({
            "id": self.id, "object": "chat.completion", "created": self.created,
            "model": self.shared.model, "choices": [choice], "usage": usage(finished),
        });
        if let Some(prompt) = &self.prompt {
            whole["prompt_token_ids"] = json!(prompt[..]);
        }
        whole
    }

    /// Puts log-probs and ids of tokens into a choice, as far as they are asked for.
    pub fn add_tokens(&self, choice: &mut Value, tokens: &[SampledToken]) {
        if self.extras.logprobs {
            choice["logprobs"] = logprobs(self.shared.renderer.tokenizer(), tokens);
        }
        if self.extras.token_ids {
            choice["token_ids"] = tokens.iter().map(|t| t.id).collect();
        }
    }
}

/// OpenAI's `logprobs` object; alternatives are not recorded.
fn logprobs(tokenizer: &Tokenizer, tokens: &[SampledToken]) -> Value {
    let entry = |t: &SampledToken| {
        json!({"token": tokenizer.decode_with_special(&[t.id]), "logprob": t.logprob,
               "bytes": tokenizer.token_bytes(t.id), "top_logprobs": []})
    };
    json!({"content": tokens.iter().map(entry).collect::<Vec<_>>(), "refusal": null})
}

/// OpenAI's `usage` object.
pub fn usage(finished: &Finished) -> Value {
    let sampled = finished.tokens.len();
    json!({
        "prompt_tokens": finished.prompt_tokens, "completion_tokens": sampled,
        "total_tokens": finished.prompt_tokens + sampled,
        "prompt_tokens_details": {"cached_tokens": finished.cached_tokens},
    })
}
