//! Saving and restoring the trainer.

use super::{TrainError, Trainer};
use crate::{
    base::{PolicyVersion, WeightTensor},
    train::checkpoint::TrainerProgress,
};

/// Copies of everything that the next step depends on.
#[derive(Clone, Debug)]
pub struct TrainerSnapshot {
    /// f32 master weights in checkpoint order.
    pub actor: Vec<WeightTensor>,
    /// Optimizer moments.
    pub optimizer: Vec<WeightTensor>,
    /// Counters.
    pub progress: TrainerProgress,
    /// Version of the weights.
    pub version: PolicyVersion,
}

impl Trainer {
    /// Copies the state. Takes as long as copying the weights three times; the caller may then write it
    /// at leisure.
    pub fn save_state(&self) -> TrainerSnapshot {
        TrainerSnapshot {
            actor: self.policy.export(),
            optimizer: self.optimizer.export(),
            progress: TrainerProgress {
                optimizer_updates: self.optimizer.updates(),
                skipped_updates: self.skipped_updates,
                lr: self.lr,
            },
            version: self.version,
        }
    }

    /// Continues from a saved state: the next step gives bit for bit what it would have given then.
    /// Nothing changes unless all tensors fit.
    pub fn load_state(
        &mut self,
        actor: &[WeightTensor],
        optimizer: &[WeightTensor],
        progress: TrainerProgress,
        version: PolicyVersion,
    ) -> Result<(), TrainError> {
        let moments = self.optimizer.read(optimizer)?;
        self.policy.copy_from(actor)?;
        self.optimizer.restore(moments, progress.optimizer_updates);
        self.skipped_updates = progress.skipped_updates;
        self.lr = progress.lr;
        self.version = version;
        Ok(())
    }
}
