//! Importance weights of the policy loss.
//!
//! A token that was sampled with probability `μ` and is trained with the policy `π` (before the update) is
//! weighted by `w = π/μ`, for itself or as the product over its sequence, with the log ratio (or their
//! sum) clamped to ±20. Two ways to bound it:
//!
//! - *truncation* (Ionides 2008, "Truncated Importance Sampling"; Yao et al. 2025): `min(w, upper)`;
//! - *masking on both sides* (IcePop, Ling Team 2025): `w` where `lower ≤ w ≤ upper`, 0 elsewhere. The
//!   token stays in the denominators of the aggregation.
//!
//! Normalised weights are divided by their mean over the batch: over tokens, or over sequences for
//! sequence weights, by trial share. verl: `compute_rollout_correction_weights`.

use super::{limited, SequencePair};

/// What a ratio belongs to (`ROLLOUT_IS`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ImportanceLevel {
    /// Each token has its own ratio.
    Token,
    /// The product of the ratios, for the whole sequence.
    Sequence,
}

/// Bounds of a weight (`ROLLOUT_IS_THRESHOLD`).
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum WeightBounds {
    /// Larger weights are cut to `upper`.
    Truncate {
        /// Largest weight.
        upper: f64,
    },
    /// Weights outside become 0.
    Mask {
        /// Smallest weight that counts.
        lower: f64,
        /// Largest weight that counts.
        upper: f64,
    },
}

impl WeightBounds {
    fn apply(self, weight: f64) -> f64 {
        match self {
            Self::Truncate { upper } => weight.min(upper),
            Self::Mask { lower, upper } if (lower..=upper).contains(&weight) => weight,
            Self::Mask { .. } => 0.0,
        }
    }

    /// `(lower, upper)`, for the shares of low and high ratios; the reciprocal where no lower one is set.
    fn range(self) -> (f64, f64) {
        match self {
            Self::Truncate { upper } => (1.0 / upper, upper),
            Self::Mask { lower, upper } => (lower, upper),
        }
    }
}

/// Weights of the policy loss.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ImportanceWeights {
    /// Token or sequence.
    pub level: ImportanceLevel,
    /// Bounds.
    pub bounds: WeightBounds,
    /// Divide by the mean over the batch (`ROLLOUT_IS_BATCH_NORMALIZE`).
    pub normalize: bool,
}

/// What the weights of a batch came to, before normalisation.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ImportanceMetrics {
    /// Mean over tokens of the weights as applied.
    pub mean: f64,
    /// Their standard deviation over tokens.
    pub std: f64,
    /// Largest: as applied by token; of the product before it is bounded by sequence.
    pub max: f64,
    /// Smallest, likewise.
    pub min: f64,
    /// Effective sample size of the weights as applied, over tokens, in [0, 1].
    pub eff_sample_size: f64,
    /// Share of ratios above the upper bound.
    pub fraction_high: f64,
    /// Share of ratios below the lower bound, or below the reciprocal of the upper one.
    pub fraction_low: f64,
    /// Share of tokens that masking gave the weight 0; `None` under truncation.
    pub out_of_bounds: Option<f64>,
    /// What the weights were divided by; `None` without normalisation.
    pub norm_factor: Option<f64>,
}

impl ImportanceWeights {
    /// Ratio of each token before it is bounded.
    fn ratios(&self, pair: SequencePair<'_>) -> Vec<f64> {
        match self.level {
            ImportanceLevel::Token => pair.log_ratios().map(|r| limited(r).exp()).collect(),
            ImportanceLevel::Sequence => {
                vec![limited(pair.log_ratios().sum()).exp(); pair.rollout.len()]
            }
        }
    }

    /// Weights of the tokens of every sequence `(share of its trial, log-probabilities)`, and what they
    /// came to; `None` without tokens.
    pub fn of_batch(
        &self,
        sequences: &[(f64, SequencePair<'_>)],
    ) -> (Vec<Vec<f64>>, Option<ImportanceMetrics>) {
        let ratios: Vec<Vec<f64>> = sequences.iter().map(|(_, pair)| self.ratios(*pair)).collect();
        let bounded = |row: &Vec<f64>| row.iter().map(|r| self.bounds.apply(*r)).collect();
        let mut weights: Vec<Vec<f64>> = ratios.iter().map(bounded).collect();
        let Some(mut metrics) = self.measure(&ratios, &weights) else {
            return (weights, None);
        };
        if self.normalize {
            let factor = self.mean_by_share(sequences, &weights);
            // All weights masked: there is nothing to normalise.
            if factor > 0.0 {
                weights.iter_mut().flatten().for_each(|w| *w /= factor);
                metrics.norm_factor = Some(factor);
            }
        }
        (weights, Some(metrics))
    }

    fn mean_by_share(&self, sequences: &[(f64, SequencePair<'_>)], weights: &[Vec<f64>]) -> f64 {
        let (mut sum, mut count) = (0.0, 0.0);
        for ((share, _), row) in sequences.iter().zip(weights) {
            // One weight a sequence, or one a token.
            let units = match self.level {
                ImportanceLevel::Token => row.len(),
                ImportanceLevel::Sequence => row.len().min(1),
            };
            sum += share * row[..units].iter().sum::<f64>();
            count += share * units as f64;
        }
        sum / count
    }

    fn measure(&self, ratios: &[Vec<f64>], weights: &[Vec<f64>]) -> Option<ImportanceMetrics> {
        let applied: Vec<f64> = weights.iter().flatten().copied().collect();
        if applied.is_empty() {
            return None;
        }
        let tokens: Vec<f64> = ratios.iter().flatten().copied().collect();
        // What ratios belong to: tokens, or sequences.
        let units: Vec<f64> = match self.level {
            ImportanceLevel::Token => tokens.clone(),
            ImportanceLevel::Sequence => ratios.iter().filter_map(|row| row.first().copied()).collect(),
        };
        let shown = match self.level {
            ImportanceLevel::Token => &applied,
            ImportanceLevel::Sequence => &units,
        };
        let share = |is: &dyn Fn(f64) -> bool, of: &[f64]| {
            of.iter().filter(|x| is(**x)).count() as f64 / of.len() as f64
        };
        let count = applied.len() as f64;
        let mean = applied.iter().sum::<f64>() / count;
        let square = applied.iter().map(|w| w * w).sum::<f64>() / count;
        let (low, high) = self.bounds.range();
        let is_outside = |r: f64| r < low || r > high;
        Some(ImportanceMetrics {
            mean,
            std: (square - mean * mean).max(0.0).sqrt(),
            max: shown.iter().copied().fold(f64::NEG_INFINITY, f64::max),
            min: shown.iter().copied().fold(f64::INFINITY, f64::min),
            eff_sample_size: if square > 0.0 { mean * mean / square } else { 0.0 },
            fraction_high: share(&|r| r > high, &units),
            fraction_low: share(&|r| r < low, &units),
            out_of_bounds: match self.bounds {
                WeightBounds::Truncate { .. } => None,
                WeightBounds::Mask { .. } => Some(share(&is_outside, &tokens)),
            },
            norm_factor: None,
        })
    }
}

impl ImportanceMetrics {
    /// The metrics under verl's keys.
    pub fn named(&self) -> Vec<(&'static str, f64)> {
        let mut all = vec![
            ("rollout_corr/rollout_is_mean", self.mean),
            ("rollout_corr/rollout_is_std", self.std),
            ("rollout_corr/rollout_is_max", self.max),
            ("rollout_corr/rollout_is_min", self.min),
            ("rollout_corr/rollout_is_eff_sample_size", self.eff_sample_size),
            ("rollout_corr/rollout_is_ratio_fraction_high", self.fraction_high),
            ("rollout_corr/rollout_is_ratio_fraction_low", self.fraction_low),
        ];
        let masked = self.out_of_bounds;
        all.extend(masked.map(|x| ("rollout_corr/rollout_is_oob_ratio", x)));
        let factor = self.norm_factor;
        all.extend(factor.map(|x| ("rollout_corr/rollout_is_batch_norm_factor", x)));
        all
    }
}
