//! The agent in real sandboxes, against a scripted endpoint on a unix socket.

use super::*;
use crate::base::SessionEndpoint;
use crate::rollout::sandbox::{ProcessBackend, ProcessBackendConfig, SandboxBackend, SandboxSpec};
use serde_json::{json, Value};
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// What the endpoint does with a request.
#[derive(Clone)]
enum Answer {
    Json(u16, Value),
    Stream(Vec<Value>),
    HangUp,
    Silence,
}

/// A request as it arrived.
#[derive(Clone, Debug)]
struct Seen {
    line: String,
    headers: String,
    body: Value,
}

/// Gives the answers in order, the last one for ever.
fn endpoint(socket: &Path, answers: Vec<Answer>) -> Arc<Mutex<Vec<Seen>>> {
    let listener = UnixListener::bind(socket).unwrap();
    let seen = Arc::new(Mutex::new(Vec::new()));
    let record = seen.clone();
    std::thread::spawn(move || {
        let mut held = Vec::new();
        for stream in listener.incoming() {
            let stream = stream.unwrap();
            record.lock().unwrap().push(read_request(&stream));
            let count = record.lock().unwrap().len();
            match &answers[(count - 1).min(answers.len() - 1)] {
                Answer::HangUp => {}
                Answer::Silence => held.push(stream),
                Answer::Json(status, body) => reply(stream, *status, "application/json", &body.to_string()),
                Answer::Stream(chunks) => {
                    let mut text: String = chunks.iter().map(|c| format!("data: {c}\n\n")).collect();
                    text.push_str("data: [DONE]\n\n");
                    reply(stream, 200, "text/event-stream", &text);
                }
            }
        }
    });
    seen
}

fn read_request(stream: &UnixStream) -> Seen {
    let mut reader = BufReader::new(stream);
    let (mut line, mut headers, mut length) = (String::new(), String::new(), 0);
    reader.read_line(&mut line).unwrap();
    loop {
        let mut header = String::new();
        reader.read_line(&mut header).unwrap();
        let lower = header.to_lowercase();
        if let Some(value) = lower.strip_prefix("content-length:") {
            length = value.trim().parse().unwrap();
        }
        if header.trim().is_empty() {
            break;
        }
        headers.push_str(&lower);
    }
    let mut body = vec![0; length];
    reader.read_exact(&mut body).unwrap();
    Seen {
        line: line.trim().into(),
        headers,
        body: serde_json::from_slice(&body).unwrap(),
    }
}

fn reply(mut stream: UnixStream, status: u16, kind: &str, body: &str) {
    let head = format!(
        "HTTP/1.1 {status} X\r\ncontent-type: {kind}\r\ncontent-length: {}\r\nconnection: close\r\n\r\n",
        body.len()
    );
    stream.write_all((head + body).as_bytes()).ok();
}

fn says(content: &str) -> Answer {
    Answer::Json(
        200,
        json!({"choices": [{"message": {"role": "assistant", "content": content}}]}),
    )
}

fn calls(command: &str) -> Answer {
    let arguments = json!({"command": command}).to_string();
    let message = json!({
        "role": "assistant", "content": "", "reasoning_content": "hm",
        "tool_calls": [{"id": "call_1", "type": "function", "function": {"name": "bash", "arguments": arguments}}],
    });
    Answer::Json(
        200,
        json!({"choices": [{"message": message, "finish_reason": "tool_calls"}]}),
    )
}

struct Ran {
    run: AgentRun,
    seen: Vec<Seen>,
    log: String,
}

impl Ran {
    /// Content of the last tool message that the endpoint saw.
    fn tool_result(&self) -> String {
        let last = &self.seen.last().unwrap().body["messages"];
        let message = last.as_array().unwrap().last().unwrap();
        assert_eq!(message["role"], "tool");
        message["content"].as_str().unwrap().to_string()
    }
}

async fn run(answers: Vec<Answer>, config: MiniConfig, change: impl FnOnce(&mut AgentRequest)) -> Ran {
    run_in(None, answers, config, change).await
}

async fn run_in(
    rootfs: Option<PathBuf>,
    answers: Vec<Answer>,
    mut config: MiniConfig,
    change: impl FnOnce(&mut AgentRequest),
) -> Ran {
    let dir = tempfile::tempdir().unwrap();
    let helper = helper::for_tests();
    let socket = dir.path().join("proxy.sock");
    let seen = endpoint(&socket, answers);
    let backend = ProcessBackend::new(ProcessBackendConfig {
        state_dir: dir.path().join("state"),
        rootfs,
        helper: Some(helper.clone()),
        owner: "test".into(),
    });
    let mut spec = SandboxSpec::new("mini");
    spec.proxy_socket = Some(socket.clone());
    let sandbox = backend.start(spec).await.unwrap();

    config.helper = Some(helper);
    let mini = Mini::new(config);
    mini.check().unwrap();
    mini.setup(sandbox.as_ref()).await.unwrap();
    let mut request = AgentRequest {
        instruction: "Make the file `x`.\n".into(),
        endpoint: SessionEndpoint {
            session: "s1".into(),
            secret: "hush".into(),
            path: "/sess/s1.hush".into(),
            model: "policy".into(),
            tcp: None,
            unix_socket: socket,
        },
        timeout: Duration::from_secs(60),
        max_turns: 5,
        context_tokens: 4096,
        max_tokens_per_turn: 512,
        log_dir: dir.path().to_path_buf(),
    };
    change(&mut request);
    let run = mini.run(sandbox.as_ref(), request).await.unwrap();
    sandbox.delete().await.unwrap();
    let seen = seen.lock().unwrap().clone();
    let log = std::fs::read_to_string(dir.path().join("mini.jsonl")).unwrap();
    Ran { run, seen, log }
}

#[tokio::test]
async fn a_tool_call_is_run_and_its_result_sent_back() {
    let script = "echo hi > /app/x; cat /app/x; echo key=$OPENAI_API_KEY; exit 2";
    let ran = run(vec![calls(script), says("done")], MiniConfig::default(), |_| {}).await;
    assert_eq!(
        (ran.run.exit_code, ran.run.timed_out, ran.run.detail.as_str()),
        (Some(0), false, "")
    );
    assert_eq!(ran.seen.len(), 2);
    let first = &ran.seen[0];
    assert_eq!(first.line, "POST /sess/s1.hush/v1/chat/completions HTTP/1.1");
    assert!(
        first.headers.contains("authorization: bearer hush"),
        "{}",
        first.headers
    );
    let tools: Value = serde_json::from_str(include_str!("../../../../agent/prompt/tools.json")).unwrap();
    let system = include_str!("../../../../agent/prompt/system.txt").trim_end();
    assert_eq!(
        first.body,
        json!({
            "model": "policy",
            "messages": [
                {"role": "system", "content": system},
                {"role": "user", "content": "Make the file `x`."},
            ],
            "tools": tools,
        })
    );
    let Answer::Json(_, reply) = calls(script) else {
        unreachable!()
    };
    let messages = &ran.seen[1].body["messages"];
    assert_eq!(
        messages[2], reply["choices"][0]["message"],
        "the reply is not echoed as received"
    );
    let result = json!({"role": "tool", "tool_call_id": "call_1", "content": "hi\nkey=\n[exit 2]"});
    assert_eq!(messages[3], result);
    let events: Vec<Value> = ran
        .log
        .lines()
        .map(|l| serde_json::from_str(l).unwrap())
        .collect();
    let kinds: Vec<&str> = events.iter().map(|e| e["event"].as_str().unwrap()).collect();
    assert_eq!(kinds, ["start", "turn", "tool", "turn", "end"]);
}

#[tokio::test]
async fn streamed_replies_do_the_same() {
    let chunk = |delta: Value| json!({"choices": [{"delta": delta}]});
    let call = |index: u32, id: Value, arguments: &str| {
        let function =
            json!({"name": if id.is_null() { Value::Null } else { json!("bash") }, "arguments": arguments});
        chunk(json!({"tool_calls": [{"index": index, "id": id, "type": "function", "function": function}]}))
    };
    let streamed = Answer::Stream(vec![
        chunk(json!({"role": "assistant", "content": ""})),
        call(0, json!("a"), ""),
        call(0, Value::Null, "{\"command\": \"ec"),
        call(0, Value::Null, "ho streamed\"}"),
        json!({"choices": [{"delta": {}, "finish_reason": "tool_calls"}]}),
    ]);
    let config = MiniConfig {
        stream: true,
        ..MiniConfig::default()
    };
    let ran = run(vec![streamed, says("done")], config, |_| {}).await;
    assert_eq!(ran.run.exit_code, Some(0), "{}", ran.log);
    assert_eq!(ran.seen[0].body["stream"], true);
    let call = &ran.seen[1].body["messages"][2]["tool_calls"][0];
    assert_eq!(
        (&call["id"], &call["function"]["name"]),
        (&json!("a"), &json!("bash"))
    );
    assert_eq!(ran.tool_result(), "streamed");
}

#[tokio::test]
async fn the_turn_limit_ends_the_agent() {
    let ran = run(vec![calls("true")], MiniConfig::default(), |r| r.max_turns = 3).await;
    assert!(ran.run.turn_limit_reached && !ran.run.timed_out);
    assert_eq!(ran.seen.len(), 3);
}

#[tokio::test]
async fn passing_failures_are_tried_again_and_refusals_are_not() {
    let overloaded = Answer::Json(503, json!({"error": "busy"}));
    let answers = vec![overloaded, Answer::HangUp, says("done")];
    let ran = run(answers, MiniConfig::default(), |_| {}).await;
    assert_eq!((ran.run.exit_code, ran.seen.len()), (Some(0), 3), "{}", ran.log);
    let refused = Answer::Json(400, json!({"error": {"message": "context window exceeded"}}));
    let ran = run(vec![refused], MiniConfig::default(), |_| {}).await;
    assert_eq!((ran.run.exit_code, ran.seen.len()), (Some(4), 1));
    assert!(
        ran.run.detail.contains("context window exceeded"),
        "{}",
        ran.run.detail
    );
    let ran = run(
        vec![Answer::Json(200, json!({"choices": []}))],
        MiniConfig::default(),
        |_| {},
    )
    .await;
    assert_eq!(ran.run.exit_code, Some(6));
}

#[tokio::test]
async fn an_agent_that_hears_nothing_is_ended_by_its_limit() {
    let ran = run(vec![Answer::Silence], MiniConfig::default(), |r| {
        r.timeout = Duration::from_secs(1);
    })
    .await;
    assert!(ran.run.timed_out && ran.run.exit_code.is_none(), "{:?}", ran.run);
}

#[tokio::test]
async fn bad_calls_floods_and_hangs_are_told_to_the_model() {
    let call = |name: &str, arguments: &str| {
        let function = json!({"name": name, "arguments": arguments});
        let message =
            json!({"role": "assistant", "content": null, "tool_calls": [{"id": "c", "function": function}]});
        Answer::Json(200, json!({"choices": [{"message": message}]}))
    };
    let flood = calls("head -c 52428800 /dev/zero | tr '\\0' y");
    for (answer, want) in [
        (call("python", "{}"), "there is no tool `python`"),
        (call("bash", "{\"command\": 3}"), "takes one string argument"),
        (call("bash", "{\"comm"), "takes one string argument"),
        (calls("sleep 600"), "[killed after 1 s]"),
        (flood, "[52418800 bytes left out]"),
    ] {
        let config = MiniConfig {
            command_timeout_secs: Some(1),
            ..MiniConfig::default()
        };
        let config = if want.contains("bytes") {
            MiniConfig::default()
        } else {
            config
        };
        let ran = run(vec![answer, says("done")], config, |_| {}).await;
        let result = ran.tool_result();
        assert!(
            result.contains(want) && result.len() < 11_000,
            "{want}: {result:.200}"
        );
    }
}

/// The agent is a static program and needs nothing but a shell.
#[tokio::test]
async fn it_runs_where_there_is_only_a_shell() {
    let busybox = ["/bin/busybox", "/usr/bin/busybox"]
        .iter()
        .find(|p| Path::new(p).exists());
    let dir = tempfile::tempdir().unwrap();
    let bin = dir.path().join("bin");
    std::fs::create_dir(&bin).unwrap();
    std::fs::copy(busybox.expect("install busybox-static"), bin.join("sh")).unwrap();
    let answers = vec![calls("echo $0 > /made; cd /bin; echo *"), says("done")];
    let ran = run_in(Some(dir.path().into()), answers, MiniConfig::default(), |_| {}).await;
    assert_eq!(
        (ran.run.exit_code, ran.tool_result().as_str()),
        (Some(0), "sh"),
        "{}",
        ran.log
    );
}
