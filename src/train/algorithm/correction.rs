//! How far the policy that sampled is from the policy that is trained.
//!
//! The engine's log-probabilities (`rollout`) differ from the trainer's recomputation (`old`): by
//! rounding where the weights are the same, by real change where tokens are stale. Metrics and names are
//! verl's (`rollout_corr_helper`); background: Yao et al. 2025 ("Your Efficient RL Framework Secretly
//! Brings You Off-Policy RL Training"), Liu et al. 2025 ("When Speed Kills Stability").
//!
//! With `r = old − rollout` per token, clamped to ±20 inside exponentials, and `n` tokens in all:
//!
//! - `kl` = mean of `−r`; `k3_kl` = mean of `exp(r) − r − 1`
//! - per sequence, `log ppl` = minus the mean log-probability; `ppl` = its exponential;
//!   `log_ppl_diff` = mean rollout log-prob − mean training log-prob; `ppl_ratio` = mean of its exponential
//! - `chi2_token` = mean of `exp(2r)` − 1; `chi2_seq` = mean over sequences of `exp(2 Σ r)` − 1
//! - effective sample size of the token weights `w = exp(r)`: `1 / mean((w / mean w)²)`
//!
//! [`TruncatedImportance`] turns the same ratio into factors of the policy loss.

/// Sampled tokens of one sequence under both policies. Slices of the same length.
#[derive(Clone, Copy, Debug)]
pub struct SequencePair<'a> {
    /// As recorded by the engine.
    pub rollout: &'a [f64],
    /// As recomputed by the trainer before the update.
    pub training: &'a [f64],
}

const LOG_RATIO_LIMIT: f64 = 20.0;

/// Distances over a batch.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CorrectionMetrics {
    /// Mean of `rollout − old`, an estimate of KL(rollout ‖ old).
    pub kl: f64,
    /// The same by the k3 estimator.
    pub k3_kl: f64,
    /// Mean perplexity under the trainer.
    pub training_ppl: f64,
    /// Mean log perplexity under the trainer.
    pub training_log_ppl: f64,
    /// Mean perplexity under the engine.
    pub rollout_ppl: f64,
    /// Mean log perplexity under the engine.
    pub rollout_log_ppl: f64,
    /// Mean over sequences of the difference of log perplexities.
    pub log_ppl_diff: f64,
    /// Mean of its absolute value.
    pub log_ppl_abs_diff: f64,
    /// Largest difference.
    pub log_ppl_diff_max: f64,
    /// Smallest difference.
    pub log_ppl_diff_min: f64,
    /// Mean ratio of perplexities.
    pub ppl_ratio: f64,
    /// Chi-squared divergence by token.
    pub chi2_token: f64,
    /// Chi-squared divergence by sequence.
    pub chi2_seq: f64,
    /// Mean token ratio.
    pub is_mean: f64,
    /// Largest token ratio.
    pub is_max: f64,
    /// Smallest token ratio.
    pub is_min: f64,
    /// Effective sample size of the token ratios, in (0, 1].
    pub is_eff_sample_size: f64,
}

impl CorrectionMetrics {
    /// Over all sequences with sampled tokens; `None` when there is none.
    pub fn of<'a>(sequences: impl IntoIterator<Item = SequencePair<'a>>) -> Option<Self> {
        let mut tokens = 0.0;
        let mut rows = 0.0;
        let mut m = Self {
            kl: 0.0,
            k3_kl: 0.0,
            training_ppl: 0.0,
            training_log_ppl: 0.0,
            rollout_ppl: 0.0,
            rollout_log_ppl: 0.0,
            log_ppl_diff: 0.0,
            log_ppl_abs_diff: 0.0,
            log_ppl_diff_max: f64::NEG_INFINITY,
            log_ppl_diff_min: f64::INFINITY,
            ppl_ratio: 0.0,
            chi2_token: 0.0,
            chi2_seq: 0.0,
            is_mean: 0.0,
            is_max: f64::NEG_INFINITY,
            is_min: f64::INFINITY,
            is_eff_sample_size: 0.0,
        };
        let mut square_sum = 0.0;
        for sequence in sequences {
            if sequence.rollout.is_empty() {
                continue;
            }
            let count = sequence.rollout.len() as f64;
            let mut ratio_sum = 0.0;
            for (rollout, training) in sequence.rollout.iter().zip(sequence.training) {
                let r = training - rollout;
                let weight = r.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp();
                m.kl -= r;
                m.k3_kl += weight - r - 1.0;
                m.is_mean += weight;
                m.is_max = m.is_max.max(weight);
                m.is_min = m.is_min.min(weight);
                square_sum += weight * weight;
                ratio_sum += r;
            }
            let rollout_log_ppl = -sequence.rollout.iter().sum::<f64>() / count;
            let training_log_ppl = -sequence.training.iter().sum::<f64>() / count;
            let difference = training_log_ppl - rollout_log_ppl;
            m.rollout_log_ppl += rollout_log_ppl;
            m.training_log_ppl += training_log_ppl;
            m.rollout_ppl += rollout_log_ppl.exp();
            m.training_ppl += training_log_ppl.exp();
            m.log_ppl_diff += difference;
            m.log_ppl_abs_diff += difference.abs();
            m.log_ppl_diff_max = m.log_ppl_diff_max.max(difference);
            m.log_ppl_diff_min = m.log_ppl_diff_min.min(difference);
            m.ppl_ratio += difference.exp();
            m.chi2_seq += (2.0 * ratio_sum.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)).exp();
            tokens += count;
            rows += 1.0;
        }
        if rows == 0.0 {
            return None;
        }
        for by_token in [&mut m.kl, &mut m.k3_kl, &mut m.is_mean] {
            *by_token /= tokens;
        }
        for by_sequence in [
            &mut m.rollout_log_ppl,
            &mut m.training_log_ppl,
            &mut m.rollout_ppl,
            &mut m.training_ppl,
            &mut m.log_ppl_diff,
            &mut m.log_ppl_abs_diff,
            &mut m.ppl_ratio,
            &mut m.chi2_seq,
        ] {
            *by_sequence /= rows;
        }
        m.chi2_seq -= 1.0;
        m.chi2_token = square_sum / tokens - 1.0;
        m.is_eff_sample_size = m.is_mean * m.is_mean / (square_sum / tokens);
        Some(m)
    }

    /// The metrics under verl's keys.
    pub fn named(&self) -> [(&'static str, f64); 17] {
        [
            ("rollout_corr/kl", self.kl),
            ("rollout_corr/k3_kl", self.k3_kl),
            ("rollout_corr/training_ppl", self.training_ppl),
            ("rollout_corr/training_log_ppl", self.training_log_ppl),
            ("rollout_corr/rollout_ppl", self.rollout_ppl),
            ("rollout_corr/rollout_log_ppl", self.rollout_log_ppl),
            ("rollout_corr/log_ppl_diff", self.log_ppl_diff),
            ("rollout_corr/log_ppl_abs_diff", self.log_ppl_abs_diff),
            ("rollout_corr/log_ppl_diff_max", self.log_ppl_diff_max),
            ("rollout_corr/log_ppl_diff_min", self.log_ppl_diff_min),
            ("rollout_corr/ppl_ratio", self.ppl_ratio),
            ("rollout_corr/chi2_token", self.chi2_token),
            ("rollout_corr/chi2_seq", self.chi2_seq),
            ("rollout_corr/rollout_is_mean", self.is_mean),
            ("rollout_corr/rollout_is_max", self.is_max),
            ("rollout_corr/rollout_is_min", self.is_min),
            ("rollout_corr/rollout_is_eff_sample_size", self.is_eff_sample_size),
        ]
    }
}

/// Level of the ratio that corrects the policy loss.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ImportanceLevel {
    /// Each token has its own ratio.
    Token,
    /// The product of the ratios, for the whole sequence.
    Sequence,
}

/// Truncated importance weights: `min(exp(clamp(old − rollout, ±20)), threshold)`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TruncatedImportance {
    /// Token or sequence.
    pub level: ImportanceLevel,
    /// Upper bound of a weight.
    pub threshold: f64,
}

impl TruncatedImportance {
    /// One weight per token.
    pub fn weights(&self, pair: SequencePair<'_>) -> Vec<f64> {
        let cut = |r: f64| {
            r.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
                .exp()
                .min(self.threshold)
        };
        let ratios = pair.training.iter().zip(pair.rollout).map(|(t, r)| t - r);
        match self.level {
            ImportanceLevel::Token => ratios.map(cut).collect(),
            ImportanceLevel::Sequence => vec![cut(ratios.sum()); pair.rollout.len()],
        }
    }
}

/// Pearson correlation of pairs, accumulated in f64 around a running mean; verl's
/// `rollout_actor_probs_pearson_corr` over probabilities.
#[derive(Clone, Copy, Debug, Default)]
pub struct Correlation {
    count: f64,
    mean: (f64, f64),
    square: (f64, f64),
    product: f64,
}

impl Correlation {
    /// Adds a pair.
    pub fn add(&mut self, x: f64, y: f64) {
        self.count += 1.0;
        let (dx, dy) = (x - self.mean.0, y - self.mean.1);
        self.mean.0 += dx / self.count;
        self.mean.1 += dy / self.count;
        self.square.0 += dx * (x - self.mean.0);
        self.square.1 += dy * (y - self.mean.1);
        self.product += dx * (y - self.mean.1);
    }

    /// Pairs so far.
    pub fn count(&self) -> u64 {
        self.count as u64
    }

    /// The coefficient; `None` where it is not defined (fewer than two pairs, or one side constant).
    pub fn coefficient(&self) -> Option<f64> {
        let scale = (self.square.0 * self.square.1).sqrt();
        (self.count >= 2.0 && scale > 0.0).then(|| self.product / scale)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_policies_are_at_distance_zero() {
        let l = [-0.5, -1.5];
        let m = CorrectionMetrics::of([SequencePair {
            rollout: &l,
            training: &l,
        }])
        .unwrap();
        assert_eq!((m.kl, m.k3_kl, m.chi2_token, m.chi2_seq), (0.0, 0.0, 0.0, 0.0));
        assert_eq!((m.ppl_ratio, m.is_eff_sample_size), (1.0, 1.0));
        assert!((m.training_ppl - 1f64.exp()).abs() < 1e-12);
    }

    #[test]
    fn hand_computed() {
        // Sequence one: token ratios 2 and 1/2. Sequence two: one token with ratio 2. An empty one.
        let ln2 = 2f64.ln();
        let m = CorrectionMetrics::of([
            SequencePair {
                rollout: &[-2.0, -1.0],
                training: &[-2.0 + ln2, -1.0 - ln2],
            },
            SequencePair {
                rollout: &[],
                training: &[],
            },
            SequencePair {
                rollout: &[-1.0],
                training: &[-1.0 + ln2],
            },
        ])
        .unwrap();
        let close = |got: f64, want: f64| assert!((got - want).abs() < 1e-12, "{got} instead of {want}");
        close(m.kl, -ln2 / 3.0);
        close(m.k3_kl, (4.5 - ln2 - 3.0) / 3.0);
        close(m.rollout_log_ppl, (1.5 + 1.0) / 2.0);
        close(m.training_log_ppl, (1.5 + 1.0 - ln2) / 2.0);
        close(m.rollout_ppl, (1.5f64.exp() + 1f64.exp()) / 2.0);
        close(m.log_ppl_diff, -ln2 / 2.0);
        close(m.log_ppl_diff_min, -ln2);
        close(m.log_ppl_diff_max, 0.0);
        close(m.ppl_ratio, (1.0 + 0.5) / 2.0);
        close(m.chi2_token, (4.0 + 0.25 + 4.0) / 3.0 - 1.0);
        close(m.chi2_seq, (1.0 + 4.0) / 2.0 - 1.0);
        close(m.is_mean, 1.5);
        // 1 / mean((w/1.5)²) with w = 2, 1/2, 2
        close(m.is_eff_sample_size, 2.25 / (8.25 / 3.0));
    }

    #[test]
    fn nothing_sampled_has_no_metrics() {
        assert_eq!(CorrectionMetrics::of([]), None);
    }

    #[test]
    fn weights_are_truncated_by_token_and_by_sequence() {
        let pair = SequencePair {
            rollout: &[-2.0, -2.0],
            training: &[-2.0 + 3f64.ln(), -2.0 - 2f64.ln()],
        };
        let by = |level| {
            TruncatedImportance {
                level,
                threshold: 2.0,
            }
            .weights(pair)
        };
        let token = by(ImportanceLevel::Token);
        assert!((token[0] - 2.0).abs() < 1e-12 && (token[1] - 0.5).abs() < 1e-12);
        let sequence = by(ImportanceLevel::Sequence);
        assert!(sequence.iter().all(|w| (w - 1.5).abs() < 1e-12));
    }

    #[test]
    fn correlation_by_hand() {
        let mut c = Correlation::default();
        assert_eq!(c.coefficient(), None);
        for (x, y) in [(1.0, 2.0), (2.0, 1.0), (3.0, 4.0), (4.0, 3.0)] {
            c.add(x, y);
        }
        // Deviations (-1.5,-.5,.5,1.5) and (-.5,-1.5,1.5,.5): products 3, squares 5 and 5.
        assert!((c.coefficient().unwrap() - 0.6).abs() < 1e-12);
        assert_eq!(c.count(), 4);
        let mut constant = Correlation::default();
        constant.add(1.0, 2.0);
        constant.add(1.0, 3.0);
        assert_eq!(constant.coefficient(), None);
    }
}
