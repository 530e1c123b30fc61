//! Which tokens the next step computes. No tensors, no threads, no clock.
//!
//! A step takes one token of every decoding sequence, then fills up with prompt tokens until
//! `max_num_batched_tokens`, oldest sequence first; that bound is what a long prompt can delay a decoding
//! sequence by. Waiting requests are admitted in order of arrival as long as their pages fit; a sequence
//! that finds no page for its next token sends the youngest one back to the front of the queue, where it
//! waits with the tokens it has.
//!
//! Before a page of a prompt is computed, the prefix tree is asked again: another sequence may have
//! computed it meanwhile. Two sequences never compute the same page in the same step; the second waits
//! for the first.
//!
//! Models with a delta net reuse a prefix only as far as a snapshot of its state goes, so their prompt
//! chunks end at page boundaries, and the last page of a prompt is computed in a step of its own.

use super::{
    pages::{to_key, NodeId, PageKey, PagePool, PAGE_TOKENS},
    sampler::Draw,
    sequence::Sequence,
};
use crate::base::{EngineError, FinishReason, PolicyVersion, RequestId, SampledToken};
use std::collections::{HashSet, VecDeque};

/// Bounds of the batch.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limits {
    pub max_num_seqs: usize,
    pub max_num_batched_tokens: usize,
    pub max_model_len: usize,
}

/// Tokens of one sequence in a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Work {
    /// Index in [`Scheduler::running`].
    pub index: usize,
    /// First token.
    pub start: usize,
    /// Number of tokens.
    pub count: usize,
    /// The last of them is the sequence's last token, so a new one is sampled.
    pub samples: bool,
}

/// Sequences in the batch and before it.
pub(super) struct Scheduler {
    limits: Limits,
    /// In order of admission.
    running: Vec<Sequence>,
    waiting: VecDeque<Sequence>,
    pub generated_tokens: u64,
    pub prefill_tokens: u64,
}

impl Scheduler {
    pub(super) fn new(limits: Limits) -> Self {
        Self {
            limits,
            running: Vec::new(),
            waiting: VecDeque::new(),
            generated_tokens: 0,
            prefill_tokens: 0,
        }
    }

    pub(super) fn running(&self) -> &[Sequence] {
        &self.running
    }

    pub(super) fn num_waiting(&self) -> usize {
        self.waiting.len()
    }

    pub(super) fn is_idle(&self) -> bool {
        self.running.is_empty() && self.waiting.is_empty()
    }

    /// A new request at the end of the queue.
    pub(super) fn on_request(&mut self, sequence: Sequence) {
        self.waiting.push_back(sequence);
    }

    /// Ends a request with [`FinishReason::Abort`]; an unknown id is ignored.
    pub(super) fn on_abort(&mut self, id: RequestId, pool: &mut PagePool) {
        if let Some(i) = self.waiting.iter().position(|s| s.request.id == id) {
            if let Some(sequence) = self.waiting.remove(i) {
                sequence.finish(FinishReason::Abort);
            }
        }
        if let Some(i) = self.running.iter().position(|s| s.request.id == id) {
            let mut sequence = self.running.remove(i);
            sequence.release(pool);
            sequence.finish(FinishReason::Abort);
        }
    }

    /// New weights are in use: what was computed with the old ones is forgotten, and running sequences
    /// start over with the tokens they have, in their order.
    pub(super) fn on_new_weights(&mut self, pool: &mut PagePool) {
        pool.clear_cache();
        while let Some(mut sequence) = self.running.pop() {
            if sequence.sampled() > 0 {
                sequence.interruptions += 1;
            }
            self.send_back(sequence, pool);
        }
    }

    /// Ends every request with this error.
    pub(super) fn fail_all(&mut self, error: &EngineError, pool: &mut PagePool) {
        for mut sequence in self.running.drain(..) {
            sequence.release(pool);
            sequence.fail(error.clone());
        }
        for sequence in self.waiting.drain(..) {
            sequence.fail(error.clone());
        }
    }

    /// Decides the next step. Empty when nothing can run.
    pub(super) fn plan(&mut self, pool: &mut PagePool) -> Vec<Work> {
        self.drop_closed(pool);
        self.make_room(pool);
        let decoding = self.running.iter().filter(|s| s.decodes()).count();
        let mut budget = self.limits.max_num_batched_tokens.saturating_sub(decoding).max(1);
        let mut in_step: HashSet<PageKey> = HashSet::new();
        let mut plan = Vec::new();
        let before_admission = self.running.len();
        let mut index = 0;
        loop {
            if index == self.running.len() && !(budget > 0 && self.admit(pool)) {
                break;
            }
            let sequence = &mut self.running[index];
            // One that comes back with a single token missing is not among those counted above.
            let count = if index < before_admission && sequence.decodes() {
                1
            } else {
                let count = prefill(sequence, budget, &mut in_step, pool);
                budget -= count;
                count
            };
            if count > 0 {
                plan.push(Work {
                    index,
                    start: sequence.computed,
                    count,
                    samples: count == sequence.missing(),
                });
            }
            index += 1;
        }
        plan
    }

    /// The step was computed. `draws` has an entry for every work that samples, in order; None means that
    /// the logits were not finite. Ends what is over and returns how many sequences ended.
    pub(super) fn on_step(
        &mut self,
        plan: &[Work],
        draws: &[Option<Draw>],
        version: PolicyVersion,
        pool: &mut PagePool,
    ) -> usize {
        let mut draws = draws.iter();
        let mut ended = Vec::new();
        for work in plan {
            let sequence = &mut self.running[work.index];
            let decoded = sequence.decodes();
            sequence.computed += work.count;
            register_full_pages(sequence, pool);
            sequence.save_state(decoded, pool);
            if !decoded {
                self.prefill_tokens += work.count as u64;
            }
            if !work.samples {
                continue;
            }
            match draws.next().copied().flatten() {
                Some(Draw { id, logprob }) => {
                    self.generated_tokens += 1;
                    let token = SampledToken { id, logprob, version };
                    if let Some(reason) = sequence.push(token, self.limits.max_model_len) {
                        sequence.finish(reason);
                        ended.push(work.index);
                    }
                }
                None => {
                    sequence.fail(EngineError::Internal(format!(
                        "the logits behind token {} of request {} are not finite under weights of version {version}",
                        sequence.tokens.len(),
                        sequence.request.id
                    )));
                    ended.push(work.index);
                }
            }
        }
        for index in ended.iter().rev() {
            self.running.remove(*index).release(pool);
        }
        ended.len()
    }

    /// A closed receiver aborts.
    fn drop_closed(&mut self, pool: &mut PagePool) {
        self.waiting.retain(|s| !s.is_closed());
        self.running.retain_mut(|s| {
            if s.is_closed() {
                s.release(pool);
                return false;
            }
            true
        });
    }

    /// Gives every decoding sequence the page of its next token, oldest first.
    fn make_room(&mut self, pool: &mut PagePool) {
        let mut index = 0;
        while index < self.running.len() {
            let sequence = &mut self.running[index];
            if sequence.pages.len() >= sequence.pages_needed() {
                index += 1;
            } else if let Some(page) = pool.allocate() {
                sequence.pages.push(page);
            } else if let Some(youngest) = self.running.pop() {
                self.send_back(youngest, pool);
            }
        }
    }

    /// To the front of the queue, without pages. They stay in the prefix tree as long as nobody needs them.
    fn send_back(&mut self, mut sequence: Sequence, pool: &mut PagePool) {
        sequence.release(pool);
        sequence.first_pass = false;
        self.waiting.push_front(sequence);
    }

    /// Moves the first waiting sequence into the batch if a seat and its pages are free.
    fn admit(&mut self, pool: &mut PagePool) -> bool {
        if self.running.len() >= self.limits.max_num_seqs {
            return false;
        }
        let Some(sequence) = self.waiting.front() else {
            return false;
        };
        // The last token is always computed, since its logits are needed.
        let reusable = sequence.tokens.len() - 1;
        let prefix = pool.find_reusable(&sequence.tokens[..reusable]);
        let wanted = sequence.pages_needed() - prefix.len();
        // One page in reserve for each running sequence, or it would be sent back again at once.
        if pool.available() - pool.count_idle(&prefix) < wanted + self.running.len() {
            return false;
        }
        let Some(mut sequence) = self.waiting.pop_front() else {
            return false;
        };
        for (page, node) in prefix {
            pool.hold(page);
            sequence.pages.push(page);
            sequence.nodes.push(node);
        }
        sequence.computed = sequence.pages.len() * PAGE_TOKENS;
        count_cached(&mut sequence, 0);
        sequence.pages.extend((0..wanted).map_while(|_| pool.allocate()));
        debug_assert_eq!(sequence.pages.len(), sequence.pages_needed());
        sequence.state = pool.start_state(sequence.node());
        self.running.push(sequence);
        true
    }

    /// [`PagePool::sanity_check`] with the pages of all sequences, and the order of each sequence's counters.
    #[cfg(test)]
    pub(super) fn sanity_check(&self, pool: &PagePool) {
        pool.sanity_check(self.running.iter().map(|s| s.pages.as_slice()));
        pool.check_states(self.running.iter().filter_map(|s| s.state));
        let with_state = self.running.iter().filter(|s| s.state.is_some()).count();
        assert_eq!(with_state, if pool.has_states() { self.running.len() } else { 0 });
        assert!(self.running.len() <= self.limits.max_num_seqs);
        for s in &self.running {
            assert!(s.computed < s.tokens.len() && s.nodes.len() * PAGE_TOKENS <= s.computed);
            assert!(s.computed <= s.pages.len() * PAGE_TOKENS);
        }
        assert!(self.waiting.iter().all(|s| s.pages.is_empty() && s.computed == 0));
    }
}

fn count_cached(sequence: &mut Sequence, before: usize) {
    if sequence.first_pass {
        sequence.cached_tokens += sequence.computed - before;
    }
}

/// Adopts pages that others have computed, then takes up to `budget` tokens.
fn prefill(
    sequence: &mut Sequence,
    budget: usize,
    in_step: &mut HashSet<PageKey>,
    pool: &mut PagePool,
) -> usize {
    if budget == 0 {
        return 0;
    }
    let before = sequence.computed;
    adopt(sequence, pool);
    count_cached(sequence, before);
    if next_page(sequence).is_some_and(|key| !in_step.insert(key)) {
        return 0;
    }
    let missing = sequence.missing();
    // The state of the last page boundary before the last token is kept, so a chunk ends there.
    let boundary = (sequence.tokens.len() - 1) / PAGE_TOKENS * PAGE_TOKENS;
    let whole = if pool.has_states() && sequence.computed < boundary {
        boundary - sequence.computed
    } else {
        missing
    };
    if whole <= budget {
        return whole;
    }
    // Whole pages, so that the next chunk can adopt again.
    let end = (sequence.computed + budget) / PAGE_TOKENS * PAGE_TOKENS;
    if end > sequence.computed {
        end - sequence.computed
    } else {
        budget
    }
}

/// Takes the pages that others have computed meanwhile in the place of blank ones, as far as the sequence
/// can go on behind them.
fn adopt(sequence: &mut Sequence, pool: &mut PagePool) {
    let mut found = Vec::new();
    let mut node = sequence.node();
    let mut start = sequence.computed;
    while let Some(key) = page_key(sequence, node, start) {
        let Some((page, next)) = pool.child(&key) else {
            break;
        };
        found.push((page, next));
        node = next;
        start += PAGE_TOKENS;
    }
    let last = found.iter().rposition(|(_, node)| pool.is_reusable(*node));
    found.truncate(last.map_or(0, |i| i + 1));
    for (page, node) in &found {
        pool.hold(*page);
        let blank = std::mem::replace(&mut sequence.pages[sequence.nodes.len()], *page);
        pool.release(&[blank], &sequence.request.session);
        sequence.nodes.push(*node);
        sequence.computed += PAGE_TOKENS;
    }
    if let (Some(slot), Some((_, node))) = (sequence.state, found.last()) {
        pool.jump_state(slot, *node);
    }
}

/// Key of the page that starts at the first token to compute; None when it would hold the last token.
fn next_page(sequence: &Sequence) -> Option<PageKey> {
    page_key(sequence, sequence.node(), sequence.computed)
}

/// Key of the page behind `node` that starts at token `start`; None inside a page, and where it would hold
/// the last token.
fn page_key(sequence: &Sequence, node: NodeId, start: usize) -> Option<PageKey> {
    let aligned = sequence.computed == sequence.nodes.len() * PAGE_TOKENS;
    let end = start + PAGE_TOKENS;
    (aligned && end < sequence.tokens.len()).then(|| (node, to_key(&sequence.tokens[start..end])))
}

fn register_full_pages(sequence: &mut Sequence, pool: &mut PagePool) {
    while (sequence.nodes.len() + 1) * PAGE_TOKENS <= sequence.computed {
        let i = sequence.nodes.len();
        let tokens = &sequence.tokens[i * PAGE_TOKENS..(i + 1) * PAGE_TOKENS];
        let (page, node) = pool.register(sequence.pages[i], sequence.node(), tokens);
        sequence.pages[i] = page;
        sequence.nodes.push(node);
    }
}
