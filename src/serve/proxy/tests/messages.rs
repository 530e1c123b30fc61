//! Anthropic's API.

use super::*;

const THOUGHT: &str = "<think>\nhm\n</think>\n\nlook\n<tool_call>\n{\"name\":\"run\", \"arguments\":{\"cmd\":  \"ls\"}}\n</tool_call><|im_end|>";

fn body(messages: Value, stream: bool) -> Value {
    json!({
        "model": "any", "max_tokens": 60, "stream": stream, "messages": messages,
        "system": [{"type": "text", "text": "x-anthropic-billing-header: cc_version=1; cch=77;"},
                   {"type": "text", "text": "be brief", "cache_control": {"type": "ephemeral"}}],
        "tools": [{"name": "run", "description": "d", "input_schema": {"type": "object", "properties": {"cmd": {"type": "string"}}}}],
        "thinking": {"type": "adaptive", "display": "omitted"}, "metadata": {"user_id": "{}"},
        "context_management": {"edits": []}, "output_config": {"effort": "high"}
    })
}

impl Setup {
    fn messages(&self, session: &SessionEndpoint, body: &Value) -> (u16, Value) {
        let path = format!("{}/v1/messages?beta=true", session.path);
        let headers = [
            ("anthropic-version", "2023-06-01"),
            ("anthropic-beta", "some-beta-2031"),
        ];
        let (status, text) = self.post_raw(&path, &headers, body.to_string().as_bytes());
        (status, serde_json::from_str(&text).unwrap())
    }
}

#[test]
fn a_tool_loop_with_thoughts_and_a_history_that_changes_its_form() {
    let s = setup_thinking(vec![text_reply(THOUGHT), text_reply("hello<|im_end|>")]);
    let session = s.open("task__1");
    let first = json!([{"role": "user", "content": [{"type": "text", "text": "go"}]},
                       {"role": "system", "content": [{"type": "text", "text": "environment", "cache_control": {"type": "ephemeral"}}]}]);
    let (status, reply) = s.messages(&session, &body(first, false));
    assert_eq!(status, 200, "{reply}");
    assert_eq!(reply["stop_reason"], "tool_use");
    let content = reply["content"].as_array().unwrap();
    assert_eq!(content[0]["thinking"], "hm");
    assert!(!content[0]["signature"].as_str().unwrap().is_empty());
    assert_eq!(content[1], json!({"type": "text", "text": "look\n"}));
    assert_eq!(
        (&content[2]["name"], &content[2]["input"]),
        (&json!("run"), &json!({"cmd": "ls"}))
    );
    assert!(content[2]["id"].as_str().unwrap().starts_with("toolu_"));
    assert_eq!(reply["usage"]["output_tokens"], ids(&s.tokenizer, THOUGHT).len());
    // Strings for blocks, another billing header, the cache mark moved on.
    let second = json!([{"role": "user", "content": "go"}, {"role": "system", "content": "environment"},
        {"role": "assistant", "content": content},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": content[2]["id"], "content": "file",
                                      "is_error": false, "cache_control": {"type": "ephemeral"}}]}]);
    let mut second = body(second, false);
    second["system"][0]["text"] = json!("x-anthropic-billing-header: cc_version=1; cch=99;");
    let (_, counted) = {
        let path = format!("{}/v1/messages/count_tokens", session.path);
        let (status, text) = s.post_raw(&path, &[], second.to_string().as_bytes());
        assert_eq!(status, 200, "{text}");
        (status, serde_json::from_str::<Value>(&text).unwrap())
    };
    let (status, reply) = s.messages(&session, &second);
    assert_eq!(status, 200, "{reply}");
    assert_eq!(reply["content"], json!([{"type": "text", "text": "hello"}]));
    assert_eq!(reply["stop_reason"], "end_turn");
    let requests = s.engine.requests();
    let sampled = ids(&s.tokenizer, THOUGHT);
    assert!(requests[1]
        .prompt
        .starts_with(&[&requests[0].prompt[..], &sampled].concat()));
    assert_eq!(reply["usage"]["input_tokens"], requests[1].prompt.len());
    // The reply was sampled with its thoughts; a template would render it without.
    let counted = counted["input_tokens"].as_u64().unwrap() as usize;
    assert!(
        counted > 50 && counted < requests[1].prompt.len() + 20,
        "{counted}"
    );
    let prompt = s.tokenizer.decode_with_special(&requests[0].prompt);
    assert!(
        prompt.contains("system\nbe brief\n") && prompt.contains("system\nenvironment"),
        "{prompt}"
    );
    assert!(!prompt.contains("billing"), "{prompt}");
    let captured = s.close(&session);
    assert_eq!((captured.branches.len(), captured.turns), (1, 2));
    assert_eq!(
        s.text(&captured.sequences[0], true),
        format!("{THOUGHT}hello<|im_end|>")
    );
}

/// Names and data of a stream's events.
fn events(text: &str) -> Vec<(String, Value)> {
    let events = text.split("\n\n").filter(|e| !e.is_empty());
    events
        .map(|event| {
            let (name, data) = event.split_once('\n').unwrap();
            let data = serde_json::from_str(data.strip_prefix("data: ").unwrap()).unwrap();
            (name.strip_prefix("event: ").unwrap().to_owned(), data)
        })
        .collect()
}

#[test]
fn a_stream_has_the_order_of_events_that_agents_read() {
    let slow = ScriptedReply {
        token_delay: Duration::from_millis(1),
        ..text_reply(THOUGHT)
    };
    let s = setup_thinking(vec![slow.clone(), slow]);
    for disabled in [false, true] {
        let session = s.open(&format!("task__{disabled}"));
        let mut body = body(json!([{"role": "user", "content": "go"}]), true);
        if disabled {
            body["thinking"] = json!({"type": "disabled"});
        }
        let path = format!("{}/v1/messages", session.path);
        let (status, text) = s.post_raw(&path, &[], body.to_string().as_bytes());
        assert_eq!(status, 200);
        let events = events(&text);
        let names: Vec<&str> = events.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(names[..2], ["message_start", "ping"]);
        assert_eq!(names[names.len() - 2..], ["message_delta", "message_stop"]);
        assert!(events.iter().all(|(name, data)| data["type"] == *name));
        let of = |kind: &str, key: &str| -> String {
            let deltas = events.iter().filter(|(_, data)| data["delta"]["type"] == kind);
            deltas
                .filter_map(|(_, data)| data["delta"][key].as_str())
                .collect()
        };
        assert_eq!(of("thinking_delta", "thinking"), if disabled { "" } else { "hm" });
        assert_eq!(of("signature_delta", "signature").is_empty(), disabled);
        assert_eq!(of("text_delta", "text"), "look\n");
        assert_eq!(of("input_json_delta", "partial_json"), "{\"cmd\":\"ls\"}");
        // Blocks do not overlap and are numbered from 0.
        let mut open = None;
        let mut next = 0;
        for (name, data) in &events {
            match name.as_str() {
                "content_block_start" => {
                    assert_eq!((open, data["index"].as_u64()), (None, Some(next)));
                    open = Some(next);
                }
                "content_block_delta" => assert_eq!(data["index"].as_u64(), open),
                "content_block_stop" => {
                    assert_eq!(data["index"].as_u64(), open.take());
                    next += 1;
                }
                _ => {}
            }
        }
        assert_eq!(next, if disabled { 2 } else { 3 });
        let last = &events[events.len() - 2].1;
        assert_eq!(last["delta"]["stop_reason"], "tool_use");
        assert_eq!(last["usage"]["output_tokens"], ids(&s.tokenizer, THOUGHT).len());
        let start = &events[0].1["message"]["usage"];
        assert_eq!(start["input_tokens"], last["usage"]["input_tokens"]);
        s.close(&session);
    }
}

#[test]
fn failures_have_anthropics_shape_and_small_requests_are_answered() {
    let endings = vec![
        text_reply("say STOP here<|im_end|>"),
        text_reply(&"hello ".repeat(100)),
        ScriptedReply {
            failure: Some((0, EngineError::Internal("out of memory".into()))),
            ..text_reply("x")
        },
    ];
    let s = setup(endings);
    let session = s.open("task__1");
    let ask = |text: &str| json!([{"role": "user", "content": text}]);
    let mut stopping = body(ask("a"), false);
    stopping["stop_sequences"] = json!(["STOP"]);
    let (_, reply) = s.messages(&session, &stopping);
    assert_eq!(
        (&reply["stop_reason"], &reply["stop_sequence"]),
        (&json!("stop_sequence"), &json!("STOP"))
    );
    assert_eq!(reply["content"][0]["text"], "say ");
    let (_, reply) = s.messages(&session, &body(ask("b"), false));
    assert_eq!(reply["stop_reason"], "max_tokens");
    let (status, reply) = s.messages(&session, &body(ask("c"), false));
    assert_eq!(
        (status, &reply["type"], &reply["error"]["type"]),
        (500, &json!("error"), &json!("api_error"))
    );
    let (status, reply) = s.messages(&session, &body(ask(&"ab ".repeat(3000)), false));
    let message = reply["error"]["message"].as_str().unwrap();
    assert!(
        status == 400 && message.starts_with("prompt is too long: "),
        "{reply}"
    );
    let image = json!([{"role": "user", "content": [{"type": "image", "source": {}}]}]);
    let (status, reply) = s.messages(&session, &body(image, false));
    assert!(status == 400 && reply.to_string().contains("`image`"), "{reply}");
    let mut wrong = session.clone();
    wrong.path = format!("/sess/{}~0000", session.session);
    let (status, reply) = s.messages(&wrong, &body(ask("d"), false));
    assert_eq!(
        (status, &reply["error"]["type"]),
        (401, &json!("authentication_error"))
    );
    let key = [("x-api-key", session.secret.as_str()), ("anthropic-version", "x")];
    let models = format!("/sess/{}/v1/models", session.session);
    let (status, list) = s.get("GET", &models, &key);
    assert!(status == 200 && list.contains("\"id\":\"policy\""), "{list}");
    assert_eq!(s.get("GET", &format!("{models}/policy"), &key).0, 200);
    let (status, text) = s.get("GET", &format!("{models}/other"), &key);
    assert!(status == 404 && text.contains("not_found_error"), "{text}");
    for path in ["/", &session.path, &format!("{}/api/hello", session.path)] {
        assert_eq!(s.get("HEAD", path, &[]).0, 200, "{path}");
    }
    s.proxy.drain();
    let (status, reply) = s.messages(&session, &body(ask("e"), false));
    assert_eq!(
        (status, &reply["error"]["type"]),
        (529, &json!("overloaded_error"))
    );
    let captured = s.close(&session);
    assert_eq!((captured.requests, captured.refused, captured.turns), (6, 4, 2));
}
