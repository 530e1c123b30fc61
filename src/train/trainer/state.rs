//! Saving and restoring the trainer.

use super::{critic::Critic, optimizer::AdamW, TrainError, Trainer};
use crate::{
    base::PolicyVersion,
    train::checkpoint::{CriticState, PieceIndex, TensorPiece, TrainerProgress},
};

/// Copies of everything that the next step depends on, as far as this rank owns it. What all ranks have makes
/// whole tensors.
#[derive(Clone, Debug)]
pub struct TrainerSnapshot {
    /// Master weights in checkpoint order.
    pub actor: Vec<TensorPiece>,
    /// Optimizer moments.
    pub optimizer: Vec<TensorPiece>,
    /// Weights and moments of the critic, where there is one.
    pub critic: Option<CriticState>,
    /// Counters.
    pub progress: TrainerProgress,
    /// Version of the weights.
    pub version: PolicyVersion,
}

impl Trainer {
    /// Copies this rank's part of the state to host memory; nothing is exchanged with other ranks. Takes as long
    /// as copying its shares three times; the caller may then write it at leisure.
    ///
    /// # Errors
    /// Only over several ranks: an exchange failed earlier, and the weights may be of no use.
    pub fn save_state(&self) -> Result<TrainerSnapshot, TrainError> {
        if let Some(mesh) = &self.mesh {
            mesh.check()?;
        }
        Ok(TrainerSnapshot {
            actor: self.shards.snapshot("", &self.shards.shares()),
            optimizer: self.optimizer.snapshot(&self.shards),
            critic: self.critic.as_ref().map(Critic::snapshot),
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

    /// True when the state has a critic.
    pub fn has_critic(&self) -> bool {
        self.critic.is_some()
    }

    /// What the other ranks do while one calls [`Trainer::export_weights`]; they keep nothing.
    pub fn assist_export(&self) -> Result<(), TrainError> {
        self.shards.assist_export(&self.shards.shares())
    }

    /// Continues from a saved state: the pieces of all ranks that saved it, whatever their number. On the same
    /// number the next step gives bit for bit what it would have given then. Nothing changes unless all tensors
    /// fit. The critic of a trainer that has none is passed over.
    pub fn load_state(
        &mut self,
        actor: &[TensorPiece],
        optimizer: &[TensorPiece],
        critic: Option<&CriticState>,
        progress: TrainerProgress,
        version: PolicyVersion,
    ) -> Result<(), TrainError> {
        let saved_critic = match (&self.critic, critic) {
            (Some(ours), Some(saved)) => Some(ours.check(saved)?),
            (Some(_), None) => return Err(TrainError::NoSavedCritic),
            (None, Some(_)) => {
                tracing::warn!(
                    "this checkpoint has a critic and ADV_ESTIMATOR reads none: later checkpoints are without it, and \
                     `gae` can go on from this one alone"
                );
                None
            }
            (None, None) => None,
        };
        let moments = PieceIndex::new(optimizer)?;
        AdamW::check(&self.shards, &moments)?;
        let weights = PieceIndex::new(actor)?;
        self.shards.check("", &weights)?;
        self.shards.set_parameters(&weights);
        if let (Some(ours), Some(saved)) = (&mut self.critic, saved_critic) {
            ours.restore(&saved, progress.critic_updates);
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
        self.optimizer
            .restore(&self.shards, &moments, progress.optimizer_updates);
        self.skipped_updates = progress.skipped_updates;
        self.lr = progress.lr;
        self.version = version;
        Ok(())
    }
}
