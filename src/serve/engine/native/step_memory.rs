//! What the tokens of a step attend to, and what their delta nets go on from.

use super::state_memory::StateMemory;
use crate::model::net::{flash_attention, has_flash_attention, DeltaState, TokenMemory};
use std::cell::Cell;
use tch::{Kind, Tensor};

/// The cache and the states as one step sees them.
pub(super) struct StepMemory {
    /// `[rows, nkv, d]` by attending layer.
    pub keys: Vec<Tensor>,
    pub values: Vec<Tensor>,
    /// Cache rows of the tokens of the step, `[T]`.
    pub new: Tensor,
    /// Cache rows of all tokens of its sequences up to their last one.
    pub visible: Tensor,
    /// Where the sequences start among the tokens and among the visible rows, i32.
    pub query_starts: Tensor,
    pub key_starts: Tensor,
    /// Queries and keys of each sequence.
    pub spans: Vec<(i64, i64)>,
    /// States and the slots of the sequences, for a model with delta nets.
    pub states: Option<(StateMemory, Tensor)>,
    /// The attending layer and the linear layer that come next.
    pub next_attending: Cell<usize>,
    pub next_linear: Cell<i64>,
}

impl StepMemory {
    fn states(&self) -> &(StateMemory, Tensor) {
        match &self.states {
            Some(states) => states,
            None => unreachable!("a model with a delta net has memory for its states"),
        }
    }

    /// The visible rows of a layer, by sequence. On the host one after the other, so that they are attended to
    /// before they leave the caches.
    fn gather<'a>(&'a self, all: &'a Tensor) -> Box<dyn Iterator<Item = Tensor> + 'a> {
        let lengths: Vec<i64> = self.spans.iter().map(|s| s.1).collect();
        if all.device().is_cuda() {
            let rows = all.index_select(0, &self.visible);
            return Box::new(rows.split_with_sizes(&lengths[..], 0).into_iter());
        }
        let rows = self.visible.split_with_sizes(&lengths[..], 0);
        Box::new(rows.into_iter().map(|rows| all.index_select(0, &rows)))
    }
}

impl TokenMemory for StepMemory {
    fn attend(&self, q: &Tensor, k: &Tensor, v: &Tensor) -> Tensor {
        let layer = self.next_attending.replace(self.next_attending.get() + 1);
        let (mut keys, mut values) = (
            self.keys[layer].shallow_clone(),
            self.values[layer].shallow_clone(),
        );
        let _ = keys.index_copy_(0, &self.new, k);
        let _ = values.index_copy_(0, &self.new, v);
        if has_flash_attention(q) {
            let longest = |f: fn(&(i64, i64)) -> i64| self.spans.iter().map(f).max().unwrap_or(0);
            let (k, v) = (
                keys.index_select(0, &self.visible),
                values.index_select(0, &self.visible),
            );
            return flash_attention(
                [q, &k, &v],
                &self.query_starts,
                &self.key_starts,
                longest(|s| s.0),
                longest(|s| s.1),
            );
        }
        let counts: Vec<i64> = self.spans.iter().map(|s| s.0).collect();
        let queries = q.split_with_sizes(&counts[..], 0);
        let rows = self.gather(&keys).zip(self.gather(&values));
        let parts: Vec<Tensor> = queries
            .iter()
            .zip(rows)
            .map(|(q, (k, v))| attend_one(q, &k, &v))
            .collect();
        Tensor::cat(&parts, 0)
    }

    fn recall(&self) -> DeltaState {
        let (states, slots) = self.states();
        states.read(self.next_linear.get(), slots)
    }

    fn keep(&self, state: DeltaState) {
        let layer = self.next_linear.replace(self.next_linear.get() + 1);
        let (states, slots) = self.states();
        states.write(layer, slots, &state);
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
