//! Random requests through parsing, rendering and the tree, and random replies through the event writers.
//! `LEGORL_FUZZ_CASES` sets the number of inputs; a long run takes a million.

use super::*;
use crate::{
    model::tool_calls::{Piece, ToolCall},
    serve::proxy::{
        body::Nothing,
        capture::{Asked, Tree},
        live::{self, End, Ending, Finished, Live, Part, Subscription},
        protocol::{Extras, Protocol, Reply},
        request::Source,
        stream,
    },
};
use futures::{FutureExt, StreamExt};
use proptest::prelude::*;
use std::sync::OnceLock;

const PROTOCOLS: [Protocol; 3] = [Protocol::Chat, Protocol::Messages, Protocol::Responses];

fn server() -> &'static Setup {
    static ONCE: OnceLock<Setup> = OnceLock::new();
    ONCE.get_or_init(|| setup(vec![]))
}

/// Text with what JSON, events and markup find special.
fn text() -> impl Strategy<Value = String> {
    prop_oneof![
        3 => "[ -~]{0,8}",
        2 => "[\r\n\u{0}\u{85}\u{2028}\"\\\\:{}<|>]{0,6}",
        1 => any::<String>(),
        1 => prop::sample::select(vec!["data: x\n\n", "event: y\n", "[DONE]", "<|im_end|>", "<tool_call>"])
            .prop_map(str::to_owned),
    ]
}

/// A message that is right in most places, in the form of one of the protocols.
fn message() -> impl Strategy<Value = Value> {
    let role = prop::sample::select(vec![
        "user",
        "user",
        "assistant",
        "system",
        "tool",
        "developer",
        "x",
    ]);
    let block = (0usize..7, text(), text()).prop_map(|(kind, a, b)| match kind {
        0 => json!({"type": "text", "text": a, "cache_control": {"type": b}}),
        1 => json!({"type": "tool_result", "tool_use_id": a, "content": b}),
        2 => json!({"type": "tool_result", "tool_use_id": a, "content": [{"type": "text", "text": b}, {"type": "image"}]}),
        3 => json!({"type": "tool_use", "id": a, "name": b, "input": {"k": a}}),
        4 => json!({"type": "thinking", "thinking": a, "signature": b}),
        5 => json!({"type": b}),
        _ => Value::String(a),
    });
    let content = prop_oneof![
        3 => text().prop_map(Value::from),
        3 => prop::collection::vec(block, 0..4).prop_map(Value::from),
        1 => Just(Value::Null),
        1 => any::<f64>().prop_map(Value::from),
    ];
    let call = (text(), text(), text()).prop_map(
        |(id, name, arguments)| json!({"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}),
    );
    let item = (0usize..4, text(), text()).prop_map(|(kind, a, b)| match kind {
        0 => json!({"type": "function_call", "call_id": a, "name": b, "arguments": "{}"}),
        1 => json!({"type": "function_call_output", "call_id": a, "output": b}),
        2 => json!({"type": "reasoning", "summary": [{"type": "summary_text", "text": a}]}),
        _ => json!({"type": a, "role": b}),
    });
    prop_oneof![
        4 => (role, content, prop::option::of(prop::collection::vec(call, 0..3))).prop_map(|(role, content, calls)| {
            let mut message = json!({"role": role, "content": content});
            if let Some(calls) = calls {
                message["tool_calls"] = Value::from(calls);
            }
            message
        }),
        1 => item,
    ]
}

fn request() -> impl Strategy<Value = Value> {
    let tool = (text(), any::<bool>()).prop_map(|(name, sound)| {
        let schema = if sound {
            json!({"type": "object"})
        } else {
            json!([name])
        };
        json!({"type": "function", "name": name, "input_schema": schema, "parameters": schema,
               "function": {"name": name, "parameters": schema}})
    });
    (
        prop::collection::vec(message(), 0..5),
        prop::option::of(prop::collection::vec(tool, 0..3)),
        prop::option::of(text()),
        any::<bool>(),
    )
        .prop_map(|(messages, tools, system, stop)| {
            let mut body = json!({"messages": messages, "input": messages, "max_tokens": 9});
            if let Some(tools) = tools {
                body["tools"] = Value::from(tools);
            }
            if let Some(system) = system {
                body["system"] = json!(system);
                body["instructions"] = json!(system);
            }
            if stop {
                body["stop"] = json!(["a"]);
            }
            body
        })
}

/// Reads, renders and places a request; what is refused leaves the tree as it was.
fn place(tree: &mut Tree, protocol: Protocol, body: &[u8]) -> Result<(), ApiError> {
    let renderer = &server().proxy.shared.renderer;
    let ask = protocol.read(body, &mut tree.known())?;
    let asked = Asked {
        items: &ask.items,
        tools: ask.tools,
        options: ask.spec.options(),
        sub_agent: None,
        limit: 4000,
    };
    tree.place(renderer, &asked)?;
    Ok(())
}

/// `count_tokens`, without HTTP.
fn count(body: &[u8]) -> Result<usize, ApiError> {
    let ask = Protocol::Messages.read(body, &mut Nothing)?;
    let mut messages = Vec::new();
    for item in &ask.items {
        messages.extend(item.messages()?);
    }
    let renderer = &server().proxy.shared.renderer;
    let tools = ask.tools.map(|tools| renderer.tools(tools)).transpose()?;
    let tokens = renderer.full(&messages, tools.as_deref(), usize::MAX);
    Ok(tokens.map_err(capture::CaptureError::from)?.len())
}

fn pieces() -> impl Strategy<Value = Vec<Piece>> {
    let call = (text(), prop::collection::btree_map(text(), text(), 0..3)).prop_map(|(name, arguments)| {
        Piece::Call(ToolCall {
            name,
            arguments: json!(arguments).to_string(),
        })
    });
    prop::collection::vec(
        prop_oneof![3 => text().prop_map(Piece::Text), 2 => text().prop_map(Piece::Reasoning), 1 => call],
        0..10,
    )
}

/// What a client reads: events by the rules of server-sent events, comments left out.
fn read_events(bytes: &[u8]) -> Vec<(String, String)> {
    let text = std::str::from_utf8(bytes).expect("UTF-8");
    let (mut out, mut name, mut data) = (Vec::new(), String::new(), Vec::new());
    for line in text.split('\n') {
        assert!(
            !line.contains('\r'),
            "a carriage return ends a line for some readers: {line:?}"
        );
        if line.is_empty() {
            if !data.is_empty() {
                out.push((std::mem::take(&mut name), data.join("\n")));
            }
            (name, data) = (String::new(), Vec::new());
        } else if let Some(value) = line.strip_prefix("data: ") {
            data.push(value);
        } else if let Some(value) = line.strip_prefix("event: ") {
            name = value.to_owned();
        } else {
            assert!(line.starts_with(": "), "{line:?} is no field");
        }
    }
    assert!(data.is_empty(), "an event without its empty line");
    out
}

/// Text, reasoning and calls that a client puts together.
fn told(protocol: Protocol, bytes: &[u8]) -> (String, String, Vec<(String, String)>) {
    let (mut text, mut reasoning, mut calls) = (String::new(), String::new(), Vec::new());
    for (name, data) in read_events(bytes) {
        if data == "[DONE]" {
            continue;
        }
        let event: Value = serde_json::from_str(&data).expect("JSON");
        assert!(name.is_empty() || event["type"] == name.as_str());
        let put = |to: &mut String, value: &Value| *to += value.as_str().unwrap_or_default();
        match protocol {
            Protocol::Chat => {
                let delta = &event["choices"][0]["delta"];
                put(&mut text, &delta["content"]);
                put(&mut reasoning, &delta["reasoning_content"]);
                for call in delta["tool_calls"].as_array().into_iter().flatten() {
                    assert_eq!(call["index"], calls.len());
                    let f = &call["function"];
                    calls.push((
                        f["name"].as_str().unwrap().into(),
                        f["arguments"].as_str().unwrap().into(),
                    ));
                }
            }
            Protocol::Messages => {
                let delta = &event["delta"];
                put(&mut text, &delta["text"]);
                put(&mut reasoning, &delta["thinking"]);
                if event["content_block"]["type"] == "tool_use" {
                    calls.push((
                        event["content_block"]["name"].as_str().unwrap().into(),
                        String::new(),
                    ));
                }
                if let Some((_, arguments)) = calls.last_mut() {
                    put(arguments, &delta["partial_json"]);
                }
            }
            Protocol::Responses => match name.as_str() {
                "response.output_text.delta" => put(&mut text, &event["delta"]),
                "response.reasoning_summary_text.delta" => put(&mut reasoning, &event["delta"]),
                "response.function_call_arguments.done" => calls.push((
                    event["name"].as_str().unwrap().into(),
                    event["arguments"].as_str().unwrap().into(),
                )),
                _ => {}
            },
        }
    }
    (text, reasoning, calls)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(fuzz_cases(400)))]

    #[test]
    fn requests_are_placed_or_refused_whatever_they_say(
        first in request(), second in request(), cut in any::<prop::sample::Index>(), byte in any::<u8>(),
    ) {
        let mut tree = Tree::default();
        for protocol in PROTOCOLS {
            for body in [&first, &second] {
                let mut body = body.to_string().into_bytes();
                let sound = place(&mut tree, protocol, &body);
                // The same again is known or refused again.
                prop_assert_eq!(place(&mut tree, protocol, &body).is_ok(), sound.is_ok());
                let _ = count(&body);
                let at = cut.index(body.len());
                let _ = place(&mut tree, protocol, &body[..at]);
                body[at] = byte;
                let _ = place(&mut tree, protocol, &body);
                let _ = count(&body);
            }
        }
    }

    /// However a reply grows, a client of its stream puts the same reply together.
    #[test]
    fn streams_tell_the_reply_whatever_it_says(
        pieces in pieces(), steps in prop::collection::vec(1usize..4, 1..10), usage in any::<bool>(),
    ) {
        let s = server();
        let _runtime = s.runtime.enter();
        for protocol in PROTOCOLS {
            let reply = Reply {
                id: "0".into(), created: 0, shared: s.proxy.shared.clone(), prompt_tokens: 3, prompt: None,
                extras: Extras { stream: true, usage, ..Extras::default() },
            };
            let live = Arc::new(Live::new(Arc::new([])));
            let response = stream::response(protocol.encoder(reply), Source::Live(Subscription::new(&live)));
            let mut body = response.into_body().into_data_stream();
            let mut bytes = Vec::new();
            let mut poll = |bytes: &mut Vec<u8>| loop {
                match body.next().now_or_never() {
                    Some(Some(piece)) => bytes.extend_from_slice(&piece.unwrap()),
                    Some(None) => return true,
                    None => return false,
                }
            };
            prop_assert!(!poll(&mut bytes) && !bytes.is_empty(), "the stream begins at once");
            let mut rest = &pieces[..];
            for step in steps.iter().cycle() {
                let (now, later) = rest.split_at(rest.len().min(*step));
                rest = later;
                for piece in now {
                    live::add(&mut live.progress().parts, piece.clone(), |n| format!("call_{n}"));
                }
                live.changed.send_replace(());
                prop_assert!(!poll(&mut bytes));
                if rest.is_empty() { break; }
            }
            let parts = std::mem::take(&mut live.progress().parts);
            let finished = Arc::new(Finished {
                parts, ending: Ending::Stop, tokens: Arc::new([]), prompt_tokens: 3, cached_tokens: 0, reasoning_tokens: 0,
            });
            live.finish(End::Reply(finished.clone()));
            prop_assert!(poll(&mut bytes), "the stream ends");
            let calls: Vec<_> = finished.parts.iter().filter_map(|part| match part {
                Part::Call(_, call) => Some((call.name.clone(), call.arguments.clone())),
                _ => None,
            }).collect();
            prop_assert_eq!(told(protocol, &bytes), (finished.text(), finished.reasoning(), calls));
        }
    }
}
