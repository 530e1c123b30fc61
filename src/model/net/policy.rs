//! A whole causal language model: embedding, blocks, final norm, head.

use super::{qwen3::Qwen3Block, tensor_from_weight, weight_from_tensor, PackedLayout};
use crate::{
    base::{WeightError, WeightTensor},
    model::hf::{Checkpoint, ModelConfig, ModelError, ModelType, TensorSpec},
};
use std::path::Path;
use tch::{no_grad, Device, Kind, Tensor};

/// One layer between embedding and final norm. The trainer drives blocks one by one.
pub trait Block: Send {
    /// `model.layers.N`.
    fn name(&self) -> &str;
    /// The residual stream behind the layer, `[T,H]`, from the one before it.
    fn forward(&self, x: &Tensor, layout: &PackedLayout) -> Tensor;
    /// Parameters under their checkpoint names, in checkpoint order; shallow clones.
    fn parameters(&self) -> Vec<(String, Tensor)>;
}

/// A causal language model whose parameters are f32 leaf tensors that require gradients.
pub struct Policy {
    /// What was built.
    pub config: ModelConfig,
    device: Device,
    embedding: (String, Tensor),
    blocks: Vec<Box<dyn Block>>,
    norm: (String, Tensor),
    head: Option<(String, Tensor)>,
}

impl Policy {
    /// Reads a model folder. Stored bf16 and f16 values are widened.
    pub fn load(dir: &Path, device: Device) -> Result<Self, ModelError> {
        let config = ModelConfig::from_dir(dir)?;
        let checkpoint = Checkpoint::open(dir)?;
        Self::build(config, device, |spec| {
            let stored = checkpoint.get(&spec.name, &spec.shape)?;
            tensor_from_weight(&stored.to_weight(), &shape_of(spec), device).map_err(|e| ModelError::Tensor {
                name: spec.name.clone(),
                path: stored.path,
                problem: e.to_string(),
            })
        })
    }

    /// New weights as transformers initialises them: matrices normal with `initializer_range`, norms one,
    /// biases zero. The values depend on `seed` alone.
    pub fn random(config: ModelConfig, seed: i64, device: Device) -> Self {
        let deviation = config.initializer_range;
        let mut generator = super::tensors::NormalStream::new(seed);
        let built = Self::build(config, device, |spec| {
            let shape = shape_of(spec);
            let options = (Kind::Float, device);
            Ok::<_, std::convert::Infallible>(if spec.name.ends_with("norm.weight") {
                Tensor::ones(&shape, options)
            } else if spec.name.ends_with(".bias") {
                Tensor::zeros(&shape, options)
            } else {
                generator.tensor(&shape, deviation).to_device(device)
            })
        });
        match built {
            Ok(policy) => policy,
            Err(never) => match never {},
        }
    }

    fn build<E>(
        config: ModelConfig,
        device: Device,
        mut make: impl FnMut(&TensorSpec) -> Result<Tensor, E>,
    ) -> Result<Self, E> {
        let mut take = |spec: TensorSpec| -> Result<(String, Tensor), E> {
            let tensor = make(&spec)?.detach().set_requires_grad(true);
            Ok((spec.name, tensor))
        };
        let embedding = take(config.embedding_spec())?;
        let mut blocks: Vec<Box<dyn Block>> = Vec::with_capacity(config.num_hidden_layers);
        for layer in 0..config.num_hidden_layers {
            let parameters = config
                .layer_table(layer)
                .into_iter()
                .map(&mut take)
                .collect::<Result<Vec<_>, E>>()?;
            blocks.push(match config.model_type {
                ModelType::Qwen3 => Box::new(Qwen3Block::new(&config, layer, parameters)),
            });
        }
        let norm = take(config.norm_spec())?;
        let head = config.head_spec().map(&mut take).transpose()?;
        Ok(Self {
            config,
            device,
            embedding,
            blocks,
            norm,
            head,
        })
    }

    /// Where the parameters are.
    pub fn device(&self) -> Device {
        self.device
    }

    /// Every parameter under its checkpoint name, in checkpoint order; shallow clones.
    pub fn parameters(&self) -> Vec<(String, Tensor)> {
        let clone = |(name, tensor): &(String, Tensor)| (name.clone(), tensor.shallow_clone());
        let mut all = vec![clone(&self.embedding)];
        for block in &self.blocks {
            all.extend(block.parameters());
        }
        all.push(clone(&self.norm));
        all.extend(self.head.as_ref().map(clone));
        all
    }

    /// Embeddings of `ids [T]` i64: `[T,H]`.
    pub fn embed(&self, ids: &Tensor) -> Tensor {
        Tensor::embedding(&self.embedding.1, ids, -1, false, false)
    }

    /// The layers in order.
    pub fn blocks(&self) -> &[Box<dyn Block>] {
        &self.blocks
    }

    /// Final norm of the residual stream `[T,H]`.
    pub fn final_norm(&self, x: &Tensor) -> Tensor {
        rms_norm(x, &self.norm.1, self.config.rms_norm_eps)
    }

    /// Output matrix `[V,H]`: logits are `final_norm(x) · headᵀ`. The embedding when tied.
    pub fn head_weight(&self) -> Tensor {
        self.head.as_ref().unwrap_or(&self.embedding).1.shallow_clone()
    }

    /// `[T,H]` behind the final norm, of `ids [T]` i64, in one graph.
    pub fn forward_hidden(&self, ids: &Tensor, layout: &PackedLayout) -> Tensor {
        let mut x = self.embed(ids);
        for block in &self.blocks {
            x = block.forward(&x, layout);
        }
        self.final_norm(&x)
    }

    /// Overwrites every parameter in place. Nothing changes unless all tensors fit.
    pub fn copy_from(&self, tensors: &[WeightTensor]) -> Result<(), WeightError> {
        let parameters = self.parameters();
        let by_name: std::collections::HashMap<&str, &WeightTensor> =
            tensors.iter().map(|t| (t.name.as_str(), t)).collect();
        let mut values = Vec::with_capacity(parameters.len());
        for (name, parameter) in &parameters {
            let Some(weight) = by_name.get(name.as_str()) else {
                return Err(WeightError::Tensor {
                    name: name.clone(),
                    problem: "it is missing from the update".into(),
                });
            };
            values.push(tensor_from_weight(weight, &parameter.size(), self.device)?);
        }
        if by_name.len() != parameters.len() {
            let known = |t: &&WeightTensor| parameters.iter().all(|(n, _)| *n != t.name);
            let name = tensors
                .iter()
                .find(known)
                .map_or_else(String::new, |t| t.name.clone());
            return Err(WeightError::Tensor {
                name,
                problem: "the policy has no such tensor".into(),
            });
        }
        no_grad(|| {
            for ((_, mut parameter), value) in parameters.into_iter().zip(values) {
                parameter.copy_(&value);
            }
        });
        Ok(())
    }

    /// A copy of every parameter in checkpoint order, f32.
    pub fn export(&self) -> Vec<WeightTensor> {
        let parameters = self.parameters();
        parameters.iter().map(|(n, t)| weight_from_tensor(n, t)).collect()
    }
}

fn shape_of(spec: &TensorSpec) -> Vec<i64> {
    spec.shape.iter().map(|n| *n as i64).collect()
}

/// `x · rsqrt(mean(x²) + eps) · w` over the last dimension (Zhang and Sennrich, 2019).
pub(crate) fn rms_norm(x: &Tensor, weight: &Tensor, eps: f64) -> Tensor {
    x.rms_norm(weight.size(), Some(weight), eps)
}
