//! Final norm, head and log-softmax of the sampled tokens, in chunks.
//!
//! With `z = norm(x)·Wᵀ / temperature` of one row and its log-softmax `ℓ`:
//! log-probability `ℓ[target]`, entropy `−Σ exp(ℓ) ℓ`.
//!
//! Invariant: logits of more than `chunk` rows never exist at once. The backward pass computes each
//! chunk again with gradients.

use super::{block_loop::to_vec, samples::TokenValues};
use crate::model::net::Policy;
use tch::{Kind, Tensor};

/// Rows to be scored.
pub(super) struct HeadInput<'a> {
    pub policy: &'a Policy,
    /// `[N,H]`: outputs of the last block that predict a sampled token.
    pub hidden: Tensor,
    /// `[N]` i64: the sampled tokens.
    pub targets: &'a Tensor,
    /// Divides the logits.
    pub divisor: f64,
    /// Rows at a time.
    pub chunk: i64,
}

impl HeadInput<'_> {
    /// `(hidden, targets, range start, length)` of each chunk.
    fn chunks(&self) -> impl Iterator<Item = (Tensor, Tensor, i64, i64)> + '_ {
        let rows = self.hidden.size()[0];
        (0..rows).step_by(self.chunk as usize).map(move |start| {
            let length = self.chunk.min(rows - start);
            let cut = |t: &Tensor| t.narrow(0, start, length);
            (cut(&self.hidden), cut(self.targets), start, length)
        })
    }
}

/// Log-probabilities and entropies, without a graph.
pub(super) fn values(input: &HeadInput<'_>) -> TokenValues {
    let mut out = TokenValues::default();
    let weight = input.policy.head_weight();
    for (hidden, targets, ..) in input.chunks() {
        let normed = input.policy.final_norm(&hidden);
        let (logprobs, entropies) = whole(&normed, &weight, &targets, input.divisor);
        out.logprobs.extend(to_vec(&logprobs));
        out.entropies.extend(to_vec(&entropies));
    }
    out
}

/// `[N]` log-probabilities and `[N]` entropies of normed rows `[N,H]`, in one piece.
pub(super) fn whole(normed: &Tensor, weight: &Tensor, targets: &Tensor, divisor: f64) -> (Tensor, Tensor) {
    let log_softmax = log_softmax(normed, weight, divisor);
    let entropies = -(log_softmax.exp() * &log_softmax).sum_dim_intlist(-1, false, None::<Kind>);
    (at_targets(&log_softmax, targets), entropies)
}

fn log_softmax(normed: &Tensor, weight: &Tensor, divisor: f64) -> Tensor {
    let logits = normed.linear(&weight.to_kind(normed.kind()), None::<&Tensor>);
    // The log-softmax of a bf16 row would lose what the loss lives on.
    let logits = match logits.kind() {
        Kind::BFloat16 => logits.to_kind(Kind::Float),
        _ => logits,
    };
    let logits = if divisor == 1.0 { logits } else { logits / divisor };
    logits.log_softmax(-1, None::<Kind>)
}

fn at_targets(log_softmax: &Tensor, targets: &Tensor) -> Tensor {
    log_softmax
        .gather(-1, &targets.unsqueeze(-1), false)
        .squeeze_dim(-1)
}

/// Gradient by the rows `[N,H]`; those of final norm and head weight go to `accumulate`, chunk by chunk.
pub(super) fn backward(
    input: &HeadInput<'_>,
    norm: &Tensor,
    by_logprob: &Tensor,
    by_entropy: Option<&Tensor>,
    mut accumulate: impl FnMut(&Tensor, &Tensor),
) -> Tensor {
    let weight = input.policy.head_weight();
    let mut parts = Vec::new();
    for (hidden, targets, start, length) in input.chunks() {
        let leaf = hidden.detach().set_requires_grad(true);
        let normed = input.policy.final_norm(&leaf);
        let mut sum = match by_entropy {
            None => {
                let logprobs = at_targets(&log_softmax(&normed, &weight, input.divisor), &targets);
                (logprobs * by_logprob.narrow(0, start, length)).sum(None)
            }
            Some(by_entropy) => {
                let (logprobs, entropies) = whole(&normed, &weight, &targets, input.divisor);
                (logprobs * by_logprob.narrow(0, start, length)).sum(None)
                    + (entropies * by_entropy.narrow(0, start, length)).sum(None)
            }
        };
        let wanted = [leaf, norm.shallow_clone(), weight.shallow_clone()];
        let gradients = Tensor::run_backward(&[&mut sum], &wanted, false, false);
        accumulate(&gradients[1], &gradients[2]);
        parts.push(gradients[0].shallow_clone());
    }
    if parts.is_empty() {
        return input.hidden.zeros_like();
    }
    Tensor::cat(&parts, 0)
}
