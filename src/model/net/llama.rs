//! The layer of Llama:
//!
//! ```text
//! a = norm(x)
//! q, k, v = a·Wqᵀ, a·Wkᵀ, a·Wvᵀ                 [T, heads, d]
//! x = x + attention(rotate(q), rotate(k), v)·Woᵀ
//! m = norm(x)
//! x = x + (silu(m·Wgateᵀ) ∘ m·Wupᵀ)·Wdownᵀ
//! ```
//!
//! With `attention_bias` and `mlp_bias` the projections have biases. Llama 3.1 and later stretch the slow rotary frequencies ([`crate::model::hf::Llama3Scaling`]).

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
    DecoderLayer {
        input_norm: norm("input_layernorm.weight"),
        mixer: Mixer::Attention(Attention::new(config, &p)),
        post_norm: norm("post_attention_layernorm.weight"),
        mlp: Mlp::Dense(SwiGlu::new(&p, "mlp")),
        parameters: p,
    }
}
