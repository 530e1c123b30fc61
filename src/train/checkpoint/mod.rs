//! Checkpoints: published whole or not at all.
//!
//! ```text
//! CKPTS_DIR/<project>/<experiment>/
//!   latest_checkpointed_iteration.txt      number of the newest published step, as verl writes it
//!   global_step_12/
//!     actor/{config.json,model.safetensors}   f32 master weights, Hugging Face names
//!     optimizer.safetensors                   Adam moments: `exp_avg.<name>`, `exp_avg_sq.<name>`
//!     critic/{model,optimizer}.safetensors    the same of the critic, where the run has one
//!     state.json                              RunState
//!     huggingface/…                           weights, config and tokenizer, as other programs load them
//!     COMMITTED                               size and CRC-32 of every file above
//! ```
//!
//! Writing (`store`): everything goes into `global_step_N.tmp/`, every file and folder is fsynced, the
//! folder is renamed to `global_step_N/`, and only then `COMMITTED` appears (itself written aside and
//! renamed). A folder without an intact `COMMITTED` does not exist for a reader: [`CheckpointStore::latest_committed`]
//! checks every size and checksum, warns about each folder that it passes over, and takes the next
//! older one.
//!
//! Invariant: nothing is deleted before a newer checkpoint is published. A failed write (full disk)
//! removes only its own temporary folder.
//!
//! Writing happens on a thread of its own (`writer`), from a snapshot; the trainer goes on meanwhile.

mod content;
mod error;
mod storage;
mod store;
mod tensor_file;
mod writer;

pub use content::{CheckpointContent, CriticState, ModelFiles, RunState, TrainerProgress};
pub use error::CheckpointError;
pub use storage::{DiskStorage, Storage, StoredFile};
pub use store::{CheckpointStore, CommittedCheckpoint, LatestCheckpoint, SkippedCheckpoint};
pub use writer::{CheckpointWriter, WriteReport};

#[cfg(test)]
mod tests;
