//! The demo policy's model folder without its weights: a tokenizer learned from the transcripts, the
//! chat template, `tokenizer_config.json` and `generation_config.json`.

use super::{
    conversation::{Conversation, ENDINGS},
    families::{Draft, Family},
    transcripts::{Habits, Transcript},
    words::{KEYS, WORDS},
    InitError,
};
use crate::model::{
    bpe::{TrainedBpe, CHAT_TOKENS},
    chat_template::ChatTemplate,
    hf::{ModelConfig, ModelType},
};
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;
use serde_json::{json, Map, Value};
use std::{collections::HashMap, path::Path};

/// The chat template: Qwen3 markup with hermes tool calls.
pub const CHAT_TEMPLATE: &str = include_str!("chat_template.jinja");

/// Upper bound on the vocabulary; training stops earlier when the corpus has no pair left to merge.
const VOCABULARY_LIMIT: usize = 1536;
const MAX_POSITIONS: usize = 2048;
const TRANSCRIPTS_PER_FAMILY: usize = 200;

/// Learns the tokenizer and writes it with its companions into `dir`.
pub fn write_tokenizer(dir: &Path, seed: u64) -> Result<(), InitError> {
    let template =
        ChatTemplate::from_source(CHAT_TEMPLATE.to_owned(), "chat_template.jinja", HashMap::new())?;
    let corpus = corpus(&template, seed)?;
    let bpe = TrainedBpe::train(corpus.iter().map(String::as_str), VOCABULARY_LIMIT)?;
    bpe.save(&dir.join("tokenizer.json"))?;
    write(&dir.join("chat_template.jinja"), CHAT_TEMPLATE.as_bytes())?;
    write_json(&dir.join("tokenizer_config.json"), &tokenizer_config(&bpe))?;
    let id = |token: &str| bpe.token_to_id(token);
    write_json(
        &dir.join("generation_config.json"),
        &json!({
            "do_sample": true,
            "temperature": 1.0,
            "eos_token_id": [id("<|im_end|>"), id("<|endoftext|>")],
            "pad_token_id": id("<|endoftext|>"),
        }),
    )
}

/// Conversations of every family, and every word where it may follow a space, a slash or nothing.
fn corpus(template: &ChatTemplate, seed: u64) -> Result<Vec<String>, InitError> {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let mut texts = Vec::new();
    let conversation = Conversation::new(template)?;
    for family in Family::ALL {
        for _ in 0..TRANSCRIPTS_PER_FAMILY {
            let draft = Draft::draw(family, &mut rng);
            let transcript = Transcript::draw(&draft, &Habits::default(), &mut rng);
            texts.push(conversation.render(&transcript)?);
        }
    }
    for word in WORDS.iter().chain(&KEYS) {
        texts.extend(std::iter::repeat_n(format!("{word} {word} {word}"), 50));
    }
    texts.extend(ENDINGS.iter().map(|text| (*text).to_owned()));
    Ok(texts)
}

fn tokenizer_config(bpe: &TrainedBpe) -> Value {
    let added: Map<String, Value> = CHAT_TOKENS
        .iter()
        .filter_map(|(content, special)| {
            let id = bpe.token_to_id(content)?;
            let entry = json!({"content": content, "lstrip": false, "normalized": false, "rstrip": false,
                               "single_word": false, "special": special});
            Some((id.to_string(), entry))
        })
        .collect();
    json!({
        "add_prefix_space": false,
        "added_tokens_decoder": added,
        "bos_token": null,
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": false,
        "eos_token": "<|im_end|>",
        "errors": "replace",
        "model_max_length": MAX_POSITIONS,
        "pad_token": "<|endoftext|>",
        "split_special_tokens": false,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": null,
    })
}

/// The network's shape for a vocabulary: two layers of width 192, one to two million parameters, by
/// family. The mixtures of experts have eight experts of which a token uses two; the hybrids have a delta net
/// in their first layer.
pub fn model_config(
    model_type: ModelType,
    vocab_size: usize,
    eos_token_ids: &[u32],
) -> Result<ModelConfig, InitError> {
    let architecture = match model_type {
        ModelType::Llama => "LlamaForCausalLM",
        ModelType::Qwen3 => "Qwen3ForCausalLM",
        ModelType::Qwen3Moe => "Qwen3MoeForCausalLM",
        ModelType::Qwen3Next => "Qwen3NextForCausalLM",
        ModelType::Qwen3_5 => "Qwen3_5ForCausalLM",
        ModelType::Qwen3_5Moe => "Qwen3_5MoeForCausalLM",
    };
    let text_only = match model_type {
        ModelType::Qwen3_5 | ModelType::Qwen3_5Moe => "_text",
        _ => "",
    };
    let mut config = json!({
        "architectures": [architecture],
        "model_type": format!("{}{text_only}", model_type.name()),
        "vocab_size": vocab_size, "hidden_size": 192, "intermediate_size": 512,
        "num_hidden_layers": 2, "num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 64,
        "hidden_act": "silu", "rms_norm_eps": 1e-6, "attention_bias": false, "tie_word_embeddings": true,
        "rope_theta": 10_000.0, "max_position_embeddings": MAX_POSITIONS, "initializer_range": 0.02,
        "eos_token_id": eos_token_ids, "torch_dtype": "float32",
    });
    let more = match model_type {
        ModelType::Llama | ModelType::Qwen3 => json!({}),
        ModelType::Qwen3Moe => json!({"decoder_sparse_step": 1, "mlp_only_layers": []}),
        ModelType::Qwen3Next | ModelType::Qwen3_5 | ModelType::Qwen3_5Moe => json!({
            "layer_types": ["linear_attention", "full_attention"], "partial_rotary_factor": 0.5,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5},
            "linear_num_key_heads": 3, "linear_num_value_heads": 3, "linear_key_head_dim": 32,
            "linear_value_head_dim": 64, "linear_conv_kernel_dim": 4,
        }),
    };
    let experts = match model_type {
        ModelType::Qwen3Moe => json!({"norm_topk_prob": true}),
        ModelType::Qwen3Next => json!({"norm_topk_prob": true, "decoder_sparse_step": 1,
            "mlp_only_layers": [], "shared_expert_intermediate_size": 128}),
        ModelType::Qwen3_5Moe => json!({"shared_expert_intermediate_size": 128}),
        _ => Value::Null,
    };
    let Value::Object(map) = &mut config else {
        unreachable!("it is an object")
    };
    let sparse = json!({"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 192});
    for part in [
        more,
        experts.clone(),
        if experts.is_null() { Value::Null } else { sparse },
    ] {
        if let Value::Object(part) = part {
            map.extend(part);
        }
    }
    Ok(ModelConfig::from_value(map.clone(), Path::new("config.json"))?)
}

fn write(path: &Path, data: &[u8]) -> Result<(), InitError> {
    std::fs::write(path, data).map_err(InitError::io(path))
}

fn write_json(path: &Path, value: &Value) -> Result<(), InitError> {
    write(path, format!("{value:#}\n").as_bytes())
}
