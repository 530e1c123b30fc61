//! The network of a step on a GPU: attention families, in bf16 or f32.
//!
//! The blocks are those of [`crate::model::net`], which the trainer uses as well; what they attend to
//! comes from here. Keys and values of all tokens lie on the device, one row a token and one pair of
//! tensors a layer; page p of the pool is the rows `16·p …`. A step uploads its tokens and row numbers in
//! two pieces, gathers the rows that its sequences see, and attends to all of them in one kernel (bf16) or
//! sequence by sequence (f32). Sampled ids and log-probabilities come back in one piece.
//!
//! Every operation is a launch of its own, so that small batches wait for the host and not for the device.

use super::{
    cache::RoutingMemory,
    forward::SequenceWork,
    pages::{PageId, PAGE_TOKENS},
    sampler::{self, Draw},
};
use crate::{
    base::{SamplingParams, WeightError, WeightTensor},
    model::{
        hf::ModelConfig,
        net::{
            flash_attention, has_flash_attention, AttentionMemory, ComputeType, Device, PackedLayout, Policy,
        },
    },
};
use std::{cell::Cell, rc::Rc};
use tch::{Kind, Tensor};

/// Weights and cache of a replica on its device.
pub(super) struct DeviceNetwork {
    policy: Policy,
    /// `[rows, nkv, d]` by attending layer.
    keys: Vec<Tensor>,
    values: Vec<Tensor>,
    routing: RoutingMemory,
}

/// Why a replica could not be set up on its device.
#[derive(Debug)]
pub(super) enum DeviceError {
    Weights(WeightError),
    /// Bytes of the cache, and what was said.
    Memory(u64, String),
}

impl From<WeightError> for DeviceError {
    fn from(error: WeightError) -> Self {
        Self::Weights(error)
    }
}

/// Row of a token in the cache.
fn row_of(pages: &[PageId], position: usize) -> i64 {
    (pages[position / PAGE_TOKENS].0 as usize * PAGE_TOKENS + position % PAGE_TOKENS) as i64
}

impl DeviceNetwork {
    /// With a zeroed cache of `num_pages` pages. The family must have no delta net.
    ///
    /// # Errors
    /// Weights that do not belong to the family, or memory that the device or the host does not have.
    pub(super) fn new(
        config: &ModelConfig,
        tensors: &[WeightTensor],
        (device, compute): (Device, ComputeType),
        num_pages: usize,
    ) -> Result<Self, DeviceError> {
        let kind = compute.kind_for(config);
        let policy = Policy::for_inference(config.clone(), tensors, device, compute)?;
        let rows = (num_pages * PAGE_TOKENS) as i64;
        let size = [rows, config.num_key_value_heads as i64, config.head_dim as i64];
        let layer_bytes = size.iter().product::<i64>() as u64 * kind.elt_size_in_bytes() as u64;
        let bytes = layer_bytes.saturating_mul(2 * config.num_hidden_layers as u64);
        let cache = || {
            let layer = |_| Tensor::f_zeros(size, (kind, device));
            let layers: Result<Vec<Tensor>, _> = (0..config.num_hidden_layers).map(layer).collect();
            layers.map_err(|error| {
                // The rest of libtorch's text is a list of its own functions.
                let text = error.to_string();
                DeviceError::Memory(bytes, text.lines().next().unwrap_or_default().to_owned())
            })
        };
        let top_k = config.experts.map_or(0, |e| e.top_k);
        Ok(Self {
            policy,
            keys: cache()?,
            values: cache()?,
            routing: RoutingMemory::new(config.num_sparse_layers(), top_k, num_pages)
                .map_err(|none| DeviceError::Memory(none.0, "the host gives no more".into()))?,
        })
    }

    /// Uses these weights from the next step on.
    pub(super) fn set_weights(&self, tensors: &[WeightTensor]) -> Result<(), WeightError> {
        self.policy.copy_from(tensors)
    }

    /// Experts of the cached tokens.
    pub(super) fn routing(&self) -> &RoutingMemory {
        &self.routing
    }

    /// Computes a step; the draws come in the order of the sequences that sample. None stands for logits
    /// that are not finite.
    pub(super) fn step(&self, works: &[SequenceWork]) -> Vec<Option<Draw>> {
        let _guard = tch::no_grad_guard();
        let device = self.policy.device();
        let rows = Rows::of(works);
        let packed = Tensor::from_slice(&rows.packed()).to_device(device);
        let parts = packed.split_with_sizes(rows.lengths(), 0);
        let starts: Vec<i32> = [&rows.query_starts[..], &rows.key_starts[..]].concat();
        let starts = Tensor::from_slice(&starts).to_device(device).chunk(2, 0);
        let memory = StepMemory {
            keys: self.keys.iter().map(Tensor::shallow_clone).collect(),
            values: self.values.iter().map(Tensor::shallow_clone).collect(),
            new: parts[2].shallow_clone(),
            visible: parts[3].shallow_clone(),
            query_starts: starts[0].shallow_clone(),
            key_starts: starts[1].shallow_clone(),
            spans: rows.spans(),
            layer: Cell::new(0),
        };
        let layout = PackedLayout::over_memory(parts[1].shallow_clone(), Rc::new(memory));
        if self.routing.width() > 0 {
            layout.start_recording();
        }
        let mut x = self.policy.embed(&parts[0]);
        for block in self.policy.blocks() {
            x = block.forward(&x, &layout);
        }
        self.store_routing(works, &layout);
        if rows.sampling.is_empty() {
            return Vec::new();
        }
        let last = x.index_select(0, &parts[4]);
        let logits = self.policy.logits(&self.policy.final_norm(&last));
        let samples: Vec<_> = works.iter().filter_map(|w| w.sample).collect();
        draw_rows(&logits, &samples)
    }

    fn store_routing(&self, works: &[SequenceWork], layout: &PackedLayout) {
        for (layer, routing) in layout.recorded().iter().enumerate() {
            let experts = routing.experts.to_device(Device::Cpu).contiguous().view(-1);
            let mut numbers = vec![0i64; experts.numel()];
            experts.copy_data(&mut numbers, experts.numel());
            let numbers: Vec<u16> = numbers.iter().map(|e| *e as u16).collect();
            let top_k = routing.experts.size()[1] as usize;
            let mut tokens = numbers.chunks_exact(top_k);
            for work in works {
                for (i, experts) in tokens.by_ref().take(work.tokens.len()).enumerate() {
                    let position = work.start + i;
                    let page = work.pages[position / PAGE_TOKENS];
                    self.routing.write(page, position % PAGE_TOKENS, layer, experts);
                }
            }
        }
    }
}

/// What a step uploads.
#[derive(Default)]
struct Rows {
    ids: Vec<i64>,
    positions: Vec<i64>,
    /// Cache rows of the tokens of the step.
    new: Vec<i64>,
    /// Cache rows of all tokens of its sequences up to their last one.
    visible: Vec<i64>,
    /// Rows whose output is sampled from.
    sampling: Vec<i64>,
    query_starts: Vec<i32>,
    key_starts: Vec<i32>,
}

impl Rows {
    fn of(works: &[SequenceWork]) -> Self {
        let mut rows = Self::default();
        rows.query_starts.push(0);
        rows.key_starts.push(0);
        for work in works {
            let length = work.start + work.tokens.len();
            rows.ids.extend(work.tokens.iter().map(|t| i64::from(*t)));
            rows.positions.extend(work.start as i64..length as i64);
            rows.visible.extend((0..length).map(|p| row_of(&work.pages, p)));
            let new = rows.visible.len() - work.tokens.len();
            let new: Vec<i64> = rows.visible[new..].to_vec();
            rows.new.extend(new);
            if work.sample.is_some() {
                rows.sampling.push(rows.ids.len() as i64 - 1);
            }
            rows.query_starts.push(rows.ids.len() as i32);
            rows.key_starts.push(rows.visible.len() as i32);
        }
        rows
    }

    /// The integers in the order of [`Rows::lengths`].
    fn packed(&self) -> Vec<i64> {
        [
            &self.ids[..],
            &self.positions,
            &self.new,
            &self.visible,
            &self.sampling,
        ]
        .concat()
    }

    fn lengths(&self) -> [i64; 5] {
        [
            &self.ids,
            &self.positions,
            &self.new,
            &self.visible,
            &self.sampling,
        ]
        .map(|v| v.len() as i64)
    }

    /// Queries and keys of each sequence.
    fn spans(&self) -> Vec<(i64, i64)> {
        let lengths = |starts: &[i32]| starts.windows(2).map(|w| i64::from(w[1] - w[0])).collect();
        let (queries, keys): (Vec<i64>, Vec<i64>) = (lengths(&self.query_starts), lengths(&self.key_starts));
        queries.into_iter().zip(keys).collect()
    }
}

/// The cache as one step sees it.
struct StepMemory {
    keys: Vec<Tensor>,
    values: Vec<Tensor>,
    new: Tensor,
    visible: Tensor,
    query_starts: Tensor,
    key_starts: Tensor,
    spans: Vec<(i64, i64)>,
    /// The layer that comes next.
    layer: Cell<usize>,
}

impl AttentionMemory for StepMemory {
    fn attend(&self, q: &Tensor, k: &Tensor, v: &Tensor) -> Tensor {
        let layer = self.layer.replace(self.layer.get() + 1);
        let (mut keys, mut values) = (
            self.keys[layer].shallow_clone(),
            self.values[layer].shallow_clone(),
        );
        let _ = keys.index_copy_(0, &self.new, k);
        let _ = values.index_copy_(0, &self.new, v);
        let (k, v) = (
            keys.index_select(0, &self.visible),
            values.index_select(0, &self.visible),
        );
        if has_flash_attention(q) {
            let longest = |f: fn(&(i64, i64)) -> i64| self.spans.iter().map(f).max().unwrap_or(0);
            return flash_attention(
                [q, &k, &v],
                &self.query_starts,
                &self.key_starts,
                longest(|s| s.0),
                longest(|s| s.1),
            );
        }
        let cut = |t: &Tensor, lengths: Vec<i64>| t.split_with_sizes(&lengths[..], 0);
        let keys = || self.spans.iter().map(|s| s.1).collect();
        let q = cut(q, self.spans.iter().map(|s| s.0).collect());
        let (k, v) = (cut(&k, keys()), cut(&v, keys()));
        let parts: Vec<Tensor> = (0..q.len()).map(|i| attend_one(&q[i], &k[i], &v[i])).collect();
        Tensor::cat(&parts, 0)
    }
}

/// The last queries of a sequence over all its keys: `[n,nq,d]`, `[L,nkv,d]` twice.
fn attend_one(q: &Tensor, k: &Tensor, v: &Tensor) -> Tensor {
    let (count, length) = (q.size()[0], k.size()[0]);
    let mask =
        (count > 1).then(|| Tensor::ones([count, length], (Kind::Bool, q.device())).tril(length - count));
    let batch = |t: &Tensor| t.transpose(0, 1).unsqueeze(0);
    Tensor::scaled_dot_product_attention(
        &batch(q),
        &batch(k),
        &batch(v),
        mask.as_ref(),
        0.0,
        false,
        None,
        true,
    )
    .squeeze_dim(0)
    .transpose(0, 1)
}

/// Draws from the rows of `logits [R,V]`. Plain sampling and the most likely token are found on the
/// device; with `top_k` or `top_p` the rows go to the host.
fn draw_rows(logits: &Tensor, samples: &[(SamplingParams, f64)]) -> Vec<Option<Draw>> {
    let (device, vocabulary) = (logits.device(), logits.size()[1]);
    let column = |values: Vec<f32>| Tensor::from_slice(&values).to_device(device).unsqueeze(-1);
    let logprobs = if samples.iter().all(|(p, _)| sampler::divisor(p) == 1.0) {
        logits.log_softmax(-1, Kind::Float)
    } else {
        let divisors = samples.iter().map(|(p, _)| sampler::divisor(p)).collect();
        (logits / column(divisors)).log_softmax(-1, Kind::Float)
    };
    let greedy = |p: &SamplingParams| p.temperature == 0.0;
    let plain = |p: &SamplingParams| p.top_p >= 1.0 && (p.top_k == 0 || i64::from(p.top_k) >= vocabulary);
    if samples.iter().any(|(p, _)| !greedy(p) && !plain(p)) {
        return draw_on_host(&logprobs, samples);
    }
    let (best, likeliest) = logprobs.max_dim(-1, false);
    let mut chosen = likeliest;
    if samples.iter().any(|(p, _)| !greedy(p)) {
        // The first token at which the running sum exceeds the uniform number times the whole sum.
        let sums = logprobs.exp().cumsum(-1, Kind::Double);
        let uniforms: Vec<f64> = samples.iter().map(|(_, u)| *u).collect();
        let targets =
            sums.narrow(1, vocabulary - 1, 1) * Tensor::from_slice(&uniforms).to_device(device).unsqueeze(-1);
        let drawn = sums
            .le_tensor(&targets)
            .sum_dim_intlist(-1, false, Kind::Int64)
            .clamp_max(vocabulary - 1);
        let is_greedy: Vec<bool> = samples.iter().map(|(p, _)| greedy(p)).collect();
        chosen = chosen.where_self(&Tensor::from_slice(&is_greedy).to_device(device), &drawn);
    }
    let of_chosen = logprobs.gather(-1, &chosen.unsqueeze(-1), false).squeeze_dim(-1);
    let answer = Tensor::stack(
        &[
            chosen.to_kind(Kind::Double),
            of_chosen.to_kind(Kind::Double),
            best.to_kind(Kind::Double),
        ],
        0,
    );
    let count = samples.len();
    let mut numbers = vec![0.0f64; 3 * count];
    let answer = answer.to_device(Device::Cpu).contiguous();
    answer.copy_data(&mut numbers, 3 * count);
    (0..count)
        .map(|i| {
            // A NaN anywhere in a row is its maximum.
            numbers[2 * count + i].is_finite().then(|| Draw {
                id: numbers[i] as u32,
                logprob: numbers[count + i] as f32,
            })
        })
        .collect()
}

fn draw_on_host(logprobs: &Tensor, samples: &[(SamplingParams, f64)]) -> Vec<Option<Draw>> {
    let (rows, width) = (samples.len(), logprobs.size()[1] as usize);
    let mut values = vec![0.0f32; rows * width];
    let logprobs = logprobs.to_device(Device::Cpu).contiguous();
    logprobs.copy_data(&mut values, rows * width);
    let rows = values.chunks_exact(width).zip(samples);
    rows.map(|(row, (params, uniform))| sampler::draw(row, params, *uniform))
        .collect()
}
