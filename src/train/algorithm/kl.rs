//! Estimators of the KL divergence from the policy to a reference, one sampled token at a time.
//!
//! Schulman 2020, "Approximating KL Divergence" (k1, k2, k3). With `d = log π_ref − log π`:
//!
//! | Name | Value | Derivative by `log π` |
//! |---|---|---|
//! | `kl`, `k1` | `−d` | 1 |
//! | `abs` | `|d|` | `−sign d` |
//! | `mse`, `k2` | `d²/2` | `−d` |
//! | `low_var_kl`, `k3` | `exp(d) − d − 1` | `1 − exp(d)` |
//!
//! For k3 verl clamps `d` to ±20 and the value to ±10 (`kl_penalty`); outside, the derivative is 0. k1
//! has an expected derivative of zero, so as a loss it only adds noise; it is kept for its value.

use super::UnknownAlgorithm;
use std::str::FromStr;

/// Estimator (`KL_LOSS_TYPE`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KlEstimator {
    /// Log ratio.
    K1,
    /// Absolute log ratio.
    Abs,
    /// Half of the squared log ratio.
    K2,
    /// Low-variance, never negative.
    K3,
}

impl FromStr for KlEstimator {
    type Err = UnknownAlgorithm;
    fn from_str(text: &str) -> Result<Self, UnknownAlgorithm> {
        match text {
            "kl" | "k1" => Ok(Self::K1),
            "abs" => Ok(Self::Abs),
            "mse" | "k2" => Ok(Self::K2),
            "low_var_kl" | "k3" => Ok(Self::K3),
            other => Err(UnknownAlgorithm {
                variable: "KL_LOSS_TYPE",
                value: other.to_owned(),
                known: "kl (k1), abs, mse (k2), low_var_kl (k3)",
            }),
        }
    }
}

impl KlEstimator {
    /// Value and derivative with respect to `logprob`.
    pub fn penalty(self, logprob: f64, reference_logprob: f64) -> (f64, f64) {
        let difference = reference_logprob - logprob;
        match self {
            Self::K1 => (-difference, 1.0),
            Self::Abs if difference == 0.0 => (0.0, 0.0),
            Self::Abs => (difference.abs(), -difference.signum()),
            Self::K2 => (0.5 * difference * difference, -difference),
            Self::K3 => {
                let limited = difference.clamp(-20.0, 20.0);
                let value = limited.exp() - limited - 1.0;
                let live = limited == difference && value <= 10.0;
                (value.min(10.0), if live { 1.0 - limited.exp() } else { 0.0 })
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hand_computed() {
        // log ratio ln 2: the policy gives the token twice the reference's probability.
        let (policy, reference) = (-1.0, -1.0 - 2f64.ln());
        let close = |(a, b): (f64, f64), want: (f64, f64)| {
            assert!(
                (a - want.0).abs() < 1e-12 && (b - want.1).abs() < 1e-12,
                "{a} {b} {want:?}"
            );
        };
        let ln2 = 2f64.ln();
        close(KlEstimator::K1.penalty(policy, reference), (ln2, 1.0));
        close(KlEstimator::Abs.penalty(policy, reference), (ln2, 1.0));
        close(KlEstimator::K2.penalty(policy, reference), (ln2 * ln2 / 2.0, ln2));
        close(KlEstimator::K3.penalty(policy, reference), (0.5 + ln2 - 1.0, 0.5));
    }

    #[test]
    fn k3_is_clamped_as_in_verl() {
        assert_eq!(KlEstimator::K3.penalty(-30.0, -1.0), (10.0, 0.0));
        // d = -25 is limited to -20; the value 19 + e^-20 is cut to 10.
        assert_eq!(KlEstimator::K3.penalty(-1.0, -26.0), (10.0, 0.0));
    }

    #[test]
    fn derivatives_agree_with_finite_differences() {
        for estimator in [
            KlEstimator::K1,
            KlEstimator::Abs,
            KlEstimator::K2,
            KlEstimator::K3,
        ] {
            for (l, r) in [(-0.3, -0.9), (-2.0, -0.5), (-1.0, -1.3)] {
                let numeric = (estimator.penalty(l + 1e-6, r).0 - estimator.penalty(l - 1e-6, r).0) / 2e-6;
                assert!(
                    (estimator.penalty(l, r).1 - numeric).abs() < 1e-7,
                    "{estimator:?} {l} {r}"
                );
            }
        }
    }

    #[test]
    fn the_expectation_over_the_policy_is_the_divergence() {
        let policy = [0.6f64, 0.3, 0.1];
        let reference = [0.2f64, 0.5, 0.3];
        let exact: f64 = policy.iter().zip(&reference).map(|(p, q)| p * (p / q).ln()).sum();
        for estimator in [KlEstimator::K1, KlEstimator::K3] {
            let mean: f64 = policy
                .iter()
                .zip(&reference)
                .map(|(p, q)| p * estimator.penalty(p.ln(), q.ln()).0)
                .sum();
            assert!((mean - exact).abs() < 1e-12, "{estimator:?}");
        }
    }
}
