//! Seconds of a training step by stage, on a random policy of the demo's size.
//!
//! ```text
//! cargo bench --bench trainer -- [sequences] [tokens] [micro-batch tokens] [chunk] [threads] [1 = keep block graphs]
//! ```
//! Prints one line per step (best of the repetitions last) and tokens/s. Beside it, the matmul floor:
//! multiply-adds of the linear layers and attention, at the rate that the same machine reaches on one
//! large f32 matmul.

use legorl::{
    base::{GroupId, PolicyVersion, Purpose, StopReason, TokenSequence, Trajectory, TrialKey, TrialOutcome},
    model::{hf::ModelConfig, net::Policy},
    train::{
        algorithm::{AdvantageEstimator, Aggregation, LrSchedule, Objective, PolicyLoss, TrajectoryFilter},
        batch::{TrainBatch, TrainGroup},
        trainer::{AdamWConfig, BackwardMode, CriticConfig, Trainer, TrainerConfig},
    },
};
use std::time::Instant;
use tch::{Device, Kind, Tensor};

fn main() {
    let numbers: Vec<usize> = std::env::args().skip(1).filter_map(|a| a.parse().ok()).collect();
    let number = |place: usize, default: usize| numbers.get(place).copied().unwrap_or(default);
    let (count, length) = (number(0, 96), number(1, 400));
    let (budget, chunk, threads) = (number(2, 4096), number(3, 2048), number(4, 2));
    let mode = match number(5, 0) {
        0 => BackwardMode::BlockLoop,
        _ => BackwardMode::BlockGraphs,
    };
    tch::set_num_threads(threads as i32);

    let model = ModelConfig::qwen3(1536, 160, 448, 5, 5, 5, 32);
    println!(
        "{} parameters, {count} sequences of {length} tokens, micro-batch {budget} tokens, chunk {chunk}, {threads} threads",
        model.num_parameters()
    );
    let rate = matmul_rate();
    let tokens = (count * length) as f64;
    let dense = model.num_parameters() - 1536 * 160;
    // Forward twice, backward twice the forward; the head on a third of the tokens.
    let floor = 2.0 * 4.0 * tokens * (dense as f64 + 1536.0 * 160.0 / 3.0) / rate;
    println!(
        "matmul {:.0} Gflop/s; floor of the linear layers {floor:.2} s",
        rate / 1e9
    );

    let policy = Policy::random(model, 1, Device::Cpu);
    let mut trainer = Trainer::new(config(budget, chunk, threads as i32, mode), policy, None)
        .unwrap_or_else(|e| panic!("{e}"));
    let mut best: Option<legorl::train::trainer::StepMetrics> = None;
    for step in 1..=5 {
        let before = cpu_seconds();
        let metrics = trainer
            .step(&batch(step, count, length))
            .unwrap_or_else(|e| panic!("{e}"));
        println!(
            "step {step}: {}, process {:.2} s",
            describe(&metrics),
            cpu_seconds() - before
        );
        let seconds = |m: &legorl::train::trainer::StepMetrics| m.get("timing_s/trainer_step");
        if best.as_ref().is_none_or(|b| seconds(&metrics) < seconds(b)) {
            best = Some(metrics);
        }
    }
    if let Some(best) = best {
        println!("best: {}", describe(&best));
    }
}

fn describe(metrics: &legorl::train::trainer::StepMetrics) -> String {
    let mut parts: Vec<String> = metrics
        .values
        .iter()
        .filter(|(key, _)| key.starts_with("timing_s/"))
        .map(|(key, value)| format!("{} {value:.3} s", key.trim_start_matches("timing_s/")))
        .collect();
    parts.push(format!(
        "{:.0} tokens/s",
        metrics.get("perf/throughput").unwrap_or(0.0)
    ));
    parts.join(", ")
}

/// CPU time of this process: on a busy machine and with one thread, a steadier measure than the clock.
fn cpu_seconds() -> f64 {
    let mut time = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: the kernel fills in the struct that the pointer names.
    unsafe { libc::clock_gettime(libc::CLOCK_PROCESS_CPUTIME_ID, &mut time) };
    time.tv_sec as f64 + time.tv_nsec as f64 * 1e-9
}

fn matmul_rate() -> f64 {
    let a = Tensor::rand([1024, 1024], (Kind::Float, Device::Cpu));
    let seconds = (0..10)
        .map(|_| {
            let start = Instant::now();
            let _ = a.matmul(&a);
            start.elapsed().as_secs_f64()
        })
        .fold(f64::INFINITY, f64::min);
    2.0 * 1024f64.powi(3) / seconds
}

fn config(budget: usize, chunk: usize, num_threads: i32, backward: BackwardMode) -> TrainerConfig {
    TrainerConfig {
        objective: Objective {
            policy_loss: PolicyLoss::from_mode("gspo", 3e-4, 4e-4, 3.0).unwrap_or_else(|e| panic!("{e}")),
            aggregation: Aggregation::SeqMeanTokenMean,
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
        head_chunk_tokens: chunk,
        bypass_old_logprobs: false,
        importance: None,
        rejection: None,
        replay: None,
        optimizer: AdamWConfig::default(),
        lr: LrSchedule::constant(1e-4),
        max_grad_norm: 1.0,
        max_response_len: 1024,
        num_threads,
        backward,
    }
}

/// Groups of eight; a third of each sequence is sampled, in runs of 20 tokens.
fn batch(step: u32, count: usize, length: usize) -> TrainBatch {
    let trajectory = |index: usize| {
        let prompt = length / 2;
        let loss_mask: Vec<bool> = (0..length)
            .map(|t| t >= prompt && (t - prompt) % 30 < 20)
            .collect();
        Trajectory {
            key: TrialKey {
                purpose: Purpose::Train,
                group: GroupId(index as u64 / 8),
                sample: index as u32 % 8,
            },
            attempt: 0,
            task: "bench".into(),
            session: String::new(),
            outcome: TrialOutcome {
                reward: f64::from((index * 7 % 5) as u32 % 2),
                rewards: Default::default(),
                stop: StopReason::AgentCompleted,
            },
            sequences: vec![TokenSequence {
                token_ids: (0..length)
                    .map(|t| ((t * 31 + index * 17 + t * t) % 1536) as u32)
                    .collect(),
                logprobs: loss_mask.iter().map(|m| if *m { -3.0 } else { 0.0 }).collect(),
                versions: vec![step - 1; length],
                loss_mask,
                prompt_len: prompt as u32,
                weight: 1.0,
                routing: None,
            }],
            turns: 3,
            malformed_tool_calls: 0,
            timing: Default::default(),
        }
    };
    let groups = (0..count.div_ceil(8))
        .map(|g| TrainGroup {
            id: GroupId(g as u64),
            start_version: PolicyVersion(step - 1),
            trajectories: (g * 8..(g * 8 + 8).min(count)).map(trajectory).collect(),
            dropped: Vec::new(),
        })
        .collect();
    TrainBatch { step, groups }
}
