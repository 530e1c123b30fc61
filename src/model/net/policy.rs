//! A whole causal language model: embedding, blocks, final norm, head.

use super::{
    decoder::DecoderLayer, llama, norm::Norm, parameters::Parameters, qwen3, qwen3_5, qwen3_5_moe, qwen3_moe,
    qwen3_next, tensor_from_weight, weight_from_tensor, ComputeType, PackedLayout,
};
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
    final_norm: Norm,
    head: Option<(String, Tensor)>,
    compute: ComputeType,
    is_partial: bool,
}

impl Policy {
    /// Reads a model folder. Stored bf16 and f16 values are widened.
    pub fn load(dir: &Path, device: Device) -> Result<Self, ModelError> {
        Self::load_each(dir, device, |_, whole| whole)
    }

    /// Reads a model folder tensor by tensor and keeps what `part` makes of each. The network cannot compute
    /// before its parameters have their shapes again.
    pub fn load_parts(
        dir: &Path,
        device: Device,
        part: impl FnMut(&TensorSpec, Tensor) -> Tensor,
    ) -> Result<Self, ModelError> {
        let mut policy = Self::load_each(dir, device, part)?;
        policy.is_partial = true;
        Ok(policy)
    }

    fn load_each(
        dir: &Path,
        device: Device,
        mut part: impl FnMut(&TensorSpec, Tensor) -> Tensor,
    ) -> Result<Self, ModelError> {
        let config = ModelConfig::from_dir(dir)?;
        let checkpoint = Checkpoint::open(dir)?;
        checkpoint.check_unambiguous(&config)?;
        Self::build(config, device, |spec| {
            let stored = checkpoint.read(spec)?;
            let whole = tensor_from_weight(&stored.to_weight(), &shape_of(spec), device);
            let bad = |problem: String| ModelError::Tensor {
                name: spec.name.clone(),
                path: stored.path.clone(),
                problem,
            };
            let whole = whole.map_err(|e| bad(e.to_string()))?;
            match first_not_finite(&whole) {
                None => Ok(part(spec, whole)),
                Some(at) => Err(bad(format!(
                    "its number {at} of {} is NaN or infinite, and every result would be",
                    whole.numel()
                ))),
            }
        })
    }

    /// True when the parameters are what [`Policy::load_parts`] kept.
    pub fn is_partial(&self) -> bool {
        self.is_partial
    }

    /// Shapes of the whole parameters, in the order of [`Policy::parameters`].
    pub fn shapes(&self) -> Vec<Vec<i64>> {
        let config = &self.config;
        let mut specs = vec![config.embedding_spec()];
        (0..config.num_hidden_layers).for_each(|layer| specs.extend(config.layer_table(layer)));
        specs.push(config.norm_spec());
        specs.extend(config.head_spec());
        specs.iter().map(shape_of).collect()
    }

    /// New weights as transformers initialises them: matrices normal with `initializer_range`, norms one
    /// (zero where the family multiplies by `1 + w`), biases zero, decay rates `e^{A_log}` of the delta net
    /// evenly spread over [0.01, 16), its `dt_bias` one. The values depend on `seed` alone.
    pub fn random(config: ModelConfig, seed: i64, device: Device) -> Self {
        let deviation = config.initializer_range;
        let zero_centred = config.model_type.is_hybrid();
        let mut generator = super::tensors::RandomStream::new(seed);
        let built = Self::build(config, device, |spec| {
            let shape = shape_of(spec);
            let options = (Kind::Float, device);
            let name = spec.name.as_str();
            Ok::<_, std::convert::Infallible>(if name.ends_with("linear_attn.A_log") {
                generator.uniform(&shape, 0.01, 16.0).log().to_device(device)
            } else if name.ends_with("linear_attn.norm.weight") || name.ends_with("dt_bias") {
                Tensor::ones(&shape, options)
            } else if name.ends_with("norm.weight") {
                if zero_centred {
                    Tensor::zeros(&shape, options)
                } else {
                    Tensor::ones(&shape, options)
                }
            } else if spec.name.ends_with(".bias") {
                Tensor::zeros(&shape, options)
            } else {
                generator.normal(&shape, deviation).to_device(device)
            })
        });
        match built {
            Ok(policy) => policy,
            Err(never) => match never {},
        }
    }

    /// A policy that is never trained: its parameters are of the element type that it computes in, but f32 where
    /// a family with a delta net reads them unrounded beside bf16: norms, decay rates.
    /// Every tensor of the config's table must be there; others are passed over.
    pub fn for_inference(
        config: ModelConfig,
        tensors: &[WeightTensor],
        device: Device,
        compute: ComputeType,
    ) -> Result<Self, WeightError> {
        let by_name: std::collections::HashMap<&str, &WeightTensor> =
            tensors.iter().map(|t| (t.name.as_str(), t)).collect();
        let compute_kind = compute.kind_for(&config);
        let is_hybrid = config.model_type.is_hybrid();
        let built = Self::build(config, device, |spec| {
            let kind = match compute_kind {
                Kind::BFloat16 if is_hybrid && spec.shape.len() == 1 => Kind::Float,
                kind => kind,
            };
            let weight = by_name
                .get(spec.name.as_str())
                .ok_or_else(|| missing(&spec.name))?;
            Ok(tensor_from_weight(weight, &shape_of(spec), device)?.to_kind(kind))
        });
        Ok(built?.with_compute_type(compute))
    }

    /// Another network over the same parameters, for another thread: what is written to one is read by both.
    pub fn share(&self) -> Self {
        let by_name: std::collections::HashMap<String, Tensor> = self.parameters().into_iter().collect();
        let built = Self::build(self.config.clone(), self.device, |spec| {
            Ok::<_, std::convert::Infallible>(by_name[&spec.name].shallow_clone())
        });
        match built {
            Ok(policy) => Self {
                compute: self.compute,
                is_partial: self.is_partial,
                ..policy
            },
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
            let parameters = Parameters::new(config.layer_name(layer), parameters);
            blocks.push(Box::new(decoder_layer(&config, layer, parameters)));
        }
        let norm = take(config.norm_spec())?;
        let head = config.head_spec().map(&mut take).transpose()?;
        let weight = norm.1.shallow_clone();
        let final_norm = if config.model_type.is_hybrid() {
            Norm::zero_centred(weight, config.rms_norm_eps)
        } else {
            Norm::plain(weight, config.rms_norm_eps)
        };
        Ok(Self {
            config,
            device,
            embedding,
            blocks,
            norm,
            final_norm,
            head,
            compute: ComputeType::F32,
            is_partial: false,
        })
    }

    /// Computes in this element type from now on. The parameters stay f32.
    pub fn with_compute_type(mut self, compute: ComputeType) -> Self {
        self.compute = compute;
        self
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
        let rows = Tensor::embedding(&self.embedding.1, ids, -1, false, false);
        match (rows.kind(), self.compute_kind()) {
            // A network whose parameters are f64 computes in f64.
            (Kind::Double, Kind::Float) => rows,
            (_, kind) => rows.to_kind(kind),
        }
    }

    /// Element type of the residual stream and of the matrix products.
    pub fn compute_kind(&self) -> Kind {
        self.compute.kind_for(&self.config)
    }

    /// The layers in order.
    pub fn blocks(&self) -> &[Box<dyn Block>] {
        &self.blocks
    }

    /// Final norm of the residual stream `[T,H]`.
    pub fn final_norm(&self, x: &Tensor) -> Tensor {
        self.final_norm.apply(x)
    }

    /// Logits `[T,V]`, at least f32, of `final_norm(x)`.
    pub fn logits(&self, normed: &Tensor) -> Tensor {
        let weight = self.head_weight().to_kind(normed.kind());
        super::precision::wide(&normed.linear(&weight, None::<&Tensor>))
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
                return Err(missing(name));
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

/// Place of the first number that is NaN or infinite, row by row from 0.
fn first_not_finite(tensor: &Tensor) -> Option<i64> {
    let finite = tensor.isfinite();
    if finite.all().int64_value(&[]) != 0 {
        return None;
    }
    Some(
        finite
            .logical_not()
            .view(-1)
            .to_kind(Kind::Int8)
            .argmax(0, false)
            .int64_value(&[]),
    )
}

fn missing(name: &str) -> WeightError {
    WeightError::Tensor {
        name: name.to_owned(),
        problem: "it is missing from the update".into(),
    }
}

fn shape_of(spec: &TensorSpec) -> Vec<i64> {
    spec.shape.iter().map(|n| *n as i64).collect()
}

/// The layer of the config's family.
fn decoder_layer(config: &ModelConfig, layer: usize, p: Parameters) -> DecoderLayer {
    match config.model_type {
        ModelType::Llama => llama::layer(config, p),
        ModelType::Qwen3 => qwen3::layer(config, p),
        ModelType::Qwen3Moe => qwen3_moe::layer(config, layer, p),
        ModelType::Qwen3Next => qwen3_next::layer(config, layer, p),
        ModelType::Qwen3_5 => qwen3_5::layer(config, layer, p),
        ModelType::Qwen3_5Moe => qwen3_5_moe::layer(config, layer, p),
    }
}
