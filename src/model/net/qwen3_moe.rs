//! The layer of Qwen3 MoE: attention as in [`super::qwen3`], and in its sparse layers
//!
//! ```text
//! p = softmax(m·Wrouterᵀ)                        f32, over all E experts
//! e, w = the k largest of p;   w = w / Σw         where `norm_topk_prob` says so
//! x = x + Σ_j w_j·expert_{e_j}(m)                 an expert is a SwiGLU MLP
//! ```
//!
//! A layer is dense where `mlp_only_layers` or `decoder_sparse_step` make it so.

use super::{
    attention::Attention,
    decoder::{DecoderLayer, Mixer},
    experts::Experts,
    mlp::{Mlp, SparseMlp, SwiGlu},
    norm::Norm,
    parameters::Parameters,
    router::Router,
};
use crate::model::hf::{MlpKind, ModelConfig};

pub(super) fn layer(config: &ModelConfig, layer: usize, p: Parameters) -> DecoderLayer {
    let norm = |name: &str| Norm::plain(p.tensor(name), config.rms_norm_eps);
    let (q_norm, k_norm) = (norm("self_attn.q_norm.weight"), norm("self_attn.k_norm.weight"));
    let mlp = match config.layers[layer].mlp {
        MlpKind::Dense => Mlp::Dense(SwiGlu::new(&p, "mlp")),
        MlpKind::Sparse => Mlp::Sparse(SparseMlp {
            router: Router::new(config, layer, &p),
            experts: Experts::new(&p),
            shared: None,
        }),
    };
    DecoderLayer {
        input_norm: norm("input_layernorm.weight"),
        mixer: Mixer::Attention(Attention::new(config, &p).with_qk_norm(q_norm, k_norm)),
        post_norm: norm("post_attention_layernorm.weight"),
        mlp,
        parameters: p,
    }
}
