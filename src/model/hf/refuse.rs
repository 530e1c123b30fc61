//! Settings of `config.json` that would be computed wrongly, refused by name.

use super::{config::ModelType, keys::Keys, ModelError};

pub(super) fn unsupported(top: &Keys<'_>, keys: &Keys<'_>, model_type: ModelType) -> Result<(), ModelError> {
    if keys.get("hidden_act").is_some() && keys.text("hidden_act")? != "silu" {
        return Err(keys.bad("hidden_act", "only silu is supported"));
    }
    for keys in [top, keys] {
        if let Some(value) = keys.object("quantization_config")? {
            let method = value.get("quant_method").and_then(|v| v.as_str());
            return Err(keys.bad(
                "quantization_config",
                format!(
                    "quantised checkpoints ({}) are not supported: use the bf16 release",
                    method.unwrap_or("method not named")
                ),
            ));
        }
    }
    if model_type != ModelType::Llama && keys.flag_or("mlp_bias", false)? {
        return Err(keys.bad("mlp_bias", "only llama has biases in its MLP"));
    }
    if !keys.flag_or("attn_output_gate", true)? && model_type.is_hybrid() {
        return Err(keys.bad(
            "attn_output_gate",
            "attention without its output gate is not supported",
        ));
    }
    // The window applies from layer max_window_layers on; released models set none.
    let layers = keys.size("num_hidden_layers")?;
    let first = match model_type {
        ModelType::Qwen3 => keys.size_or("max_window_layers", 28).unwrap_or(0),
        _ => 0,
    };
    if keys.flag_or("use_sliding_window", false)? && first < layers {
        return Err(keys.bad("use_sliding_window", "sliding-window attention is not supported"));
    }
    Ok(())
}
