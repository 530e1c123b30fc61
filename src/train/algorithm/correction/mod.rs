//! How far the policy that sampled is from the policy that is trained, and what is done about it.
//!
//! The engine's log-probabilities (`rollout`) differ from the trainer's recomputation (`old`): by
//! rounding where the weights are the same, by real change where tokens are stale. Names are verl's
//! (`rollout_corr_helper`); background: Yao et al. 2025 ("Your Efficient RL Framework Secretly Brings You
//! Off-Policy RL Training"), Liu et al. 2025 ("When Speed Kills Stability").
//!
//! | File | Does |
//! |---|---|
//! | [`metrics`] | measures the distance; always on |
//! | [`correlation`] | correlation of probabilities |
//! | [`importance`] | weights of the policy loss by `old / rollout`, truncated or masked on both sides (`ROLLOUT_IS`) |
//! | [`rejection`] | takes tokens or sequences out of the loss that are too far (`ROLLOUT_RS`) |
//!
//! Weights and rejections are constants of a step, made from the policy before its first update. They
//! concern the policy's loss alone: group statistics and the critic see every sampled token.

pub mod correlation;
pub mod importance;
pub mod metrics;
pub mod rejection;

pub use correlation::Correlation;
pub use importance::{ImportanceLevel, ImportanceMetrics, ImportanceWeights, WeightBounds};
pub use metrics::{CorrectionMetrics, Quantiles};
pub use rejection::{Criterion, Distance, Extent, Rejection, RejectionMetrics};

/// Log ratios are cut to ± this before they are exponentiated.
const LOG_RATIO_LIMIT: f64 = 20.0;

/// Sampled tokens of one sequence under both policies. Slices of the same length.
#[derive(Clone, Copy, Debug)]
pub struct SequencePair<'a> {
    /// As recorded by the engine.
    pub rollout: &'a [f64],
    /// As recomputed by the trainer before the update.
    pub training: &'a [f64],
}

impl SequencePair<'_> {
    /// `log old − log rollout` by token.
    fn log_ratios(&self) -> impl Iterator<Item = f64> + '_ {
        self.training.iter().zip(self.rollout).map(|(t, r)| t - r)
    }
}

fn limited(log_ratio: f64) -> f64 {
    log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
}

#[cfg(test)]
mod tests;
