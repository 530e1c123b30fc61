//! Training and decoding on a GPU, on a model folder.
//!
//! ```text
//! cargo bench --bench gpu -- train FOLDER [--length 4096] [--sequences 4] [--budget 4096] [--graphs] [--f32]
//! cargo bench --bench gpu -- decode FOLDER [--batches 1,8,32,128] [--context 1024] [--tokens 64]
//! mpirun -n N PROGRAM train FOLDER …     over N GPUs, --sequences for each [--sp 1] [--ep 1]
//! ```
//! `bench/gpu/run.sh` makes folders of Qwen3 shapes with random weights and runs this beside transformers.
//!
//! *Training:* all tokens of a sequence but the first are sampled. A step is what
//! the trainer does with a batch: forward, loss, backward, clip, AdamW on f32 master copies. Model
//! TFLOP/s count 6 operations a parameter and token, and attention; recomputation does not count. `host
//! floor` is a step of one micro-batch of 64 tokens a sequence: what its launches alone take. Over several GPUs every
//! one has as many sequences as one alone, and rank 0 prints its own memory: in use on the device, and what the
//! trainer's own count says of parameters, gradients, moments and of what is gathered at a time.
//!
//! *Decoding:* greedy, prompts of random tokens, from the first token of the last client on.

use anyhow::Context;
use legorl::{
    base::{
        Engine, EngineEvent, GenerateRequest, GroupId, PolicyVersion, Purpose, RequestId, SamplingParams,
        SessionId, StopReason, TokenSequence, Trajectory, TrialKey, TrialOutcome,
    },
    comm::{launch_world, local_rank, Communicator, World},
    model::{
        hf::{ModelConfig, TensorSpec},
        net::{choose_device, ComputeType, Device, DeviceChoice, Policy},
    },
    serve::engine::native::{NativeEngine, NativeEngineConfig},
    train::{
        algorithm::{AdvantageEstimator, Aggregation, LrSchedule, Objective, PolicyLoss, TrajectoryFilter},
        batch::{TrainBatch, TrainGroup},
        trainer::{
            AdamWConfig, BackwardMode, CriticConfig, Mesh, MeshConfig, ShardMemory, StepMetrics, Trainer,
            TrainerConfig,
        },
    },
};
use std::{
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, Instant},
};
use tokio::sync::mpsc::{unbounded_channel, UnboundedReceiver};

fn main() -> anyhow::Result<()> {
    // `cargo bench` adds a flag of its own.
    let args: Vec<String> = std::env::args().skip(1).filter(|a| a != "--bench").collect();
    let [command, folder, ..] = &args[..] else {
        println!("gpu: skipped; usage: -- train|decode FOLDER (see bench/gpu/run.sh)");
        return Ok(());
    };
    let device = match choose_device(DeviceChoice::Cuda, local_rank()) {
        Ok(device) => device,
        Err(error) => {
            println!("gpu: skipped: {error}");
            return Ok(());
        }
    };
    let options = Options {
        folder: PathBuf::from(folder),
        device,
        args: args.clone(),
    };
    match command.as_str() {
        "train" => train(&options),
        "decode" => decode(&options),
        other => anyhow::bail!("`{other}` is neither train nor decode"),
    }
}

struct Options {
    folder: PathBuf,
    device: Device,
    args: Vec<String>,
}

impl Options {
    fn has(&self, flag: &str) -> bool {
        self.args.iter().any(|a| a == flag)
    }

    fn text(&self, flag: &str, default: &str) -> String {
        let place = self.args.iter().position(|a| a == flag);
        let value = place.and_then(|i| self.args.get(i + 1));
        value.map_or_else(|| default.to_owned(), String::clone)
    }

    fn number(&self, flag: &str, default: usize) -> anyhow::Result<usize> {
        let text = self.text(flag, &default.to_string());
        text.parse().with_context(|| format!("{flag} {text}"))
    }

    fn compute(&self) -> ComputeType {
        if self.has("--f32") {
            ComputeType::F32
        } else {
            ComputeType::Bf16
        }
    }
}

/// Memory in use on the device, as nvidia-smi says: the allocator keeps what it once had.
fn memory_gib(device: Device) -> String {
    let number = match device {
        Device::Cuda(number) => number.to_string(),
        _ => "0".into(),
    };
    let out = std::process::Command::new("nvidia-smi")
        .args([
            "--query-gpu=memory.used",
            "--format=csv,noheader,nounits",
            "--id",
            &number,
        ])
        .output();
    let mib = out.ok().and_then(|out| {
        let text = String::from_utf8_lossy(&out.stdout).into_owned();
        text.lines().next()?.trim().parse::<f64>().ok()
    });
    mib.map_or_else(|| "?".into(), |mib| format!("{:.0}", mib / 1024.0))
}

fn train(options: &Options) -> anyhow::Result<()> {
    let world = launch_world()?;
    train_as(options, &world)?;
    Ok(world.shutdown()?)
}

/// The groups of all ranks; none for one alone.
fn mesh(options: &Options, comm: &Arc<dyn Communicator>) -> anyhow::Result<Option<Arc<Mesh>>> {
    let Device::Cuda(number) = options.device else {
        unreachable!("main() chose a CUDA device")
    };
    if comm.size() == 1 {
        return Ok(None);
    }
    let config = MeshConfig {
        ranks: (0..comm.size()).collect(),
        sequence: options.number("--sp", 1)? as u32,
        experts: options.number("--ep", 1)? as u32,
        device: Some(number),
        timeout: Duration::from_secs(120),
    };
    Ok(Some(Arc::new(Mesh::new(comm, &config)?)))
}

/// A policy, or this rank's part of it, and its trainer.
fn trainer(options: &Options, config: TrainerConfig, mesh: Option<Arc<Mesh>>) -> anyhow::Result<Trainer> {
    let policy = match &mesh {
        None => Policy::load(&options.folder, options.device)?,
        Some(mesh) => {
            let part = |spec: &TensorSpec, whole: tch::Tensor| mesh.share(&spec.name, &whole);
            Policy::load_parts(&options.folder, options.device, part)?
        }
    };
    let policy = policy.with_compute_type(options.compute());
    Ok(Trainer::over_ranks(config, policy, None, mesh)?)
}

fn train_as(options: &Options, world: &World) -> anyhow::Result<()> {
    let ranks = world.comm.size() as usize;
    let length = options.number("--length", 4096)?;
    let count = ranks * options.number("--sequences", 4)?;
    let budget = options.number("--budget", length)?;
    let mode = if options.has("--graphs") {
        BackwardMode::BlockGraphs
    } else {
        BackwardMode::BlockLoop
    };
    let mut trainer = trainer(options, config(budget, mode), mesh(options, &world.comm)?)?;
    let model = trainer.policy().config.clone();
    let Device::Cuda(number) = options.device else {
        unreachable!("main() chose a CUDA device")
    };
    let mut run = |step, length| -> anyhow::Result<(f64, StepMetrics)> {
        let begin = Instant::now();
        let metrics = trainer.step(&batch(step, count, length, model.vocab_size))?;
        tch::Cuda::synchronize(number as i64);
        Ok((begin.elapsed().as_secs_f64(), metrics))
    };
    // Warm-up: kernels load, the allocator takes its memory.
    run(1, length)?;
    let mut seconds: Vec<(f64, StepMetrics)> = Vec::new();
    for step in 2..=5 {
        seconds.push(run(step, length)?);
    }
    let small = 64.min(budget * ranks / count).max(2);
    run(6, small)?;
    let (floor, _) = run(7, small)?;
    if world.comm.rank() > 0 {
        return Ok(());
    }
    seconds.sort_by(|a, b| a.0.total_cmp(&b.0));
    let (best, worst) = (seconds[0].0, seconds[seconds.len() - 1].0);
    let (median, metrics) = &seconds[seconds.len() / 2];
    let tokens = (length * count) as f64;
    // The embedding is a look-up; the head, tied or not, is a product.
    let dense = model.num_parameters() as f64
        - if model.tie_word_embeddings {
            0.0
        } else {
            (model.vocab_size * model.hidden_size) as f64
        };
    let attention =
        6.0 * (model.num_hidden_layers * model.num_attention_heads * model.head_dim) as f64 * length as f64;
    let flops = tokens * (6.0 * dense + attention);
    println!(
        "train {} {mode:?} {:?} on {ranks}: {count} x {length}, budget {budget}: {:.0} tokens/s, {median:.3} s a step ({best:.3} to {worst:.3}), {:.0} model TFLOP/s, host floor {floor:.3} s, {} GiB",
        options.folder.display(),
        options.compute(),
        tokens / median,
        flops / median / 1e12,
        memory_gib(options.device)
    );
    let gib = |bytes: usize| bytes as f64 / f64::from(1 << 30);
    let ShardMemory {
        shares,
        gathered_peak,
        largest_unit,
    } = trainer.memory();
    println!(
        "  of a rank, GiB: parameters {0:.3}, gradients {0:.3}, moments {1:.3}, gathered at most {2:.3} (largest unit {3:.3})",
        gib(shares),
        gib(2 * shares),
        gib(gathered_peak),
        gib(largest_unit)
    );
    let stages: Vec<String> = metrics
        .values
        .iter()
        .filter(|(key, _)| key.starts_with("timing_s/"))
        .map(|(key, value)| format!("{} {value:.3}", key.trim_start_matches("timing_s/")))
        .collect();
    println!("  stages, s: {}", stages.join(", "));
    Ok(())
}

fn config(budget: usize, backward: BackwardMode) -> TrainerConfig {
    TrainerConfig {
        objective: Objective {
            policy_loss: PolicyLoss::from_mode("vanilla", 0.2, 0.2, 3.0).unwrap_or_else(|e| panic!("{e}")),
            aggregation: Aggregation::TokenMean,
            kl: None,
            entropy_coefficient: 0.0,
        },
        estimator: AdvantageEstimator::Grpo { divide_by_std: true },
        critic: CriticConfig::default(),
        kl_reward: None,
        filter: TrajectoryFilter::default(),
        temperature: 1.0,
        mini_batch_groups: usize::MAX,
        ppo_epochs: 1,
        max_token_len_per_gpu: budget,
        head_chunk_tokens: 2048,
        bypass_old_logprobs: false,
        importance: None,
        rejection: None,
        optimizer: AdamWConfig::default(),
        lr: LrSchedule::constant(1e-6),
        max_grad_norm: 1.0,
        max_response_len: budget,
        num_threads: 4,
        replay: None,
        backward,
    }
}

/// One group in which half of the trials win.
fn batch(step: u32, count: usize, length: usize, vocab: usize) -> TrainBatch {
    let token = |i: usize, t: usize| ((t * 7919 + i * 104_729 + t * t * 31) % vocab) as u32;
    let trajectory = |i: usize| Trajectory {
        key: TrialKey {
            purpose: Purpose::Train,
            group: GroupId(0),
            sample: i as u32,
        },
        attempt: 0,
        task: "bench".into(),
        session: String::new(),
        outcome: TrialOutcome {
            reward: (i % 2) as f64,
            rewards: Default::default(),
            stop: StopReason::AgentCompleted,
        },
        sequences: vec![TokenSequence {
            token_ids: (0..length).map(|t| token(i, t)).collect(),
            logprobs: (0..length).map(|t| if t > 0 { -12.0 } else { 0.0 }).collect(),
            versions: vec![step - 1; length],
            loss_mask: (0..length).map(|t| t > 0).collect(),
            prompt_len: 1,
            weight: 1.0,
            routing: None,
        }],
        turns: 1,
        malformed_tool_calls: 0,
        timing: Default::default(),
    };
    TrainBatch {
        step,
        groups: vec![TrainGroup {
            id: GroupId(0),
            start_version: PolicyVersion(step - 1),
            trajectories: (0..count).map(trajectory).collect(),
            dropped: Vec::new(),
        }],
    }
}

fn decode(options: &Options) -> anyhow::Result<()> {
    let (context, tokens) = (
        options.number("--context", 1024)?,
        options.number("--tokens", 64)?,
    );
    let model = ModelConfig::from_dir(&options.folder)?;
    for batch in options.text("--batches", "1,8,32,128").split(',') {
        let batch: usize = batch.parse().with_context(|| format!("--batches {batch}"))?;
        let config = NativeEngineConfig {
            max_num_seqs: batch,
            max_num_batched_tokens: 16_384,
            max_model_len: context + 2 * tokens + 16,
            kv_cache_tokens: batch * (context + 2 * tokens + 32),
            device: options.device,
            compute: options.compute(),
            ..NativeEngineConfig::default()
        };
        decode_batch(&options.folder, &model, config, batch, context, tokens)?;
    }
    Ok(())
}

fn decode_batch(
    folder: &Path,
    model: &ModelConfig,
    config: NativeEngineConfig,
    batch: usize,
    context: usize,
    tokens: usize,
) -> anyhow::Result<()> {
    let engine = NativeEngine::start(config, folder)?;
    let begin = Instant::now();
    let mut clients: Vec<_> = (0..batch)
        .map(|i| submit(&engine, i, context, 2 * tokens, model.vocab_size))
        .collect();
    for client in &mut clients {
        wait_for_tokens(client, 1)?;
    }
    let prefill = begin.elapsed().as_secs_f64();
    // Half of the tokens to warm up, half to measure.
    for client in &mut clients {
        wait_for_tokens(client, tokens - 1)?;
    }
    let (from, begin) = (engine.status().generated_tokens, Instant::now());
    for client in &mut clients {
        wait_for_tokens(client, tokens / 2)?;
    }
    let seconds = begin.elapsed().as_secs_f64();
    let made = (engine.status().generated_tokens - from) as f64;
    println!(
        "decode {} {:?} batch {batch}, context {context}: {:.0} tokens/s, {:.2} ms a step, prompts {:.0} tokens/s, {} GiB",
        folder.display(),
        config.compute,
        made / seconds,
        1e3 * seconds * batch as f64 / made,
        (batch * context) as f64 / prefill,
        memory_gib(config.device)
    );
    Ok(())
}

fn submit(
    engine: &Arc<NativeEngine>,
    i: usize,
    length: usize,
    max_new_tokens: usize,
    vocab: usize,
) -> UnboundedReceiver<EngineEvent> {
    let (sender, receiver) = unbounded_channel();
    let token = |n: usize| {
        ((n as u32)
            .wrapping_mul(2_654_435_761)
            .wrapping_add(i as u32 * 977)
            >> 7)
            % vocab as u32
    };
    let request = GenerateRequest {
        id: RequestId(i as u64),
        session: SessionId::from(format!("s{i}").as_str()),
        prompt: (0..length).map(token).collect(),
        sampling: SamplingParams {
            temperature: 0.0,
            ..SamplingParams::default()
        },
        stop_token_ids: Vec::new(),
        max_new_tokens: max_new_tokens as u32,
        routing_from: None,
    };
    engine.submit(request, sender);
    receiver
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
