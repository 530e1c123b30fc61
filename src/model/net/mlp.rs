//! Feed-forward halves of a layer.

use super::{
    experts::Experts,
    parameters::{Parameters, Projection},
    router::Router,
    PackedLayout,
};
use tch::Tensor;

/// What follows the mixer.
pub(super) enum Mlp {
    /// One MLP.
    Dense(SwiGlu),
    /// Routed experts, and in some families one expert that every token uses.
    Sparse(SparseMlp),
}

impl Mlp {
    pub(super) fn forward(&self, x: &Tensor, layout: &PackedLayout) -> Tensor {
        match self {
            Mlp::Dense(mlp) => mlp.forward(x),
            Mlp::Sparse(mlp) => mlp.forward(x, layout),
        }
    }
}

/// `(silu(x·Wgateᵀ) ∘ x·Wupᵀ)·Wdownᵀ` (Shazeer, 2020, "GLU Variants Improve Transformer").
pub(super) struct SwiGlu {
    gate: Projection,
    up: Projection,
    down: Projection,
}

impl SwiGlu {
    pub(super) fn new(p: &Parameters, module: &str) -> Self {
        let projection = |name: &str| p.projection(&format!("{module}.{name}_proj"));
        Self {
            gate: projection("gate"),
            up: projection("up"),
            down: projection("down"),
        }
    }

    pub(super) fn forward(&self, x: &Tensor) -> Tensor {
        self.down.apply(&(self.gate.apply(x).silu() * self.up.apply(x)))
    }
}

/// `Σ_j w_j·expert_{e_j}(x)`, plus `σ(x·gᵀ)·shared(x)` where there is a shared expert.
pub(super) struct SparseMlp {
    pub router: Router,
    pub experts: Experts,
    pub shared: Option<SharedExpert>,
}

/// The expert that every token uses, behind a gate of one number a token.
pub(super) struct SharedExpert {
    mlp: SwiGlu,
    gate: Projection,
}

impl SharedExpert {
    pub(super) fn new(p: &Parameters) -> Self {
        Self {
            mlp: SwiGlu::new(p, "mlp.shared_expert"),
            gate: p.projection("mlp.shared_expert_gate"),
        }
    }
}

impl SparseMlp {
    fn forward(&self, x: &Tensor, layout: &PackedLayout) -> Tensor {
        let routing = self.router.route(x, layout);
        let y = self.experts.forward(x, &routing, layout);
        match &self.shared {
            Some(shared) => y + shared.gate.apply(x).sigmoid() * shared.mlp.forward(x),
            None => y,
        }
    }
}
