mod families;
#[cfg(feature = "mpi")]
mod ranks;
#[cfg(feature = "mpi")]
mod saved;

use super::*;
use crate::{
    base::{
        DropReason, GroupId, Purpose, StopReason, TokenSequence, Trajectory, TrialKey, TrialOutcome,
        TrialTiming,
    },
    model::hf::ModelConfig,
    train::{
        algorithm::{
            AdvantageEstimator, Aggregation, KlEstimator, KlLoss, LrSchedule, Objective, PolicyLoss,
            TrajectoryFilter,
        },
        batch::TrainGroup,
        checkpoint::TensorPiece,
    },
};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use tch::{no_grad, Device, Kind, Tensor};

mod algorithms;
mod curve;
mod replay;
mod values;

const VOCAB: usize = 29;

fn model(seed: i64, deviation: f64, tied: bool) -> Policy {
    // Tensors this small gain nothing from a second thread, and lose much on a busy machine.
    tch::set_num_threads(1);
    let mut config = ModelConfig::qwen3(VOCAB, 16, 24, 3, 4, 2, 8);
    config.initializer_range = deviation;
    config.tie_word_embeddings = tied;
    Policy::random(config, seed, Device::Cpu)
}

/// Turns all parameters into f64, in place.
fn to_double(policy: Policy) -> Policy {
    for (_, mut parameter) in policy.parameters() {
        let wide = parameter.detach().to_kind(Kind::Double);
        parameter.set_data(&wide);
    }
    policy
}

fn config() -> TrainerConfig {
    TrainerConfig {
        objective: Objective {
            policy_loss: PolicyLoss::from_mode("vanilla", 0.2, 0.28, 3.0).unwrap(),
            aggregation: Aggregation::SeqMeanTokenMean,
            kl: None,
            entropy_coefficient: 0.0,
        },
        estimator: AdvantageEstimator::Grpo { divide_by_std: true },
        critic: CriticConfig::default(),
        kl_reward: None,
        filter: TrajectoryFilter::default(),
        temperature: 1.0,
        mini_batch_groups: 100,
        ppo_epochs: 1,
        max_token_len_per_gpu: 64,
        head_chunk_tokens: 7,
        bypass_old_logprobs: false,
        importance: None,
        rejection: None,
        replay: None,
        optimizer: AdamWConfig::default(),
        lr: LrSchedule::constant(1e-3),
        max_grad_norm: 1.0,
        max_response_len: 20,
        num_threads: 1,
        backward: BackwardMode::BlockLoop,
    }
}

fn with_kl_and_entropy(mut config: TrainerConfig) -> TrainerConfig {
    config.objective.kl = Some(KlLoss {
        estimator: KlEstimator::K3,
        coefficient: 0.1,
    });
    config.objective.entropy_coefficient = 0.02;
    config
}

/// A conversation: prompt, then turns of sampled tokens with environment tokens between them. Tokens are
/// random; log-probabilities are filled in by the caller.
fn sequence(rng: &mut ChaCha8Rng) -> TokenSequence {
    let mut s = TokenSequence {
        weight: 1.0,
        ..TokenSequence::default()
    };
    let mut push = |count: usize, sampled: bool, rng: &mut ChaCha8Rng| {
        for _ in 0..count {
            s.token_ids.push(rng.random_range(0..VOCAB as u32));
            s.loss_mask.push(sampled);
            s.logprobs.push(if sampled { -2.0 } else { 0.0 });
            s.versions.push(0);
        }
    };
    let prompt = rng.random_range(1..6);
    push(prompt, false, rng);
    for turn in 0..rng.random_range(1..4) {
        if turn > 0 {
            let count = rng.random_range(1..4);
            push(count, false, rng);
        }
        let count = rng.random_range(1..6);
        push(count, true, rng);
    }
    s.prompt_len = prompt as u32;
    s
}

fn trajectory(group: u64, sample: u32, reward: f64, sequences: Vec<TokenSequence>) -> Trajectory {
    Trajectory {
        key: TrialKey {
            purpose: Purpose::Train,
            group: GroupId(group),
            sample,
        },
        attempt: 0,
        task: "task".into(),
        session: format!("task__{group}_{sample}"),
        outcome: TrialOutcome {
            reward,
            rewards: Default::default(),
            stop: StopReason::AgentCompleted,
        },
        sequences,
        turns: 2,
        malformed_tool_calls: 0,
        timing: TrialTiming::default(),
    }
}

fn group(id: u64, trajectories: Vec<Trajectory>) -> TrainGroup {
    TrainGroup {
        id: GroupId(id),
        start_version: PolicyVersion(0),
        trajectories,
        dropped: Vec::new(),
    }
}

/// `groups` groups of three trials; the second trial has two branches that share its weight.
fn batch(seed: u64, groups: u64) -> TrainBatch {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let groups = (0..groups)
        .map(|g| {
            let trials = (0..3)
                .map(|s| {
                    let mut sequences = vec![sequence(&mut rng)];
                    if s == 1 {
                        sequences.push(sequence(&mut rng));
                        sequences.iter_mut().for_each(|s| s.weight = 0.5);
                    }
                    trajectory(g, s, rng.random_range(0.0..1.0), sequences)
                })
                .collect();
            group(g, trials)
        })
        .collect();
    TrainBatch { step: 1, groups }
}

/// With the advantages of estimators that need no critic.
fn samples(batch: &TrainBatch, config: &TrainerConfig) -> Samples {
    let mut samples = Samples::prepare(batch, config, VOCAB).unwrap();
    if !config.estimator.needs_critic() {
        samples.assign_advantages(&config.estimator);
    }
    samples
}

/// Gradients of a trainer for the first mini-batch, against old log-probabilities away from the current.
fn gradients_of(
    config: TrainerConfig,
    policy: Policy,
    reference: Policy,
    batch: &TrainBatch,
) -> (Vec<Tensor>, ObjectiveSums) {
    let mut samples = samples(batch, &config);
    let trainer = Trainer::new(config, policy, None::<Policy>.or(Some(reference))).unwrap();
    trainer.recompute_logprobs(&mut samples).unwrap();
    reference_logprobs(trainer.reference.as_ref().unwrap(), &trainer.config, &mut samples).unwrap();
    let mut rng = ChaCha8Rng::seed_from_u64(99);
    for sample in &mut samples.sequences {
        for l in sample.training_logprobs.as_mut().unwrap() {
            *l += rng.random_range(-0.3..0.3);
        }
    }
    let all: Vec<usize> = samples.mini_batches()[0].clone();
    let (gradients, sums) = trainer
        .gradients(&mut samples, &all, &mut StageTimer::default())
        .unwrap();
    (gradients.tensors, sums)
}

fn relative_gap(a: &[Tensor], b: &[Tensor]) -> f64 {
    assert_eq!(a.len(), b.len());
    a.iter()
        .zip(b)
        .map(|(a, b)| {
            let (a, b) = (a.to_kind(Kind::Double), b.to_kind(Kind::Double));
            let scale = b.norm().double_value(&[]);
            assert!(scale > 0.0, "a parameter without gradient proves nothing");
            (a - b).norm().double_value(&[]) / scale
        })
        .fold(0.0, f64::max)
}

/// The block loop, packed and in chunks, against one autograd graph for each whole micro-batch.
#[test]
fn block_loop_gradients_equal_those_of_one_graph() {
    for (double, limit) in [(true, 1e-10), (false, 1e-5)] {
        for tied in [true, false] {
            for loss in ["vanilla", "gspo"] {
                let build = |seed| {
                    let policy = model(seed, 0.3, tied);
                    if double {
                        to_double(policy)
                    } else {
                        policy
                    }
                };
                let mut config = with_kl_and_entropy(config());
                config.temperature = 0.7;
                config.objective.policy_loss = PolicyLoss::from_mode(loss, 0.2, 0.28, 3.0).unwrap();
                let batch = batch(3, 3);
                let mut oracle = config.clone();
                oracle.backward = BackwardMode::WholeGraph;
                oracle.max_token_len_per_gpu = 10_000;
                let (whole, whole_sums) = gradients_of(oracle, build(1), build(2), &batch);
                for mode in [BackwardMode::BlockLoop, BackwardMode::BlockGraphs] {
                    config.backward = mode;
                    let (ours, sums) = gradients_of(config.clone(), build(1), build(2), &batch);
                    let gap = relative_gap(&ours, &whole);
                    assert!(
                        gap < limit,
                        "{mode:?}, double {double}, tied {tied}, {loss}: {gap:e}"
                    );
                    assert!((sums.loss - whole_sums.loss).abs() < limit);
                    assert_eq!(sums.tokens, whole_sums.tokens);
                }
            }
        }
    }
}

/// The objective itself, moved along single parameters: no autograd, no derivative formula.
#[test]
fn gradients_agree_with_finite_differences_of_the_loss() {
    let mut config = with_kl_and_entropy(config());
    config.temperature = 1.3;
    config.objective.aggregation = Aggregation::TokenMean;
    let batch = batch(5, 1);
    let mut samples = samples(&batch, &config);
    let trainer = Trainer::new(
        config,
        to_double(model(1, 0.3, true)),
        Some(to_double(model(2, 0.3, true))),
    )
    .unwrap();
    trainer.recompute_logprobs(&mut samples).unwrap();
    reference_logprobs(trainer.reference.as_ref().unwrap(), &trainer.config, &mut samples).unwrap();
    for sample in &mut samples.sequences {
        for (t, l) in sample.training_logprobs.as_mut().unwrap().iter_mut().enumerate() {
            *l += [0.05, -0.08, 0.1][t % 3];
        }
    }
    let all = samples.mini_batches()[0].clone();
    let mut run = || {
        trainer
            .gradients(&mut samples, &all, &mut StageTimer::default())
            .unwrap()
    };
    let (gradients, _) = run();
    for (place, (name, mut parameter)) in trainer.policy.parameters().into_iter().enumerate() {
        let flat = gradients.tensors[place].view(-1);
        // The entry with the largest gradient shows the smallest relative rounding.
        let entry = flat.abs().argmax(None, false).int64_value(&[]);
        let mut nudge = |delta: f64| {
            no_grad(|| {
                let mut value = parameter.view(-1).get(entry);
                let _ = value.g_add_scalar_(delta);
                let _ = &mut parameter;
            });
        };
        let h = 1e-5;
        nudge(h);
        let up = run().1.loss;
        nudge(-2.0 * h);
        let down = run().1.loss;
        nudge(h);
        let numeric = (up - down) / (2.0 * h);
        let got = flat.double_value(&[entry]);
        assert!(
            (got - numeric).abs() < 1e-6 * (1e-2 + got.abs()),
            "{name}[{entry}]: {got} instead of {numeric}"
        );
    }
}

#[test]
fn the_cut_into_micro_batches_and_chunks_does_not_matter() {
    let run = |budget, chunk| {
        let mut config = with_kl_and_entropy(config());
        config.max_token_len_per_gpu = budget;
        config.head_chunk_tokens = chunk;
        gradients_of(
            config,
            to_double(model(1, 0.3, true)),
            to_double(model(2, 0.3, true)),
            &batch(7, 4),
        )
    };
    let (whole, sums) = run(100_000, 100_000);
    for (budget, chunk) in [(1, 1), (30, 4), (64, 1000)] {
        let (cut, cut_sums) = run(budget, chunk);
        assert!(relative_gap(&cut, &whole) < 1e-10);
        assert!((cut_sums.loss - sums.loss).abs() < 1e-12);
    }
}

/// Log-softmax `[t][v]` of a sequence's next tokens, straight from the definition.
fn distributions_by_hand(policy: &Policy, ids: &[u32], temperature: f64) -> Vec<Vec<f64>> {
    let ids: Vec<i64> = ids.iter().map(|i| i64::from(*i)).collect();
    no_grad(|| {
        let layout = crate::model::net::PackedLayout::single(ids.len(), Device::Cpu);
        let hidden = policy.forward_hidden(&Tensor::from_slice(&ids), &layout);
        let head = policy.head_weight().to_kind(hidden.kind());
        let logits = block_loop::to_vec(&hidden.matmul(&head.tr()).view(-1));
        let row = |row: &[f64]| {
            let total: f64 = row.iter().map(|z| (z / temperature).exp()).sum();
            row.iter().map(|z| z / temperature - total.ln()).collect()
        };
        logits.chunks(VOCAB).map(row).collect()
    })
}

/// Log-probabilities of all tokens but the first.
fn logprobs_by_hand(policy: &Policy, ids: &[u32], temperature: f64) -> Vec<f64> {
    let rows = distributions_by_hand(policy, ids, temperature);
    rows.iter()
        .zip(&ids[1..])
        .map(|(row, &next)| row[next as usize])
        .collect()
}

#[test]
fn logprobs_are_those_of_the_sampling_temperature() {
    for temperature in [1.0, 0.5] {
        let mut config = config();
        config.temperature = temperature;
        let batch = batch(11, 2);
        let mut samples = samples(&batch, &config);
        let trainer = Trainer::new(config, model(4, 0.3, true), None).unwrap();
        trainer.recompute_logprobs(&mut samples).unwrap();
        let sequences = batch
            .groups
            .iter()
            .flat_map(|g| &g.trajectories)
            .flat_map(|t| &t.sequences);
        for (sequence, sample) in sequences.zip(&samples.sequences) {
            let all = logprobs_by_hand(&trainer.policy, &sequence.token_ids, temperature);
            let got = sample.training_logprobs.as_ref().unwrap();
            for (t, got) in sample.sampled.iter().zip(got) {
                assert!((got - all[t - 1]).abs() < 1e-5);
            }
        }
    }
}

/// A batch whose sampled tokens are drawn from `policy` and carry its log-probabilities, moved by
/// `shift` sampled tokens.
fn sampled_batch(policy: &Policy, shift: usize) -> TrainBatch {
    let mut rng = ChaCha8Rng::seed_from_u64(17);
    let mut batch = batch(13, 6);
    for trajectory in batch.groups.iter_mut().flat_map(|g| &mut g.trajectories) {
        for s in &mut trajectory.sequences {
            for t in 0..s.len() {
                if s.loss_mask[t] {
                    let prefix = distributions_by_hand(policy, &s.token_ids[..t], 1.0);
                    let all = &prefix[t - 1];
                    let mut draw = rng.random_range(0.0..1.0);
                    let id = all
                        .iter()
                        .position(|l| {
                            draw -= l.exp();
                            draw < 0.0
                        })
                        .unwrap_or(VOCAB - 1);
                    s.token_ids[t] = id as u32;
                    s.logprobs[t] = all[id] as f32;
                }
            }
            let places: Vec<usize> = (0..s.len()).filter(|t| s.loss_mask[*t]).collect();
            let values: Vec<f32> = places.iter().map(|t| s.logprobs[*t]).collect();
            for (i, t) in places.iter().enumerate() {
                s.logprobs[*t] = values[(i + shift) % values.len()];
            }
        }
    }
    batch
}

#[test]
fn correlation_is_one_for_the_own_samples_and_falls_when_shifted() {
    let pearson = |shift| {
        // A wide initialisation makes a peaky policy, as trained ones are.
        let policy = model(21, 0.5, true);
        let batch = sampled_batch(&policy, shift);
        let metrics = Trainer::new(config(), policy, None)
            .unwrap()
            .step(&batch)
            .unwrap();
        metrics.get("training/rollout_actor_probs_pearson_corr").unwrap()
    };
    let (right, shifted) = (pearson(0), pearson(1));
    assert!(right > 0.9999, "{right}");
    assert!(shifted < 0.9, "{shifted}");
}

#[test]
fn a_step_raises_what_was_rewarded() {
    let policy = model(8, 0.2, true);
    let mut batch = sampled_batch(&policy, 0);
    for group in &mut batch.groups {
        for (s, trajectory) in group.trajectories.iter_mut().enumerate() {
            trajectory.outcome.reward = f64::from(s == 0);
        }
    }
    let mean_logprob = |policy: &Policy, rewarded: bool| -> f64 {
        let mut sum = 0.0;
        for t in batch.groups.iter().flat_map(|g| &g.trajectories) {
            for s in t
                .sequences
                .iter()
                .filter(|_| (t.outcome.reward > 0.5) == rewarded)
            {
                let all = logprobs_by_hand(policy, &s.token_ids, 1.0);
                sum += (1..s.len())
                    .filter(|i| s.loss_mask[*i])
                    .map(|i| all[i - 1])
                    .sum::<f64>();
            }
        }
        sum
    };
    let (good, bad) = (mean_logprob(&policy, true), mean_logprob(&policy, false));
    let mut trainer = Trainer::new(config(), policy, None).unwrap();
    let metrics = trainer.step(&batch).unwrap();
    assert!(mean_logprob(&trainer.policy, true) > good + 0.1);
    assert!(mean_logprob(&trainer.policy, false) < bad - 0.1);
    // Nothing was updated between the old log-probabilities and the loss.
    assert_eq!(metrics.get("actor/ppo_kl"), Some(0.0));
    assert_eq!(metrics.get("actor/pg_clipfrac"), Some(0.0));
    assert_eq!((metrics.step, metrics.version), (1, PolicyVersion(1)));
}

#[test]
fn the_shared_forward_gives_the_same_step_as_a_separate_one() {
    // Two mini-batches force the separate recomputation; the second holds no sequence.
    let run = |mini_batch_groups: usize| {
        let mut config = with_kl_and_entropy(config());
        config.mini_batch_groups = mini_batch_groups;
        config.max_token_len_per_gpu = 100_000;
        let mut batch = batch(19, 3);
        batch.groups.push(group(3, Vec::new()));
        let mut trainer = Trainer::new(config, model(1, 0.2, true), Some(model(2, 0.2, true))).unwrap();
        let metrics = trainer.step(&batch).unwrap();
        (trainer.policy.export(), metrics)
    };
    let (shared, metrics) = run(4);
    let mut config = with_kl_and_entropy(config());
    config.max_token_len_per_gpu = 100_000;
    let mut separate = Trainer::new(config, model(1, 0.2, true), Some(model(2, 0.2, true))).unwrap();
    let mut data = samples(&batch(19, 3), &separate.config);
    separate.recompute_logprobs(&mut data).unwrap();
    reference_logprobs(separate.reference.as_ref().unwrap(), &separate.config, &mut data).unwrap();
    let all = data.mini_batches()[0].clone();
    separate.lr = separate.config.lr.rate(1);
    let update = separate
        .update(&mut data, &all, &mut StageTimer::default())
        .unwrap();
    assert_eq!(metrics.get("actor/grad_norm"), Some(update.grad_norm));
    for (a, b) in shared.iter().zip(separate.policy.export()) {
        assert_eq!(a.data, b.data, "{}", a.name);
    }
}

#[test]
fn mini_batches_and_epochs_make_several_updates_against_the_same_old_policy() {
    let mut config = config();
    config.mini_batch_groups = 2;
    config.ppo_epochs = 2;
    config.lr = LrSchedule::constant(5e-3);
    let mut trainer = Trainer::new(config, model(8, 0.2, true), None).unwrap();
    let metrics = trainer.step(&batch(23, 5)).unwrap();
    assert_eq!(metrics.get("actor/updates"), Some(6.0)); // 3 mini-batches (2, 2, 1 groups) twice
    assert_eq!(trainer.save_state().unwrap().progress.optimizer_updates, 6);
    // The policy moved away from the old log-probabilities.
    assert!(metrics.get("actor/ppo_kl").unwrap() != 0.0);
    assert!(metrics.get("timing_s/old_log_prob").is_some());
}

#[test]
fn resuming_is_bit_identical() {
    let new = || {
        let mut config = with_kl_and_entropy(config());
        config.lr.warmup_steps = 3;
        config.num_threads = 2;
        Trainer::new(config, model(1, 0.2, true), Some(model(2, 0.2, true))).unwrap()
    };
    let batches: Vec<_> = (1..=3)
        .map(|step| TrainBatch {
            step,
            ..batch(30 + u64::from(step), 4)
        })
        .collect();
    let mut straight = new();
    for batch in &batches {
        straight.step(batch).unwrap();
    }
    let mut first = new();
    first.step(&batches[0]).unwrap();
    let saved = first.save_state().unwrap();
    drop(first);
    let mut second = new();
    second
        .load_state(
            &saved.actor,
            &saved.optimizer,
            None,
            saved.progress,
            saved.version,
        )
        .unwrap();
    let metrics: Vec<_> = batches[1..].iter().map(|b| second.step(b).unwrap()).collect();
    let (want, got) = (straight.save_state().unwrap(), second.save_state().unwrap());
    assert_eq!(want.progress, got.progress);
    assert_eq!(got.version, PolicyVersion(3));
    assert_eq!(metrics[1].get("actor/lr"), Some(1e-3));
    for (a, b) in want
        .actor
        .iter()
        .chain(&want.optimizer)
        .zip(got.actor.iter().chain(&got.optimizer))
    {
        assert_eq!((&a.name, &a.data), (&b.name, &b.data));
    }
}

#[test]
fn a_gradient_that_is_not_finite_is_skipped_and_counted() {
    let mut config = config();
    config.estimator = AdvantageEstimator::Grpo { divide_by_std: false };
    let mut trainer = Trainer::new(config, model(1, 0.2, true), None).unwrap();
    let before = trainer.save_state().unwrap();
    let mut bad = batch(40, 1);
    for (s, trajectory) in bad.groups[0].trajectories.iter_mut().enumerate() {
        trajectory.outcome.reward = [1e300, -1e300, 0.0][s];
    }
    let metrics = trainer.step(&bad).unwrap();
    assert!(!metrics.get("actor/grad_norm").unwrap().is_finite());
    assert_eq!(metrics.get("actor/skipped_updates"), Some(1.0));
    let after = trainer.save_state().unwrap();
    for (a, b) in before
        .actor
        .iter()
        .chain(&before.optimizer)
        .zip(after.actor.iter().chain(&after.optimizer))
    {
        assert_eq!(a.data, b.data, "{}", a.name);
    }
    // The run goes on.
    let next = TrainBatch {
        step: 2,
        ..batch(41, 1)
    };
    assert!(trainer
        .step(&next)
        .unwrap()
        .get("actor/grad_norm")
        .unwrap()
        .is_finite());
    assert_ne!(trainer.save_state().unwrap().actor[0].data, before.actor[0].data);
}

#[test]
fn gradients_are_clipped_by_their_global_norm() {
    let (tensors, _) = gradients_of(
        with_kl_and_entropy(config()),
        model(1, 0.3, true),
        model(2, 0.3, true),
        &batch(50, 2),
    );
    let square: f64 = tensors
        .iter()
        .map(|t| block_loop::to_vec(&t.view(-1)).iter().map(|x| x * x).sum::<f64>())
        .sum();
    let mut gradients = Gradients::of(tensors);
    let norm = gradients.square().sqrt();
    assert!((norm - square.sqrt()).abs() < 1e-5 * norm);
    gradients.clip(norm, norm / 4.0);
    assert!((gradients.square().sqrt() - norm / 4.0).abs() < 1e-4 * norm);
    gradients.clip(norm / 4.0, norm);
    assert!(
        (gradients.square().sqrt() - norm / 4.0).abs() < 1e-4 * norm,
        "a small norm is left alone"
    );
}

#[test]
fn groups_without_comparison_and_empty_batches_change_nothing_but_the_version() {
    let mut config = config();
    config.optimizer.weight_decay = 0.0;
    let mut trainer = Trainer::new(config, model(1, 0.2, true), None).unwrap();
    let before = trainer.save_state().unwrap().actor;
    let mut equal = batch(60, 2);
    for trajectory in equal.groups.iter_mut().flat_map(|g| &mut g.trajectories) {
        trajectory.outcome.reward = 1.0;
    }
    let metrics = trainer.step(&equal).unwrap();
    assert_eq!(metrics.get("actor/grad_norm"), Some(0.0));
    assert_eq!(metrics.get("group/without_advantage"), Some(2.0));
    assert!(metrics.get("actor/entropy").unwrap() > 0.0);
    let metrics = trainer
        .step(&TrainBatch {
            step: 2,
            groups: vec![group(0, Vec::new())],
        })
        .unwrap();
    assert_eq!(metrics.get("critic/score/mean"), None);
    assert_eq!(trainer.version(), PolicyVersion(2));
    for (a, b) in before.iter().zip(trainer.save_state().unwrap().actor) {
        assert_eq!(a.data, b.data, "{}", a.name);
    }
}

#[test]
fn metrics_count_trials_drops_and_staleness() {
    let policy = model(8, 0.4, true);
    let mut batch = sampled_batch(&policy, 0);
    batch.step = 4;
    for trajectory in batch.groups.iter_mut().flat_map(|g| &mut g.trajectories) {
        for s in &mut trajectory.sequences {
            for t in 0..s.len() {
                s.versions[t] = if s.loss_mask[t] { 3 - (t % 2) as u32 } else { 0 };
            }
        }
    }
    let dropped = batch.groups[0].trajectories.pop().unwrap();
    batch.groups[0]
        .dropped
        .push((dropped.key, DropReason::VerifierTimeout));
    batch.groups[1].trajectories[0].outcome.stop = StopReason::Timeout;
    batch.groups[1].start_version = PolicyVersion(2);
    for group in batch.groups.iter_mut().filter(|g| g.id.0 != 1) {
        group.start_version = PolicyVersion(3);
    }
    let mut trainer = Trainer::new(config(), policy, None).unwrap();
    trainer.version = PolicyVersion(3);
    let m = trainer.step(&batch).unwrap();
    let scores: Vec<f64> = batch
        .groups
        .iter()
        .flat_map(|g| &g.trajectories)
        .map(|t| t.outcome.reward)
        .collect();
    assert_eq!(scores.len(), 17);
    assert!((m.get("critic/score/mean").unwrap() - scores.iter().sum::<f64>() / 17.0).abs() < 1e-12);
    assert_eq!(m.get("trajectory/finished"), Some(17.0));
    assert_eq!(m.get("trajectory/dropped/verifier_timeout"), Some(1.0));
    assert_eq!(m.get("trajectory/stop/timeout"), Some(1.0));
    assert_eq!(m.get("num_turns/mean"), Some(2.0));
    assert_eq!(m.get("staleness/group_lag/max"), Some(1.0));
    let (fresh, stale) = (
        m.get("staleness/lag_0/tokens").unwrap(),
        m.get("staleness/lag_1/tokens").unwrap(),
    );
    assert_eq!(Some(fresh + stale), m.get("perf/sampled_tokens"));
    assert_eq!(m.get("training/rollout_actor_probs_tokens"), Some(fresh));
    for key in [
        "staleness/lag_0/pearson",
        "staleness/lag_1/pearson",
        "training/rollout_actor_probs_pearson_corr",
    ] {
        assert!(m.get(key).unwrap() > 0.9999, "{key}");
    }
    assert!(m.get("rollout_corr/kl").unwrap().abs() < 1e-4);
    assert!(m.get("training/rollout_probs_diff_max").unwrap() < 1e-4);
    assert!(m.values.values().all(|v| v.is_finite()));
    for key in [
        "actor/pg_loss",
        "actor/entropy",
        "actor/ppo_kl",
        "actor/pg_clipfrac",
        "actor/pg_clipfrac_lower",
        "actor/grad_norm",
        "actor/lr",
        "actor/loss",
        "critic/rewards/mean",
        "critic/advantages/max",
        "response_length/clip_ratio",
        "prompt_length/min",
        "timing_s/trainer_step",
        "perf/throughput",
        "perf/total_num_tokens",
    ] {
        assert!(m.get(key).is_some(), "{key}");
    }
}

/// verl's `training/rollout_probs_diff_*`: absolute differences of probabilities, their mean, their largest, and
/// the unbiased deviation, here in two passes.
#[test]
fn differences_of_probabilities_are_those_of_engine_and_trainer() {
    let batch = batch(31, 2);
    let mut trainer = Trainer::new(config(), model(1, 0.4, true), None).unwrap();
    let mut samples = samples(&batch, &config());
    trainer.recompute_logprobs(&mut samples).unwrap();
    let own = samples
        .sequences
        .iter()
        .flat_map(|s| s.training_logprobs.clone().unwrap());
    // The engine's are e⁻² everywhere.
    let gaps: Vec<f64> = own.map(|l| (l.exp() - (-2f64).exp()).abs()).collect();
    let count = gaps.len() as f64;
    let mean = gaps.iter().sum::<f64>() / count;
    let variance = gaps.iter().map(|g| (g - mean) * (g - mean)).sum::<f64>() / (count - 1.0);
    let metrics = trainer.step(&batch).unwrap();
    for (key, want) in [
        ("mean", mean),
        ("max", gaps.iter().copied().fold(0.0, f64::max)),
        ("std", variance.sqrt()),
    ] {
        let got = metrics
            .get(&format!("training/rollout_probs_diff_{key}"))
            .unwrap();
        assert!((got - want).abs() < 1e-7, "{key}: {got} instead of {want}");
    }
}

#[test]
fn bad_data_is_refused_by_name_and_changes_nothing() {
    type Damage = fn(&mut TrainBatch);
    let cases: [(Damage, &str); 5] = [
        (
            |b| b.groups[0].trajectories[2].sequences[0].token_ids[0] = 29,
            "vocabulary of 29",
        ),
        (
            |b| b.groups[0].trajectories[2].outcome.reward = f64::NAN,
            "reward is NaN",
        ),
        (
            |b| b.groups[0].trajectories[2].sequences[0].logprobs.truncate(1),
            "lengths differ",
        ),
        (
            |b| b.groups[0].trajectories[2].sequences[0].weight = 0.0,
            "weight is 0",
        ),
        (
            |b| {
                let s = &mut b.groups[0].trajectories[2].sequences[0];
                s.loss_mask[0] = true;
                s.prompt_len = 0;
            },
            "nothing predicts it",
        ),
    ];
    let mut trainer = Trainer::new(config(), model(1, 0.2, true), None).unwrap();
    for (damage, message) in cases {
        let mut batch = batch(70, 1);
        damage(&mut batch);
        let error = trainer.step(&batch).unwrap_err().to_string();
        assert!(
            error.contains(message) && error.contains("train-g000000-s2"),
            "{error}"
        );
    }
    let error = trainer
        .step(&TrainBatch {
            step: 3,
            ..batch(70, 1)
        })
        .unwrap_err();
    assert!(matches!(error, TrainError::OutOfOrder { batch: 3, .. }));
    assert_eq!(trainer.version(), PolicyVersion(0));
    let error = Trainer::new(with_kl_and_entropy(config()), model(1, 0.2, true), None)
        .err()
        .unwrap();
    assert!(matches!(error, TrainError::NoReference));
    let mut zero = config();
    zero.head_chunk_tokens = 0;
    assert!(Trainer::new(zero, model(1, 0.2, true), None).is_err());
}

/// Through the disk: what a checkpoint holds is a model folder twice over, and continues the run.
#[test]
fn a_checkpoint_on_disk_loads_as_a_policy_and_resumes() {
    use crate::{
        model::hf::{LayoutSource, LayoutTensor, StoredDType},
        train::checkpoint::{
            CheckpointHead, CheckpointStore, ExportLayout, ModelFiles, RunState, SavedTensors,
        },
    };
    let root = tempfile::tempdir().unwrap();
    let mut trainer = Trainer::new(config(), model(1, 0.2, true), None).unwrap();
    trainer.step(&batch(80, 2)).unwrap();
    let saved = trainer.save_state().unwrap();
    let store = CheckpointStore::open(root.path()).unwrap();
    let as_it_is = |piece: &TensorPiece| LayoutTensor {
        name: piece.name.clone(),
        dtype: StoredDType::F32,
        shape: piece.shape.clone(),
        source: LayoutSource::Network {
            tensor: piece.name.clone(),
            start: 0,
        },
    };
    let head = CheckpointHead {
        export: Arc::new(ExportLayout::new(saved.actor.iter().map(as_it_is).collect())),
        state: RunState {
            global_step: 1,
            weight_version: saved.version,
            trainer: saved.progress,
            buffer: serde_json::Value::Null,
            config_fingerprint: String::new(),
        },
        model_files: ModelFiles {
            config: serde_json::to_vec(&trainer.policy.config.to_value())
                .unwrap()
                .into(),
            others: Vec::new(),
        },
    };
    let tensors = SavedTensors {
        actor: saved.actor.clone(),
        optimizer: saved.optimizer.clone(),
        critic: None,
    };
    let written = store.write(&tensors, &head).unwrap();
    let bytes = |pieces: &[TensorPiece]| -> Vec<_> {
        pieces.iter().map(|t| (t.name.clone(), t.data.clone())).collect()
    };
    for folder in ["actor", "huggingface"] {
        let loaded = Policy::load(&written.path.join(folder), Device::Cpu).unwrap();
        let loaded: Vec<_> = loaded.export().into_iter().map(|t| (t.name, t.data)).collect();
        assert_eq!(loaded, bytes(&saved.actor), "{folder}");
    }
    let read = store.load(&written).unwrap();
    let mut resumed = Trainer::new(config(), model(2, 0.2, true), None).unwrap();
    resumed
        .load_state(
            &read.tensors.actor,
            &read.tensors.optimizer,
            None,
            read.state.trainer,
            read.state.weight_version,
        )
        .unwrap();
    let next = TrainBatch {
        step: 2,
        ..batch(81, 2)
    };
    trainer.step(&next).unwrap();
    resumed.step(&next).unwrap();
    assert_eq!(
        bytes(&resumed.save_state().unwrap().actor),
        bytes(&trainer.save_state().unwrap().actor)
    );
}

#[test]
fn a_state_of_another_model_is_refused_and_changes_nothing() {
    let mut trainer = Trainer::new(config(), model(1, 0.2, true), None).unwrap();
    let before = trainer.save_state().unwrap();
    let mut other = Trainer::new(config(), model(1, 0.2, false), None)
        .unwrap()
        .save_state()
        .unwrap();
    other.version = PolicyVersion(9);
    let error = trainer
        .load_state(
            &other.actor,
            &other.optimizer,
            None,
            other.progress,
            other.version,
        )
        .unwrap_err();
    assert!(error.to_string().contains("lm_head.weight"), "{error}");
    let error = trainer
        .load_state(
            &other.actor[..other.actor.len() - 1],
            &[],
            None,
            other.progress,
            other.version,
        )
        .unwrap_err();
    assert!(
        error.to_string().contains("exp_avg.model.embed_tokens.weight"),
        "{error}"
    );
    assert_eq!(trainer.version(), PolicyVersion(0));
    assert_eq!(trainer.save_state().unwrap().actor[0].data, before.actor[0].data);
}

#[test]
fn a_trainer_moves_to_its_thread() {
    fn is_send<T: Send>() {}
    is_send::<Trainer>();
}
