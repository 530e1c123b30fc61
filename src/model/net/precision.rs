//! Which parts of a network are computed wider than the residual stream.

use tch::{Kind, Tensor};

/// Element type of the residual stream and of the matrix products.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ComputeType {
    /// That of the parameters: f32.
    #[default]
    F32,
    /// bfloat16, with the f32 parameters as master copies.
    Bf16,
}

impl ComputeType {
    /// As libtorch names it.
    pub fn kind(self) -> Kind {
        match self {
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
