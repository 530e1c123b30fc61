//! The trainer: a batch of trajectories in, one step of the weights out.
//!
//! ```text
//! TrainBatch ─ samples ─► advantages, sampled tokens      (each trial once, dropped ones nowhere)
//!            ─ packing ─► micro-batches of whole sequences within a token budget
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
//! *Sequences that cannot move anything* (advantage exactly 0, no KL term, no entropy bonus) get their
//! forward pass for the metrics and no backward pass; their gradient is zero.
//!
//! Invariant: the result does not depend on how a mini-batch is cut into micro-batches, up to rounding.

mod block_loop;
mod config;
mod error;
mod head;
mod metrics;
mod optimizer;
mod packing;
mod samples;
mod state;

pub use config::{BackwardMode, TrainerConfig};
pub use error::TrainError;
pub use metrics::StepMetrics;
pub use optimizer::AdamWConfig;
pub use state::TrainerSnapshot;

use self::{
    block_loop::{Gradients, Network, PackedBatch, TokenDerivatives},
    metrics::MetricsBuilder,
    optimizer::AdamW,
    packing::pack,
    samples::{Samples, TokenValues},
};
use super::{
    algorithm::{ObjectiveScale, ObjectiveSums, SequenceDerivatives, SequencePair, SequenceTerms},
    batch::TrainBatch,
};
use crate::{base::PolicyVersion, model::net::Policy};
use std::time::Instant;

/// The policy being trained, its optimizer, and the reference policy where the objective has a KL term.
pub struct Trainer {
    config: TrainerConfig,
    policy: Policy,
    reference: Option<Policy>,
    optimizer: AdamW,
    version: PolicyVersion,
    skipped_updates: u64,
    lr: f64,
}

/// What one optimizer update did.
struct Update {
    sums: ObjectiveSums,
    /// Before clipping.
    grad_norm: f64,
}

impl Trainer {
    /// Starts at version 0 with fresh optimizer moments.
    pub fn new(config: TrainerConfig, policy: Policy, reference: Option<Policy>) -> Result<Self, TrainError> {
        config.check()?;
        if config.objective.kl.is_some() && reference.is_none() {
            return Err(TrainError::NoReference);
        }
        let optimizer = AdamW::new(config.optimizer, policy.parameters());
        Ok(Self {
            config,
            policy,
            reference,
            optimizer,
            version: PolicyVersion(0),
            skipped_updates: 0,
            lr: 0.0,
        })
    }

    /// Steps that the weights have seen.
    pub fn version(&self) -> PolicyVersion {
        self.version
    }

    /// The policy as it is now.
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
        let started = Instant::now();
        tch::set_num_threads(self.config.num_threads);
        self.lr = self.config.lr.rate(u64::from(batch.step));

        let mut samples = Samples::prepare(batch, &self.config, self.policy.config.vocab_size)?;
        let mut metrics = MetricsBuilder::new(batch, &samples, &self.config);
        let mut timer = StageTimer::default();
        timer.lap("adv", started);

        let one_update = self.config.ppo_epochs == 1 && samples.mini_batches().len() <= 1;
        if !one_update {
            let begin = Instant::now();
            self.recompute_logprobs(&mut samples);
            timer.lap("old_log_prob", begin);
        }
        if let Some(reference) = self
            .reference
            .as_ref()
            .filter(|_| self.config.objective.kl.is_some())
        {
            let begin = Instant::now();
            reference_logprobs(reference, &self.config, &mut samples);
            timer.lap("ref", begin);
        }

        let begin = Instant::now();
        for _ in 0..self.config.ppo_epochs {
            for mini_batch in samples.mini_batches() {
                let update = self.update(&mut samples, &mini_batch, &mut timer);
                metrics.add_update(&update.sums, update.grad_norm);
            }
        }
        timer.lap("update_actor", begin);

        self.version = PolicyVersion(batch.step);
        metrics.add_policy_distance(&samples, batch.step - 1);
        Ok(metrics.finish(self, &samples, &timer, started.elapsed()))
    }

    /// Log-probabilities of all sequences under the policy before the first update.
    fn recompute_logprobs(&self, samples: &mut Samples) {
        let network = Network::new(&self.policy, &self.config);
        let all: Vec<usize> = (0..samples.sequences.len()).collect();
        for micro_batch in pack(&samples.lengths(&all), self.config.max_token_len_per_gpu) {
            let packed = PackedBatch::new(samples, &micro_batch, self.policy.device());
            let values = network.forward(&packed, false).values;
            for (&index, value) in micro_batch.iter().zip(packed.split(values)) {
                samples.sequences[index].training_logprobs = Some(value.logprobs);
            }
        }
    }

    /// One optimizer update over the sequences of a mini-batch.
    fn update(&mut self, samples: &mut Samples, mini_batch: &[usize], timer: &mut StageTimer) -> Update {
        let (mut gradients, sums) = self.gradients(samples, mini_batch, timer);
        let begin = Instant::now();
        let grad_norm = gradients.global_norm();
        if grad_norm.is_finite() {
            gradients.clip(grad_norm, self.config.max_grad_norm);
            self.optimizer.update(&gradients, self.lr);
        } else {
            tracing::warn!(grad_norm, "gradient norm is not finite; this update is skipped");
            self.skipped_updates += 1;
        }
        timer.lap("update_actor/optimizer", begin);
        Update { sums, grad_norm }
    }

    /// Gradients of the objective of a mini-batch, and its sums.
    fn gradients(
        &self,
        samples: &mut Samples,
        mini_batch: &[usize],
        timer: &mut StageTimer,
    ) -> (Gradients, ObjectiveSums) {
        let shapes: Vec<_> = mini_batch.iter().map(|&i| samples.sequences[i].shape()).collect();
        let scale = ObjectiveScale::new(self.config.objective.aggregation, &shapes);
        let mut sums = ObjectiveSums::default();
        let mut gradients = Gradients::zeros(&self.policy);
        let network = Network::new(&self.policy, &self.config);

        // Places within the mini-batch, which is what `scale` is indexed by.
        let is_inert = |place: &usize| {
            self.config
                .is_inert(samples.sequences[mini_batch[*place]].advantage)
        };
        let (inert, live): (Vec<usize>, Vec<usize>) = (0..mini_batch.len()).partition(is_inert);
        for (places, learns) in [(live, true), (inert, false)] {
            let lengths: Vec<_> = places
                .iter()
                .map(|&place| (place, samples.sequences[mini_batch[place]].ids.len()))
                .collect();
            for micro_batch in pack(&lengths, self.config.max_token_len_per_gpu) {
                let indices: Vec<usize> = micro_batch.iter().map(|&place| mini_batch[place]).collect();
                let packed = PackedBatch::new(samples, &indices, self.policy.device());

                let begin = Instant::now();
                let mut kept = network.forward(&packed, learns);
                timer.lap("update_actor/forward", begin);
                let values = packed.split(std::mem::take(&mut kept.values));
                let derivatives: Vec<SequenceDerivatives> = micro_batch
                    .iter()
                    .zip(&values)
                    .map(|(&place, value)| {
                        let sample = &mut samples.sequences[mini_batch[place]];
                        self.config.evaluate(sample, value, &scale, place, &mut sums)
                    })
                    .collect();
                if learns && derivatives.iter().any(|d| !d.is_zero()) {
                    let begin = Instant::now();
                    let derivatives = TokenDerivatives::join(&derivatives);
                    network.backward(&packed, kept, &derivatives, &mut gradients);
                    timer.lap("update_actor/backward", begin);
                }
            }
        }
        (gradients, sums)
    }
}

/// Log-probabilities under the reference policy.
fn reference_logprobs(reference: &Policy, config: &TrainerConfig, samples: &mut Samples) {
    let network = Network::new(reference, config);
    let all: Vec<usize> = (0..samples.sequences.len()).collect();
    for micro_batch in pack(&samples.lengths(&all), config.max_token_len_per_gpu) {
        let packed = PackedBatch::new(samples, &micro_batch, reference.device());
        let values = network.forward(&packed, false).values;
        for (&index, value) in micro_batch.iter().zip(packed.split(values)) {
            samples.sequences[index].reference_logprobs = Some(value.logprobs);
        }
    }
}

impl TrainerConfig {
    /// True when a sequence with this advantage has no gradient whatever its log-probabilities are.
    fn is_inert(&self, advantage: f64) -> bool {
        advantage == 0.0 && self.objective.kl.is_none() && self.objective.entropy_coefficient == 0.0
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
        let weights = self.importance.map(|importance| {
            importance.weights(SequencePair {
                rollout: &sample.rollout_logprobs,
                training,
            })
        });
        let terms = SequenceTerms {
            logprobs: &value.logprobs,
            old_logprobs: old,
            reference_logprobs: sample.reference_logprobs.as_deref(),
            entropies: &value.entropies,
            advantages: &vec![sample.advantage; value.logprobs.len()],
            importance_weights: weights.as_deref(),
        };
        self.objective.evaluate(&terms, scale, place, sums)
    }
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
