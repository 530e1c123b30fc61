//! A penalty in the reward for leaving the reference policy.
//!
//! Ziegler et al. 2019 ("Fine-Tuning Language Models from Human Preferences", section 2.1): the reward of
//! token t is `r_t − β · KL_t` with an estimate `KL_t` of the divergence of the policy before the update
//! from the reference ([`super::KlEstimator`], values only: rewards have no gradient). Unlike the term in
//! the loss, the penalty reaches earlier tokens through the return.
//!
//! `β` is fixed (`KL_COEF`), or follows a target by their controller:
//!
//! `e = clip(KL / target − 1, −0.2, 0.2)`, `β ← β (1 + e · trials / horizon)`
//!
//! where KL is the mean over the trials of the step of their mean over tokens. verl: `apply_kl_penalty`,
//! `AdaptiveKLController`.

use super::KlEstimator;

/// Penalty and its factor.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct KlReward {
    /// Estimator (`KL_PENALTY`).
    pub estimator: KlEstimator,
    /// Factor of the first step (`KL_COEF`).
    pub coefficient: f64,
    /// How the factor changes; `None` keeps it.
    pub adaptive: Option<AdaptiveKl>,
}

/// Controller of the factor (`KL_CTRL_TYPE=adaptive`).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdaptiveKl {
    /// Divergence in nats per token that is aimed at (`KL_TARGET`).
    pub target: f64,
    /// Trials in which the factor may grow or shrink by a fifth (`KL_HORIZON`).
    pub horizon: f64,
}

/// Largest relative error that the controller acts on.
const ERROR_LIMIT: f64 = 0.2;

impl KlReward {
    /// Divergences of a sequence's sampled tokens. The slices have the same length.
    pub fn divergences(&self, logprobs: &[f64], reference_logprobs: &[f64]) -> Vec<f64> {
        let pairs = logprobs.iter().zip(reference_logprobs);
        pairs.map(|(l, r)| self.estimator.penalty(*l, *r).0).collect()
    }

    /// The factor of the next step after `trials` trials with the mean divergence `kl`.
    pub fn next_coefficient(&self, coefficient: f64, kl: f64, trials: usize) -> f64 {
        match self.adaptive {
            None => self.coefficient,
            Some(AdaptiveKl { target, horizon }) => {
                let error = (kl / target - 1.0).clamp(-ERROR_LIMIT, ERROR_LIMIT);
                // More trials than a horizon count as one: beyond five the factor would change its sign.
                coefficient * (1.0 + error * (trials as f64 / horizon).min(1.0))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn penalty(adaptive: Option<AdaptiveKl>) -> KlReward {
        KlReward {
            estimator: KlEstimator::K1,
            coefficient: 0.1,
            adaptive,
        }
    }

    #[test]
    fn divergences_are_those_of_the_estimator() {
        assert_eq!(
            penalty(None).divergences(&[-1.0, -2.0], &[-1.5, -1.0]),
            [0.5, -1.0]
        );
    }

    #[test]
    fn the_factor_follows_the_target() {
        assert_eq!(penalty(None).next_coefficient(0.3, 9.0, 64), 0.1, "fixed");
        let control = penalty(Some(AdaptiveKl {
            target: 0.5,
            horizon: 100.0,
        }));
        let close = |got: f64, want: f64| assert!((got - want).abs() < 1e-15, "{got} instead of {want}");
        close(control.next_coefficient(0.3, 0.55, 50), 0.3 * 1.05);
        close(control.next_coefficient(0.3, 5.0, 50), 0.3 * 1.1); // cut at a fifth
        close(control.next_coefficient(0.3, 0.0, 50), 0.3 * 0.9);
        close(control.next_coefficient(0.3, 0.5, 50), 0.3);
        // A step of many horizons.
        close(control.next_coefficient(0.3, 0.0, 5000), 0.3 * 0.8);
        close(control.next_coefficient(0.3, 5.0, 5000), 0.3 * 1.2);
    }
}
