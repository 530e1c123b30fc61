//! Anthropic messages.
//!
//! Reasoning becomes a `thinking` block with a signature (agents send it back and expect one; what comes
//! back is not read), unless the request says `thinking: {"type": "disabled"}`; text becomes `text`
//! blocks, calls `tool_use` blocks. Events: `message_start` at once, with the prompt's token count, then a
//! `ping`; blocks one after the other; `message_delta` with the stop reason and all token counts;
//! `message_stop`. In silence a `ping` is sent. A failure after the headers is an `error` event.
//!
//! `input_tokens` is the whole prompt, cached or not: it is known when the stream begins, and what of it
//! was cached is not; agents add the fields up.

use super::{event, items, max_tokens, Ask, Delta, Encoder, Extras, Reply};
use crate::{
    base::SampledToken,
    serve::proxy::{
        body::{self, Known, Names},
        capture::{Form, Item},
        error::ApiError,
        live::{Ending, Finished, Part},
        protocol::Protocol,
        turn::TurnSpec,
    },
};
use serde::Deserialize;
use serde_json::{json, Value};

const NAMES: Names = Names {
    list: "messages",
    head: Some("system"),
};

/// Fields that the proxy reads; others are accepted and ignored.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Fields {
    stream: Option<bool>,
    max_tokens: Option<i64>,
    stop_sequences: Option<Vec<String>>,
    tool_choice: Option<Value>,
    thinking: Option<Value>,
}

/// Reads a request.
pub(super) fn read<'b>(body: &'b [u8], known: &mut dyn Known) -> Result<Ask<'b>, ApiError> {
    let parts = body::take_apart(body, NAMES, known)?;
    let fields: Fields = parts.fields()?;
    let tools = parts.tools.map(|raw| Item {
        form: Form::Anthropic,
        raw,
    });
    let no_calls = fields.tool_choice.is_some_and(|choice| choice["type"] == "none");
    let head = parts.head.map(|raw| Item {
        form: Form::AnthropicSystem,
        raw,
    });
    let mut stop = fields.stop_sequences.unwrap_or_default();
    stop.retain(|text| !text.is_empty());
    Ok(Ask {
        items: head
            .into_iter()
            .chain(items(parts.list, Form::Anthropic, "messages")?)
            .collect(),
        spec: TurnSpec {
            max_tokens: max_tokens("max_tokens", fields.max_tokens)?,
            stop,
            parse_tools: tools.is_some() && !no_calls,
            echo_prompt: false,
            call_prefix: "toolu_",
            schema: None,
        },
        tools,
        extras: Extras {
            stream: fields.stream.unwrap_or(false),
            no_reasoning: fields
                .thinking
                .is_some_and(|thinking| thinking["type"] == "disabled"),
            ..Extras::default()
        },
    })
}

fn stop_reason(finished: &Finished) -> (Value, Value) {
    let (reason, text) = match &finished.ending {
        Ending::Stop => ("end_turn", Value::Null),
        Ending::StopText(text) => ("stop_sequence", json!(text)),
        Ending::Length => ("max_tokens", Value::Null),
        Ending::ToolCalls => ("tool_use", Value::Null),
    };
    (json!(reason), text)
}

fn usage(prompt_tokens: usize, output_tokens: usize) -> Value {
    json!({"input_tokens": prompt_tokens, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 0,
           "output_tokens": output_tokens})
}

/// Stands where the API has a signature of the thoughts. Not a proof of anything.
fn signature(reply: &Reply, index: usize) -> String {
    format!("legorl.{}.{index}", reply.id)
}

/// Arguments as an object. What a parser let pass is one.
fn input(arguments: &str) -> Value {
    serde_json::from_str(arguments).unwrap_or_else(|_| json!({}))
}

/// The object of a reply that is not streamed.
pub(super) fn whole(reply: &Reply, finished: &Finished) -> Value {
    let mut content = Vec::new();
    for (index, part) in finished.parts.iter().enumerate() {
        match part {
            Part::Reasoning(_) if reply.extras.no_reasoning => {}
            Part::Reasoning(text) => content
                .push(json!({"type": "thinking", "thinking": text, "signature": signature(reply, index)})),
            Part::Text(text) => content.push(json!({"type": "text", "text": text})),
            Part::Call(id, call) => content.push(
                json!({"type": "tool_use", "id": id, "name": call.name, "input": input(&call.arguments)}),
            ),
        }
    }
    if content.is_empty() {
        content.push(json!({"type": "text", "text": ""}));
    }
    let (reason, text) = stop_reason(finished);
    json!({"id": format!("msg_{}", reply.id), "type": "message", "role": "assistant",
           "model": reply.shared.model, "content": content, "stop_reason": reason, "stop_sequence": text,
           "usage": usage(finished.prompt_tokens, finished.tokens.len())})
}

/// See the module documentation.
pub(super) struct Events {
    reply: Reply,
    /// The part whose block is open, and the block's number.
    open: Option<(usize, bool)>,
    blocks: usize,
}

impl Events {
    pub(super) fn new(reply: Reply) -> Self {
        Self {
            reply,
            open: None,
            blocks: 0,
        }
    }

    fn start(&mut self, out: &mut Vec<u8>, block: Value) {
        event(
            out,
            &json!({"type": "content_block_start", "index": self.blocks, "content_block": block}),
        );
    }

    fn delta(&mut self, out: &mut Vec<u8>, delta: Value) {
        event(
            out,
            &json!({"type": "content_block_delta", "index": self.blocks, "delta": delta}),
        );
    }

    fn stop(&mut self, out: &mut Vec<u8>) {
        event(out, &json!({"type": "content_block_stop", "index": self.blocks}));
        self.blocks += 1;
    }

    fn close(&mut self, out: &mut Vec<u8>) {
        if let Some((index, thinking)) = self.open.take() {
            if thinking {
                let signature = signature(&self.reply, index);
                self.delta(out, json!({"type": "signature_delta", "signature": signature}));
            }
            self.stop(out);
        }
    }
}

impl Encoder for Events {
    fn begin(&mut self, out: &mut Vec<u8>) {
        event(
            out,
            &json!({"type": "message_start", "message": {
                "id": format!("msg_{}", self.reply.id), "type": "message", "role": "assistant",
                "model": self.reply.shared.model, "content": [], "stop_reason": null, "stop_sequence": null,
                "usage": usage(self.reply.prompt_tokens, 1)}}),
        );
        out.extend_from_slice(self.ping());
    }

    fn update(&mut self, out: &mut Vec<u8>, deltas: &[Delta<'_>], _: &[SampledToken]) {
        for delta in deltas {
            if self.open.is_some_and(|(index, _)| index != delta.index) {
                self.close(out);
            }
            let begins = self.open.is_none();
            match &delta.part {
                Part::Reasoning(_) if self.reply.extras.no_reasoning => {}
                Part::Reasoning(text) => {
                    if begins {
                        self.start(out, json!({"type": "thinking", "thinking": "", "signature": ""}));
                        self.open = Some((delta.index, true));
                    }
                    self.delta(out, json!({"type": "thinking_delta", "thinking": text}));
                }
                Part::Text(text) => {
                    if begins {
                        self.start(out, json!({"type": "text", "text": ""}));
                        self.open = Some((delta.index, false));
                    }
                    self.delta(out, json!({"type": "text_delta", "text": text}));
                }
                Part::Call(id, call) => {
                    self.start(
                        out,
                        json!({"type": "tool_use", "id": id, "name": call.name, "input": {}}),
                    );
                    self.delta(
                        out,
                        json!({"type": "input_json_delta", "partial_json": call.arguments}),
                    );
                    self.stop(out);
                }
            }
        }
    }

    fn end(&mut self, out: &mut Vec<u8>, finished: &Finished) {
        self.close(out);
        if self.blocks == 0 {
            self.start(out, json!({"type": "text", "text": ""}));
            self.stop(out);
        }
        let (reason, text) = stop_reason(finished);
        event(
            out,
            &json!({"type": "message_delta", "delta": {"stop_reason": reason, "stop_sequence": text},
                    "usage": usage(finished.prompt_tokens, finished.tokens.len())}),
        );
        event(out, &json!({"type": "message_stop"}));
    }

    fn error(&mut self, out: &mut Vec<u8>, error: &ApiError) {
        event(out, &error.body(Protocol::Messages));
    }

    fn ping(&self) -> &'static [u8] {
        b"event: ping\ndata: {\"type\": \"ping\"}\n\n"
    }
}
