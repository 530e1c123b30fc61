//! The trainer: a batch of trajectories in, one step of the weights out.
//!
//! ```text
//! TrainBatch ─ samples ─► sampled tokens of the trials that are trained on
//!   where they are needed: log-probs before the update, those of the reference, the critic's predictions
//!            ─ samples ─► advantages (each trial once), importance weights, rejected tokens
//!            ─ packing ─► micro-batches of whole sequences within a token budget
//!   the critic, where there is one: predictions, value loss, clip by global norm ─► AdamW     (critic)
//!   for each micro-batch:
//!     forward     block by block without gradients, keeping each block's input     (block_loop)
//!     head        log-probs and entropies of the sampled tokens, in chunks         (head)
//!     objective   derivatives by log-prob and entropy, on plain numbers            (algorithm)
//!     backward    head in chunks, then blocks from last to first: forward again with
//!                 gradients, vector-Jacobian product, add to the parameter's gradient
//!   clip by global norm ─► AdamW ─► version + 1                                    (optimizer)
//! ```
//!
//! *Old log-probabilities.* The ratio of the policy loss is against the policy before the update,
//! recomputed here (or against the engine's own numbers with `bypass_old_logprobs`). With one mini-batch
//! and one epoch, no update lies between that recomputation and the loss: both are the same forward
//! pass of the same weights, so it is made once and the ratio is exactly 1 (instead of 1 up to the rounding
//! of another packing); only the time differs.
//!
//! The correction for another sampling policy and the penalty in the reward need the old log-probabilities
//! before the loss; with them the recomputation is always made.
//!
//! *Routing replay (R3).* Where the rollout recorded experts, every pass of the policy takes them instead of
//! choosing ([`crate::model::net`], router); tokens without a record choose freely and are counted. The reference
//! and the critic are other networks, whose own routers choose.
//!
//! *Sequences that cannot move anything* (advantage exactly 0, no KL term, no entropy bonus) get their
//! forward pass for the metrics and no backward pass; their gradient is zero.
//!
//! *Several ranks* ([`Mesh`]). Every rank runs the same step on the same batch. Tensors are split (parameters,
//! gradients and moments: `shards`; sequences: `dealing`; the tokens of a sequence and the experts of
//! a layer: [`crate::model::net::LayerGroups`]), and plain numbers are not: every rank has all log-probabilities,
//! computes the whole objective, and so takes the same decisions and reports the same metrics.
//!
//! Invariant: the result does not depend on how a mini-batch is cut into micro-batches, nor on the number
//! of ranks, up to rounding.

mod block_loop;
mod config;
mod critic;
mod dealing;
mod error;
mod head;
mod mesh;
mod metrics;
mod optimizer;
mod packing;
mod replay;
mod samples;
mod shards;
mod state;

pub use config::{BackwardMode, CriticConfig, TrainerConfig};
pub use error::TrainError;
pub use mesh::{Mesh, MeshConfig};
pub use metrics::StepMetrics;
pub use optimizer::AdamWConfig;
pub use shards::ShardMemory;
pub use state::TrainerSnapshot;

use self::{
    block_loop::{Gradients, Network, TokenDerivatives},
    critic::Critic,
    dealing::deal,
    metrics::MetricsBuilder,
    optimizer::AdamW,
    samples::{Samples, TokenValues},
    shards::{units_of, Shards},
};
use super::{
    algorithm::{ObjectiveScale, ObjectiveSums, SequenceDerivatives, SequenceTerms},
    batch::TrainBatch,
};
use crate::{
    base::{PolicyVersion, WeightTensor},
    model::net::Policy,
};
use std::{borrow::Cow, sync::Arc, time::Instant};

/// The policy being trained, its optimizer, the reference policy where something is measured against it,
/// and the critic where the estimator reads one.
pub struct Trainer {
    config: TrainerConfig,
    policy: Policy,
    shards: Shards,
    reference: Option<Reference>,
    critic: Option<Critic>,
    optimizer: AdamW,
    version: PolicyVersion,
    skipped_updates: u64,
    critic_skipped_updates: u64,
    /// Factor of the penalty in the reward in the next step.
    kl_coefficient: f64,
    lr: f64,
    mesh: Option<Arc<Mesh>>,
}

/// The frozen policy that divergences are measured from.
struct Reference {
    policy: Policy,
    shards: Shards,
}

/// What one optimizer update did.
struct Update {
    sums: ObjectiveSums,
    /// Before clipping.
    grad_norm: f64,
}

impl Trainer {
    /// Starts at version 0 with fresh optimizer moments. Where the estimator reads a critic,
    /// [`Trainer::with_critic`] must follow.
    pub fn new(config: TrainerConfig, policy: Policy, reference: Option<Policy>) -> Result<Self, TrainError> {
        Self::over_ranks(config, policy, reference, None)
    }

    /// The same over the ranks of a mesh, all of which call it with the same policy; each keeps its share
    /// and gives the rest of the policy's memory back. All methods of a trainer over several ranks that
    /// return [`TrainError`] are then called by all of them in the same order.
    ///
    /// # Errors
    /// Settings that no step can work with, and a policy that the mesh cannot share, by variable.
    pub fn over_ranks(
        config: TrainerConfig,
        policy: Policy,
        reference: Option<Policy>,
        mesh: Option<Arc<Mesh>>,
    ) -> Result<Self, TrainError> {
        config.check()?;
        if config.needs_reference() && reference.is_none() {
            return Err(TrainError::NoReference);
        }
        if let Some(mesh) = &mesh {
            mesh.check_policy(&policy.config, config.backward)?;
        }
        let shards = Shards::new(units_of(&policy, true), mesh.clone());
        let reference = reference.map(|policy| Reference {
            shards: Shards::new(units_of(&policy, true), mesh.clone()),
            policy,
        });
        let optimizer = AdamW::new(config.optimizer, &shards);
        Ok(Self {
            kl_coefficient: config.kl_reward.map_or(0.0, |penalty| penalty.coefficient),
            config,
            policy,
            shards,
            reference,
            critic: None,
            optimizer,
            version: PolicyVersion(0),
            skipped_updates: 0,
            critic_skipped_updates: 0,
            lr: 0.0,
            mesh,
        })
    }

    /// Adds a critic that starts as `trunk`, a copy of the starting policy, with a value head of zeros.
    #[must_use]
    pub fn with_critic(mut self, trunk: Policy) -> Self {
        self.critic = Some(Critic::new(&self.config, trunk, self.mesh.clone()));
        self
    }

    /// Copies of the policy's parameters, whole, in checkpoint order.
    pub fn export_weights(&self) -> Result<Vec<WeightTensor>, TrainError> {
        self.shards.export_parameters()
    }

    /// Bytes of this rank's part of the policy.
    pub fn memory(&self) -> ShardMemory {
        self.shards.memory()
    }

    /// Steps that the weights have seen.
    pub fn version(&self) -> PolicyVersion {
        self.version
    }

    /// The policy as it is now; over several ranks without its numbers.
    pub fn policy(&self) -> &Policy {
        &self.policy
    }

    /// Settings.
    pub fn config(&self) -> &TrainerConfig {
        &self.config
    }

    /// One step of the run: `PPO_EPOCHS` passes over the mini-batches of `batch`, an optimizer update
    /// each. Afterwards the version is `batch.step`, also when an update was skipped because its gradient
    /// was not finite, or when the batch holds nothing to learn from.
    pub fn step(&mut self, batch: &TrainBatch) -> Result<StepMetrics, TrainError> {
        if batch.step != self.version.0 + 1 {
            return Err(TrainError::OutOfOrder {
                batch: batch.step,
                version: self.version,
            });
        }
        if self.config.estimator.needs_critic() && self.critic.is_none() {
            return Err(TrainError::NoCritic);
        }
        let started = Instant::now();
        tch::set_num_threads(self.config.num_threads);
        self.lr = self.config.lr.rate(u64::from(batch.step));

        let mut samples = Samples::prepare(batch, &self.config, self.policy.config.vocab_size)?;
        let mut metrics = MetricsBuilder::new(batch, &samples, &self.config);
        let mut timer = StageTimer::default();
        let actor_learns = self.critic.is_none() || batch.step > self.config.critic.warmup_steps;

        let one_update = self.config.ppo_epochs == 1 && samples.mini_batches().len() <= 1;
        if !(one_update && actor_learns) || self.config.needs_old_logprobs() {
            let begin = Instant::now();
            self.recompute_logprobs(&mut samples)?;
            timer.lap("old_log_prob", begin);
        }
        if let Some(reference) = self.reference.as_ref().filter(|_| self.config.needs_reference()) {
            let begin = Instant::now();
            reference_logprobs(reference, &self.config, &mut samples)?;
            timer.lap("ref", begin);
        }
        if let Some(critic) = &self.critic {
            let begin = Instant::now();
            critic.predict(&self.config, &mut samples)?;
            timer.lap("values", begin);
        }

        let begin = Instant::now();
        self.penalise(&mut samples, &mut metrics);
        samples.assign_advantages(&self.config.estimator);
        metrics.add_advantages(batch, &samples);
        let (importance, rejection) = samples.correct(&self.config);
        timer.lap("adv", begin);

        self.update_critic(batch.step, &samples, &mut metrics, &mut timer)?;
        if actor_learns {
            let begin = Instant::now();
            for _ in 0..self.config.ppo_epochs {
                for mini_batch in samples.mini_batches() {
                    let update = self.update(&mut samples, &mini_batch, &mut timer)?;
                    metrics.add_update(&update.sums, update.grad_norm);
                }
            }
            timer.lap("update_actor", begin);
        }

        self.version = PolicyVersion(batch.step);
        metrics.add_policy_distance(&samples, batch.step - 1);
        metrics.add_correction(importance.as_ref(), &rejection);
        Ok(metrics.finish(self, &samples, &timer, started.elapsed()))
    }

    /// Subtracts the divergence from the reference from the rewards, and sets its factor for the next step.
    fn penalise(&mut self, samples: &mut Samples, metrics: &mut MetricsBuilder) {
        let Some(penalty) = self.config.kl_reward else {
            return;
        };
        let coefficient = self.kl_coefficient;
        if let Some(kl) = samples.penalise(&penalty, coefficient) {
            metrics.add_penalty(kl, coefficient);
            self.kl_coefficient = penalty.next_coefficient(coefficient, kl, samples.trials.len());
        }
    }

    /// Passes over the mini-batches as the policy's, against the returns of the predictions before them.
    fn update_critic(
        &mut self,
        step: u32,
        samples: &Samples,
        metrics: &mut MetricsBuilder,
        timer: &mut StageTimer,
    ) -> Result<(), TrainError> {
        let Some(critic) = &mut self.critic else {
            return Ok(());
        };
        let begin = Instant::now();
        let lr = self.config.critic.lr.rate(u64::from(step));
        for _ in 0..self.config.ppo_epochs {
            for mini_batch in samples.mini_batches() {
                let update = critic.update(&self.config, samples, &mini_batch, lr)?;
                self.critic_skipped_updates += u64::from(update.skipped);
                metrics.add_critic_update(update);
            }
        }
        metrics.finish_critic(lr, self.critic_skipped_updates);
        timer.lap("update_critic", begin);
        Ok(())
    }

    /// Log-probabilities of all sequences under the policy before the first update.
    fn recompute_logprobs(&self, samples: &mut Samples) -> Result<(), TrainError> {
        let network = Network::new(&self.policy, &self.shards, &self.config);
        let mesh = self.mesh.as_deref();
        let values = logprobs(&network, &self.config, mesh, samples, true)?;
        for (sample, values) in samples.sequences.iter_mut().zip(values) {
            sample.training_logprobs = Some(values);
        }
        Ok(())
    }

    /// One optimizer update over the sequences of a mini-batch.
    fn update(
        &mut self,
        samples: &mut Samples,
        mini_batch: &[usize],
        timer: &mut StageTimer,
    ) -> Result<Update, TrainError> {
        let (mut gradients, sums) = self.gradients(samples, mini_batch, timer)?;
        let begin = Instant::now();
        let grad_norm = self.shards.global_norm(&gradients)?;
        if grad_norm.is_finite() {
            gradients.clip(grad_norm, self.config.max_grad_norm);
            self.optimizer.update(&gradients, self.lr);
        } else {
            tracing::warn!(grad_norm, "gradient norm is not finite; this update is skipped");
            self.skipped_updates += 1;
        }
        timer.lap("update_actor/optimizer", begin);
        Ok(Update { sums, grad_norm })
    }

    /// Gradients of the objective of a mini-batch, and its sums.
    fn gradients(
        &self,
        samples: &mut Samples,
        mini_batch: &[usize],
        timer: &mut StageTimer,
    ) -> Result<(Gradients, ObjectiveSums), TrainError> {
        let shapes: Vec<_> = mini_batch
            .iter()
            .map(|&i| samples.sequences[i].kept_shape())
            .collect();
        let scale = ObjectiveScale::new(&self.config.objective, &shapes);
        let mut sums = ObjectiveSums::default();
        let mut gradients = self.shards.zero_gradients();
        let network = Network::new(&self.policy, &self.shards, &self.config);
        let mesh = self.mesh.as_deref();
        let mut values_by_place = vec![TokenValues::default(); mini_batch.len()];

        // Places within the mini-batch, which is what `scale` is indexed by.
        let is_inert = |place: &usize| {
            self.config
                .is_inert(&samples.sequences[mini_batch[*place]].advantages)
        };
        let (inert, live): (Vec<usize>, Vec<usize>) = (0..mini_batch.len()).partition(is_inert);
        for (places, learns) in [(live, true), (inert, false)] {
            let lengths: Vec<_> = places
                .iter()
                .map(|&place| (place, samples.sequences[mini_batch[place]].ids.len()))
                .collect();
            let dealt = deal(&lengths, self.config.max_token_len_per_gpu, mesh);
            for micro_batch in dealt.own() {
                let indices: Vec<usize> = micro_batch.iter().map(|&place| mini_batch[place]).collect();
                let packed = network.pack(samples, &indices).replaying(samples, &indices);

                let begin = Instant::now();
                let mut kept = network.forward(&packed, learns)?;
                timer.lap("update_actor/forward", begin);
                let values = packed.split(std::mem::take(&mut kept.values));
                let mut derivatives: Vec<SequenceDerivatives> = Vec::with_capacity(values.len());
                for (&place, value) in micro_batch.iter().zip(values) {
                    let sample = &mut samples.sequences[mini_batch[place]];
                    derivatives.push(self.config.evaluate(sample, &value, &scale, place, &mut sums));
                    values_by_place[place] = value;
                }
                // Over several ranks another one may have something to learn.
                if learns && (mesh.is_some() || derivatives.iter().any(|d| !d.is_zero())) {
                    let begin = Instant::now();
                    let derivatives = TokenDerivatives::join(&derivatives);
                    network.backward(&packed, kept, &derivatives, &mut gradients)?;
                    timer.lap("update_actor/backward", begin);
                }
            }
            dealt.share("values of an update", mesh, &mut values_by_place, |values| {
                vec![&mut values.logprobs, &mut values.entropies]
            })?;
        }
        self.shards.finish(&mut gradients)?;
        if mesh.is_some() {
            // The sums of all sequences, in one order, so that every rank has the same bits.
            sums = ObjectiveSums::default();
            for (place, value) in values_by_place.iter().enumerate() {
                let sample = &mut samples.sequences[mini_batch[place]];
                self.config.evaluate(sample, value, &scale, place, &mut sums);
            }
        }
        Ok((gradients, sums))
    }
}

/// Log-probabilities under the reference policy.
fn reference_logprobs(
    reference: &Reference,
    config: &TrainerConfig,
    samples: &mut Samples,
) -> Result<(), TrainError> {
    let network = Network::new(&reference.policy, &reference.shards, config);
    let values = logprobs(&network, config, reference.shards.mesh(), samples, false)?;
    for (sample, values) in samples.sequences.iter_mut().zip(values) {
        sample.reference_logprobs = Some(values);
    }
    Ok(())
}

/// Log-probabilities of the sampled tokens of all sequences; the policy's own passes replay recorded experts.
fn logprobs(
    network: &Network<'_>,
    config: &TrainerConfig,
    mesh: Option<&Mesh>,
    samples: &Samples,
    replays: bool,
) -> Result<Vec<Vec<f64>>, TrainError> {
    let all: Vec<usize> = (0..samples.sequences.len()).collect();
    let mut columns = vec![Vec::new(); all.len()];
    let dealt = deal(&samples.lengths(&all), config.max_token_len_per_gpu, mesh);
    for micro_batch in dealt.own() {
        let mut packed = network.pack(samples, micro_batch);
        if replays {
            packed = packed.replaying(samples, micro_batch);
        }
        let values = network.forward(&packed, false)?.values;
        for (&index, value) in micro_batch.iter().zip(packed.split(values)) {
            columns[index] = value.logprobs;
        }
    }
    dealt.share("log-probabilities", mesh, &mut columns, |column| vec![column])?;
    Ok(columns)
}

impl TrainerConfig {
    /// True when a step needs the log-probabilities of the policy before its first loss.
    fn needs_old_logprobs(&self) -> bool {
        self.kl_reward.is_some() || self.importance.is_some() || self.rejection.is_some()
    }

    /// True when a sequence with these advantages has no gradient whatever its log-probabilities are.
    fn is_inert(&self, advantages: &[f64]) -> bool {
        let only_advantages = self.objective.kl.is_none() && self.objective.entropy_coefficient == 0.0;
        only_advantages && advantages.iter().all(|a| *a == 0.0)
    }

    /// Derivatives of the objective for one sequence. Where the old log-probabilities were not computed
    /// beforehand, these are they: no update lies between.
    fn evaluate(
        &self,
        sample: &mut samples::Sample,
        value: &TokenValues,
        scale: &ObjectiveScale,
        place: usize,
        sums: &mut ObjectiveSums,
    ) -> SequenceDerivatives {
        let training = sample
            .training_logprobs
            .get_or_insert_with(|| value.logprobs.clone());
        let old = if self.bypass_old_logprobs {
            &sample.rollout_logprobs
        } else {
            &*training
        };
        let importance = Some(&sample.importance[..]).filter(|weights| !weights.is_empty());
        let importance = importance.map(|weights| kept(weights, &sample.keep));
        let reference = sample
            .reference_logprobs
            .as_deref()
            .map(|r| kept(r, &sample.keep));
        let terms = SequenceTerms {
            logprobs: &kept(&value.logprobs, &sample.keep),
            old_logprobs: &kept(old, &sample.keep),
            reference_logprobs: reference.as_deref(),
            entropies: &kept(&value.entropies, &sample.keep),
            advantages: &kept(&sample.advantages, &sample.keep),
            importance_weights: importance.as_deref(),
        };
        let derivatives = self.objective.evaluate(&terms, scale, place, sums);
        if sample.keep.is_empty() {
            derivatives
        } else {
            derivatives.scattered(&sample.keep)
        }
    }
}

/// The numbers of the tokens that are not rejected; all of them where nothing was.
fn kept<'a>(column: &'a [f64], keep: &[bool]) -> Cow<'a, [f64]> {
    if keep.is_empty() {
        return Cow::Borrowed(column);
    }
    let pairs = column.iter().zip(keep);
    pairs.filter(|(_, keep)| **keep).map(|(x, _)| *x).collect()
}

/// Seconds by stage, summed over micro-batches.
#[derive(Default)]
struct StageTimer(std::collections::BTreeMap<&'static str, f64>);

impl StageTimer {
    fn lap(&mut self, stage: &'static str, since: Instant) {
        *self.0.entry(stage).or_default() += since.elapsed().as_secs_f64();
    }
}

#[cfg(test)]
mod tests;
