//! Which parts of a network are computed wider than the residual stream.

use crate::model::hf::ModelConfig;
use tch::{Kind, Tensor};

/// Element type of the residual stream and of the matrix products.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ComputeType {
    /// f32, that of the parameters; f64 for the families with a delta net. There the norm behind the delta
    /// rule divides by numbers that are small where most of the rule's sums cancel, and multiplies by
    /// several hundred what was rounded before it: two f32 programs that cut a text in different ways, as
    /// engine and trainer do, would give log-probabilities that differ by 2e-4.
    #[default]
    F32,
    /// bfloat16, with the f32 parameters as master copies.
    Bf16,
}

impl ComputeType {
    /// What a network of this shape computes in, as libtorch names it.
    pub fn kind_for(self, config: &ModelConfig) -> Kind {
        match self {
            ComputeType::F32 if config.model_type.is_hybrid() => Kind::Double,
            ComputeType::F32 => Kind::Float,
            ComputeType::Bf16 => Kind::BFloat16,
        }
    }
}

/// At least f32: bf16 is widened, f32 and f64 stay as they are.
pub(super) fn wide(x: &Tensor) -> Tensor {
    match x.kind() {
        Kind::Float | Kind::Double => x.shallow_clone(),
        _ => x.to_kind(Kind::Float),
    }
}
