//! Group sequence policy optimization.
//!
//! Zheng et al. 2025 ("Group Sequence Policy Optimization"), equations 5–7 and the token form 13–14: the
//! ratio belongs to the sequence and is normalised by its length,
//!
//! `s = exp( (1/n) Σ_t (log π_t − log π_old,t) )`
//!
//! and each token uses `s_t = sg[s] · π_t / sg[π_t]`, whose value is `s` and whose derivative with
//! respect to `log π_t` is `s`:
//!
//! `l_t = max(−A s_t, −A clip(s_t, 1 − low, 1 + high))`.
//!
//! Summed with `seq-mean-token-mean`, whatever `LOSS_AGG_MODE` says of the other terms, the gradient is that of
//! the sequence objective: `∂s/∂log π_t = s/n`. The exponent is bounded above by 10. verl: `compute_policy_loss_gspo`.

use super::objective::TokenLosses;

/// Bounds of the sequence ratio; the paper's are of the order 3e-4 and 4e-4.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Gspo {
    /// `CLIP_LOW`: the ratio is cut below at `1 − low`.
    pub low: f64,
    /// `CLIP_HIGH`: the ratio is cut above at `1 + high`.
    pub high: f64,
}

const LOG_RATIO_MAX: f64 = 10.0;

impl Gspo {
    /// Losses and derivatives of one sequence's tokens. The slices have the same length.
    pub fn token_losses(&self, logprobs: &[f64], old_logprobs: &[f64], advantages: &[f64]) -> TokenLosses {
        let mut out = TokenLosses::with_capacity(logprobs.len());
        let difference: f64 = logprobs.iter().zip(old_logprobs).map(|(l, o)| l - o).sum();
        out.kl_sum = -difference;
        let mean = difference / logprobs.len().max(1) as f64;
        let ratio = mean.min(LOG_RATIO_MAX).exp();
        for &advantage in advantages {
            let plain = -advantage * ratio;
            let cut = -advantage * ratio.clamp(1.0 - self.low, 1.0 + self.high);
            let live = plain >= cut && mean <= LOG_RATIO_MAX;
            out.clipped += usize::from(cut > plain);
            out.loss.push(plain.max(cut));
            out.derivative.push(if live { plain } else { 0.0 });
        }
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GSPO: Gspo = Gspo { low: 0.1, high: 0.2 };

    #[test]
    fn the_ratio_is_the_geometric_mean() {
        // Token ratios 1.1 and 1.0: s = sqrt(1.1).
        let got = GSPO.token_losses(&[-1.0 + 1.1f64.ln(), -2.0], &[-1.0, -2.0], &[0.5, 0.5]);
        let s = 1.1f64.sqrt();
        for t in 0..2 {
            assert!((got.loss[t] + 0.5 * s).abs() < 1e-12);
            assert!((got.derivative[t] + 0.5 * s).abs() < 1e-12);
        }
        assert_eq!(got.clipped, 0);
        assert!((got.kl_sum + 1.1f64.ln()).abs() < 1e-12);
    }

    #[test]
    fn clipping_takes_the_whole_sequence() {
        // Token ratios 2 and 1: s = sqrt(2) > 1.2 although the second token did not move.
        let old = [-3.0, -3.0];
        let new = [-3.0 + 2f64.ln(), -3.0];
        let up = GSPO.token_losses(&new, &old, &[1.0, 1.0]);
        assert_eq!(
            (up.loss, up.derivative, up.clipped),
            (vec![-1.2; 2], vec![0.0; 2], 2)
        );
        let down = GSPO.token_losses(&new, &old, &[-1.0, -1.0]);
        assert_eq!(down.clipped, 0);
        assert!((down.loss[0] - 2f64.sqrt()).abs() < 1e-12);
    }

    #[test]
    fn the_token_form_has_the_gradient_of_the_sequence_objective() {
        // Finite differences of -A·s itself, not of our token losses.
        let old = [-1.0, -0.4, -2.2];
        let new = [-0.97, -0.45, -2.15];
        let advantage = 1.7;
        let objective = |l: &[f64]| {
            let mean = l.iter().zip(&old).map(|(a, b)| a - b).sum::<f64>() / 3.0;
            -advantage * mean.exp()
        };
        let got = GSPO.token_losses(&new, &old, &[advantage; 3]);
        for t in 0..3 {
            let (mut up, mut down) = (new, new);
            up[t] += 1e-6;
            down[t] -= 1e-6;
            let numeric = (objective(&up) - objective(&down)) / 2e-6;
            assert!((got.derivative[t] / 3.0 - numeric).abs() < 1e-8);
        }
    }

    #[test]
    fn an_empty_sequence_has_no_loss() {
        assert!(GSPO.token_losses(&[], &[], &[]).loss.is_empty());
    }
}
