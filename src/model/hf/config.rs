//! `config.json`: the numbers that define a network.
//!
//! Keys that the network does not need are kept and written back, so that a folder read and saved again
//! is complete for other programs.

use super::ModelError;
use serde_json::{json, Map, Value};
use std::path::{Path, PathBuf};

/// Architecture of a checkpoint (`model_type`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ModelType {
    /// Dense Qwen3: grouped-query attention with per-head RMSNorm on queries and keys, SwiGLU.
    Qwen3,
}

impl ModelType {
    /// As written in `model_type`.
    pub fn name(self) -> &'static str {
        match self {
            ModelType::Qwen3 => "qwen3",
        }
    }

    fn class(self) -> &'static str {
        match self {
            ModelType::Qwen3 => "Qwen3ForCausalLM",
        }
    }
}

/// The part of `config.json` that defines the network, under the names of the file.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelConfig {
    /// Architecture.
    pub model_type: ModelType,
    /// Rows of the embedding, V.
    pub vocab_size: usize,
    /// Width of the residual stream, H.
    pub hidden_size: usize,
    /// Width of the MLP, I.
    pub intermediate_size: usize,
    /// Decoder layers, L.
    pub num_hidden_layers: usize,
    /// Query heads.
    pub num_attention_heads: usize,
    /// Key and value heads; divides `num_attention_heads`.
    pub num_key_value_heads: usize,
    /// Width of a head, d (even).
    pub head_dim: usize,
    /// Epsilon of every RMSNorm.
    pub rms_norm_eps: f64,
    /// Base of the rotary frequencies.
    pub rope_theta: f64,
    /// Biases on the q, k, v and o projections.
    pub attention_bias: bool,
    /// The output head is the embedding; `lm_head.weight` is absent from the checkpoint.
    pub tie_word_embeddings: bool,
    /// Longest sequence that the checkpoint was made for.
    pub max_position_embeddings: usize,
    /// Standard deviation of random initialisation.
    pub initializer_range: f64,
    /// Union of `eos_token_id` of `config.json` and `generation_config.json`, in that order.
    pub eos_token_ids: Vec<u32>,
    /// The whole `config.json` as it was read; saved again with the fields above written over it.
    pub raw: Map<String, Value>,
}

impl ModelConfig {
    /// A dense Qwen3 with tied embeddings, rotary base 1e6, epsilon 1e-6 and 32768 positions; adjust
    /// the public fields for anything else.
    pub fn qwen3(
        vocab_size: usize,
        hidden_size: usize,
        intermediate_size: usize,
        num_hidden_layers: usize,
        num_attention_heads: usize,
        num_key_value_heads: usize,
        head_dim: usize,
    ) -> Self {
        Self {
            model_type: ModelType::Qwen3,
            vocab_size,
            hidden_size,
            intermediate_size,
            num_hidden_layers,
            num_attention_heads,
            num_key_value_heads,
            head_dim,
            rms_norm_eps: 1e-6,
            rope_theta: 1e6,
            attention_bias: false,
            tie_word_embeddings: true,
            max_position_embeddings: 32768,
            initializer_range: 0.02,
            eos_token_ids: Vec::new(),
            raw: Map::new(),
        }
    }

    /// Reads `config.json` of a model folder, and the stop ids of `generation_config.json` if it is there.
    pub fn from_dir(dir: &Path) -> Result<Self, ModelError> {
        let path = dir.join("config.json");
        let mut config = Self::from_value(read_object(&path)?, &path)?;
        let generation = dir.join("generation_config.json");
        if generation.is_file() {
            let keys = Keys {
                map: &read_object(&generation)?,
                path: &generation,
            };
            for id in keys.token_ids("eos_token_id")? {
                if !config.eos_token_ids.contains(&id) {
                    config.eos_token_ids.push(id);
                }
            }
        }
        Ok(config)
    }

    /// Reads the parsed `config.json`; `path` is for messages.
    pub fn from_value(raw: Map<String, Value>, path: &Path) -> Result<Self, ModelError> {
        let keys = Keys { map: &raw, path };
        let model_type = match keys.text("model_type")? {
            "qwen3" => ModelType::Qwen3,
            other => {
                return Err(ModelError::UnsupportedModelType {
                    path: path.to_path_buf(),
                    model_type: other.to_string(),
                })
            }
        };
        keys.refuse_unsupported()?;
        let mut config = Self {
            model_type,
            vocab_size: keys.size("vocab_size")?,
            hidden_size: keys.size("hidden_size")?,
            intermediate_size: keys.size("intermediate_size")?,
            num_hidden_layers: keys.size("num_hidden_layers")?,
            num_attention_heads: keys.size("num_attention_heads")?,
            num_key_value_heads: keys.size("num_key_value_heads")?,
            head_dim: keys.size_or("head_dim", 128)?,
            rms_norm_eps: keys.number_or("rms_norm_eps", 1e-6)?,
            rope_theta: keys.rope_theta()?,
            attention_bias: keys.flag_or("attention_bias", false)?,
            tie_word_embeddings: keys.flag_or("tie_word_embeddings", false)?,
            max_position_embeddings: keys.size_or("max_position_embeddings", 32768)?,
            initializer_range: keys.number_or("initializer_range", 0.02)?,
            eos_token_ids: keys.token_ids("eos_token_id")?,
            raw: Map::new(),
        };
        if !config
            .num_attention_heads
            .is_multiple_of(config.num_key_value_heads)
        {
            let problem = format!(
                "{} does not divide num_attention_heads = {}",
                config.num_key_value_heads, config.num_attention_heads
            );
            return Err(keys.bad("num_key_value_heads", problem));
        }
        if !config.head_dim.is_multiple_of(2) {
            let problem = format!("{} is odd; rotary pairs need an even number", config.head_dim);
            return Err(keys.bad("head_dim", problem));
        }
        config.raw = raw;
        Ok(config)
    }

    /// The `config.json` to write: what was read, with the fields of this struct written over it.
    pub fn to_value(&self) -> Value {
        let mut map = self.raw.clone();
        let mut set = |key: &str, value: Value| {
            map.insert(key.to_string(), value);
        };
        set("architectures", json!([self.model_type.class()]));
        set("model_type", json!(self.model_type.name()));
        set("vocab_size", json!(self.vocab_size));
        set("hidden_size", json!(self.hidden_size));
        set("intermediate_size", json!(self.intermediate_size));
        set("num_hidden_layers", json!(self.num_hidden_layers));
        set("num_attention_heads", json!(self.num_attention_heads));
        set("num_key_value_heads", json!(self.num_key_value_heads));
        set("head_dim", json!(self.head_dim));
        set("hidden_act", json!("silu"));
        set("rms_norm_eps", json!(self.rms_norm_eps));
        set("attention_bias", json!(self.attention_bias));
        set("tie_word_embeddings", json!(self.tie_word_embeddings));
        set("max_position_embeddings", json!(self.max_position_embeddings));
        set("initializer_range", json!(self.initializer_range));
        if let Some(Value::Object(rope)) = map.get_mut("rope_parameters") {
            rope.insert("rope_theta".into(), json!(self.rope_theta));
        } else {
            map.insert("rope_theta".into(), json!(self.rope_theta));
        }
        // A list that came in as one id stays one id, unless other ids were added to it.
        if !map.contains_key("eos_token_id") && !self.eos_token_ids.is_empty() {
            map.insert("eos_token_id".into(), json!(self.eos_token_ids));
        }
        if !map.contains_key("dtype") {
            map.entry("torch_dtype").or_insert(json!("float32"));
        }
        Value::Object(map)
    }

    /// Trainable numbers, the head counted once when tied.
    pub fn num_parameters(&self) -> usize {
        self.tensor_table().iter().map(|t| t.numel()).sum()
    }
}

fn read_object(path: &Path) -> Result<Map<String, Value>, ModelError> {
    let text = std::fs::read(path).map_err(ModelError::io(path))?;
    serde_json::from_slice(&text).map_err(|source| ModelError::Json {
        path: path.to_path_buf(),
        source,
    })
}

/// Typed access to the keys of one file.
struct Keys<'a> {
    map: &'a Map<String, Value>,
    path: &'a Path,
}

impl Keys<'_> {
    fn bad(&self, key: &str, problem: impl Into<String>) -> ModelError {
        ModelError::Config {
            path: PathBuf::from(self.path),
            key: key.to_string(),
            problem: problem.into(),
        }
    }

    /// Absent and null are the same.
    fn get(&self, key: &str) -> Option<&Value> {
        self.map.get(key).filter(|v| !v.is_null())
    }

    fn text(&self, key: &str) -> Result<&str, ModelError> {
        let value = self.get(key).ok_or_else(|| self.bad(key, "is missing"))?;
        value
            .as_str()
            .ok_or_else(|| self.bad(key, format!("{value} is not a string")))
    }

    fn size(&self, key: &str) -> Result<usize, ModelError> {
        let value = self.get(key).ok_or_else(|| self.bad(key, "is missing"))?;
        match value.as_u64() {
            Some(n) if n > 0 => Ok(n as usize),
            _ => Err(self.bad(key, format!("{value} is not a positive integer"))),
        }
    }

    fn size_or(&self, key: &str, default: usize) -> Result<usize, ModelError> {
        match self.get(key) {
            Some(_) => self.size(key),
            None => Ok(default),
        }
    }

    fn number_or(&self, key: &str, default: f64) -> Result<f64, ModelError> {
        match self.get(key) {
            None => Ok(default),
            Some(value) => value
                .as_f64()
                .filter(|n| n.is_finite() && *n > 0.0)
                .ok_or_else(|| self.bad(key, format!("{value} is not a positive number"))),
        }
    }

    fn flag_or(&self, key: &str, default: bool) -> Result<bool, ModelError> {
        match self.get(key) {
            None => Ok(default),
            Some(value) => value
                .as_bool()
                .ok_or_else(|| self.bad(key, format!("{value} is neither true nor false"))),
        }
    }

    fn token_ids(&self, key: &str) -> Result<Vec<u32>, ModelError> {
        let one = |v: &Value| {
            v.as_u64()
                .and_then(|n| u32::try_from(n).ok())
                .ok_or_else(|| self.bad(key, format!("{v} is not a token id")))
        };
        match self.get(key) {
            None => Ok(Vec::new()),
            Some(Value::Array(list)) => list.iter().map(one).collect(),
            Some(value) => Ok(vec![one(value)?]),
        }
    }

    /// New files keep the base in `rope_parameters`, older ones at the top level.
    fn rope_theta(&self) -> Result<f64, ModelError> {
        for key in ["rope_parameters", "rope_scaling"] {
            let Some(value) = self.get(key) else { continue };
            let map = value
                .as_object()
                .ok_or_else(|| self.bad(key, format!("{value} is not an object")))?;
            let inner = Keys { map, path: self.path };
            for name in ["rope_type", "type"] {
                match inner.get(name).map(|v| v.as_str()) {
                    None | Some(Some("default")) => {}
                    Some(kind) => {
                        let kind = kind.unwrap_or("(not a string)");
                        return Err(self.bad(
                            key,
                            format!("rope type `{kind}` is not supported (supported: default)"),
                        ));
                    }
                }
            }
            if inner.number_or("partial_rotary_factor", 1.0)? != 1.0 {
                return Err(self.bad(
                    key,
                    "partial_rotary_factor other than 1 is not supported for qwen3",
                ));
            }
            if inner.get("rope_theta").is_some() {
                return inner.number_or("rope_theta", 10_000.0);
            }
        }
        self.number_or("rope_theta", 10_000.0)
    }

    fn refuse_unsupported(&self) -> Result<(), ModelError> {
        if self.get("hidden_act").is_some() && self.text("hidden_act")? != "silu" {
            return Err(self.bad("hidden_act", "only silu is supported"));
        }
        if self.get("quantization_config").is_some() {
            return Err(self.bad("quantization_config", "quantised checkpoints are not supported"));
        }
        // The window applies from layer max_window_layers on; released models set none.
        let layers = self.size("num_hidden_layers")?;
        let first = self
            .get("max_window_layers")
            .and_then(Value::as_u64)
            .unwrap_or(28) as usize;
        if self.flag_or("use_sliding_window", false)? && first < layers {
            return Err(self.bad("use_sliding_window", "sliding-window attention is not supported"));
        }
        if let Some(Value::Array(types)) = self.get("layer_types") {
            if let Some(other) = types.iter().find(|t| t.as_str() != Some("full_attention")) {
                return Err(self.bad(
                    "layer_types",
                    format!("{other} is not supported (supported: full_attention)"),
                ));
            }
        }
        Ok(())
    }
}
