//! What a checkpoint holds.

use super::{export::ExportLayout, pieces::TensorPiece, CheckpointError};
use crate::base::PolicyVersion;
use bytes::Bytes;
use serde::{Deserialize, Serialize};
use std::{fs, io, path::Path, sync::Arc};

/// Counters of the trainer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct TrainerProgress {
    /// Optimizer updates made: Adam's t. One step of the run makes several with mini-batches or epochs.
    pub optimizer_updates: u64,
    /// Updates left out because the gradient norm was not finite.
    pub skipped_updates: u64,
    /// Learning rate of the last step.
    pub lr: f64,
    /// Optimizer updates of the critic.
    #[serde(default)]
    pub critic_updates: u64,
    /// Those left out because the gradient norm was not finite.
    #[serde(default)]
    pub critic_skipped_updates: u64,
    /// Factor of the penalty in the reward in the next step; `None` without one.
    #[serde(default)]
    pub kl_coefficient: Option<f64>,
}

/// Everything of a run that is not a tensor (`state.json`). There are no random states: every seed is a
/// function of the run's seed and a trial's key.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RunState {
    /// Steps that the weights have seen.
    pub global_step: u32,
    /// Version of the weights.
    pub weight_version: PolicyVersion,
    /// Trainer counters.
    pub trainer: TrainerProgress,
    /// Manifest of the buffer: what was trained on and what waits.
    pub buffer: serde_json::Value,
    /// Fingerprint of the settings that must not change within an experiment.
    pub config_fingerprint: String,
}

impl RunState {
    /// Refuses a checkpoint of another configuration. `path` is for the message.
    pub fn check_fingerprint(&self, expected: &str, path: &Path) -> Result<(), CheckpointError> {
        if self.config_fingerprint == expected {
            return Ok(());
        }
        let differences = differing(&self.config_fingerprint, expected);
        Err(CheckpointError::OtherConfiguration {
            path: path.to_owned(),
            differences,
        })
    }
}

/// The `KEY=VALUE` lines in which two fingerprints differ: `KEY=THEN, now NOW`.
fn differing(then: &str, now: &str) -> String {
    let words = |text: &str| -> Vec<(String, String)> {
        text.lines()
            .map(|word| word.split_once('=').unwrap_or((word, "")))
            .map(|(key, value)| (key.to_owned(), value.to_owned()))
            .collect()
    };
    let (then, now) = (words(then), words(now));
    let value = |list: &[(String, String)], key: &str| {
        let found = list.iter().find(|(k, _)| k == key);
        found.map_or_else(|| "unset".to_owned(), |(_, v)| v.clone())
    };
    let mut keys: Vec<&str> = then.iter().chain(&now).map(|(key, _)| key.as_str()).collect();
    keys.sort_unstable();
    keys.dedup();
    keys.into_iter()
        .map(|key| (key, value(&then, key), value(&now, key)))
        .filter(|(_, then, now)| then != now)
        .map(|(key, then, now)| format!("{key}={then}, now {now}"))
        .collect::<Vec<_>>()
        .join("; ")
}

/// Files that make weights usable by other programs, copied from the starting policy.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ModelFiles {
    /// `config.json`.
    pub config: Bytes,
    /// Tokenizer, chat template and generation settings: name and content.
    pub others: Vec<(String, Bytes)>,
}

impl ModelFiles {
    const OTHERS: [&'static str; 10] = [
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "added_tokens.json",
        "vocab.json",
        "merges.txt",
        "chat_template.jinja",
        "chat_template.json",
        "preprocessor_config.json",
    ];

    /// Reads them from a Hugging Face folder; `config.json` must be there.
    pub fn read(folder: &Path) -> Result<Self, CheckpointError> {
        let read = |name: &str| {
            let path = folder.join(name);
            match fs::read(&path) {
                Ok(content) => Ok(Some(Bytes::from(content))),
                Err(e) if e.kind() == io::ErrorKind::NotFound && name != "config.json" => Ok(None),
                Err(source) => Err(CheckpointError::Io {
                    action: "read",
                    path,
                    source,
                }),
            }
        };
        let config = read("config.json")?.unwrap_or_default();
        let mut others = Vec::new();
        for name in Self::OTHERS {
            if let Some(content) = read(name)? {
                others.push((name.to_owned(), content));
            }
        }
        Ok(Self { config, others })
    }
}

/// The critic of a run that has one.
#[derive(Clone, Debug)]
pub struct CriticState {
    /// Weights: the trunk under its Hugging Face names, `score.weight`, `score.bias`.
    pub weights: Vec<TensorPiece>,
    /// Optimizer moments.
    pub optimizer: Vec<TensorPiece>,
}

/// The tensors of a checkpoint: of a rank that saves its own pieces, of one that was read those of all ranks.
#[derive(Clone, Debug)]
pub struct SavedTensors {
    /// Master weights under the names of the network.
    pub actor: Vec<TensorPiece>,
    /// Optimizer moments: `exp_avg.<name>`, `exp_avg_sq.<name>`.
    pub optimizer: Vec<TensorPiece>,
    /// The critic, where the run has one.
    pub critic: Option<CriticState>,
}

/// What rank 0 adds to the tensors of all ranks.
#[derive(Clone, Debug)]
pub struct CheckpointHead {
    /// Everything of the run that is not a tensor.
    pub state: RunState,
    /// Configuration and tokenizer files.
    pub model_files: ModelFiles,
    /// What `huggingface/` holds.
    pub export: Arc<ExportLayout>,
}

/// A checkpoint that was read. Tensors are slices of memory maps.
#[derive(Clone, Debug)]
pub struct LoadedCheckpoint {
    /// The pieces of all ranks that wrote it.
    pub tensors: SavedTensors,
    /// The rest of the run.
    pub state: RunState,
}
