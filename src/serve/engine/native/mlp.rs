//! Feed-forward halves of a step.

use super::{
    forward::{floats, floats_mut, Forward, Group},
    kernels,
    pages::PAGE_TOKENS,
    weights::{DenseWeights, SparseWeights},
};
use tch::{Device, Kind, Tensor};

impl DenseWeights {
    /// `silu(m·Wgate) ∘ m·Wup`, `[T,I]`.
    pub(super) fn inner(&self, m: &Tensor) -> Tensor {
        let gate_up = match &self.bias {
            None => m.mm(&self.gate_up),
            Some((bias, _)) => bias.addmm(m, &self.gate_up),
        };
        let inner = gate_up.size()[1] / 2;
        let mut y = Tensor::empty([m.size()[0], inner], (Kind::Float, Device::Cpu));
        kernels::silu_mul(floats_mut(&mut y), floats(&gate_up), inner as usize);
        y
    }
}

/// Experts of all rows: `k` a row, the most likely first.
struct Assignment {
    experts: Vec<u16>,
    weights: Vec<f32>,
}

impl Forward {
    /// Routed experts: `m [T,H]` → `[T,H]`. The choice of every
    /// token is kept beside its keys and values.
    pub(super) fn sparse_mlp(
        &self,
        sparse_layer: usize,
        weights: &SparseWeights,
        m: &Tensor,
        groups: &[Group],
    ) -> Tensor {
        let Some(sizes) = self.shape.config.experts else {
            unreachable!("weights of experts come from a config with their sizes")
        };
        let logits = m.mm(&weights.router);
        let k = sizes.top_k;
        let chosen = choose(floats(&logits), sizes.num_experts, k, sizes.normalize);
        for group in groups {
            for i in 0..group.work.tokens.len() {
                let position = group.work.start + i;
                let page = group.work.pages[position / PAGE_TOKENS];
                let experts = &chosen.experts[(group.first_row + i) * k..][..k];
                self.routing
                    .write(page, position % PAGE_TOKENS, sparse_layer, experts);
            }
        }
        let width = m.size()[1] as usize;
        let mut y = Tensor::zeros(m.size(), (Kind::Float, Device::Cpu));
        let total = floats_mut(&mut y);
        for (e, expert) in weights.experts.iter().enumerate() {
            let places: Vec<usize> = (0..chosen.experts.len())
                .filter(|i| usize::from(chosen.experts[*i]) == e)
                .collect();
            if places.is_empty() {
                continue;
            }
            let rows: Vec<i64> = places.iter().map(|i| (i / k) as i64).collect();
            let output = expert
                .inner(&m.index_select(0, &Tensor::from_slice(&rows)))
                .mm(&expert.down);
            for (place, output) in places.iter().zip(floats(&output).chunks_exact(width)) {
                let weight = chosen.weights[*place];
                for (y, x) in total[place / k * width..][..width].iter_mut().zip(output) {
                    *y += weight * x;
                }
            }
        }
        y
    }
}

/// Softmax over all experts of each row, and the `k` largest of it. Equal probabilities are ordered by
/// number.
fn choose(logits: &[f32], num_experts: usize, k: usize, normalize: bool) -> Assignment {
    let mut chosen = Assignment {
        experts: Vec::new(),
        weights: Vec::new(),
    };
    let mut order: Vec<u16> = Vec::with_capacity(num_experts);
    for row in logits.chunks_exact(num_experts) {
        let mut probabilities = row.to_vec();
        kernels::softmax(&mut probabilities);
        order.clear();
        order.extend(0..num_experts as u16);
        let by_size = |a: &u16, b: &u16| {
            probabilities[usize::from(*b)]
                .total_cmp(&probabilities[usize::from(*a)])
                .then(a.cmp(b))
        };
        if k < num_experts {
            order.select_nth_unstable_by(k, by_size);
        }
        order[..k].sort_unstable_by(by_size);
        let weights = order[..k].iter().map(|e| probabilities[usize::from(*e)]);
        let scale = if normalize {
            1.0 / weights.clone().sum::<f32>()
        } else {
            1.0
        };
        chosen.weights.extend(weights.map(|w| w * scale));
        chosen.experts.extend_from_slice(&order[..k]);
    }
    chosen
}

#[cfg(test)]
mod tests {
    use super::choose;

    #[test]
    fn the_largest_probabilities_are_chosen_in_order() {
        let logits = [0.1, 2.0, -1.0, 2.0, 0.5, 0.0, 0.0, 0.0, 0.0, 3.0];
        let free = choose(&logits, 5, 2, false);
        assert_eq!(free.experts, [1, 3, 4, 0]);
        let exps: Vec<f64> = logits[..5].iter().map(|l| f64::from(*l).exp()).collect();
        let want = exps[1] / exps.iter().sum::<f64>();
        assert!((f64::from(free.weights[0]) - want).abs() < 1e-6);
        let scaled = choose(&logits, 5, 5, true);
        assert!((scaled.weights[..5].iter().sum::<f32>() - 1.0).abs() < 1e-6);
    }
}
