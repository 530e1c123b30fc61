//! Causal softmax attention within the segments of a packed row.
//!
//! One fused attention a segment. For 64 segments of 300 to 500 tokens (4 heads of 32) on a CPU this takes
//! 0.32 s of processor time forwards and backwards; padding the segments into one batch takes 0.40 s, and
//! cutting them out with `narrow` 0.58 s, because the gradient of every cut is as long as the whole row.
//! On CUDA in bf16 one kernel does all segments, however many.

use super::{
    exchange::{enough_heads, heads_to_tokens, tokens_to_heads},
    fused::{flash_attention, has_flash_attention},
    layout::rotate,
    norm::Norm,
    parameters::{Parameters, Projection},
    Exchange, PackedLayout,
};
use crate::model::hf::{ModelConfig, Rope};
use std::sync::Arc;
use tch::Tensor;

/// Attention of one layer: grouped queries (Ainslie et al., 2023), scale `d^-1/2`.
pub(super) struct Attention {
    q: Projection,
    k: Projection,
    v: Projection,
    o: Projection,
    head_dim: i64,
    rope: Rope,
    /// Norms of queries and keys, before they turn.
    qk_norm: Option<(Norm, Norm)>,
    /// Each head of `q` holds its query, then its gate: the head's output is multiplied by `σ(gate)`.
    output_gate: bool,
}

impl Attention {
    /// Without norms on the heads and without gate.
    pub(super) fn new(config: &ModelConfig, p: &Parameters) -> Self {
        Self {
            q: p.projection("self_attn.q_proj"),
            k: p.projection("self_attn.k_proj"),
            v: p.projection("self_attn.v_proj"),
            o: p.projection("self_attn.o_proj"),
            head_dim: config.head_dim as i64,
            rope: config.rope.clone(),
            qk_norm: None,
            output_gate: false,
        }
    }

    /// With norms on the heads of queries and keys.
    pub(super) fn with_qk_norm(mut self, q: Norm, k: Norm) -> Self {
        self.qk_norm = Some((q, k));
        self
    }

    /// With an output gate behind each query.
    pub(super) fn with_output_gate(mut self) -> Self {
        self.output_gate = true;
        self
    }

    pub(super) fn forward(&self, x: &Tensor, layout: &PackedLayout) -> Tensor {
        let tokens = x.size()[0];
        let heads = |t: &Tensor, width: i64| t.view([tokens, t.size()[1] / width, width]);
        let (q, gate) = if self.output_gate {
            let both = heads(&self.q.apply(x), 2 * self.head_dim).chunk(2, -1);
            (both[0].shallow_clone(), Some(both[1].shallow_clone()))
        } else {
            (heads(&self.q.apply(x), self.head_dim), None)
        };
        let k = heads(&self.k.apply(x), self.head_dim);
        let v = heads(&self.v.apply(x), self.head_dim);
        let (y, gate) = match layout.sequence_group() {
            None => (self.attend(&q, &k, &v, layout), gate),
            Some(group) => self.attend_over_ranks(&q, &k, &v, gate, layout, group),
        };
        match gate {
            Some(gate) => self.o.apply(&(y * gate.reshape([tokens, -1]).sigmoid())),
            None => self.o.apply(&y),
        }
    }

    /// All tokens of some heads: `q [T,nq,d]`, `k` and `v [T,nkv,d]` → `[T, nq*d]`.
    fn attend(&self, q: &Tensor, k: &Tensor, v: &Tensor, layout: &PackedLayout) -> Tensor {
        let (q, k) = match &self.qk_norm {
            Some((q_norm, k_norm)) => (q_norm.apply(q), k_norm.apply(k)),
            None => (q.shallow_clone(), k.shallow_clone()),
        };
        let (cos, sin) = layout.rope(&self.rope, q.kind());
        let (q, k) = (rotate(&q, &cos, &sin), rotate(&k, &cos, &sin));
        packed_attention(&q, &k, v, layout)
    }

    /// All heads of this rank's tokens, by way of all tokens of its heads. The gate crosses the exchange.
    fn attend_over_ranks(
        &self,
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
        gate: Option<Tensor>,
        layout: &PackedLayout,
        group: &Arc<dyn Exchange>,
    ) -> (Tensor, Option<Tensor>) {
        let (tokens, ranks) = (q.size()[0], group.size());
        let parts = [q.shallow_clone(), enough_heads(k, ranks), enough_heads(v, ranks)];
        let shares = parts.iter().map(|t| t.reshape([tokens, ranks, -1]));
        let widths = parts.each_ref().map(|t| t.size()[1] / ranks * self.head_dim);
        let together = Tensor::cat(&shares.collect::<Vec<_>>(), -1).view([tokens, -1]);
        let carry: Vec<&Tensor> = gate.iter().collect();
        let (mine, mut carried) = tokens_to_heads(layout, group, &together, &carry);
        let cut = mine.split_with_sizes(widths, -1);
        let heads = |t: &Tensor| t.reshape([t.size()[0], -1, self.head_dim]);
        let y = self.attend(&heads(&cut[0]), &heads(&cut[1]), &heads(&cut[2]), layout);
        (heads_to_tokens(layout, group, &y), carried.pop())
    }
}

/// `q [T,nq,d]`, `k` and `v [T,nkv,d]` → `[T, nq*d]`. Query head h reads key head `h / (nq/nkv)`.
fn packed_attention(q: &Tensor, k: &Tensor, v: &Tensor, layout: &PackedLayout) -> Tensor {
    let (tokens, query_heads, width) = (q.size()[0], q.size()[1], q.size()[1] * q.size()[2]);
    if let Some(memory) = layout.memory() {
        return memory.attend(q, k, v).reshape([tokens, width]);
    }
    if has_flash_attention(q) && tokens > 0 {
        let (starts, longest) = layout.starts();
        return flash_attention([q, k, v], &starts, &starts, longest, longest).reshape([tokens, width]);
    }
    let groups = query_heads / k.size()[1];
    let widen = |t: &Tensor| {
        if groups == 1 {
            t.shallow_clone()
        } else {
            t.repeat_interleave_self_int(groups, 1, None)
        }
    };
    let lengths: Vec<i64> = layout
        .segments()
        .map(|s| s.end - s.start)
        .filter(|n| *n > 0)
        .collect();
    if lengths.is_empty() {
        return q.reshape([tokens, width]);
    }
    let split = |t: &Tensor| t.split_with_sizes(&lengths[..], 0);
    let (q, k, v) = (split(q), split(&widen(k)), split(&widen(v)));
    let parts: Vec<Tensor> = q
        .iter()
        .zip(&k)
        .zip(&v)
        .map(|((q, k), v)| causal_attention(q, k, v))
        .collect();
    Tensor::cat(&parts, 0).reshape([tokens, width])
}

/// One segment: `[n,heads,d]` each.
fn causal_attention(q: &Tensor, k: &Tensor, v: &Tensor) -> Tensor {
    // [1, heads, n, d]: strides suffice, the kernel copies nothing.
    let batch = |t: &Tensor| t.transpose(0, 1).unsqueeze(0);
    let (q, k, v) = (batch(q), batch(k), batch(v));
    Tensor::scaled_dot_product_attention(&q, &k, &v, None::<Tensor>, 0.0, true, None, false)
        .squeeze_dim(0)
        .transpose(0, 1)
}
