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

use super::{block_loop::Gradients, shards::Shards};
use crate::{
    base::WeightError,
    model::net::{fused_adamw, AdamWStep, AdamWTensors},
    train::checkpoint::{PieceIndex, TensorPiece},
};
use tch::{no_grad, Tensor};

/// Prefixes of the names of saved moments.
const FIRST: &str = "exp_avg.";
const SECOND: &str = "exp_avg_sq.";

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
    parameter: Tensor,
    decays: bool,
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
    /// Moments of zero for this rank's share of the parameters, which is updated in place.
    pub(super) fn new(config: AdamWConfig, shards: &Shards) -> Self {
        let slots = shards
            .trained()
            .into_iter()
            .map(|(_, parameter, decays)| Slot {
                first: parameter.detach().zeros_like(),
                second: parameter.detach().zeros_like(),
                parameter,
                decays,
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

    /// Bytes of the moments.
    #[cfg(test)]
    pub(super) fn size_bytes(&self) -> usize {
        let bytes = |t: &Tensor| t.numel() * t.kind().elt_size_in_bytes();
        let slots = self.slots.iter();
        slots.map(|slot| bytes(&slot.first) + bytes(&slot.second)).sum()
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
                if slot.decays {
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
                if slot.decays == decays {
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

    /// First and second moments of this rank.
    fn columns(&self) -> [Vec<Tensor>; 2] {
        let column = |of: fn(&Slot) -> &Tensor| -> Vec<Tensor> {
            self.slots.iter().map(|slot| of(slot).shallow_clone()).collect()
        };
        [column(|slot| &slot.first), column(|slot| &slot.second)]
    }

    /// Copies of this rank's moments: `exp_avg.<name>` and `exp_avg_sq.<name>`.
    pub(super) fn snapshot(&self, shards: &Shards) -> Vec<TensorPiece> {
        let [first, second] = self.columns();
        let mut all = shards.snapshot(FIRST, &first);
        all.extend(shards.snapshot(SECOND, &second));
        all
    }

    /// Whether saved moments are those of the parameters.
    pub(super) fn check(shards: &Shards, saved: &PieceIndex<'_>) -> Result<(), WeightError> {
        shards.check(FIRST, saved)?;
        shards.check(SECOND, saved)
    }

    /// Continues with saved moments that fit, after `updates` updates.
    pub(super) fn restore(&mut self, shards: &Shards, saved: &PieceIndex<'_>, updates: u64) {
        let [first, second] = self.columns();
        shards.fill(FIRST, saved, &first);
        shards.fill(SECOND, saved, &second);
        self.updates = updates;
    }
}

#[cfg(test)]
mod tests {
    use super::{super::shards::Given, *};
    use tch::{COptimizer, Device, Kind};

    fn shards(parameters: Vec<(String, Tensor)>) -> Shards {
        let given = parameters.iter().map(|(name, t)| Given::whole(name, t)).collect();
        Shards::new(vec![("all".into(), given)], None)
    }

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
        let mut optimizer = AdamW::new(config, &shards(vec![("w".into(), ours.shallow_clone())]));
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
        let mut optimizer = AdamW::new(
            config,
            &shards(vec![("norm.weight".into(), norm.shallow_clone())]),
        );
        optimizer.update(&Gradients::of(vec![norm.zeros_like()]), 0.1);
        assert_eq!(norm.sum(Kind::Float).double_value(&[]), 3.0);
    }

    #[test]
    fn a_missing_moment_is_named() {
        let w = shards(vec![(
            "w".to_owned(),
            Tensor::ones([2, 2], (Kind::Float, Device::Cpu)),
        )]);
        let mut from = AdamW::new(AdamWConfig::default(), &w);
        from.update(
            &Gradients::of(vec![Tensor::ones([2, 2], (Kind::Float, Device::Cpu))]),
            0.1,
        );
        let saved = from.snapshot(&w);
        let mut to = AdamW::new(AdamWConfig::default(), &w);
        let part = PieceIndex::new(&saved[..1]).unwrap();
        let error = AdamW::check(&w, &part).err().unwrap();
        assert!(error.to_string().contains("exp_avg_sq.w"), "{error}");
        let whole = PieceIndex::new(&saved).unwrap();
        AdamW::check(&w, &whole).unwrap();
        to.restore(&w, &whole, 1);
        assert_eq!(to.updates(), 1);
        let bytes = |o: &AdamW| -> Vec<_> { o.snapshot(&w).into_iter().map(|t| t.data).collect() };
        assert_eq!(bytes(&to), bytes(&from));
    }
}
