//! From trajectories to sequences with advantages.

use super::{TrainError, TrainerConfig};
use crate::{
    base::{TokenSequence, TrialKey},
    train::{
        algorithm::{grpo_advantages, SequenceShape},
        batch::TrainBatch,
    },
};

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
    /// Of the trial, shared by its sequences.
    pub advantage: f64,
    /// Share of the trial.
    pub weight: f64,
    /// Tokens before the first sampled one.
    pub prompt_len: usize,
    /// Which optimizer update of an epoch it belongs to.
    mini_batch: usize,
}

impl Sample {
    pub(super) fn shape(&self) -> SequenceShape {
        SequenceShape {
            sampled: self.sampled.len(),
            weight: self.weight,
        }
    }
}

/// All sequences of a batch that have sampled tokens, in the order of the groups.
pub(super) struct Samples {
    pub sequences: Vec<Sample>,
    mini_batches: Vec<Vec<usize>>,
}

impl Samples {
    /// Advantages by group, then one sample per sequence. A batch is cut into mini-batches of
    /// `TRAIN_MINI_BSZ` groups in order.
    pub(super) fn prepare(
        batch: &TrainBatch,
        config: &TrainerConfig,
        vocab_size: usize,
    ) -> Result<Self, TrainError> {
        let mut sequences = Vec::new();
        for (place, group) in batch.groups.iter().enumerate() {
            let rewards: Vec<f64> = group.trajectories.iter().map(|t| t.outcome.reward).collect();
            let advantages = grpo_advantages(&rewards, config.norm_adv_by_std);
            for (trajectory, advantage) in group.trajectories.iter().zip(advantages) {
                if !trajectory.outcome.reward.is_finite() {
                    return Err(TrainError::Sequence {
                        trial: trajectory.key,
                        sequence: 0,
                        problem: format!("its reward is {}", trajectory.outcome.reward),
                    });
                }
                for (index, sequence) in trajectory.sequences.iter().enumerate() {
                    check(sequence, vocab_size, trajectory.key, index)?;
                    if sequence.sampled() > 0 {
                        let mini_batch = place / config.mini_batch_groups;
                        sequences.push(sample(sequence, advantage, mini_batch));
                    }
                }
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

fn sample(sequence: &TokenSequence, advantage: f64, mini_batch: usize) -> Sample {
    let sampled: Vec<usize> = (0..sequence.len()).filter(|&t| sequence.loss_mask[t]).collect();
    Sample {
        ids: sequence.token_ids.iter().map(|id| i64::from(*id)).collect(),
        rollout_logprobs: sampled.iter().map(|&t| f64::from(sequence.logprobs[t])).collect(),
        versions: sampled.iter().map(|&t| sequence.versions[t]).collect(),
        sampled,
        training_logprobs: None,
        reference_logprobs: None,
        advantage,
        weight: f64::from(sequence.weight),
        prompt_len: sequence.prompt_len as usize,
        mini_batch,
    }
}
