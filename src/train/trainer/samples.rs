//! From trajectories to sequences with advantages.

use super::{replay, TrainError, TrainerConfig};
use crate::{
    base::{SequenceRouting, TokenSequence, TrialKey},
    train::{
        algorithm::{
            advantage::{SequenceReward, TrialReward},
            correction::{ImportanceMetrics, RejectionMetrics},
            AdvantageEstimator, KlReward, SequencePair, SequenceShape,
        },
        batch::TrainBatch,
    },
};
use std::ops::Range;

/// What a forward pass says about sampled tokens, in order.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct TokenValues {
    /// Log-probabilities.
    pub logprobs: Vec<f64>,
    /// Entropies in nats.
    pub entropies: Vec<f64>,
}

/// One sequence with sampled tokens.
#[derive(Clone, Debug)]
pub(super) struct Sample {
    /// All tokens.
    pub ids: Vec<i64>,
    /// Positions of the sampled ones, each at least 1.
    pub sampled: Vec<usize>,
    /// Log-probabilities as the engine recorded them, by sampled token.
    pub rollout_logprobs: Vec<f64>,
    /// Weight versions that sampled, by sampled token.
    pub versions: Vec<u32>,
    /// Under the policy before the first update of the step; set by its first forward pass.
    pub training_logprobs: Option<Vec<f64>>,
    /// Under the reference policy.
    pub reference_logprobs: Option<Vec<f64>>,
    /// The critic's predictions before its first update of the step; empty without a critic.
    pub values: Vec<f64>,
    /// Subtracted from the reward at each sampled token.
    pub penalties: Vec<f64>,
    /// By sampled token; set by [`Samples::assign_advantages`].
    pub advantages: Vec<f64>,
    /// What the critic should have predicted; empty without a critic.
    pub returns: Vec<f64>,
    /// Factors of the policy loss; empty without correction.
    pub importance: Vec<f64>,
    /// False for sampled tokens that are rejected from the policy loss; empty without rejection.
    pub keep: Vec<bool>,
    /// Experts of the tokens, where they are replayed; in memory or mapped.
    pub routing: Option<SequenceRouting>,
    /// Share of the trial.
    pub weight: f64,
    /// Tokens before the first sampled one.
    pub prompt_len: usize,
    /// Which optimizer update of an epoch it belongs to.
    mini_batch: usize,
}

impl Sample {
    /// What the critic's loss sees: every sampled token.
    pub(super) fn shape(&self) -> SequenceShape {
        SequenceShape {
            sampled: self.sampled.len(),
            weight: self.weight,
        }
    }

    /// What the policy's loss sees: the sampled tokens that are not rejected.
    pub(super) fn kept_shape(&self) -> SequenceShape {
        let rejected = self.keep.iter().filter(|keep| !**keep).count();
        SequenceShape {
            sampled: self.sampled.len() - rejected,
            weight: self.weight,
        }
    }
}

/// One trial that is trained on.
#[derive(Clone, Debug)]
pub(super) struct SampledTrial {
    /// Place of its group in the batch.
    pub group: usize,
    /// The verifier's reward.
    pub reward: f64,
    /// The reward with all penalties; set by [`Samples::assign_advantages`].
    pub score: f64,
    /// Its sequences.
    members: Range<usize>,
}

/// All sequences of a batch that have sampled tokens, in the order of the groups.
pub(super) struct Samples {
    pub sequences: Vec<Sample>,
    pub trials: Vec<SampledTrial>,
    mini_batches: Vec<Vec<usize>>,
}

impl Samples {
    /// One sample per sequence of the trials that the filter keeps. A batch is cut into mini-batches of
    /// `TRAIN_MINI_BSZ` groups in order.
    pub(super) fn prepare(
        batch: &TrainBatch,
        config: &TrainerConfig,
        vocab_size: usize,
    ) -> Result<Self, TrainError> {
        let mut sequences: Vec<Sample> = Vec::new();
        let mut trials = Vec::new();
        for (place, group) in batch.groups.iter().enumerate() {
            for trajectory in &group.trajectories {
                if !config.filter.keeps(trajectory.outcome.stop) {
                    continue;
                }
                if !trajectory.outcome.reward.is_finite() {
                    return Err(TrainError::Sequence {
                        trial: trajectory.key,
                        sequence: 0,
                        problem: format!("its reward is {}", trajectory.outcome.reward),
                    });
                }
                let first = sequences.len();
                for (index, sequence) in trajectory.sequences.iter().enumerate() {
                    check(sequence, vocab_size, trajectory.key, index)?;
                    if sequence.sampled() > 0 {
                        let mini_batch = place / config.mini_batch_groups;
                        let bad = |problem| TrainError::Sequence {
                            trial: trajectory.key,
                            sequence: index,
                            problem,
                        };
                        let mut sample = sample(sequence, mini_batch);
                        sample.routing = replay::rows(sequence, config.replay).map_err(bad)?;
                        sequences.push(sample);
                    }
                }
                trials.push(SampledTrial {
                    group: place,
                    reward: trajectory.outcome.reward,
                    score: trajectory.outcome.reward,
                    members: first..sequences.len(),
                });
            }
        }
        let mut mini_batches: Vec<Vec<usize>> = Vec::new();
        let mut last = None;
        for (index, sample) in sequences.iter().enumerate() {
            match mini_batches
                .last_mut()
                .filter(|_| last == Some(sample.mini_batch))
            {
                Some(members) => members.push(index),
                None => mini_batches.push(vec![index]),
            }
            last = Some(sample.mini_batch);
        }
        Ok(Self {
            sequences,
            trials,
            mini_batches,
        })
    }

    /// Members of each optimizer update; updates without any sequence are left out.
    pub(super) fn mini_batches(&self) -> Vec<Vec<usize>> {
        self.mini_batches.clone()
    }

    /// `(index, tokens)` of the given sequences.
    pub(super) fn lengths(&self, indices: &[usize]) -> Vec<(usize, usize)> {
        indices
            .iter()
            .map(|&i| (i, self.sequences[i].ids.len()))
            .collect()
    }

    /// Subtracts `coefficient` times the divergence from the reference at every sampled token. Returns
    /// the mean over trials of the mean divergence over tokens, in nats; `None` without tokens.
    pub(super) fn penalise(&mut self, penalty: &KlReward, coefficient: f64) -> Option<f64> {
        let (mut sum, mut count) = (0.0, 0.0);
        for sample in &mut self.sequences {
            let (training, reference) = (&sample.training_logprobs, &sample.reference_logprobs);
            let (Some(training), Some(reference)) = (training, reference) else {
                unreachable!("log-probabilities are computed before penalties");
            };
            let divergences = penalty.divergences(training, reference);
            sum += sample.weight * divergences.iter().sum::<f64>() / divergences.len() as f64;
            count += sample.weight;
            sample.penalties = divergences.iter().map(|d| coefficient * d).collect();
        }
        (count > 0.0).then(|| sum / count)
    }

    /// Advantages of all sampled tokens, and the critic's targets.
    pub(super) fn assign_advantages(&mut self, estimator: &AdvantageEstimator) {
        let of = |s: &Sample| SequenceReward {
            weight: s.weight,
            penalties: s.penalties.clone(),
            values: s.values.clone(),
        };
        let rewards: Vec<TrialReward> = self
            .trials
            .iter()
            .map(|trial| TrialReward {
                group: trial.group,
                reward: trial.reward,
                sequences: self.sequences[trial.members.clone()].iter().map(of).collect(),
            })
            .collect();
        let advantages = estimator.estimate(&rewards);
        for ((trial, reward), advantages) in self.trials.iter_mut().zip(&rewards).zip(advantages) {
            trial.score = reward.score();
            let members = &mut self.sequences[trial.members.clone()];
            for (sample, tokens) in members.iter_mut().zip(advantages) {
                sample.advantages = tokens.advantages;
                sample.returns = tokens.returns;
            }
        }
    }

    /// Importance weights and rejections of the policy loss, from the log-probabilities before the first
    /// update.
    pub(super) fn correct(
        &mut self,
        config: &TrainerConfig,
    ) -> (Option<ImportanceMetrics>, RejectionMetrics) {
        let mut importance_metrics = None;
        if let Some(importance) = &config.importance {
            let pairs: Vec<_> = self.sequences.iter().map(|s| (s.weight, pair(s))).collect();
            let (weights, metrics) = importance.of_batch(&pairs);
            for (sample, weights) in self.sequences.iter_mut().zip(weights) {
                sample.importance = weights;
            }
            importance_metrics = metrics;
        }
        let mut rejection_metrics = RejectionMetrics::default();
        if let Some(rejection) = &config.rejection {
            for sample in &mut self.sequences {
                sample.keep = rejection.keep(pair(sample), &mut rejection_metrics);
            }
        }
        (importance_metrics, rejection_metrics)
    }
}

fn pair(sample: &Sample) -> SequencePair<'_> {
    let Some(training) = &sample.training_logprobs else {
        unreachable!("log-probabilities are computed before the correction");
    };
    SequencePair {
        rollout: &sample.rollout_logprobs,
        training,
    }
}

fn check(
    sequence: &TokenSequence,
    vocab_size: usize,
    trial: TrialKey,
    index: usize,
) -> Result<(), TrainError> {
    let bad = |problem| TrainError::Sequence {
        trial,
        sequence: index,
        problem,
    };
    sequence.check().map_err(bad)?;
    if sequence.loss_mask.first() == Some(&true) {
        return Err(bad("its first token is sampled, so nothing predicts it".into()));
    }
    if let Some(id) = sequence.token_ids.iter().find(|id| **id as usize >= vocab_size) {
        return Err(bad(format!(
            "token {id} is outside of the policy's vocabulary of {vocab_size}"
        )));
    }
    if !(sequence.weight > 0.0 && sequence.weight.is_finite()) {
        return Err(bad(format!("its weight is {}", sequence.weight)));
    }
    Ok(())
}

fn sample(sequence: &TokenSequence, mini_batch: usize) -> Sample {
    let sampled: Vec<usize> = (0..sequence.len()).filter(|&t| sequence.loss_mask[t]).collect();
    Sample {
        ids: sequence.token_ids.iter().map(|id| i64::from(*id)).collect(),
        rollout_logprobs: sampled.iter().map(|&t| f64::from(sequence.logprobs[t])).collect(),
        versions: sampled.iter().map(|&t| sequence.versions[t]).collect(),
        penalties: vec![0.0; sampled.len()],
        advantages: vec![0.0; sampled.len()],
        sampled,
        training_logprobs: None,
        reference_logprobs: None,
        values: Vec::new(),
        returns: Vec::new(),
        importance: Vec::new(),
        keep: Vec::new(),
        routing: None,
        weight: f64::from(sequence.weight),
        prompt_len: sequence.prompt_len as usize,
        mini_batch,
    }
}
