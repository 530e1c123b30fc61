//! What a checkpoint keeps of the buffer.

use super::{schedule::GroupSet, BufferConfig, BufferError};
use serde::{Deserialize, Serialize};
use std::path::Path;

/// The buffer's part of a checkpoint: which groups the saved weights have seen. Everything else is in
/// the buffer's folder. Small whatever the length of the run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BufferManifest {
    /// Format of this struct.
    pub format: u32,
    /// Optimizer steps that the weights have seen.
    pub step: u32,
    /// All groups below this were trained.
    pub trained_below: u64,
    /// Groups beyond it that were trained, ascending.
    pub trained_beyond: Vec<u64>,
    /// Bytes of the delivery log up to and with `step`.
    pub deliveries_bytes: u64,
    /// `N_RESP` of the run.
    pub n_resp: u32,
    /// `TRAIN_BSZ` of the run.
    pub train_bsz: u32,
    /// Rows of the task index.
    pub n_rows: u32,
    /// Seed of the task order.
    pub seed: u64,
}

impl BufferManifest {
    /// Format that this program writes and reads.
    pub const FORMAT: u32 = 1;

    pub(super) fn trained(&self) -> GroupSet {
        GroupSet {
            below: self.trained_below,
            beyond: self.trained_beyond.iter().copied().collect(),
        }
    }

    /// Refuses a manifest of another format or of a run with other settings.
    pub(super) fn check(&self, dir: &Path, config: &BufferConfig) -> Result<(), BufferError> {
        if self.format != Self::FORMAT {
            return Err(BufferError::Format {
                path: dir.to_owned(),
                problem: format!(
                    "the checkpoint's buffer manifest has format {}, and this program reads {}",
                    self.format,
                    Self::FORMAT
                ),
            });
        }
        let stored = [
            u64::from(self.n_resp),
            u64::from(self.train_bsz),
            u64::from(self.n_rows),
            self.seed,
        ];
        for ((name, wanted), stored) in config.identity().into_iter().zip(stored) {
            if stored != wanted {
                return Err(BufferError::Identity {
                    path: dir.to_owned(),
                    name,
                    stored,
                    wanted,
                });
            }
        }
        let trained = self.trained().len();
        let expected = u64::from(self.step) * u64::from(self.train_bsz);
        if trained != expected {
            return Err(BufferError::History {
                path: dir.to_owned(),
                step: self.step,
                problem: format!("the manifest counts {trained} trained groups instead of {expected}"),
            });
        }
        Ok(())
    }
}
