//! Memory of the delta-net states: for every slot and linear layer the state `[Hv,dk,dv]` and the last K−1
//! inputs of the convolution `[K-1,channels]`, oldest first.
//!
//! Invariant: within a step a slot is touched by the one worker that computes its sequence; slots are moved by
//! the engine's thread while no worker computes.

use super::states::{SlotId, StateOp};
use crate::model::{
    hf::{LinearAttentionConfig, MixerKind, ModelConfig},
    net::DeltaState,
};
use std::collections::BTreeMap;
use tch::{Device, Kind, TchError, Tensor};

/// Slots that are moved in one operation: a copy of them exists meanwhile.
const MOVED_TOGETHER: usize = 8;

/// Element types of states: at least f32, and that of the network for the inputs of the convolution.
fn kinds(compute: Kind) -> (Kind, Kind) {
    let state = if compute == Kind::Double {
        compute
    } else {
        Kind::Float
    };
    (state, compute)
}

/// Numbers of a layer: of the state, and of the inputs.
fn sizes(s: &LinearAttentionConfig) -> ([i64; 3], [i64; 2]) {
    let state = [s.num_value_heads, s.key_head_dim, s.value_head_dim];
    let inputs = [s.conv_kernel - 1, s.conv_dim()];
    (state.map(|n| n as i64), inputs.map(|n| n as i64))
}

/// Layers with a delta net.
fn num_layers(model: &ModelConfig) -> usize {
    let linear = model
        .layers
        .iter()
        .filter(|l| l.mixer == MixerKind::LinearAttention);
    linear.count()
}

/// Bytes of a slot.
pub(super) fn slot_bytes(model: &ModelConfig, compute: Kind) -> u64 {
    let Some(s) = &model.linear_attention else {
        return 0;
    };
    let (kinds, sizes) = (kinds(compute), sizes(s));
    let bytes =
        |kind: Kind, size: &[i64]| size.iter().product::<i64>() as u64 * kind.elt_size_in_bytes() as u64;
    num_layers(model) as u64 * (bytes(kinds.0, &sizes.0) + bytes(kinds.1, &sizes.1))
}

/// States of all slots.
pub(super) struct StateMemory {
    /// `[slots,layers,K-1,channels]`.
    inputs: Tensor,
    /// `[slots,layers,Hv,dk,dv]`.
    state: Tensor,
}

impl StateMemory {
    /// Memory that is not yet filled: a slot is cleared or copied to before it is used. None for a model
    /// without delta nets.
    pub(super) fn new(
        model: &ModelConfig,
        compute: Kind,
        device: Device,
        num_slots: usize,
    ) -> Result<Option<Self>, TchError> {
        let Some(s) = &model.linear_attention else {
            return Ok(None);
        };
        let (kinds, sizes) = (kinds(compute), sizes(s));
        let empty = |size: &[i64], kind| {
            let size = [&[num_slots as i64, num_layers(model) as i64], size].concat();
            Tensor::f_empty(&size, (kind, device))
        };
        Ok(Some(Self {
            inputs: empty(&sizes.1, kinds.1)?,
            state: empty(&sizes.0, kinds.0)?,
        }))
    }

    /// Handles to the same memory for another thread.
    pub(super) fn share(&self) -> Self {
        Self {
            inputs: self.inputs.shallow_clone(),
            state: self.state.shallow_clone(),
        }
    }

    /// What a layer keeps in these slots `[n]` i64; copies.
    pub(super) fn read(&self, layer: i64, slots: &Tensor) -> DeltaState {
        let of = |t: &Tensor| t.select(1, layer).index_select(0, slots);
        DeltaState {
            inputs: of(&self.inputs),
            state: of(&self.state),
        }
    }

    /// Writes what a layer keeps in these slots, all different.
    pub(super) fn write(&self, layer: i64, slots: &Tensor, kept: &DeltaState) {
        let to = |t: &Tensor, new: &Tensor| drop(t.select(1, layer).index_copy_(0, slots, new));
        to(&self.inputs, &kept.inputs);
        to(&self.state, &kept.state);
    }

    /// Carries out operations in order. Only between steps.
    pub(super) fn apply(&self, ops: &[StateOp]) {
        let _guard = tch::no_grad_guard();
        for ops in ops.chunks(MOVED_TOGETHER) {
            let (mut cleared, mut from, mut to) = (Vec::new(), Vec::new(), Vec::new());
            for (slot, source) in resolve(ops) {
                match source {
                    None => cleared.push(i64::from(slot.0)),
                    Some(source) if source == slot => {}
                    Some(source) => {
                        from.push(i64::from(source.0));
                        to.push(i64::from(slot.0));
                    }
                }
            }
            for t in [&self.inputs, &self.state] {
                let index = |slots: &[i64]| Tensor::from_slice(slots).to_device(t.device());
                let mut t = t.shallow_clone();
                // All are read before the first is written.
                if !from.is_empty() {
                    let moved = t.index_select(0, &index(&from));
                    let _ = t.index_copy_(0, &index(&to), &moved);
                }
                if !cleared.is_empty() {
                    let _ = t.index_fill_(0, &index(&cleared), 0.0);
                }
            }
        }
    }
}

/// What the slots hold behind operations in order, in terms of what they held before: another slot's content,
/// or None for the state of the empty prefix.
fn resolve(ops: &[StateOp]) -> BTreeMap<SlotId, Option<SlotId>> {
    let mut now: BTreeMap<SlotId, Option<SlotId>> = BTreeMap::new();
    for op in ops {
        let (to, content) = match *op {
            StateOp::Clear(to) => (to, None),
            StateOp::Copy { from, to } => (to, now.get(&from).copied().unwrap_or(Some(from))),
        };
        now.insert(to, content);
    }
    now
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hybrid() -> ModelConfig {
        let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/models/qwen3_5");
        ModelConfig::from_dir(&folder).unwrap()
    }

    /// Random operations, more than are carried out together, against a list that does them one by one.
    #[test]
    fn moves_are_those_of_one_after_the_other() {
        let memory = StateMemory::new(&hybrid(), Kind::Double, Device::Cpu, 6)
            .unwrap()
            .unwrap();
        let number = |slot: i64| (slot + 1) as f64;
        for slot in 0..6 {
            for t in [&memory.inputs, &memory.state] {
                let _ = t.select(0, slot).fill_(number(slot));
            }
        }
        let mut want: Vec<f64> = (0..6).map(number).collect();
        let mut random = 7u32;
        let mut next = |n: u32| {
            random = random.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (random >> 16) % n
        };
        for round in 0..40 {
            let ops: Vec<StateOp> = (0..next(20))
                .map(|_| match next(6) {
                    0 => StateOp::Clear(SlotId(next(6))),
                    _ => StateOp::Copy {
                        from: SlotId(next(6)),
                        to: SlotId(next(6)),
                    },
                })
                .collect();
            for op in &ops {
                match *op {
                    StateOp::Clear(to) => want[to.0 as usize] = 0.0,
                    StateOp::Copy { from, to } => want[to.0 as usize] = want[from.0 as usize],
                }
            }
            memory.apply(&ops);
            for t in [&memory.inputs, &memory.state] {
                for (slot, want) in want.iter().enumerate() {
                    let held = t.select(0, slot as i64);
                    assert!(
                        bool::try_from(held.eq(*want).all()).unwrap(),
                        "round {round}: {ops:?}"
                    );
                }
            }
            // Something to move again.
            let slot = next(6);
            for t in [&memory.inputs, &memory.state] {
                let _ = t.select(0, i64::from(slot)).fill_(f64::from(100 + round));
            }
            want[slot as usize] = f64::from(100 + round);
        }
    }

    #[test]
    fn a_layer_reads_what_it_wrote_and_nothing_else_changes() {
        let model = hybrid();
        let memory = StateMemory::new(&model, Kind::BFloat16, Device::Cpu, 4)
            .unwrap()
            .unwrap();
        assert_eq!(
            (memory.inputs.kind(), memory.state.kind()),
            (Kind::BFloat16, Kind::Float)
        );
        let bytes = |t: &Tensor| t.numel() as u64 * t.kind().elt_size_in_bytes() as u64;
        assert_eq!(
            4 * slot_bytes(&model, Kind::BFloat16),
            bytes(&memory.inputs) + bytes(&memory.state)
        );
        memory.apply(&(0..4).map(|s| StateOp::Clear(SlotId(s))).collect::<Vec<_>>());
        let slots = Tensor::from_slice(&[2i64, 0]);
        let before = memory.read(1, &slots);
        let new = DeltaState {
            inputs: before.inputs.ones_like(),
            state: before.state.ones_like() * 2.0,
        };
        memory.write(1, &slots, &new);
        let read = memory.read(1, &slots);
        assert!(read.inputs.equal(&new.inputs) && read.state.equal(&new.state));
        let sum = |t: &Tensor| t.sum(Kind::Double).double_value(&[]);
        assert_eq!(sum(&memory.inputs), sum(&new.inputs));
        assert_eq!(sum(&memory.state), sum(&new.state));
    }
}
