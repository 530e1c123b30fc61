//! OpenAI responses, stateless: nothing is stored under a response's id, so `previous_response_id` is
//! refused and the agent sends its whole input.
//!
//! Each part of a reply is an output item: reasoning with a summary, a message, a function call. Events
//! are numbered; each item is added, filled and done before the next; the last event is
//! `response.completed`, or `response.incomplete` for a reply cut off by length. In silence a comment is
//! sent. A failure after the headers is `response.failed`.

use super::{event, max_tokens, Ask, Delta, Encoder, Extras, Reply};
use crate::{
    base::SampledToken,
    serve::proxy::{
        body::{self, Element, Known, List, Names},
        capture::{is_reply_item, Form, Item},
        error::ApiError,
        live::{Ending, Finished, Part},
        turn::TurnSpec,
    },
};
use serde::Deserialize;
use serde_json::{json, Value};

const NAMES: Names = Names {
    list: "input",
    head: Some("instructions"),
};

/// Fields that the proxy reads; others are accepted and ignored.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Fields {
    stream: Option<bool>,
    max_output_tokens: Option<i64>,
    previous_response_id: Option<String>,
    background: Option<bool>,
    tool_choice: Option<Value>,
    include: Option<Vec<String>>,
}

/// Reads a request.
pub(super) fn read<'b>(body: &'b [u8], known: &mut dyn Known) -> Result<Ask<'b>, ApiError> {
    let parts = body::take_apart(body, NAMES, known)?;
    let fields: Fields = parts.fields()?;
    if let Some(id) = fields.previous_response_id {
        return Err(ApiError::BadRequest(format!(
            "`previous_response_id` is `{id}`; responses are not stored, so send the whole input"
        )));
    }
    if fields.background == Some(true) {
        return Err(ApiError::BadRequest(
            "`background` is not served; leave it out".into(),
        ));
    }
    let tools = parts.tools.map(|raw| Item {
        form: Form::Responses,
        raw,
    });
    let no_calls = fields.tool_choice.is_some_and(|choice| choice == "none");
    let head = parts.head.map(|raw| Item {
        form: Form::Instructions,
        raw,
    });
    let encrypted = |list: Vec<String>| list.iter().any(|name| name == "reasoning.encrypted_content");
    Ok(Ask {
        items: head.into_iter().chain(input(body, parts.list)?).collect(),
        spec: TurnSpec {
            max_tokens: max_tokens("max_output_tokens", fields.max_output_tokens)?,
            stop: Vec::new(),
            parse_tools: tools.is_some() && !no_calls,
            echo_prompt: false,
            call_prefix: "call_",
            schema: None,
        },
        tools,
        extras: Extras {
            stream: fields.stream.unwrap_or(false),
            encrypted_reasoning: fields.include.is_some_and(encrypted),
            ..Extras::default()
        },
    })
}

/// Input items, those of one reply joined to one.
fn input<'b>(body: &'b [u8], list: Option<List<'b>>) -> Result<Vec<Item<'b>>, ApiError> {
    let form = Form::Responses;
    let elements = match list {
        Some(List::Value(raw)) if raw.starts_with(b"\"") => return Ok(vec![Item { form, raw }]),
        Some(List::Elements(list)) if list.is_empty() => {
            return Err(ApiError::BadRequest("`input` is empty".into()))
        }
        Some(List::Elements(list)) => list,
        _ => return Err(ApiError::BadRequest("`input` must be a text or a list".into())),
    };
    let place = |raw: &[u8]| raw.as_ptr() as usize - body.as_ptr() as usize;
    let mut items: Vec<Item<'b>> = Vec::with_capacity(elements.len());
    let mut joins = false;
    for Element { raw, known } in elements {
        let of_reply = !known && is_reply_item(raw);
        match items.last_mut() {
            Some(last) if joins && of_reply => {
                last.raw = &body[place(last.raw)..place(raw) + raw.len()];
            }
            _ => items.push(Item { form, raw }),
        }
        joins = of_reply;
    }
    Ok(items)
}

fn usage(finished: &Finished) -> Value {
    let sampled = finished.tokens.len();
    json!({
        "input_tokens": finished.prompt_tokens, "output_tokens": sampled,
        "total_tokens": finished.prompt_tokens + sampled,
        "input_tokens_details": {"cached_tokens": finished.cached_tokens},
        "output_tokens_details": {"reasoning_tokens": finished.reasoning_tokens},
    })
}

/// An output item.
fn item(reply: &Reply, index: usize, part: &Part, status: &str) -> Value {
    let id = |prefix: &str| format!("{prefix}_{}{index:02}", reply.id);
    match part {
        Part::Reasoning(text) => {
            let mut item = json!({"type": "reasoning", "id": id("rs"), "status": status,
                                  "summary": [{"type": "summary_text", "text": text}]});
            if reply.extras.encrypted_reasoning {
                // The API wants something to send back; what comes back is not read.
                item["encrypted_content"] = json!(id("legorl"));
            }
            item
        }
        Part::Text(text) => json!({"type": "message", "id": id("msg"), "status": status, "role": "assistant",
            "content": [{"type": "output_text", "text": text, "annotations": [], "logprobs": []}]}),
        Part::Call(call_id, call) => json!({"type": "function_call", "id": id("fc"), "status": status,
            "call_id": call_id, "name": call.name, "arguments": call.arguments}),
    }
}

fn object(reply: &Reply, status: &str, output: Vec<Value>, usage: Value) -> Value {
    json!({
        "id": format!("resp_{}", reply.id), "object": "response", "created_at": reply.created,
        "status": status, "error": null,
        "incomplete_details": if status == "incomplete" { json!({"reason": "max_output_tokens"}) } else { Value::Null },
        "instructions": null, "max_output_tokens": null, "model": reply.shared.model, "output": output,
        "parallel_tool_calls": true, "previous_response_id": null, "reasoning": {"effort": null, "summary": null},
        "store": false, "temperature": null, "text": {"format": {"type": "text"}}, "tool_choice": "auto",
        "tools": [], "top_p": null, "truncation": "disabled", "usage": usage, "metadata": {},
    })
}

fn status(finished: &Finished) -> &'static str {
    match finished.ending {
        Ending::Length => "incomplete",
        _ => "completed",
    }
}

/// The object of a reply that is not streamed.
pub(super) fn whole(reply: &Reply, finished: &Finished) -> Value {
    let output = finished.parts.iter().enumerate();
    let output = output.map(|(index, part)| item(reply, index, part, "completed"));
    object(reply, status(finished), output.collect(), usage(finished))
}

/// See the module documentation.
pub(super) struct Events {
    reply: Reply,
    number: u64,
    /// The item that is not done.
    open: Option<(usize, Part)>,
}

impl Events {
    pub(super) fn new(reply: Reply) -> Self {
        Self {
            reply,
            number: 0,
            open: None,
        }
    }

    fn send(&mut self, out: &mut Vec<u8>, mut value: Value) {
        value["sequence_number"] = json!(self.number);
        self.number += 1;
        event(out, &value);
    }

    fn added(&mut self, out: &mut Vec<u8>, index: usize, part: &Part) {
        let empty = match part {
            Part::Reasoning(_) => Part::Reasoning(String::new()),
            Part::Text(_) => Part::Text(String::new()),
            Part::Call(id, call) => {
                let mut call = call.clone();
                call.arguments.clear();
                Part::Call(id.clone(), call)
            }
        };
        let mut item = item(&self.reply, index, &empty, "in_progress");
        let id = item["id"].clone();
        for key in ["content", "summary"] {
            if item[key].is_array() {
                item[key] = json!([]);
            }
        }
        self.send(
            out,
            json!({"type": "response.output_item.added", "output_index": index, "item": item}),
        );
        match part {
            Part::Reasoning(_) => self.send(out, json!({"type": "response.reasoning_summary_part.added",
                "item_id": id, "output_index": index, "summary_index": 0, "part": {"type": "summary_text", "text": ""}})),
            Part::Text(_) => self.send(out, json!({"type": "response.content_part.added", "item_id": id,
                "output_index": index, "content_index": 0,
                "part": {"type": "output_text", "text": "", "annotations": [], "logprobs": []}})),
            Part::Call(..) => {}
        }
    }

    fn close(&mut self, out: &mut Vec<u8>) {
        let Some((index, part)) = self.open.take() else {
            return;
        };
        let item = item(&self.reply, index, &part, "completed");
        let id = &item["id"];
        match &part {
            Part::Reasoning(text) => {
                self.send(
                    out,
                    json!({"type": "response.reasoning_summary_text.done", "item_id": id,
                                      "output_index": index, "summary_index": 0, "text": text}),
                );
                self.send(
                    out,
                    json!({"type": "response.reasoning_summary_part.done", "item_id": id,
                    "output_index": index, "summary_index": 0, "part": item["summary"][0]}),
                );
            }
            Part::Text(text) => {
                self.send(
                    out,
                    json!({"type": "response.output_text.done", "item_id": id, "output_index": index,
                                      "content_index": 0, "text": text, "logprobs": []}),
                );
                self.send(
                    out,
                    json!({"type": "response.content_part.done", "item_id": id, "output_index": index,
                                      "content_index": 0, "part": item["content"][0]}),
                );
            }
            Part::Call(_, call) => {
                self.send(
                    out,
                    json!({"type": "response.function_call_arguments.done", "item_id": id,
                    "output_index": index, "name": call.name, "arguments": call.arguments}),
                );
            }
        }
        self.send(
            out,
            json!({"type": "response.output_item.done", "output_index": index, "item": item}),
        );
    }
}

impl Encoder for Events {
    fn begin(&mut self, out: &mut Vec<u8>) {
        for kind in ["response.created", "response.in_progress"] {
            let response = object(&self.reply, "in_progress", Vec::new(), Value::Null);
            self.send(out, json!({"type": kind, "response": response}));
        }
    }

    fn update(&mut self, out: &mut Vec<u8>, deltas: &[Delta<'_>], _: &[SampledToken]) {
        for delta in deltas {
            if self.open.as_ref().is_some_and(|(index, _)| *index != delta.index) {
                self.close(out);
            }
            if self.open.is_none() {
                self.added(out, delta.index, &delta.part);
            }
            self.open = Some((delta.index, delta.whole.clone()));
            let id = item(&self.reply, delta.index, &delta.part, "in_progress")["id"].take();
            let index = delta.index;
            match &delta.part {
                Part::Reasoning(text) => self.send(
                    out,
                    json!({"type": "response.reasoning_summary_text.delta",
                    "item_id": id, "output_index": index, "summary_index": 0, "delta": text}),
                ),
                Part::Text(text) => self.send(
                    out,
                    json!({"type": "response.output_text.delta", "item_id": id,
                    "output_index": index, "content_index": 0, "delta": text, "logprobs": []}),
                ),
                Part::Call(_, call) => self.send(
                    out,
                    json!({"type": "response.function_call_arguments.delta",
                    "item_id": id, "output_index": index, "delta": call.arguments}),
                ),
            }
        }
    }

    fn end(&mut self, out: &mut Vec<u8>, finished: &Finished) {
        self.close(out);
        let kind = format!("response.{}", status(finished));
        let response = whole(&self.reply, finished);
        self.send(out, json!({"type": kind, "response": response}));
    }

    fn error(&mut self, out: &mut Vec<u8>, error: &ApiError) {
        let mut response = object(&self.reply, "failed", Vec::new(), Value::Null);
        response["error"] = json!({"code": "server_error", "message": error.to_string()});
        self.send(out, json!({"type": "response.failed", "response": response}));
    }

    fn ping(&self) -> &'static [u8] {
        b": waiting\n\n"
    }
}
