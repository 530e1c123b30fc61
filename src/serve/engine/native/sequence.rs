//! A generation inside the engine.

use super::{
    pages::{NodeId, PageId, PagePool, PAGE_TOKENS},
    states::SlotId,
};
use crate::base::{EngineError, EngineEvent, FinishReason, GenerateRequest, SampledToken};
use tokio::sync::mpsc::UnboundedSender;

/// One request with its tokens and its pages.
pub(super) struct Sequence {
    pub request: GenerateRequest,
    events: UnboundedSender<EngineEvent>,
    /// Prompt, then what was sampled.
    pub tokens: Vec<u32>,
    /// Leading tokens whose keys and values are in `pages`.
    pub computed: usize,
    pub pages: Vec<PageId>,
    /// Nodes of the leading pages that are in the prefix tree.
    pub nodes: Vec<NodeId>,
    /// Delta-net state behind the `computed` tokens; None outside the batch and for models without.
    pub state: Option<SlotId>,
    /// Prefix whose snapshot this sequence made while it decoded; the next one takes its place.
    decode_snapshot: Option<NodeId>,
    /// Prompt tokens that came from the cache when it was first admitted.
    pub cached_tokens: usize,
    /// False once it has lost its pages: what is computed then is not its prompt for the first time.
    pub first_pass: bool,
    pub interruptions: u32,
}

impl Sequence {
    pub(super) fn new(request: GenerateRequest, events: UnboundedSender<EngineEvent>) -> Self {
        Self {
            tokens: request.prompt.to_vec(),
            request,
            events,
            computed: 0,
            pages: Vec::new(),
            nodes: Vec::new(),
            state: None,
            decode_snapshot: None,
            cached_tokens: 0,
            first_pass: true,
            interruptions: 0,
        }
    }

    /// Tokens sampled so far.
    pub(super) fn sampled(&self) -> usize {
        self.tokens.len() - self.request.prompt.len()
    }

    /// Tokens that the next sample needs and the cache does not hold.
    pub(super) fn missing(&self) -> usize {
        self.tokens.len() - self.computed
    }

    /// Whether only the last sampled token is missing.
    pub(super) fn decodes(&self) -> bool {
        self.missing() == 1 && self.sampled() > 0
    }

    /// Node of the last registered page.
    pub(super) fn node(&self) -> NodeId {
        self.nodes.last().copied().unwrap_or(NodeId::ROOT)
    }

    /// Pages for all tokens.
    pub(super) fn pages_needed(&self) -> usize {
        self.tokens.len().div_ceil(PAGE_TOKENS)
    }

    /// Lets go of pages and state.
    pub(super) fn release(&mut self, pool: &mut PagePool) {
        pool.release(&self.pages, &self.request.session);
        if let Some(slot) = self.state.take() {
            pool.release_state(slot);
        }
        self.pages.clear();
        self.nodes.clear();
        self.computed = 0;
    }

    /// Keeps the state where it stands at a page boundary. While it decodes, the snapshot before is given
    /// up: the next turn starts from the last one.
    pub(super) fn save_state(&mut self, decoded: bool, pool: &mut PagePool) {
        let Some(slot) = self.state else { return };
        if self.computed == 0 || self.computed != self.nodes.len() * PAGE_TOKENS {
            return;
        }
        let node = self.node();
        if decoded {
            if let Some(before) = self.decode_snapshot.replace(node) {
                pool.forget_state(before);
            }
        }
        pool.save_state(slot, node);
    }

    /// Nobody listens any more.
    pub(super) fn is_closed(&self) -> bool {
        self.events.is_closed()
    }

    /// Takes a sampled token; the answer is why the generation is over, if it is.
    pub(super) fn push(&mut self, token: SampledToken, max_model_len: usize) -> Option<FinishReason> {
        self.tokens.push(token.id);
        self.send(EngineEvent::Tokens(vec![token]));
        if self.request.stop_token_ids.contains(&token.id) {
            return Some(FinishReason::Stop);
        }
        let full =
            self.sampled() >= self.request.max_new_tokens as usize || self.tokens.len() >= max_model_len;
        full.then_some(FinishReason::Length)
    }

    pub(super) fn finish(&self, reason: FinishReason) {
        self.send(EngineEvent::Finished {
            reason,
            cached_tokens: self.cached_tokens as u32,
            interruptions: self.interruptions,
        });
    }

    pub(super) fn fail(&self, error: EngineError) {
        self.send(EngineEvent::Failed(error));
    }

    /// A receiver that is gone is noticed by [`Sequence::is_closed`] before the next step.
    fn send(&self, event: EngineEvent) {
        let _ = self.events.send(event);
    }
}
