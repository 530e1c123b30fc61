//! One step of the host's own network over tokens of many sequences, with the KV cache: the families without
//! a delta net, in f32.
//!
//! All tokens of a worker's share are rows of one matrix, so every projection is one product whatever mix
//! of decoding and prompts the step holds. Between the products [`super::kernels`] work on the rows; what
//! needs memory of earlier tokens is in [`super::attention`].

use super::{
    attention::GATHER_ROWS,
    cache::{KvCache, RoutingMemory},
    kernels,
    pages::PageId,
    sampler::{self, Draw},
    states::SlotId,
    weights::{EngineWeights, MlpWeights},
    workers::Network,
};
use crate::{base::SamplingParams, model::hf::ModelConfig};
use std::sync::Arc;
use tch::{Device, Kind, Tensor};

/// Tokens of one sequence in a step, with all that computing them needs.
pub(super) struct SequenceWork {
    /// Position of the first token.
    pub start: usize,
    /// Tokens to compute.
    pub tokens: Vec<u32>,
    /// Pages of the whole sequence.
    pub pages: Vec<PageId>,
    /// Delta-net state behind the tokens before `start`; None for models without.
    pub state: Option<SlotId>,
    /// How to draw the next token behind the last one; None in the middle of a prompt.
    pub sample: Option<(SamplingParams, f64)>,
}

/// Numbers that never change.
pub(super) struct Shape {
    pub config: ModelConfig,
    /// Rotating pairs of a head.
    pub half: usize,
    /// Rotary table, `[max_model_len][half]` each.
    pub cos: Vec<f32>,
    pub sin: Vec<f32>,
}

impl Shape {
    pub(super) fn new(config: ModelConfig, max_model_len: usize) -> Self {
        let positions = Tensor::arange(max_model_len as i64, (Kind::Int64, Device::Cpu));
        let (cos, sin) = crate::model::net::rope_table(&positions, &config.rope);
        let half = config.rope.dim / 2;
        let take = |t: Tensor| {
            let t = t.squeeze_dim(1).narrow(1, 0, half as i64).contiguous();
            let mut values = vec![0.0f32; max_model_len * half];
            t.copy_data(&mut values, max_model_len * half);
            values
        };
        Self {
            half,
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
    pub routing: Arc<RoutingMemory>,
    pub weights: EngineWeights,
}

/// Rows of one sequence within the share.
pub(super) struct Group<'a> {
    pub first_row: usize,
    pub work: &'a SequenceWork,
    /// Which keys each row may see, `[groups * rows, L]`; made for chunks.
    pub mask: Option<Tensor>,
}

impl Forward {
    /// The same cache under other weights.
    pub(super) fn with_weights(&self, weights: EngineWeights) -> Self {
        Self {
            shape: self.shape.clone(),
            cache: self.cache.clone(),
            routing: self.routing.clone(),
            weights,
        }
    }
}

impl Network for Forward {
    fn share(&self) -> Self {
        self.with_weights(self.weights.share())
    }

    fn step(&self, share: &[SequenceWork]) -> Vec<Option<Draw>> {
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
        let mut sparse_layer = 0;
        for (layer, weights) in self.weights.layers.iter().enumerate() {
            let a = rms_norm(&x, &weights.input_norm, eps);
            let attended = self.attention(layer, &weights.attention, &a, &groups);
            x = x.addmm(&attended, &weights.attention.o);
            if let Some(bias) = &weights.attention.o_bias {
                x += bias;
            }
            let m = rms_norm(&x, &weights.post_norm, eps);
            match &weights.mlp {
                MlpWeights::Dense(weights) => {
                    x = x.addmm(&weights.inner(&m), &weights.down);
                    if let Some((_, bias)) = &weights.bias {
                        x += bias;
                    }
                }
                MlpWeights::Sparse(weights) => {
                    x += self.sparse_mlp(sparse_layer, weights, &m, &groups);
                    sparse_layer += 1;
                }
            }
        }
        if last_rows.is_empty() {
            return Vec::new();
        }
        let rows = x.index_select(0, &Tensor::from_slice(&last_rows));
        let logits = rms_norm(&rows, &self.weights.norm, eps).mm(&self.weights.head);
        draw_rows(&logits, share)
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

pub(super) fn rms_norm(x: &Tensor, weight: &[f32], eps: f32) -> Tensor {
    let mut y = x.empty_like();
    kernels::rms_norm_rows(floats_mut(&mut y), floats(x), weight, eps);
    y
}

/// The memory of a contiguous f32 tensor on the CPU.
pub(super) fn floats(t: &Tensor) -> &[f32] {
    check(t);
    if t.numel() == 0 {
        // Its address is null.
        return &[];
    }
    // SAFETY: `check` made sure that the tensor is numel() f32 values in a row in host memory; the borrow
    // of the handle keeps the memory alive, and no other handle writes it meanwhile.
    unsafe { std::slice::from_raw_parts(t.data_ptr().cast::<f32>(), t.numel()) }
}

/// [`floats`] to write to. Only for tensors that were made for the purpose and have no second handle.
pub(super) fn floats_mut(t: &mut Tensor) -> &mut [f32] {
    check(t);
    if t.numel() == 0 {
        return &mut [];
    }
    // SAFETY: as in `floats`; the exclusive borrow and the caller's single handle rule out aliases.
    unsafe { std::slice::from_raw_parts_mut(t.data_ptr().cast::<f32>(), t.numel()) }
}

fn check(t: &Tensor) {
    assert!(t.is_contiguous() && t.kind() == Kind::Float && t.device() == Device::Cpu);
}
