//! Hugging Face model folders: `config.json`, safetensors files, the files beside them.
//!
//! | File | Read by | Written by |
//! |---|---|---|
//! | `config.json`, `generation_config.json` | [`ModelConfig::from_dir`] | [`save_folder`] |
//! | `model.safetensors`, or `model.safetensors.index.json` and its shards | [`Checkpoint`] | [`save_folder`] |
//! | any of them, with a vision tower and draft layers | – | [`export_folder`] |
//! | tokenizer, chat template, … ([`AUXILIARY_FILES`]) | `model::tokenizer`, `model::chat_template` | copied by [`save_folder`] |
//!
//! Which tensors a model has, with names, shapes and order, is the [`ModelConfig::tensor_table`]; that
//! order is the checkpoint order everywhere (weight updates, optimizer state, exports).
//!
//! Invariant: nothing here needs libtorch, and no tensor is copied on reading: [`Checkpoint`] hands
//! out slices of the memory map.

mod config;
#[cfg(test)]
mod damage_tests;
mod error;
mod experts;
mod export;
#[cfg(test)]
mod family_tests;
mod folder;
mod header;
mod keys;
mod layers;
mod refuse;
mod rope;
#[cfg(test)]
mod rope_tests;
mod save;
mod table;
#[cfg(test)]
mod tests;

pub use config::{
    ExpertsConfig, LayerKind, LinearAttentionConfig, MixerKind, MlpKind, ModelConfig, ModelType,
};
pub use error::ModelError;
pub use experts::released_layout;
pub use export::{export_folder, stored_layout, ExportReport, LayoutSource, LayoutTensor};
pub use folder::{Checkpoint, StoredDType, StoredTensor};
pub use rope::{Llama3Scaling, Rope, RopeScaling, YarnScaling};
pub use save::{save_folder, save_folder_sharded, AUXILIARY_FILES, MAX_SHARD_BYTES};
pub use table::TensorSpec;
