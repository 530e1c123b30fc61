//! Loss of the critic.
//!
//! Squared error against the returns, with the prediction held near the one that was made before the
//! update, as the policy's ratio is held near 1: Schulman et al. 2017 use it in their implementation of
//! PPO; Engstrom et al. 2020 ("Implementation Matters in Deep RL", section 3, item 1) give the formula.
//! With the prediction `v`, the one before the update `v_old`, the return `R` and `c = CLIPRANGE_VALUE`:
//!
//! `l = ½ max( (v − R)², (clip(v, v_old − c, v_old + c) − R)² )`
//!
//! The derivative by `v` is `v − R`, and 0 where the clipped term is the larger one. Token losses are summed
//! as those of the policy ([`super::Aggregation`]). verl: `compute_value_loss`.

/// Bound of the change of a prediction in one step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ValueClip(pub f64);

/// Losses of a sequence's tokens before aggregation.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ValueLosses {
    /// Loss by token.
    pub loss: Vec<f64>,
    /// Derivative of a token's loss by its prediction.
    pub derivative: Vec<f64>,
    /// Tokens where the clipped term is in force.
    pub clipped: usize,
}

/// Running sums over the sequences of a mini-batch.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct ValueSums {
    /// Aggregated loss.
    pub loss: f64,
    /// Sampled tokens.
    pub tokens: usize,
    /// Tokens where the clipped term is in force.
    pub clipped: usize,
    /// Sum of the predictions.
    pub prediction_sum: f64,
}

impl ValueClip {
    /// Losses and derivatives of one sequence's tokens. The slices have the same length.
    pub fn token_losses(&self, values: &[f64], old_values: &[f64], returns: &[f64]) -> ValueLosses {
        let mut out = ValueLosses::default();
        for ((&value, &old), &target) in values.iter().zip(old_values).zip(returns) {
            let held = value.clamp(old - self.0, old + self.0);
            let (plain, cut) = ((value - target).powi(2), (held - target).powi(2));
            let clipped = cut > plain;
            out.clipped += usize::from(clipped);
            out.loss.push(0.5 * plain.max(cut));
            out.derivative.push(if clipped { 0.0 } else { value - target });
        }
        out
    }

    /// Adds a sequence with aggregation factor `factor` to `sums`; derivatives of the loss by its predictions.
    pub fn evaluate(
        &self,
        values: &[f64],
        old_values: &[f64],
        returns: &[f64],
        factor: f64,
        sums: &mut ValueSums,
    ) -> Vec<f64> {
        let losses = self.token_losses(values, old_values, returns);
        sums.loss += factor * losses.loss.iter().sum::<f64>();
        sums.tokens += values.len();
        sums.clipped += losses.clipped;
        sums.prediction_sum += values.iter().sum::<f64>();
        losses.derivative.iter().map(|d| factor * d).collect()
    }
}

/// Share of the variance of `returns` that `values` explain, `1 − Var(R − V) / Var(R)`; `None` where the
/// returns do not vary.
pub fn explained_variance(values: &[f64], returns: &[f64]) -> Option<f64> {
    let variance = |x: &[f64]| {
        let mean = x.iter().sum::<f64>() / x.len() as f64;
        x.iter().map(|x| (x - mean).powi(2)).sum::<f64>()
    };
    let total = variance(returns);
    let rest: Vec<f64> = returns.iter().zip(values).map(|(r, v)| r - v).collect();
    (total > 0.0).then(|| 1.0 - variance(&rest) / total)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn all_regions_by_hand() {
        // (value, old, return, loss, derivative, clipped) with a bound of 0.5
        let cases = [
            (1.0, 1.0, 3.0, 2.0, -2.0, 0),
            (1.4, 1.0, 3.0, 0.5 * 1.6 * 1.6, -1.6, 0),
            (2.0, 1.0, 3.0, 0.5 * 1.5 * 1.5, 0.0, 1), // went towards the return beyond 1.5: held
            (0.0, 1.0, 3.0, 4.5, -3.0, 0),            // went away from it: pulled back
            (2.0, 1.0, 2.0, 0.125, 0.0, 1),
        ];
        for (value, old, target, loss, derivative, clipped) in cases {
            let got = ValueClip(0.5).token_losses(&[value], &[old], &[target]);
            assert!((got.loss[0] - loss).abs() < 1e-12, "{value}: {got:?}");
            assert!((got.derivative[0] - derivative).abs() < 1e-12, "{value}: {got:?}");
            assert_eq!(got.clipped, clipped, "{value}");
        }
    }

    #[test]
    fn explained_variance_by_hand() {
        assert_eq!(explained_variance(&[1.0, 2.0], &[1.0, 2.0]), Some(1.0));
        assert_eq!(explained_variance(&[0.0, 0.0], &[1.0, 2.0]), Some(0.0));
        assert_eq!(explained_variance(&[0.0, 1.0], &[2.0, 2.0]), None);
        assert_eq!(explained_variance(&[], &[]), None);
    }

    proptest! {
        /// Against the formula in another form (cases instead of maxima), and its numeric derivative.
        #[test]
        fn agrees_with_cases_and_finite_differences(
            rows in prop::collection::vec((-3.0..3.0f64, -3.0..3.0f64, -3.0..3.0f64), 0..12), bound in 0.01..2.0f64,
            factor in 0.1..3.0f64,
        ) {
            let cases = |v: f64, old: f64, r: f64| {
                let error = if v > old + bound {
                    let edge = old + bound - r;
                    if edge.abs() > (v - r).abs() { edge } else { v - r }
                } else if v < old - bound {
                    let edge = old - bound - r;
                    if edge.abs() > (v - r).abs() { edge } else { v - r }
                } else {
                    v - r
                };
                error * error / 2.0
            };
            let column = |f: fn(&(f64, f64, f64)) -> f64| rows.iter().map(f).collect::<Vec<_>>();
            let (values, old, returns) = (column(|r| r.0), column(|r| r.1), column(|r| r.2));
            let mut sums = ValueSums::default();
            let derivatives = ValueClip(bound).evaluate(&values, &old, &returns, factor, &mut sums);
            let mut want = 0.0;
            for t in 0..rows.len() {
                want += factor * cases(values[t], old[t], returns[t]);
                let h = 1e-6;
                let slope = |a: f64, b: f64| (cases(a, old[t], returns[t]) - cases(b, old[t], returns[t])) / (a - b);
                let (left, right) = (slope(values[t], values[t] - h), slope(values[t] + h, values[t]));
                // At a kink either side's slope is right.
                let gap = (derivatives[t] / factor - left).abs().min((derivatives[t] / factor - right).abs());
                prop_assert!(gap < 1e-4, "{gap} at {t}");
            }
            prop_assert!((sums.loss - want).abs() < 1e-9);
            prop_assert_eq!(sums.tokens, rows.len());
        }
    }
}
