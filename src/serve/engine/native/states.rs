//! Bookkeeping of delta-net states: who holds which slot, and which prefixes have a snapshot.
//!
//! Keys and values of a prefix can be read at any length; a delta net's state is that of one length. So a
//! running sequence holds a slot with its live state, and snapshots are copies at page boundaries: at the
//! end of every prompt chunk, and at the last full page of a sequence that decodes (the one before is then
//! given up). A prefix can be reused as far as its last snapshot.
//!
//! Copies are not made here: they are listed as [`StateOp`]s, which the engine's thread carries out in
//! order before the next step.
//!
//! Invariant: free + live + snapshots = all slots. There are three slots a seat, so a snapshot that was
//! just used or made is never the one that has to go.

use super::pages::NodeId;
use std::collections::{BTreeMap, HashMap};

/// Slots for each sequence of the batch: its live state and two snapshots.
pub(super) const SLOTS_A_SEAT: usize = 3;

/// Index of a state in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct SlotId(pub u32);

/// What to do with the memory of the slots, in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum StateOp {
    /// The state of the empty prefix.
    Clear(SlotId),
    /// All layers of one state.
    Copy { from: SlotId, to: SlotId },
}

/// All slots.
pub(super) struct StatePool {
    num_slots: usize,
    free: Vec<SlotId>,
    snapshots: HashMap<NodeId, (SlotId, u64)>,
    /// Snapshots by the time of their last use.
    by_use: BTreeMap<u64, NodeId>,
    clock: u64,
    ops: Vec<StateOp>,
}

impl StatePool {
    pub(super) fn new(num_slots: usize) -> Self {
        Self {
            num_slots,
            free: (0..num_slots as u32).rev().map(SlotId).collect(),
            snapshots: HashMap::new(),
            by_use: BTreeMap::new(),
            clock: 0,
            ops: Vec::new(),
        }
    }

    pub(super) fn has_snapshot(&self, node: NodeId) -> bool {
        self.snapshots.contains_key(&node)
    }

    /// A live slot with the state behind this prefix; without a snapshot of it, that of the empty one.
    pub(super) fn start(&mut self, prefix: NodeId) -> SlotId {
        let from = self.touch(prefix);
        let slot = self.allocate();
        self.ops.push(match from {
            Some(from) => StateOp::Copy { from, to: slot },
            None => StateOp::Clear(slot),
        });
        slot
    }

    /// Moves a live slot to the state behind this prefix, which has a snapshot.
    pub(super) fn jump(&mut self, slot: SlotId, prefix: NodeId) {
        if let Some(from) = self.touch(prefix) {
            self.ops.push(StateOp::Copy { from, to: slot });
        }
    }

    /// Keeps a live state as the snapshot of this prefix.
    pub(super) fn save(&mut self, slot: SlotId, prefix: NodeId) {
        if self.touch(prefix).is_some() {
            return;
        }
        let to = self.allocate();
        self.ops.push(StateOp::Copy { from: slot, to });
        self.clock += 1;
        self.snapshots.insert(prefix, (to, self.clock));
        self.by_use.insert(self.clock, prefix);
    }

    /// Gives up a live slot.
    pub(super) fn release(&mut self, slot: SlotId) {
        self.free.push(slot);
    }

    /// Gives up the snapshot of a prefix, if there is one.
    pub(super) fn forget(&mut self, prefix: NodeId) {
        if let Some((slot, used)) = self.snapshots.remove(&prefix) {
            self.by_use.remove(&used);
            self.free.push(slot);
        }
    }

    /// Gives up all snapshots.
    pub(super) fn clear(&mut self) {
        self.by_use.clear();
        self.free
            .extend(self.snapshots.drain().map(|(_, (slot, _))| slot));
    }

    /// What is to be done before the next step.
    pub(super) fn take_ops(&mut self) -> Vec<StateOp> {
        std::mem::take(&mut self.ops)
    }

    /// Slot of a snapshot, which counts as used now.
    fn touch(&mut self, prefix: NodeId) -> Option<SlotId> {
        let (slot, used) = self.snapshots.get_mut(&prefix)?;
        self.by_use.remove(used);
        self.clock += 1;
        *used = self.clock;
        self.by_use.insert(self.clock, prefix);
        Some(*slot)
    }

    fn allocate(&mut self) -> SlotId {
        debug_assert!(self.free.len() + self.snapshots.len() <= self.num_slots);
        loop {
            if let Some(slot) = self.free.pop() {
                return slot;
            }
            let Some((_, oldest)) = self.by_use.pop_first() else {
                unreachable!("there are more slots than sequences in the batch")
            };
            if let Some((slot, _)) = self.snapshots.remove(&oldest) {
                self.free.push(slot);
            }
        }
    }

    #[cfg(test)]
    pub(super) fn num_snapshots(&self) -> usize {
        self.snapshots.len()
    }

    #[cfg(test)]
    pub(super) fn sanity_check(&self, live: impl Iterator<Item = SlotId>) {
        let mut all: Vec<SlotId> = live.collect();
        all.extend(&self.free);
        all.extend(self.snapshots.values().map(|(slot, _)| *slot));
        all.sort_unstable();
        let want: Vec<SlotId> = (0..self.num_slots as u32).map(SlotId).collect();
        assert_eq!(all, want, "a slot is lost or held twice");
        assert_eq!(self.snapshots.len(), self.by_use.len());
        for (node, (_, used)) in &self.snapshots {
            assert_eq!(self.by_use.get(used), Some(node));
        }
    }
}
