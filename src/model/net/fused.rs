//! Operators that replace several, where the device has them.

use super::dispatcher::{call, Argument};
use tch::{Kind, Tensor};

/// Causal attention within segments, `q [T,nq,d]`, `k` and `v [S,nkv,d]` → `[T,nq,d]`: FlashAttention-2
/// (Dao, 2023). `query_starts` and `key_starts [segments+1]` i32 say where the segments start; a
/// segment with more keys than queries ends at the same token in both. CUDA, 16-bit floats.
pub(crate) fn flash_attention(
    [q, k, v]: [&Tensor; 3],
    query_starts: &Tensor,
    key_starts: &Tensor,
    longest_query: i64,
    longest_key: i64,
) -> Tensor {
    use Argument as A;
    let arguments = [
        A::Tensor(q),
        A::Tensor(k),
        A::Tensor(v),
        A::SomeTensor(query_starts),
        A::SomeTensor(key_starts),
        A::Int(longest_query),
        A::Int(longest_key),
        // Dropout; causal; no debug mask.
        A::Float(0.0),
        A::Bool(true),
        A::Bool(false),
        // Scale d^-1/2; window left and right; used keys; slopes.
        A::Nothing,
        A::Nothing,
        A::Nothing,
        A::Nothing,
        A::Nothing,
    ];
    call("_flash_attention_forward", &arguments, 5).swap_remove(0)
}

/// True where [`flash_attention`] takes these queries.
pub(crate) fn has_flash_attention(q: &Tensor) -> bool {
    let width = q.size().last().copied().unwrap_or(0);
    q.device().is_cuda() && q.kind() == Kind::BFloat16 && width % 8 == 0 && width <= 256
}

/// What [`fused_adamw`] updates, all lists in the same order.
pub struct AdamWTensors<'a> {
    /// Parameters.
    pub parameters: &'a [Tensor],
    /// Their gradients.
    pub gradients: &'a [Tensor],
    /// First moments.
    pub first: &'a [Tensor],
    /// Second moments.
    pub second: &'a [Tensor],
}

/// Constants of one update.
pub struct AdamWStep {
    /// Learning rate.
    pub lr: f64,
    /// Decays of the moments.
    pub betas: (f64, f64),
    /// Added to the root of the second moment.
    pub eps: f64,
    /// Decoupled weight decay of these parameters.
    pub weight_decay: f64,
    /// Number of the update, from 1.
    pub number: u64,
}

/// One AdamW update of many tensors in few kernels, in place.
pub fn fused_adamw(tensors: &AdamWTensors<'_>, step: &AdamWStep) {
    let Some(like) = tensors.parameters.first() else {
        return;
    };
    let number = Tensor::from(step.number as f32).to_device(like.device());
    let numbers: Vec<Tensor> = tensors
        .parameters
        .iter()
        .map(|_| number.shallow_clone())
        .collect();
    use Argument as A;
    let arguments = [
        A::Tensors(tensors.parameters),
        A::Tensors(tensors.gradients),
        A::Tensors(tensors.first),
        A::Tensors(tensors.second),
        // No running maximum of the second moments.
        A::Tensors(&[]),
        A::Tensors(&numbers),
        A::Float(step.lr),
        A::Float(step.betas.0),
        A::Float(step.betas.1),
        A::Float(step.weight_decay),
        A::Float(step.eps),
        // Neither AMSGrad nor maximising.
        A::Bool(false),
        A::Bool(false),
        // No scale of gradients, no flag of infinities.
        A::Nothing,
        A::Nothing,
    ];
    tch::no_grad(|| call("_fused_adamw_", &arguments, 0));
}

#[cfg(test)]
mod tests {
    use super::*;
    use tch::Device;

    /// The operator exists on the CPU as well, so that its arguments are checked without a GPU.
    #[test]
    fn fused_adamw_is_adamw() {
        let tensor = |values: &[f32]| Tensor::from_slice(values);
        let (p, g) = (tensor(&[0.5, -1.0, 2.0]), tensor(&[0.1, -0.2, 0.0]));
        let (m, v) = (p.zeros_like(), p.zeros_like());
        let (lr, b1, b2, eps, decay) = (0.01, 0.9, 0.99, 1e-8, 0.1);
        let mut want: Vec<(f64, f64, f64)> = [0.5, -1.0, 2.0]
            .iter()
            .map(|p: &f32| (f64::from(*p), 0.0, 0.0))
            .collect();
        for number in 1..=3u64 {
            fused_adamw(
                &AdamWTensors {
                    parameters: &[p.shallow_clone()],
                    gradients: &[g.shallow_clone()],
                    first: &[m.shallow_clone()],
                    second: &[v.shallow_clone()],
                },
                &AdamWStep {
                    lr,
                    betas: (b1, b2),
                    eps,
                    weight_decay: decay,
                    number,
                },
            );
            for ((p, m, v), g) in want.iter_mut().zip([0.1f32, -0.2, 0.0]) {
                let g = f64::from(g);
                *p *= 1.0 - lr * decay;
                *m = b1 * *m + (1.0 - b1) * g;
                *v = b2 * *v + (1.0 - b2) * g * g;
                let t = number as i32;
                let root = (*v / (1.0 - b2.powi(t))).sqrt() + eps;
                *p -= lr * *m / (1.0 - b1.powi(t)) / root;
            }
        }
        for (i, (want, ..)) in want.iter().enumerate() {
            let got = p.double_value(&[i as i64]);
            assert!((got - want).abs() < 1e-6, "{i}: {got} {want}");
        }
        assert_eq!(p.device(), Device::Cpu);
    }
}
