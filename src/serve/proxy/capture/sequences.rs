//! A session's tree as training sequences.
//!
//! One sequence per leaf: its path from the root, prompt and sampled tokens in order. A sampled token is
//! counted in the first leaf (in order of creation) whose path holds it, and is context in the others.
//! A leaf's weight is its share of the session's counted tokens, so the weights sum to one.

use super::{NodeId, Tree};
use crate::base::TokenSequence;

/// See the module documentation. Turns that did not finish are left out.
pub fn sequences(tree: &Tree) -> Vec<TokenSequence> {
    let mut counted = vec![false; tree.nodes.len()];
    let mut out: Vec<TokenSequence> = Vec::new();
    for leaf in tree.leaves() {
        let sequence = one(tree, leaf, &mut counted);
        if sequence.sampled() > 0 {
            out.push(sequence);
        }
    }
    let total: usize = out.iter().map(TokenSequence::sampled).sum();
    for sequence in &mut out {
        sequence.weight = sequence.sampled() as f32 / total as f32;
        debug_assert_eq!(sequence.check(), Ok(()));
    }
    out
}

fn one(tree: &Tree, leaf: NodeId, counted: &mut [bool]) -> TokenSequence {
    let path = tree.path(leaf);
    let mut s = TokenSequence::default();
    let mut prompt_len = None;
    for id in path {
        let node = &tree.nodes[id];
        for token in node.delta_tokens.iter() {
            s.token_ids.push(*token);
            s.loss_mask.push(false);
            s.logprobs.push(0.0);
            s.versions.push(0);
        }
        let first = !std::mem::replace(&mut counted[id], true);
        if first && !node.sampled.is_empty() {
            prompt_len.get_or_insert(s.token_ids.len());
        }
        for token in &node.sampled {
            s.token_ids.push(token.id);
            s.loss_mask.push(first);
            s.logprobs.push(if first { token.logprob } else { 0.0 });
            s.versions.push(if first { token.version.0 } else { 0 });
        }
    }
    s.prompt_len = prompt_len.unwrap_or(s.token_ids.len()) as u32;
    s
}
