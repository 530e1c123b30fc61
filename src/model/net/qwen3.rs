//! The layer of dense Qwen3:
//!
//! ```text
//! a = norm(x)
//! q, k, v = a·Wqᵀ, a·Wkᵀ, a·Wvᵀ                 [T, heads, d]
//! q, k = rotate(q_norm(q)), rotate(k_norm(k))    norms over the d numbers of a head
//! x = x + attention(q, k, v)·Woᵀ
//! m = norm(x)
//! x = x + (silu(m·Wgateᵀ) ∘ m·Wupᵀ)·Wdownᵀ
//! ```

use super::{
    attention::Attention,
    decoder::{DecoderLayer, Mixer},
    mlp::{Mlp, SwiGlu},
    norm::Norm,
    parameters::Parameters,
};
use crate::model::hf::ModelConfig;

pub(super) fn layer(config: &ModelConfig, p: Parameters) -> DecoderLayer {
    let norm = |name: &str| Norm::plain(p.tensor(name), config.rms_norm_eps);
    let (q_norm, k_norm) = (norm("self_attn.q_norm.weight"), norm("self_attn.k_norm.weight"));
    DecoderLayer {
        input_norm: norm("input_layernorm.weight"),
        mixer: Mixer::Attention(Attention::new(config, &p).with_qk_norm(q_norm, k_norm)),
        post_norm: norm("post_attention_layernorm.weight"),
        mlp: Mlp::Dense(SwiGlu::new(&p, "mlp")),
        parameters: p,
    }
}
