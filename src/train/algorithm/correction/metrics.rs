//! Distance between the policy that sampled and the policy that is trained.
//!
//! With `r = old − rollout` per token, clamped to ±20 inside exponentials, and `n` tokens in all:
//!
//! - `kl` = mean of `−r`; `k3_kl` = mean of `exp(r) − r − 1`
//! - per sequence, `log ppl` = minus the mean log-probability; `ppl` = its exponential;
//!   `log_ppl_diff` = mean rollout log-prob − mean training log-prob; `ppl_ratio` = mean of its exponential
//! - `chi2_token` = mean of `exp(2r)` − 1; `chi2_seq` = mean over sequences of `exp(2 Σ r)` − 1
//! - effective sample size of the token weights `w = exp(r)`: `1 / mean((w / mean w)²)`
//!
//! They are of tokens and sequences as such: the shares of a trial's sequences do not weigh them, because
//! they look at the two programs, not at the trial.

use super::{limited, SequencePair};

/// Quantiles over sequences, by linear interpolation between neighbours. A mean hides the few sequences that
/// the policy can no longer produce; the tail shows them.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Quantiles {
    /// Median.
    pub p50: f64,
    /// Nine in ten are below.
    pub p90: f64,
    /// Ninety-nine in a hundred are below.
    pub p99: f64,
}

impl Quantiles {
    /// Of at least one value.
    fn of(mut values: Vec<f64>) -> Self {
        values.sort_by(f64::total_cmp);
        let at = |share: f64| {
            let place = share * (values.len() - 1) as f64;
            let (low, rest) = (place.floor() as usize, place.fract());
            let high = (low + 1).min(values.len() - 1);
            values[low] + rest * (values[high] - values[low])
        };
        Self {
            p50: at(0.5),
            p90: at(0.9),
            p99: at(0.99),
        }
    }
}

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
    /// Distribution of the log perplexity under the trainer.
    pub training_log_ppl_quantiles: Quantiles,
    /// Distribution of the difference of log perplexities.
    pub log_ppl_diff_quantiles: Quantiles,
    /// Share of sequences whose difference is above 1.
    pub log_ppl_diff_gt1: f64,
    /// Share of sequences whose difference is above 2.
    pub log_ppl_diff_gt2: f64,
    /// Distribution of `2 Σ r`.
    pub log_chi2_seq_quantiles: Quantiles,
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
            training_log_ppl_quantiles: Quantiles::default(),
            log_ppl_diff_quantiles: Quantiles::default(),
            log_ppl_diff_gt1: 0.0,
            log_ppl_diff_gt2: 0.0,
            log_chi2_seq_quantiles: Quantiles::default(),
        };
        let mut square_sum = 0.0;
        let (mut log_ppls, mut differences, mut log_chi2s) = (Vec::new(), Vec::new(), Vec::new());
        for sequence in sequences {
            if sequence.rollout.is_empty() {
                continue;
            }
            let count = sequence.rollout.len() as f64;
            let mut ratio_sum = 0.0;
            for (rollout, training) in sequence.rollout.iter().zip(sequence.training) {
                let r = training - rollout;
                let weight = limited(r).exp();
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
            let log_chi2 = 2.0 * limited(ratio_sum);
            m.chi2_seq += log_chi2.exp();
            m.log_ppl_diff_gt1 += f64::from(difference > 1.0);
            m.log_ppl_diff_gt2 += f64::from(difference > 2.0);
            log_ppls.push(training_log_ppl);
            differences.push(difference);
            log_chi2s.push(log_chi2);
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
            &mut m.log_ppl_diff_gt1,
            &mut m.log_ppl_diff_gt2,
        ] {
            *by_sequence /= rows;
        }
        m.chi2_seq -= 1.0;
        m.chi2_token = square_sum / tokens - 1.0;
        m.is_eff_sample_size = m.is_mean * m.is_mean / (square_sum / tokens);
        m.training_log_ppl_quantiles = Quantiles::of(log_ppls);
        m.log_ppl_diff_quantiles = Quantiles::of(differences);
        m.log_chi2_seq_quantiles = Quantiles::of(log_chi2s);
        Some(m)
    }

    /// The metrics under verl's keys.
    pub fn named(&self) -> [(&'static str, f64); 28] {
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
            (
                "rollout_corr/training_log_ppl_p50",
                self.training_log_ppl_quantiles.p50,
            ),
            (
                "rollout_corr/training_log_ppl_p90",
                self.training_log_ppl_quantiles.p90,
            ),
            (
                "rollout_corr/training_log_ppl_p99",
                self.training_log_ppl_quantiles.p99,
            ),
            ("rollout_corr/log_ppl_diff_p50", self.log_ppl_diff_quantiles.p50),
            ("rollout_corr/log_ppl_diff_p90", self.log_ppl_diff_quantiles.p90),
            ("rollout_corr/log_ppl_diff_p99", self.log_ppl_diff_quantiles.p99),
            ("rollout_corr/log_ppl_diff_gt1_frac", self.log_ppl_diff_gt1),
            ("rollout_corr/log_ppl_diff_gt2_frac", self.log_ppl_diff_gt2),
            ("rollout_corr/log_chi2_seq_p50", self.log_chi2_seq_quantiles.p50),
            ("rollout_corr/log_chi2_seq_p90", self.log_chi2_seq_quantiles.p90),
            ("rollout_corr/log_chi2_seq_p99", self.log_chi2_seq_quantiles.p99),
        ]
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
        // 2 Σ r is 0 and 2 ln 2; quantiles lie on the line between them.
        close(m.log_chi2_seq_quantiles.p50, ln2);
        close(m.log_chi2_seq_quantiles.p90, 1.8 * ln2);
        close(m.log_ppl_diff_gt1, 0.0);
    }

    #[test]
    fn nothing_sampled_has_no_metrics() {
        assert_eq!(CorrectionMetrics::of([]), None);
    }
}
