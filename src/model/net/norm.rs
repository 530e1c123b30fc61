//! Root-mean-square norms (Zhang and Sennrich, 2019): `x · rsqrt(mean(x²) + eps)` over the last
//! dimension, in three kinds that differ in the weight and in where rounding happens.

use super::precision::wide;
use tch::Tensor;

/// A norm of one width.
pub(super) struct Norm {
    weight: Tensor,
    eps: f64,
    kind: NormKind,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum NormKind {
    Plain,
    ZeroCentred,
}

impl Norm {
    /// `norm(x)·w`: Llama, Qwen3, Qwen3 MoE.
    pub(super) fn plain(weight: Tensor, eps: f64) -> Self {
        let kind = NormKind::Plain;
        Self { weight, eps, kind }
    }

    /// `norm(x)·(1 + w)`: Qwen3-Next and Qwen3.5, whose weights start at zero.
    pub(super) fn zero_centred(weight: Tensor, eps: f64) -> Self {
        let kind = NormKind::ZeroCentred;
        Self { weight, eps, kind }
    }

    pub(super) fn apply(&self, x: &Tensor) -> Tensor {
        match self.kind {
            NormKind::Plain => rms_norm(x, &self.weight, self.eps),
            NormKind::ZeroCentred => {
                let x_wide = wide(x);
                let weight = self.weight.to_kind(x_wide.kind()) + 1.0;
                x_wide
                    .rms_norm(weight.size(), Some(&weight), self.eps)
                    .to_kind(x.kind())
            }
        }
    }
}

/// The plain norm. Below f32 the normalised row is rounded before it is multiplied by the weight.
fn rms_norm(x: &Tensor, weight: &Tensor, eps: f64) -> Tensor {
    if x.kind() == weight.kind() {
        return x.rms_norm(weight.size(), Some(weight), eps);
    }
    // One kernel, which rounds once; an engine there, whose weights are bf16, does the same.
    if x.device().is_cuda() {
        return x.rms_norm(weight.size(), Some(&weight.to_kind(x.kind())), eps);
    }
    let normed = wide(x).rms_norm(weight.size(), None::<&Tensor>, eps);
    normed.to_kind(x.kind()) * weight.to_kind(x.kind())
}

/// The norm behind the delta net: `norm(x)·w·silu(z)`, one weight for all heads, the gate at least f32.
pub(super) fn gated_norm(x: &Tensor, z: &Tensor, weight: &Tensor, eps: f64) -> Tensor {
    let normed = rms_norm(x, weight, eps);
    (wide(&normed) * wide(z).silu()).to_kind(x.kind())
}
