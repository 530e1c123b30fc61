//! REINFORCE++ and its variant with a group baseline.
//!
//! Hu 2025 ("REINFORCE++: A Simple and Efficient Approach for Aligning Large Language Models"). With the
//! rewards of tokens `r_t` (the penalty for leaving the reference at each token, the outcome at the last)
//! the return from token t on is `G_t = r_t + γ G_{t+1}`, and the advantages are the returns of the whole
//! batch, whitened ([`super::whiten`]).
//!
//! The baseline variant subtracts the group's mean from the trial's score first, gives the result to all
//! its tokens, and whitens over the batch. A group of one has nothing to subtract from and enters with 0.
//!
//! verl: `compute_reinforce_plus_plus_outcome_advantage`,
//! `compute_reinforce_plus_plus_baseline_outcome_advantage`.

use super::{no_comparison, whiten_all, TokenAdvantages, TrialReward};

/// Whitened discounted returns.
pub fn advantages(trials: &[TrialReward], gamma: f64) -> Vec<Vec<TokenAdvantages>> {
    let mut out: Vec<Vec<TokenAdvantages>> = trials
        .iter()
        .map(|trial| {
            trial
                .sequences
                .iter()
                .map(|sequence| TokenAdvantages {
                    advantages: discounted(&trial.token_rewards(sequence), gamma),
                    returns: Vec::new(),
                })
                .collect()
        })
        .collect();
    whiten_all(trials, &mut out);
    out
}

/// `G_t = r_t + γ G_{t+1}`, with 0 after the last token.
fn discounted(rewards: &[f64], gamma: f64) -> Vec<f64> {
    let mut returns = rewards.to_vec();
    for t in (0..returns.len().saturating_sub(1)).rev() {
        returns[t] += gamma * returns[t + 1];
    }
    returns
}

/// Scores of a group minus their mean, before whitening.
pub(super) fn minus_mean(scores: &[f64]) -> Vec<f64> {
    if no_comparison(scores) {
        return vec![0.0; scores.len()];
    }
    let mean = scores.iter().sum::<f64>() / scores.len() as f64;
    scores.iter().map(|score| score - mean).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn returns_by_hand() {
        assert_eq!(discounted(&[-1.0, 2.0, 4.0], 0.5), [1.0, 4.0, 4.0]);
        assert_eq!(discounted(&[0.0, 0.0, 1.0], 1.0), [1.0; 3]);
        assert!(discounted(&[], 1.0).is_empty());
        assert_eq!(minus_mean(&[1.0, 3.0]), [-1.0, 1.0]);
        assert_eq!(minus_mean(&[5.0]), [0.0]);
    }
}
