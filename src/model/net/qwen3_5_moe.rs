//! The layer of Qwen3.5 MoE (and 3.6 MoE): mixers as in [`super::qwen3_5`], three of four layers with a gated
//! delta net ([`super::delta_net`]), the others with gated attention; and experts in every layer.
//!
//! ```text
//! a = norm(x)
//! x = x + deltanet(a)                                                        where layer_types says linear_attention
//! x = x + ( attention(rotate(q_norm(q)), rotate(k_norm(k)), v) ∘ σ(gate) )·Woᵀ            where it says full_attention
//! m = norm(x)
//! p = softmax(m·gᵀ), e = the k largest of p, w = p_e / Σ p_e                 k = num_experts_per_tok
//! x = x + Σ_j w_j·expert_{e_j}(m) + σ(m·gsᵀ)·shared(m)                       expert: (silu(m·Gᵀ) ∘ (m·Uᵀ))·Dᵀ
//! ```
//!
//! Norms multiply by `1 + w`. That the weights w are normalised is the family's and no setting (`model/hf/layers.rs`).

use super::{
    decoder::DecoderLayer,
    experts::Experts,
    mlp::{Mlp, SharedExpert, SparseMlp},
    norm::Norm,
    parameters::Parameters,
    qwen3_5::mixer,
    router::Router,
};
use crate::model::hf::ModelConfig;

pub(super) fn layer(config: &ModelConfig, layer: usize, p: Parameters) -> DecoderLayer {
    let norm = |name: &str| Norm::zero_centred(p.tensor(name), config.rms_norm_eps);
    DecoderLayer {
        input_norm: norm("input_layernorm.weight"),
        mixer: mixer(config, layer, &p),
        post_norm: norm("post_attention_layernorm.weight"),
        mlp: Mlp::Sparse(SparseMlp {
            router: Router::new(config, layer, &p),
            experts: Experts::new(&p),
            shared: Some(SharedExpert::new(&p)),
        }),
        parameters: p,
    }
}
