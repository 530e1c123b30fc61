//! How a folder stores the experts of a layer.
//!
//! | Layout | Tensors of a layer | Released so |
//! |---|---|---|
//! | stacked | `experts.gate_up_proj [E,2I,H]` (rows of gate, then up), `experts.down_proj [E,H,I]` | Qwen3.5 MoE |
//! | split | `experts.N.{gate,up}_proj.weight [I,H]`, `experts.N.down_proj.weight [H,I]` | Qwen3 MoE, Qwen3-Next; what transformers saves |
//!
//! The network has them stacked. A split tensor is a run of bytes within the stacked one, so neither
//! direction computes anything.

use super::{
    table::{spec, TensorSpec},
    ModelConfig, ModelType,
};
use crate::base::WeightTensor;

/// A tensor of the split layout within the stacked one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Part {
    pub spec: TensorSpec,
    /// Its first element in the stacked tensor.
    pub start: usize,
}

/// The split tensors that make up a stacked one, in the order of their bytes; empty for all others.
pub(super) fn parts(stacked: &TensorSpec) -> Vec<Part> {
    let Some((prefix, kind)) = stacked.name.rsplit_once(".mlp.experts.") else {
        return Vec::new();
    };
    let &[experts, rows, columns] = stacked.shape.as_slice() else {
        return Vec::new();
    };
    let modules: &[&str] = match kind {
        "gate_up_proj" => &["gate_proj", "up_proj"],
        "down_proj" => &["down_proj"],
        _ => return Vec::new(),
    };
    let shape = [rows / modules.len(), columns];
    let names = (0..experts).flat_map(|e| modules.iter().map(move |m| (e, m)));
    let part = |(i, (e, module)): (usize, (usize, &&str))| Part {
        spec: spec(&format!("{prefix}.mlp.experts.{e}.{module}.weight"), &shape),
        start: i * shape[0] * shape[1],
    };
    names.enumerate().map(part).collect()
}

/// Whether folders of this type are released with stacked experts.
fn released_stacked(model_type: ModelType) -> bool {
    model_type == ModelType::Qwen3_5Moe
}

/// The tensors of a policy as a new folder of its type stores them. Copies no data.
pub fn released_layout(config: &ModelConfig, tensors: &[WeightTensor]) -> Vec<WeightTensor> {
    if released_stacked(config.model_type) {
        return tensors.to_vec();
    }
    tensors.iter().flat_map(split).collect()
}

/// A stacked tensor as its split ones; any other tensor as itself.
pub(super) fn split(tensor: &WeightTensor) -> Vec<WeightTensor> {
    let parts = parts(&TensorSpec {
        name: tensor.name.clone(),
        shape: tensor.shape.clone(),
    });
    if parts.is_empty() {
        return vec![tensor.clone()];
    }
    let bytes = tensor.dtype.size_bytes();
    let cut = |part: Part| WeightTensor {
        data: tensor
            .data
            .slice(part.start * bytes..(part.start + part.spec.numel()) * bytes),
        name: part.spec.name,
        dtype: tensor.dtype,
        shape: part.spec.shape,
    };
    parts.into_iter().map(cut).collect()
}
