//! AdamW.
//!
//! Kingma and Ba 2015 ("Adam") with decoupled weight decay (Loshchilov and Hutter 2019, "Decoupled Weight
//! Decay Regularization"), in PyTorch's order. With gradient g and update number t from 1:
//!
//! ```text
//! p ← p (1 − lr·decay)                    matrices only: norms and biases do not decay
//! m ← β1 m + (1 − β1) g
//! v ← β2 v + (1 − β2) g²
//! p ← p − lr/(1 − β1^t) · m / ( √v/√(1 − β2^t) + eps )
//! ```

use super::block_loop::Gradients;
use crate::{
    base::{WeightError, WeightTensor},
    model::net::{fused_adamw, tensor_from_weight, weight_from_tensor, AdamWStep, AdamWTensors},
};
use std::collections::HashMap;
use tch::{no_grad, Tensor};

/// Constants of the optimizer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamWConfig {
    /// Decay of the first moment.
    pub beta1: f64,
    /// Decay of the second moment.
    pub beta2: f64,
    /// Added to the root of the second moment.
    pub eps: f64,
    /// Decoupled weight decay (`WEIGHT_DECAY`).
    pub weight_decay: f64,
}

impl Default for AdamWConfig {
    fn default() -> Self {
        Self {
            beta1: 0.9,
            beta2: 0.999,
            eps: 1e-8,
            weight_decay: 0.01,
        }
    }
}

struct Slot {
    name: String,
    parameter: Tensor,
    first: Tensor,
    second: Tensor,
}

/// Moments of all parameters.
pub(super) struct AdamW {
    config: AdamWConfig,
    slots: Vec<Slot>,
    updates: u64,
}

impl AdamW {
    /// Moments of zero for the given parameters, which are updated in place.
    pub(super) fn new(config: AdamWConfig, parameters: Vec<(String, Tensor)>) -> Self {
        let slots = parameters
            .into_iter()
            .map(|(name, parameter)| Slot {
                first: parameter.detach().zeros_like(),
                second: parameter.detach().zeros_like(),
                name,
                parameter,
            })
            .collect();
        Self {
            config,
            slots,
            updates: 0,
        }
    }

    /// Updates made so far.
    pub(super) fn updates(&self) -> u64 {
        self.updates
    }

    /// One update of every parameter with gradients in the same order.
    pub(super) fn update(&mut self, gradients: &Gradients, lr: f64) {
        self.updates += 1;
        let AdamWConfig {
            beta1,
            beta2,
            eps,
            weight_decay,
        } = self.config;
        if self.slots.first().is_some_and(|s| s.parameter.device().is_cuda()) {
            return self.update_fused(gradients, lr);
        }
        let t = self.updates as f64;
        let correction1 = 1.0 - beta1.powf(t);
        let correction2 = 1.0 - beta2.powf(t);
        no_grad(|| {
            for (slot, gradient) in self.slots.iter_mut().zip(&gradients.tensors) {
                let decays = slot.parameter.dim() >= 2;
                if decays {
                    let _ = slot.parameter.g_mul_scalar_(1.0 - lr * weight_decay);
                }
                let _ = slot.first.lerp_(gradient, 1.0 - beta1);
                let _ = slot.second.g_mul_scalar_(beta2);
                let _ = slot.second.g_add_(&(gradient * gradient * (1.0 - beta2)));
                let denominator = slot.second.sqrt() / correction2.sqrt() + eps;
                let step = &slot.first * (-lr / correction1);
                let _ = slot.parameter.addcdiv_(&step, &denominator);
            }
        });
    }

    /// The same in libtorch's fused kernels: of what the device waits for, memory is the smaller part as
    /// long as every parameter needs launches of its own.
    fn update_fused(&self, gradients: &Gradients, lr: f64) {
        for decays in [true, false] {
            let (mut parameters, mut given) = (Vec::new(), Vec::new());
            let (mut first, mut second) = (Vec::new(), Vec::new());
            for (slot, gradient) in self.slots.iter().zip(&gradients.tensors) {
                if (slot.parameter.dim() >= 2) == decays {
                    parameters.push(slot.parameter.shallow_clone());
                    given.push(gradient.shallow_clone());
                    first.push(slot.first.shallow_clone());
                    second.push(slot.second.shallow_clone());
                }
            }
            let tensors = AdamWTensors {
                parameters: &parameters,
                gradients: &given,
                first: &first,
                second: &second,
            };
            let step = AdamWStep {
                lr,
                betas: (self.config.beta1, self.config.beta2),
                eps: self.config.eps,
                weight_decay: if decays { self.config.weight_decay } else { 0.0 },
                number: self.updates,
            };
            fused_adamw(&tensors, &step);
        }
    }

    /// Copies of the moments: `exp_avg.<name>` and `exp_avg_sq.<name>`.
    pub(super) fn export(&self) -> Vec<WeightTensor> {
        let pair = |slot: &Slot| {
            [
                weight_from_tensor(&format!("exp_avg.{}", slot.name), &slot.first),
                weight_from_tensor(&format!("exp_avg_sq.{}", slot.name), &slot.second),
            ]
        };
        self.slots.iter().flat_map(pair).collect()
    }

    /// Reads moments as exported, for [`AdamW::restore`].
    pub(super) fn read(&self, tensors: &[WeightTensor]) -> Result<Moments, WeightError> {
        let by_name: HashMap<&str, &WeightTensor> = tensors.iter().map(|t| (t.name.as_str(), t)).collect();
        let read = |kind: &str, slot: &Slot| {
            let name = format!("{kind}.{}", slot.name);
            match by_name.get(name.as_str()) {
                Some(weight) => tensor_from_weight(weight, &slot.parameter.size(), slot.parameter.device())
                    .map(|t| t.to_kind(slot.parameter.kind())),
                None => Err(WeightError::Tensor {
                    name,
                    problem: "the saved optimizer state does not have it".into(),
                }),
            }
        };
        let pair = |slot: &Slot| Ok((read("exp_avg", slot)?, read("exp_avg_sq", slot)?));
        self.slots.iter().map(pair).collect::<Result<_, _>>().map(Moments)
    }

    /// Continues with these moments after `updates` updates.
    pub(super) fn restore(&mut self, moments: Moments, updates: u64) {
        for (slot, (first, second)) in self.slots.iter_mut().zip(moments.0) {
            slot.first = first;
            slot.second = second;
        }
        self.updates = updates;
    }
}

/// First and second moment of every parameter.
pub(super) struct Moments(Vec<(Tensor, Tensor)>);

#[cfg(test)]
mod tests {
    use super::*;
    use tch::{COptimizer, Device, Kind};

    /// Against libtorch's own AdamW. It decays everything, so the matrix alone is compared with decay.
    #[test]
    fn follows_libtorch() {
        let config = AdamWConfig {
            weight_decay: 0.1,
            ..AdamWConfig::default()
        };
        let start = Tensor::from_slice(&[0.5f64, -1.0, 2.0, 0.0, 3.0, -0.25]).view([2, 3]);
        let ours = start.copy();
        let theirs = start.copy().set_requires_grad(true);
        let mut optimizer = AdamW::new(config, vec![("w".into(), ours.shallow_clone())]);
        let mut reference = COptimizer::adamw(0.01, 0.9, 0.999, 0.1, 1e-8, false).unwrap();
        reference.add_parameters(&theirs, 0).unwrap();
        for step in 0..5 {
            let factor = (Tensor::arange(6, (Kind::Double, Device::Cpu)) + f64::from(step))
                .sin()
                .view([2, 3]);
            reference.zero_grad().unwrap();
            (&theirs * &factor).sum(None).backward();
            reference.step().unwrap();
            optimizer.update(&Gradients::of(vec![factor]), 0.01);
        }
        let gap = (&ours - theirs.detach()).abs().max().double_value(&[]);
        assert!(gap < 1e-12, "{gap}");
        assert!((&ours - &start).abs().max().double_value(&[]) > 0.005);
    }

    #[test]
    fn norms_do_not_decay() {
        let config = AdamWConfig {
            weight_decay: 0.5,
            ..AdamWConfig::default()
        };
        let norm = Tensor::ones([3], (Kind::Float, Device::Cpu));
        let mut optimizer = AdamW::new(config, vec![("norm.weight".into(), norm.shallow_clone())]);
        optimizer.update(&Gradients::of(vec![norm.zeros_like()]), 0.1);
        assert_eq!(norm.sum(Kind::Float).double_value(&[]), 3.0);
    }

    #[test]
    fn a_missing_moment_is_named() {
        let w = || vec![("w".to_owned(), Tensor::ones([2, 2], (Kind::Float, Device::Cpu)))];
        let mut from = AdamW::new(AdamWConfig::default(), w());
        from.update(
            &Gradients::of(vec![Tensor::ones([2, 2], (Kind::Float, Device::Cpu))]),
            0.1,
        );
        let mut saved = from.export();
        let mut to = AdamW::new(AdamWConfig::default(), w());
        let whole = saved.clone();
        saved.pop();
        let error = to.read(&saved).err().unwrap();
        assert!(error.to_string().contains("exp_avg_sq.w"), "{error}");
        let moments = to.read(&whole).unwrap();
        to.restore(moments, 1);
        assert_eq!(to.updates(), 1);
        let bytes = |o: &AdamW| -> Vec<_> { o.export().into_iter().map(|t| t.data).collect() };
        assert_eq!(bytes(&to), bytes(&from));
    }
}
