//! Weights as a step uses them: projections that read the same input are one matrix.

use crate::{
    base::{WeightError, WeightTensor},
    model::{hf::ModelConfig, net::tensor_from_weight},
};
use std::{collections::HashMap, sync::Arc};
use tch::{Device, Tensor};

/// One layer. Matrices are `[in, out]` views, ready for `x.mm(w)`.
pub(super) struct LayerWeights {
    pub input_norm: Arc<[f32]>,
    /// Columns: query heads, key heads, value heads.
    pub qkv: Tensor,
    pub qkv_bias: Option<Tensor>,
    pub q_norm: Arc<[f32]>,
    pub k_norm: Arc<[f32]>,
    pub o: Tensor,
    pub o_bias: Option<Tensor>,
    pub post_norm: Arc<[f32]>,
    /// Columns: gate, up.
    pub gate_up: Tensor,
    pub down: Tensor,
}

/// All weights of one version.
pub(super) struct EngineWeights {
    /// `[V,H]`.
    pub embedding: Tensor,
    pub layers: Vec<LayerWeights>,
    pub norm: Arc<[f32]>,
    /// `[H,V]`.
    pub head: Tensor,
}

/// Hands out tensors by name and notices what is left.
struct Source<'a> {
    by_name: HashMap<&'a str, &'a WeightTensor>,
}

impl Source<'_> {
    fn take(&mut self, name: &str, shape: &[usize]) -> Result<Tensor, WeightError> {
        let Some(weight) = self.by_name.remove(name) else {
            return Err(WeightError::Tensor {
                name: name.to_string(),
                problem: "it is missing from the update".into(),
            });
        };
        let shape: Vec<i64> = shape.iter().map(|n| *n as i64).collect();
        tensor_from_weight(weight, &shape, Device::Cpu)
    }

    fn vector(&mut self, name: &str, len: usize) -> Result<Arc<[f32]>, WeightError> {
        let tensor = self.take(name, &[len])?;
        let mut values = vec![0.0f32; len];
        tensor.copy_data(&mut values, len);
        Ok(values.into())
    }
}

impl EngineWeights {
    /// Builds the weights; every tensor of the config's table must be there and no other.
    pub(super) fn new(config: &ModelConfig, tensors: &[WeightTensor]) -> Result<Self, WeightError> {
        let _guard = tch::no_grad_guard();
        let mut source = Source {
            by_name: tensors.iter().map(|t| (t.name.as_str(), t)).collect(),
        };
        let (v, h) = (config.vocab_size, config.hidden_size);
        let embedding = source.take("model.embed_tokens.weight", &[v, h])?;
        let layers = (0..config.num_hidden_layers)
            .map(|layer| Self::layer(config, layer, &mut source))
            .collect::<Result<_, _>>()?;
        let norm = source.vector("model.norm.weight", h)?;
        let head = if config.tie_word_embeddings {
            embedding.tr()
        } else {
            source.take("lm_head.weight", &[v, h])?.tr()
        };
        if let Some(name) = source.by_name.keys().next() {
            return Err(WeightError::Tensor {
                name: (*name).to_string(),
                problem: "the policy has no such tensor".into(),
            });
        }
        Ok(Self {
            embedding,
            layers,
            norm,
            head,
        })
    }

    fn layer(config: &ModelConfig, layer: usize, source: &mut Source) -> Result<LayerWeights, WeightError> {
        let (h, i, d) = (config.hidden_size, config.intermediate_size, config.head_dim);
        let (q, kv) = (config.num_attention_heads * d, config.num_key_value_heads * d);
        let name = |suffix: &str| format!("model.layers.{layer}.{suffix}");
        let rows = |source: &mut Source, parts: &[(&str, usize)], input: usize| {
            let parts = parts
                .iter()
                .map(|(part, out)| source.take(&name(&format!("{part}_proj.weight")), &[*out, input]))
                .collect::<Result<Vec<_>, _>>()?;
            Ok(Tensor::cat(&parts, 0).tr())
        };
        let bias = |source: &mut Source, parts: &[(&str, usize)]| {
            if !config.attention_bias {
                return Ok(None);
            }
            let parts = parts
                .iter()
                .map(|(part, out)| source.take(&name(&format!("{part}_proj.bias")), &[*out]))
                .collect::<Result<Vec<_>, _>>()?;
            Ok(Some(Tensor::cat(&parts, 0)))
        };
        let qkv = [("self_attn.q", q), ("self_attn.k", kv), ("self_attn.v", kv)];
        let o = [("self_attn.o", h)];
        Ok(LayerWeights {
            input_norm: source.vector(&name("input_layernorm.weight"), h)?,
            qkv: rows(source, &qkv, h)?,
            qkv_bias: bias(source, &qkv)?,
            q_norm: source.vector(&name("self_attn.q_norm.weight"), d)?,
            k_norm: source.vector(&name("self_attn.k_norm.weight"), d)?,
            o: rows(source, &o, q)?,
            o_bias: bias(source, &o)?,
            post_norm: source.vector(&name("post_attention_layernorm.weight"), h)?,
            gate_up: rows(source, &[("mlp.gate", i), ("mlp.up", i)], h)?,
            down: rows(source, &[("mlp.down", h)], i)?,
        })
    }

    /// Handles to the same memory for another thread.
    pub(super) fn share(&self) -> Self {
        let layer = |l: &LayerWeights| LayerWeights {
            input_norm: l.input_norm.clone(),
            qkv: l.qkv.shallow_clone(),
            qkv_bias: l.qkv_bias.as_ref().map(Tensor::shallow_clone),
            q_norm: l.q_norm.clone(),
            k_norm: l.k_norm.clone(),
            o: l.o.shallow_clone(),
            o_bias: l.o_bias.as_ref().map(Tensor::shallow_clone),
            post_norm: l.post_norm.clone(),
            gate_up: l.gate_up.shallow_clone(),
            down: l.down.shallow_clone(),
        };
        Self {
            embedding: self.embedding.shallow_clone(),
            layers: self.layers.iter().map(layer).collect(),
            norm: self.norm.clone(),
            head: self.head.shallow_clone(),
        }
    }
}
