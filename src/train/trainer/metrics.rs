//! What a step reports, under verl's names.
//!
//! Lengths and advantages are those of sequences, scores and turns those of trials with a verdict, rewards
//! those of the trials that are trained on, after penalties. `trajectory_filter/reason/*` counts how every
//! trial of the batch ended, `invalid_*` those that are not trained on (without a verdict, or filtered). Keys
//! whose value is not defined (a correlation of constants, a mean over nothing) are left out; the counts
//! beside them say why.
//!
//! Definitions are verl's too (`metric_utils`, `core_algos`, `rollout_corr_helper`), with these differences:
//!
//! - `critic/score` and `critic/rewards` have one number a trial, not one a sequence; `critic/returns` is there
//!   with a critic only (without one it is the advantages); `num_turns` counts model calls.
//! - `actor/pg_loss`, `actor/kl_loss` and `critic/vf_loss` are means over the updates of a step, not their sums.
//! - `training/rollout_*` looks at tokens that the trainer's own version sampled; `staleness/lag_*` has the others.
//! - `perf/throughput` is that of all ranks together, not by GPU.

use super::{critic::CriticUpdate, replay, samples::Samples, StageTimer, Trainer, TrainerConfig};
use crate::{
    base::PolicyVersion,
    train::{
        algorithm::{
            correction::{Correlation, ImportanceMetrics, RejectionMetrics},
            value_loss::explained_variance,
            CorrectionMetrics, ObjectiveSums, SequencePair,
        },
        batch::TrainBatch,
    },
};
use std::{collections::BTreeMap, time::Duration};

/// Numbers of one step.
#[derive(Clone, Debug, PartialEq)]
pub struct StepMetrics {
    /// Global step.
    pub step: u32,
    /// Version of the weights after it.
    pub version: PolicyVersion,
    /// By key, sorted.
    pub values: BTreeMap<String, f64>,
}

impl StepMetrics {
    /// A value by key.
    pub fn get(&self, key: &str) -> Option<f64> {
        self.values.get(key).copied()
    }
}

pub(super) struct MetricsBuilder {
    step: u32,
    values: BTreeMap<String, f64>,
    updates: Vec<(ObjectiveSums, f64)>,
    critic_updates: Vec<CriticUpdate>,
}

impl MetricsBuilder {
    /// Begins with what the data alone says.
    pub(super) fn new(batch: &TrainBatch, samples: &Samples, config: &TrainerConfig) -> Self {
        let mut builder = Self {
            step: batch.step,
            values: BTreeMap::new(),
            updates: Vec::new(),
            critic_updates: Vec::new(),
        };
        builder.add_trials(batch, samples);
        builder.add_lengths(samples, config);
        builder.add_replay(samples, config);
        builder
    }

    fn put(&mut self, key: impl Into<String>, value: f64) {
        // The sum of nothing is -0 in Rust.
        self.values.insert(key.into(), value + 0.0);
    }

    fn count(&mut self, key: String) {
        *self.values.entry(key).or_default() += 1.0;
    }

    /// `prefix/{mean,max,min}`; nothing of nothing.
    fn put_spread(&mut self, prefix: &str, values: &[f64]) {
        if values.is_empty() {
            return;
        }
        self.put(
            format!("{prefix}/mean"),
            values.iter().sum::<f64>() / values.len() as f64,
        );
        let max = values.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let min = values.iter().copied().fold(f64::INFINITY, f64::min);
        self.put(format!("{prefix}/max"), max);
        self.put(format!("{prefix}/min"), min);
    }

    fn add_trials(&mut self, batch: &TrainBatch, samples: &Samples) {
        let trials: Vec<_> = batch.groups.iter().flat_map(|g| &g.trajectories).collect();
        let scores: Vec<f64> = trials.iter().map(|t| t.outcome.reward).collect();
        self.put_spread("critic/score", &scores);
        let turns: Vec<f64> = trials.iter().map(|t| f64::from(t.turns)).collect();
        self.put_spread("num_turns", &turns);

        let dropped: Vec<_> = batch.groups.iter().flat_map(|g| &g.dropped).collect();
        self.put("trajectory/finished", trials.len() as f64);
        self.put("trajectory/dropped", dropped.len() as f64);
        let invalid = (trials.len() - samples.trials.len() + dropped.len()) as f64;
        let all = trials.len() + dropped.len();
        self.put("trajectory_filter/invalid_count", invalid);
        if all > 0 {
            self.put("trajectory_filter/invalid_ratio", invalid / all as f64);
        }
        for (_, reason) in dropped {
            self.count(format!("trajectory/dropped/{reason}"));
            self.count(format!("trajectory_filter/reason/{reason}"));
        }
        for trial in &trials {
            self.count(format!("trajectory/stop/{}", trial.outcome.stop));
            self.count(format!("trajectory_filter/reason/{}", trial.outcome.stop));
        }
        let malformed: f64 = trials.iter().map(|t| f64::from(t.malformed_tool_calls)).sum();
        self.put("trajectory/malformed_tool_calls", malformed);
        let untrainable = trials
            .iter()
            .filter(|t| t.sequences.iter().all(|s| s.sampled() == 0));
        self.put("trajectory/without_sampled_tokens", untrainable.count() as f64);

        let groups = &batch.groups;
        self.put("group/count", groups.len() as f64);
        let lags: Vec<f64> = groups
            .iter()
            .map(|g| f64::from(batch.step - 1) - f64::from(g.start_version.0))
            .collect();
        self.put_spread("staleness/group_lag", &lags);
    }

    fn add_lengths(&mut self, samples: &Samples, config: &TrainerConfig) {
        let sequences = &samples.sequences;
        let prompts: Vec<f64> = sequences.iter().map(|s| s.prompt_len as f64).collect();
        self.put_spread("prompt_length", &prompts);
        let responses: Vec<f64> = sequences
            .iter()
            .map(|s| (s.ids.len() - s.prompt_len) as f64)
            .collect();
        self.put_spread("response_length", &responses);
        if !responses.is_empty() {
            let cut = responses.iter().filter(|l| **l >= config.max_response_len as f64);
            self.put(
                "response_length/clip_ratio",
                cut.count() as f64 / responses.len() as f64,
            );
        }
        let sampled: usize = sequences.iter().map(|s| s.sampled.len()).sum();
        self.put("perf/sampled_tokens", sampled as f64);
        let tokens: usize = sequences.iter().map(|s| s.ids.len()).sum();
        self.put("perf/total_num_tokens", tokens as f64);
    }

    /// How much of the routing is replayed, and the tokens whose experts are chosen freely.
    fn add_replay(&mut self, samples: &Samples, config: &TrainerConfig) {
        let (recorded, all) = replay::coverage(samples);
        if config.replay.is_some() && all > 0 {
            self.put("training/r3_coverage", recorded as f64 / all as f64);
            self.put("training/r3_free_tokens", (all - recorded) as f64);
        }
    }

    /// Rewards after penalties, groups that offer no comparison, advantages, and what the critic predicts
    /// and should predict.
    pub(super) fn add_advantages(&mut self, batch: &TrainBatch, samples: &Samples) {
        let of_group = |place: usize| -> Vec<f64> {
            let members = samples.trials.iter().filter(|trial| trial.group == place);
            members.map(|trial| trial.score).collect()
        };
        let uninformative = (0..batch.groups.len())
            .filter(|place| of_group(*place).windows(2).all(|p| p[0] == p[1]))
            .count();
        self.put("group/without_advantage", uninformative as f64);
        let scores: Vec<f64> = samples.trials.iter().map(|t| t.score).collect();
        self.put_spread("critic/rewards", &scores);
        let column = |of: fn(&super::samples::Sample) -> &Vec<f64>| -> Vec<f64> {
            samples.sequences.iter().flat_map(of).copied().collect()
        };
        self.put_spread("critic/advantages", &column(|s| &s.advantages));
        let (values, returns) = (column(|s| &s.values), column(|s| &s.returns));
        self.put_spread("critic/values", &values);
        self.put_spread("critic/returns", &returns);
        if let Some(share) = explained_variance(&values, &returns) {
            self.put("critic/vf_explained_var", share);
        }
    }

    /// Mean divergence from the reference and the factor that it entered the rewards with.
    pub(super) fn add_penalty(&mut self, kl: f64, coefficient: f64) {
        self.put("actor/reward_kl_penalty", kl);
        self.put("actor/reward_kl_penalty_coeff", coefficient);
    }

    /// Weights and rejections of the policy loss.
    pub(super) fn add_correction(
        &mut self,
        importance: Option<&ImportanceMetrics>,
        rejection: &RejectionMetrics,
    ) {
        for (key, value) in importance.iter().flat_map(|metrics| metrics.named()) {
            self.put(key, value);
        }
        for (key, value) in rejection.named() {
            self.put(key, value);
        }
    }

    pub(super) fn add_critic_update(&mut self, update: CriticUpdate) {
        self.critic_updates.push(update);
    }

    /// Means over the updates of the critic.
    pub(super) fn finish_critic(&mut self, lr: f64, skipped_updates: u64) {
        self.put("critic/lr", lr);
        self.put("critic/skipped_updates", skipped_updates as f64);
        let updates = std::mem::take(&mut self.critic_updates);
        if updates.is_empty() {
            return;
        }
        let mean =
            |f: &dyn Fn(&CriticUpdate) -> f64| updates.iter().map(f).sum::<f64>() / updates.len() as f64;
        let tokens = |u: &CriticUpdate| u.sums.tokens.max(1) as f64;
        let values = [
            ("critic/vf_loss", mean(&|u| u.sums.loss)),
            ("critic/vf_clipfrac", mean(&|u| u.sums.clipped as f64 / tokens(u))),
            ("critic/vpred_mean", mean(&|u| u.sums.prediction_sum / tokens(u))),
            ("critic/grad_norm", mean(&|u| u.grad_norm)),
        ];
        for (key, value) in values {
            self.put(key, value);
        }
    }

    pub(super) fn add_update(&mut self, sums: &ObjectiveSums, grad_norm: f64) {
        self.updates.push((*sums, grad_norm));
    }

    /// Engine against trainer: correlation and differences by lag, and the correction metrics. `version`
    /// is that of the weights that recomputed the log-probabilities.
    pub(super) fn add_policy_distance(&mut self, samples: &Samples, version: u32) {
        #[derive(Default)]
        struct Lag {
            correlation: Correlation,
            difference_sum: f64,
            difference_square: f64,
            difference_max: f64,
        }
        let mut by_lag: BTreeMap<u32, Lag> = BTreeMap::new();
        let mut pairs = Vec::new();
        for sample in &samples.sequences {
            let Some(training) = &sample.training_logprobs else {
                continue;
            };
            for ((rollout, training), token_version) in
                sample.rollout_logprobs.iter().zip(training).zip(&sample.versions)
            {
                let lag = by_lag.entry(version.saturating_sub(*token_version)).or_default();
                let (rollout, training) = (rollout.exp(), training.exp());
                lag.correlation.add(rollout, training);
                let difference = (rollout - training).abs();
                lag.difference_sum += difference;
                lag.difference_square += difference * difference;
                lag.difference_max = lag.difference_max.max(difference);
            }
            pairs.push(SequencePair {
                rollout: &sample.rollout_logprobs,
                training,
            });
        }
        if let Some(correction) = CorrectionMetrics::of(pairs) {
            for (key, value) in correction.named() {
                self.put(key, value);
            }
        }
        let total: u64 = by_lag.values().map(|lag| lag.correlation.count()).sum();
        let weighted: f64 = by_lag
            .iter()
            .map(|(lag, stats)| f64::from(*lag) * stats.correlation.count() as f64)
            .sum();
        if total > 0 {
            self.put("staleness/token_lag/mean", weighted / total as f64);
        }
        let fresh = by_lag.get(&0).map_or(0, |lag| lag.correlation.count());
        self.put("training/rollout_actor_probs_tokens", fresh as f64);
        for (lag, stats) in by_lag {
            let count = stats.correlation.count();
            self.put(format!("staleness/lag_{lag}/tokens"), count as f64);
            if let Some(pearson) = stats.correlation.coefficient() {
                self.put(format!("staleness/lag_{lag}/pearson"), pearson);
                if lag == 0 {
                    self.put("training/rollout_actor_probs_pearson_corr", pearson);
                }
            }
            if lag == 0 {
                let mean = stats.difference_sum / count as f64;
                self.put("training/rollout_probs_diff_mean", mean);
                self.put("training/rollout_probs_diff_max", stats.difference_max);
                if count > 1 {
                    let square = stats.difference_square - mean * stats.difference_sum;
                    let deviation = (square.max(0.0) / (count - 1) as f64).sqrt();
                    self.put("training/rollout_probs_diff_std", deviation);
                }
            }
        }
    }

    fn add_actor(&mut self) {
        let updates = std::mem::take(&mut self.updates);
        let count = updates.len() as f64;
        if updates.is_empty() {
            return;
        }
        let mean = |f: &dyn Fn(&ObjectiveSums) -> f64| updates.iter().map(|(s, _)| f(s)).sum::<f64>() / count;
        let per_token = |f: &dyn Fn(&ObjectiveSums) -> f64| mean(&|s| f(s) / s.tokens.max(1) as f64);
        let values = [
            ("actor/loss", mean(&|s| s.loss)),
            ("actor/pg_loss", mean(&|s| s.pg_loss)),
            ("actor/kl_loss", mean(&|s| s.kl_loss)),
            ("actor/entropy", mean(&|s| s.entropy)),
            ("actor/ppo_kl", per_token(&|s| s.ppo_kl_sum)),
            ("actor/pg_clipfrac", per_token(&|s| s.clipped as f64)),
            ("actor/pg_clipfrac_lower", per_token(&|s| s.clipped_lower as f64)),
            (
                "actor/grad_norm",
                updates.iter().map(|(_, n)| n).sum::<f64>() / count,
            ),
            ("actor/updates", count),
        ];
        for (key, value) in values {
            self.put(key, value);
        }
    }

    /// The metrics of a finished step.
    pub(super) fn finish(
        mut self,
        trainer: &Trainer,
        samples: &Samples,
        timer: &StageTimer,
        elapsed: Duration,
    ) -> StepMetrics {
        self.add_actor();
        if trainer.config.objective.kl.is_none() {
            self.values.remove("actor/kl_loss");
        } else if let Some(kl) = trainer.config.objective.kl {
            self.put("actor/kl_coef", kl.coefficient);
        }
        self.put("actor/lr", trainer.lr);
        self.put("actor/skipped_updates", trainer.skipped_updates as f64);
        for (stage, seconds) in &timer.0 {
            self.put(format!("timing_s/{stage}"), *seconds);
        }
        self.put("timing_s/trainer_step", elapsed.as_secs_f64());
        let tokens: usize = samples.sequences.iter().map(|s| s.ids.len()).sum();
        self.put("perf/throughput", tokens as f64 / elapsed.as_secs_f64().max(1e-9));
        StepMetrics {
            step: self.step,
            version: trainer.version,
            values: self.values,
        }
    }
}
