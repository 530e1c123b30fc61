//! `config.json`: the numbers that define a network.
//!
//! The 3.5 family keeps the text model's numbers in `text_config` (checkpoints with a vision tower) or at
//! the top level (`…_text` types). Keys that the network does not need are kept and written back, so that
//! a folder read and saved again is complete for other programs.

use super::{keys::Keys, rope::Rope, Checkpoint, ModelError};
use crate::base::files;
use serde_json::{json, Map, Value};
use std::path::Path;

/// Architecture of a checkpoint (`model_type`). Qwen3.6 checkpoints carry the types of Qwen3.5.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ModelType {
    /// Dense: grouped-query attention, SwiGLU.
    Llama,
    /// Dense Qwen3: Llama with RMSNorm on the heads of queries and keys.
    Qwen3,
    /// Qwen3 with routed experts.
    Qwen3Moe,
    /// Gated delta net in most layers, gated attention in the others, routed and shared experts.
    Qwen3Next,
    /// The hybrid of delta net and gated attention with dense MLPs.
    Qwen3_5,
    /// The hybrid of delta net and gated attention with routed and shared experts.
    Qwen3_5Moe,
}

impl ModelType {
    /// All of them.
    pub const ALL: [ModelType; 6] = [
        ModelType::Llama,
        ModelType::Qwen3,
        ModelType::Qwen3Moe,
        ModelType::Qwen3Next,
        ModelType::Qwen3_5,
        ModelType::Qwen3_5Moe,
    ];

    /// As written in `model_type`.
    pub fn name(self) -> &'static str {
        match self {
            ModelType::Llama => "llama",
            ModelType::Qwen3 => "qwen3",
            ModelType::Qwen3Moe => "qwen3_moe",
            ModelType::Qwen3Next => "qwen3_next",
            ModelType::Qwen3_5 => "qwen3_5",
            ModelType::Qwen3_5Moe => "qwen3_5_moe",
        }
    }

    /// The names of all types, for messages.
    pub fn supported() -> String {
        Self::ALL.map(Self::name).join(", ")
    }

    fn parse(text: &str) -> Option<Self> {
        let plain = text.strip_suffix("_text").unwrap_or(text);
        let found = Self::ALL.into_iter().find(|t| t.name() == plain)?;
        (plain == text || found.may_nest()).then_some(found)
    }

    /// Whether checkpoints may keep the text model inside a model with a vision tower.
    fn may_nest(self) -> bool {
        matches!(self, ModelType::Qwen3_5 | ModelType::Qwen3_5Moe)
    }

    /// Delta net in some layers, an output gate in the attention of the others.
    pub fn is_hybrid(self) -> bool {
        matches!(
            self,
            ModelType::Qwen3Next | ModelType::Qwen3_5 | ModelType::Qwen3_5Moe
        )
    }

    /// Norms on the heads of queries and keys.
    pub fn has_qk_norm(self) -> bool {
        self != ModelType::Llama
    }

    fn has_experts(self) -> bool {
        matches!(
            self,
            ModelType::Qwen3Moe | ModelType::Qwen3Next | ModelType::Qwen3_5Moe
        )
    }
}

impl std::str::FromStr for ModelType {
    type Err = String;
    /// Reads what [`ModelType::name`] writes.
    fn from_str(text: &str) -> Result<Self, String> {
        let found = Self::ALL.into_iter().find(|t| t.name() == text);
        found.ok_or_else(|| format!("`{text}` is no model type; choose one of {}", Self::supported()))
    }
}

/// What mixes the tokens of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MixerKind {
    /// Softmax attention over all earlier tokens.
    FullAttention,
    /// Gated delta net: a state of fixed size.
    LinearAttention,
}

/// What follows the mixer of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MlpKind {
    /// One MLP for all tokens.
    Dense,
    /// Routed experts.
    Sparse,
}

/// One decoder layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LayerKind {
    /// First half.
    pub mixer: MixerKind,
    /// Second half.
    pub mlp: MlpKind,
}

/// Sizes of the gated delta net.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LinearAttentionConfig {
    /// Heads of queries and keys.
    pub num_key_heads: usize,
    /// Heads of values, a multiple of `num_key_heads`.
    pub num_value_heads: usize,
    /// Width of a query or key head.
    pub key_head_dim: usize,
    /// Width of a value head.
    pub value_head_dim: usize,
    /// Taps of the causal convolution.
    pub conv_kernel: usize,
}

impl LinearAttentionConfig {
    /// Numbers of all query (or key) heads of a token.
    pub fn key_dim(&self) -> usize {
        self.num_key_heads * self.key_head_dim
    }

    /// Numbers of all value heads of a token.
    pub fn value_dim(&self) -> usize {
        self.num_value_heads * self.value_head_dim
    }

    /// Channels of the convolution: queries, keys, values.
    pub fn conv_dim(&self) -> usize {
        2 * self.key_dim() + self.value_dim()
    }
}

/// Sizes of the sparse layers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExpertsConfig {
    /// Experts of a layer, E.
    pub num_experts: usize,
    /// Experts of a token, k.
    pub top_k: usize,
    /// Width of an expert.
    pub intermediate_size: usize,
    /// Whether the k weights of a token are scaled to sum to 1.
    pub normalize: bool,
    /// Width of the expert that every token uses.
    pub shared_intermediate_size: Option<usize>,
}

/// The part of `config.json` that defines the network, under the names of the file.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelConfig {
    /// Architecture.
    pub model_type: ModelType,
    /// The text model lies inside a model with a vision tower.
    pub nested: bool,
    /// Rows of the embedding, V.
    pub vocab_size: usize,
    /// Width of the residual stream, H.
    pub hidden_size: usize,
    /// Width of the dense MLPs, I; 0 where no layer has one.
    pub intermediate_size: usize,
    /// Decoder layers, L.
    pub num_hidden_layers: usize,
    /// Query heads.
    pub num_attention_heads: usize,
    /// Key and value heads; divides `num_attention_heads`.
    pub num_key_value_heads: usize,
    /// Width of a head, d.
    pub head_dim: usize,
    /// Epsilon of every RMSNorm.
    pub rms_norm_eps: f64,
    /// Rotary frequencies.
    pub rope: Rope,
    /// Biases on the q, k, v and o projections.
    pub attention_bias: bool,
    /// Biases on the gate, up and down projections of `llama`.
    pub mlp_bias: bool,
    /// The output head is the embedding; `lm_head.weight` is absent from the checkpoint.
    pub tie_word_embeddings: bool,
    /// Delta net of the hybrid families.
    pub linear_attention: Option<LinearAttentionConfig>,
    /// Experts of the sparse families.
    pub experts: Option<ExpertsConfig>,
    /// Every layer in order.
    pub layers: Vec<LayerKind>,
    /// Longest sequence that the checkpoint was made for.
    pub max_position_embeddings: usize,
    /// Standard deviation of random initialisation.
    pub initializer_range: f64,
    /// Union of `eos_token_id` of `config.json` (both levels) and `generation_config.json`, in that order.
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
        let layer = LayerKind {
            mixer: MixerKind::FullAttention,
            mlp: MlpKind::Dense,
        };
        Self {
            model_type: ModelType::Qwen3,
            nested: false,
            vocab_size,
            hidden_size,
            intermediate_size,
            num_hidden_layers,
            num_attention_heads,
            num_key_value_heads,
            head_dim,
            rms_norm_eps: 1e-6,
            rope: Rope {
                theta: 1e6,
                dim: head_dim,
                scaling: None,
            },
            attention_bias: false,
            mlp_bias: false,
            tie_word_embeddings: true,
            linear_attention: None,
            experts: None,
            layers: vec![layer; num_hidden_layers],
            max_position_embeddings: 32768,
            initializer_range: 0.02,
            eos_token_ids: Vec::new(),
            raw: Map::new(),
        }
    }

    /// Reads `config.json` of a model folder, and the stop ids of `generation_config.json` if it is there.
    pub fn from_dir(dir: &Path) -> Result<Self, ModelError> {
        let path = dir.join("config.json");
        let raw = read_object(&path)?;
        if raw.get("quantization_config").is_some_and(|v| !v.is_null()) {
            // The tensor tells more than the key, where the weights can be read at all.
            if let Some(error) = Checkpoint::open(dir).ok().and_then(|c| c.first_quantised()) {
                return Err(error);
            }
        }
        let mut config = Self::from_value(raw, &path)?;
        let generation = dir.join("generation_config.json");
        if generation.exists() {
            let keys = Keys {
                map: &read_object(&generation)?,
                path: &generation,
            };
            add_ids(&mut config.eos_token_ids, keys.token_ids("eos_token_id")?);
        }
        Ok(config)
    }

    /// Reads the parsed `config.json`; `path` is for messages.
    pub fn from_value(raw: Map<String, Value>, path: &Path) -> Result<Self, ModelError> {
        let top = Keys { map: &raw, path };
        let written = top.text("model_type")?;
        let unsupported = || ModelError::UnsupportedModelType {
            path: path.to_path_buf(),
            model_type: written.to_string(),
        };
        let model_type = ModelType::parse(written).ok_or_else(unsupported)?;
        let inner = top.object("text_config")?;
        let nested = inner.is_some();
        if nested && !model_type.may_nest() {
            return Err(top.bad(
                "text_config",
                format!("a {written} checkpoint has no vision tower"),
            ));
        }
        if !nested && model_type.may_nest() && !written.ends_with("_text") {
            return Err(top.bad("text_config", "is missing"));
        }
        let mut config = read(&top, inner.as_ref().unwrap_or(&top), model_type, nested)?;
        config.raw = raw;
        Ok(config)
    }

    /// The `config.json` to write: what was read, with the fields of this struct written over it.
    pub fn to_value(&self) -> Value {
        let mut top = self.raw.clone();
        if top.is_empty() {
            top.insert("architectures".into(), json!(["Qwen3ForCausalLM"]));
            top.insert("model_type".into(), json!(self.model_type.name()));
        }
        if let Some(Value::Object(text)) = top.get_mut("text_config").filter(|_| self.nested) {
            self.write_text_keys(text);
            top.insert("tie_word_embeddings".into(), json!(self.tie_word_embeddings));
        } else {
            self.write_text_keys(&mut top);
            // A list that came in as one id stays one id, unless other ids were added to it.
            if !top.contains_key("eos_token_id") && !self.eos_token_ids.is_empty() {
                top.insert("eos_token_id".into(), json!(self.eos_token_ids));
            }
        }
        if !top.contains_key("dtype") {
            top.entry("torch_dtype").or_insert(json!("float32"));
        }
        Value::Object(top)
    }

    fn write_text_keys(&self, map: &mut Map<String, Value>) {
        let mut set = |key: &str, value: Value| {
            map.insert(key.to_string(), value);
        };
        set("vocab_size", json!(self.vocab_size));
        set("hidden_size", json!(self.hidden_size));
        if self.layers.iter().any(|l| l.mlp == MlpKind::Dense) {
            set("intermediate_size", json!(self.intermediate_size));
        }
        set("num_hidden_layers", json!(self.num_hidden_layers));
        set("num_attention_heads", json!(self.num_attention_heads));
        set("num_key_value_heads", json!(self.num_key_value_heads));
        set("head_dim", json!(self.head_dim));
        set("hidden_act", json!("silu"));
        set("rms_norm_eps", json!(self.rms_norm_eps));
        set("attention_bias", json!(self.attention_bias));
        if !self.nested {
            set("tie_word_embeddings", json!(self.tie_word_embeddings));
        }
        set("max_position_embeddings", json!(self.max_position_embeddings));
        set("initializer_range", json!(self.initializer_range));
        if let Some(Value::Object(rope)) = map.get_mut("rope_parameters") {
            rope.insert("rope_theta".into(), json!(self.rope.theta));
        } else {
            map.insert("rope_theta".into(), json!(self.rope.theta));
            // A config that was read has it already.
            let is_there = map.get("rope_scaling").is_some_and(|v| !v.is_null());
            if let Some(scaling) = self.rope.scaling.filter(|_| !is_there) {
                map.insert("rope_scaling".into(), scaling.to_value());
            }
        }
    }

    /// Tokens of the longest context that the checkpoint can be used with ([`Rope::context_tokens`]).
    pub fn context_tokens(&self) -> usize {
        self.rope.context_tokens(self.max_position_embeddings)
    }

    /// Trainable numbers, the head counted once when tied.
    pub fn num_parameters(&self) -> usize {
        self.tensor_table().iter().map(|t| t.numel()).sum()
    }

    /// Layers with routed experts.
    pub fn num_sparse_layers(&self) -> usize {
        self.layers.iter().filter(|l| l.mlp == MlpKind::Sparse).count()
    }

    /// Place of a layer among the sparse ones, which is its row in recorded routing.
    pub fn sparse_index(&self, layer: usize) -> usize {
        let before = &self.layers[..layer];
        before.iter().filter(|l| l.mlp == MlpKind::Sparse).count()
    }
}

/// Reads the text model's keys.
fn read(
    top: &Keys<'_>,
    keys: &Keys<'_>,
    model_type: ModelType,
    nested: bool,
) -> Result<ModelConfig, ModelError> {
    super::refuse::unsupported(top, keys, model_type)?;
    let hidden_size = keys.size("hidden_size")?;
    let num_attention_heads = keys.size("num_attention_heads")?;
    let default_head_dim = match model_type {
        ModelType::Qwen3 => 128,
        ModelType::Llama | ModelType::Qwen3Moe => hidden_size / num_attention_heads,
        ModelType::Qwen3Next | ModelType::Qwen3_5 | ModelType::Qwen3_5Moe => 256,
    };
    let head_dim = keys.size_or("head_dim", default_head_dim)?;
    if head_dim == 0 {
        let problem = format!(
            "{num_attention_heads} heads share hidden_size = {hidden_size}, and head_dim is not given"
        );
        return Err(keys.bad("num_attention_heads", problem));
    }
    let layers = super::layers::read(keys, model_type)?;
    let has_dense = layers.iter().any(|l| l.mlp == MlpKind::Dense);
    let mut eos_token_ids = keys.token_ids("eos_token_id")?;
    add_ids(&mut eos_token_ids, top.token_ids("eos_token_id")?);
    let config = ModelConfig {
        model_type,
        nested,
        vocab_size: keys.size("vocab_size")?,
        hidden_size,
        intermediate_size: if has_dense {
            keys.size("intermediate_size")?
        } else {
            0
        },
        num_hidden_layers: layers.len(),
        num_attention_heads,
        num_key_value_heads: key_value_heads(keys, model_type, num_attention_heads)?,
        head_dim,
        rms_norm_eps: keys.number_or("rms_norm_eps", 1e-6)?,
        rope: Rope::read(keys, head_dim, model_type.is_hybrid().then_some(0.25))?,
        attention_bias: keys.flag_or("attention_bias", false)?,
        mlp_bias: model_type == ModelType::Llama && keys.flag_or("mlp_bias", false)?,
        tie_word_embeddings: top.flag_or("tie_word_embeddings", false)?,
        linear_attention: model_type
            .is_hybrid()
            .then(|| super::layers::linear_attention(keys))
            .transpose()?,
        experts: model_type
            .has_experts()
            .then(|| super::layers::experts(keys, model_type))
            .transpose()?,
        layers,
        max_position_embeddings: keys.size_or("max_position_embeddings", 32768)?,
        initializer_range: keys.number_or("initializer_range", 0.02)?,
        eos_token_ids,
        raw: Map::new(),
    };
    if !num_attention_heads.is_multiple_of(config.num_key_value_heads) {
        let problem = format!(
            "{} does not divide num_attention_heads = {num_attention_heads}",
            config.num_key_value_heads
        );
        return Err(keys.bad("num_key_value_heads", problem));
    }
    plausible(&config, keys)?;
    Ok(config)
}

/// Refuses sizes whose products no machine will ever hold, before anything is computed from them.
fn plausible(config: &ModelConfig, keys: &Keys<'_>) -> Result<(), ModelError> {
    const MAX_PARAMETERS: f64 = 1e15;
    let mut all = 0.0;
    for spec in config.tensor_table() {
        let numel: f64 = spec.shape.iter().map(|n| *n as f64).product();
        all += numel;
        if all > MAX_PARAMETERS {
            let problem = format!(
                "tensor `{}` would be of shape {:?}: one of the sizes is wrong",
                spec.name, spec.shape
            );
            return Err(keys.bad("hidden_size", problem));
        }
    }
    Ok(())
}

/// Where the key is left out, the family's default; null stands for as many as query heads.
fn key_value_heads(keys: &Keys<'_>, model_type: ModelType, query_heads: usize) -> Result<usize, ModelError> {
    let key = "num_key_value_heads";
    let default = match model_type {
        _ if keys.map.contains_key(key) => query_heads,
        ModelType::Llama => query_heads,
        ModelType::Qwen3 => 32,
        ModelType::Qwen3Moe | ModelType::Qwen3_5 => 4,
        ModelType::Qwen3Next | ModelType::Qwen3_5Moe => 2,
    };
    keys.size_or(key, default)
}

fn add_ids(ids: &mut Vec<u32>, more: Vec<u32>) {
    for id in more {
        if !ids.contains(&id) {
            ids.push(id);
        }
    }
}

fn read_object(path: &Path) -> Result<Map<String, Value>, ModelError> {
    let text = files::read(path).map_err(ModelError::io(path))?;
    serde_json::from_slice(&text).map_err(|source| ModelError::Json {
        path: path.to_path_buf(),
        source,
    })
}
