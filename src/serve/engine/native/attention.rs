//! Softmax attention of a step over the paged cache.
//!
//! Attention of few rows (decoding) reads the pages directly; the rows of a prompt chunk go through
//! libtorch's fused attention over gathered keys and values.

use super::{
    forward::{floats, floats_mut, Forward, Group, SequenceWork},
    kernels,
    pages::{PageId, PAGE_TOKENS},
    weights::AttentionWeights,
};
use tch::{Device, Kind, Tensor};

/// Rows from which a chunk's attention goes through libtorch.
pub(super) const GATHER_ROWS: usize = 8;

impl Forward {
    /// Projects, normalises, rotates and stores the new keys, then attends: `a [T,H]` → `[T, nq·d]`.
    pub(super) fn attention(
        &self,
        layer: usize,
        weights: &AttentionWeights,
        a: &Tensor,
        groups: &[Group],
    ) -> Tensor {
        let config = &self.shape.config;
        let (nq, nkv, d) = (
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
        );
        let mut qkv = match &weights.qkv_bias {
            Some(bias) => bias.addmm(a, &weights.qkv),
            None => a.mm(&weights.qkv),
        };
        let (half, eps) = (self.shape.half, config.rms_norm_eps as f32);
        let (rows, width) = (qkv.size()[0], qkv.size()[1] as usize);
        let mut out = Tensor::empty([rows, (nq * d) as i64], (Kind::Float, Device::Cpu));
        let qkv = floats_mut(&mut qkv);
        for group in groups {
            for i in 0..group.work.tokens.len() {
                let position = group.work.start + i;
                let row = &mut qkv[(group.first_row + i) * width..][..width];
                let cos = &self.shape.cos[position * half..][..half];
                let sin = &self.shape.sin[position * half..][..half];
                let (q, kv) = row.split_at_mut(nq * d);
                let (k, v) = kv[..2 * nkv * d].split_at_mut(nkv * d);
                for head in q.chunks_exact_mut(d) {
                    kernels::norm_and_rotate(head, weights.q_norm.as_deref(), eps, cos, sin);
                }
                let page = group.work.pages[position / PAGE_TOKENS];
                for (h, (k, v)) in k.chunks_exact_mut(d).zip(v.chunks_exact(d)).enumerate() {
                    kernels::norm_and_rotate(k, weights.k_norm.as_deref(), eps, cos, sin);
                    self.cache.write(layer, page, position % PAGE_TOKENS, h, k, v);
                }
            }
        }
        let out_floats = floats_mut(&mut out);
        let mut scores = Vec::new();
        for group in groups {
            let count = group.work.tokens.len();
            let out = &mut out_floats[group.first_row * nq * d..][..count * nq * d];
            let qkv = &qkv[group.first_row * width..][..count * width];
            match &group.mask {
                Some(mask) => self.attend_chunk(layer, group.work, mask, qkv, width, out),
                None => {
                    for (i, out) in out.chunks_exact_mut(nq * d).enumerate() {
                        let q = &qkv[i * width..][..nq * d];
                        self.attend_row(
                            layer,
                            &group.work.pages,
                            group.work.start + i + 1,
                            q,
                            out,
                            &mut scores,
                        );
                    }
                }
            }
        }
        out
    }

    /// Attention of one row over the first `length` tokens, straight from the pages.
    fn attend_row(
        &self,
        layer: usize,
        pages: &[PageId],
        length: usize,
        q: &[f32],
        out: &mut [f32],
        scores: &mut Vec<f32>,
    ) {
        let config = &self.shape.config;
        let (nkv, d) = (config.num_key_value_heads, config.head_dim);
        let per_head = config.num_attention_heads / nkv;
        let pages = &pages[..length.div_ceil(PAGE_TOKENS)];
        let stride = pages.len() * PAGE_TOKENS;
        let scale = (d as f32).powf(-0.5);
        scores.resize(per_head * stride, 0.0);
        for h in 0..nkv {
            let q = &q[h * per_head * d..][..per_head * d];
            let out = &mut out[h * per_head * d..][..per_head * d];
            for (p, page) in pages.iter().enumerate() {
                let keys = self.cache.keys(layer, *page, h);
                kernels::page_scores(&mut scores[p * PAGE_TOKENS..], stride, q, keys, scale);
            }
            for row in scores.chunks_exact_mut(stride) {
                kernels::softmax(&mut row[..length]);
            }
            out.fill(0.0);
            for (p, page) in pages.iter().enumerate() {
                let values = self.cache.values(layer, *page, h);
                let count = PAGE_TOKENS.min(length - p * PAGE_TOKENS);
                kernels::page_values(out, &scores[p * PAGE_TOKENS..], stride, values, count, d);
            }
        }
    }

    /// Attention of a chunk. Query heads that share a key head are stacked as rows, so keys are not copied.
    fn attend_chunk(
        &self,
        layer: usize,
        work: &SequenceWork,
        mask: &Tensor,
        qkv: &[f32],
        width: usize,
        out: &mut [f32],
    ) {
        let config = &self.shape.config;
        let (nq, nkv, d) = (
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
        );
        let per_head = nq / nkv;
        let count = work.tokens.len();
        let length = work.start + count;
        let new = |rows: usize| {
            let size = [1, nkv as i64, rows as i64, d as i64];
            Tensor::empty(size, (Kind::Float, Device::Cpu))
        };
        let (mut q, mut k, mut v) = (new(per_head * count), new(length), new(length));
        let (q_floats, k_floats, v_floats) = (floats_mut(&mut q), floats_mut(&mut k), floats_mut(&mut v));
        for h in 0..nkv {
            for g in 0..per_head {
                for i in 0..count {
                    let source = &qkv[i * width + (h * per_head + g) * d..][..d];
                    q_floats[((h * per_head + g) * count + i) * d..][..d].copy_from_slice(source);
                }
            }
            for (p, start) in (0..length).step_by(PAGE_TOKENS).enumerate() {
                let filled = PAGE_TOKENS.min(length - start);
                let keys = self.cache.keys(layer, work.pages[p], h);
                let values = self.cache.values(layer, work.pages[p], h);
                let at = (h * length + start) * d;
                v_floats[at..at + filled * d].copy_from_slice(&values[..filled * d]);
                for (slot, row) in k_floats[at..at + filled * d].chunks_exact_mut(d).enumerate() {
                    for (i, x) in row.iter_mut().enumerate() {
                        *x = keys[i * PAGE_TOKENS + slot];
                    }
                }
            }
        }
        let y = Tensor::scaled_dot_product_attention(&q, &k, &v, Some(mask), 0.0, false, None, false)
            .contiguous();
        let y = floats(&y);
        for head in 0..nq {
            for i in 0..count {
                out[i * nq * d + head * d..][..d].copy_from_slice(&y[(head * count + i) * d..][..d]);
            }
        }
    }

    /// Additive mask `[rows of the stacked heads, L]` of a chunk: row i sees the first `start + i + 1` keys.
    pub(super) fn chunk_mask(&self, work: &SequenceWork) -> Tensor {
        let config = &self.shape.config;
        let per_head = config.num_attention_heads / config.num_key_value_heads;
        let (count, length) = (work.tokens.len(), work.start + work.tokens.len());
        let mut values = vec![0.0f32; per_head * count * length];
        for (r, row) in values.chunks_exact_mut(length).enumerate() {
            row[work.start + r % count + 1..].fill(f32::NEG_INFINITY);
        }
        Tensor::from_slice(&values).view([(per_head * count) as i64, length as i64])
    }
}
