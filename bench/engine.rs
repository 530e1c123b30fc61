//! Speed of the native engine on the CPU: decoding by batch size, prefill by prompt length.
//!
//! ```text
//! cargo bench --bench engine [-- --threads N --model-type TYPE]
//! ```
//!
//! The model has the size of the demo policy; TYPE makes it the starting policy of a family (`qwen3_5_moe`). `cpu ms` is processor time of all threads. Prompts are random, so nothing is shared between them.

use legorl::{
    base::{Engine, EngineEvent, GenerateRequest, PolicyVersion, RequestId, SamplingParams, SessionId},
    model::{hf::ModelConfig, net::Policy},
    serve::engine::native::{NativeEngine, NativeEngineConfig},
    train::supervised::model_folder::model_config,
};
use std::{sync::Arc, time::Instant};
use tokio::sync::mpsc::{unbounded_channel, UnboundedReceiver};

const VOCAB: usize = 1536;

fn main() -> anyhow::Result<()> {
    let args: Vec<String> = std::env::args().collect();
    let value_of = |name: &str| args.iter().skip_while(|a| *a != name).nth(1);
    let threads = value_of("--threads").map_or(Ok(2), |n| n.parse())?;
    let model = match value_of("--model-type") {
        Some(name) => model_config(name.parse().map_err(anyhow::Error::msg)?, VOCAB, &[])?,
        None => ModelConfig::qwen3(VOCAB, 160, 480, 5, 4, 2, 32),
    };
    println!(
        "{}: parameters {} threads {threads}",
        model.model_type.name(),
        model.num_parameters()
    );
    let policy = Policy::random(model, 1, tch::Device::Cpu);
    let config = NativeEngineConfig {
        max_num_seqs: 64,
        max_num_batched_tokens: 512,
        max_model_len: 4096,
        kv_cache_tokens: 65_536,
        num_threads: threads,
        version: PolicyVersion(0),
        ..NativeEngineConfig::default()
    };
    println!(
        "{:>8} {:>12} {:>12} {:>12} {:>12}",
        "batch", "tokens/s", "ms a step", "cpu ms", "context"
    );
    for batch in [1, 2, 4, 8, 16, 32, 64] {
        // Fresh, so that no prompt is in the cache.
        let engine = NativeEngine::from_policy(config, &policy)?;
        let (prompt, steps) = (300, 200);
        let mut clients: Vec<_> = (0..batch)
            .map(|i| submit(&engine, i, prompt, steps + 40))
            .collect();
        // All prompts are computed once the last client has a token.
        for client in &mut clients {
            wait_for_tokens(client, 20)?;
        }
        let (from, start, cpu) = (engine.status().generated_tokens, Instant::now(), cpu_secs()?);
        for client in &mut clients {
            wait_for_tokens(client, steps as usize)?;
        }
        let (tokens, secs) = (
            engine.status().generated_tokens - from,
            start.elapsed().as_secs_f64(),
        );
        let steps_done = tokens as f64 / batch as f64;
        println!(
            "{batch:>8} {:>12.0} {:>12.3} {:>12.3} {:>12}",
            tokens as f64 / secs,
            1e3 * secs / steps_done,
            1e3 * (cpu_secs()? - cpu) / steps_done,
            format!("{}..{}", prompt + 20, prompt + steps)
        );
    }
    println!("{:>8} {:>12} {:>12}", "prompts", "tokens each", "prefill/s");
    for (count, length) in [(1, 500), (8, 500), (1, 2000), (8, 2000), (1, 4000)] {
        let engine = NativeEngine::from_policy(config, &policy)?;
        let start = Instant::now();
        let mut clients: Vec<_> = (0..count).map(|i| submit(&engine, i, length, 1)).collect();
        for client in &mut clients {
            wait_for_tokens(client, 1)?;
        }
        let rate = (count * u64::from(length)) as f64 / start.elapsed().as_secs_f64();
        println!("{count:>8} {length:>12} {rate:>12.0}");
    }
    Ok(())
}

fn submit(
    engine: &Arc<NativeEngine>,
    i: u64,
    length: u32,
    max_new_tokens: u32,
) -> UnboundedReceiver<EngineEvent> {
    let (sender, receiver) = unbounded_channel();
    let token = |n: u32| (n.wrapping_mul(2_654_435_761).wrapping_add(i as u32 * 977) >> 7) % VOCAB as u32;
    engine.submit(
        GenerateRequest {
            id: RequestId(i),
            session: SessionId::from(format!("s{i}").as_str()),
            prompt: (0..length).map(token).collect(),
            sampling: SamplingParams {
                seed: i,
                ..SamplingParams::default()
            },
            stop_token_ids: Vec::new(),
            max_new_tokens,
            routing_from: None,
        },
        sender,
    );
    receiver
}

/// Processor time of this process, all threads: what counts on a machine that others use too.
fn cpu_secs() -> anyhow::Result<f64> {
    let text = std::fs::read_to_string("/proc/self/stat")?;
    let after_name = text.rsplit(')').next().unwrap_or_default();
    let fields: Vec<&str> = after_name.split_whitespace().collect();
    // utime and stime are fields 14 and 15 of the line, in ticks of 1/100 s.
    let ticks: f64 = fields[11].parse::<f64>()? + fields[12].parse::<f64>()?;
    Ok(ticks / 100.0)
}

/// Takes events until `count` more tokens have come.
fn wait_for_tokens(events: &mut UnboundedReceiver<EngineEvent>, count: usize) -> anyhow::Result<()> {
    let mut got = 0;
    while got < count {
        match events.blocking_recv() {
            Some(EngineEvent::Tokens(tokens)) => got += tokens.len(),
            other => anyhow::bail!("after {got} of {count} tokens: {other:?}"),
        }
    }
    Ok(())
}
