//! Advantages: how much better than expected a sampled token turned out.
//!
//! | `ADV_ESTIMATOR` | File | Baseline |
//! |---|---|---|
//! | `grpo` | [`grpo`] | mean of the group, in units of its standard deviation or not |
//! | `rloo` | [`rloo`] | mean of the other trials of the group |
//! | `reinforce_plus_plus` | [`reinforce_plus_plus`] | mean of the batch, in units of its standard deviation |
//! | `reinforce_plus_plus_baseline` | [`reinforce_plus_plus`] | mean of the group, in units of the batch's standard deviation |
//! | `gae` | [`gae`] | a critic's prediction |
//!
//! Rewards are those of outcomes: a sequence receives the reward of its trial at its last sampled token.
//! A penalty for leaving the reference policy ([`super::kl_reward`]) is subtracted at every token.
//!
//! Invariants: a trial counts once, however many token sequences it left: in a group it is one score, in
//! sums over tokens its sequences share the weight 1. A trial without a verdict, or one that the
//! trajectory filter took out, is not among the trials. Tokens that were not sampled do not exist here;
//! the sampled token after a tool's answer follows the one before it.

pub mod gae;
pub mod grpo;
pub mod reinforce_plus_plus;
pub mod rloo;
pub mod whiten;

use std::collections::BTreeMap;

/// Estimator (`ADV_ESTIMATOR`) with its constants.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum AdvantageEstimator {
    /// Group-relative; divided by the standard deviation or not (`NORM_ADV_BY_STD_IN_GRPO`).
    Grpo {
        /// In units of the group's standard deviation.
        divide_by_std: bool,
    },
    /// Leave-one-out.
    Rloo,
    /// Discounted returns, whitened over the batch.
    ReinforcePlusPlus {
        /// Discount by token (`GAMMA`).
        gamma: f64,
    },
    /// Reward minus the group's mean, whitened over the batch.
    ReinforcePlusPlusBaseline,
    /// Generalised advantage estimation.
    Gae {
        /// Discount by token (`GAMMA`).
        gamma: f64,
        /// Between one-step differences (0) and whole returns (1) (`LAM`).
        lambda: f64,
    },
}

/// One sampled sequence of a trial, by sampled token.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SequenceReward {
    /// Share of the trial.
    pub weight: f64,
    /// Subtracted from the reward at each sampled token.
    pub penalties: Vec<f64>,
    /// The critic's prediction of the return before each sampled token; empty without a critic.
    pub values: Vec<f64>,
}

/// One trial with a verdict.
#[derive(Clone, Debug, PartialEq)]
pub struct TrialReward {
    /// Trials of the same number answer the same prompt.
    pub group: usize,
    /// The verifier's reward.
    pub reward: f64,
    /// Sequences with sampled tokens; none when the agent never called the model.
    pub sequences: Vec<SequenceReward>,
}

impl TrialReward {
    /// The reward with all penalties: `R − Σ_s w_s Σ_t penalty`.
    pub fn score(&self) -> f64 {
        let penalty = |s: &SequenceReward| s.weight * s.penalties.iter().sum::<f64>();
        self.reward - self.sequences.iter().map(penalty).sum::<f64>()
    }

    /// Rewards of a sequence's tokens: minus the penalty everywhere, plus the trial's reward at the end.
    fn token_rewards(&self, sequence: &SequenceReward) -> Vec<f64> {
        let mut rewards: Vec<f64> = sequence.penalties.iter().map(|p| -p).collect();
        if let Some(last) = rewards.last_mut() {
            *last += self.reward;
        }
        rewards
    }
}

/// Results for the sampled tokens of one sequence.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct TokenAdvantages {
    /// Advantages.
    pub advantages: Vec<f64>,
    /// What the critic should have predicted; empty without a critic.
    pub returns: Vec<f64>,
}

impl AdvantageEstimator {
    /// True when the estimator reads the predictions of a critic.
    pub fn needs_critic(&self) -> bool {
        matches!(self, Self::Gae { .. })
    }

    /// Advantages by trial and sequence, in the order of `trials`.
    pub fn estimate(&self, trials: &[TrialReward]) -> Vec<Vec<TokenAdvantages>> {
        match *self {
            Self::Grpo { divide_by_std } => {
                spread(trials, by_group(trials, |s| grpo::advantages(s, divide_by_std)))
            }
            Self::Rloo => spread(trials, by_group(trials, rloo::advantages)),
            Self::ReinforcePlusPlus { gamma } => reinforce_plus_plus::advantages(trials, gamma),
            Self::ReinforcePlusPlusBaseline => {
                let mut out = spread(trials, by_group(trials, reinforce_plus_plus::minus_mean));
                whiten_all(trials, &mut out);
                out
            }
            Self::Gae { gamma, lambda } => gae::advantages(trials, gamma, lambda),
        }
    }
}

/// Applies `estimate` to the scores of each group; one number a trial.
fn by_group(trials: &[TrialReward], estimate: impl Fn(&[f64]) -> Vec<f64>) -> Vec<f64> {
    let mut groups: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
    for (place, trial) in trials.iter().enumerate() {
        groups.entry(trial.group).or_default().push(place);
    }
    let mut out = vec![0.0; trials.len()];
    for members in groups.values() {
        let scores: Vec<f64> = members.iter().map(|&place| trials[place].score()).collect();
        for (&place, advantage) in members.iter().zip(estimate(&scores)) {
            out[place] = advantage;
        }
    }
    out
}

/// Gives every token the number of its trial.
fn spread(trials: &[TrialReward], numbers: Vec<f64>) -> Vec<Vec<TokenAdvantages>> {
    let tokens = |sequence: &SequenceReward, number: f64| TokenAdvantages {
        advantages: vec![number; sequence.penalties.len()],
        returns: Vec::new(),
    };
    trials
        .iter()
        .zip(numbers)
        .map(|(trial, number)| trial.sequences.iter().map(|s| tokens(s, number)).collect())
        .collect()
}

fn whiten_all(trials: &[TrialReward], out: &mut [Vec<TokenAdvantages>]) {
    let weights = trials.iter().flat_map(|t| &t.sequences).map(|s| s.weight);
    let rows = out.iter_mut().flatten().map(|row| row.advantages.as_mut_slice());
    whiten::whiten(&mut weights.zip(rows).collect::<Vec<_>>());
}

/// True where nothing can be compared: fewer than two scores, or all equal.
fn no_comparison(scores: &[f64]) -> bool {
    scores.len() < 2 || scores.windows(2).all(|pair| pair[0] == pair[1])
}

#[cfg(test)]
mod tests;
