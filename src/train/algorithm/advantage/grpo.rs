//! Group-relative advantages.
//!
//! GRPO (Shao et al. 2024, "DeepSeekMath", section 4.1.2, outcome supervision): with rewards
//! `r_1 … r_G` of the G samples of one prompt,
//!
//! `A_i = (r_i − mean(r)) / (std(r) + 1e-6)`
//!
//! with the unbiased standard deviation (divisor G − 1), as verl computes it. Without the division it
//! is the variant of Liu et al. 2025 ("Understanding R1-Zero-Like Training", Dr. GRPO), which does not
//! favour groups of little spread.
//!
//! A group that offers no comparison (fewer than two rewards, or all equal) has advantages that are
//! exactly zero.

use super::no_comparison;

const EPSILON: f64 = 1e-6;

/// Advantages of one group, in the order of `rewards` (one per trial with a verdict).
pub fn advantages(rewards: &[f64], divide_by_std: bool) -> Vec<f64> {
    if no_comparison(rewards) {
        // Said outright: rounding in the mean would leave a residue that the division by 1e-6 enlarges.
        return vec![0.0; rewards.len()];
    }
    let count = rewards.len() as f64;
    let mean = rewards.iter().sum::<f64>() / count;
    let variance = rewards.iter().map(|r| (r - mean).powi(2)).sum::<f64>() / (count - 1.0);
    let divisor = if divide_by_std {
        variance.sqrt() + EPSILON
    } else {
        1.0
    };
    rewards.iter().map(|r| (r - mean) / divisor).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn assert_close(got: &[f64], want: &[f64]) {
        assert_eq!(got.len(), want.len());
        for (g, w) in got.iter().zip(want) {
            assert!((g - w).abs() < 1e-12, "{got:?} instead of {want:?}");
        }
    }

    #[test]
    fn one_success_among_four() {
        // mean 1/4, deviations (3/4, -1/4 ×3), variance (9 + 3)/16 / 3 = 1/4, std 1/2.
        let want_std = 0.5 + 1e-6;
        assert_close(
            &advantages(&[1.0, 0.0, 0.0, 0.0], true),
            &[
                0.75 / want_std,
                -0.25 / want_std,
                -0.25 / want_std,
                -0.25 / want_std,
            ],
        );
        assert_close(
            &advantages(&[1.0, 0.0, 0.0, 0.0], false),
            &[0.75, -0.25, -0.25, -0.25],
        );
    }

    #[test]
    fn two_rewards() {
        // std of (1, 3) with divisor 1 is sqrt(2).
        let a = 1.0 / (2f64.sqrt() + 1e-6);
        assert_close(&advantages(&[1.0, 3.0], true), &[-a, a]);
    }

    #[test]
    fn nothing_to_compare_is_exactly_zero() {
        assert_eq!(advantages(&[], true), Vec::<f64>::new());
        assert_eq!(advantages(&[1.0], true), [0.0]);
        assert_eq!(advantages(&[0.1, 0.1, 0.1], true), [0.0; 3]);
    }
}
