//! The supervised start of the demo policy: a model folder from nothing but a seed.
//!
//! ```text
//! families ──> task_folder     the demo's tasks, written below jobs/demo/tasks
//!     │
//!     └──> transcripts ──> conversation ──> fit ──> model folder
//!            habits          token streams     (Muon and Adam)
//!               unseen: refuses what repeats a task of the demo
//! ```
//!
//! The policy learns from transcripts of agents that are right about one time in three ([`Habits`]):
//! it can do every task, and often does not. That is what reinforcement learning starts from. The
//! transcripts are drawn from the same families and the same words as the demo's tasks, and none of
//! them repeats a task.
//!
//! [`init_policy`] writes `config.json`, `generation_config.json`, `model.safetensors`,
//! `tokenizer.json`, `tokenizer_config.json` and `chat_template.jinja`: a folder that transformers and
//! vLLM load. Same options, same folder.

pub mod conversation;
pub mod families;
#[cfg(feature = "torch")]
mod fit;
#[cfg(feature = "torch")]
mod measure;
pub mod model_folder;
#[cfg(feature = "torch")]
mod muon;
#[cfg(feature = "torch")]
mod start;
pub mod task_folder;
#[cfg(all(test, feature = "torch"))]
mod tests;
pub mod transcripts;
pub mod unseen;
pub mod words;

#[cfg(feature = "torch")]
pub use start::{init_policy, InitPolicyOptions, InitReport};
pub use transcripts::Habits;

use crate::model::{bpe::BpeError, chat_template::TemplateError, hf::ModelError, tokenizer::TokenizerError};
use std::path::{Path, PathBuf};

/// One step of the training loop.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct InitProgress {
    /// Steps done.
    pub step: u32,
    /// Steps in all.
    pub steps: u32,
    /// Cross-entropy of the step's assistant tokens, in nats.
    pub loss: f64,
    /// Tokens so far, prompts included.
    pub tokens: u64,
}

/// A start that failed.
#[derive(Debug, thiserror::Error)]
pub enum InitError {
    /// Nothing is overwritten.
    #[error("`{}` exists already; remove it or choose another --output", path.display())]
    Exists {
        /// The output folder.
        path: PathBuf,
    },
    /// A file cannot be read or written.
    #[error("`{}`: {source}", path.display())]
    Io {
        /// File or folder.
        path: PathBuf,
        /// Cause.
        #[source]
        source: std::io::Error,
    },
    /// A transcript would show the policy a task of the demo.
    #[error("a transcript repeats a task: `{instruction}` with `{commands}`")]
    Repeats {
        /// Its instruction.
        instruction: String,
        /// Its commands.
        commands: String,
    },
    /// The loss is not a number.
    #[error("the loss of step {step} is not finite; use another seed")]
    Diverged {
        /// Step from 1.
        step: u32,
    },
    /// The agent's tools cannot be read.
    #[error("agent/prompt/tools.json: {0}")]
    Tools(#[source] serde_json::Error),
    /// The tokenizer cannot be trained.
    #[error(transparent)]
    Bpe(#[from] BpeError),
    /// The tokenizer cannot be used.
    #[error(transparent)]
    Tokenizer(#[from] TokenizerError),
    /// The chat template fails.
    #[error(transparent)]
    Template(#[from] TemplateError),
    /// The model folder cannot be written.
    #[error(transparent)]
    Model(#[from] ModelError),
}

impl InitError {
    fn io(path: &Path) -> impl FnOnce(std::io::Error) -> InitError + '_ {
        move |source| InitError::Io {
            path: path.to_path_buf(),
            source,
        }
    }
}
