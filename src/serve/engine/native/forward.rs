//! One step of the network over tokens of many sequences, with the KV cache.
//!
//! All tokens of a worker's share are rows of one matrix, so every projection is one product whatever mix
//! of decoding and prompts the step holds. Between the products [`super::kernels`] work on the rows.
//! Attention of few rows (decoding) reads the pages directly; the rows of a prompt chunk go through
//! libtorch's fused attention over gathered keys and values.

use super::{
    cache::KvCache,
    kernels,
    pages::{PageId, PAGE_TOKENS},
    sampler::{self, Draw},
    weights::{EngineWeights, LayerWeights},
};
use crate::{base::SamplingParams, model::hf::ModelConfig};
use std::sync::Arc;
use tch::{Device, Kind, Tensor};

/// Rows from which a chunk's attention goes through libtorch.
const GATHER_ROWS: usize = 8;

/// Tokens of one sequence in a step, with all that computing them needs.
pub(super) struct SequenceWork {
    /// Position of the first token.
    pub start: usize,
    /// Tokens to compute.
    pub tokens: Vec<u32>,
    /// Pages of the whole sequence.
    pub pages: Vec<PageId>,
    /// How to draw the next token behind the last one; None in the middle of a prompt.
    pub sample: Option<(SamplingParams, f64)>,
}

/// Numbers that never change.
pub(super) struct Shape {
    pub config: ModelConfig,
    /// Rotary table, `[max_model_len][d/2]` each.
    pub cos: Vec<f32>,
    pub sin: Vec<f32>,
}

impl Shape {
    pub(super) fn new(config: ModelConfig, max_model_len: usize) -> Self {
        let positions = Tensor::arange(max_model_len as i64, (Kind::Int64, Device::Cpu));
        let (cos, sin) = crate::model::net::rope_table(&positions, &config.rope);
        let half = config.head_dim / 2;
        let take = |t: Tensor| {
            let t = t.squeeze_dim(1).narrow(1, 0, half as i64).contiguous();
            let mut values = vec![0.0f32; max_model_len * half];
            t.copy_data(&mut values, max_model_len * half);
            values
        };
        Self {
            cos: take(cos),
            sin: take(sin),
            config,
        }
    }
}

/// Computes shares of steps. One a thread.
pub(super) struct Forward {
    pub shape: Arc<Shape>,
    pub cache: Arc<KvCache>,
    pub weights: EngineWeights,
}

/// Rows of one sequence within the share.
struct Group<'a> {
    first_row: usize,
    work: &'a SequenceWork,
    /// Which keys each row may see, `[groups * rows, L]`; made for chunks.
    mask: Option<Tensor>,
}

impl Forward {
    /// Computes a share and draws a token for every sequence that samples, in order. None stands for
    /// logits that are not finite.
    pub(super) fn step(&self, share: &[SequenceWork]) -> Vec<Option<Draw>> {
        let _guard = tch::no_grad_guard();
        let config = &self.shape.config;
        let mut ids: Vec<i64> = Vec::new();
        let mut groups = Vec::with_capacity(share.len());
        let mut last_rows: Vec<i64> = Vec::new();
        for work in share {
            let first_row = ids.len();
            ids.extend(work.tokens.iter().map(|t| i64::from(*t)));
            if work.sample.is_some() {
                last_rows.push(ids.len() as i64 - 1);
            }
            groups.push(Group {
                first_row,
                mask: (work.tokens.len() >= GATHER_ROWS).then(|| self.chunk_mask(work)),
                work,
            });
        }
        let mut x = self.weights.embedding.index_select(0, &Tensor::from_slice(&ids));
        let eps = config.rms_norm_eps as f32;
        for (layer, weights) in self.weights.layers.iter().enumerate() {
            let a = rms_norm(&x, &weights.input_norm, eps);
            let mut qkv = match &weights.qkv_bias {
                Some(bias) => bias.addmm(&a, &weights.qkv),
                None => a.mm(&weights.qkv),
            };
            let attended = self.attention(layer, weights, &mut qkv, &groups);
            x = x.addmm(&attended, &weights.o);
            if let Some(bias) = &weights.o_bias {
                x += bias;
            }
            let m = rms_norm(&x, &weights.post_norm, eps);
            let gate_up = m.mm(&weights.gate_up);
            let inner = config.intermediate_size;
            let mut y = Tensor::empty([ids.len() as i64, inner as i64], (Kind::Float, Device::Cpu));
            kernels::silu_mul(floats_mut(&mut y), floats(&gate_up), inner);
            x = x.addmm(&y, &weights.down);
        }
        if last_rows.is_empty() {
            return Vec::new();
        }
        let rows = x.index_select(0, &Tensor::from_slice(&last_rows));
        let logits = rms_norm(&rows, &self.weights.norm, eps).mm(&self.weights.head);
        draw_rows(&logits, share)
    }

    /// Normalises, rotates and stores the new keys, then attends: `qkv [T, (nq+2nkv)·d]` → `[T, nq·d]`.
    fn attention(&self, layer: usize, weights: &LayerWeights, qkv: &mut Tensor, groups: &[Group]) -> Tensor {
        let config = &self.shape.config;
        let (nq, nkv, d) = (
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
        );
        let (half, width, eps) = (d / 2, (nq + 2 * nkv) * d, config.rms_norm_eps as f32);
        let rows = qkv.size()[0];
        let mut out = Tensor::empty([rows, (nq * d) as i64], (Kind::Float, Device::Cpu));
        let qkv = floats_mut(qkv);
        for group in groups {
            for i in 0..group.work.tokens.len() {
                let position = group.work.start + i;
                let row = &mut qkv[(group.first_row + i) * width..][..width];
                let cos = &self.shape.cos[position * half..][..half];
                let sin = &self.shape.sin[position * half..][..half];
                let (q, kv) = row.split_at_mut(nq * d);
                let (k, v) = kv.split_at_mut(nkv * d);
                for head in q.chunks_exact_mut(d) {
                    kernels::norm_and_rotate(head, &weights.q_norm, eps, cos, sin);
                }
                let page = group.work.pages[position / PAGE_TOKENS];
                for (h, (k, v)) in k.chunks_exact_mut(d).zip(v.chunks_exact(d)).enumerate() {
                    kernels::norm_and_rotate(k, &weights.k_norm, eps, cos, sin);
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
                Some(mask) => self.attend_chunk(layer, group.work, mask, qkv, out),
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
    fn attend_chunk(&self, layer: usize, work: &SequenceWork, mask: &Tensor, qkv: &[f32], out: &mut [f32]) {
        let config = &self.shape.config;
        let (nq, nkv, d) = (
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
        );
        let (per_head, width) = (nq / nkv, (nq + 2 * nkv) * d);
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
    fn chunk_mask(&self, work: &SequenceWork) -> Tensor {
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

/// Draws from the rows of `logits [R,V]`, one for each sequence that samples.
fn draw_rows(logits: &Tensor, share: &[SequenceWork]) -> Vec<Option<Draw>> {
    let samples: Vec<_> = share.iter().filter_map(|w| w.sample).collect();
    let divisors: Vec<f32> = samples
        .iter()
        .map(|(params, _)| sampler::divisor(params))
        .collect();
    let scaled = logits / Tensor::from_slice(&divisors).unsqueeze(-1);
    let logprobs = scaled.log_softmax(-1, Kind::Float);
    let rows = floats(&logprobs).chunks_exact(logits.size()[1] as usize);
    rows.zip(samples)
        .map(|(row, (params, uniform))| sampler::draw(row, &params, uniform))
        .collect()
}

fn rms_norm(x: &Tensor, weight: &[f32], eps: f32) -> Tensor {
    let mut y = x.empty_like();
    kernels::rms_norm_rows(floats_mut(&mut y), floats(x), weight, eps);
    y
}

/// The memory of a contiguous f32 tensor on the CPU.
fn floats(t: &Tensor) -> &[f32] {
    check(t);
    // SAFETY: `check` made sure that the tensor is numel() f32 values in a row in host memory; the borrow
    // of the handle keeps the memory alive, and no other handle writes it meanwhile.
    unsafe { std::slice::from_raw_parts(t.data_ptr().cast::<f32>(), t.numel()) }
}

/// [`floats`] to write to. Only for tensors that were made for the purpose and have no second handle.
fn floats_mut(t: &mut Tensor) -> &mut [f32] {
    check(t);
    // SAFETY: as in `floats`; the exclusive borrow and the caller's single handle rule out aliases.
    unsafe { std::slice::from_raw_parts_mut(t.data_ptr().cast::<f32>(), t.numel()) }
}

fn check(t: &Tensor) {
    assert!(t.is_contiguous() && t.kind() == Kind::Float && t.device() == Device::Cpu);
}
