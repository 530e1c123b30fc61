//! Checkpoints: published whole or not at all, written by all trainer ranks, read by any number of them.
//!
//! ```text
//! CKPTS_DIR/<project>/<experiment>/
//!   latest_checkpointed_iteration.txt         number of the newest published step, as verl writes it
//!   global_step_12/
//!     actor/config.json
//!     actor/model<RANK>.safetensors           f32 master weights under the names of the network
//!     optimizer<RANK>.safetensors             Adam moments: `exp_avg.<name>`, `exp_avg_sq.<name>`
//!     critic/{model,optimizer}<RANK>.safetensors    the same of the critic, where the run has one
//!     state.json                              RunState
//!     huggingface/…                           weights, config and tokenizer, as other programs load them
//!     COMMITTED                               size and CRC-32 of every file above
//! ```
//!
//! *Names.* `<RANK>` is `-rank-00001-of-00004` for the first of four trainer ranks, and nothing for a rank that
//! trains alone. Each rank writes the numbers that it owns, its *pieces*, and nobody else's. A file of pieces says
//! of each which tensor it is part of, that tensor's shape, and where the piece begins (`tensor_file`); a
//! tensor that is not cut is stored as it is, so a checkpoint of one rank is plain safetensors files.
//!
//! *Formats.* `COMMITTED` has `format` 1 where all tensors are whole and the export is one file, which is what
//! earlier versions wrote and what one rank still writes for a model below 5 GB; 2 otherwise. Both are read alike.
//!
//! *Writing* (`parts`, `writer`, `store`). Rank 0 makes `global_step_N.tmp/` and gives the order. Every rank
//! copies its pieces to host memory (`Trainer::save_state`: nothing is exchanged, and this is all that training
//! waits for) and a thread of its own writes and fsyncs its files and reports sizes and checksums to rank 0. When
//! all have reported, rank 0 maps the files, writes the export out of them run by run (`export`), then
//! `state.json`, fsyncs every file and folder, renames the folder to `global_step_N/`, and only then `COMMITTED`
//! appears (itself written aside and renamed). CKPTS_DIR is a file system that all nodes share.
//!
//! *Reading.* A folder without an intact `COMMITTED` does not exist for a reader:
//! [`CheckpointStore::latest_committed`] checks every size and checksum, warns about each folder that it passes
//! over, and takes the next older one. A rank maps the files of all ranks and copies what it owns
//! ([`PieceIndex`]), tensor by tensor, whatever number of ranks wrote them.
//!
//! *Memory.* Between snapshot and end of its write a rank holds a copy of its pieces, and never two: a save waits
//! for the one before it. Neither writing, exporting nor loading puts a whole tensor together; a rank on a GPU
//! has one piece twice while it travels.
//!
//! Invariant: nothing is deleted before a newer checkpoint is published. A failed write (full disk, on
//! whichever rank; a rank that does not report in time) removes only its own temporary folder, names the rank,
//! and leaves the older checkpoints the latest; training goes on.

mod background;
mod content;
mod error;
mod export;
mod marker;
mod parts;
mod pieces;
mod storage;
mod store;
mod tensor_file;
mod writer;

pub use content::{
    CheckpointHead, CriticState, LoadedCheckpoint, ModelFiles, RunState, SavedTensors, TrainerProgress,
};
pub use error::CheckpointError;
pub use export::ExportLayout;
pub use marker::FileRecord;
pub use parts::{PartInboxes, PartWriter};
pub use pieces::{PieceIndex, TensorPiece};
pub use storage::{DiskStorage, Storage, StoredFile};
pub use store::{CheckpointStore, CommittedCheckpoint, LatestCheckpoint, Place, SkippedCheckpoint};
pub use writer::{CheckpointWriter, Save, WriteReport};

#[cfg(test)]
mod tests;
