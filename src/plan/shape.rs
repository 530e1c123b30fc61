//! Sizes of a network, read from config.json without knowing how to run it.
//!
//! Multimodal checkpoints keep the language model under `text_config`. Missing keys take the defaults
//! of the family. Vision towers and multi-token-prediction layers are left out: no policy trains them.

use serde_json::{Map, Value};
use std::path::Path;

/// Sizes of a decoder.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelShape {
    /// `model_type` of the language model, without the suffix `_text`.
    pub model_type: String,
    /// Rows of the embedding.
    pub vocab: u64,
    /// Width of the residual stream.
    pub hidden: u64,
    /// Decoder layers.
    pub layers: u64,
    /// Layers with softmax attention; the others are gated delta-net layers.
    pub attention_layers: u64,
    /// Query heads.
    pub heads: u64,
    /// Key and value heads.
    pub kv_heads: u64,
    /// Width of a head.
    pub head_dim: u64,
    /// The query projection also yields an output gate.
    pub gated_attention: bool,
    /// Width of the dense MLP.
    pub intermediate: u64,
    /// Layers whose MLP is a mixture of experts.
    pub sparse_layers: u64,
    /// The mixture, where there is one.
    pub experts: Option<Experts>,
    /// The delta-net layers, where there are some.
    pub delta: Option<DeltaNet>,
    /// The output head is the embedding.
    pub tied: bool,
    /// Biases on the projections of the attention.
    pub attention_bias: bool,
    /// Biases in the dense MLP.
    pub mlp_bias: bool,
    /// Longest sequence that the checkpoint can be used with, as its rotary frequencies are stretched; `None`
    /// where the file does not say.
    pub max_positions: Option<u64>,
}

/// A mixture of experts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Experts {
    /// Experts of a layer.
    pub count: u64,
    /// Experts of a token.
    pub per_token: u64,
    /// Width of an expert.
    pub intermediate: u64,
    /// Width of the shared expert; 0 without one.
    pub shared: u64,
}

/// A gated delta-net layer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DeltaNet {
    /// Key heads.
    pub key_heads: u64,
    /// Value heads.
    pub value_heads: u64,
    /// Width of a key head.
    pub key_dim: u64,
    /// Width of a value head.
    pub value_dim: u64,
    /// Taps of the convolution.
    pub taps: u64,
}

/// Keys that only mixtures of experts have.
const EXPERT_KEYS: [&str; 5] = [
    "num_experts",
    "n_routed_experts",
    "num_local_experts",
    "moe_intermediate_size",
    "num_experts_per_tok",
];

impl ModelShape {
    /// Reads `config.json` of a model folder. The error names file and key.
    pub fn from_dir(dir: &Path) -> Result<Self, String> {
        let path = dir.join("config.json");
        let text = crate::base::files::read(&path).map_err(|error| format!("{}: {error}", path.display()))?;
        let value: Value =
            serde_json::from_slice(&text).map_err(|error| format!("{}: {error}", path.display()))?;
        Self::from_value(&value).map_err(|problem| format!("{}: {problem}", path.display()))
    }

    /// Reads a parsed config.json.
    pub fn from_value(config: &Value) -> Result<Self, String> {
        let top = config.as_object().ok_or("is not an object")?;
        let text = ["text_config", "llm_config"]
            .iter()
            .find_map(|key| top.get(*key).and_then(Value::as_object))
            .unwrap_or(top);
        let keys = Keys { top, text };
        let model_type = keys.model_type().ok_or("has no model_type")?;
        let hidden = keys.number("hidden_size")?;
        let layers = keys.number("num_hidden_layers")?;
        let heads = keys.number("num_attention_heads")?;
        let has_delta = text.contains_key("linear_num_value_heads");
        let experts = keys.experts();
        if layers > MAX_LAYERS {
            return Err(format!("num_hidden_layers is {layers}, more than {MAX_LAYERS}"));
        }
        plausible(Self {
            vocab: keys.number("vocab_size")?,
            hidden,
            layers,
            attention_layers: if has_delta {
                keys.attention_layers(layers)
            } else {
                layers
            },
            heads,
            kv_heads: keys.get("num_key_value_heads").unwrap_or(heads),
            head_dim: keys.get("head_dim").unwrap_or(match model_type.as_str() {
                "qwen3" => 128,
                _ => hidden / heads.max(1),
            }),
            gated_attention: has_delta,
            intermediate: keys.get("intermediate_size").unwrap_or(0),
            sparse_layers: if experts.is_some() {
                keys.sparse_layers(layers)
            } else {
                0
            },
            experts,
            delta: has_delta.then(|| DeltaNet {
                key_heads: keys.get("linear_num_key_heads").unwrap_or(16),
                value_heads: keys.get("linear_num_value_heads").unwrap_or(32),
                key_dim: keys.get("linear_key_head_dim").unwrap_or(128),
                value_dim: keys.get("linear_value_head_dim").unwrap_or(128),
                taps: keys.get("linear_conv_kernel_dim").unwrap_or(4),
            }),
            tied: keys.flag("tie_word_embeddings"),
            attention_bias: keys.flag("attention_bias"),
            mlp_bias: keys.flag("mlp_bias"),
            max_positions: keys.context_tokens(),
            model_type,
        })
    }

    /// Parameters, roughly and without overflow.
    fn rough_parameters(&self) -> f64 {
        let f = |n: u64| n as f64;
        let experts = self
            .experts
            .map_or(0.0, |e| f(e.count) * f(e.intermediate) + f(e.shared));
        let delta = self.delta.map_or(0.0, |d| {
            f(d.key_heads) * f(d.key_dim) + f(d.value_heads) * f(d.value_dim)
        });
        let attention = (f(self.heads) + f(self.kv_heads)) * f(self.head_dim);
        let layer = f(self.hidden) * (attention + f(self.intermediate) + experts + delta);
        f(self.layers) * layer + f(self.vocab) * f(self.hidden)
    }

    /// True for a mixture of experts.
    pub fn is_moe(&self) -> bool {
        self.experts.is_some() || self.model_type.ends_with("_moe")
    }

    /// Parameters of the largest decoder layer on a rank when `ranks` share its experts.
    pub fn gathered_parameters(&self, ranks: u64) -> u64 {
        let experts = self
            .experts
            .map_or(0, |e| e.count * 3 * self.hidden * e.intermediate);
        let elsewhere = experts - experts / ranks.max(1);
        let sparse = self.sparse_mlp_parameters().saturating_sub(elsewhere);
        let dense = match self.sparse_layers < self.layers {
            true => self.dense_mlp_parameters(),
            false => 0,
        };
        self.attention_parameters().max(self.delta_parameters()) + dense.max(sparse) + 2 * self.hidden
    }

    /// All parameters, the head counted once when tied.
    pub fn parameters(&self) -> u64 {
        let embedding = self.vocab * self.hidden * if self.tied { 1 } else { 2 };
        embedding
            + self.hidden
            + self.layers * 2 * self.hidden
            + self.attention_layers * self.attention_parameters()
            + (self.layers - self.attention_layers) * self.delta_parameters()
            + self.sparse_layers * self.sparse_mlp_parameters()
            + (self.layers - self.sparse_layers) * self.dense_mlp_parameters()
    }

    fn attention_parameters(&self) -> u64 {
        let query = self.heads * self.head_dim;
        let projections =
            query * if self.gated_attention { 3 } else { 2 } + 2 * self.kv_heads * self.head_dim;
        let biases = match self.attention_bias {
            true => projections - query + self.hidden,
            false => 0,
        };
        let norms = match self.model_type.as_str() {
            "llama" => 0,
            _ => 2 * self.head_dim,
        };
        projections * self.hidden + biases + norms
    }

    fn delta_parameters(&self) -> u64 {
        self.delta.map_or(0, |d| {
            let (keys, values) = (d.key_heads * d.key_dim, d.value_heads * d.value_dim);
            let projections = 2 * keys + 3 * values + 2 * d.value_heads;
            projections * self.hidden + (2 * keys + values) * d.taps + 2 * d.value_heads + d.value_dim
        })
    }

    fn dense_mlp_parameters(&self) -> u64 {
        let biases = match self.mlp_bias {
            true => 2 * self.intermediate + self.hidden,
            false => 0,
        };
        3 * self.hidden * self.intermediate + biases
    }

    fn sparse_mlp_parameters(&self) -> u64 {
        self.experts.map_or(0, |e| {
            let shared = if e.shared > 0 {
                3 * self.hidden * e.shared + self.hidden
            } else {
                0
            };
            e.count * (3 * self.hidden * e.intermediate + self.hidden) + shared
        })
    }
}

/// Layers of the deepest network that anybody writes down.
const MAX_LAYERS: u64 = 10_000;

/// Refuses sizes that contradict each other, or that no machine will ever hold.
fn plausible(shape: ModelShape) -> Result<ModelShape, String> {
    let layers = shape.layers;
    for (what, n) in [
        ("full-attention layers in layer_types", shape.attention_layers),
        ("layers with experts", shape.sparse_layers),
    ] {
        if n > layers {
            return Err(format!("num_hidden_layers is {layers}, and there are {n} {what}"));
        }
    }
    let rough = shape.rough_parameters();
    if rough > 1e15 {
        return Err(format!(
            "its sizes make about {rough:.0e} parameters; one of them is wrong"
        ));
    }
    Ok(shape)
}

struct Keys<'a> {
    top: &'a Map<String, Value>,
    text: &'a Map<String, Value>,
}

impl Keys<'_> {
    /// A size that may be absent; what is no size counts as the bound, which [`plausible`] refuses.
    fn get(&self, key: &str) -> Option<u64> {
        let size = self.text.get(key).and_then(Value::as_u64);
        size.map(|n| n.min(u64::from(u32::MAX)))
    }

    fn number(&self, key: &str) -> Result<u64, String> {
        match self.text.get(key) {
            None | Some(Value::Null) => Err(format!("has no {key}")),
            Some(value) => value
                .as_u64()
                .filter(|n| (1..1 << 32).contains(n))
                .ok_or_else(|| format!("{key} is {value}, not a size")),
        }
    }

    /// Multimodal files state it at the top level, others beside the text sizes.
    fn flag(&self, key: &str) -> bool {
        let at = |map: &Map<String, Value>| map.get(key).and_then(Value::as_bool);
        at(self.top).or_else(|| at(self.text)).unwrap_or(false)
    }

    /// Files state the window before `linear` and `yarn` stretched it (see `model::hf::Rope::context_tokens`).
    fn context_tokens(&self) -> Option<u64> {
        let positions = self.get("max_position_embeddings")?;
        let objects = ["rope_scaling", "rope_parameters"];
        let rope = objects
            .iter()
            .find_map(|key| self.text.get(*key).and_then(Value::as_object));
        let Some(rope) = rope else {
            return Some(positions);
        };
        let kind = ["rope_type", "type"].iter().find_map(|key| rope.get(*key));
        let factor = rope.get("factor").and_then(Value::as_f64).unwrap_or(1.0);
        let stretched = |tokens: u64| (tokens as f64 * factor) as u64;
        Some(match kind.and_then(Value::as_str) {
            Some("linear") => stretched(positions),
            Some("yarn") => {
                let key = "original_max_position_embeddings";
                let beside = self.get(key);
                let inside = rope.get(key).and_then(Value::as_u64);
                positions.max(stretched(beside.or(inside).unwrap_or(positions)))
            }
            _ => positions,
        })
    }

    fn model_type(&self) -> Option<String> {
        let at = |map: &Map<String, Value>| map.get("model_type").and_then(Value::as_str).map(str::to_owned);
        let name = at(self.top).or_else(|| at(self.text))?;
        Some(name.strip_suffix("_text").unwrap_or(&name).to_owned())
    }

    fn experts(&self) -> Option<Experts> {
        EXPERT_KEYS.iter().find(|key| self.text.contains_key(**key))?;
        let count = ["num_experts", "num_local_experts", "n_routed_experts"]
            .iter()
            .find_map(|key| self.get(key))
            .unwrap_or(0);
        Some(Experts {
            count,
            per_token: self.get("num_experts_per_tok").unwrap_or(8),
            intermediate: self
                .get("moe_intermediate_size")
                .or(self.get("intermediate_size"))
                .unwrap_or(0),
            shared: self.get("shared_expert_intermediate_size").unwrap_or(0),
        })
    }

    /// An explicit list, or one in `full_attention_interval`.
    fn attention_layers(&self, layers: u64) -> u64 {
        match self.text.get("layer_types").and_then(Value::as_array) {
            Some(types) => types
                .iter()
                .filter(|t| t.as_str() == Some("full_attention"))
                .count() as u64,
            None => layers / self.get("full_attention_interval").unwrap_or(4).max(1),
        }
    }

    fn sparse_layers(&self, layers: u64) -> u64 {
        let step = self.get("decoder_sparse_step").unwrap_or(1).max(1);
        let dense = self.text.get("mlp_only_layers").and_then(Value::as_array);
        let is_dense = |layer: u64| dense.is_some_and(|list| list.iter().any(|l| l.as_u64() == Some(layer)));
        (0..layers)
            .filter(|layer| !is_dense(*layer) && (layer + 1) % step == 0)
            .count() as u64
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use serde_json::json;

    /// Qwen3.5-35B-A3B.
    pub(crate) fn qwen35_35b() -> ModelShape {
        let config = json!({"model_type": "qwen3_5_moe", "tie_word_embeddings": false, "text_config": {
            "model_type": "qwen3_5_moe_text", "vocab_size": 248320, "hidden_size": 2048,
            "num_hidden_layers": 40, "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256,
            "num_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
            "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4,
            "max_position_embeddings": 262144}});
        ModelShape::from_value(&config).unwrap()
    }

    /// A dense Qwen3 with tied embeddings.
    pub(crate) fn qwen3(hidden: u64, layers: u64, heads: u64, intermediate: u64) -> ModelShape {
        let config = json!({"model_type": "qwen3", "vocab_size": 151936, "hidden_size": hidden,
            "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": 8,
            "head_dim": 128, "intermediate_size": intermediate, "tie_word_embeddings": true,
            "max_position_embeddings": 40960});
        ModelShape::from_value(&config).unwrap()
    }

    #[test]
    fn parameter_counts_are_those_of_the_released_checkpoints() {
        let billions = |shape: &ModelShape| (shape.parameters() as f64 / 1e7).round() / 100.0;
        assert_eq!(billions(&qwen3(1024, 28, 16, 3072)), 0.6, "Qwen3-0.6B");
        assert_eq!(billions(&qwen3(2560, 36, 32, 9728)), 4.02, "Qwen3-4B");
        let large = qwen35_35b();
        assert_eq!(billions(&large), 34.66, "the language model of Qwen3.5-35B-A3B");
        assert_eq!((large.attention_layers, large.sparse_layers), (10, 40));
        assert!(large.is_moe() && large.gated_attention && !large.tied);
    }

    /// The count of every committed checkpoint is that of its tensors, with biases, norms and experts.
    #[test]
    fn parameters_and_window_are_those_of_the_network() {
        let models = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/models");
        let mut seen = 0;
        for entry in std::fs::read_dir(models).unwrap() {
            let dir = entry.unwrap().path();
            if dir.is_dir() {
                let shape = ModelShape::from_dir(&dir).unwrap();
                let config = crate::model::hf::ModelConfig::from_dir(&dir).unwrap();
                assert_eq!(
                    shape.parameters(),
                    config.num_parameters() as u64,
                    "{}",
                    dir.display()
                );
                assert_eq!(shape.max_positions, Some(config.context_tokens() as u64));
                seen += 1;
            }
        }
        assert!(seen >= 9);
    }

    #[test]
    fn stretched_frequencies_stretch_the_window() {
        let window = |rope: Value| {
            let config = json!({"model_type": "qwen3", "vocab_size": 10, "hidden_size": 8,
                "num_hidden_layers": 4, "num_attention_heads": 2, "max_position_embeddings": 40960,
                "rope_scaling": rope});
            ModelShape::from_value(&config).unwrap().max_positions.unwrap()
        };
        assert_eq!(window(Value::Null), 40960);
        let yarn = json!({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768});
        assert_eq!(window(yarn), 131_072);
        assert_eq!(window(json!({"rope_type": "linear", "factor": 2.0})), 81_920);
        assert_eq!(window(json!({"rope_type": "llama3", "factor": 8.0})), 40960);
    }

    #[test]
    fn a_missing_size_is_named() {
        let problem = ModelShape::from_value(&json!({"model_type": "qwen3", "hidden_size": 0})).unwrap_err();
        assert_eq!(problem, "hidden_size is 0, not a size");
        assert_eq!(
            ModelShape::from_value(&json!({})).unwrap_err(),
            "has no model_type"
        );
    }

    #[test]
    fn experts_are_seen_by_type_or_by_key() {
        let with = |extra: Value| {
            let mut config = json!({"model_type": "x", "vocab_size": 10, "hidden_size": 8,
                "num_hidden_layers": 4, "num_attention_heads": 2});
            config
                .as_object_mut()
                .unwrap()
                .extend(extra.as_object().unwrap().clone());
            ModelShape::from_value(&config).unwrap()
        };
        assert!(!with(json!({})).is_moe());
        assert!(with(json!({"num_local_experts": 8})).is_moe());
        assert!(with(json!({"model_type": "y_moe"})).is_moe());
        let some = with(json!({"num_experts": 8, "decoder_sparse_step": 2, "mlp_only_layers": [3]}));
        assert_eq!(some.sparse_layers, 1, "layer 1 alone");
    }

    #[test]
    fn sizes_that_contradict_or_overflow_are_errors() {
        let problem = |extra: Value| {
            let mut config = json!({"model_type": "qwen3", "vocab_size": 10, "hidden_size": 8,
                "num_hidden_layers": 2, "num_attention_heads": 2});
            let extra = extra.as_object().unwrap().clone();
            config.as_object_mut().unwrap().extend(extra);
            ModelShape::from_value(&config).unwrap_err()
        };
        let huge = i64::MAX;
        for extra in [
            json!({"num_key_value_heads": huge, "head_dim": huge}),
            json!({"num_experts": huge, "moe_intermediate_size": huge}),
        ] {
            assert!(problem(extra).contains("one of them is wrong"));
        }
        assert!(problem(json!({"num_hidden_layers": u32::MAX})).contains("num_hidden_layers"));
        let three = ["full_attention", "full_attention", "full_attention"];
        let text = problem(json!({"linear_num_value_heads": 4, "layer_types": three}));
        assert!(
            text.starts_with("num_hidden_layers is 2, and there are 3"),
            "{text}"
        );
    }
}
