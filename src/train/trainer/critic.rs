//! The critic of PPO: a copy of the policy's trunk with a value head, and its own optimizer.
//!
//! Embedding, blocks and final norm start as the policy's; the head `[1,H]` and its bias start at zero, so
//! that the first prediction is 0 for every state. The prediction before a sampled token is read where
//! the policy predicts that token. Parameters have the names of the policy, without its output head, and
//! `score.weight`, `score.bias`, as transformers names a head with one label.
//!
//! Forward and backward go block by block like the policy's ([`super::block_loop`]).

use super::{
    block_loop::{to_vec, vector_jacobian, Gradients, Network, PackedBatch},
    optimizer::{AdamW, Moments},
    packing::pack,
    samples::Samples,
    TrainerConfig,
};
use crate::{
    base::WeightError,
    model::net::{tensor_from_weight, weight_from_tensor, Policy},
    train::{
        algorithm::{ObjectiveScale, ValueSums},
        checkpoint::CriticState,
    },
};
use tch::{no_grad, Tensor};

const HEAD: &str = "score.weight";
const BIAS: &str = "score.bias";

/// Network and optimizer.
pub(super) struct Critic {
    trunk: Policy,
    /// `[1,H]`.
    head: Tensor,
    /// `[1]`.
    bias: Tensor,
    optimizer: AdamW,
}

/// What one update of the critic did.
pub(super) struct CriticUpdate {
    pub sums: ValueSums,
    /// Before clipping.
    pub grad_norm: f64,
    /// The gradient was not finite and nothing changed.
    pub skipped: bool,
}

impl Critic {
    /// A critic that predicts 0 everywhere.
    pub(super) fn new(config: &TrainerConfig, trunk: Policy) -> Self {
        let like = trunk.head_weight();
        let options = (like.kind(), like.device());
        let hidden = like.size()[1];
        let leaf = |shape: &[i64]| Tensor::zeros(shape, options).set_requires_grad(true);
        let (head, bias) = (leaf(&[1, hidden]), leaf(&[1]));
        let optimizer = AdamW::new(config.optimizer, parameters(&trunk, &head, &bias));
        Self {
            trunk,
            head,
            bias,
            optimizer,
        }
    }

    /// Every trained parameter by name; shallow clones.
    pub(super) fn parameters(&self) -> Vec<(String, Tensor)> {
        parameters(&self.trunk, &self.head, &self.bias)
    }

    /// Updates made so far.
    pub(super) fn updates(&self) -> u64 {
        self.optimizer.updates()
    }

    /// `[N]` predictions of rows `[N,H]` of the residual stream.
    fn values(&self, rows: &Tensor) -> Tensor {
        // In f32, whatever the trunk computes in: returns differ by less than bf16 tells apart.
        let normed = self.trunk.final_norm(rows).to_kind(self.head.kind());
        normed.linear(&self.head, Some(&self.bias)).squeeze_dim(-1)
    }

    /// Sets the predictions of all sequences.
    pub(super) fn predict(&self, config: &TrainerConfig, samples: &mut Samples) {
        let network = Network::new(&self.trunk, config);
        let all: Vec<usize> = (0..samples.sequences.len()).collect();
        for micro_batch in pack(&samples.lengths(&all), config.max_token_len_per_gpu) {
            let packed = PackedBatch::new(samples, &micro_batch, self.trunk.device());
            let (_, last) = network.trunk(&packed, false);
            let values = no_grad(|| to_vec(&self.values(&packed.predicting(&last))));
            for (&index, values) in micro_batch.iter().zip(packed.split_column(&values)) {
                samples.sequences[index].values = values;
            }
        }
    }

    /// One optimizer update over the sequences of a mini-batch.
    pub(super) fn update(
        &mut self,
        config: &TrainerConfig,
        samples: &Samples,
        mini_batch: &[usize],
        lr: f64,
    ) -> CriticUpdate {
        let (mut gradients, sums) = self.gradients(config, samples, mini_batch);
        let grad_norm = gradients.global_norm();
        let skipped = !grad_norm.is_finite();
        if skipped {
            tracing::warn!(
                grad_norm,
                "gradient norm of the critic is not finite; this update is skipped"
            );
        } else {
            gradients.clip(grad_norm, config.max_grad_norm);
            self.optimizer.update(&gradients, lr);
        }
        CriticUpdate {
            sums,
            grad_norm,
            skipped,
        }
    }

    /// Gradients of the value loss of a mini-batch, and its sums.
    pub(super) fn gradients(
        &self,
        config: &TrainerConfig,
        samples: &Samples,
        mini_batch: &[usize],
    ) -> (Gradients, ValueSums) {
        let shapes: Vec<_> = mini_batch.iter().map(|&i| samples.sequences[i].shape()).collect();
        let scale = ObjectiveScale::new(config.objective.aggregation, &shapes);
        let network = Network::new(&self.trunk, config);
        let norm_name = self.trunk.config.norm_spec().name;
        let norm = network.parameter(&norm_name);
        let mut gradients = Gradients::zeros(self.parameters());
        let mut sums = ValueSums::default();

        let lengths: Vec<_> = mini_batch
            .iter()
            .enumerate()
            .map(|(place, &i)| (place, samples.sequences[i].ids.len()))
            .collect();
        for places in pack(&lengths, config.max_token_len_per_gpu) {
            let indices: Vec<usize> = places.iter().map(|&place| mini_batch[place]).collect();
            let packed = PackedBatch::new(samples, &indices, self.trunk.device());
            let (blocks, last) = network.trunk(&packed, true);
            let rows = packed.predicting(&last).detach().set_requires_grad(true);
            let values = self.values(&rows);

            let mut derivatives = Vec::new();
            for (&place, values) in places.iter().zip(packed.split_column(&to_vec(&values))) {
                let sample = &samples.sequences[mini_batch[place]];
                let clip = &config.critic.clip;
                let factor = scale.factor(place);
                derivatives.extend(clip.evaluate(
                    &values,
                    &sample.values,
                    &sample.returns,
                    factor,
                    &mut sums,
                ));
            }
            let incoming = network.column(&derivatives, &values);
            let wanted = [
                rows,
                norm.shallow_clone(),
                self.head.shallow_clone(),
                self.bias.shallow_clone(),
            ];
            let found = vector_jacobian(&values, &incoming, &wanted);
            for (name, gradient) in [&norm_name[..], HEAD, BIAS].into_iter().zip(&found[1..]) {
                gradients.add(name, gradient);
            }
            network.trunk_backward(&packed, blocks, last, &found[0], &mut gradients);
        }
        (gradients, sums)
    }

    /// Copies of weights and moments.
    pub(super) fn export(&self) -> CriticState {
        let parameters = self.parameters();
        CriticState {
            weights: parameters.iter().map(|(n, t)| weight_from_tensor(n, t)).collect(),
            optimizer: self.optimizer.export(),
        }
    }

    /// Reads a saved state, for [`Critic::restore`]; nothing changes.
    pub(super) fn read(&self, state: &CriticState) -> Result<SavedCritic, WeightError> {
        let find = |(name, parameter): &(String, Tensor)| {
            let saved = state.weights.iter().find(|w| w.name == *name);
            let saved = saved.ok_or_else(|| WeightError::Tensor {
                name: name.clone(),
                problem: "the saved critic does not have it".into(),
            })?;
            tensor_from_weight(saved, &parameter.size(), parameter.device())
        };
        let weights = self.parameters().iter().map(find).collect::<Result<_, _>>()?;
        Ok(SavedCritic {
            weights,
            moments: self.optimizer.read(&state.optimizer)?,
        })
    }

    /// Continues from a saved state after `updates` updates.
    pub(super) fn restore(&mut self, saved: SavedCritic, updates: u64) {
        no_grad(|| {
            for ((_, mut parameter), value) in self.parameters().into_iter().zip(saved.weights) {
                parameter.copy_(&value);
            }
        });
        self.optimizer.restore(saved.moments, updates);
    }

    /// Predictions of whole sequences in one autograd graph: the oracle of the block loop.
    #[cfg(test)]
    pub(super) fn values_in_one_graph(
        &self,
        ids: &Tensor,
        layout: &crate::model::net::PackedLayout,
    ) -> Tensor {
        let hidden = self.trunk.forward_hidden(ids, layout).to_kind(self.head.kind());
        hidden.linear(&self.head, Some(&self.bias)).squeeze_dim(-1)
    }
}

/// A state that fits the critic.
pub(super) struct SavedCritic {
    weights: Vec<Tensor>,
    moments: Moments,
}

fn parameters(trunk: &Policy, head: &Tensor, bias: &Tensor) -> Vec<(String, Tensor)> {
    let unused = trunk.config.head_spec().map(|spec| spec.name);
    let mut all = trunk.parameters();
    all.retain(|(name, _)| Some(name) != unused.as_ref());
    all.push((HEAD.into(), head.shallow_clone()));
    all.push((BIAS.into(), bias.shallow_clone()));
    all
}
