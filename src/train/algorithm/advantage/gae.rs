//! Generalised advantage estimation.
//!
//! Schulman et al. 2016 ("High-Dimensional Continuous Control Using Generalized Advantage Estimation",
//! equations 11 and 16). With the critic's prediction `V_t` before sampled token t, rewards of tokens
//! `r_t`, and `V = 0` after the last token:
//!
//! `δ_t = r_t + γ V_{t+1} − V_t` and `A_t = δ_t + γλ A_{t+1}`
//!
//! The critic's target is `A_t + V_t` (TD(λ) return); the policy uses the advantages whitened over the
//! batch ([`super::whiten`]). verl: `compute_gae_advantage_return`.

use super::{whiten_all, TokenAdvantages, TrialReward};

/// Advantages of one sequence before whitening. The slices have the same length.
pub fn sequence_advantages(rewards: &[f64], values: &[f64], gamma: f64, lambda: f64) -> Vec<f64> {
    let mut advantages = vec![0.0; rewards.len()];
    let (mut next_value, mut next_advantage) = (0.0, 0.0);
    for t in (0..rewards.len()).rev() {
        let difference = rewards[t] + gamma * next_value - values[t];
        next_advantage = difference + gamma * lambda * next_advantage;
        next_value = values[t];
        advantages[t] = next_advantage;
    }
    advantages
}

/// Advantages and the critic's targets.
///
/// # Panics
/// When a sequence has not one value for each of its tokens: the caller asked the critic.
pub fn advantages(trials: &[TrialReward], gamma: f64, lambda: f64) -> Vec<Vec<TokenAdvantages>> {
    let mut out: Vec<Vec<TokenAdvantages>> = trials
        .iter()
        .map(|trial| {
            trial
                .sequences
                .iter()
                .map(|sequence| {
                    let rewards = trial.token_rewards(sequence);
                    assert_eq!(
                        rewards.len(),
                        sequence.values.len(),
                        "one value per sampled token"
                    );
                    let advantages = sequence_advantages(&rewards, &sequence.values, gamma, lambda);
                    let returns = advantages
                        .iter()
                        .zip(&sequence.values)
                        .map(|(a, v)| a + v)
                        .collect();
                    TokenAdvantages { advantages, returns }
                })
                .collect()
        })
        .collect();
    whiten_all(trials, &mut out);
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn by_hand() {
        // δ = (0 + 0.5·2 − 1, 0 + 0.5·4 − 2, 8 − 4) = (0, 0, 4); A = (0.25·0.25·4, 0.25·4, 4).
        let got = sequence_advantages(&[0.0, 0.0, 8.0], &[1.0, 2.0, 4.0], 0.5, 0.5);
        assert_eq!(got, [0.25, 1.0, 4.0]);
    }

    #[test]
    fn lambda_one_is_the_return_minus_the_prediction_and_lambda_zero_one_step() {
        let (rewards, values) = ([0.5, -1.0, 2.0], [0.3, 0.1, -0.2]);
        let whole = sequence_advantages(&rewards, &values, 1.0, 1.0);
        for (t, a) in whole.iter().enumerate() {
            assert!((a - (rewards[t..].iter().sum::<f64>() - values[t])).abs() < 1e-15);
        }
        let one = sequence_advantages(&rewards, &values, 0.9, 0.0);
        assert!((one[0] - (0.5 + 0.9 * 0.1 - 0.3)).abs() < 1e-15);
        assert!((one[2] - 2.2).abs() < 1e-15);
    }
}
