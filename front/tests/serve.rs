//! `legorl-rank serve` as a user runs it: the program, its admin requests, three protocols, a scripted engine
//! and a vLLM-shaped backend. What it hands over is compared with what the engine sent.

use serde_json::{json, Map, Value};
use std::{
    fs,
    io::{BufRead, BufReader, Read, Write},
    net::{TcpListener, TcpStream},
    path::Path,
    process::{Child, Command, ExitStatus, Stdio},
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};
use tempfile::TempDir;

const SECRET: &str = "open sesame";
const DEADLINE: Duration = Duration::from_secs(60);

/// Ids: a byte is itself, then the tokens of [`ADDED`].
const ADDED: [&str; 5] = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<tool_call>",
    "</tool_call>",
];
const END: u32 = 258;

const TEMPLATE: &str = "{%- if tools %}{{- '<|im_start|>system\n' + (tools | tojson) + '<|im_end|>\n' }}{%- endif %}
{%- for m in messages %}{{- '<|im_start|>' + m.role + '\n' + m.content }}
{%- for call in m.tool_calls or [] %}{{- '<tool_call>\n' + ({'name': call.function.name, 'arguments': call.function.arguments} | tojson) + '\n</tool_call>' }}{%- endfor %}
{{- '<|im_end|>\n' }}{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}";

/// A tokenizer of single bytes with a template for it.
fn model_folder(dir: &Path) {
    let mut vocab = Map::new();
    let mut next = 0x100;
    for byte in 0..=255u32 {
        let printable = matches!(byte, 0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff);
        let c = char::from_u32(if printable { byte } else { next }).unwrap();
        next += u32::from(!printable);
        vocab.insert(c.to_string(), json!(byte));
    }
    let added: Vec<Value> = ADDED
        .iter()
        .enumerate()
        .map(|(i, content)| {
            json!({"id": 256 + i, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
                   "normalized": false, "special": i < 3})
        })
        .collect();
    let bytes =
        json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": true});
    let tokenizer = json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": added, "normalizer": null,
        "pre_tokenizer": bytes, "post_processor": null, "decoder": bytes,
        "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
                  "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "vocab": vocab, "merges": []},
    });
    fs::write(dir.join("tokenizer.json"), tokenizer.to_string()).unwrap();
    fs::write(
        dir.join("tokenizer_config.json"),
        json!({"eos_token": "<|im_end|>"}).to_string(),
    )
    .unwrap();
    fs::write(dir.join("chat_template.jinja"), TEMPLATE).unwrap();
}

/// Ids of a text by the table above.
fn ids(text: &str) -> Vec<u32> {
    let mut out = Vec::new();
    let mut rest = text;
    while !rest.is_empty() {
        if let Some(i) = ADDED.iter().position(|token| rest.starts_with(token)) {
            out.push(256 + i as u32);
            rest = &rest[ADDED[i].len()..];
        } else {
            let length = rest.chars().next().unwrap().len_utf8();
            out.extend(rest[..length].bytes().map(u32::from));
            rest = &rest[length..];
        }
    }
    out
}

/// What the scripted engine reports for the token at this place of a reply.
fn logprob(id: u32, index: usize) -> f32 {
    -0.001 - (id % 97) as f32 / 64.0 - (index % 31) as f32 / 2048.0
}

/// The running program.
struct Server {
    child: Child,
    stdout: BufReader<std::process::ChildStdout>,
    address: String,
    dir: TempDir,
}

impl Server {
    fn start(arguments: &[&str], script: &str) -> Self {
        let dir = tempfile::tempdir().unwrap();
        model_folder(dir.path());
        fs::write(
            dir.path().join("run.env"),
            "MODEL_PATH=.\nTOOL_CALL_PARSER=hermes\n",
        )
        .unwrap();
        fs::write(dir.path().join("script.jsonl"), script).unwrap();
        let mut child = Command::new(env!("CARGO_BIN_EXE_legorl-rank"))
            .args(["serve", "run.env", "--listen", "127.0.0.1:0"])
            .args(arguments)
            .current_dir(dir.path())
            .env_clear()
            .env("LEGORL_ADMIN_SECRET", SECRET)
            .stdout(Stdio::piped())
            .stderr(fs::File::create(dir.path().join("errors")).unwrap())
            .spawn()
            .unwrap();
        let mut stdout = BufReader::new(child.stdout.take().unwrap());
        let mut address = String::new();
        while !address.contains("serving on http://") {
            address.clear();
            assert!(
                stdout.read_line(&mut address).unwrap() > 0,
                "it ended before it served"
            );
        }
        let address = address
            .split_once("http://")
            .unwrap()
            .1
            .split(' ')
            .next()
            .unwrap()
            .to_owned();
        Self {
            child,
            stdout,
            address,
            dir,
        }
    }

    fn call(&self, method: &str, path: &str, headers: &str, body: &str) -> (u16, String) {
        let mut stream = TcpStream::connect(&self.address).unwrap();
        stream.set_read_timeout(Some(DEADLINE)).unwrap();
        let length = body.len();
        let head = format!("{method} {path} HTTP/1.1\r\nhost: {}\r\nconnection: close\r\n{headers}content-length: {length}\r\n\r\n", self.address);
        stream.write_all((head + body).as_bytes()).unwrap();
        let mut text = String::new();
        stream.read_to_string(&mut text).unwrap();
        let (head, body) = text.split_once("\r\n\r\n").unwrap();
        let status = head.split(' ').nth(1).unwrap().parse().unwrap();
        let chunked = head.to_ascii_lowercase().contains("transfer-encoding: chunked");
        (status, if chunked { unchunk(body) } else { body.to_owned() })
    }

    fn admin(&self, method: &str, path: &str, secret: &str, body: &str) -> (u16, Value) {
        let header = format!("authorization: Bearer {secret}\r\n");
        let (status, text) = self.call(method, path, &header, body);
        (status, serde_json::from_str(&text).unwrap())
    }

    /// Opens a session; its id and its path with the secret in it.
    fn open(&self) -> (String, String) {
        let (status, opened) = self.admin("POST", "/admin/sessions", SECRET, "{}");
        assert_eq!(status, 201, "{opened}");
        let (id, secret) = (opened["id"].as_str().unwrap(), opened["secret"].as_str().unwrap());
        assert_eq!(
            opened["base_url"],
            format!("http://{}/sess/{id}~{secret}", self.address)
        );
        (id.to_owned(), format!("/sess/{id}~{secret}"))
    }

    fn post(&self, path: &str, body: &Value) -> (u16, Value) {
        let (status, text) = self.call("POST", path, "", &body.to_string());
        (status, serde_json::from_str(&text).unwrap_or(Value::String(text)))
    }

    fn close(&self, id: &str) -> Value {
        let (status, record) = self.admin("DELETE", &format!("/admin/sessions/{id}"), SECRET, "");
        assert_eq!(status, 200, "{record}");
        record
    }

    fn terminate(&self) {
        let status = Command::new("kill")
            .args(["-TERM", &self.child.id().to_string()])
            .status()
            .unwrap();
        assert!(status.success());
    }

    fn wait(&mut self) -> ExitStatus {
        let end = Instant::now() + DEADLINE;
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status;
            }
            assert!(
                Instant::now() < end,
                "it did not end within {} s",
                DEADLINE.as_secs()
            );
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn unchunk(mut body: &str) -> String {
    let mut out = String::new();
    while let Some((size, rest)) = body.split_once("\r\n") {
        let size = usize::from_str_radix(size, 16).unwrap();
        out += &rest[..size];
        body = rest.get(size + 2..).unwrap_or_default();
    }
    out
}

/// The branch holds exactly these replies as sampled, in order, with the scripted engine's log-probs.
fn assert_captured(branch: &Value, replies: &[Vec<u32>]) {
    let list = |name: &str| branch[name].as_array().unwrap().clone();
    let (tokens, mask, logprobs) = (list("token_ids"), list("mask"), list("logprobs"));
    let mut at = 0;
    for reply in replies {
        while mask[at] == 0 {
            assert_eq!(logprobs[at], 0.0);
            at += 1;
        }
        for (index, id) in reply.iter().enumerate() {
            assert_eq!((&tokens[at], &mask[at]), (&json!(id), &json!(1)), "token {at}");
            assert_eq!(
                logprobs[at].as_f64().unwrap() as f32,
                logprob(*id, index),
                "token {at}"
            );
            at += 1;
        }
    }
    assert!(mask[at..].iter().all(|m| *m == 0), "nothing else was sampled");
}

const CALL: &str = "look\n<tool_call>\n{\"name\": \"run\", \"arguments\":{\"cmd\":  \"ls\"}}\n</tool_call>";

fn script() -> String {
    let rest: Vec<u32> = ids("d\u{f6}ne").into_iter().chain([END]).collect();
    format!("{}\n{}\n", json!(CALL), json!({"token_ids": rest}))
}

fn replies() -> Vec<Vec<u32>> {
    [CALL, "d\u{f6}ne"]
        .map(|text| ids(text).into_iter().chain([END]).collect())
        .into()
}

#[test]
fn chat_messages_and_responses_are_captured_as_the_script_says() {
    let server = Server::start(&["--engine", "scripted", "--script", "script.jsonl"], &script());
    let schema = json!({"type": "object", "properties": {"cmd": {"type": "string"}}});

    let (id, path) = server.open();
    let url = format!("{path}/v1/chat/completions");
    let tools = json!([{"type": "function", "function": {"name": "run", "parameters": schema}}]);
    let mut messages = vec![json!({"role": "user", "content": "go"})];
    let (status, first) = server.post(
        &url,
        &json!({"messages": messages, "tools": tools, "return_token_ids": true}),
    );
    assert_eq!(status, 200, "{first}");
    let message = &first["choices"][0]["message"];
    assert_eq!(
        message["tool_calls"][0]["function"]["arguments"],
        "{\"cmd\":\"ls\"}"
    );
    assert_eq!(first["choices"][0]["token_ids"], json!(replies()[0]));
    messages.push(message.clone());
    messages
        .push(json!({"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "a.txt"}));
    let body = json!({"messages": messages, "tools": tools, "stream": true});
    let (status, stream) = server.post(&url, &body);
    assert_eq!(status, 200);
    assert!(
        stream.as_str().unwrap().trim_end().ends_with("data: [DONE]"),
        "{stream}"
    );
    let record = server.close(&id);
    assert_captured(&record["branches"][0], &replies());
    assert_eq!((&record["requests"], &record["refused"]), (&json!(2), &json!(0)));
    let given: Vec<u64> = (0..15)
        .map(|i| record["branches"][0]["token_ids"][i].as_u64().unwrap())
        .collect();
    let want: Vec<u64> = ids("<|im_start|>system\n[{\"type")
        .into_iter()
        .map(u64::from)
        .take(15)
        .collect();
    assert_eq!(given, want);
    assert_eq!(
        server.post(&url, &body).0,
        404,
        "nothing is left of a closed session"
    );

    let (id, path) = server.open();
    let url = format!("{path}/v1/messages");
    let tools = json!([{"name": "run", "input_schema": schema}]);
    let mut messages = vec![json!({"role": "user", "content": "go"})];
    let ask =
        |messages: &[Value]| json!({"model": "m", "max_tokens": 400, "messages": messages, "tools": tools});
    let (status, first) = server.post(&url, &ask(&messages));
    assert_eq!(
        (status, &first["stop_reason"]),
        (200, &json!("tool_use")),
        "{first}"
    );
    let call = first["content"][1]["id"].clone();
    messages.push(json!({"role": "assistant", "content": first["content"]}));
    messages.push(json!({"role": "user", "content": [{"type": "tool_result", "tool_use_id": call, "content": "a.txt"}]}));
    let (status, second) = server.post(&url, &ask(&messages));
    assert_eq!(
        (status, &second["content"][0]["text"]),
        (200, &json!("d\u{f6}ne")),
        "{second}"
    );
    let (status, counted) = server.post(&format!("{url}/count_tokens"), &ask(&messages));
    assert!(
        status == 200 && counted["input_tokens"].as_u64().unwrap() > 100,
        "{counted}"
    );
    let record = server.close(&id);
    assert_eq!(record["branches"].as_array().unwrap().len(), 1);
    assert_captured(&record["branches"][0], &replies());

    let (id, path) = server.open();
    let url = format!("{path}/v1/responses");
    let tools = json!([{"type": "function", "name": "run", "parameters": schema}]);
    let mut input = vec![json!({"role": "user", "content": "go"})];
    let ask = |input: &[Value]| json!({"model": "m", "input": input, "tools": tools, "store": false});
    let (status, first) = server.post(&url, &ask(&input));
    assert_eq!(status, 200, "{first}");
    let output = first["output"].as_array().unwrap().clone();
    let call = output
        .iter()
        .find(|item| item["type"] == "function_call")
        .unwrap()["call_id"]
        .clone();
    input.extend(output);
    input.push(json!({"type": "function_call_output", "call_id": call, "output": "a.txt"}));
    assert_eq!(server.post(&url, &ask(&input)).0, 200);
    let record = server.close(&id);
    assert_eq!(record["branches"].as_array().unwrap().len(), 1);
    assert_captured(&record["branches"][0], &replies());
}

#[test]
fn secrets_are_asked_for_and_fixed_replies_take_their_time() {
    let server = Server::start(
        &["--engine", "scripted", "--reply-tokens", "7", "--reply-ms", "200"],
        "",
    );
    assert_eq!(server.admin("POST", "/admin/sessions", "wrong", "{}").0, 401);
    assert_eq!(server.call("POST", "/admin/sessions", "", "{}").0, 401);
    // What no turn could be sampled with is refused here.
    for body in [
        r#"{"temperature": -1}"#,
        r#"{"top_p": 0}"#,
        r#"{"top_p": 2}"#,
        r#"{"max_tokens_per_turn": 0}"#,
        r#"{"max_turns": 0}"#,
        "[]",
    ] {
        let (status, answer) = server.admin("POST", "/admin/sessions", SECRET, body);
        assert_eq!(status, 400, "{body}: {answer}");
    }
    assert_eq!(server.admin("DELETE", "/admin/sessions/none", SECRET, "").0, 404);
    let (id, path) = server.open();
    let (_, other) = server.open();
    let body = json!({"messages": [{"role": "user", "content": "go"}]});
    let stolen = format!(
        "/sess/{id}~{}/v1/chat/completions",
        other.split_once('~').unwrap().1
    );
    assert_eq!(server.post(&stolen, &body).0, 401);
    assert_eq!(
        server
            .admin("DELETE", &format!("/admin/sessions/{id}"), "wrong", "")
            .0,
        401
    );
    let begin = Instant::now();
    let (status, answer) = server.post(&format!("{path}/v1/chat/completions"), &body);
    assert!(begin.elapsed() >= Duration::from_millis(200));
    assert_eq!(
        (status, &answer["usage"]["completion_tokens"]),
        (200, &json!(7)),
        "{answer}"
    );
    let record = server.close(&id);
    let mask = record["branches"][0]["mask"].as_array().unwrap();
    assert_eq!(mask.iter().filter(|m| **m == 1).count(), 7);
    assert_eq!((&record["requests"], &record["turns"]), (&json!(1), &json!(1)));
}

#[test]
fn sigterm_drains() {
    let mut server = Server::start(
        &[
            "--engine",
            "scripted",
            "--reply-tokens",
            "3",
            "--reply-ms",
            "2000",
        ],
        "",
    );
    let (_, path) = server.open();
    let body = json!({"messages": [{"role": "user", "content": "go"}]});
    let late = json!({"messages": [{"role": "user", "content": "late"}], "max_tokens": 5});
    std::thread::scope(|scope| {
        let running = scope.spawn(|| server.post(&format!("{path}/v1/chat/completions"), &body));
        std::thread::sleep(Duration::from_millis(500));
        server.terminate();
        let end = Instant::now() + DEADLINE;
        while server.call("GET", "/health", "", "").0 != 503 {
            assert!(Instant::now() < end, "it never drained");
            std::thread::sleep(Duration::from_millis(10));
        }
        assert_eq!(server.post(&format!("{path}/v1/chat/completions"), &late).0, 429);
        assert_eq!(server.post(&format!("{path}/v1/messages"), &late).0, 529);
        let (status, answer) = running.join().unwrap();
        assert_eq!(
            (status, &answer["usage"]["completion_tokens"]),
            (200, &json!(3)),
            "{answer}"
        );
    });
    assert!(server.wait().success());
    let mut rest = String::new();
    server.stdout.read_to_string(&mut rest).unwrap();
    assert!(rest.contains("draining"), "{rest}");
    let said = fs::read_to_string(server.dir.path().join("errors")).unwrap();
    assert!(said.contains("SIGTERM: new requests are refused"), "{said}");
    assert!(!said.contains("checkpoint"), "{said}");
}

/// What the vLLM-shaped double does with one completion request.
enum Answer {
    /// Tokens with log-probs, and the end.
    Reply(Vec<(u32, f32)>),
    /// Tokens, and then the connection breaks.
    Break(Vec<(u32, f32)>),
    /// A status with a body.
    Status(u16, &'static str),
    /// An event without token ids, as other servers send.
    NoIds,
}

type Seen = Arc<Mutex<Vec<Value>>>;

/// A server with vLLM's `/v1/models` and `/v1/completions`, one connection a request.
fn backend(answers: Vec<Answer>) -> (String, Seen) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let seen = Seen::default();
    let log = seen.clone();
    std::thread::spawn(move || {
        let mut answers = answers.into_iter();
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            let mut reader = BufReader::new(stream.try_clone().unwrap());
            let (mut head, mut length) = (String::new(), 0);
            let mut line = String::new();
            while reader.read_line(&mut line).unwrap() > 2 {
                if let Some(value) = line.to_ascii_lowercase().strip_prefix("content-length: ") {
                    length = value.trim().parse().unwrap();
                }
                head += &line;
                line.clear();
            }
            if head.starts_with("GET /v1/models ") {
                let list = json!({"object": "list", "data": [{"id": "org/model", "max_model_len": 300}]})
                    .to_string();
                let head = format!(
                    "HTTP/1.1 200 OK\r\ncontent-length: {}\r\nconnection: close\r\n\r\n",
                    list.len()
                );
                stream.write_all((head + &list).as_bytes()).unwrap();
                continue;
            }
            assert!(head.starts_with("POST /v1/completions "), "{head}");
            let mut body = vec![0; length];
            reader.read_exact(&mut body).unwrap();
            log.lock().unwrap().push(serde_json::from_slice(&body).unwrap());
            answer(&mut stream, answers.next().expect("no request was expected"));
        }
    });
    (url, seen)
}

fn answer(stream: &mut TcpStream, answer: Answer) {
    let event = |tokens: &[(u32, f32)], reason: Option<&str>| {
        let (ids, logprobs): (Vec<u32>, Vec<f32>) = tokens.iter().copied().unzip();
        let logprobs = json!({"token_logprobs": logprobs, "tokens": ids.iter().map(|i| format!("token_id:{i}")).collect::<Vec<_>>(), "top_logprobs": null, "text_offset": []});
        let choice = json!({"index": 0, "text": "", "token_ids": ids, "logprobs": logprobs, "finish_reason": reason, "stop_reason": null});
        format!(
            "data: {}\n\n",
            json!({"id": "cmpl-1", "object": "text_completion", "model": "org/model", "choices": [choice]})
        )
    };
    let chunk = |text: &str| format!("{:x}\r\n{text}\r\n", text.len());
    let mut send = |text: String| stream.write_all(text.as_bytes()).unwrap();
    let head = || {
        "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n".to_owned()
    };
    match answer {
        Answer::Reply(tokens) => {
            send(head());
            let (last, first) = tokens.split_last().unwrap();
            for token in first {
                send(chunk(&event(&[*token], None)));
            }
            send(chunk(&event(&[*last], Some("stop"))) + &chunk("data: [DONE]\n\n") + "0\r\n\r\n");
        }
        Answer::Break(tokens) => send(head() + &chunk(&event(&tokens, None))),
        Answer::Status(status, body) => {
            send(format!(
                "HTTP/1.1 {status} x\r\ncontent-length: {}\r\n\r\n{body}",
                body.len()
            ));
        }
        Answer::NoIds => {
            let event = "data: {\"choices\": [{\"text\": \"a\", \"logprobs\": {\"token_logprobs\": [-0.5]}, \"finish_reason\": null}]}\n\n";
            send(head() + &chunk(event) + "0\r\n\r\n");
        }
    }
}

#[test]
fn a_vllm_backend_is_captured_token_by_token_and_its_failures_are_told() {
    let text: Vec<(u32, f32)> = ids("hello")
        .into_iter()
        .zip([-0.5, -0.25, -1.5, -0.125, -2.0])
        .collect();
    let whole = [text.clone(), vec![(END, -0.75)]].concat();
    let (url, seen) = backend(vec![
        Answer::Reply(whole.clone()),
        Answer::Break(text[..2].to_vec()),
        Answer::Reply(whole[2..].to_vec()),
        Answer::Status(
            400,
            "{\"error\": {\"message\": \"This model's maximum context length is 300 tokens.\"}}",
        ),
        Answer::NoIds,
        Answer::Status(500, "{\"error\": {\"message\": \"CUDA error\"}}"),
    ]);
    let server = Server::start(&["--engine", &url], "");
    let (id, path) = server.open();
    let path = format!("{path}/v1/chat/completions");
    let ask = |text: &str| json!({"messages": [{"role": "user", "content": text}], "max_tokens": 250});
    let (status, first) = server.post(&path, &ask("go"));
    assert_eq!(
        (status, &first["choices"][0]["message"]["content"]),
        (200, &json!("hello")),
        "{first}"
    );
    // The backend breaks off, comes back, and goes on where it stopped.
    let (status, second) = server.post(&path, &ask("again"));
    assert_eq!(
        (status, &second["choices"][0]["message"]["content"]),
        (200, &json!("hello")),
        "{second}"
    );
    let requests = seen.lock().unwrap().clone();
    let prompt: Vec<u32> = ids("<|im_start|>user\ngo<|im_end|>\n<|im_start|>assistant\n");
    assert_eq!(requests[0]["prompt"], json!(prompt));
    assert_eq!(
        (&requests[0]["model"], &requests[0]["return_token_ids"]),
        (&json!("org/model"), &json!(true))
    );
    assert_eq!(requests[0]["max_tokens"], 250.min(300 - prompt.len()));
    let continued = [
        ids("<|im_start|>user\nagain<|im_end|>\n<|im_start|>assistant\n"),
        ids("he"),
    ]
    .concat();
    assert_eq!(requests[2]["prompt"], json!(continued));
    // Failures: each says what it was; a prompt that does not fit says it in the words that agents know.
    let (status, answer) = server.post(&path, &ask("too long for it"));
    assert!(
        status == 400 && answer["error"]["code"] == "context_length_exceeded",
        "{answer}"
    );
    let (status, answer) = server.post(&path, &ask(&"much ".repeat(60)));
    assert!(
        status == 400 && answer.to_string().contains("> 300 maximum"),
        "{answer}"
    );
    let (status, answer) = server.post(&path, &ask("no ids"));
    assert!(
        status == 500 && answer.to_string().contains("return_token_ids"),
        "{answer}"
    );
    let (status, answer) = server.post(&path, &ask("broken"));
    assert!(
        status == 500 && answer.to_string().contains("CUDA error"),
        "{answer}"
    );
    let record = server.close(&id);
    assert_eq!(
        (&record["turns"], &record["requests"], &record["refused"]),
        (&json!(2), &json!(6), &json!(4))
    );
    assert_eq!(record["context_overflow"], true);
    for branch in record["branches"].as_array().unwrap() {
        let all = branch["token_ids"].as_array().unwrap().len();
        let from = all - whole.len();
        let got: Vec<(u32, f32)> = (from..all)
            .map(|i| {
                (
                    branch["token_ids"][i].as_u64().unwrap() as u32,
                    branch["logprobs"][i].as_f64().unwrap() as f32,
                )
            })
            .collect();
        assert_eq!(got, whole);
        assert!((0..all).all(|i| branch["mask"][i] == i32::from(i >= from)));
    }
}

#[test]
fn an_engine_that_cannot_be_reached_is_named() {
    let dir = tempfile::tempdir().unwrap();
    model_folder(dir.path());
    fs::write(dir.path().join("run.env"), "MODEL_PATH=.\n").unwrap();
    let free = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let run = |secret: &str, engine: &str| {
        let output = Command::new(env!("CARGO_BIN_EXE_legorl-rank"))
            .args(["serve", "run.env", "--engine", engine])
            .current_dir(dir.path())
            .env_clear()
            .env("LEGORL_ADMIN_SECRET", secret)
            .output()
            .unwrap();
        assert!(!output.status.success());
        String::from_utf8_lossy(&output.stderr).into_owned()
    };
    let text = run(SECRET, &format!("http://{free}"));
    assert!(
        text.contains(&free.to_string()) && text.contains("cannot be reached"),
        "{text}"
    );
    assert!(run("", "scripted").contains("LEGORL_ADMIN_SECRET"));
    assert!(run(SECRET, "scripted").contains("--reply-tokens"));
    assert!(run(SECRET, "vlm").contains("native, scripted or a URL"));
    // An address that is in use: the option that was given is named.
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let output = Command::new(env!("CARGO_BIN_EXE_legorl-rank"))
        .args([
            "serve",
            "run.env",
            "--engine",
            "scripted",
            "--reply-tokens",
            "3",
            "--listen",
        ])
        .arg(taken.local_addr().unwrap().to_string())
        .current_dir(dir.path())
        .env_clear()
        .env("LEGORL_ADMIN_SECRET", SECRET)
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(
        !output.status.success() && text.contains("--listen") && !text.contains("PROXY_PORT"),
        "{text}"
    );
}
