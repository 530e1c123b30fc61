//! The router of a sparse layer: which experts a token uses, and with which weights.
//!
//! `p = softmax(x·Wᵀ)` over all experts, in f32 whatever the residual stream is; the k largest are the
//! token's experts, and their weights are their probabilities, scaled to sum to 1 where the family
//! normalises.
//!
//! *Replay.* Where the layout carries the experts that the rollout used (Ma et al., 2025, "Stabilizing
//! MoE Reinforcement Learning by Aligning Training and Inference Routers": R3), only the choice is taken
//! from there: the weights, and their gradients, are those of the current probabilities at the recorded
//! experts. A token that was not recorded is routed freely.

use super::{layout::Routing, parameters::Parameters, precision::wide, PackedLayout};
use crate::model::hf::ModelConfig;
use tch::{Kind, Tensor};

/// Router of one layer.
pub(super) struct Router {
    /// `[E,H]`.
    weight: Tensor,
    /// Experts of a token, k.
    top_k: i64,
    /// Whether the weights of a token are scaled to sum to 1.
    normalize: bool,
    /// Place among the sparse layers.
    sparse_layer: usize,
}

impl Router {
    pub(super) fn new(config: &ModelConfig, layer: usize, p: &Parameters) -> Self {
        let Some(sizes) = config.experts else {
            unreachable!("a sparse layer comes from a config with the sizes of its experts")
        };
        Self {
            weight: p.tensor("mlp.gate.weight"),
            top_k: sizes.top_k as i64,
            normalize: sizes.normalize,
            sparse_layer: config.sparse_index(layer),
        }
    }

    pub(super) fn route(&self, x: &Tensor, layout: &PackedLayout) -> Routing {
        let logits = x.linear(&self.weight.to_kind(x.kind()), None::<&Tensor>);
        let probabilities = wide(&logits).softmax(-1, None::<Kind>);
        let (_, chosen) = probabilities.detach().topk(self.top_k, -1, true, true);
        let experts = match layout.replay(self.sparse_layer) {
            None => chosen,
            // A row that was not recorded holds -1.
            Some(recorded) => {
                let recorded = recorded.to_kind(Kind::Int64);
                recorded.where_self(&recorded.ge(0), &chosen)
            }
        };
        let mut weights = probabilities.gather(-1, &experts, false);
        if self.normalize {
            weights = &weights / weights.sum_dim_intlist(-1, true, None::<Kind>);
        }
        let routing = Routing {
            experts,
            weights: weights.to_kind(x.kind()),
        };
        layout.record(&routing);
        routing
    }
}
