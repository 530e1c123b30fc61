//! A step of the trainer on the GPU against the CPU.

use super::{fixture, gpu, ids, FAMILIES};
use legorl::{
    base::{GroupId, PolicyVersion, Purpose, StopReason, TokenSequence, Trajectory, TrialKey, TrialOutcome},
    model::{
        hf::ModelConfig,
        net::{ComputeType, Device, Policy},
    },
    train::{
        algorithm::{AdvantageEstimator, Aggregation, LrSchedule, Objective, PolicyLoss, TrajectoryFilter},
        batch::{TrainBatch, TrainGroup},
        trainer::{AdamWConfig, BackwardMode, CriticConfig, StepMetrics, Trainer, TrainerConfig},
    },
};
use tch::Tensor;

pub fn config(backward: BackwardMode) -> TrainerConfig {
    TrainerConfig {
        objective: Objective {
            policy_loss: PolicyLoss::from_mode("vanilla", 0.2, 0.2, 3.0).unwrap(),
            aggregation: Aggregation::TokenMean,
            kl: None,
            entropy_coefficient: 0.01,
        },
        estimator: AdvantageEstimator::Grpo { divide_by_std: true },
        critic: CriticConfig::default(),
        kl_reward: None,
        filter: TrajectoryFilter::default(),
        temperature: 1.0,
        mini_batch_groups: usize::MAX,
        ppo_epochs: 1,
        max_token_len_per_gpu: 150,
        head_chunk_tokens: 40,
        bypass_old_logprobs: false,
        importance: None,
        rejection: None,
        optimizer: AdamWConfig::default(),
        lr: LrSchedule::constant(1e-3),
        max_grad_norm: 1.0,
        max_response_len: 100,
        num_threads: 2,
        replay: None,
        backward,
    }
}

pub fn batch(step: u32) -> TrainBatch {
    let trajectory = |i: usize| {
        let length = 40 + 13 * i;
        let sampled: Vec<bool> = (0..length).map(|t| t > 8 && t % 5 != 0).collect();
        Trajectory {
            key: TrialKey {
                purpose: Purpose::Train,
                group: GroupId(0),
                sample: i as u32,
            },
            attempt: 0,
            task: "gpu".into(),
            session: String::new(),
            outcome: TrialOutcome {
                reward: (i % 3) as f64,
                rewards: Default::default(),
                stop: StopReason::AgentCompleted,
            },
            sequences: vec![TokenSequence {
                token_ids: ids(length, i).iter().map(|id| *id as u32).collect(),
                logprobs: sampled.iter().map(|s| if *s { -4.0 } else { 0.0 }).collect(),
                versions: vec![step - 1; length],
                loss_mask: sampled,
                prompt_len: 9,
                weight: 1.0,
                routing: None,
            }],
            turns: 1,
            malformed_tool_calls: 0,
            timing: Default::default(),
        }
    };
    TrainBatch {
        step,
        groups: vec![TrainGroup {
            id: GroupId(0),
            start_version: PolicyVersion(step - 1),
            trajectories: (0..6).map(trajectory).collect(),
            dropped: Vec::new(),
        }],
    }
}

/// Metrics of the second step and what the parameters moved by.
fn steps(name: &str, device: Device, compute: ComputeType, mode: BackwardMode) -> (StepMetrics, Vec<Tensor>) {
    let load = |device| Policy::load(&fixture(name), device).unwrap();
    let policy = load(device).with_compute_type(compute);
    let mut trainer = Trainer::new(config(mode), policy, None).unwrap();
    trainer.step(&batch(1)).unwrap();
    let metrics = trainer.step(&batch(2)).unwrap();
    let moved = trainer
        .policy()
        .parameters()
        .into_iter()
        .zip(load(Device::Cpu).parameters());
    let moved = moved.map(|((_, new), (_, old))| new.detach().to_device(Device::Cpu) - old.detach());
    (metrics, moved.collect())
}

fn flat(tensors: &[Tensor]) -> Tensor {
    Tensor::cat(&tensors.iter().map(|t| t.flatten(0, -1)).collect::<Vec<_>>(), 0)
}

#[test]
fn two_steps_move_the_weights_as_on_the_cpu() {
    let Some(device) = gpu() else { return };
    for name in FAMILIES {
        let (host, moved) = steps(name, Device::Cpu, ComputeType::F32, BackwardMode::BlockLoop);
        for (compute, mode) in [
            (ComputeType::F32, BackwardMode::BlockLoop),
            (ComputeType::F32, BackwardMode::BlockGraphs),
            (ComputeType::Bf16, BackwardMode::BlockLoop),
        ] {
            let far = |(there, moved_there): (StepMetrics, Vec<Tensor>)| {
                let (want, got) = (flat(&moved), flat(&moved_there));
                let relative = |key: &str| {
                    let (a, b) = (host.get(key).unwrap(), there.get(key).unwrap());
                    ((a - b) / a).abs()
                };
                let l2 = ((&want - &got).norm() / want.norm()).double_value(&[]);
                [relative("actor/loss"), relative("actor/grad_norm"), l2]
            };
            let seen = far(steps(name, device, compute, mode));
            // Adam's first steps are signs of the gradient: small gradients turn with its rounding.
            // The gradient norm is that of the second step, and the delta rule's norm bends sharply.
            let hybrid = ModelConfig::from_dir(&fixture(name))
                .unwrap()
                .model_type
                .is_hybrid();
            let bounds = match compute {
                ComputeType::F32 if hybrid => [1e-6, 1e-3, 1e-2],
                ComputeType::F32 => [1e-6, 1e-5, 1e-2],
                // What bf16 does to the same step on the CPU is the measure.
                ComputeType::Bf16 => {
                    let [loss, norm, l2] = far(steps(name, Device::Cpu, compute, mode));
                    [3.0 * loss + 1e-3, 3.0 * norm + 0.02, 2.0 * l2 + 0.1]
                }
            };
            let [loss, norm, movement] = seen;
            println!("{name:20} {compute:?} {mode:?}: loss {loss:.1e}, grad norm {norm:.1e}, movement {movement:.1e}");
            assert!(
                seen.iter().zip(bounds).all(|(seen, bound)| *seen < bound),
                "{name} {compute:?} {mode:?}: {seen:?}, bounds {bounds:?}"
            );
        }
    }
}
