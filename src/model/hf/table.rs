//! Which tensors a network has.
//!
//! One entry is one parameter of the network under its checkpoint name. Experts are the exception: they
//! are stacked here, one tensor for all experts of a layer, which is also how Qwen3.5 MoE is released;
//! how a folder stores them is the business of [`super::experts`].

use super::{config::MixerKind, config::MlpKind, ModelConfig, ModelType};

/// One tensor of the network. Matrices are `[out, in]`.
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

/// Entries of one layer being listed.
struct Layer {
    prefix: String,
    table: Vec<TensorSpec>,
}

impl Layer {
    fn add(&mut self, name: &str, shape: &[usize]) {
        self.table.push(spec(&format!("{}.{name}", self.prefix), shape));
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

    /// What all names of the text model start with, except the head's.
    pub fn prefix(&self) -> &'static str {
        if self.nested {
            "model.language_model"
        } else {
            "model"
        }
    }

    /// Prefix of the names of a layer.
    pub fn layer_name(&self, layer: usize) -> String {
        format!("{}.layers.{layer}", self.prefix())
    }

    /// Token embedding `[V,H]`.
    pub fn embedding_spec(&self) -> TensorSpec {
        let name = format!("{}.embed_tokens.weight", self.prefix());
        spec(&name, &[self.vocab_size, self.hidden_size])
    }

    /// Norm behind the last layer `[H]`.
    pub fn norm_spec(&self) -> TensorSpec {
        spec(&format!("{}.norm.weight", self.prefix()), &[self.hidden_size])
    }

    /// Output head `[V,H]`; none when the embedding serves.
    pub fn head_spec(&self) -> Option<TensorSpec> {
        (!self.tie_word_embeddings).then(|| spec("lm_head.weight", &[self.vocab_size, self.hidden_size]))
    }

    /// The tensors of one layer, in the order of the network.
    pub fn layer_table(&self, layer: usize) -> Vec<TensorSpec> {
        let mut t = Layer {
            prefix: self.layer_name(layer),
            table: Vec::new(),
        };
        let kind = self.layers[layer];
        t.add("input_layernorm.weight", &[self.hidden_size]);
        match kind.mixer {
            MixerKind::FullAttention => self.attention(&mut t),
            MixerKind::LinearAttention => self.delta_net(&mut t),
        }
        t.add("post_attention_layernorm.weight", &[self.hidden_size]);
        match kind.mlp {
            MlpKind::Dense => self.mlp(&mut t, "mlp", self.intermediate_size, self.mlp_bias),
            MlpKind::Sparse => self.sparse_mlp(&mut t),
        }
        t.table
    }

    fn attention(&self, t: &mut Layer) {
        let (h, d) = (self.hidden_size, self.head_dim);
        let (q, kv) = (self.num_attention_heads * d, self.num_key_value_heads * d);
        // The hybrids keep the output gate of each head behind its query.
        let q_rows = if self.model_type.is_hybrid() { 2 * q } else { q };
        for (name, out, input) in [("q", q_rows, h), ("k", kv, h), ("v", kv, h), ("o", h, q)] {
            t.add(&format!("self_attn.{name}_proj.weight"), &[out, input]);
            if self.attention_bias {
                t.add(&format!("self_attn.{name}_proj.bias"), &[out]);
            }
        }
        if self.model_type.has_qk_norm() {
            t.add("self_attn.q_norm.weight", &[d]);
            t.add("self_attn.k_norm.weight", &[d]);
        }
    }

    fn delta_net(&self, t: &mut Layer) {
        let Some(c) = self.linear_attention else {
            unreachable!("a layer of linear attention comes from a config with its sizes")
        };
        let h = self.hidden_size;
        if self.model_type == ModelType::Qwen3Next {
            t.add(
                "linear_attn.in_proj_qkvz.weight",
                &[c.conv_dim() + c.value_dim(), h],
            );
            t.add("linear_attn.in_proj_ba.weight", &[2 * c.num_value_heads, h]);
        } else {
            t.add("linear_attn.in_proj_qkv.weight", &[c.conv_dim(), h]);
            t.add("linear_attn.in_proj_z.weight", &[c.value_dim(), h]);
            t.add("linear_attn.in_proj_b.weight", &[c.num_value_heads, h]);
            t.add("linear_attn.in_proj_a.weight", &[c.num_value_heads, h]);
        }
        t.add("linear_attn.conv1d.weight", &[c.conv_dim(), 1, c.conv_kernel]);
        t.add("linear_attn.A_log", &[c.num_value_heads]);
        t.add("linear_attn.dt_bias", &[c.num_value_heads]);
        t.add("linear_attn.norm.weight", &[c.value_head_dim]);
        t.add("linear_attn.out_proj.weight", &[h, c.value_dim()]);
    }

    fn mlp(&self, t: &mut Layer, module: &str, inner: usize, bias: bool) {
        let h = self.hidden_size;
        for (name, out, input) in [("gate", inner, h), ("up", inner, h), ("down", h, inner)] {
            t.add(&format!("{module}.{name}_proj.weight"), &[out, input]);
            if bias {
                t.add(&format!("{module}.{name}_proj.bias"), &[out]);
            }
        }
    }

    fn sparse_mlp(&self, t: &mut Layer) {
        let Some(c) = self.experts else {
            unreachable!("a sparse layer comes from a config with the sizes of its experts")
        };
        let (h, i, e) = (self.hidden_size, c.intermediate_size, c.num_experts);
        t.add("mlp.gate.weight", &[e, h]);
        t.add("mlp.experts.gate_up_proj", &[e, 2 * i, h]);
        t.add("mlp.experts.down_proj", &[e, h, i]);
        if let Some(shared) = c.shared_intermediate_size {
            self.mlp(t, "mlp.shared_expert", shared, false);
            t.add("mlp.shared_expert_gate.weight", &[1, h]);
        }
    }
}

pub(super) fn spec(name: &str, shape: &[usize]) -> TensorSpec {
    TensorSpec {
        name: name.to_string(),
        shape: shape.to_vec(),
    }
}
