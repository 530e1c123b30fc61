//! The gated delta net of a step: the recurrence of [`crate::model::net`]'s delta rule, token by token,
//! from and into the state of the sequence.

use super::{
    forward::{floats_mut, Forward, Group},
    kernels,
    weights::DeltaNetWeights,
};
use crate::model::hf::LinearAttentionConfig;
use tch::{Device, Kind, Tensor};

/// Added to the squared norm of queries and keys.
const L2_EPS: f32 = 1e-6;

impl Forward {
    /// `a [T,H]` → `[T, Hv·dv]`, before the output projection. `place` is the layer's among those with a
    /// delta net.
    pub(super) fn delta_net(
        &self,
        place: usize,
        weights: &DeltaNetWeights,
        a: &Tensor,
        groups: &[Group],
    ) -> Tensor {
        let Some(sizes) = self.shape.config.linear_attention else {
            unreachable!("weights of a delta net come from a config with its sizes")
        };
        let eps = self.shape.config.rms_norm_eps as f32;
        let mut projected = a.mm(&weights.input);
        let width = projected.size()[1] as usize;
        let rows = floats_mut(&mut projected);
        let values = sizes.value_dim();
        let mut out = Tensor::empty([a.size()[0], values as i64], (Kind::Float, Device::Cpu));
        let out_rows = floats_mut(&mut out);
        for group in groups {
            let Some(slot) = group.work.state else {
                unreachable!("a sequence of a model with a delta net holds a state")
            };
            let count = group.work.tokens.len();
            // SAFETY: this worker alone computes the sequence that holds the slot, and a layer is visited
            // once in a step.
            let (state, inputs) = unsafe { self.states.layer(slot, place) };
            let rows = &mut rows[group.first_row * width..][..count * width];
            let out = &mut out_rows[group.first_row * values..][..count * values];
            for (row, out) in rows.chunks_exact_mut(width).zip(out.chunks_exact_mut(values)) {
                convolve(&mut row[..sizes.conv_dim()], inputs, &weights.conv);
                recur(row, state, out, weights, &sizes);
            }
            for (row, out) in rows.chunks_exact(width).zip(out.chunks_exact_mut(values)) {
                let z = &row[sizes.conv_dim()..][..values];
                gated_norm(out, z, &weights.norm, eps);
            }
        }
        out
    }
}

/// Causal convolution of the current token `m` with the inputs before it, then SiLU. `m` moves into the
/// inputs as it was.
fn convolve(m: &mut [f32], inputs: &mut [f32], taps: &[f32]) {
    let channels = m.len();
    let before = inputs.len() / channels;
    let current = &taps[before * channels..];
    let mut y: Vec<f32> = m.iter().zip(current).map(|(m, w)| m * w).collect();
    for (input, taps) in inputs.chunks_exact(channels).zip(taps.chunks_exact(channels)) {
        for ((y, x), w) in y.iter_mut().zip(input).zip(taps) {
            *y += x * w;
        }
    }
    if before > 0 {
        inputs.copy_within(channels.., 0);
        inputs[(before - 1) * channels..].copy_from_slice(m);
    }
    kernels::silu(&mut y);
    m.copy_from_slice(&y);
}

/// The delta rule of one token, all heads. Queries and keys in `row` are normalised in place.
fn recur(
    row: &mut [f32],
    state: &mut [f32],
    out: &mut [f32],
    weights: &DeltaNetWeights,
    sizes: &LinearAttentionConfig,
) {
    let (dk, dv) = (sizes.key_head_dim, sizes.value_head_dim);
    let per_key = sizes.num_value_heads / sizes.num_key_heads;
    let (mixed, rest) = row.split_at_mut(sizes.conv_dim());
    let (b, a) = rest[sizes.value_dim()..].split_at(sizes.num_value_heads);
    let (q, rest) = mixed.split_at_mut(sizes.key_dim());
    let (k, v) = rest.split_at_mut(sizes.key_dim());
    for head in q.chunks_exact_mut(dk) {
        kernels::unit_length(head, L2_EPS, (dk as f32).powf(-0.5));
    }
    for head in k.chunks_exact_mut(dk) {
        kernels::unit_length(head, L2_EPS, 1.0);
    }
    for h in 0..sizes.num_value_heads {
        let decay = (weights.rate[h] * kernels::softplus(a[h] + weights.dt_bias[h])).exp();
        let key = h / per_key * dk;
        kernels::delta_step(
            &mut state[h * dk * dv..][..dk * dv],
            &mut out[h * dv..][..dv],
            &q[key..key + dk],
            &k[key..key + dk],
            &v[h * dv..][..dv],
            decay,
            kernels::sigmoid(b[h]),
        );
    }
}

/// `norm(out)·w·silu(z)` by head, in place.
fn gated_norm(out: &mut [f32], z: &[f32], weight: &[f32], eps: f32) {
    let mut gate = z.to_vec();
    kernels::silu(&mut gate);
    let x = out.to_vec();
    kernels::rms_norm_rows(out, &x, weight, eps);
    for (y, gate) in out.iter_mut().zip(&gate) {
        *y *= gate;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn convolution_over_rows_is_that_over_the_padded_sequence() {
        let (channels, taps, tokens) = (3, 4, 9);
        let value = |i: usize| ((i * 29 + 7) % 31) as f32 / 10.0 - 1.5;
        let x: Vec<f32> = (0..channels * tokens).map(value).collect();
        let weights: Vec<f32> = (0..channels * taps).map(|i| value(i + 100)).collect();
        let mut inputs = vec![0.0; (taps - 1) * channels];
        for t in 0..tokens {
            let mut row = x[t * channels..(t + 1) * channels].to_vec();
            convolve(&mut row, &mut inputs, &weights);
            for c in 0..channels {
                let sum: f64 = (0..taps)
                    .filter(|j| t + j + 1 >= taps)
                    .map(|j| {
                        f64::from(weights[j * channels + c]) * f64::from(x[(t + j + 1 - taps) * channels + c])
                    })
                    .sum();
                let want = sum / (1.0 + (-sum).exp());
                assert!((f64::from(row[c]) - want).abs() < 1e-5, "{t} {c}");
            }
        }
        // One tap: nothing is kept.
        let mut row = vec![2.0, 4.0];
        convolve(&mut row, &mut [], &[0.5, 0.25]);
        assert!((row[0] - 0.731_058_6).abs() < 1e-6 && row[0] == row[1]);
    }
}
