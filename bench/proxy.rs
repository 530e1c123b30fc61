//! Cost of the proxy under load, with a client of its own.
//!
//! ```text
//! cargo bench -p legorl-front --bench proxy -- MODEL_DIR load   [SESSIONS] [TURNS] [ENGINE_MS]
//! cargo bench -p legorl-front --bench proxy -- MODEL_DIR growth [TURNS]
//! cargo bench -p legorl-front --bench proxy -- MODEL_DIR memory [SESSIONS]
//! cargo bench -p legorl-front --bench proxy -- MODEL_DIR many   [SESSIONS] [TURNS]
//! cargo bench -p legorl-front --bench proxy -- MODEL_DIR encode [CHUNKS]
//! ```
//!
//! The proxy is a process of its own on core 0, as `legorl-rank serve` runs it, with a scripted engine;
//! the client runs on core 1 and opens sessions over HTTP. A session sends its whole conversation with
//! every call: 12 KB of system prompt, 20 KB of tools, a tool result of 1 to 4 KB a turn (2.5 KB in
//! `growth`), and gets 64 tokens with a tool call. Texts are pieces of this program's own source, with a new number
//! in every tenth line. The client checks every reply, and at the end the record of every session. CPU
//! time and memory are the proxy's, engine included, by its CPU clock and /proc. Where the engine takes time,
//! the sessions begin evenly spread over one engine time.
//!
//! | Scenario | Figures |
//! |---|---|
//! | `load` | closed loop: calls/s, CPU-seconds for 1,000 calls, what a call takes beyond the engine's time, memory; beside it in the same run the same client with a server that reads the body and answers, without any proxy |
//! | `growth` | one session: milliseconds and CPU milliseconds by turn, and how much more each turn takes (least squares) |
//! | `memory` | memory for each idle session of about 40,000 tokens |
//! | `many` | concurrent sessions on two cores that each make a few calls; errors |
//! | `encode` | new text to ids, microseconds for 2.5 KB: the library `tokenizers` and ours, which must agree |

use legorl_front::{
    base::{Engine, GenerateRequest, ReplicaId, RequestId, SamplingParams},
    model::tokenizer::Tokenizer,
    serve::{
        engine::scripted::{ScriptedEngine, ScriptedReply},
        proxy::{
            router::{Router, RouterConfig},
            AdminConfig, Proxy, ProxyConfig,
        },
    },
};
use serde_json::{json, Value};
use std::{
    error::Error,
    io::{BufRead, BufReader},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::{
        atomic::{AtomicU64, Ordering},
        Arc, OnceLock,
    },
    time::{Duration, Instant},
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
};

type Outcome<T> = Result<T, Box<dyn Error>>;

const SECRET: &str = "bench";

fn main() -> Outcome<()> {
    let args: Vec<String> = std::env::args().skip(1).filter(|a| a != "--bench").collect();
    raise_open_files();
    match args.first().map(String::as_str) {
        Some("--server") => return server(Path::new(&args[1]), args[2].parse()?, args[3].parse()?),
        Some("--stub") => return stub(args[1].parse()?),
        _ => {}
    }
    let [model, scenario, rest @ ..] = &args[..] else {
        println!("SKIPPED: give a model folder (tokenizer.json and chat template) and a scenario");
        return Ok(());
    };
    let number = |at: usize, default: usize| rest.get(at).map_or(Ok(default), |n| n.parse());
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    pin(1);
    match scenario.as_str() {
        "load" => runtime.block_on(load(model, number(0, 64)?, number(1, 64)?, number(2, 0)?)),
        "growth" => runtime.block_on(growth(model, number(0, 128)?)),
        "memory" => runtime.block_on(memory(model, number(0, 100)?)),
        "many" => runtime.block_on(many(model, number(0, 2000)?, number(1, 4)?)),
        "encode" => encode(Path::new(model), number(0, 2000)?),
        other => Err(format!("`{other}` is no scenario").into()),
    }
}

/// Keeps this process on one core, where the machine has two.
fn pin(core: usize) {
    // SAFETY: the set is plain memory that the call reads; 0 is this thread.
    unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        libc::CPU_SET(core, &mut set);
        libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), &set);
    }
}

/// Thousands of connections need as many open files as the system allows.
fn raise_open_files() {
    // SAFETY: plain calls with a valid structure.
    unsafe {
        let mut limit: libc::rlimit = std::mem::zeroed();
        if libc::getrlimit(libc::RLIMIT_NOFILE, &mut limit) == 0 {
            limit.rlim_cur = limit.rlim_max;
            libc::setrlimit(libc::RLIMIT_NOFILE, &limit);
        }
    }
}

/// No proxy: reads the body, lets the same engine's time pass, gives a reply of the same form.
fn stub(engine_ms: u64) -> Outcome<()> {
    pin(0);
    let call =
        json!({"id": "call_1", "type": "function", "function": {"name": "run", "arguments": arguments()}});
    let reply = json!({"choices": [{"index": 0, "finish_reason": "tool_calls",
                                    "message": {"role": "assistant", "content": null, "tool_calls": [call]}}],
                       "usage": {"completion_tokens": TOKENS, "prompt_tokens": 1}})
    .to_string();
    let script = ScriptedReply {
        first_delay: Duration::from_millis(engine_ms),
        ..vec![0].into()
    };
    let engine = Arc::new(ScriptedEngine::new(1 << 40, Box::new(move |_, _| script.clone())));
    let number = Arc::new(AtomicU64::new(0));
    let answer = move |request: axum::extract::Request| {
        let (engine, reply, number) = (engine.clone(), reply.clone(), number.clone());
        async move {
            let path = request.uri().path().to_owned();
            let body = axum::body::to_bytes(request.into_body(), usize::MAX).await;
            let json = |status: u16, text: String| {
                let status = axum::http::StatusCode::from_u16(status).expect("a status");
                (
                    status,
                    [(axum::http::header::CONTENT_TYPE, "application/json")],
                    text,
                )
            };
            if body.is_err() {
                return json(400, String::new());
            }
            if path == "/admin/sessions" {
                return json(201, json!({"id": "s", "secret": "x"}).to_string());
            }
            let (sender, mut events) = tokio::sync::mpsc::unbounded_channel();
            let request = GenerateRequest {
                id: RequestId(number.fetch_add(1, Ordering::Relaxed)),
                session: "s".into(),
                prompt: Arc::new([]),
                sampling: SamplingParams::default(),
                stop_token_ids: Vec::new(),
                max_new_tokens: 1,
                routing_from: None,
            };
            engine.submit(request, sender);
            while events.recv().await.is_some() {}
            json(200, reply)
        }
    };
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .enable_all()
        .build()?;
    runtime.block_on(async {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await?;
        println!("{}", listener.local_addr()?);
        let listener = axum::serve::ListenerExt::tap_io(listener, |stream: &mut tokio::net::TcpStream| {
            let _ = stream.set_nodelay(true);
        });
        let routes = axum::Router::new().fallback(answer);
        let stopped = async {
            let wait = tokio::task::spawn_blocking(|| std::io::stdin().read_line(&mut String::new()));
            let _ = wait.await;
        };
        axum::serve(listener, routes)
            .with_graceful_shutdown(stopped)
            .await?;
        Ok(())
    })
}

/// The proxy until its standard input ends.
fn server(model: &Path, engine_ms: u64, threads: usize) -> Outcome<()> {
    pin(0);
    let reply = ScriptedReply {
        first_delay: Duration::from_millis(engine_ms),
        ..reply(&Tokenizer::from_dir(model)?)?
    };
    let script = move |_: &GenerateRequest, _| reply.clone();
    let router = Arc::new(Router::new(RouterConfig::default()));
    router.join(
        ReplicaId(0),
        Arc::new(ScriptedEngine::new(1 << 40, Box::new(script))),
    );
    let socket = std::env::temp_dir().join(format!("proxy-bench-{}.sock", std::process::id()));
    let mut config = ProxyConfig::new(socket, "policy".into(), model.to_owned());
    config.tcp = Some(([127, 0, 0, 1], 0).into());
    config.threads = threads;
    config.admin = Some(AdminConfig {
        secret: SECRET.into(),
        sampling: SamplingParams::default(),
        max_turns: 1 << 20,
        max_total_tokens: 1 << 24,
        max_tokens_per_turn: 64,
        max_time: Duration::from_secs(36_000),
    });
    let proxy = Proxy::start(config, router)?;
    println!("{}", proxy.tcp().ok_or("no TCP address")?);
    let mut line = String::new();
    std::io::stdin().read_line(&mut line)?;
    Ok(())
}

/// Sampled tokens of a reply.
const TOKENS: usize = 64;
/// `list` in the command of the reply's call.
const WORDS: usize = 38;

/// The arguments of the reply's call, as the client gets them.
fn arguments() -> String {
    json!({"cmd": "list ".repeat(WORDS)}).to_string()
}

/// A tool call of [`TOKENS`] tokens, the end of turn among them.
fn reply(tokenizer: &Tokenizer) -> Outcome<ScriptedReply> {
    let named = tokenizer.named_tokens().get("eos_token");
    let end = named
        .and_then(|t| tokenizer.token_to_id(t))
        .ok_or("no eos_token")?;
    let call = format!(
        "<tool_call>\n{{\"name\": \"run\", \"arguments\": {}}}\n</tool_call>",
        arguments()
    );
    let mut ids = tokenizer.encode_rendered(&call)?;
    // What is missing are line breaks after the call, which are not part of it.
    while ids.len() < TOKENS - 1 {
        ids.extend(tokenizer.encode_rendered("\n")?);
    }
    ids.push(end);
    if ids.len() != TOKENS {
        return Err(format!(
            "the reply has {} tokens with this tokenizer, not {TOKENS}",
            ids.len()
        )
        .into());
    }
    Ok(ids.into())
}

/// A running proxy.
struct Server {
    child: Child,
    address: String,
}

impl Server {
    fn start(model: &str, engine_ms: usize, threads: usize) -> Outcome<Self> {
        Self::spawn(&["--server", model, &engine_ms.to_string(), &threads.to_string()])
    }

    fn spawn(arguments: &[&str]) -> Outcome<Self> {
        let mut child = Command::new(std::env::current_exe()?)
            .args(arguments)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let mut address = String::new();
        let stdout = child.stdout.take().ok_or("no output of the server")?;
        BufReader::new(stdout).read_line(&mut address)?;
        Ok(Self {
            child,
            address: address.trim().to_owned(),
        })
    }

    fn proc(&self, file: &str) -> Outcome<String> {
        let path = PathBuf::from(format!("/proc/{}/{file}", self.child.id()));
        Ok(std::fs::read_to_string(path)?)
    }

    /// User and system time so far, of all its threads.
    fn cpu_secs(&self) -> Outcome<f64> {
        // SAFETY: both calls write into the structures that they are given.
        unsafe {
            let (mut clock, mut time) = (0, std::mem::zeroed::<libc::timespec>());
            let pid = self.child.id() as libc::pid_t;
            if libc::clock_getcpuclockid(pid, &mut clock) != 0 || libc::clock_gettime(clock, &mut time) != 0 {
                return Err("the process has no CPU clock".into());
            }
            Ok(time.tv_sec as f64 + time.tv_nsec as f64 / 1e9)
        }
    }

    fn memory_mib(&self) -> Outcome<f64> {
        let status = self.proc("status")?;
        let line = status.lines().find(|l| l.starts_with("VmRSS:")).ok_or("VmRSS")?;
        let kib: f64 = line.split_whitespace().nth(1).ok_or("VmRSS")?.parse()?;
        Ok(kib / 1024.0)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // Its input ends, and with it the process.
        drop(self.child.stdin.take());
        let _ = self.child.wait();
    }
}

/// One kept-alive connection.
struct Connection {
    stream: TcpStream,
    buffer: Vec<u8>,
}

impl Connection {
    async fn open(address: &str) -> Outcome<Self> {
        let stream = TcpStream::connect(address).await?;
        stream.set_nodelay(true)?;
        Ok(Self {
            stream,
            buffer: vec![0; 64 << 10],
        })
    }

    /// Sends a request whose body is these parts; gives status and body.
    async fn call(&mut self, method: &str, path: &str, parts: &[&str]) -> Outcome<(u16, Value)> {
        let length: usize = parts.iter().map(|p| p.len()).sum();
        let head = format!(
            "{method} {path} HTTP/1.1\r\nhost: bench\r\nauthorization: Bearer {SECRET}\r\ncontent-length: {length}\r\n\r\n"
        );
        self.stream.write_all(head.as_bytes()).await?;
        for part in parts {
            self.stream.write_all(part.as_bytes()).await?;
        }
        let mut got = 0;
        loop {
            if got == self.buffer.len() {
                self.buffer.resize(got * 2, 0);
            }
            let n = self.stream.read(&mut self.buffer[got..]).await?;
            if n == 0 {
                return Err("the proxy closed the connection".into());
            }
            got += n;
            let Some(end) = self.buffer[..got].windows(4).position(|w| w == b"\r\n\r\n") else {
                continue;
            };
            let head = std::str::from_utf8(&self.buffer[..end])?;
            let field = head.lines().find_map(|l| l.strip_prefix("content-length: "));
            let length: usize = field.ok_or("no content-length")?.parse()?;
            if got >= end + 4 + length {
                let status = head.split(' ').nth(1).ok_or("no status")?.parse()?;
                let body = serde_json::from_slice(&self.buffer[end + 4..end + 4 + length])?;
                return Ok((status, body));
            }
        }
    }
}

/// A session and what its agent remembers.
struct Session {
    connection: Connection,
    id: String,
    path: String,
    tools: Arc<str>,
    messages: String,
    seed: usize,
    turn: usize,
}

impl Session {
    async fn open(address: &str, tools: &Arc<str>, seed: usize) -> Outcome<Self> {
        let mut connection = Connection::open(address).await?;
        let (status, opened) = connection.call("POST", "/admin/sessions", &["{}"]).await?;
        if status != 201 {
            return Err(opened.to_string().into());
        }
        let (id, secret) = (
            opened["id"].as_str().ok_or("id")?,
            opened["secret"].as_str().ok_or("secret")?,
        );
        let system = json!({"role": "system", "content": text(usize::MAX, 12_000)});
        Ok(Self {
            connection,
            id: id.to_owned(),
            path: format!("/sess/{id}~{secret}/v1/chat/completions"),
            tools: tools.clone(),
            messages: format!(
                "{system},{}",
                json!({"role": "user", "content": format!("fix number {seed}")})
            ),
            seed,
            turn: 0,
        })
    }

    /// One call and its tool result of `bytes`; seconds of the call.
    async fn turn(&mut self, bytes: usize) -> Outcome<f64> {
        let parts = [
            "{\"model\":\"policy\",\"messages\":[",
            &self.messages,
            "],\"tools\":",
            &self.tools,
            "}",
        ];
        let start = Instant::now();
        let (status, answer) = self.connection.call("POST", &self.path, &parts).await?;
        let took = start.elapsed().as_secs_f64();
        let message = &answer["choices"][0]["message"];
        let call = &message["tool_calls"][0];
        let right = status == 200
            && call["id"].is_string()
            && call["function"]["name"] == "run"
            && call["function"]["arguments"] == arguments()
            && answer["usage"]["completion_tokens"] == TOKENS;
        if !right {
            return Err(format!("turn {}: {status} {answer}", self.turn).into());
        }
        let output = text(self.seed * 1000 + self.turn, bytes);
        let result = json!({"role": "tool", "tool_call_id": call["id"], "content": output});
        self.messages += &format!(",{message},{result}");
        self.turn += 1;
        Ok(took)
    }

    /// Closes the session and checks what was recorded: one branch, every reply in it.
    async fn check(&mut self) -> Outcome<usize> {
        let path = format!("/admin/sessions/{}", self.id);
        let (status, record) = self.connection.call("DELETE", &path, &[]).await?;
        let branches = record["branches"].as_array().ok_or("no branches")?;
        let sampled = |branch: &Value| {
            let mask = branch["mask"].as_array().into_iter().flatten();
            mask.filter(|m| **m == 1).count()
        };
        let whole = branches.len() == 1 && sampled(&branches[0]) == self.turn * TOKENS;
        if status != 200 || !whole || record["requests"] != self.turn || record["refused"] != 0 {
            return Err(format!("session {}: {status}, {} branches", self.id, branches.len()).into());
        }
        Ok(branches[0]["token_ids"].as_array().map_or(0, Vec::len))
    }
}

fn tools() -> Arc<str> {
    let tool = |n: usize| {
        json!({"type": "function", "function": {"name": if n == 0 { "run".into() } else { format!("tool_{n}") },
            "description": text(1 << 40 | n, 860), "parameters": {"type": "object", "properties": {"cmd": {"type": "string"}}}}})
    };
    let tools: Vec<Value> = (0..20).map(tool).collect();
    Value::from(tools).to_string().into()
}

/// Text of `bytes` bytes (a few less at most) that differs by `seed`: a piece of this program's source, with a new
/// number in every tenth line, as tools print them.
fn text(seed: usize, bytes: usize) -> String {
    static SOURCE: OnceLock<String> = OnceLock::new();
    let source = SOURCE.get_or_init(|| {
        let mut files = Vec::new();
        list(&Path::new(env!("CARGO_MANIFEST_DIR")).join("../src"), &mut files);
        files.sort();
        let texts = files.iter().filter_map(|f| std::fs::read_to_string(f).ok());
        texts.collect()
    });
    let mut state = (seed as u64).wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let mut random = move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    };
    let mut at = random() as usize % (source.len() - 2 * bytes);
    while !source.is_char_boundary(at) {
        at += 1;
    }
    let mut out = String::new();
    for (number, line) in source[at..].lines().enumerate() {
        if number % 10 == 9 {
            out += &format!("0x{:012x} ", random() >> 16);
        }
        out += line;
        out.push('\n');
        if out.len() >= bytes {
            break;
        }
    }
    let mut end = bytes.min(out.len());
    while !out.is_char_boundary(end) {
        end -= 1;
    }
    out.truncate(end);
    out
}

fn list(folder: &Path, files: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
        let path = entry.path();
        if path.is_dir() {
            list(&path, files);
        } else if path.extension().is_some_and(|e| e == "rs") {
            files.push(path);
        }
    }
}

fn at(sorted: &[f64], share: f64) -> f64 {
    sorted[((sorted.len() - 1) as f64 * share) as usize]
}

async fn load(model: &str, sessions: usize, turns: usize, engine_ms: usize) -> Outcome<()> {
    println!("{sessions} sessions x {turns} turns, engine {engine_ms} ms");
    let stub = Server::spawn(&["--stub", &engine_ms.to_string()])?;
    let base = drive("no proxy", &stub, sessions, turns, engine_ms).await?.0;
    drop(stub);
    let server = Server::start(model, engine_ms, 1)?;
    let (added, mut open) = drive("proxy", &server, sessions, turns, engine_ms).await?;
    println!(
        "the proxy adds to a call: p50 {:.2} ms, p99 {:.2} ms (differences of the percentiles)",
        at(&added, 0.5) - at(&base, 0.5),
        at(&added, 0.99) - at(&base, 0.99)
    );
    let mut tokens = 0;
    for session in &mut open {
        tokens = session.check().await?;
    }
    println!("every reply and every record is right; {tokens} tokens in the last one");
    Ok(())
}

/// All sessions at once; the sorted milliseconds beyond the engine's time.
async fn drive(
    name: &str,
    server: &Server,
    sessions: usize,
    turns: usize,
    engine_ms: usize,
) -> Outcome<(Vec<f64>, Vec<Session>)> {
    let tools = tools();
    let mut open = Vec::new();
    for seed in 0..sessions {
        open.push(Session::open(&server.address, &tools, seed).await?);
    }
    let (start, cpu) = (Instant::now(), server.cpu_secs()?);
    let runs = open
        .into_iter()
        .enumerate()
        .map(|(number, mut session)| async move {
            let mut times = Vec::new();
            // Agents do not march in step: they begin within one turn of each other.
            let pause = Duration::from_millis(engine_ms as u64) * number as u32 / sessions as u32;
            tokio::time::sleep(pause).await;
            for turn in 0..turns {
                let bytes = 1000 + (session.seed * 7 + turn * 13) % 31 * 100;
                times.push(session.turn(bytes).await?);
            }
            Ok::<_, Box<dyn Error>>((times, session))
        });
    let done = futures::future::try_join_all(runs).await?;
    let (wall, cpu) = (start.elapsed().as_secs_f64(), server.cpu_secs()? - cpu);
    let calls = (sessions * turns) as f64;
    let engine = engine_ms as f64 / 1e3;
    let mut added: Vec<f64> = done
        .iter()
        .flat_map(|(times, _)| times.iter().map(|t| (t - engine) * 1e3))
        .collect();
    added.sort_by(f64::total_cmp);
    println!(
        "{name:<9} {:>5.0} calls/s; {:.3} CPU-s for 1,000 calls = {:>5.0} calls per CPU-second; {:.0} MiB; last request {} KB",
        calls / wall,
        cpu / calls * 1e3,
        calls / cpu,
        server.memory_mib()?,
        (done[0].1.messages.len() + tools.len()) / 1000
    );
    println!(
        "          beyond the engine's time: p50 {:.2} ms, p90 {:.2} ms, p99 {:.2} ms, max {:.2} ms",
        at(&added, 0.5),
        at(&added, 0.9),
        at(&added, 0.99),
        at(&added, 1.0)
    );
    Ok((added, done.into_iter().map(|(_, session)| session).collect()))
}

/// Growth of the medians by turn (least squares, without the first).
fn slope(medians: &[f64]) -> f64 {
    let points = || medians.iter().enumerate().skip(1).map(|(x, y)| (x as f64, *y));
    let n = points().count() as f64;
    let (mx, my) = (
        points().map(|p| p.0).sum::<f64>() / n,
        points().map(|p| p.1).sum::<f64>() / n,
    );
    points().map(|p| (p.0 - mx) * (p.1 - my)).sum::<f64>() / points().map(|p| (p.0 - mx).powi(2)).sum::<f64>()
}

fn median(times: &[f64]) -> f64 {
    let mut sorted = times.to_vec();
    sorted.sort_by(f64::total_cmp);
    at(&sorted, 0.5)
}

async fn growth(model: &str, turns: usize) -> Outcome<()> {
    const ROUNDS: usize = 9;
    let server = Server::start(model, 0, 1)?;
    let tools = tools();
    let (mut wall, mut cpu) = (vec![Vec::new(); turns], vec![Vec::new(); turns]);
    let mut bytes = 0;
    for seed in 0..ROUNDS {
        let mut session = Session::open(&server.address, &tools, seed).await?;
        for turn in 0..turns {
            let before = server.cpu_secs()?;
            wall[turn].push(session.turn(2500).await? * 1e3);
            cpu[turn].push((server.cpu_secs()? - before) * 1e3);
        }
        bytes = session.messages.len() + tools.len();
        session.check().await?;
    }
    let wall: Vec<f64> = wall.iter().map(|t| median(t)).collect();
    let cpu: Vec<f64> = cpu.iter().map(|t| median(t)).collect();
    for turn in [0, 1, 3, 15, 31, 63, 127, 199].into_iter().filter(|t| *t < turns) {
        println!(
            "turn {:>4}: {:.3} ms, of it {:.3} ms of CPU",
            turn + 1,
            wall[turn],
            cpu[turn]
        );
    }
    println!(
        "growth: {:.4} ms more each turn, {:.4} ms of CPU (medians of {ROUNDS} sessions, one after the other; last request {} KB)",
        slope(&wall),
        slope(&cpu),
        bytes / 1000
    );
    Ok(())
}

/// The same new text through the library and through ours, each from an empty cache.
fn encode(model: &Path, chunks: usize) -> Outcome<()> {
    let texts: Vec<String> = (0..chunks).map(|n| text(n, 2500)).collect();
    let library =
        tokenizers::Tokenizer::from_file(model.join("tokenizer.json")).map_err(|e| e.to_string())?;
    let ours = Tokenizer::from_dir(model)?;
    let time = |encode: &dyn Fn(&str) -> Outcome<Vec<u32>>| -> Outcome<(f64, f64, Vec<Vec<u32>>)> {
        let (mut ids, mut times) = (Vec::new(), Vec::new());
        for text in &texts {
            let start = Instant::now();
            ids.push(encode(text)?);
            times.push(start.elapsed().as_secs_f64() * 1e6);
        }
        Ok((
            times.iter().sum::<f64>() / times.len() as f64,
            median(&times),
            ids,
        ))
    };
    let (mean, middle, want) = time(&|text| {
        let encoding = library.encode_fast(text, false).map_err(|e| e.to_string())?;
        Ok(encoding.get_ids().to_vec())
    })?;
    println!("tokenizers: {mean:.0} µs a chunk of 2.5 KB (median {middle:.0})");
    let (mean, middle, got) = time(&|text| Ok(ours.encode_rendered(text)?))?;
    println!("ours:       {mean:.0} µs a chunk of 2.5 KB (median {middle:.0})");
    let equal = want.iter().zip(&got).filter(|(a, b)| a == b).count();
    println!("{equal} of {chunks} chunks have the same ids");
    if equal != chunks {
        return Err("the ids differ".into());
    }
    Ok(())
}

async fn memory(model: &str, sessions: usize) -> Outcome<()> {
    let server = Server::start(model, 0, 1)?;
    let tools = tools();
    let mut first = Session::open(&server.address, &tools, 1 << 20).await?;
    first.turn(2500).await?;
    let before = server.memory_mib()?;
    let mut open = Vec::new();
    for seed in 0..sessions {
        let mut session = Session::open(&server.address, &tools, seed).await?;
        for _ in 0..40 {
            session.turn(2500).await?;
        }
        session.turn(100).await?;
        open.push(session);
    }
    tokio::time::sleep(Duration::from_secs(1)).await;
    let used = server.memory_mib()? - before;
    println!(
        "{sessions} idle sessions of 42 turns, {} KB of messages each: {used:.0} MiB, {:.3} MiB a session",
        open[0].messages.len() / 1000,
        used / sessions as f64
    );
    let tokens = open[0].check().await?;
    println!("{tokens} tokens in the first one");
    Ok(())
}

async fn many(model: &str, sessions: usize, turns: usize) -> Outcome<()> {
    let server = Server::start(model, 1000, 2)?;
    let tools = tools();
    let mut open = Vec::new();
    for seed in 0..sessions {
        open.push(Session::open(&server.address, &tools, seed).await?);
    }
    let start = Instant::now();
    let runs = open.into_iter().map(|mut session| async move {
        for _ in 0..turns {
            session.turn(2500).await?;
        }
        Ok::<_, Box<dyn Error>>(())
    });
    let results = futures::future::join_all(runs).await;
    let errors: Vec<String> = results
        .iter()
        .filter_map(|r| r.as_ref().err().map(ToString::to_string))
        .collect();
    println!(
        "{sessions} concurrent sessions x {turns} turns, engine 1000 ms: {} errors, {:.0} calls/s, {:.0} MiB",
        errors.len(),
        (sessions * turns) as f64 / start.elapsed().as_secs_f64(),
        server.memory_mib()?
    );
    match errors.first() {
        Some(error) => Err(error.clone().into()),
        None => Ok(()),
    }
}
