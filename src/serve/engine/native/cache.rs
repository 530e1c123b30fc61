//! Memory of the KV cache.
//!
//! One block a layer, page and key head, keys and values beside each other:
//!
//! ```text
//! [layer][page][head] → keys [d][PAGE_TOKENS] (transposed), values [PAGE_TOKENS][d]
//! ```
//!
//! Keys lie transposed so that the scores of a whole page are computed without horizontal sums.
//!
//! Invariant: within a step every slot is written by at most one worker, and a page that one worker writes
//! is read in the same step by that worker alone. The scheduler gives each sequence to one worker, and
//! sequences share only pages that were full before the step.

use super::{
    memory::{zeroed, NoMemory},
    pages::{PageId, PAGE_TOKENS},
};
use std::cell::UnsafeCell;

/// Keys and values of all layers, f32.
pub(super) struct KvCache {
    memory: Box<[UnsafeCell<f32>]>,
    num_pages: usize,
    num_heads: usize,
    head_dim: usize,
}

// SAFETY: workers write disjoint slots and read no slot that another one writes in the same step (the
// invariant above); between steps the workers have answered over channels, which orders the accesses.
unsafe impl Sync for KvCache {}

impl KvCache {
    /// Zeroed memory: a page that was never written must not hold NaN. The system provides it page by page
    /// as it is used.
    pub(super) fn new(
        num_layers: usize,
        num_pages: usize,
        num_heads: usize,
        head_dim: usize,
    ) -> Result<Self, NoMemory> {
        Ok(Self {
            memory: zeroed(&[num_layers, num_pages, num_heads, 2, PAGE_TOKENS, head_dim])?,
            num_pages,
            num_heads,
            head_dim,
        })
    }

    fn block_floats(&self) -> usize {
        PAGE_TOKENS * self.head_dim
    }

    /// Where keys and values of a head start.
    fn offsets(&self, layer: usize, page: PageId, head: usize) -> (usize, usize) {
        let block = (layer * self.num_pages + page.0 as usize) * self.num_heads + head;
        let keys = block * 2 * self.block_floats();
        (keys, keys + self.block_floats())
    }

    fn slice(&self, start: usize, len: usize) -> &[f32] {
        let cells = &self.memory[start..start + len];
        // SAFETY: UnsafeCell<f32> has the layout of f32, the range was checked, and no other worker writes
        // these slots during the step (the invariant of this module).
        unsafe { std::slice::from_raw_parts(cells.as_ptr().cast::<f32>(), len) }
    }

    /// Keys `[d][PAGE_TOKENS]` of a page.
    pub(super) fn keys(&self, layer: usize, page: PageId, head: usize) -> &[f32] {
        self.slice(self.offsets(layer, page, head).0, self.block_floats())
    }

    /// Values `[PAGE_TOKENS][d]` of a page.
    pub(super) fn values(&self, layer: usize, page: PageId, head: usize) -> &[f32] {
        self.slice(self.offsets(layer, page, head).1, self.block_floats())
    }

    /// Stores one token of one head.
    pub(super) fn write(
        &self,
        layer: usize,
        page: PageId,
        slot: usize,
        head: usize,
        key: &[f32],
        value: &[f32],
    ) {
        let (keys, values) = self.offsets(layer, page, head);
        let d = self.head_dim;
        let write = |cell: &UnsafeCell<f32>, x: f32| {
            // SAFETY: this worker alone touches the slot during the step (the invariant of this module), and
            // no reference into it is alive here.
            unsafe { *cell.get() = x }
        };
        for (i, x) in key[..d].iter().enumerate() {
            write(&self.memory[keys + i * PAGE_TOKENS + slot], *x);
        }
        for (i, x) in value[..d].iter().enumerate() {
            write(&self.memory[values + slot * d + i], *x);
        }
    }
}

/// Experts of every cached token, `[page][slot][sparse layer][k]`, under the invariant of [`KvCache`]: what
/// may be read of a page's keys may be read of its routing.
pub(super) struct RoutingMemory {
    memory: Box<[UnsafeCell<u16>]>,
    /// Experts of a layer, k.
    top_k: usize,
    /// Experts of a token: sparse layers · k.
    width: usize,
}

// SAFETY: as for `KvCache`; the slots are those of the same tokens.
unsafe impl Sync for RoutingMemory {}

impl RoutingMemory {
    /// Zeroed memory; none for models without experts.
    pub(super) fn new(num_sparse_layers: usize, top_k: usize, num_pages: usize) -> Result<Self, NoMemory> {
        let width = num_sparse_layers * top_k;
        Ok(Self {
            memory: zeroed(&[num_pages, PAGE_TOKENS, width])?,
            top_k,
            width,
        })
    }

    /// Experts of a token.
    pub(super) fn width(&self) -> usize {
        self.width
    }

    /// Stores the experts of one token in one sparse layer.
    pub(super) fn write(&self, page: PageId, slot: usize, sparse_layer: usize, experts: &[u16]) {
        let token = page.0 as usize * PAGE_TOKENS + slot;
        let cells = &self.memory[token * self.width + sparse_layer * self.top_k..][..self.top_k];
        for (cell, expert) in cells.iter().zip(experts) {
            // SAFETY: this worker alone touches the slot during the step (the invariant of this module).
            unsafe { *cell.get() = *expert }
        }
    }

    /// Appends the experts of the tokens of a sequence with these pages. Only between steps.
    pub(super) fn read(&self, pages: &[PageId], tokens: std::ops::Range<usize>, out: &mut Vec<u16>) {
        for position in tokens {
            let token = pages[position / PAGE_TOKENS].0 as usize * PAGE_TOKENS + position % PAGE_TOKENS;
            let cells = &self.memory[token * self.width..][..self.width];
            // SAFETY: no worker computes between steps, so nobody writes.
            out.extend(cells.iter().map(|cell| unsafe { *cell.get() }));
        }
    }
}
