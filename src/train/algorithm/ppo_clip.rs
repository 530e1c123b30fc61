//! Token-level clipped surrogate.
//!
//! Schulman et al. 2017 ("Proximal Policy Optimization Algorithms", equation 7) with separate bounds
//! below and above (Yu et al. 2025, "DAPO", clip-higher) and the dual clip for negative advantages (Ye
//! et al. 2020, "Mastering Complex Control in MOBA Games", equation 5). Per token, with
//! `d = clamp(log π − log π_old, −20, 20)` and `ρ = exp(d)`:
//!
//! `l = max(−A ρ, −A clip(ρ, 1 − low, 1 + high))`, and for `A < 0`: `l = min(l, −A c)`.
//!
//! The derivative with respect to `log π` is `−A ρ` where the unclipped term is the one in force, and 0
//! elsewhere. verl: `compute_policy_loss_vanilla`.

use super::objective::TokenLosses;

/// Bounds of the ratio.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PpoClip {
    /// `CLIP_LOW`: the ratio is cut below at `1 − low`.
    pub low: f64,
    /// `CLIP_HIGH`: the ratio is cut above at `1 + high`.
    pub high: f64,
    /// `CLIP_RATIO_C`, above 1: bound of the loss for negative advantages.
    pub dual: f64,
}

const LOG_RATIO_LIMIT: f64 = 20.0;

impl PpoClip {
    /// Losses and derivatives of one sequence's tokens. The slices have the same length.
    pub fn token_losses(&self, logprobs: &[f64], old_logprobs: &[f64], advantages: &[f64]) -> TokenLosses {
        let mut out = TokenLosses::with_capacity(logprobs.len());
        for ((&logprob, &old), &advantage) in logprobs.iter().zip(old_logprobs).zip(advantages) {
            let difference = logprob - old;
            let limited = difference.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT);
            let ratio = limited.exp();
            let plain = -advantage * ratio;
            let cut = -advantage * ratio.clamp(1.0 - self.low, 1.0 + self.high);
            let surrogate = plain.max(cut);
            let ceiling = -advantage * self.dual;
            let capped = advantage < 0.0 && surrogate > ceiling;
            let live = plain >= cut && !capped && limited == difference;
            out.clipped += usize::from(cut > plain);
            out.clipped_lower += usize::from(capped);
            out.kl_sum -= limited;
            out.loss.push(if capped { ceiling } else { surrogate });
            out.derivative.push(if live { plain } else { 0.0 });
        }
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CLIP: PpoClip = PpoClip {
        low: 0.2,
        high: 0.3,
        dual: 3.0,
    };

    /// One token with old log-prob -1 and the given ratio.
    fn token(ratio: f64, advantage: f64) -> TokenLosses {
        CLIP.token_losses(&[-1.0 + ratio.ln()], &[-1.0], &[advantage])
    }

    #[test]
    fn all_regions_by_hand() {
        // (ratio, advantage, loss, derivative, clipped, clipped_lower)
        let cases = [
            (1.0, 2.0, -2.0, -2.0, 0, 0),
            (1.2, 2.0, -2.4, -2.4, 0, 0),
            (1.5, 2.0, -2.6, 0.0, 1, 0),  // above 1.3: held
            (0.5, 2.0, -1.0, -1.0, 0, 0), // a good token that lost probability is pulled back
            (0.5, -2.0, 1.6, 0.0, 1, 0),  // below 0.8: held
            (1.5, -2.0, 3.0, 3.0, 0, 0),
            (4.0, -2.0, 6.0, 0.0, 0, 1), // beyond the dual bound 3
            (1.5, 0.0, 0.0, 0.0, 0, 0),
        ];
        for (ratio, advantage, loss, derivative, clipped, lower) in cases {
            let got = token(ratio, advantage);
            assert!((got.loss[0] - loss).abs() < 1e-12, "{ratio} {advantage}: {got:?}");
            assert!(
                (got.derivative[0] - derivative).abs() < 1e-12,
                "{ratio} {advantage}: {got:?}"
            );
            assert_eq!(
                (got.clipped, got.clipped_lower),
                (clipped, lower),
                "{ratio} {advantage}"
            );
            assert!((got.kl_sum + ratio.ln()).abs() < 1e-12);
        }
    }

    #[test]
    fn an_extreme_ratio_stays_finite_and_has_no_derivative() {
        let got = CLIP.token_losses(&[-1.0], &[-500.0], &[-1.0]);
        assert_eq!((got.loss[0], got.derivative[0]), (3.0, 0.0));
        let got = CLIP.token_losses(&[-500.0], &[-1.0], &[1.0]);
        assert!((got.loss[0] + (-20f64).exp()).abs() < 1e-20);
        assert_eq!(got.derivative[0], 0.0);
    }
}
