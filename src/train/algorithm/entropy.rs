//! Entropy of the next-token distribution and its bonus.
//!
//! `H_t = −Σ_v p_v log p_v` at the sampling temperature (Williams and Peng 1991; Schulman et al. 2017,
//! equation 9, coefficient `ENTROPY_COEFF`). The trainer computes `H_t` on tensors in chunks; the bonus
//! enters the objective as `−coefficient · aggregate(H)`, so its derivative with respect to `H_t` is
//! `−coefficient · c_s` with the aggregation factor of the sequence.

/// Entropy in nats of the softmax of `logits`.
pub fn softmax_entropy(logits: &[f64]) -> f64 {
    let max = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let weights: Vec<f64> = logits.iter().map(|z| (z - max).exp()).collect();
    let total: f64 = weights.iter().sum();
    // H = log Z − Σ p z, with z relative to the maximum.
    let mean: f64 = weights
        .iter()
        .zip(logits)
        .filter(|(w, _)| **w > 0.0)
        .map(|(w, z)| w / total * (z - max))
        .sum();
    total.ln() - mean
}

/// Term of the objective and derivative by each token's entropy.
pub fn entropy_bonus(entropies: &[f64], coefficient: f64, aggregation_factor: f64) -> (f64, f64) {
    let derivative = -coefficient * aggregation_factor;
    (derivative * entropies.iter().sum::<f64>(), derivative)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_distributions() {
        assert!((softmax_entropy(&[3.0; 8]) - 8f64.ln()).abs() < 1e-12);
        assert!(softmax_entropy(&[0.0, f64::NEG_INFINITY]).abs() < 1e-12);
        // p = (3/4, 1/4)
        let want = 0.75 * (4f64 / 3.0).ln() + 0.25 * 4f64.ln();
        assert!((softmax_entropy(&[3f64.ln(), 0.0]) - want).abs() < 1e-12);
    }

    #[test]
    fn the_bonus_lowers_the_objective() {
        let (term, derivative) = entropy_bonus(&[1.0, 2.0], 0.1, 0.5);
        assert!((term + 0.15).abs() < 1e-12);
        assert!((derivative + 0.05).abs() < 1e-12);
    }
}
