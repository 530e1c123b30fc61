//! The layer of Qwen3-Next. All norms multiply by `1 + w`, except the one behind the delta net.
//!
//! Three of four layers mix tokens with a gated delta net ([`super::delta_net`]), whose projections are
//! ordered by key head; the others attend, with norms on the heads of queries and keys, a rotation of
//! the first numbers of each head (`partial_rotary_factor`, a quarter where the config is silent), and a
//! gate on the output. Which is which say `layer_types`, or `full_attention_interval` (4):
//!
//! ```text
//! a = norm(x)
//! x = x + deltanet(a)                            where layer_types says linear_attention; where full_attention:
//! (q, gate)_h = a·Wqᵀ of head h                  2d numbers a head
//! x = x + ( attention(rotate(q_norm(q)), rotate(k_norm(k)), v) ∘ σ(gate) )·Woᵀ
//! ```
//!
//! Sparse layers add an expert that every token uses:
//!
//! ```text
//! m = norm(x)
//! x = x + Σ_j w_j·expert_{e_j}(m) + σ(m·gsᵀ)·shared(m)
//! ```
//!
//! A layer is dense where `mlp_only_layers` or `decoder_sparse_step` make it so.

use super::{
    attention::Attention,
    decoder::{DecoderLayer, Mixer},
    delta_net::DeltaNet,
    experts::Experts,
    mlp::{Mlp, SharedExpert, SparseMlp, SwiGlu},
    norm::Norm,
    parameters::Parameters,
    router::Router,
};
use crate::model::hf::{MixerKind, MlpKind, ModelConfig};

pub(super) fn layer(config: &ModelConfig, layer: usize, p: Parameters) -> DecoderLayer {
    let norm = |name: &str| Norm::zero_centred(p.tensor(name), config.rms_norm_eps);
    let mixer = match config.layers[layer].mixer {
        MixerKind::LinearAttention => Mixer::DeltaNet(DeltaNet::by_key_head(config, &p)),
        MixerKind::FullAttention => Mixer::Attention(
            Attention::new(config, &p)
                .with_qk_norm(norm("self_attn.q_norm.weight"), norm("self_attn.k_norm.weight"))
                .with_output_gate(),
        ),
    };
    let mlp = match config.layers[layer].mlp {
        MlpKind::Dense => Mlp::Dense(SwiGlu::new(&p, "mlp")),
        MlpKind::Sparse => Mlp::Sparse(SparseMlp {
            router: Router::new(config, layer, &p),
            experts: Experts::new(&p),
            shared: Some(SharedExpert::new(&p)),
        }),
    };
    DecoderLayer {
        input_norm: norm("input_layernorm.weight"),
        mixer,
        post_norm: norm("post_attention_layernorm.weight"),
        mlp,
        parameters: p,
    }
}
