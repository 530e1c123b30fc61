//! The network of a step by the blocks of [`crate::model::net`]: every family on a GPU, and those with a delta
//! net on the host too.
//!
//! The trainer uses the same blocks, so that both round alike; what the blocks attend to and go on from comes from
//! here. Keys and values of all tokens lie on the device, one row a token and one pair of tensors a layer; page p of
//! the pool is the rows `16·p …`. A step uploads its tokens and row numbers in two pieces, gathers the rows that its
//! sequences see, and attends to all of them in one kernel (bf16 on a GPU) or sequence by sequence. Delta nets take
//! one token of every sequence that decodes in one recurrence, and prompts in chunks; their states lie on the device
//! by slot. Sampled ids and log-probabilities come back in one piece.
//!
//! Every operation is a launch of its own, so that small batches wait for the host and not for the device.

use super::{
    cache::RoutingMemory,
    draws::draw_rows,
    forward::SequenceWork,
    pages::{PageId, PAGE_TOKENS},
    sampler::Draw,
    state_memory::StateMemory,
    states::StateOp,
    step_memory::StepMemory,
    workers::Network,
};
use crate::{
    base::{WeightError, WeightTensor},
    model::{
        hf::{MixerKind, ModelConfig},
        net::{ComputeType, Device, PackedLayout, Policy},
    },
};
use std::{cell::Cell, rc::Rc, sync::Arc};
use tch::{TchError, Tensor};

/// Weights, cache and states of a replica on its device.
pub(super) struct BlockNetwork {
    policy: Policy,
    /// `[rows, nkv, d]` by attending layer.
    keys: Vec<Tensor>,
    values: Vec<Tensor>,
    states: Option<StateMemory>,
    routing: Arc<RoutingMemory>,
}

/// Why a replica could not be set up on its device.
#[derive(Debug)]
pub(super) enum DeviceError {
    Weights(WeightError),
    /// What was said of the memory.
    Memory(String),
}

impl From<WeightError> for DeviceError {
    fn from(error: WeightError) -> Self {
        Self::Weights(error)
    }
}

impl From<TchError> for DeviceError {
    fn from(error: TchError) -> Self {
        // The rest of libtorch's text is a list of its own functions.
        let text = error.to_string();
        Self::Memory(text.lines().next().unwrap_or_default().to_owned())
    }
}

/// Row of a token in the cache.
fn row_of(pages: &[PageId], position: usize) -> i64 {
    (pages[position / PAGE_TOKENS].0 as usize * PAGE_TOKENS + position % PAGE_TOKENS) as i64
}

impl BlockNetwork {
    /// With a cache of `num_pages` pages and states of `num_slots` slots.
    ///
    /// # Errors
    /// Weights that do not belong to the family, or memory that the device or the host does not have.
    pub(super) fn new(
        config: &ModelConfig,
        tensors: &[WeightTensor],
        (device, compute): (Device, ComputeType),
        (num_pages, num_slots): (usize, usize),
    ) -> Result<Self, DeviceError> {
        let kind = compute.kind_for(config);
        let policy = Policy::for_inference(config.clone(), tensors, device, compute)?;
        let rows = (num_pages * PAGE_TOKENS) as i64;
        let size = [rows, config.num_key_value_heads as i64, config.head_dim as i64];
        let attending = || {
            let layers = config.layers.iter();
            layers.filter(|l| l.mixer == MixerKind::FullAttention)
        };
        // Not filled, so that the host provides it page by page as it is used: rows are read behind their writing.
        let cache = || -> Result<Vec<Tensor>, TchError> {
            attending()
                .map(|_| Tensor::f_empty(size, (kind, device)))
                .collect()
        };
        let top_k = config.experts.map_or(0, |e| e.top_k);
        let routing = RoutingMemory::new(config.num_sparse_layers(), top_k, num_pages);
        Ok(Self {
            policy,
            keys: cache()?,
            values: cache()?,
            states: StateMemory::new(config, kind, device, num_slots)?,
            routing: Arc::new(routing.map_err(|_| DeviceError::Memory("the host gives no more".into()))?),
        })
    }

    /// Uses these weights from the next step on, also in the networks that share them.
    pub(super) fn set_weights(&self, tensors: &[WeightTensor]) -> Result<(), WeightError> {
        self.policy.copy_from(tensors)
    }

    /// Moves delta-net states before a step.
    pub(super) fn move_states(&self, ops: &[StateOp]) {
        if let Some(states) = &self.states {
            states.apply(ops);
        }
    }

    /// Experts of the cached tokens.
    pub(super) fn routing(&self) -> &RoutingMemory {
        &self.routing
    }

    /// A step whose sequences of one token come first.
    fn sorted_step(&self, works: &[&SequenceWork]) -> Vec<Option<Draw>> {
        let _guard = tch::no_grad_guard();
        let device = self.policy.device();
        let rows = Rows::of(works);
        let packed = Tensor::from_slice(&rows.packed()).to_device(device);
        let parts = packed.split_with_sizes(rows.lengths(), 0);
        let starts: Vec<i32> = [&rows.query_starts[..], &rows.key_starts[..]].concat();
        let starts = Tensor::from_slice(&starts).to_device(device).chunk(2, 0);
        let states = self.states.as_ref().map(StateMemory::share);
        let memory = StepMemory {
            keys: self.keys.iter().map(Tensor::shallow_clone).collect(),
            values: self.values.iter().map(Tensor::shallow_clone).collect(),
            new: parts[2].shallow_clone(),
            visible: parts[3].shallow_clone(),
            query_starts: starts[0].shallow_clone(),
            key_starts: starts[1].shallow_clone(),
            spans: rows.spans(),
            states: states.map(|states| (states, parts[5].shallow_clone())),
            next_attending: Cell::new(0),
            next_linear: Cell::new(0),
        };
        let lengths: Vec<usize> = works.iter().map(|w| w.tokens.len()).collect();
        let layout = PackedLayout::over_memory(&lengths, parts[1].shallow_clone(), Rc::new(memory));
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

    fn store_routing(&self, works: &[&SequenceWork], layout: &PackedLayout) {
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

impl Network for BlockNetwork {
    fn share(&self) -> Self {
        let handles = |list: &[Tensor]| list.iter().map(Tensor::shallow_clone).collect();
        Self {
            policy: self.policy.share(),
            keys: handles(&self.keys),
            values: handles(&self.values),
            states: self.states.as_ref().map(StateMemory::share),
            routing: self.routing.clone(),
        }
    }

    fn step(&self, works: &[SequenceWork]) -> Vec<Option<Draw>> {
        let mut order: Vec<usize> = (0..works.len()).collect();
        order.sort_by_key(|i| works[*i].tokens.len() > 1);
        let sorted: Vec<&SequenceWork> = order.iter().map(|i| &works[*i]).collect();
        let mut draws = self.sorted_step(&sorted).into_iter();
        let mut by_work: Vec<Option<Draw>> = vec![None; works.len()];
        for (i, draw) in order
            .into_iter()
            .filter(|i| works[*i].sample.is_some())
            .zip(&mut draws)
        {
            by_work[i] = draw;
        }
        let sampling = works.iter().zip(by_work).filter(|(w, _)| w.sample.is_some());
        sampling.map(|(_, draw)| draw).collect()
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
    /// Slots of the states of its sequences.
    slots: Vec<i64>,
    query_starts: Vec<i32>,
    key_starts: Vec<i32>,
}

impl Rows {
    fn of(works: &[&SequenceWork]) -> Self {
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
            rows.slots.extend(work.state.map(|slot| i64::from(slot.0)));
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
            &self.slots,
        ]
        .concat()
    }

    fn lengths(&self) -> [i64; 6] {
        [
            &self.ids,
            &self.positions,
            &self.new,
            &self.visible,
            &self.sampling,
            &self.slots,
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
