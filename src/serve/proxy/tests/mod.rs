//! The proxy over real sockets, with a scripted engine behind it.

mod admin;
mod bad_input;
mod defects;
mod fuzz;
mod messages;
mod responses;

use super::*;
use crate::{
    base::{EngineError, Purpose, ReplicaId, SamplingParams, SessionLimits, TokenSequence, TrialKey},
    model::tokenizer::testing,
    serve::{
        engine::scripted::{scripted_logprob, ScriptedEngine, ScriptedReply},
        proxy::router::RouterConfig,
    },
};
use serde_json::json;
use std::{
    io::{Read, Write},
    net::TcpStream,
    time::Instant,
};

struct Setup {
    proxy: Arc<Proxy>,
    engine: Arc<ScriptedEngine>,
    tokenizer: Tokenizer,
    runtime: tokio::runtime::Runtime,
    _dir: tempfile::TempDir,
}

fn ids(tokenizer: &Tokenizer, text: &str) -> Vec<u32> {
    tokenizer.encode_rendered(text).unwrap()
}

/// A proxy whose engine answers with these texts, in order.
fn setup(replies: Vec<ScriptedReply>) -> Setup {
    setup_with(ScriptedEngine::replies(replies).recording(), 1 << 20)
}

fn setup_with(engine: ScriptedEngine, max_body_bytes: usize) -> Setup {
    setup_configured(engine, |config| config.max_body_bytes = max_body_bytes)
}

/// A proxy whose template knows `<think>`.
fn setup_thinking(replies: Vec<ScriptedReply>) -> Setup {
    setup_configured(ScriptedEngine::replies(replies).recording(), |config| {
        let path = config.model_dir.join("chat_template.jinja");
        let source = std::fs::read_to_string(&path).unwrap();
        std::fs::write(path, format!("{{# <think> #}}{source}")).unwrap();
    })
}

fn setup_configured(engine: ScriptedEngine, configure: impl FnOnce(&mut ProxyConfig)) -> Setup {
    let dir = tempfile::tempdir().unwrap();
    testing::write_folder(dir.path());
    let engine = Arc::new(engine);
    let router = Arc::new(Router::new(RouterConfig {
        replica_wait: Duration::from_millis(200),
        ..RouterConfig::default()
    }));
    router.join(ReplicaId(0), engine.clone());
    let mut config = ProxyConfig::new(dir.path().join("p.sock"), "policy".into(), dir.path().to_owned());
    config.tcp = Some(([127, 0, 0, 1], 0).into());
    config.max_body_bytes = 1 << 20;
    configure(&mut config);
    Setup {
        proxy: Proxy::start(config, router).unwrap(),
        engine,
        tokenizer: Tokenizer::from_dir(dir.path()).unwrap(),
        runtime: tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .unwrap(),
        _dir: dir,
    }
}

fn text_reply(text: &str) -> ScriptedReply {
    let dir = tempfile::tempdir().unwrap();
    testing::write_folder(dir.path());
    ids(&Tokenizer::from_dir(dir.path()).unwrap(), text).into()
}

fn spec(name: &str) -> SessionSpec {
    SessionSpec {
        key: TrialKey {
            purpose: Purpose::Train,
            group: GroupId(3),
            sample: 0,
        },
        attempt: 0,
        name: name.into(),
        sampling: SamplingParams {
            seed: 11,
            ..SamplingParams::default()
        },
        limits: SessionLimits {
            max_turns: 20,
            max_total_tokens: 4000,
            max_tokens_per_turn: 100,
            max_consecutive_no_tool: 0,
            deadline: Instant::now() + Duration::from_secs(600),
        },
    }
}

impl Setup {
    fn open(&self, name: &str) -> SessionEndpoint {
        self.proxy.open(spec(name)).unwrap()
    }

    fn close(&self, session: &SessionEndpoint) -> CapturedSession {
        let captured = self.runtime.block_on(self.proxy.close(&session.session)).unwrap();
        for sequence in &captured.sequences {
            sequence.check().unwrap();
        }
        captured
    }

    fn url(&self, path: &str) -> String {
        format!("http://{}{path}", self.proxy.tcp().unwrap())
    }

    fn post_raw(&self, path: &str, headers: &[(&str, &str)], body: &[u8]) -> (u16, String) {
        let agent: ureq::Agent = ureq::Agent::config_builder()
            .http_status_as_error(false)
            .timeout_global(Some(Duration::from_secs(60)))
            .build()
            .into();
        let mut request = agent
            .post(self.url(path))
            .header("content-type", "application/json");
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let mut response = request.send(body).unwrap();
        (
            response.status().as_u16(),
            response.body_mut().read_to_string().unwrap(),
        )
    }

    fn chat(&self, session: &SessionEndpoint, body: Value) -> (u16, Value) {
        let path = format!("{}/v1/chat/completions", session.path);
        let (status, text) = self.post_raw(&path, &[], body.to_string().as_bytes());
        (status, serde_json::from_str(&text).unwrap())
    }

    /// A request whose method has no body; the status and the text.
    fn get(&self, method: &str, path: &str, headers: &[(&str, &str)]) -> (u16, String) {
        let mut stream = TcpStream::connect(self.proxy.tcp().unwrap()).unwrap();
        let headers: String = headers.iter().map(|(k, v)| format!("{k}: {v}\r\n")).collect();
        let head = format!("{method} {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n{headers}\r\n");
        stream.write_all(head.as_bytes()).unwrap();
        let mut text = String::new();
        stream.read_to_string(&mut text).unwrap();
        let status = text.split(' ').nth(1).unwrap().parse().unwrap();
        let body = text.split_once("\r\n\r\n").map_or("", |(_, body)| body);
        (status, body.to_owned())
    }

    fn text(&self, sequence: &TokenSequence, trained: bool) -> String {
        let ids = sequence.token_ids.iter().zip(&sequence.loss_mask);
        let ids: Vec<u32> = ids.filter(|(_, m)| **m || !trained).map(|(id, _)| *id).collect();
        self.tokenizer.decode_with_special(&ids)
    }
}

fn user(text: &str) -> Value {
    json!({"role": "user", "content": text})
}

fn tools() -> Value {
    json!([{"type": "function", "function": {"name": "run", "parameters": {"type": "object"}}}])
}

const CALL: &str =
    "look\n<tool_call>\n{\"name\":\"run\", \"arguments\":{\"cmd\":  \"ls\"}}\n</tool_call><|im_end|>";

#[test]
fn a_tool_loop_is_served_and_captured_token_by_token() {
    let s = setup(vec![text_reply(CALL), text_reply("hello<|im_end|>")]);
    let session = s.open("task__1");
    let mut messages = vec![user("go")];
    let (status, first) = s.chat(
        &session,
        json!({"model": "any", "messages": messages, "tools": tools(), "logprobs": true, "return_token_ids": true,
               "temperature": 0.1, "seed": 5}),
    );
    assert_eq!(status, 200, "{first}");
    let choice = &first["choices"][0];
    assert_eq!(choice["finish_reason"], "tool_calls");
    assert_eq!(choice["message"]["content"], "look\n");
    let call = &choice["message"]["tool_calls"][0];
    assert_eq!(
        call["function"],
        json!({"name": "run", "arguments": "{\"cmd\":\"ls\"}"})
    );
    let sampled = ids(&s.tokenizer, CALL);
    assert_eq!(choice["token_ids"], json!(sampled));
    let logprobs = choice["logprobs"]["content"].as_array().unwrap();
    for (i, (id, entry)) in sampled.iter().zip(logprobs).enumerate() {
        assert_eq!(
            entry["logprob"].as_f64().unwrap() as f32,
            scripted_logprob(*id, i)
        );
    }
    assert_eq!(first["usage"]["completion_tokens"], sampled.len());
    assert_eq!(
        first["prompt_token_ids"].as_array().unwrap().len(),
        first["usage"]["prompt_tokens"]
    );
    messages.push(choice["message"].clone());
    messages.push(json!({"role": "tool", "tool_call_id": call["id"], "content": "file <|im_end|>"}));
    let (_, second) = s.chat(&session, json!({"messages": messages, "tools": tools()}));
    assert_eq!(
        second["choices"][0]["message"],
        json!({"role": "assistant", "content": "hello"})
    );
    assert_eq!(second["choices"][0]["finish_reason"], "stop");
    let requests = s.engine.requests();
    let prompt_1 = &requests[0].prompt;
    assert!(
        requests[1]
            .prompt
            .starts_with(&[&prompt_1[..], &sampled].concat()),
        "sampled ids are spliced in"
    );
    assert_eq!(
        requests[0].sampling.temperature, 1.0,
        "the agent does not choose the distribution"
    );
    assert_ne!(requests[0].sampling.seed, requests[1].sampling.seed);
    assert_eq!(requests[0].max_new_tokens, 100);
    let captured = s.close(&session);
    assert_eq!(captured.sequences.len(), 1);
    let sequence = &captured.sequences[0];
    assert_eq!(sequence.weight, 1.0);
    assert_eq!(s.text(sequence, true), format!("{CALL}hello<|im_end|>"));
    assert_eq!(
        sequence.token_ids,
        [&requests[1].prompt[..], &ids(&s.tokenizer, "hello<|im_end|>")].concat()
    );
    let start = prompt_1.len();
    assert_eq!(
        sequence.logprobs[start..start + sampled.len()],
        sampled
            .iter()
            .enumerate()
            .map(|(i, id)| scripted_logprob(*id, i))
            .collect::<Vec<_>>()
    );
    assert_eq!(
        (captured.turns, captured.aborted, captured.malformed_tool_calls),
        (2, 0, 0)
    );
    assert_eq!(captured.branches[0].messages.len(), 4);
    assert_eq!((captured.requests, captured.refused), (2, 0));
    assert_eq!(
        (captured.min_version, captured.max_version),
        (Some(Default::default()), Some(Default::default()))
    );
}

/// Events of a stream, `[DONE]` as null.
fn events(text: &str) -> Vec<Value> {
    let lines = text.split("\n\n").filter(|l| !l.is_empty());
    lines
        .map(|l| match l.strip_prefix("data: ").unwrap() {
            "[DONE]" => Value::Null,
            json => serde_json::from_str(json).unwrap(),
        })
        .collect()
}

#[test]
fn a_stream_gives_the_same_message_in_pieces() {
    let slow = ScriptedReply {
        token_delay: Duration::from_millis(2),
        ..text_reply(&CALL.replace("look", "héllo"))
    };
    let s = setup(vec![slow]);
    let session = s.open("task__1");
    let path = format!("{}/v1/chat/completions", session.path);
    let body = json!({"messages": [user("go")], "tools": tools(), "stream": true, "stream_options": {"include_usage": true}, "return_token_ids": true});
    let (status, text) = s.post_raw(&path, &[], body.to_string().as_bytes());
    assert_eq!(status, 200);
    let events = events(&text);
    let deltas: Vec<&Value> = events.iter().map(|e| &e["choices"][0]["delta"]).collect();
    assert_eq!(deltas[0]["role"], "assistant");
    let content: String = deltas.iter().filter_map(|d| d["content"].as_str()).collect();
    assert_eq!(content, "héllo\n");
    assert!(
        deltas
            .iter()
            .filter(|d| d["content"] != "" && d["content"].is_string())
            .count()
            > 2,
        "in pieces"
    );
    let calls: Vec<&Value> = deltas
        .iter()
        .filter(|d| d["tool_calls"].is_array())
        .copied()
        .collect();
    assert_eq!(calls.len(), 1);
    assert_eq!(
        calls[0]["tool_calls"][0]["function"]["arguments"],
        "{\"cmd\":\"ls\"}"
    );
    let tokens: Vec<Value> = events
        .iter()
        .filter_map(|e| e["choices"][0]["token_ids"].as_array().cloned())
        .flatten()
        .collect();
    assert_eq!(
        json!(tokens),
        json!(ids(&s.tokenizer, &CALL.replace("look", "héllo")))
    );
    let n = events.len();
    assert_eq!(events[n - 3]["choices"][0]["finish_reason"], "tool_calls");
    assert_eq!(events[n - 2]["usage"]["completion_tokens"], tokens.len());
    assert!(events[n - 1].is_null());
}

#[test]
fn wrong_requests_are_answered_in_openais_shape() {
    let s = setup_with(ScriptedEngine::replies(vec![text_reply("x<|im_end|>")]), 10_000);
    let session = s.open("task.with.dots__1");
    let chat = |segment: &str| format!("/sess/{segment}/v1/chat/completions");
    let good = json!({"messages": [user("go")]}).to_string();
    let id = session.session.as_str();
    let post = |path: &str, headers: &[(&str, &str)], body: &str| {
        let (status, text) = s.post_raw(path, headers, body.as_bytes());
        let body: Value = serde_json::from_str(&text).unwrap();
        (
            status,
            body["error"]["message"].as_str().unwrap_or_default().to_owned(),
        )
    };
    assert_eq!(post(&chat(&format!("{id}~00000000")), &[], &good).0, 401);
    assert_eq!(post(&chat(id), &[], &good).0, 401);
    assert_eq!(post(&chat(id), &[("authorization", "Bearer no")], &good).0, 401);
    assert_eq!(post(&chat("unknown~1234"), &[], &good).0, 404);
    assert_eq!(post("/v1/chat/completions", &[], &good).0, 404);
    let own = format!("{}/v1/chat/completions", session.path);
    let (status, text) = post(&own, &[], "{\"messages\": [\n {\"role\": oops}]}");
    assert!(status == 400 && text.contains("line 2 column 11"), "{text}");
    let (status, text) = post(&own, &[], &json!({"messages": [user("x")], "n": 4}).to_string());
    assert!(status == 400 && text.contains("`n` is 4"), "{text}");
    let (status, text) = post(
        &own,
        &[],
        &json!({"messages": [user("x")], "max_tokens": 0}).to_string(),
    );
    assert!(status == 400 && text.contains("max_tokens"), "{text}");
    let image = json!({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]});
    let (status, text) = post(&own, &[], &image.to_string());
    assert!(status == 400 && text.contains("image_url"), "{text}");
    let deep = format!("{{\"messages\": [{}{}]}}", "[".repeat(3000), "]".repeat(3000));
    assert_eq!(post(&own, &[], &deep).0, 400);
    let (status, text) = s.post_raw(
        &own,
        &[],
        b"{\"messages\": [{\"role\": \"user\", \"content\": \"\xff\"}]}",
    );
    assert!(status == 400, "{text}");
    let long = json!({"messages": [user(&"ab ".repeat(3000))]}).to_string();
    let (status, text) = post(&own, &[], &long);
    assert!(
        status == 400 && text.contains("prompt is too long") && text.contains("maximum context length"),
        "{text}"
    );
    let (status, text) = post(&own, &[], &format!("{good}{}", " ".repeat(30_000)));
    assert!(status == 413 && text.contains("MAX_REQUEST_BODY_MB"), "{text}");
    // The secret in a header, and nothing above has sampled or left a turn.
    let bearer = format!("Bearer {}", session.secret);
    assert_eq!(post(&chat(id), &[("authorization", &bearer)], &good).0, 200);
    assert_eq!(post(&chat(id), &[("x-api-key", &session.secret)], &good).0, 200);
    // Nothing is answered after this one: the session ends in an overflow.
    assert_eq!(post(&own, &[], &long).0, 400);
    let captured = s.close(&session);
    assert_eq!(
        (
            captured.turns,
            captured.sequences.len(),
            captured.context_overflow
        ),
        (1, 1, true)
    );
    assert_eq!(captured.engine_failure, None);
    assert_eq!(post(&own, &[], &good).0, 404, "refused after the close");
    assert!(matches!(
        s.runtime.block_on(s.proxy.close(&session.session)),
        Err(SessionError::Unknown(_))
    ));
    assert_eq!(s.proxy.shared.open_sessions(), 0);
}

#[test]
fn a_retry_joins_the_running_turn_or_gets_the_recorded_answer() {
    let slow = ScriptedReply {
        first_delay: Duration::from_millis(300),
        ..text_reply("once<|im_end|>")
    };
    let s = setup(vec![slow]);
    let session = s.open("task__1");
    let body = json!({"messages": [user("go")]});
    let answers: Vec<(u16, Value)> = std::thread::scope(|scope| {
        let calls: Vec<_> = (0..4)
            .map(|_| scope.spawn(|| s.chat(&session, body.clone())))
            .collect();
        calls.into_iter().map(|c| c.join().unwrap()).collect()
    });
    let again = s.chat(
        &session,
        json!({"messages": [{"role": "user", "content": [{"type": "text", "text": "go"}]}]}),
    );
    for (status, answer) in answers.iter().chain([&again]) {
        assert_eq!(
            (*status, &answer["choices"][0]["message"]["content"]),
            (200, &json!("once")),
            "{answer}"
        );
    }
    assert_eq!(s.engine.requests().len(), 1);
    assert_eq!(s.close(&session).turns, 1);
}

fn wait_until(what: &str, mut done: impl FnMut() -> bool) {
    let end = Instant::now() + Duration::from_secs(20);
    while !done() {
        assert!(Instant::now() < end, "waited 20 s until {what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

#[test]
fn a_client_that_goes_away_cancels_its_generation() {
    let endless = ScriptedReply {
        token_delay: Duration::from_secs(3600),
        ..text_reply("never seen<|im_end|>")
    };
    for stream in [false, true] {
        let s = setup(vec![endless.clone(), text_reply("second<|im_end|>")]);
        let session = s.open("task__1");
        let body = json!({"messages": [user("go")], "stream": stream}).to_string();
        let mut client = TcpStream::connect(s.proxy.tcp().unwrap()).unwrap();
        let head = format!(
            "POST {}/v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {}\r\n\r\n{body}",
            session.path,
            body.len()
        );
        client.write_all(head.as_bytes()).unwrap();
        wait_until("the generation runs", || s.engine.requests().len() == 1);
        if stream {
            let mut start = [0; 12];
            client.read_exact(&mut start).unwrap();
            assert_eq!(&start, b"HTTP/1.1 200", "headers come before the first token");
        }
        drop(client);
        wait_until("it is cancelled", || {
            s.proxy.router().in_flight(ReplicaId(0)) == 0
        });
        let (_, answer) = s.chat(&session, json!({"messages": [user("go")]}));
        assert_eq!(answer["choices"][0]["message"]["content"], "second");
        let requests = s.engine.requests();
        assert_eq!(
            requests[0].sampling.seed, requests[1].sampling.seed,
            "the same turn draws the same way"
        );
        let captured = s.close(&session);
        assert_eq!((captured.aborted, captured.turns), (1, 1));
        assert_eq!(s.text(&captured.sequences[0], true), "second<|im_end|>");
    }
}

#[test]
fn turns_end_cleanly_at_the_limit_and_failures_of_the_engine_are_recorded() {
    let failing = ScriptedReply {
        failure: Some((0, EngineError::Internal("out of memory".into()))),
        ..text_reply("x")
    };
    let s = setup(vec![
        text_reply("one<|im_end|>"),
        text_reply("two<|im_end|>"),
        failing,
    ]);
    let mut limited = spec("task__1");
    limited.limits.max_turns = 1;
    let session = s.proxy.open(limited).unwrap();
    assert_eq!(s.chat(&session, json!({"messages": [user("a")]})).0, 200);
    for stream in [false, true] {
        let path = format!("{}/v1/chat/completions", session.path);
        let body = json!({"messages": [user("b")], "stream": stream}).to_string();
        let (status, text) = s.post_raw(&path, &[], body.as_bytes());
        assert!(
            status == 200 && text.contains(TURN_LIMIT_NOTICE) && text.contains("\"stop\""),
            "{text}"
        );
    }
    let captured = s.close(&session);
    assert_eq!((captured.turns, captured.turn_limit_hit), (1, true));
    assert_eq!(captured.branches.len(), 1);
    let session = s.open("task__2");
    assert_eq!(s.chat(&session, json!({"messages": [user("a")]})).0, 200);
    let (status, answer) = s.chat(&session, json!({"messages": [user("b")]}));
    assert_eq!((status, &answer["error"]["type"]), (500, &json!("server_error")));
    s.proxy.router().lose(ReplicaId(0));
    assert_eq!(s.chat(&session, json!({"messages": [user("c")]})).0, 503);
    let captured = s.close(&session);
    assert!(captured.engine_failure.unwrap().contains("out of memory"));
    assert_eq!(captured.sequences.len(), 1);
}

#[test]
fn replies_cut_by_length_stop_text_or_bad_calls_are_told_apart() {
    let bad = "<tool_call>{oops}</tool_call><|im_end|>";
    let s = setup(vec![
        text_reply(&"hello ".repeat(200)),
        text_reply("say STO and STOP here<|im_end|>"),
        text_reply(bad),
    ]);
    let session = s.open("task__1");
    let (_, cut) = s.chat(&session, json!({"messages": [user("a")], "max_tokens": 5}));
    assert_eq!(cut["choices"][0]["finish_reason"], "length");
    assert_eq!(cut["usage"]["completion_tokens"], 5);
    let (_, stopped) = s.chat(
        &session,
        json!({"messages": [user("b")], "stop": ["STOP", "never"]}),
    );
    assert_eq!(stopped["choices"][0]["message"]["content"], "say STO and ");
    assert_eq!(stopped["choices"][0]["finish_reason"], "stop");
    let (_, malformed) = s.chat(&session, json!({"messages": [user("c")], "tools": tools()}));
    assert_eq!(
        malformed["choices"][0]["message"]["content"],
        "<tool_call>{oops}</tool_call>"
    );
    let captured = s.close(&session);
    assert_eq!((captured.length_finishes, captured.malformed_tool_calls), (1, 1));
    assert_eq!(s.text(&captured.branches[1].tokens, true), "say STO and STOP");
    let sum: f32 = captured.sequences.iter().map(|q| q.weight).sum();
    assert!((sum - 1.0).abs() < 1e-6);
}

#[test]
fn a_session_that_only_talks_is_ended() {
    let s = setup(vec![
        text_reply("one<|im_end|>"),
        text_reply(CALL),
        text_reply("two<|im_end|>"),
        text_reply("three<|im_end|>"),
    ]);
    let mut silent = spec("task__1");
    silent.limits.max_consecutive_no_tool = 2;
    let session = s.proxy.open(silent).unwrap();
    let answers: Vec<String> = (0..5)
        .map(|n| {
            s.chat(
                &session,
                json!({"messages": [user(&format!("q{n}"))], "tools": tools()}),
            )
            .1["choices"][0]["message"]["content"]
                .to_string()
        })
        .collect();
    assert_eq!(answers[3], "\"three\"", "a call in between starts the count anew");
    assert!(answers[4].contains(TURN_LIMIT_NOTICE), "{answers:?}");
    let captured = s.close(&session);
    assert_eq!((captured.turns, captured.turn_limit_hit), (4, false));
}

#[test]
fn closing_cancelling_and_draining_end_what_runs() {
    let endless = || ScriptedReply {
        token_delay: Duration::from_secs(3600),
        ..text_reply("never seen<|im_end|>")
    };
    let s = setup(vec![endless(), endless()]);
    let body = json!({"messages": [user("go")]});
    for (round, name) in ["task__1", "task__2"].into_iter().enumerate() {
        let session = s.open(name);
        std::thread::scope(|scope| {
            let call = scope.spawn(|| s.chat(&session, body.clone()));
            wait_until("it runs", || s.engine.requests().len() == round + 1);
            if round == 0 {
                assert!(s.close(&session).sequences.is_empty());
                assert_eq!(call.join().unwrap().0, 404);
            } else {
                s.proxy.cancel_group(GroupId(3));
                assert_eq!(call.join().unwrap().0, 403);
                assert_eq!(s.chat(&session, body.clone()).0, 403);
            }
        });
        wait_until("the engine is free", || {
            s.proxy.router().in_flight(ReplicaId(0)) == 0
        });
    }
    let session = s
        .proxy
        .open(SessionSpec {
            key: TrialKey {
                group: GroupId(4),
                ..spec("").key
            },
            ..spec("task__3")
        })
        .unwrap();
    s.proxy.drain();
    assert_eq!(s.chat(&session, body.clone()).0, 429);
    assert!(matches!(
        s.proxy.open(spec("task__4")),
        Err(SessionError::Closed(_))
    ));
    s.runtime
        .block_on(s.proxy.shutdown(Duration::from_secs(20)))
        .unwrap();
    assert!(TcpStream::connect(s.proxy.tcp().unwrap()).is_err());
}

#[test]
fn the_unix_socket_health_and_metrics_answer_and_a_taken_port_is_named() {
    let s = setup(vec![]);
    let _session = s.open("task__1");
    let mut socket = std::os::unix::net::UnixStream::connect(&s.proxy.unix_socket).unwrap();
    socket
        .write_all(b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        .unwrap();
    let mut text = String::new();
    socket.read_to_string(&mut text).unwrap();
    assert!(
        text.starts_with("HTTP/1.1 200") && text.contains("\"sessions\":1"),
        "{text}"
    );
    let metrics = ureq::get(s.url("/metrics"))
        .call()
        .unwrap()
        .body_mut()
        .read_to_string()
        .unwrap();
    assert!(
        metrics.contains("legorl_engine_kv_tokens_total{replica=\"0\"} 1048576"),
        "{metrics}"
    );
    let mut config = ProxyConfig::new(
        s._dir.path().join("q.sock"),
        "policy".into(),
        s._dir.path().to_owned(),
    );
    config.tcp = s.proxy.tcp();
    let error = Proxy::start(config.clone(), s.proxy.router().clone())
        .err()
        .unwrap()
        .to_string();
    assert!(
        error.contains("PROXY_PORT") && error.contains(&s.proxy.tcp().unwrap().to_string()),
        "{error}"
    );
    config.tcp = None;
    config.unix_socket = s.proxy.unix_socket.clone();
    let error = Proxy::start(config.clone(), s.proxy.router().clone())
        .err()
        .unwrap()
        .to_string();
    assert!(error.contains("p.sock"), "{error}");
    config.tool_call_parser = "herems".into();
    assert!(matches!(
        Proxy::start(config, s.proxy.router().clone()),
        Err(ProxyError::Format(_))
    ));
}

#[test]
fn fifty_mebibytes_of_tool_output_are_refused_and_nothing_is_lost() {
    let replies = ScriptedEngine::new(1 << 20, Box::new(|_, _| text_reply("hello<|im_end|>")));
    let s = setup_with(replies, 256 << 20);
    let (session, other) = (s.open("task__1"), s.open("task__2"));
    assert_eq!(s.chat(&session, json!({"messages": [user("go")]})).0, 200);
    let next = |content: &str| json!({"messages": [user("go"), {"role": "assistant", "content": "hello"}, user(content)]});
    std::thread::scope(|scope| {
        let big = scope.spawn(|| s.chat(&session, next(&"0123456789abcdef".repeat(50 << 16))));
        let mut served = 0;
        while !big.is_finished() {
            let (status, _) = s.chat(
                &other,
                json!({"messages": [user(&format!("q{served}"))], "max_tokens": 3}),
            );
            served += usize::from(status == 200);
        }
        let (status, answer) = big.join().unwrap();
        assert_eq!(
            (status, &answer["error"]["code"]),
            (400, &json!("context_length_exceeded")),
            "{answer}"
        );
        assert!(served > 0, "another session was served meanwhile");
    });
    assert_eq!(s.chat(&session, next("less")).0, 200);
    let captured = s.close(&session);
    assert_eq!(
        (
            captured.turns,
            captured.sequences.len(),
            captured.context_overflow
        ),
        (2, 1, false),
        "it went on after the overflow"
    );
}

#[test]
fn seeds_differ_by_branch_and_turn() {
    let mut all: Vec<u64> = (0..50)
        .flat_map(|b| (0..50).map(move |t| mix_seed(7, b, t)))
        .collect();
    all.sort_unstable();
    all.dedup();
    assert_eq!(all.len(), 2500);
}
