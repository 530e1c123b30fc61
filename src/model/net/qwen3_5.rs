//! The layer of dense Qwen3.5 (and 3.6): mixers as in [`super::qwen3_next`], except that the delta net
//! has one projection each for queries, keys and values together, for z, for b and for a; and a dense
//! MLP in every layer.
//!
//! Checkpoints with a vision tower hold this text model under `model.language_model`.

use super::{
    attention::Attention,
    decoder::{DecoderLayer, Mixer},
    delta_net::DeltaNet,
    mlp::{Mlp, SwiGlu},
    norm::Norm,
    parameters::Parameters,
};
use crate::model::hf::{MixerKind, ModelConfig};

pub(super) fn layer(config: &ModelConfig, layer: usize, p: Parameters) -> DecoderLayer {
    let norm = |name: &str| Norm::zero_centred(p.tensor(name), config.rms_norm_eps);
    DecoderLayer {
        input_norm: norm("input_layernorm.weight"),
        mixer: mixer(config, layer, &p),
        post_norm: norm("post_attention_layernorm.weight"),
        mlp: Mlp::Dense(SwiGlu::new(&p, "mlp")),
        parameters: p,
    }
}

/// Shared with the sparse sibling.
pub(super) fn mixer(config: &ModelConfig, layer: usize, p: &Parameters) -> Mixer {
    let norm = |name: &str| Norm::zero_centred(p.tensor(name), config.rms_norm_eps);
    match config.layers[layer].mixer {
        MixerKind::LinearAttention => Mixer::DeltaNet(DeltaNet::separate(config, p)),
        MixerKind::FullAttention => Mixer::Attention(
            Attention::new(config, p)
                .with_qk_norm(norm("self_attn.q_norm.weight"), norm("self_attn.k_norm.weight"))
                .with_output_gate(),
        ),
    }
}
