//! Which kind every layer is, and the sizes of the kinds, from `config.json`.

use super::{
    config::{ExpertsConfig, LayerKind, LinearAttentionConfig, MixerKind, MlpKind, ModelType},
    keys::Keys,
    ModelError,
};

/// Layers of the deepest network that anybody writes down.
const MAX_LAYERS: usize = 10_000;
/// Experts are numbered by u16 in routing records.
const MAX_EXPERTS: usize = 1 << 16;

/// All layers in order.
///
/// Mixers: `layer_types` where it is given; otherwise the hybrids attend in every
/// `full_attention_interval`-th layer (4) and all other families in every layer. MLPs: layer i of
/// `qwen3_moe` and `qwen3_next` is sparse unless `mlp_only_layers` names it or `decoder_sparse_step` does
/// not divide i + 1; every layer of `qwen3_5_moe` is sparse.
pub(super) fn read(keys: &Keys<'_>, model_type: ModelType) -> Result<Vec<LayerKind>, ModelError> {
    let count = keys.size("num_hidden_layers")?;
    if count > MAX_LAYERS {
        let problem = format!("{count} is more than {MAX_LAYERS}");
        return Err(keys.bad("num_hidden_layers", problem));
    }
    let mixers = mixers(keys, model_type, count)?;
    let sparse = sparse(keys, model_type, count)?;
    let layer = |(mixer, sparse)| LayerKind {
        mixer,
        mlp: if sparse { MlpKind::Sparse } else { MlpKind::Dense },
    };
    Ok(mixers.into_iter().zip(sparse).map(layer).collect())
}

fn mixers(keys: &Keys<'_>, model_type: ModelType, count: usize) -> Result<Vec<MixerKind>, ModelError> {
    let listed = match model_type {
        // Its layers attend whatever the list says.
        ModelType::Qwen3Moe => None,
        _ => keys.texts("layer_types")?,
    };
    let Some(listed) = listed else {
        let interval = keys.size_or("full_attention_interval", 4)?;
        let kind = |i: usize| {
            if model_type.is_hybrid() && !(i + 1).is_multiple_of(interval) {
                MixerKind::LinearAttention
            } else {
                MixerKind::FullAttention
            }
        };
        return Ok((0..count).map(kind).collect());
    };
    if listed.len() != count {
        let problem = format!("{} entries for num_hidden_layers = {count}", listed.len());
        return Err(keys.bad("layer_types", problem));
    }
    let kind = |text: &&str| match *text {
        "full_attention" => Ok(MixerKind::FullAttention),
        "linear_attention" if model_type.is_hybrid() => Ok(MixerKind::LinearAttention),
        other => {
            let known = if model_type.is_hybrid() {
                "full_attention, linear_attention"
            } else {
                "full_attention"
            };
            let problem = format!("`{other}` is not supported (supported: {known})");
            Err(keys.bad("layer_types", problem))
        }
    };
    listed.iter().map(kind).collect()
}

fn sparse(keys: &Keys<'_>, model_type: ModelType, count: usize) -> Result<Vec<bool>, ModelError> {
    match model_type {
        ModelType::Llama | ModelType::Qwen3 | ModelType::Qwen3_5 => Ok(vec![false; count]),
        ModelType::Qwen3_5Moe => Ok(vec![true; count]),
        ModelType::Qwen3Moe | ModelType::Qwen3Next => {
            let step = keys.size_or("decoder_sparse_step", 1)?;
            let dense = keys.indices("mlp_only_layers")?;
            let is_sparse = |i: usize| !dense.contains(&i) && (i + 1).is_multiple_of(step);
            Ok((0..count).map(is_sparse).collect())
        }
    }
}

/// Sizes of the gated delta net.
pub(super) fn linear_attention(keys: &Keys<'_>) -> Result<LinearAttentionConfig, ModelError> {
    let config = LinearAttentionConfig {
        num_key_heads: keys.size_or("linear_num_key_heads", 16)?,
        num_value_heads: keys.size_or("linear_num_value_heads", 32)?,
        key_head_dim: keys.size_or("linear_key_head_dim", 128)?,
        value_head_dim: keys.size_or("linear_value_head_dim", 128)?,
        conv_kernel: keys.size_or("linear_conv_kernel_dim", 4)?,
    };
    if !config.num_value_heads.is_multiple_of(config.num_key_heads) {
        let problem = format!(
            "{} is not a multiple of linear_num_key_heads = {}",
            config.num_value_heads, config.num_key_heads
        );
        return Err(keys.bad("linear_num_value_heads", problem));
    }
    Ok(config)
}

/// Sizes of the experts. `num_local_experts` is another spelling of `num_experts`.
pub(super) fn experts(keys: &Keys<'_>, model_type: ModelType) -> Result<ExpertsConfig, ModelError> {
    let (num_experts, top_k, normalize, shared) = match model_type {
        ModelType::Qwen3Next => (512, 10, keys.flag_or("norm_topk_prob", true)?, true),
        ModelType::Qwen3_5Moe => (256, 8, true, true),
        _ => (128, 8, keys.flag_or("norm_topk_prob", false)?, false),
    };
    let config = ExpertsConfig {
        num_experts: keys.size_or("num_experts", keys.size_or("num_local_experts", num_experts)?)?,
        top_k: keys.size_or("num_experts_per_tok", top_k)?,
        intermediate_size: keys.size("moe_intermediate_size")?,
        normalize,
        shared_intermediate_size: shared
            .then(|| keys.size_or("shared_expert_intermediate_size", 512))
            .transpose()?,
    };
    if config.num_experts > MAX_EXPERTS {
        let problem = format!("{} is more than {MAX_EXPERTS}", config.num_experts);
        return Err(keys.bad("num_experts", problem));
    }
    if config.top_k > config.num_experts {
        let problem = format!(
            "{} experts are to be chosen among {}",
            config.top_k, config.num_experts
        );
        return Err(keys.bad("num_experts_per_tok", problem));
    }
    Ok(config)
}
