//! The gated delta net: what mixes tokens in most layers of the hybrid families.
//!
//! ```text
//! m = [q|k|v](h), z, b, a                       projections
//! m_t = silu( Σ_j w_j ∘ m_{t-(K-1)+j} )         causal depthwise convolution, zeros before the segment
//! β = σ(b);   g = −e^{A_log}·softplus(a + dt_bias)      g at least f32
//! o = gated delta rule(q, k, v, g, β)                   at least f32, normalises the heads of q and k
//! y = ( norm(o)·w·silu(z) )·Woutᵀ
//! ```

use super::{
    delta_rule::{gated_delta_rule, gated_delta_rule_over_pieces},
    exchange::{enough_heads, heads_to_tokens, tokens_to_heads},
    layout::TapRows,
    norm::gated_norm,
    parameters::{Parameters, Projection},
    precision::wide,
    Exchange, PackedLayout,
};
use crate::model::hf::{LinearAttentionConfig, ModelConfig};
use std::sync::Arc;
use tch::Tensor;

/// Delta net of one layer.
pub(super) struct DeltaNet {
    sizes: LinearAttentionConfig,
    input: Input,
    /// `[channels,1,K]`.
    conv: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    norm: Tensor,
    eps: f64,
    out: Projection,
}

/// How the checkpoint keeps the input projections.
enum Input {
    /// Qwen3.5: one matrix each, all query heads, then all key heads, then all value heads in `qkv`.
    Separate {
        qkv: Projection,
        z: Projection,
        b: Projection,
        a: Projection,
    },
    /// Qwen3-Next: for every key head its query, its key, the values of its value heads, their gates; and
    /// for every key head the b, then the a of its value heads.
    ByKeyHead { qkvz: Projection, ba: Projection },
}

/// Parameters of the heads that a rank computes.
struct Share {
    /// `[channels,1,K]`.
    conv: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    /// Channels of queries, keys, values.
    widths: [i64; 3],
}

impl Share {
    fn whole(net: &DeltaNet) -> Self {
        let (key_dim, value_dim) = (net.sizes.key_dim() as i64, net.sizes.value_dim() as i64);
        Self {
            conv: net.conv.shallow_clone(),
            a_log: net.a_log.shallow_clone(),
            dt_bias: net.dt_bias.shallow_clone(),
            widths: [key_dim, key_dim, value_dim],
        }
    }
}

/// What the projections give for `[T,H]`.
struct Projected {
    /// `[T,channels]`: queries, keys, values.
    mixed: Tensor,
    /// `[T,Hv,dv]`.
    z: Tensor,
    /// `[T,Hv]`.
    b: Tensor,
    /// `[T,Hv]`.
    a: Tensor,
}

impl DeltaNet {
    /// With separate projections.
    pub(super) fn separate(config: &ModelConfig, p: &Parameters) -> Self {
        let projection = |name: &str| p.projection(&format!("linear_attn.in_proj_{name}"));
        let input = Input::Separate {
            qkv: projection("qkv"),
            z: projection("z"),
            b: projection("b"),
            a: projection("a"),
        };
        Self::new(config, p, input)
    }

    /// With projections ordered by key head.
    pub(super) fn by_key_head(config: &ModelConfig, p: &Parameters) -> Self {
        let input = Input::ByKeyHead {
            qkvz: p.projection("linear_attn.in_proj_qkvz"),
            ba: p.projection("linear_attn.in_proj_ba"),
        };
        Self::new(config, p, input)
    }

    fn new(config: &ModelConfig, p: &Parameters, input: Input) -> Self {
        let Some(sizes) = config.linear_attention else {
            unreachable!("a layer of linear attention comes from a config with its sizes")
        };
        Self {
            sizes,
            input,
            conv: p.tensor("linear_attn.conv1d.weight"),
            a_log: p.tensor("linear_attn.A_log"),
            dt_bias: p.tensor("linear_attn.dt_bias"),
            norm: p.tensor("linear_attn.norm.weight"),
            eps: config.rms_norm_eps,
            out: p.projection("linear_attn.out_proj"),
        }
    }

    pub(super) fn forward(&self, x: &Tensor, layout: &PackedLayout) -> Tensor {
        let tokens = x.size()[0];
        if tokens == 0 {
            return x.shallow_clone();
        }
        let s = &self.sizes;
        let projected = self.project(x);
        let (o, z) = match layout.sequence_group() {
            None => (self.mix(&projected, &Share::whole(self), layout), projected.z),
            Some(group) => self.mix_over_ranks(&projected, layout, group),
        };
        let value_dim = s.value_dim() as i64;
        let o = o.view([tokens, -1, s.value_head_dim as i64]);
        let y = gated_norm(&o.to_kind(x.kind()), &z, &self.norm, self.eps);
        self.out.apply(&y.reshape([tokens, value_dim]))
    }

    /// All tokens of some heads: convolution and delta rule. `[T, Hv*dv]` of these heads, at least f32.
    fn mix(&self, projected: &Projected, share: &Share, layout: &PackedLayout) -> Tensor {
        let s = &self.sizes;
        let tokens = projected.mixed.size()[0];
        let mut before = layout.memory().map(|memory| memory.recall());
        let mixed = match &mut before {
            None => convolve(&projected.mixed, &share.conv, layout),
            Some(before) => {
                let rows = layout.tap_rows(share.conv.size()[2]);
                convolve_pieces(&projected.mixed, &share.conv, rows, &mut before.inputs)
            }
        };
        let parts = mixed.silu().split_with_sizes(share.widths, -1);
        let heads = |t: &Tensor, width: usize| t.reshape([tokens, -1, width as i64]);
        let beta = projected.b.sigmoid();
        let a = wide(&projected.a);
        let (a_log, dt_bias) = (share.a_log.to_kind(a.kind()), share.dt_bias.to_kind(a.kind()));
        let g = -a_log.exp() * (a + dt_bias).softplus();
        let (q, k, v) = (
            heads(&parts[0], s.key_head_dim),
            heads(&parts[1], s.key_head_dim),
            heads(&parts[2], s.value_head_dim),
        );
        let o = match (layout.memory(), before) {
            (Some(memory), Some(mut kept)) => {
                let grid = layout.piece_grid();
                let o = gated_delta_rule_over_pieces(&q, &k, &v, &g, &beta, grid, &mut kept.state);
                memory.keep(kept);
                o
            }
            _ => gated_delta_rule(&q, &k, &v, &g, &beta, layout.chunk_grid()),
        };
        o.reshape([tokens, -1])
    }

    /// All heads of this rank's tokens, by way of all tokens of its heads. The gate `z` belongs to tokens
    /// and crosses the exchange.
    fn mix_over_ranks(
        &self,
        projected: &Projected,
        layout: &PackedLayout,
        group: &Arc<dyn Exchange>,
    ) -> (Tensor, Tensor) {
        let s = &self.sizes;
        let ranks = group.size();
        let tokens = projected.mixed.size()[0];
        let (key_dim, value_dim) = (s.key_dim() as i64, s.value_dim() as i64);
        let parts = projected
            .mixed
            .split_with_sizes([key_dim, key_dim, value_dim], -1);
        let keys = |t: &Tensor| enough_heads(&t.view([tokens, -1, s.key_head_dim as i64]), ranks);
        let all = [
            keys(&parts[0]),
            keys(&parts[1]),
            parts[2].shallow_clone(),
            projected.b.shallow_clone(),
            projected.a.shallow_clone(),
        ];
        let shares: Vec<Tensor> = all.iter().map(|t| t.reshape([tokens, ranks, -1])).collect();
        let widths = [0, 1, 2, 3, 4].map(|i: usize| shares[i].size()[2]);
        let together = Tensor::cat(&shares, -1).view([tokens, -1]);
        let (mine, mut carried) = tokens_to_heads(layout, group, &together, &[&projected.z]);
        let mixed_width = widths[0] + widths[1] + widths[2];
        let cut = mine.split_with_sizes([mixed_width, widths[3], widths[4]], -1);
        let own = Projected {
            mixed: cut[0].shallow_clone(),
            z: carried.remove(0),
            b: cut[1].shallow_clone(),
            a: cut[2].shallow_clone(),
        };
        let share = self.share(group.place(), ranks);
        let o = self.mix(&own, &share, layout);
        (heads_to_tokens(layout, group, &o), own.z)
    }

    /// The parameters of the heads of one of `ranks` ranks.
    fn share(&self, place: i64, ranks: i64) -> Share {
        let s = &self.sizes;
        let (dk, key_heads) = (s.key_head_dim as i64, s.num_key_heads as i64);
        let (key_dim, value_dim) = (s.key_dim() as i64, s.value_dim() as i64);
        // A key head serves a run of value heads; where there are fewer than ranks, several ranks use it.
        let own_keys = (key_heads / ranks).max(1);
        let first_key = place * key_heads / ranks;
        let own_values = value_dim / ranks;
        let rows = |start: i64, count: i64| self.conv.narrow(0, start, count);
        let conv = Tensor::cat(
            &[
                rows(first_key * dk, own_keys * dk),
                rows(key_dim + first_key * dk, own_keys * dk),
                rows(2 * key_dim + place * own_values, own_values),
            ],
            0,
        );
        let heads = s.num_value_heads as i64 / ranks;
        Share {
            conv,
            a_log: self.a_log.narrow(0, place * heads, heads),
            dt_bias: self.dt_bias.narrow(0, place * heads, heads),
            widths: [own_keys * dk, own_keys * dk, own_values],
        }
    }

    fn project(&self, x: &Tensor) -> Projected {
        let s = &self.sizes;
        let tokens = x.size()[0];
        let (dk, dv) = (s.key_head_dim as i64, s.value_head_dim as i64);
        let (key_heads, value_heads) = (s.num_key_heads as i64, s.num_value_heads as i64);
        let groups = value_heads / key_heads;
        match &self.input {
            Input::Separate { qkv, z, b, a } => Projected {
                mixed: qkv.apply(x),
                z: z.apply(x).view([tokens, value_heads, dv]),
                b: b.apply(x),
                a: a.apply(x),
            },
            Input::ByKeyHead { qkvz, ba } => {
                let qkvz = qkvz.apply(x).view([tokens, key_heads, -1]);
                let parts = qkvz.split_with_sizes([dk, dk, groups * dv, groups * dv], -1);
                let flat = |t: &Tensor| t.reshape([tokens, -1]);
                let ba = ba.apply(x).view([tokens, key_heads, 2, groups]).unbind(2);
                Projected {
                    mixed: Tensor::cat(&[flat(&parts[0]), flat(&parts[1]), flat(&parts[2])], -1),
                    z: parts[3].reshape([tokens, value_heads, dv]),
                    b: flat(&ba[0]),
                    a: flat(&ba[1]),
                }
            }
        }
    }
}

/// `y_t = Σ_j w[·,0,j] ∘ x_{t-(K-1)+j}` over the tokens of the same segment.
fn convolve(x: &Tensor, weight: &Tensor, layout: &PackedLayout) -> Tensor {
    let (tokens, taps) = (x.size()[0], weight.size()[2]);
    let weight = weight.to_kind(x.kind());
    let positions = layout.positions().unsqueeze(-1);
    let mut y = x * weight.select(2, taps - 1).view([1, -1]);
    for back in 1..taps.min(tokens) {
        let shifted = x.narrow(0, 0, tokens - back).constant_pad_nd([0, 0, back, 0]);
        let inside = positions.ge(back).to_kind(x.kind());
        y = &y + shifted * inside * weight.select(2, taps - 1 - back).view([1, -1]);
    }
    y
}

/// The same over pieces of texts, behind `kept [pieces,K-1,channels]`, which moves on to the ends of the pieces.
fn convolve_pieces(x: &Tensor, weight: &Tensor, rows: &TapRows, kept: &mut Tensor) -> Tensor {
    let weight = weight.to_kind(x.kind());
    let taps = weight.size()[2];
    let all = Tensor::cat(&[&kept.flatten(0, 1), x], 0);
    let mut y = x * weight.select(2, taps - 1).view([1, -1]);
    for (back, rows) in (1..).zip(&rows.back) {
        y += all.index_select(0, rows) * weight.select(2, taps - 1 - back).view([1, -1]);
    }
    *kept = all.index_select(0, &rows.kept).view_as(kept);
    y
}

#[cfg(test)]
mod tests {
    use super::*;
    use tch::{Device, Kind};

    #[test]
    fn a_convolution_over_pieces_is_that_over_the_whole() {
        for taps in [1i64, 2, 4] {
            let (channels, lengths) = (3i64, [9usize, 5]);
            let wave = |n: i64, phase: f64| {
                let steps = Tensor::arange(n, (Kind::Double, Device::Cpu));
                (steps * 1.7 + phase).sin()
            };
            let x = wave(14 * channels, 0.3).view([14, channels]);
            let weight = wave(channels * taps, 0.9).view([channels, 1, taps]);
            let want = convolve(&x, &weight, &PackedLayout::new(&lengths, Device::Cpu));
            let starts = [0, 9];
            // Pieces shorter than the taps, of one text and of both.
            let rounds: [&[(usize, i64)]; 5] = [
                &[(0, 1)],
                &[(1, 2), (0, 4)],
                &[(1, 1), (0, 1)],
                &[(0, 2)],
                &[(1, 2), (0, 1)],
            ];
            let mut kept = Tensor::zeros([2, taps - 1, channels], (Kind::Double, Device::Cpu));
            let mut done = [0, 0];
            for round in rounds {
                let mut rows = Vec::new();
                let mut pieces = Vec::new();
                for (text, length) in round {
                    let from = starts[*text] + done[*text];
                    pieces.push(rows.len() as i64..rows.len() as i64 + length);
                    rows.extend(from..from + length);
                    done[*text] += length;
                }
                let texts: Vec<i64> = round.iter().map(|(text, _)| *text as i64).collect();
                let (rows, texts) = (Tensor::from_slice(&rows), Tensor::from_slice(&texts));
                let taps = TapRows::new(pieces.into_iter(), taps, Device::Cpu);
                let mut here = kept.index_select(0, &texts);
                let y = convolve_pieces(&x.index_select(0, &rows), &weight, &taps, &mut here);
                let _ = kept.index_copy_(0, &texts, &here);
                assert!(
                    y.allclose(&want.index_select(0, &rows), 1e-15, 1e-15, false),
                    "{round:?}"
                );
            }
            assert_eq!(done, [9, 5]);
        }
    }
}
