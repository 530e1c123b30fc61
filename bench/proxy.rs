//! Cost of the proxy under load, with a client of its own.
//!
//! ```text
//! cargo bench -p legorl-front --bench proxy -- MODEL_DIR load   [SESSIONS] [TURNS] [ENGINE_MS]
//! cargo bench -p legorl-front --bench proxy -- MODEL_DIR growth [TURNS]
//! cargo bench -p legorl-front --bench proxy -- MODEL_DIR memory [SESSIONS]
//! cargo bench -p legorl-front --bench proxy -- MODEL_DIR many   [SESSIONS] [TURNS]
//! ```
//!
//! The proxy is a process of its own on core 0, as `legorl-rank serve` runs it, with a scripted engine;
//! the client runs on core 1 and opens sessions over HTTP. A session sends its whole conversation with
//! every call: 12 KB of system prompt, 20 KB of tools, a tool result of 1 to 4 KB a turn (2.5 KB in
//! `growth`), and gets 64 tokens with a tool call. CPU time and memory are the proxy's, from /proc.
//!
//! | Scenario | Figures |
//! |---|---|
//! | `load` | closed loop: calls/s, CPU-seconds for 1,000 calls, what a call takes beyond the engine's time, memory |
//! | `growth` | one session: milliseconds by turn, and how much more each turn takes (least squares) |
//! | `memory` | memory for each idle session of about 40,000 tokens |
//! | `many` | concurrent sessions that each make a few calls; errors |

use legorl_front::{
    base::{GenerateRequest, ReplicaId, SamplingParams},
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
    sync::Arc,
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
    if args.first().is_some_and(|a| a == "--server") {
        return server(Path::new(&args[1]), args[2].parse()?, args[3].parse()?);
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

/// A tool call of 64 tokens.
fn reply(tokenizer: &Tokenizer) -> Outcome<ScriptedReply> {
    let named = tokenizer.named_tokens().get("eos_token");
    let end = named
        .and_then(|t| tokenizer.token_to_id(t))
        .ok_or("no eos_token")?;
    let call = |words: usize| {
        let text = "list ".repeat(words);
        format!("<tool_call>\n{{\"name\": \"run\", \"arguments\": {{\"cmd\": \"{text}\"}}}}\n</tool_call>")
    };
    let mut ids = Vec::new();
    for words in 1..64 {
        let next = tokenizer.encode_rendered(&call(words))?;
        if next.len() > 63 {
            break;
        }
        ids = next;
    }
    ids.push(end);
    Ok(ids.into())
}

/// A running proxy.
struct Server {
    child: Child,
    address: String,
}

impl Server {
    fn start(model: &str, engine_ms: usize, threads: usize) -> Outcome<Self> {
        let mut child = Command::new(std::env::current_exe()?)
            .args(["--server", model, &engine_ms.to_string(), &threads.to_string()])
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

    /// User and system time so far.
    fn cpu_secs(&self) -> Outcome<f64> {
        let stat = self.proc("stat")?;
        let after = stat.rsplit_once(')').ok_or("stat")?.1;
        let fields: Vec<&str> = after.split_whitespace().collect();
        Ok((fields[11].parse::<f64>()? + fields[12].parse::<f64>()?) / 100.0)
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
        let system = json!({"role": "system", "content": words(99, 12_000)});
        Ok(Self {
            connection,
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
        let call = &message["tool_calls"][0]["id"];
        if status != 200 || call.is_null() {
            return Err(format!("turn {}: {status} {answer}", self.turn).into());
        }
        let output = words(self.seed * 1000 + self.turn, bytes);
        let result = json!({"role": "tool", "tool_call_id": call, "content": output});
        self.messages += &format!(",{message},{result}");
        self.turn += 1;
        Ok(took)
    }
}

fn tools() -> Arc<str> {
    let tool = |n: usize| {
        json!({"type": "function", "function": {"name": if n == 0 { "run".into() } else { format!("tool_{n}") },
            "description": words(n, 900), "parameters": {"type": "object", "properties": {"cmd": {"type": "string"}}}}})
    };
    let tools: Vec<Value> = (0..20).map(tool).collect();
    Value::from(tools).to_string().into()
}

/// Text of about `bytes` bytes that differs by `seed`, like the output of a build: words of a language,
/// paths, numbers, punctuation.
fn words(seed: usize, bytes: usize) -> String {
    let pool = [
        "error",
        "src/main.rs",
        "fn",
        "let x = 42;",
        "warning: unused",
        "ok",
        "\n",
        "test result",
        "0x1f",
        "->",
        "{",
        "}",
        "assert_eq!",
        "passed;",
        "thread",
        "panicked at",
        "expected",
        "found",
        "/usr/lib/python3",
        "import",
    ];
    let mut state = seed as u64 + 1;
    let mut out = String::new();
    while out.len() < bytes {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        match (state >> 33) % 8 {
            // New words, which no cache has seen.
            0 => out += &format!("{:x}", state >> 40),
            1 => out += &format!("line {}", (state >> 45) % 5000),
            _ => out += pool[(state >> 36) as usize % pool.len()],
        }
        out.push(' ');
    }
    out
}

fn at(sorted: &[f64], share: f64) -> f64 {
    sorted[((sorted.len() - 1) as f64 * share) as usize]
}

async fn load(model: &str, sessions: usize, turns: usize, engine_ms: usize) -> Outcome<()> {
    let server = Server::start(model, engine_ms, 1)?;
    let tools = tools();
    let mut open = Vec::new();
    for seed in 0..sessions {
        open.push(Session::open(&server.address, &tools, seed).await?);
    }
    let (start, cpu) = (Instant::now(), server.cpu_secs()?);
    let runs = open.into_iter().map(|mut session| async move {
        let mut times = Vec::new();
        for turn in 0..turns {
            let bytes = 1000 + (session.seed * 7 + turn * 13) % 31 * 100;
            times.push(session.turn(bytes).await?);
        }
        Ok::<_, Box<dyn Error>>((times, session.messages.len()))
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
        "{sessions} sessions x {turns} turns, engine {engine_ms} ms, last request {} KB",
        (done[0].1 + tools.len()) / 1000
    );
    println!(
        "{:.0} calls/s; {:.3} CPU-s for 1,000 calls = {:.0} calls per CPU-second; {:.0} MiB",
        calls / wall,
        cpu / calls * 1e3,
        calls / cpu,
        server.memory_mib()?
    );
    println!(
        "beyond the engine's time: p50 {:.2} ms, p90 {:.2} ms, p99 {:.2} ms, max {:.2} ms",
        at(&added, 0.5),
        at(&added, 0.9),
        at(&added, 0.99),
        at(&added, 1.0)
    );
    Ok(())
}

async fn growth(model: &str, turns: usize) -> Outcome<()> {
    const ROUNDS: usize = 5;
    let server = Server::start(model, 0, 1)?;
    let tools = tools();
    let mut times = vec![Vec::new(); turns];
    for seed in 0..ROUNDS {
        let mut session = Session::open(&server.address, &tools, seed).await?;
        for slot in &mut times {
            slot.push(session.turn(2500).await? * 1e3);
        }
    }
    let medians: Vec<f64> = times
        .iter()
        .map(|t| {
            let mut sorted = t.clone();
            sorted.sort_by(f64::total_cmp);
            at(&sorted, 0.5)
        })
        .collect();
    for turn in [0, 1, 3, 15, 31, 63, 127, 199].into_iter().filter(|t| *t < turns) {
        println!("turn {:>4}: {:.3} ms", turn + 1, medians[turn]);
    }
    let points: Vec<(f64, f64)> = medians
        .iter()
        .enumerate()
        .skip(1)
        .map(|(x, y)| (x as f64, *y))
        .collect();
    let n = points.len() as f64;
    let (mx, my) = (
        points.iter().map(|p| p.0).sum::<f64>() / n,
        points.iter().map(|p| p.1).sum::<f64>() / n,
    );
    let slope = points.iter().map(|p| (p.0 - mx) * (p.1 - my)).sum::<f64>()
        / points.iter().map(|p| (p.0 - mx).powi(2)).sum::<f64>();
    println!("growth: {slope:.4} ms more each turn (medians of {ROUNDS} sessions)");
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
        for _ in 0..34 {
            session.turn(2500).await?;
        }
        session.turn(100).await?;
        open.push(session);
    }
    tokio::time::sleep(Duration::from_secs(1)).await;
    let used = server.memory_mib()? - before;
    println!(
        "{sessions} idle sessions of 36 turns, {} KB of messages each: {used:.0} MiB, {:.3} MiB a session",
        open[0].messages.len() / 1000,
        used / sessions as f64
    );

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
