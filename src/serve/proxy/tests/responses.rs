//! OpenAI's responses API.

use super::*;

const THOUGHT: &str =
    "<think>\nhm\n</think>\n\nlook\n<tool_call>\n{\"name\":\"run\", \"arguments\":{\"cmd\":  \"ls\"}}\n</tool_call><|im_end|>";

fn body(input: Value, stream: bool) -> Value {
    json!({
        "model": "any", "input": input, "stream": stream, "instructions": "be brief", "store": false,
        "include": ["reasoning.encrypted_content"], "reasoning": {"effort": "high"}, "max_output_tokens": 60,
        "tool_choice": "auto", "prompt_cache_key": "k",
        "tools": [{"type": "function", "name": "run", "description": "d", "strict": false,
                   "parameters": {"type": "object", "properties": {"cmd": {"type": "string"}}}}]
    })
}

#[test]
fn a_tool_loop_is_served_without_a_store() {
    let slow = ScriptedReply {
        token_delay: Duration::from_millis(1),
        ..text_reply(THOUGHT)
    };
    let s = setup_thinking(vec![
        slow,
        text_reply("hello<|im_end|>"),
        text_reply(&"hello ".repeat(90)),
    ]);
    let session = s.open("task__1");
    let path = format!("{}/v1/responses", session.path);
    let post = |body: &Value| s.post_raw(&path, &[], body.to_string().as_bytes());
    let user = json!({"type": "message", "role": "user", "content": [{"type": "input_text", "text": "go"}]});
    let (status, text) = post(&body(json!([user]), true));
    assert_eq!(status, 200, "{text}");
    let events: Vec<Value> = text
        .split("\n\n")
        .filter(|e| !e.is_empty())
        .map(|e| serde_json::from_str(e.split_once("\ndata: ").unwrap().1).unwrap())
        .collect();
    let numbers: Vec<u64> = events
        .iter()
        .map(|e| e["sequence_number"].as_u64().unwrap())
        .collect();
    assert_eq!(numbers, (0..events.len() as u64).collect::<Vec<_>>());
    let of = |kind: &str| -> String {
        let deltas = events.iter().filter(|e| e["type"] == kind);
        deltas.filter_map(|e| e["delta"].as_str()).collect()
    };
    assert_eq!(of("response.reasoning_summary_text.delta"), "hm");
    assert_eq!(of("response.output_text.delta"), "look\n");
    assert_eq!(of("response.function_call_arguments.delta"), "{\"cmd\":\"ls\"}");
    let done: Vec<&Value> = events
        .iter()
        .filter(|e| e["type"] == "response.output_item.done")
        .map(|e| &e["item"])
        .collect();
    let response = &events.last().unwrap()["response"];
    assert_eq!(response["status"], "completed");
    assert_eq!(json!(done), response["output"]);
    let output = response["output"].as_array().unwrap();
    let kinds: Vec<&str> = output.iter().map(|o| o["type"].as_str().unwrap()).collect();
    assert_eq!(kinds, ["reasoning", "message", "function_call"]);
    assert!(output[0]["encrypted_content"].is_string());
    let mut input = vec![user];
    input.extend(output.iter().cloned());
    input.push(json!({"type": "function_call_output", "call_id": output[2]["call_id"], "output": "file"}));
    let (_, text) = post(&body(json!(input), false));
    let second: Value = serde_json::from_str(&text).unwrap();
    assert_eq!(second["output"][0]["content"][0]["text"], "hello", "{second}");
    let requests = s.engine.requests();
    let sampled = ids(&s.tokenizer, THOUGHT);
    assert!(requests[1]
        .prompt
        .starts_with(&[&requests[0].prompt[..], &sampled].concat()));
    assert_eq!(second["usage"]["input_tokens"], requests[1].prompt.len());
    assert_eq!(
        post(&body(json!(input), false)).1.matches("hello").count(),
        1,
        "the same request is answered from the record"
    );
    let (_, text) = post(&body(json!("again"), false));
    let cut: Value = serde_json::from_str(&text).unwrap();
    assert_eq!(
        (&cut["status"], &cut["incomplete_details"]["reason"]),
        (&json!("incomplete"), &json!("max_output_tokens"))
    );
    let captured = s.close(&session);
    assert_eq!((captured.turns, captured.branches.len()), (3, 2));
    assert_eq!(
        s.text(&captured.sequences[0], true),
        format!("{THOUGHT}hello<|im_end|>")
    );
}

#[test]
fn what_needs_a_store_is_refused() {
    let s = setup(vec![]);
    let session = s.open("task__1");
    let path = format!("{}/v1/responses", session.path);
    for (field, value) in [
        ("previous_response_id", json!("resp_1")),
        ("background", json!(true)),
        ("input", json!([])),
        ("input", json!(7)),
        ("input", json!([{"type": "computer_call"}])),
    ] {
        let mut body = body(json!("go"), false);
        body[field] = value;
        let (status, text) = s.post_raw(&path, &[], body.to_string().as_bytes());
        let answer: Value = serde_json::from_str(&text).unwrap();
        assert_eq!(
            (status, &answer["error"]["type"]),
            (400, &json!("invalid_request_error")),
            "{field}: {text}"
        );
    }
}
