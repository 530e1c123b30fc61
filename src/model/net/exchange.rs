//! Layers whose tokens or experts are spread over ranks.
//!
//! *Sequence parallelism* (Jacobs et al., 2023, "DeepSpeed Ulysses"). Every rank of a group has an equal run
//! of the tokens of one packed row. Where tokens are mixed, an all-to-all gives each rank all tokens and
//! its share of the heads; behind the mixer another one gives every rank its tokens back. The delta net is
//! treated alike, before its convolution: a rank has the whole sequence of its heads, so that convolution
//! and state run through as they do on one rank.
//!
//! *Expert parallelism* (Lepikhin et al., 2020, "GShard"). A rank has an equal share of a layer's experts.
//! The rows of the tokens go to the ranks of their experts, and the results come back.
//!
//! *Gradients.* Libtorch does not see the exchange, so the graph of a layer is cut there: what leaves is
//! detached, what arrives is a leaf, and a [`Tape`] remembers both. [`Tape::vector_jacobian`] goes from
//! the last cut to the first: the gradient of what arrived goes back by the transposed exchange and becomes
//! the incoming gradient of what had left. Everything that crosses a cut is cut there, so that no part of
//! the graph is gone through twice.

use super::PackedLayout;
use std::{cell::RefCell, rc::Rc, sync::Arc};
use tch::Tensor;

/// A group of ranks, as a layer sees it. After a failure, which the owner of the group reports, the methods
/// return zeros of the right shape.
pub trait Exchange: Send + Sync {
    /// Place of this rank in the group.
    fn place(&self) -> i64;
    /// Ranks of the group.
    fn size(&self) -> i64;
    /// Rows of `x`: `send[j]` for rank j, in order. Returns the `receive[j]` rows from rank j, in order.
    fn rows(&self, x: &Tensor, send: &[i64], receive: &[i64]) -> Tensor;
    /// The same number of counts for every rank: returns those from every rank.
    fn counts(&self, send: &[i64]) -> Vec<i64>;
}

/// The groups that the layers of a network exchange in.
#[derive(Clone, Default)]
pub struct LayerGroups {
    /// Ranks that share the tokens of a row (`SP_SIZE`).
    pub sequence: Option<Arc<dyn Exchange>>,
    /// Ranks that share the experts of a layer (`EP_SIZE`).
    pub experts: Option<Arc<dyn Exchange>>,
}

/// The cuts of one block's graph.
#[derive(Default)]
pub struct Tape {
    cuts: Vec<Cut>,
}

struct Cut {
    /// With their graphs. The first one left by the exchange, the others just cross.
    sent: Vec<Tensor>,
    /// Leaves.
    received: Vec<Tensor>,
    moved: Option<Moved>,
}

struct Moved {
    group: Arc<dyn Exchange>,
    send: Vec<i64>,
    receive: Vec<i64>,
}

impl Tape {
    /// Gradients of `Σ output ∘ incoming` by `inputs`. A rank enters the same exchanges as the others,
    /// whatever its gradients are.
    pub fn vector_jacobian(self, output: &Tensor, incoming: &Tensor, inputs: &[Tensor]) -> Vec<Tensor> {
        let own = inputs.len();
        let mut wanted: Vec<Tensor> = inputs.iter().map(Tensor::shallow_clone).collect();
        let mut places = Vec::new();
        for cut in &self.cuts {
            places.push(wanted.len());
            wanted.extend(cut.received.iter().map(Tensor::shallow_clone));
        }
        let mut found = products(&[(output, incoming)], &wanted);
        for (cut, place) in self.cuts.iter().zip(places).rev() {
            let arrived = wanted.len().min(place + cut.received.len());
            let mut gradients: Vec<Tensor> = found.drain(place..arrived).collect();
            for (gradient, leaf) in gradients.iter_mut().zip(&cut.received) {
                if !gradient.defined() {
                    *gradient = leaf.zeros_like();
                }
            }
            if let Some(moved) = &cut.moved {
                gradients[0] = moved
                    .group
                    .rows(&gradients[0].contiguous(), &moved.receive, &moved.send);
            }
            wanted.truncate(place);
            let pairs: Vec<_> = cut.sent.iter().zip(&gradients).collect();
            for (sum, more) in found.iter_mut().zip(products(&pairs, &wanted)) {
                if more.defined() {
                    *sum = if sum.defined() { &*sum + more } else { more };
                }
            }
        }
        found.truncate(own);
        found
    }
}

/// Gradients of `Σ y ∘ g` over all pairs.
fn products(pairs: &[(&Tensor, &Tensor)], inputs: &[Tensor]) -> Vec<Tensor> {
    let roots: Vec<Tensor> = pairs
        .iter()
        .filter(|(y, _)| y.requires_grad())
        .map(|(y, g)| (*y * *g).sum(None))
        .collect();
    if roots.is_empty() {
        return inputs.iter().map(|_| Tensor::new()).collect();
    }
    Tensor::run_backward(&roots, inputs, false, false)
}

/// The part of a [`PackedLayout`] that belongs to the groups.
#[derive(Default)]
pub(super) struct Exchanges {
    groups: LayerGroups,
    tape: Rc<RefCell<Option<Tape>>>,
}

impl PackedLayout {
    /// Layers exchange in these groups. With a sequence group the layout is that of the whole row, whose
    /// number of tokens the size of the group divides, and a rank's rows are its run of it.
    #[must_use]
    pub fn with_groups(mut self, groups: LayerGroups) -> Self {
        self.exchanges = Exchanges {
            groups,
            tape: Rc::default(),
        };
        self
    }

    /// Runs a block with its cuts recorded.
    pub fn taped(&self, block: impl FnOnce() -> Tensor) -> (Tensor, Tape) {
        *self.exchanges.tape.borrow_mut() = Some(Tape::default());
        let output = block();
        let tape = self.exchanges.tape.borrow_mut().take().unwrap_or_default();
        (output, tape)
    }

    pub(super) fn sequence_group(&self) -> Option<&Arc<dyn Exchange>> {
        self.exchanges.groups.sequence.as_ref()
    }

    pub(super) fn expert_group(&self) -> Option<&Arc<dyn Exchange>> {
        self.exchanges.groups.experts.as_ref()
    }

    /// This rank's run of the tokens: first token and number.
    pub fn own_tokens(&self) -> (i64, i64) {
        match self.sequence_group() {
            Some(group) => {
                let share = self.num_tokens() / group.size();
                (group.place() * share, share)
            }
            None => (0, self.num_tokens()),
        }
    }

    /// Moves the rows of `x` as [`Exchange::rows`] does; `carry` is what the graph needs on both sides.
    pub(super) fn exchange(
        &self,
        group: &Arc<dyn Exchange>,
        x: &Tensor,
        send: &[i64],
        receive: &[i64],
        carry: &[&Tensor],
    ) -> (Tensor, Vec<Tensor>) {
        let arrived = group.rows(&x.detach().contiguous(), send, receive);
        let moved = Moved {
            group: group.clone(),
            send: send.to_vec(),
            receive: receive.to_vec(),
        };
        let mut sent = vec![x];
        sent.extend_from_slice(carry);
        let mut received = self.record_cut(&sent, Some(arrived), Some(moved));
        let first = received.remove(0);
        (first, received)
    }

    /// Cuts the graph at these tensors, where layers of this layout exchange anything.
    pub(super) fn cut(&self, tensors: &[&Tensor]) -> Vec<Tensor> {
        self.record_cut(tensors, None, None)
    }

    fn record_cut(&self, sent: &[&Tensor], first: Option<Tensor>, moved: Option<Moved>) -> Vec<Tensor> {
        let mut tape = self.exchanges.tape.borrow_mut();
        let mut first = first;
        let crossing: Vec<Tensor> = sent
            .iter()
            .map(|t| first.take().unwrap_or_else(|| t.shallow_clone()))
            .collect();
        let Some(tape) = tape.as_mut() else {
            return crossing;
        };
        let leaf = |t: &Tensor| t.detach().set_requires_grad(true);
        let received: Vec<Tensor> = crossing.iter().map(leaf).collect();
        tape.cuts.push(Cut {
            sent: sent.iter().map(|t| t.shallow_clone()).collect(),
            received: received.iter().map(Tensor::shallow_clone).collect(),
            moved,
        });
        received
    }
}

/// `[T/n, width]` of all heads, `width` divided evenly among the ranks and theirs in order → `[T, width/n]`
/// of this rank's heads.
pub(super) fn tokens_to_heads(
    layout: &PackedLayout,
    group: &Arc<dyn Exchange>,
    x: &Tensor,
    carry: &[&Tensor],
) -> (Tensor, Vec<Tensor>) {
    let (tokens, ranks) = (x.size()[0], group.size());
    let by_rank = x.view([tokens, ranks, -1]).transpose(0, 1).contiguous();
    let rows = by_rank.view([ranks * tokens, -1]);
    let counts = vec![tokens; ranks as usize];
    layout.exchange(group, &rows, &counts, &counts, carry)
}

/// The way back: `[T, width/n]` → `[T/n, width]`.
pub(super) fn heads_to_tokens(layout: &PackedLayout, group: &Arc<dyn Exchange>, x: &Tensor) -> Tensor {
    let ranks = group.size();
    let tokens = x.size()[0] / ranks;
    let counts = vec![tokens; ranks as usize];
    let (rows, _) = layout.exchange(group, x, &counts, &counts, &[]);
    rows.view([ranks, tokens, -1])
        .transpose(0, 1)
        .reshape([tokens, -1])
}

/// Heads `[T,heads,width]`, repeated where there are fewer than `ranks`, so that the ranks can share them
/// evenly. Head h of the result is head `h·heads/n` of the input.
pub(super) fn enough_heads(x: &Tensor, ranks: i64) -> Tensor {
    let heads = x.size()[1];
    if heads % ranks == 0 {
        return x.shallow_clone();
    }
    x.repeat_interleave_self_int(ranks / heads, 1, None)
}
