//! Weights as a step of the host's own network uses them: projections that read the same input are one matrix.

use crate::{
    base::{WeightError, WeightTensor},
    model::{
        hf::{MlpKind, ModelConfig},
        net::tensor_from_weight,
    },
};
use std::{collections::HashMap, sync::Arc};
use tch::{Device, Tensor};

/// One layer. Matrices are `[in, out]` views, ready for `x.mm(w)`.
pub(super) struct LayerWeights {
    pub input_norm: Arc<[f32]>,
    pub attention: AttentionWeights,
    pub post_norm: Arc<[f32]>,
    pub mlp: MlpWeights,
}

/// Softmax attention.
pub(super) struct AttentionWeights {
    /// Columns: query heads, key heads, value heads.
    pub qkv: Tensor,
    pub qkv_bias: Option<Tensor>,
    pub q_norm: Option<Arc<[f32]>>,
    pub k_norm: Option<Arc<[f32]>>,
    pub o: Tensor,
    pub o_bias: Option<Tensor>,
}

/// What follows the attention.
pub(super) enum MlpWeights {
    Dense(DenseWeights),
    Sparse(SparseWeights),
}

/// A SwiGLU MLP.
pub(super) struct DenseWeights {
    /// Columns: gate, up.
    pub gate_up: Tensor,
    pub down: Tensor,
    /// Of both, in that order.
    pub bias: Option<(Tensor, Tensor)>,
}

/// Routed experts.
pub(super) struct SparseWeights {
    /// `[H,E]`.
    pub router: Tensor,
    pub experts: Vec<DenseWeights>,
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
        Ok(floats(&self.take(name, &[len])?))
    }
}

fn floats(tensor: &Tensor) -> Arc<[f32]> {
    let flat = tensor.contiguous();
    let mut values = vec![0.0f32; flat.numel()];
    flat.copy_data(&mut values, flat.numel());
    values.into()
}

impl EngineWeights {
    /// Builds the weights; every tensor of the config's table must be there and no other.
    pub(super) fn new(config: &ModelConfig, tensors: &[WeightTensor]) -> Result<Self, WeightError> {
        let _guard = tch::no_grad_guard();
        let mut source = Source {
            by_name: tensors.iter().map(|t| (t.name.as_str(), t)).collect(),
        };
        let embedding_spec = config.embedding_spec();
        let embedding = source.take(&embedding_spec.name, &embedding_spec.shape)?;
        let layers = (0..config.num_hidden_layers)
            .map(|layer| Layer::new(config, layer, &mut source).build())
            .collect::<Result<_, _>>()?;
        let norm = source.vector(&config.norm_spec().name, config.hidden_size)?;
        let head = match config.head_spec() {
            None => embedding.tr(),
            Some(spec) => source.take(&spec.name, &spec.shape)?.tr(),
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

    /// Handles to the same memory for another thread.
    pub(super) fn share(&self) -> Self {
        Self {
            embedding: self.embedding.shallow_clone(),
            layers: self.layers.iter().map(LayerWeights::share).collect(),
            norm: self.norm.clone(),
            head: self.head.shallow_clone(),
        }
    }
}

/// One layer being read.
struct Layer<'a, 'b> {
    config: &'a ModelConfig,
    layer: usize,
    source: &'a mut Source<'b>,
}

impl<'a, 'b> Layer<'a, 'b> {
    fn new(config: &'a ModelConfig, layer: usize, source: &'a mut Source<'b>) -> Self {
        Self {
            config,
            layer,
            source,
        }
    }

    fn build(mut self) -> Result<LayerWeights, WeightError> {
        let kind = self.config.layers[self.layer];
        let h = self.config.hidden_size;
        let name = self.name("input_layernorm.weight");
        let input_norm = self.source.vector(&name, h)?;
        let attention = self.attention()?;
        let name = self.name("post_attention_layernorm.weight");
        let post_norm = self.source.vector(&name, h)?;
        let mlp = match kind.mlp {
            MlpKind::Dense => MlpWeights::Dense({
                let (inner, bias) = (self.config.intermediate_size, self.config.mlp_bias);
                self.dense("mlp", inner, bias)?
            }),
            MlpKind::Sparse => MlpWeights::Sparse(self.sparse()?),
        };
        Ok(LayerWeights {
            input_norm,
            attention,
            post_norm,
            mlp,
        })
    }

    fn name(&self, suffix: &str) -> String {
        format!("{}.{suffix}", self.config.layer_name(self.layer))
    }

    fn take(&mut self, suffix: &str, shape: &[usize]) -> Result<Tensor, WeightError> {
        let name = self.name(suffix);
        self.source.take(&name, shape)
    }

    fn attention(&mut self) -> Result<AttentionWeights, WeightError> {
        let config = self.config;
        let (h, d) = (config.hidden_size, config.head_dim);
        let (q, kv) = (config.num_attention_heads * d, config.num_key_value_heads * d);
        let weights = [
            self.take("self_attn.q_proj.weight", &[q, h])?,
            self.take("self_attn.k_proj.weight", &[kv, h])?,
            self.take("self_attn.v_proj.weight", &[kv, h])?,
        ];
        let qkv = Tensor::cat(&weights, 0).tr();
        let o = self.take("self_attn.o_proj.weight", &[h, q])?.tr();
        let (qkv_bias, o_bias) = if config.attention_bias {
            let biases = [
                self.take("self_attn.q_proj.bias", &[q])?,
                self.take("self_attn.k_proj.bias", &[kv])?,
                self.take("self_attn.v_proj.bias", &[kv])?,
            ];
            (
                Some(Tensor::cat(&biases, 0)),
                Some(self.take("self_attn.o_proj.bias", &[h])?),
            )
        } else {
            (None, None)
        };
        let mut head_norm = |which: &str| -> Result<Option<Arc<[f32]>>, WeightError> {
            if !config.model_type.has_qk_norm() {
                return Ok(None);
            }
            let name = self.name(&format!("self_attn.{which}_norm.weight"));
            self.source.vector(&name, d).map(Some)
        };
        Ok(AttentionWeights {
            qkv,
            qkv_bias,
            q_norm: head_norm("q")?,
            k_norm: head_norm("k")?,
            o,
            o_bias,
        })
    }

    fn dense(&mut self, module: &str, inner: usize, has_bias: bool) -> Result<DenseWeights, WeightError> {
        let h = self.config.hidden_size;
        let mut take = |name: &str, shape: &[usize]| self.take(&format!("{module}.{name}"), shape);
        let gate = take("gate_proj.weight", &[inner, h])?;
        let up = take("up_proj.weight", &[inner, h])?;
        let down = take("down_proj.weight", &[h, inner])?;
        let bias = if has_bias {
            let gate = take("gate_proj.bias", &[inner])?;
            let up = take("up_proj.bias", &[inner])?;
            Some((Tensor::cat(&[gate, up], 0), take("down_proj.bias", &[h])?))
        } else {
            None
        };
        Ok(DenseWeights {
            gate_up: Tensor::cat(&[gate, up], 0).tr(),
            down: down.tr(),
            bias,
        })
    }

    fn sparse(&mut self) -> Result<SparseWeights, WeightError> {
        let Some(sizes) = self.config.experts else {
            unreachable!("a sparse layer comes from a config with the sizes of its experts")
        };
        let (h, i, e) = (
            self.config.hidden_size,
            sizes.intermediate_size,
            sizes.num_experts,
        );
        let router = self.take("mlp.gate.weight", &[e, h])?.tr();
        let gate_up = self.take("mlp.experts.gate_up_proj", &[e, 2 * i, h])?.unbind(0);
        let down = self.take("mlp.experts.down_proj", &[e, h, i])?.unbind(0);
        let expert = |(gate_up, down): (&Tensor, &Tensor)| DenseWeights {
            gate_up: gate_up.tr(),
            down: down.tr(),
            bias: None,
        };
        let experts = gate_up.iter().zip(&down).map(expert).collect();
        Ok(SparseWeights { router, experts })
    }
}

impl DenseWeights {
    fn share(&self) -> Self {
        Self {
            gate_up: self.gate_up.shallow_clone(),
            down: self.down.shallow_clone(),
            bias: self
                .bias
                .as_ref()
                .map(|(inner, down)| (inner.shallow_clone(), down.shallow_clone())),
        }
    }
}

impl LayerWeights {
    fn share(&self) -> Self {
        let optional = |t: &Option<Tensor>| t.as_ref().map(Tensor::shallow_clone);
        let w = &self.attention;
        let attention = AttentionWeights {
            qkv: w.qkv.shallow_clone(),
            qkv_bias: optional(&w.qkv_bias),
            q_norm: w.q_norm.clone(),
            k_norm: w.k_norm.clone(),
            o: w.o.shallow_clone(),
            o_bias: optional(&w.o_bias),
        };
        let mlp = match &self.mlp {
            MlpWeights::Dense(w) => MlpWeights::Dense(w.share()),
            MlpWeights::Sparse(w) => MlpWeights::Sparse(SparseWeights {
                router: w.router.shallow_clone(),
                experts: w.experts.iter().map(DenseWeights::share).collect(),
            }),
        };
        Self {
            input_norm: self.input_norm.clone(),
            attention,
            post_norm: self.post_norm.clone(),
            mlp,
        }
    }
}
