//! The critic of PPO: a copy of the policy's trunk with a value head, and its own optimizer.
//!
//! Embedding, blocks and final norm start as the policy's; the head `[1,H]` and its bias start at zero, so
//! that the first prediction is 0 for every state. The prediction before a sampled token is read where
//! the policy predicts that token. Parameters have the names of the policy, without its output head, and
//! `score.weight`, `score.bias`, as transformers names a head with one label.
//!
//! AdamW moves each weight of the head by about `CRITIC_LR` in an update. Before predictions can tell trials apart
//! they have to reach the mean return, which takes some `1 / (CRITIC_LR · H)` updates; on that way they differ by
//! token, not by what the token says, and `critic/vf_explained_var` is near 0 or below it.
//!
//! Forward and backward go block by block like the policy's ([`super::block_loop`]).

use super::{
    block_loop::{to_vec, vector_jacobian, Gradients, Network},
    dealing::deal,
    mesh::Mesh,
    optimizer::AdamW,
    samples::Samples,
    shards::{units_of, Given, Shards},
    TrainError, TrainerConfig,
};
use crate::{
    base::WeightError,
    model::net::Policy,
    train::{
        algorithm::ValueSums,
        checkpoint::{CriticState, PieceIndex},
    },
};
use std::sync::Arc;
use tch::{no_grad, Kind, Tensor};

const HEAD: &str = "score.weight";
const BIAS: &str = "score.bias";

/// Network and optimizer.
pub(super) struct Critic {
    trunk: Policy,
    /// `[1,H]`.
    head: Tensor,
    /// `[1]`.
    bias: Tensor,
    shards: Shards,
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
    pub(super) fn new(config: &TrainerConfig, trunk: Policy, mesh: Option<Arc<Mesh>>) -> Self {
        let like = trunk.head_weight();
        let options = (like.kind(), like.device());
        let hidden = trunk.config.hidden_size as i64;
        let leaf = |shape: &[i64]| Tensor::zeros(shape, options).set_requires_grad(true);
        let (head, bias) = (leaf(&[1, hidden]), leaf(&[1]));
        let mut units = units_of(&trunk, false);
        units.push((
            "value head".into(),
            vec![Given::whole(HEAD, &head), Given::whole(BIAS, &bias)],
        ));
        let shards = Shards::new(units, mesh);
        let optimizer = AdamW::new(config.optimizer, &shards);
        Self {
            trunk,
            head,
            bias,
            shards,
            optimizer,
        }
    }

    /// Every trained parameter by name; shallow clones.
    #[cfg(test)]
    pub(super) fn parameters(&self) -> Vec<(String, Tensor)> {
        let trained = self.shards.trained();
        trained
            .into_iter()
            .map(|(name, tensor, _)| (name, tensor))
            .collect()
    }

    fn network<'a>(&'a self, config: &'a TrainerConfig) -> Network<'a> {
        Network::new(&self.trunk, &self.shards, config)
    }

    /// Units of the final norm and of the value head.
    fn last_units(&self) -> [usize; 2] {
        let norm = Shards::last(self.trunk.blocks().len());
        [norm, norm + 1]
    }

    /// Runs `work` while final norm and value head are here.
    fn with_head<T>(&self, work: impl FnOnce() -> T) -> Result<T, TrainError> {
        for unit in self.last_units() {
            self.shards.load(unit)?;
        }
        let result = work();
        for unit in self.last_units() {
            self.shards.release(unit);
        }
        Ok(result)
    }

    /// Updates made so far.
    pub(super) fn updates(&self) -> u64 {
        self.optimizer.updates()
    }

    /// `[N]` predictions of rows `[N,H]` of the residual stream.
    fn values(&self, rows: &Tensor) -> Tensor {
        self.score(&self.trunk.final_norm(rows))
    }

    /// `[N]` predictions, of normed rows `[N,H]`.
    fn score(&self, normed: &Tensor) -> Tensor {
        // At least f32, whatever the trunk computes in: returns differ by less than bf16 tells apart.
        let kind = match normed.kind() {
            Kind::BFloat16 => Kind::Float,
            kind => kind,
        };
        let (head, bias) = (self.head.to_kind(kind), self.bias.to_kind(kind));
        normed.to_kind(kind).linear(&head, Some(&bias)).squeeze_dim(-1)
    }

    /// Sets the predictions of all sequences.
    pub(super) fn predict(&self, config: &TrainerConfig, samples: &mut Samples) -> Result<(), TrainError> {
        let network = self.network(config);
        let mesh = self.shards.mesh();
        let all: Vec<usize> = (0..samples.sequences.len()).collect();
        let dealt = deal(&samples.lengths(&all), config.max_token_len_per_gpu, mesh);
        for micro_batch in dealt.own() {
            let packed = network.pack(samples, micro_batch);
            let (_, last) = network.trunk(&packed, false)?;
            let values = self.with_head(|| no_grad(|| to_vec(&self.values(&packed.predicting(&last)))))?;
            let values = packed.whole_column(values, mesh)?;
            for (&index, values) in micro_batch.iter().zip(packed.split_column(&values)) {
                samples.sequences[index].values = values;
            }
        }
        dealt.share("predictions", mesh, &mut samples.sequences, |sample| {
            vec![&mut sample.values]
        })
    }

    /// One optimizer update over the sequences of a mini-batch.
    pub(super) fn update(
        &mut self,
        config: &TrainerConfig,
        samples: &Samples,
        mini_batch: &[usize],
        lr: f64,
    ) -> Result<CriticUpdate, TrainError> {
        let (mut gradients, sums) = self.gradients(config, samples, mini_batch)?;
        let grad_norm = self.shards.global_norm(&gradients)?;
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
        Ok(CriticUpdate {
            sums,
            grad_norm,
            skipped,
        })
    }

    /// Gradients of the value loss of a mini-batch, and its sums.
    pub(super) fn gradients(
        &self,
        config: &TrainerConfig,
        samples: &Samples,
        mini_batch: &[usize],
    ) -> Result<(Gradients, ValueSums), TrainError> {
        let shapes: Vec<_> = mini_batch.iter().map(|&i| samples.sequences[i].shape()).collect();
        let factors = config.objective.aggregation.coefficients(&shapes);
        let network = self.network(config);
        let mesh = self.shards.mesh();
        let norm_name = self.trunk.config.norm_spec().name;
        let norm = network.parameter(&norm_name);
        let mut gradients = self.shards.zero_gradients();
        let mut values_by_place: Vec<Vec<f64>> = vec![Vec::new(); mini_batch.len()];
        let evaluate = |place: usize, values: &[f64], sums: &mut ValueSums| {
            let sample = &samples.sequences[mini_batch[place]];
            let clip = &config.critic.clip;
            clip.evaluate(values, &sample.values, &sample.returns, factors[place], sums)
        };
        let mut sums = ValueSums::default();

        let lengths: Vec<_> = mini_batch
            .iter()
            .enumerate()
            .map(|(place, &i)| (place, samples.sequences[i].ids.len()))
            .collect();
        let dealt = deal(&lengths, config.max_token_len_per_gpu, mesh);
        for places in dealt.own() {
            let indices: Vec<usize> = places.iter().map(|&place| mini_batch[place]).collect();
            let packed = network.pack(samples, &indices);
            let (blocks, last) = network.trunk(&packed, true)?;
            let rows = packed.predicting(&last).detach().set_requires_grad(true);
            self.last_units()
                .into_iter()
                .try_for_each(|unit| self.shards.load(unit))?;
            let values = self.values(&rows);

            let all = packed.whole_column(to_vec(&values), mesh)?;
            let mut derivatives = Vec::new();
            for (&place, values) in places.iter().zip(packed.split_column(&all)) {
                derivatives.extend(evaluate(place, &values, &mut sums));
                values_by_place[place] = values;
            }
            let incoming = network.column(packed.own_part(&derivatives), &values);
            let wanted = [
                rows,
                norm.shallow_clone(),
                self.head.shallow_clone(),
                self.bias.shallow_clone(),
            ];
            let mut found = vector_jacobian(&values, &incoming, &wanted).into_iter();
            let by_rows = found.next().unwrap_or_else(|| unreachable!("one per input"));
            let [norm_unit, head_unit] = self.last_units();
            self.shards.release(norm_unit);
            self.shards.release(head_unit);
            let mut named = [&norm_name[..], HEAD, BIAS].into_iter().zip(found);
            let by_norm: Vec<_> = named.by_ref().take(1).collect();
            let by_head: Vec<_> = named.collect();
            self.shards.add_gradients(norm_unit, &by_norm, &mut gradients)?;
            self.shards.add_gradients(head_unit, &by_head, &mut gradients)?;
            network.trunk_backward(&packed, blocks, last, &by_rows, &mut gradients)?;
        }
        self.shards.finish(&mut gradients)?;
        if mesh.is_some() {
            dealt.share("values of an update", mesh, &mut values_by_place, |values| {
                vec![values]
            })?;
            sums = ValueSums::default();
            for (place, values) in values_by_place.iter().enumerate() {
                evaluate(place, values, &mut sums);
            }
        }
        Ok((gradients, sums))
    }

    /// Copies of what this rank owns of weights and moments.
    pub(super) fn snapshot(&self) -> CriticState {
        CriticState {
            weights: self.shards.snapshot("", &self.shards.shares()),
            optimizer: self.optimizer.snapshot(&self.shards),
        }
    }

    /// Looks whether a saved state fits, for [`Critic::restore`]; nothing changes.
    pub(super) fn check<'a>(&self, state: &'a CriticState) -> Result<SavedCritic<'a>, WeightError> {
        let saved = SavedCritic {
            weights: PieceIndex::new(&state.weights)?,
            moments: PieceIndex::new(&state.optimizer)?,
        };
        self.shards.check("", &saved.weights)?;
        AdamW::check(&self.shards, &saved.moments)?;
        Ok(saved)
    }

    /// Continues from a saved state after `updates` updates.
    pub(super) fn restore(&mut self, saved: &SavedCritic<'_>, updates: u64) {
        self.shards.set_parameters(&saved.weights);
        self.optimizer.restore(&self.shards, &saved.moments, updates);
    }

    /// Predictions of whole sequences in one autograd graph: the oracle of the block loop.
    #[cfg(test)]
    pub(super) fn values_in_one_graph(
        &self,
        ids: &Tensor,
        layout: &crate::model::net::PackedLayout,
    ) -> Tensor {
        self.score(&self.trunk.forward_hidden(ids, layout))
    }
}

/// A state that fits the critic.
pub(super) struct SavedCritic<'a> {
    weights: PieceIndex<'a>,
    moments: PieceIndex<'a>,
}
