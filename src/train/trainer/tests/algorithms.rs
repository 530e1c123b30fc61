//! Estimators, the critic, penalties, corrections and the filter, through the trainer.

use super::*;
use crate::{
    model::net::PackedLayout,
    train::algorithm::{
        correction::{Criterion, Distance, Extent, ImportanceLevel, WeightBounds},
        AdaptiveKl, ImportanceWeights, KlReward, Rejection, ValueClip,
    },
};

fn ppo() -> TrainerConfig {
    let mut config = config();
    config.estimator = AdvantageEstimator::Gae {
        gamma: 0.99,
        lambda: 0.95,
    };
    config.critic.lr = LrSchedule::constant(1e-2);
    config
}

fn with_critic(config: TrainerConfig) -> Trainer {
    let trainer = Trainer::new(config, model(1, 0.2, true), None).unwrap();
    trainer.with_critic(model(1, 0.2, true))
}

/// A critic whose head is not zero, so that gradients reach the trunk.
fn seasoned_critic(config: &TrainerConfig, tied: bool, double: bool) -> Critic {
    let trunk = model(5, 0.3, tied);
    let trunk = if double { to_double(trunk) } else { trunk };
    let critic = Critic::new(config, trunk, None);
    no_grad(|| {
        for (name, mut parameter) in critic.parameters() {
            if name.starts_with("score") {
                let wave = Tensor::arange(parameter.numel() as i64, (parameter.kind(), Device::Cpu)).sin();
                parameter.copy_(&(wave * 0.3 + 0.1).view_as(&parameter));
            }
        }
    });
    critic
}

/// Predictions and returns away from the critic's own, so that some tokens are clipped.
fn with_targets(config: &TrainerConfig, critic: &Critic, batch: &TrainBatch) -> Samples {
    let mut samples = samples(batch, config);
    critic.predict(config, &mut samples).unwrap();
    let mut rng = ChaCha8Rng::seed_from_u64(4);
    for sample in &mut samples.sequences {
        sample.returns = sample
            .values
            .iter()
            .map(|v| v + rng.random_range(-1.0..1.0))
            .collect();
        sample
            .values
            .iter_mut()
            .for_each(|v| *v += rng.random_range(-0.4..0.4));
    }
    samples
}

/// The block loop of the critic against one autograd graph per sequence, with the loss written on tensors.
#[test]
fn critic_gradients_equal_those_of_one_graph() {
    for (double, limit) in [(true, 1e-10), (false, 1e-5)] {
        for tied in [true, false] {
            for backward in [BackwardMode::BlockLoop, BackwardMode::BlockGraphs] {
                let mut config = ppo();
                config.critic.clip = ValueClip(0.2);
                config.backward = backward;
                let critic = seasoned_critic(&config, tied, double);
                let batch = batch(3, 3);
                let samples = with_targets(&config, &critic, &batch);
                let all = samples.mini_batches()[0].clone();
                let (ours, sums) = critic.gradients(&config, &samples, &all).unwrap();
                assert!(
                    sums.clipped > 0 && sums.clipped < sums.tokens,
                    "both terms are in force somewhere"
                );

                // Mean over trials of the mean over a sequence's tokens, by trial share.
                let weight_sum: f64 = samples.sequences.iter().map(|s| s.weight).sum();
                let mut loss = Tensor::zeros([], (Kind::Double, Device::Cpu));
                for sample in &samples.sequences {
                    let layout = PackedLayout::single(sample.ids.len(), Device::Cpu);
                    let values = critic.values_in_one_graph(&Tensor::from_slice(&sample.ids), &layout);
                    let rows: Vec<i64> = sample.sampled.iter().map(|t| *t as i64 - 1).collect();
                    let values = values.index_select(0, &Tensor::from_slice(&rows));
                    let old = Tensor::from_slice(&sample.values).to_kind(values.kind());
                    let target = Tensor::from_slice(&sample.returns).to_kind(values.kind());
                    let held = values.clamp_tensor(Some(&old - 0.2), Some(&old + 0.2));
                    let square = |x: &Tensor| (x - &target).square();
                    let tokens = square(&values).maximum(&square(&held)) / 2.0;
                    loss += tokens.mean(Kind::Double) * (sample.weight / weight_sum);
                }
                assert!((loss.double_value(&[]) - sums.loss).abs() < limit);
                let parameters: Vec<Tensor> = critic.parameters().into_iter().map(|(_, p)| p).collect();
                let whole = Tensor::run_backward(&[loss], &parameters, false, false);
                let gap = relative_gap(&ours.tensors, &whole);
                assert!(gap < limit, "double {double}, tied {tied}, {backward:?}: {gap:e}");
            }
        }
    }
}

/// The value loss itself, moved along single parameters.
#[test]
fn critic_gradients_agree_with_finite_differences() {
    let config = ppo();
    let critic = seasoned_critic(&config, false, true);
    let samples = with_targets(&config, &critic, &batch(5, 1));
    let all = samples.mini_batches()[0].clone();
    let (gradients, _) = critic.gradients(&config, &samples, &all).unwrap();
    assert!(critic
        .parameters()
        .iter()
        .all(|(name, _)| name != "lm_head.weight"));
    for (place, (name, parameter)) in critic.parameters().into_iter().enumerate() {
        let flat = gradients.tensors[place].view(-1);
        let entry = flat.abs().argmax(None, false).int64_value(&[]);
        let loss_at = |delta: f64| {
            let nudge = |delta: f64| no_grad(|| drop(parameter.view(-1).get(entry).g_add_scalar_(delta)));
            nudge(delta);
            let loss = critic.gradients(&config, &samples, &all).unwrap().1.loss;
            nudge(-delta);
            loss
        };
        let numeric = (loss_at(1e-5) - loss_at(-1e-5)) / 2e-5;
        let got = flat.double_value(&[entry]);
        assert!(
            (got - numeric).abs() < 1e-6 * (1e-2 + got.abs()),
            "{name}[{entry}]: {got} instead of {numeric}"
        );
    }
}

#[test]
fn the_critic_learns_the_returns_and_the_policy_what_was_rewarded() {
    let policy = model(8, 0.2, true);
    let mut batch = sampled_batch(&policy, 0);
    for group in &mut batch.groups {
        for (s, trajectory) in group.trajectories.iter_mut().enumerate() {
            trajectory.outcome.reward = f64::from(s == 0);
        }
    }
    let mut trainer = Trainer::new(ppo(), policy, None)
        .unwrap()
        .with_critic(model(8, 0.2, true));
    let mut rows = Vec::new();
    for step in 1..=30 {
        rows.push(
            trainer
                .step(&TrainBatch {
                    step,
                    ..batch.clone()
                })
                .unwrap(),
        );
    }
    let (first, last) = (&rows[0], &rows[29]);
    assert_eq!(
        first.get("critic/values/mean"),
        Some(0.0),
        "the head starts at zero"
    );
    assert_eq!(first.get("critic/vpred_mean"), Some(0.0));
    assert!(last.get("critic/vf_loss").unwrap() < 0.5 * first.get("critic/vf_loss").unwrap());
    assert!(
        last.get("critic/vf_explained_var").unwrap() > 0.5,
        "{:?}",
        last.get("critic/vf_explained_var")
    );
    for key in [
        "critic/vf_clipfrac",
        "critic/grad_norm",
        "critic/lr",
        "critic/returns/max",
        "critic/skipped_updates",
        "timing_s/values",
        "timing_s/update_critic",
    ] {
        assert!(last.get(key).is_some(), "{key}");
    }
    let mean = |rewarded: bool| {
        let (mut sum, mut count) = (0.0, 0.0);
        for t in batch.groups.iter().flat_map(|g| &g.trajectories) {
            for s in t
                .sequences
                .iter()
                .filter(|_| (t.outcome.reward > 0.5) == rewarded)
            {
                let all = logprobs_by_hand(&trainer.policy, &s.token_ids, 1.0);
                for i in (1..s.len()).filter(|i| s.loss_mask[*i]) {
                    sum += all[i - 1] - f64::from(s.logprobs[i]);
                    count += 1.0;
                }
            }
        }
        sum / count
    };
    assert!(mean(true) > mean(false) + 0.1, "{} {}", mean(true), mean(false));
}

#[test]
fn the_policy_waits_for_the_critic_to_warm_up() {
    let mut config = ppo();
    config.critic.warmup_steps = 1;
    let mut trainer = with_critic(config);
    let before = trainer.save_state().unwrap();
    let metrics = trainer.step(&batch(30, 2)).unwrap();
    let after = trainer.save_state().unwrap();
    assert!(before
        .actor
        .iter()
        .zip(&after.actor)
        .all(|(a, b)| a.data == b.data));
    let head = |s: &TrainerSnapshot| s.critic.as_ref().unwrap().weights.last().unwrap().data.clone();
    assert_ne!(head(&before), head(&after));
    assert_eq!(metrics.get("actor/pg_loss"), None);
    assert!(metrics.get("rollout_corr/kl").is_some());
    assert_eq!(trainer.version(), PolicyVersion(1));
    let next = TrainBatch {
        step: 2,
        ..batch(31, 2)
    };
    assert!(trainer.step(&next).unwrap().get("actor/pg_loss").is_some());
    assert_ne!(trainer.save_state().unwrap().actor[0].data, before.actor[0].data);
}

#[test]
fn resuming_with_a_critic_and_an_adaptive_penalty_is_bit_identical() {
    let new = || {
        let mut config = ppo();
        config.kl_reward = Some(KlReward {
            estimator: KlEstimator::K1,
            coefficient: 0.05,
            adaptive: Some(AdaptiveKl {
                target: 0.01,
                horizon: 50.0,
            }),
        });
        let trainer = Trainer::new(config, model(1, 0.2, true), Some(model(2, 0.2, true))).unwrap();
        trainer.with_critic(model(1, 0.2, true))
    };
    let step = |trainer: &mut Trainer, step: u32| {
        let batch = TrainBatch {
            step,
            ..batch(30 + u64::from(step), 4)
        };
        trainer.step(&batch).unwrap()
    };
    let mut straight = new();
    step(&mut straight, 1);
    let saved = straight.save_state().unwrap();
    let want = step(&mut straight, 2);
    let mut resumed = new();
    resumed
        .load_state(
            &saved.actor,
            &saved.optimizer,
            saved.critic.as_ref(),
            saved.progress,
            saved.version,
        )
        .unwrap();
    let got = step(&mut resumed, 2);
    assert_ne!(
        got.get("actor/reward_kl_penalty_coeff"),
        Some(0.05),
        "the factor moved in step 1"
    );
    for key in ["actor/reward_kl_penalty_coeff", "critic/vf_loss", "actor/pg_loss"] {
        assert_eq!(got.get(key), want.get(key), "{key}");
    }
    let bytes = |s: &TrainerSnapshot| -> Vec<_> {
        let critic = s.critic.as_ref().unwrap();
        let all = s
            .actor
            .iter()
            .chain(&s.optimizer)
            .chain(&critic.weights)
            .chain(&critic.optimizer);
        all.map(|t| (t.name.clone(), t.data.clone())).collect()
    };
    assert_eq!(
        bytes(&straight.save_state().unwrap()),
        bytes(&resumed.save_state().unwrap())
    );
    assert_eq!(
        straight.save_state().unwrap().progress,
        resumed.save_state().unwrap().progress
    );

    // Without the saved critic nothing is loaded; without a critic the saved one is passed over.
    let refused = new().load_state(
        &saved.actor,
        &saved.optimizer,
        None,
        saved.progress,
        saved.version,
    );
    assert!(matches!(refused, Err(TrainError::NoSavedCritic)));
    let mut plain = Trainer::new(config(), model(3, 0.2, true), None).unwrap();
    let critic = saved.critic.as_ref();
    plain
        .load_state(
            &saved.actor,
            &saved.optimizer,
            critic,
            saved.progress,
            saved.version,
        )
        .unwrap();
    let mut damaged = saved.critic.clone().unwrap();
    damaged.weights.retain(|w| w.name != "score.bias");
    let error = new()
        .load_state(
            &saved.actor,
            &saved.optimizer,
            Some(&damaged),
            saved.progress,
            saved.version,
        )
        .unwrap_err();
    assert!(error.to_string().contains("score.bias"), "{error}");
}

#[test]
fn an_estimator_that_reads_a_critic_needs_one() {
    let mut trainer = Trainer::new(ppo(), model(1, 0.2, true), None).unwrap();
    assert!(matches!(trainer.step(&batch(1, 1)), Err(TrainError::NoCritic)));
    assert_eq!(trainer.version(), PolicyVersion(0));
}

#[test]
fn penalties_enter_rewards_by_trial() {
    let mut config = config();
    config.kl_reward = Some(KlReward {
        estimator: KlEstimator::K1,
        coefficient: 0.5,
        adaptive: None,
    });
    assert!(matches!(
        Trainer::new(config.clone(), model(1, 0.2, true), None),
        Err(TrainError::NoReference)
    ));
    let mut trainer = Trainer::new(config, model(1, 0.3, true), Some(model(2, 0.3, true))).unwrap();
    let batch = batch(9, 2);
    // By hand: every sampled token's log ratio, averaged over a trial's sequences by their share.
    let reference = model(2, 0.3, true);
    let (mut rewards, mut divergence) = (Vec::new(), 0.0);
    for trial in batch.groups.iter().flat_map(|g| &g.trajectories) {
        let mut reward = trial.outcome.reward;
        for s in &trial.sequences {
            let (ours, theirs) = (
                logprobs_by_hand(&trainer.policy, &s.token_ids, 1.0),
                logprobs_by_hand(&reference, &s.token_ids, 1.0),
            );
            let gaps: Vec<f64> = (1..s.len())
                .filter(|t| s.loss_mask[*t])
                .map(|t| ours[t - 1] - theirs[t - 1])
                .collect();
            reward -= f64::from(s.weight) * 0.5 * gaps.iter().sum::<f64>();
            divergence += f64::from(s.weight) * gaps.iter().sum::<f64>() / gaps.len() as f64 / 6.0;
        }
        rewards.push(reward);
    }
    let metrics = trainer.step(&batch).unwrap();
    let mean = rewards.iter().sum::<f64>() / 6.0;
    assert!((metrics.get("critic/rewards/mean").unwrap() - mean).abs() < 1e-4);
    assert!((metrics.get("actor/reward_kl_penalty").unwrap() - divergence).abs() < 1e-5);
    assert_eq!(metrics.get("actor/reward_kl_penalty_coeff"), Some(0.5));
    assert_ne!(
        metrics.get("critic/rewards/mean"),
        metrics.get("critic/score/mean")
    );
}

/// Gradients of the whole batch after correction.
fn corrected(config: &TrainerConfig, batch: &TrainBatch) -> (Vec<Tensor>, Samples) {
    let trainer = Trainer::new(config.clone(), to_double(model(1, 0.3, true)), None).unwrap();
    let mut samples = samples(batch, config);
    trainer.recompute_logprobs(&mut samples).unwrap();
    samples.assign_advantages(&config.estimator);
    samples.correct(config);
    let all = samples.mini_batches()[0].clone();
    let (gradients, _) = trainer
        .gradients(&mut samples, &all, &mut StageTimer::default())
        .unwrap();
    (gradients.tensors, samples)
}

#[test]
fn a_rejected_token_is_as_if_it_had_not_been_sampled() {
    // Engine log-probabilities of -2 everywhere: tokens whose own is far from it are out.
    let batch = batch(9, 3);
    for loss in ["vanilla", "gspo"] {
        let mut config = with_kl_and_entropy(config());
        config.objective.kl = None;
        config.objective.policy_loss = PolicyLoss::from_mode(loss, 0.2, 0.28, 3.0).unwrap();
        let mut rejecting = config.clone();
        rejecting.rejection = Some(Rejection {
            criteria: vec![Criterion {
                name: "token_k1",
                extent: Extent::Token,
                distance: Distance::K1,
                lower: -1.0,
                upper: 2.2,
            }],
        });
        let (got, samples) = corrected(&rejecting, &batch);
        let out: Vec<Vec<bool>> = samples.sequences.iter().map(|s| s.keep.clone()).collect();
        let rejected = out.iter().flatten().filter(|keep| !**keep).count();
        assert!(
            rejected > 5 && rejected < out.iter().flatten().count() / 2,
            "{rejected}"
        );

        // The same tokens, unmasked in the data itself.
        let mut masked = batch.clone();
        let sequences = masked
            .groups
            .iter_mut()
            .flat_map(|g| &mut g.trajectories)
            .flat_map(|t| &mut t.sequences);
        for (s, keep) in sequences.zip(&out) {
            let places: Vec<usize> = (0..s.len()).filter(|t| s.loss_mask[*t]).collect();
            for (t, keep) in places.into_iter().zip(keep) {
                s.loss_mask[t] = *keep;
            }
            s.prompt_len = s.loss_mask.iter().position(|m| *m).unwrap_or(s.len()) as u32;
        }
        let (want, _) = corrected(&config, &masked);
        assert!(relative_gap(&got, &want) < 1e-12, "{loss}");
    }
}

#[test]
fn corrections_are_reported_and_change_the_step() {
    let policy = || model(8, 0.3, true);
    let mut batch = sampled_batch(&policy(), 0);
    // An engine that was surer of every second token than the trainer is.
    for s in batch
        .groups
        .iter_mut()
        .flat_map(|g| &mut g.trajectories)
        .flat_map(|t| &mut t.sequences)
    {
        for t in (0..s.len()).filter(|t| t % 2 == 0) {
            if s.loss_mask[t] {
                s.logprobs[t] *= 0.3;
            }
        }
    }
    let step = |importance, rejection: Option<Rejection>| {
        let mut config = config();
        config.importance = importance;
        config.rejection = rejection;
        let mut trainer = Trainer::new(config, policy(), None).unwrap();
        let metrics = trainer.step(&batch).unwrap();
        (metrics, trainer.save_state().unwrap().actor)
    };
    let weights = |level, bounds| {
        Some(ImportanceWeights {
            level,
            bounds,
            normalize: false,
        })
    };
    let (plain, weights_before) = step(None, None);
    assert_eq!(plain.get("rollout_corr/rollout_is_oob_ratio"), None);
    let pop = WeightBounds::Mask {
        lower: 0.5,
        upper: 2.0,
    };
    let (masked, after) = step(weights(ImportanceLevel::Token, pop), None);
    let share = masked.get("rollout_corr/rollout_is_oob_ratio").unwrap();
    assert!(share > 0.2 && share < 0.8, "{share}");
    assert_eq!(masked.get("rollout_corr/rollout_is_min"), Some(0.0));
    assert_ne!(weights_before[0].data, after[0].data);
    let cut = WeightBounds::Truncate { upper: 2.0 };
    let (sequence, _) = step(weights(ImportanceLevel::Sequence, cut), None);
    let ess = |m: &StepMetrics| m.get("rollout_corr/rollout_is_eff_sample_size").unwrap();
    assert!(
        ess(&sequence) < ess(&plain),
        "products spread more than single ratios"
    );
    let mean_k1 = Criterion {
        name: "seq_mean_k1",
        extent: Extent::SequenceMean,
        distance: Distance::K1,
        lower: -0.3,
        upper: 0.3,
    };
    let rejection = Rejection {
        criteria: vec![mean_k1],
    };
    let (rejected, _) = step(None, Some(rejection));
    let whole = rejected
        .get("rollout_corr/rollout_rs_seq_masked_fraction")
        .unwrap();
    assert!(whole > 0.2, "{whole}");
    assert!(rejected
        .get("rollout_corr/rollout_rs_seq_mean_k1_masked_fraction")
        .is_some());

    let mut both = config();
    both.bypass_old_logprobs = true;
    both.importance = weights(ImportanceLevel::Token, cut);
    let error = Trainer::new(both, policy(), None).err().unwrap().to_string();
    assert!(
        error.contains("ROLLOUT_IS") && error.contains("ROLLOUT_CORRECTION_BYPASS"),
        "{error}"
    );
}

/// What the filter takes out might as well not have been sampled.
#[test]
fn filtered_trials_leave_statistics_and_loss() {
    let mut with = batch(50, 3);
    with.groups[0].trajectories[1].outcome.stop = StopReason::Timeout;
    with.groups[1].trajectories[0].outcome.stop = StopReason::AgentCrash;
    with.groups[1].trajectories[2].outcome.stop = StopReason::MaxTurnsReached;
    let key = with.groups[2].trajectories.pop().unwrap().key;
    with.groups[2].dropped.push((key, DropReason::EnvSetupFailed));
    let mut without = with.clone();
    without.groups[0].trajectories.remove(1);
    without.groups[1].trajectories.remove(0);
    // Every weight of the policy and of the critic, where there is one.
    let step = |batch: &TrainBatch, filter: TrajectoryFilter, critic: bool| {
        let mut config = if critic { ppo() } else { config() };
        config.filter = filter;
        let mut trainer = Trainer::new(config, model(1, 0.2, true), None).unwrap();
        if critic {
            trainer = trainer.with_critic(model(1, 0.2, true));
        }
        let metrics = trainer.step(batch).unwrap();
        let state = trainer.save_state().unwrap();
        let critic = state.critic.into_iter().flat_map(|c| c.weights);
        let weights: Vec<_> = state.actor.into_iter().chain(critic).map(|w| w.data).collect();
        (metrics, weights)
    };
    let filter = || TrajectoryFilter::new([StopReason::Timeout, StopReason::AgentCrash]);
    for critic in [true, false] {
        let filtered = step(&with, filter(), critic).1;
        assert!(filtered == step(&without, TrajectoryFilter::default(), critic).1);
        assert!(filtered != step(&with, TrajectoryFilter::default(), critic).1);
    }
    let (metrics, _) = step(&with, filter(), false);
    let (off, _) = step(&with, TrajectoryFilter::default(), false);
    for (key, want) in [
        ("trajectory_filter/invalid_count", 3.0),
        ("trajectory_filter/invalid_ratio", 3.0 / 9.0),
        ("trajectory_filter/reason/timeout", 1.0),
        ("trajectory_filter/reason/agent_crash", 1.0),
        ("trajectory_filter/reason/max_turns_reached", 1.0),
        ("trajectory_filter/reason/env_setup_failed", 1.0),
        ("trajectory_filter/reason/agent_completed", 5.0),
        ("trajectory/finished", 8.0),
    ] {
        assert_eq!(metrics.get(key), Some(want), "{key}");
    }
    assert_eq!(
        off.get("trajectory_filter/invalid_count"),
        Some(1.0),
        "no verdict is never a zero"
    );
    // Scores are of all verdicts, rewards of what is trained on.
    assert_eq!(metrics.get("critic/score/mean"), off.get("critic/score/mean"));
    assert_ne!(metrics.get("critic/rewards/mean"), off.get("critic/rewards/mean"));
}

/// A trial that left its tokens in two sequences moves the weights as one.
#[test]
fn a_trial_of_several_sequences_weighs_as_one() {
    let whole = batch(60, 2);
    let mut split = whole.clone();
    for trial in split.groups.iter_mut().flat_map(|g| &mut g.trajectories) {
        let copies = |s: &TokenSequence| {
            let mut half = s.clone();
            half.weight /= 2.0;
            vec![half.clone(), half]
        };
        trial.sequences = trial.sequences.iter().flat_map(copies).collect();
    }
    for estimator in [
        AdvantageEstimator::Grpo { divide_by_std: true },
        AdvantageEstimator::Rloo,
        AdvantageEstimator::ReinforcePlusPlus { gamma: 1.0 },
        AdvantageEstimator::ReinforcePlusPlusBaseline,
        ppo().estimator,
    ] {
        for aggregation in [
            Aggregation::TokenMean,
            Aggregation::SeqMeanTokenSum,
            Aggregation::SeqMeanTokenMean,
        ] {
            let gradients = |batch: &TrainBatch| {
                let mut config = ppo();
                config.estimator = estimator;
                config.objective.aggregation = aggregation;
                let critic = seasoned_critic(&config, true, true);
                let trainer = Trainer::new(config.clone(), to_double(model(1, 0.3, true)), None).unwrap();
                let mut samples = samples(batch, &config);
                critic.predict(&config, &mut samples).unwrap();
                samples.assign_advantages(&config.estimator);
                let all = samples.mini_batches()[0].clone();
                let (mut actor, _) = trainer
                    .gradients(&mut samples, &all, &mut StageTimer::default())
                    .unwrap();
                if config.estimator.needs_critic() {
                    actor
                        .tensors
                        .extend(critic.gradients(&config, &samples, &all).unwrap().0.tensors);
                }
                actor.tensors
            };
            let gap = relative_gap(&gradients(&split), &gradients(&whole));
            // f32 shares: the half of a share is exact.
            assert!(gap < 1e-9, "{estimator:?} {aggregation:?}: {gap:e}");
        }
    }
}
