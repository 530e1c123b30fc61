//! Which tensors a checkpoint holds.

use super::{ModelConfig, ModelType};

/// One tensor of the checkpoint. Matrices are `[out, in]`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorSpec {
    /// Checkpoint name.
    pub name: String,
    /// Shape.
    pub shape: Vec<usize>,
}

impl TensorSpec {
    /// Elements.
    pub fn numel(&self) -> usize {
        self.shape.iter().product()
    }
}

impl ModelConfig {
    /// Every tensor in checkpoint order: embedding, layers from first to last, final norm, head (absent
    /// when tied).
    pub fn tensor_table(&self) -> Vec<TensorSpec> {
        let mut table = vec![self.embedding_spec()];
        for layer in 0..self.num_hidden_layers {
            table.extend(self.layer_table(layer));
        }
        table.push(self.norm_spec());
        table.extend(self.head_spec());
        table
    }

    /// Token embedding `[V,H]`.
    pub fn embedding_spec(&self) -> TensorSpec {
        spec("model.embed_tokens.weight", &[self.vocab_size, self.hidden_size])
    }

    /// Norm behind the last layer `[H]`.
    pub fn norm_spec(&self) -> TensorSpec {
        spec("model.norm.weight", &[self.hidden_size])
    }

    /// Output head `[V,H]`; none when the embedding serves.
    pub fn head_spec(&self) -> Option<TensorSpec> {
        (!self.tie_word_embeddings).then(|| spec("lm_head.weight", &[self.vocab_size, self.hidden_size]))
    }

    /// The tensors of one layer, in the order of the network.
    pub fn layer_table(&self, layer: usize) -> Vec<TensorSpec> {
        match self.model_type {
            ModelType::Qwen3 => self.qwen3_layer(layer),
        }
    }

    fn qwen3_layer(&self, layer: usize) -> Vec<TensorSpec> {
        let (h, i, d) = (self.hidden_size, self.intermediate_size, self.head_dim);
        let (q, kv) = (self.num_attention_heads * d, self.num_key_value_heads * d);
        let mut table = Vec::new();
        let mut add = |name: &str, shape: &[usize]| {
            table.push(spec(&format!("model.layers.{layer}.{name}"), shape));
        };
        add("input_layernorm.weight", &[h]);
        for (name, out, input) in [("q", q, h), ("k", kv, h), ("v", kv, h), ("o", h, q)] {
            add(&format!("self_attn.{name}_proj.weight"), &[out, input]);
            if self.attention_bias {
                add(&format!("self_attn.{name}_proj.bias"), &[out]);
            }
        }
        add("self_attn.q_norm.weight", &[d]);
        add("self_attn.k_norm.weight", &[d]);
        add("post_attention_layernorm.weight", &[h]);
        add("mlp.gate_proj.weight", &[i, h]);
        add("mlp.up_proj.weight", &[i, h]);
        add("mlp.down_proj.weight", &[h, i]);
        table
    }
}

fn spec(name: &str, shape: &[usize]) -> TensorSpec {
    TensorSpec {
        name: name.to_string(),
        shape: shape.to_vec(),
    }
}
