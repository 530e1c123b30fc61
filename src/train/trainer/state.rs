//! Saving and restoring the trainer.

use super::{critic::Critic, optimizer::AdamW, TrainError, Trainer};
use crate::{
    base::{PolicyVersion, WeightTensor},
    train::checkpoint::{CriticState, TrainerProgress},
};

/// Copies of everything that the next step depends on.
#[derive(Clone, Debug)]
pub struct TrainerSnapshot {
    /// f32 master weights in checkpoint order.
    pub actor: Vec<WeightTensor>,
    /// Optimizer moments.
    pub optimizer: Vec<WeightTensor>,
    /// Weights and moments of the critic, where there is one.
    pub critic: Option<CriticState>,
    /// Counters.
    pub progress: TrainerProgress,
    /// Version of the weights.
    pub version: PolicyVersion,
}

impl Trainer {
    /// Copies the state, whole: over several ranks each gathers it, so that it can be read by any number of
    /// ranks. Takes as long as copying the weights three times; the caller may then write it at leisure.
    ///
    /// # Errors
    /// Only over several ranks: one did not come.
    pub fn save_state(&self) -> Result<TrainerSnapshot, TrainError> {
        Ok(TrainerSnapshot {
            actor: self.shards.export_parameters()?,
            optimizer: self.optimizer.export(&self.shards)?,
            critic: self.critic.as_ref().map(Critic::export).transpose()?,
            progress: TrainerProgress {
                optimizer_updates: self.optimizer.updates(),
                skipped_updates: self.skipped_updates,
                lr: self.lr,
                critic_updates: self.critic.as_ref().map_or(0, |critic| critic.updates()),
                critic_skipped_updates: self.critic_skipped_updates,
                kl_coefficient: self.config.kl_reward.map(|_| self.kl_coefficient),
            },
            version: self.version,
        })
    }

    /// What the other ranks do while one calls [`Trainer::export_weights`]; they keep nothing.
    pub fn assist_export(&self) -> Result<(), TrainError> {
        self.shards.assist_export(&self.shards.shares())
    }

    /// What the other ranks do while one calls [`Trainer::save_state`]; they keep nothing.
    pub fn assist_save(&self) -> Result<(), TrainError> {
        self.assist_export()?;
        self.optimizer.assist_export(&self.shards)?;
        self.critic.as_ref().map_or(Ok(()), Critic::assist_export)
    }

    /// Continues from a saved state, whatever number of ranks made it: on the same number the next step gives bit for bit what it would have given then.
    /// Nothing changes unless all tensors fit. The critic of a trainer that has none is passed over.
    pub fn load_state(
        &mut self,
        actor: &[WeightTensor],
        optimizer: &[WeightTensor],
        critic: Option<&CriticState>,
        progress: TrainerProgress,
        version: PolicyVersion,
    ) -> Result<(), TrainError> {
        let saved_critic = match (&self.critic, critic) {
            (Some(ours), Some(saved)) => Some(ours.read(saved)?),
            (Some(_), None) => return Err(TrainError::NoSavedCritic),
            (None, _) => None,
        };
        let moments = AdamW::read(&self.shards, optimizer)?;
        let weights = self.shards.read("", actor)?;
        self.shards.set_parameters(&weights);
        if let (Some(ours), Some(saved)) = (&mut self.critic, saved_critic) {
            ours.restore(saved, progress.critic_updates);
        }
        self.critic_skipped_updates = progress.critic_skipped_updates;
        // A fixed factor is the setting's, also when it was changed between attempts.
        let adapts = self
            .config
            .kl_reward
            .is_some_and(|penalty| penalty.adaptive.is_some());
        if let Some(coefficient) = progress.kl_coefficient.filter(|_| adapts) {
            self.kl_coefficient = coefficient;
        }
        self.optimizer.restore(moments, progress.optimizer_updates);
        self.skipped_updates = progress.skipped_updates;
        self.lr = progress.lr;
        self.version = version;
        Ok(())
    }
}
