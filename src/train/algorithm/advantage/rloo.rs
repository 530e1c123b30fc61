//! REINFORCE with a leave-one-out baseline.
//!
//! Kool et al. 2019 ("Buy 4 REINFORCE Samples, Get a Baseline for Free!"), Ahmadian et al. 2024 ("Back to
//! Basics", RLOO): the baseline of a trial is the mean reward of the *other* trials of its group,
//!
//! `A_i = r_i − 1/(G − 1) Σ_{j≠i} r_j = G/(G − 1) · (r_i − mean(r))`
//!
//! A group that offers no comparison has advantages that are exactly zero. verl:
//! `compute_rloo_outcome_advantage`.

use super::no_comparison;

/// Advantages of one group, in the order of `rewards` (one per trial).
pub fn advantages(rewards: &[f64]) -> Vec<f64> {
    if no_comparison(rewards) {
        return vec![0.0; rewards.len()];
    }
    let count = rewards.len() as f64;
    let mean = rewards.iter().sum::<f64>() / count;
    let factor = count / (count - 1.0);
    rewards.iter().map(|r| factor * (r - mean)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_baseline_is_the_mean_of_the_others() {
        assert_eq!(advantages(&[1.0, 0.0]), [1.0, -1.0]);
        let got = advantages(&[1.0, 0.0, 0.0]);
        for (g, w) in got.iter().zip([1.0, -0.5, -0.5]) {
            assert!((g - w).abs() < 1e-15, "{got:?}");
        }
        assert_eq!(advantages(&[0.7]), [0.0]);
        assert_eq!(advantages(&[0.1; 3]), [0.0; 3]);
        assert!(advantages(&[]).is_empty());
    }
}
