//! The layer of Qwen3.5 MoE (and 3.6 MoE): mixers as in [`super::qwen3_5`], and in every layer routed
//! experts with normalised weights and a shared expert, as in [`super::qwen3_next`].

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
