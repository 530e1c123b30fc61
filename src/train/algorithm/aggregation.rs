//! How token losses become one number.
//!
//! With `l_{s,t}` the loss of token t of sequence s, `n_s` its sampled tokens and `w_s` its share of its
//! trial, every mode is a weighted sum `Σ_s c_s Σ_t l_{s,t}` (names as in verl's `agg_loss`):
//!
//! | Mode | `c_s` |
//! |---|---|
//! | `token-mean` | `w_s / Σ w n` |
//! | `seq-mean-token-sum` | `w_s / Σ w` |
//! | `seq-mean-token-mean` | `w_s / (n_s Σ w)` |
//!
//! The sums run over the sequences with sampled tokens of one whole mini-batch, so cutting it into
//! micro-batches changes nothing. With all weights 1 these are verl's formulas; a trial whose branches
//! share the weight 1 counts as one sequence of their average.

use super::UnknownAlgorithm;
use std::str::FromStr;

/// Aggregation mode (`LOSS_AGG_MODE`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Aggregation {
    /// Every token weighs the same.
    TokenMean,
    /// Sum within a sequence, mean over sequences.
    SeqMeanTokenSum,
    /// Mean within a sequence, mean over sequences.
    SeqMeanTokenMean,
}

impl FromStr for Aggregation {
    type Err = UnknownAlgorithm;
    fn from_str(text: &str) -> Result<Self, UnknownAlgorithm> {
        match text {
            "token-mean" => Ok(Self::TokenMean),
            "seq-mean-token-sum" => Ok(Self::SeqMeanTokenSum),
            "seq-mean-token-mean" => Ok(Self::SeqMeanTokenMean),
            other => Err(UnknownAlgorithm {
                variable: "LOSS_AGG_MODE",
                value: other.to_owned(),
                known: "token-mean, seq-mean-token-sum, seq-mean-token-mean",
            }),
        }
    }
}

/// What aggregation needs to know of a sequence.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SequenceShape {
    /// Sampled tokens `n_s`.
    pub sampled: usize,
    /// Share of its trial `w_s`.
    pub weight: f64,
}

impl Aggregation {
    /// The factors `c_s`, in the order of `shapes`; 0 for a sequence without sampled tokens.
    pub fn coefficients(self, shapes: &[SequenceShape]) -> Vec<f64> {
        let live = |s: &&SequenceShape| s.sampled > 0;
        let weight_sum: f64 = shapes.iter().filter(live).map(|s| s.weight).sum();
        let token_sum: f64 = shapes.iter().map(|s| s.weight * s.sampled as f64).sum();
        shapes
            .iter()
            .map(|s| {
                if s.sampled == 0 || s.weight == 0.0 {
                    return 0.0;
                }
                match self {
                    Self::TokenMean => s.weight / token_sum,
                    Self::SeqMeanTokenSum => s.weight / weight_sum,
                    Self::SeqMeanTokenMean => s.weight / (s.sampled as f64 * weight_sum),
                }
            })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn aggregate(mode: Aggregation, losses: &[&[f64]], weights: &[f64]) -> f64 {
        let shapes: Vec<_> = losses
            .iter()
            .zip(weights)
            .map(|(l, &weight)| SequenceShape {
                sampled: l.len(),
                weight,
            })
            .collect();
        let coefficients = mode.coefficients(&shapes);
        losses
            .iter()
            .zip(coefficients)
            .map(|(l, c)| c * l.iter().sum::<f64>())
            .sum()
    }

    #[test]
    fn hand_computed() {
        let losses: [&[f64]; 3] = [&[1.0, 3.0], &[], &[5.0]];
        let ones = [1.0; 3];
        assert_eq!(aggregate(Aggregation::TokenMean, &losses, &ones), 3.0); // (1+3+5)/3
        assert_eq!(aggregate(Aggregation::SeqMeanTokenSum, &losses, &ones), 4.5); // (4+5)/2
        assert_eq!(aggregate(Aggregation::SeqMeanTokenMean, &losses, &ones), 3.5);
        // (2+5)/2
    }

    #[test]
    fn branches_of_a_trial_weigh_as_one() {
        // Trial one: branches of 2 and 4 tokens with half a share each. Trial two: one sequence.
        let losses: [&[f64]; 3] = [&[2.0, 2.0], &[1.0; 4], &[6.0, 6.0, 6.0]];
        let weights = [0.5, 0.5, 1.0];
        // ((2 + 1)/2 + 6) / 2
        assert_eq!(aggregate(Aggregation::SeqMeanTokenMean, &losses, &weights), 3.75);
        // ((4 + 4)/2 + 18) / 2
        assert_eq!(aggregate(Aggregation::SeqMeanTokenSum, &losses, &weights), 11.0);
        // (0.5·4 + 0.5·4 + 18) / (0.5·2 + 0.5·4 + 3)
        assert!((aggregate(Aggregation::TokenMean, &losses, &weights) - 22.0 / 6.0).abs() < 1e-15);
    }

    #[test]
    fn an_unknown_mode_is_named() {
        let error = "tokens".parse::<Aggregation>().unwrap_err();
        assert!(error.to_string().contains("LOSS_AGG_MODE=`tokens`"));
    }
}
