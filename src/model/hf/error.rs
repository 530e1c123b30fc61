//! Why a model folder cannot be used.

use std::path::{Path, PathBuf};

/// A model folder that cannot be read, written or understood.
#[derive(Debug, thiserror::Error)]
pub enum ModelError {
    /// The operating system refused.
    #[error("`{}`: {source}", path.display())]
    Io {
        /// File or folder.
        path: PathBuf,
        /// The system's error.
        #[source]
        source: std::io::Error,
    },
    /// The file is not the JSON that is expected there.
    #[error("`{}` is not valid: {source}", path.display())]
    Json {
        /// File.
        path: PathBuf,
        /// Line and column.
        #[source]
        source: serde_json::Error,
    },
    /// An architecture that is not implemented.
    #[error("`{}`: model_type `{model_type}` is not supported (supported: {})", path.display(), super::ModelType::supported())]
    UnsupportedModelType {
        /// The `config.json`.
        path: PathBuf,
        /// Its `model_type`.
        model_type: String,
    },
    /// A key of `config.json` is missing or has a value that is not supported.
    #[error("`{}`: key `{key}`: {problem}", path.display())]
    Config {
        /// The `config.json`.
        path: PathBuf,
        /// Key.
        key: String,
        /// What is wrong with it.
        problem: String,
    },
    /// A safetensors file whose frame is broken (header, length).
    #[error("`{}` is not a usable safetensors file: {problem}", path.display())]
    Safetensors {
        /// File.
        path: PathBuf,
        /// What is wrong with it.
        problem: String,
    },
    /// A tensor is missing, misshapen, cut off, or of an unsupported element type.
    #[error("tensor `{name}` in `{}`: {problem}", path.display())]
    Tensor {
        /// Checkpoint name.
        name: String,
        /// The file, or the folder when no file holds it.
        path: PathBuf,
        /// What is wrong with it.
        problem: String,
    },
}

impl ModelError {
    /// An [`ModelError::Io`] for `path`, for use with `map_err`.
    pub(crate) fn io(path: &Path) -> impl FnOnce(std::io::Error) -> Self + '_ {
        move |source| ModelError::Io {
            path: path.to_path_buf(),
            source,
        }
    }
}
