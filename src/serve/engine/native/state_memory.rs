//! Memory of the delta-net states: for every slot and linear layer the state `[Hv][dk][dv]` and the last
//! K−1 inputs of the convolution `[K-1][channels]`, oldest first.
//!
//! Invariant: within a step a slot is touched by the one worker that computes its sequence; copies between
//! slots are made by the engine's thread while no worker computes.

use super::{
    memory::{zeroed, NoMemory},
    states::{SlotId, StateOp},
};
use crate::model::hf::LinearAttentionConfig;
use std::cell::UnsafeCell;

/// States of all slots, f32.
pub(super) struct StateMemory {
    memory: Box<[UnsafeCell<f32>]>,
    num_layers: usize,
    state: usize,
    conv: usize,
}

// SAFETY: workers touch disjoint slots within a step (the invariant above); between steps the workers have
// answered over channels, which orders the accesses.
unsafe impl Sync for StateMemory {}

impl StateMemory {
    /// Zeroed memory; the system provides it page by page as it is used.
    pub(super) fn new(
        sizes: Option<LinearAttentionConfig>,
        num_layers: usize,
        num_slots: usize,
    ) -> Result<Self, NoMemory> {
        let (state, conv) = sizes.map_or((0, 0), |s| {
            (
                s.num_value_heads * s.key_head_dim * s.value_head_dim,
                (s.conv_kernel - 1) * s.conv_dim(),
            )
        });
        Ok(Self {
            memory: zeroed(&[num_slots, num_layers, state + conv])?,
            num_layers,
            state,
            conv,
        })
    }

    fn slot(&self, slot: SlotId) -> &[UnsafeCell<f32>] {
        let size = self.num_layers * (self.state + self.conv);
        &self.memory[slot.0 as usize * size..][..size]
    }

    /// State and convolution inputs of one layer.
    ///
    /// # Safety
    /// No other reference into the slot's layer is alive: the caller computes the slot's sequence in this
    /// step and calls this once a layer.
    #[allow(clippy::mut_from_ref)]
    pub(super) unsafe fn layer(&self, slot: SlotId, layer: usize) -> (&mut [f32], &mut [f32]) {
        let cells = &self.slot(slot)[layer * (self.state + self.conv)..][..self.state + self.conv];
        // SAFETY: UnsafeCell<f32> has the layout of f32 and the range was checked; the caller vouches that
        // the memory has no other user.
        let floats = unsafe { std::slice::from_raw_parts_mut(cells.as_ptr() as *mut f32, cells.len()) };
        floats.split_at_mut(self.state)
    }

    /// Carries out operations in order. Only between steps.
    pub(super) fn apply(&self, ops: &[StateOp]) {
        for op in ops {
            let (from, to) = match *op {
                StateOp::Clear(to) => (None, self.slot(to)),
                StateOp::Copy { from, to } if from == to => continue,
                StateOp::Copy { from, to } => (Some(self.slot(from)), self.slot(to)),
            };
            let target = to.as_ptr() as *mut f32;
            // SAFETY: both ranges were checked and are different slots; no worker computes between steps
            // (the invariant of this module).
            unsafe {
                match from {
                    None => target.write_bytes(0, to.len()),
                    Some(from) => target.copy_from_nonoverlapping(from.as_ptr() as *const f32, to.len()),
                }
            }
        }
    }
}
