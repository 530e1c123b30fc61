//! The experts of a sparse layer.
//!
//! Assignments (token, expert) are sorted by expert, so that each expert is one product over its tokens;
//! the results are weighted behind the down projection and added up token by token. Where the experts are
//! spread over ranks, the sorted rows travel to them and back (see [`super::exchange`]).

use super::{layout::Routing, parameters::Parameters, Exchange, PackedLayout};
use std::sync::Arc;
use tch::{Kind, Tensor};

/// All experts of one layer, stacked; with expert parallelism those of this rank.
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
    pub(super) fn forward(&self, x: &Tensor, routing: &Routing, layout: &PackedLayout) -> Tensor {
        let (tokens, top_k) = routing.experts.size2().unwrap_or((0, 1));
        let group = layout.expert_group();
        let num_experts = self.gate_up.size()[0] * group.map_or(1, |group| group.size());
        let flat = routing.experts.flatten(0, -1);
        // Stable, so that the sum over an expert's tokens does not depend on the sort.
        let order = flat.argsort_stable(true, -1, false);
        let counts = Vec::<i64>::try_from(flat.bincount(None::<&Tensor>, num_experts))
            .unwrap_or_else(|e| unreachable!("counts are a vector of integers: {e}"));
        let rows = order.divide_scalar_mode(top_k, "floor");
        let inputs = x.index_select(0, &rows);
        let outputs = match group {
            Some(group) => self.apply_on_their_ranks(&inputs, &counts, layout, group),
            None => self.apply(&inputs, &counts),
        };
        let zeros = Tensor::zeros([tokens, x.size()[1]], (x.kind(), x.device()));
        let weights = routing
            .weights
            .flatten(0, -1)
            .index_select(0, &order)
            .unsqueeze(-1);
        zeros.index_add(0, &rows.to_kind(Kind::Int64), &(outputs * weights))
    }

    /// Rows in the order of their experts, `counts` each.
    fn apply(&self, inputs: &Tensor, counts: &[i64]) -> Tensor {
        let cut = inputs.split_with_sizes(counts, 0);
        // One `unbind` each: the gradient of the stack is then put together once.
        let gate_up = self.gate_up.unbind(0);
        let down = self.down.unbind(0);
        let outputs: Vec<Tensor> = cut
            .iter()
            .enumerate()
            .filter(|(e, _)| counts[*e] > 0)
            .map(|(e, input)| {
                let both = input
                    .linear(&gate_up[e].to_kind(input.kind()), None::<&Tensor>)
                    .chunk(2, -1);
                let inner = both[0].silu() * &both[1];
                inner.linear(&down[e].to_kind(input.kind()), None::<&Tensor>)
            })
            .collect();
        if outputs.is_empty() {
            return inputs.shallow_clone();
        }
        Tensor::cat(&outputs, 0)
    }

    /// The same, where every rank has an equal share of the experts, in order.
    fn apply_on_their_ranks(
        &self,
        inputs: &Tensor,
        counts: &[i64],
        layout: &PackedLayout,
        group: &Arc<dyn Exchange>,
    ) -> Tensor {
        let share = self.gate_up.size()[0] as usize;
        let sum = |counts: &[i64]| counts.iter().sum::<i64>();
        let send: Vec<i64> = counts.chunks(share).map(sum).collect();
        // By rank they come from, then by expert.
        let arriving = group.counts(counts);
        let receive: Vec<i64> = arriving.chunks(share).map(sum).collect();
        let (rows, _) = layout.exchange(group, inputs, &send, &receive, &[]);
        let (to_experts, back, by_expert) = regroup(&arriving, share);
        let index = |values: Vec<i64>| Tensor::from_slice(&values).to_device(inputs.device());
        let outputs = self.apply(&rows.index_select(0, &index(to_experts)), &by_expert);
        let outputs = outputs.index_select(0, &index(back));
        layout.exchange(group, &outputs, &receive, &send, &[]).0
    }
}

/// Rows that lie by rank, then by expert (`counts` of them) → their order by expert, then by rank, the way
/// back, and how many each expert has.
fn regroup(counts: &[i64], experts: usize) -> (Vec<i64>, Vec<i64>, Vec<i64>) {
    let mut starts = Vec::with_capacity(counts.len());
    let mut at = 0;
    for count in counts {
        starts.push(at);
        at += count;
    }
    let mut order = Vec::with_capacity(at as usize);
    let mut by_expert = vec![0; experts];
    for (expert, total) in by_expert.iter_mut().enumerate() {
        for place in (expert..counts.len()).step_by(experts) {
            order.extend(starts[place]..starts[place] + counts[place]);
            *total += counts[place];
        }
    }
    let mut back = vec![0; order.len()];
    for (new, old) in order.iter().enumerate() {
        back[*old as usize] = new as i64;
    }
    (order, back, by_expert)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_ordered_by_expert_and_find_back() {
        // Two ranks, two experts: rank 0 sends 2 and 1 rows, rank 1 sends 0 and 3.
        let (order, back, by_expert) = regroup(&[2, 1, 0, 3], 2);
        assert_eq!(order, [0, 1, 2, 3, 4, 5]);
        assert_eq!(by_expert, [2, 4]);
        let (order, back2, by_expert) = regroup(&[1, 2, 2, 1], 2);
        assert_eq!(
            (&order[..], &by_expert[..]),
            (&[0, 3, 4, 1, 2, 5][..], &[3, 3][..])
        );
        for (new, old) in order.iter().enumerate() {
            assert_eq!(back2[*old as usize], new as i64);
        }
        assert_eq!(back, [0, 1, 2, 3, 4, 5]);
    }
}
