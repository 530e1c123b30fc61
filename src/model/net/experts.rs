//! The experts of a sparse layer.
//!
//! Assignments (token, expert) are sorted by expert, so that each expert is one product over its tokens;
//! the results are weighted behind the down projection and added up token by token.

use super::{layout::Routing, parameters::Parameters};
use tch::{Kind, Tensor};

/// All experts of one layer, stacked.
pub(super) struct Experts {
    /// `[E,2I,H]`: rows of gate, then of up.
    gate_up: Tensor,
    /// `[E,H,I]`.
    down: Tensor,
}

impl Experts {
    pub(super) fn new(p: &Parameters) -> Self {
        Self {
            gate_up: p.tensor("mlp.experts.gate_up_proj"),
            down: p.tensor("mlp.experts.down_proj"),
        }
    }

    /// `[T,H]` → `[T,H]`.
    pub(super) fn forward(&self, x: &Tensor, routing: &Routing) -> Tensor {
        let (tokens, top_k) = routing.experts.size2().unwrap_or((0, 1));
        let num_experts = self.gate_up.size()[0];
        let flat = routing.experts.flatten(0, -1);
        // Stable, so that the sum over an expert's tokens does not depend on the sort.
        let order = flat.argsort_stable(true, -1, false);
        let counts = Vec::<i64>::try_from(flat.bincount(None::<&Tensor>, num_experts))
            .unwrap_or_else(|e| unreachable!("counts are a vector of integers: {e}"));
        let rows = order.divide_scalar_mode(top_k, "floor");
        let inputs = x.index_select(0, &rows).split_with_sizes(&counts[..], 0);
        // One `unbind` each: the gradient of the stack is then put together once.
        let gate_up = self.gate_up.unbind(0);
        let down = self.down.unbind(0);
        let outputs: Vec<Tensor> = inputs
            .iter()
            .enumerate()
            .filter(|(e, _)| counts[*e] > 0)
            .map(|(e, input)| {
                let both = input
                    .linear(&gate_up[e].to_kind(x.kind()), None::<&Tensor>)
                    .chunk(2, -1);
                let inner = both[0].silu() * &both[1];
                inner.linear(&down[e].to_kind(x.kind()), None::<&Tensor>)
            })
            .collect();
        let zeros = Tensor::zeros([tokens, x.size()[1]], (x.kind(), x.device()));
        if outputs.is_empty() {
            return zeros;
        }
        let weights = routing
            .weights
            .flatten(0, -1)
            .index_select(0, &order)
            .unsqueeze(-1);
        let weighted = Tensor::cat(&outputs, 0) * weights;
        zeros.index_add(0, &rows.to_kind(Kind::Int64), &weighted)
    }
}
