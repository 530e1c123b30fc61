//! Time that the proxy adds to a turn, against the length of the conversation.
//!
//! `cargo bench --bench proxy -- MODEL_DIR [TURNS] [SESSIONS]`
//!
//! One client per session sends a growing conversation (12 KB system prompt, 20 KB of tools, tool
//! results of 2.5 KB, 64 reply tokens) over a kept-alive TCP connection; the engine answers at once, so
//! the time of a call is the proxy's own plus loopback HTTP. Printed by turn: median and p99 of the wall
//! time, and the CPU time of the proxy's threads, which other load on the machine disturbs less; then
//! the growth per turn of both, from least-squares lines.

use legorl::{
    base::{
        GroupId, Purpose, ReplicaId, SamplingParams, SessionEndpoint, SessionHost, SessionLimits,
        SessionSpec, TrialKey,
    },
    model::tokenizer::Tokenizer,
    serve::{
        engine::scripted::{ScriptedEngine, ScriptedReply},
        proxy::{
            router::{Router, RouterConfig},
            Proxy, ProxyConfig,
        },
    },
};
use serde_json::{json, Value};
use std::{
    io::{BufRead, BufReader, Read, Write},
    net::{SocketAddr, TcpStream},
    path::PathBuf,
    sync::Arc,
    time::{Duration, Instant},
};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let args: Vec<String> = std::env::args()
        .skip(1)
        .filter(|a| !a.starts_with("--"))
        .collect();
    let Some(model_dir) = args.first().map(PathBuf::from) else {
        println!("SKIPPED: give a model folder (tokenizer.json and chat template)");
        return Ok(());
    };
    let turns: usize = args.get(1).map_or(Ok(200), |t| t.parse())?;
    let sessions: usize = args.get(2).map_or(Ok(1), |t| t.parse())?;
    let tokenizer = Tokenizer::from_dir(&model_dir)?;
    let reply = reply(&tokenizer)?;
    let router = Arc::new(Router::new(RouterConfig::default()));
    let script = move |_: &legorl::base::GenerateRequest, _| reply.clone();
    router.join(
        ReplicaId(0),
        Arc::new(ScriptedEngine::new(1 << 40, Box::new(script))),
    );
    let socket = std::env::temp_dir().join(format!("proxy-bench-{}.sock", std::process::id()));
    let mut config = ProxyConfig::new(socket, "policy".into(), model_dir);
    config.tcp = Some(([127, 0, 0, 1], 0).into());
    let proxy = Proxy::start(config, router)?;
    let address = proxy.tcp().ok_or("no TCP address")?;
    let started = (Instant::now(), cpu_secs()?);
    let times: Vec<Vec<(f64, f64)>> = std::thread::scope(|scope| {
        let clients: Vec<_> = (0..sessions)
            .map(|n| {
                let endpoint = proxy.open(spec(n)).map_err(|e| e.to_string());
                scope.spawn(move || client(address, &endpoint?, turns).map_err(|e| e.to_string()))
            })
            .collect();
        clients
            .into_iter()
            .map(|c| c.join().map_err(|_| "a client failed".to_owned())?)
            .collect::<Result<_, String>>()
    })?;
    let (wall, cpu) = (started.0.elapsed().as_secs_f64(), cpu_secs()? - started.1);
    println!(
        "{:>6} {:>10} {:>10} {:>10}",
        "turn", "wall ms", "p99 ms", "CPU ms"
    );
    for turn in (0..turns).filter(|t| [1, 9, 19, 49, 99, 127, 149, 199].contains(t)) {
        let from = turn.saturating_sub(4).max(1);
        let near: Vec<_> = times
            .iter()
            .flat_map(|t| t[from..(turn + 5).min(turns)].to_vec())
            .collect();
        let sorted = |pick: fn(&(f64, f64)) -> f64| {
            let mut values: Vec<f64> = near.iter().map(pick).collect();
            values.sort_by(f64::total_cmp);
            values
        };
        let (wall, cpu) = (sorted(|t| t.0), sorted(|t| t.1));
        let (middle, high) = (near.len() / 2, near.len() * 99 / 100);
        println!(
            "{:>6} {:>10.3} {:>10.3} {:>10.3}",
            turn + 1,
            wall[middle],
            wall[high],
            cpu[middle]
        );
    }
    let slope = |pick: fn(&(f64, f64)) -> f64| {
        let series = times.iter().flat_map(|t| t.iter().enumerate().skip(1));
        let points: Vec<_> = series.map(|(x, y)| (x as f64, pick(y))).collect();
        let n = points.len() as f64;
        let mx = points.iter().map(|p| p.0).sum::<f64>() / n;
        let my = points.iter().map(|p| p.1).sum::<f64>() / n;
        points.iter().map(|p| (p.0 - mx) * (p.1 - my)).sum::<f64>()
            / points.iter().map(|p| (p.0 - mx).powi(2)).sum::<f64>()
    };
    println!(
        "growth: wall {:.5} ms, CPU {:.5} ms a turn; first turn {:.2} ms",
        slope(|t| t.0),
        slope(|t| t.1),
        times[0][0].0
    );
    if sessions > 1 {
        println!("(CPU by turn is that of all sessions together while the call ran)");
    }
    let calls = (turns * sessions) as f64;
    println!(
        "{calls} calls in {wall:.2} s: {:.0} calls/s, {:.2} CPU-s per 1000 calls (client included)",
        calls / wall,
        cpu / calls * 1000.0
    );
    Ok(())
}

fn spec(n: usize) -> SessionSpec {
    SessionSpec {
        key: TrialKey {
            purpose: Purpose::Train,
            group: GroupId(n as u64),
            sample: 0,
        },
        attempt: 0,
        name: format!("bench__{n}"),
        sampling: SamplingParams::default(),
        limits: SessionLimits {
            max_turns: 1 << 20,
            max_total_tokens: 1 << 24,
            max_tokens_per_turn: 64,
            max_consecutive_no_tool: 0,
            deadline: Instant::now() + Duration::from_secs(3600),
        },
    }
}

/// A tool call of 64 tokens.
fn reply(tokenizer: &Tokenizer) -> Result<ScriptedReply, Box<dyn std::error::Error>> {
    let end = *tokenizer
        .stop_ids()
        .last()
        .ok_or("the model folder names no stop token")?;
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

/// Milliseconds of each turn: wall, and CPU of the proxy's threads.
fn client(
    address: SocketAddr,
    endpoint: &SessionEndpoint,
    turns: usize,
) -> Result<Vec<(f64, f64)>, Box<dyn std::error::Error>> {
    let mut connection = TcpStream::connect(address)?;
    connection.set_nodelay(true)?;
    let mut reader = BufReader::new(connection.try_clone()?);
    let tools: Vec<Value> = (0..20)
        .map(|n| json!({"type": "function", "function": {"name": if n == 0 { "run".into() } else { format!("tool_{n}") },
            "description": words(n, 900), "parameters": {"type": "object", "properties": {"cmd": {"type": "string"}}}}}))
        .collect();
    let tools = Value::from(tools).to_string();
    let mut messages = json!({"role": "system", "content": words(99, 12_000)}).to_string();
    messages += &format!(",{}", json!({"role": "user", "content": "fix it"}));
    let mut times = Vec::new();
    for turn in 0..turns {
        let body = format!("{{\"model\":\"policy\",\"messages\":[{messages}],\"tools\":{tools}}}");
        let head = format!(
            "POST {}/v1/chat/completions HTTP/1.1\r\nhost: bench\r\ncontent-length: {}\r\n\r\n",
            endpoint.path,
            body.len()
        );
        let (start, cpu) = (Instant::now(), proxy_cpu_ms()?);
        connection.write_all(head.as_bytes())?;
        connection.write_all(body.as_bytes())?;
        let (mut status, mut length) = (String::new(), 0);
        reader.read_line(&mut status)?;
        loop {
            let mut line = String::new();
            reader.read_line(&mut line)?;
            if let Some(n) = line.to_ascii_lowercase().strip_prefix("content-length:") {
                length = n.trim().parse()?;
            }
            if line == "\r\n" {
                break;
            }
        }
        let mut answer = vec![0; length];
        reader.read_exact(&mut answer)?;
        times.push((start.elapsed().as_secs_f64() * 1e3, proxy_cpu_ms()? - cpu));
        let answer: Value = serde_json::from_slice(&answer)?;
        let message = &answer["choices"][0]["message"];
        let call = &message["tool_calls"][0]["id"];
        if !status.contains("200") || call.is_null() {
            return Err(format!("turn {turn}: {status} {answer}").into());
        }
        let result = json!({"role": "tool", "tool_call_id": call, "content": words(turn, 2500)});
        messages += &format!(",{message},{result}");
    }
    Ok(times)
}

/// Text of about `bytes` bytes that differs by `seed`, like the output of a build.
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
    ];
    let mut state = seed as u64 + 1;
    let mut out = String::new();
    while out.len() < bytes {
        state = state
            .wrapping_mul(6364136223846793005)
            .wrapping_add(1442695040888963407);
        out += pool[(state >> 33) as usize % pool.len()];
        out.push(' ');
    }
    out
}

/// CPU time of the threads named `proxy`, from the scheduler's accounting in nanoseconds.
fn proxy_cpu_ms() -> Result<f64, Box<dyn std::error::Error>> {
    let mut total = 0.0;
    for task in std::fs::read_dir("/proc/self/task")? {
        let path = task?.path();
        let name = std::fs::read_to_string(path.join("comm"));
        let stat = std::fs::read_to_string(path.join("schedstat"));
        // A blocking thread may end between the listing and here.
        let (Ok(name), Ok(stat)) = (name, stat) else {
            continue;
        };
        if name.starts_with("proxy") {
            total += stat.split(' ').next().ok_or("schedstat")?.parse::<f64>()? / 1e6;
        }
    }
    Ok(total)
}

/// User and system time of this process.
fn cpu_secs() -> Result<f64, Box<dyn std::error::Error>> {
    let stat = std::fs::read_to_string("/proc/self/stat")?;
    let after = stat.rsplit_once(')').ok_or("/proc/self/stat")?.1;
    let fields: Vec<&str> = after.split_whitespace().collect();
    Ok((fields[11].parse::<f64>()? + fields[12].parse::<f64>()?) / 100.0)
}
