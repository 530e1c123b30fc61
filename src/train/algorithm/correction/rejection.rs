//! Rejection: tokens or sequences that are too far from the sampling policy leave the policy's loss.
//!
//! Unlike clipping, which bounds how far an update may go, this takes data out that the policy would hardly
//! have sampled (Liu et al. 2025, "When Speed Kills Stability", masked importance sampling). A criterion
//! measures a distance per token, with `r = old − rollout` clamped to ±20:
//!
//! `k1 = −r`, `k2 = r²/2`, `k3 = exp(r) − 1 − r`
//!
//! and looks at each token, or at the sum, mean or maximum over a sequence. `k1` must lie between the
//! logarithms of two bounds, which are ratios rollout/old, the inverse of those that the importance weights
//! are (the mean of a sequence is the logarithm of their geometric mean); `k2` and `k3` must not exceed one. What fails any criterion is out: of the loss, of its KL and entropy terms, of the lengths
//! that the aggregation divides by, and of the mean ratio of GSPO. Names as verl's `rollout_rs`.

use super::{limited, SequencePair};

/// Distance of one token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Distance {
    /// `−r`.
    K1,
    /// `r²/2`.
    K2,
    /// `exp(r) − 1 − r`.
    K3,
}

/// What is looked at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Extent {
    /// Each token for itself.
    Token,
    /// Sum over the sequence.
    SequenceSum,
    /// Mean over the sequence.
    SequenceMean,
    /// Largest value of the sequence.
    SequenceMax,
}

/// One condition for staying in the loss.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Criterion {
    /// Name in the metrics, as in `ROLLOUT_RS`.
    pub name: &'static str,
    /// Token or sequence.
    pub extent: Extent,
    /// Distance.
    pub distance: Distance,
    /// Smallest value that stays; minus infinity where there is no such bound.
    pub lower: f64,
    /// Largest value that stays.
    pub upper: f64,
}

impl Criterion {
    /// Which tokens of a sequence pass.
    fn passes(&self, pair: SequencePair<'_>) -> Vec<bool> {
        let distance = |r: f64| match self.distance {
            Distance::K1 => -r,
            Distance::K2 => 0.5 * r * r,
            Distance::K3 => r.exp() - 1.0 - r,
        };
        let distances: Vec<f64> = pair.log_ratios().map(|r| distance(limited(r))).collect();
        let inside = |x: f64| x >= self.lower && x <= self.upper;
        let count = distances.len();
        let whole = |x: f64| vec![inside(x); count];
        match self.extent {
            Extent::Token => distances.into_iter().map(inside).collect(),
            Extent::SequenceSum => whole(distances.iter().sum()),
            Extent::SequenceMean => whole(distances.iter().sum::<f64>() / count.max(1) as f64),
            Extent::SequenceMax => whole(distances.iter().copied().fold(f64::NEG_INFINITY, f64::max)),
        }
    }
}

/// Criteria that all must pass (`ROLLOUT_RS`, `ROLLOUT_RS_THRESHOLD`).
#[derive(Clone, Debug, PartialEq)]
pub struct Rejection {
    /// In the order of the setting.
    pub criteria: Vec<Criterion>,
}

/// How much was taken out.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RejectionMetrics {
    tokens: usize,
    sequences: usize,
    /// Tokens out, and sequences that lost a token, by any criterion.
    out: (usize, usize),
    /// The same by criterion.
    by_criterion: Vec<(&'static str, usize, usize)>,
}

impl Rejection {
    /// Which tokens of a sequence stay; adds to `metrics`.
    pub fn keep(&self, pair: SequencePair<'_>, metrics: &mut RejectionMetrics) -> Vec<bool> {
        let mut keep = vec![true; pair.rollout.len()];
        metrics.by_criterion.resize(self.criteria.len(), ("", 0, 0));
        for (criterion, entry) in self.criteria.iter().zip(&mut metrics.by_criterion) {
            let passes = criterion.passes(pair);
            let out = passes.iter().filter(|pass| !**pass).count();
            *entry = (criterion.name, entry.1 + out, entry.2 + usize::from(out > 0));
            for (keep, pass) in keep.iter_mut().zip(passes) {
                *keep &= pass;
            }
        }
        let out = keep.iter().filter(|keep| !**keep).count();
        metrics.tokens += keep.len();
        metrics.sequences += usize::from(!keep.is_empty());
        metrics.out.0 += out;
        metrics.out.1 += usize::from(out > 0);
        keep
    }
}

impl RejectionMetrics {
    /// The metrics under verl's keys; nothing of nothing.
    pub fn named(&self) -> Vec<(String, f64)> {
        if self.tokens == 0 {
            return Vec::new();
        }
        let (all_tokens, all_sequences) = (self.tokens as f64, self.sequences as f64);
        let shares = |prefix: &str, tokens: usize, sequences: usize| {
            [
                (format!("{prefix}_masked_fraction"), tokens as f64 / all_tokens),
                (
                    format!("{prefix}_seq_masked_fraction"),
                    sequences as f64 / all_sequences,
                ),
            ]
        };
        let mut all = shares("rollout_corr/rollout_rs", self.out.0, self.out.1).to_vec();
        for (name, tokens, sequences) in &self.by_criterion {
            all.extend(shares(
                &format!("rollout_corr/rollout_rs_{name}"),
                *tokens,
                *sequences,
            ));
        }
        all
    }
}
