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
    hf::ModelConfig,
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

/// The network's shape for a vocabulary: two layers of width 192, about one million parameters.
pub fn model_config(vocab_size: usize, eos_token_ids: Vec<u32>) -> ModelConfig {
    let mut config = ModelConfig::qwen3(vocab_size, 192, 512, 2, 3, 3, 64);
    config.rope.theta = 10_000.0;
    config.max_position_embeddings = MAX_POSITIONS;
    config.eos_token_ids = eos_token_ids;
    config
}

fn write(path: &Path, data: &[u8]) -> Result<(), InitError> {
    std::fs::write(path, data).map_err(InitError::io(path))
}

fn write_json(path: &Path, value: &Value) -> Result<(), InitError> {
    write(path, format!("{value:#}\n").as_bytes())
}
