//! OpenAI chat completions.
//!
//! Events: a chunk with the role at once; reasoning and content as they become certain; tool calls, each
//! whole when it is complete; a chunk with the finish reason; the usage, if asked for; `[DONE]`. In silence
//! a comment is sent. A failure after the headers is an event with the error object, and no `[DONE]`.
//!
//! `return_token_ids` adds `prompt_token_ids` and the choice's `token_ids`, as vLLM does.

use super::{data, items, max_tokens, Ask, Delta, Encoder, Extras, Reply};
use crate::{
    base::SampledToken,
    model::tokenizer::Tokenizer,
    serve::proxy::{
        body::{self, Known, Names},
        capture::{Form, Item},
        error::ApiError,
        live::{tool_call, Ending, Finished, Part},
        protocol::Protocol,
        turn::TurnSpec,
    },
};
use serde::Deserialize;
use serde_json::{json, Value};

const NAMES: Names = Names {
    list: "messages",
    head: None,
};

/// Fields that the proxy reads; others are accepted and ignored.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Fields {
    n: Option<u32>,
    stream: Option<bool>,
    stream_options: Option<StreamOptions>,
    /// Older name of `max_completion_tokens`.
    max_tokens: Option<i64>,
    max_completion_tokens: Option<i64>,
    stop: Option<Stop>,
    logprobs: Option<bool>,
    return_token_ids: Option<bool>,
    /// `"none"`: the reply is text even if it looks like a tool call.
    tool_choice: Option<Value>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct StreamOptions {
    include_usage: Option<bool>,
}

#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum Stop {
    One(String),
    Many(Vec<String>),
}

impl Stop {
    fn texts(self) -> Vec<String> {
        let texts = match self {
            Self::One(text) => vec![text],
            Self::Many(texts) => texts,
        };
        texts.into_iter().filter(|t| !t.is_empty()).collect()
    }
}

/// Reads a request.
pub(super) fn read<'b>(body: &'b [u8], known: &mut dyn Known) -> Result<Ask<'b>, ApiError> {
    let parts = body::take_apart(body, NAMES, known)?;
    let fields: Fields = parts.fields()?;
    if let Some(n) = fields.n.filter(|n| *n != 1) {
        return Err(ApiError::BadRequest(format!(
            "`n` is {n}; only one reply is served"
        )));
    }
    let tools = parts.tools.map(|raw| Item {
        form: Form::Chat,
        raw,
    });
    let no_calls = fields.tool_choice.is_some_and(|choice| choice == "none");
    let extras = Extras {
        stream: fields.stream.unwrap_or(false),
        logprobs: fields.logprobs.unwrap_or(false),
        token_ids: fields.return_token_ids.unwrap_or(false),
        usage: fields
            .stream_options
            .and_then(|o| o.include_usage)
            .unwrap_or(false),
        ..Extras::default()
    };
    Ok(Ask {
        items: items(parts.list, Form::Chat, "messages")?,
        spec: TurnSpec {
            max_tokens: max_tokens("max_tokens", fields.max_completion_tokens.or(fields.max_tokens))?,
            stop: fields.stop.map(Stop::texts).unwrap_or_default(),
            parse_tools: tools.is_some() && !no_calls,
            echo_prompt: extras.token_ids,
            call_prefix: "call_",
            schema: None,
        },
        tools,
        extras,
    })
}

fn finish_reason(finished: &Finished) -> &'static str {
    match finished.ending {
        Ending::Stop | Ending::StopText(_) => "stop",
        Ending::Length => "length",
        Ending::ToolCalls => "tool_calls",
    }
}

/// The object of a reply that is not streamed.
pub(super) fn whole(reply: &Reply, finished: &Finished) -> Value {
    let mut choice = json!({"index": 0, "message": finished.message(),
                            "finish_reason": finish_reason(finished), "logprobs": null});
    add_tokens(reply, &mut choice, &finished.tokens);
    let mut whole = json!({
        "id": format!("chatcmpl-{}", reply.id), "object": "chat.completion", "created": reply.created,
        "model": reply.shared.model, "choices": [choice], "usage": usage(finished),
    });
    if let Some(prompt) = &reply.prompt {
        whole["prompt_token_ids"] = json!(prompt[..]);
    }
    whole
}

/// Puts log-probs and ids of tokens into a choice, as far as they are asked for.
fn add_tokens(reply: &Reply, choice: &mut Value, tokens: &[SampledToken]) {
    if reply.extras.logprobs {
        choice["logprobs"] = logprobs(reply.shared.renderer.tokenizer(), tokens);
    }
    if reply.extras.token_ids {
        choice["token_ids"] = tokens.iter().map(|t| t.id).collect();
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
fn usage(finished: &Finished) -> Value {
    let sampled = finished.tokens.len();
    json!({
        "prompt_tokens": finished.prompt_tokens, "completion_tokens": sampled,
        "total_tokens": finished.prompt_tokens + sampled,
        "prompt_tokens_details": {"cached_tokens": finished.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": finished.reasoning_tokens},
    })
}

/// See the module documentation.
pub(super) struct Events {
    reply: Reply,
    calls: usize,
}

impl Events {
    pub(super) fn new(reply: Reply) -> Self {
        Self { reply, calls: 0 }
    }

    fn chunk(&self, delta: Value, finish_reason: Value) -> Value {
        json!({
            "id": format!("chatcmpl-{}", self.reply.id), "object": "chat.completion.chunk",
            "created": self.reply.created, "model": self.reply.shared.model,
            "choices": [{"index": 0, "delta": delta, "finish_reason": finish_reason, "logprobs": null}],
        })
    }
}

impl Encoder for Events {
    fn begin(&mut self, out: &mut Vec<u8>) {
        let mut chunk = self.chunk(json!({"role": "assistant", "content": ""}), Value::Null);
        if let Some(prompt) = &self.reply.prompt {
            chunk["prompt_token_ids"] = json!(prompt[..]);
        }
        data(out, &chunk);
    }

    fn update(&mut self, out: &mut Vec<u8>, deltas: &[Delta<'_>], tokens: &[SampledToken]) {
        let asked = self.reply.extras.logprobs || self.reply.extras.token_ids;
        let mut chunks: Vec<Value> = Vec::new();
        for delta in deltas {
            let delta = match &delta.part {
                Part::Reasoning(text) => json!({"reasoning_content": text}),
                Part::Text(text) => json!({"content": text}),
                Part::Call(id, call) => {
                    let mut call = tool_call(id, call);
                    call["index"] = json!(self.calls);
                    self.calls += 1;
                    json!({"tool_calls": [call]})
                }
            };
            chunks.push(self.chunk(delta, Value::Null));
        }
        if asked && !tokens.is_empty() {
            if chunks.is_empty() {
                chunks.push(self.chunk(json!({"content": ""}), Value::Null));
            }
            add_tokens(&self.reply, &mut chunks[0]["choices"][0], tokens);
        }
        for chunk in &chunks {
            data(out, chunk);
        }
    }

    fn end(&mut self, out: &mut Vec<u8>, finished: &Finished) {
        data(out, &self.chunk(json!({}), json!(finish_reason(finished))));
        if self.reply.extras.usage {
            let mut chunk = self.chunk(json!({}), Value::Null);
            chunk["choices"] = json!([]);
            chunk["usage"] = usage(finished);
            data(out, &chunk);
        }
        out.extend_from_slice(b"data: [DONE]\n\n");
    }

    fn error(&mut self, out: &mut Vec<u8>, error: &ApiError) {
        data(out, &error.body(Protocol::Chat));
    }

    fn ping(&self) -> &'static [u8] {
        b": waiting\n\n"
    }
}
