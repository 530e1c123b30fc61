//! The seam between the trainer and the engines: a new version of the weights.

use super::PolicyVersion;
use async_trait::async_trait;
use bytes::Bytes;
use serde::{Deserialize, Serialize};
use std::sync::Arc;

/// Element type of a tensor on the wire and on disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DType {
    /// 32-bit float.
    F32,
    /// bfloat16.
    Bf16,
}

impl DType {
    /// Bytes of one element.
    pub fn size_bytes(self) -> usize {
        match self {
            DType::F32 => 4,
            DType::Bf16 => 2,
        }
    }
}

/// One tensor under its Hugging Face checkpoint name, little-endian, row-major.
#[derive(Clone, Debug)]
pub struct WeightTensor {
    /// Checkpoint name, for example `model.layers.0.self_attn.q_proj.weight`.
    pub name: String,
    /// Element type.
    pub dtype: DType,
    /// Shape.
    pub shape: Vec<usize>,
    /// `product(shape) * dtype.size_bytes()` bytes.
    pub data: Bytes,
}

/// All trainable tensors of one version.
#[derive(Clone, Debug)]
pub struct WeightUpdate {
    /// Version after the optimizer step.
    pub version: PolicyVersion,
    /// Every tensor of the policy, in checkpoint order.
    pub tensors: Vec<WeightTensor>,
    /// [`WeightUpdate::checksum_of`] the tensors; the engine answers with its own.
    pub checksum: u32,
}

impl WeightUpdate {
    /// Builds an update and its checksum.
    pub fn new(version: PolicyVersion, tensors: Vec<WeightTensor>) -> Self {
        let checksum = Self::checksum_of(&tensors);
        Self {
            version,
            tensors,
            checksum,
        }
    }

    /// CRC-32 over names and bytes in order.
    pub fn checksum_of(tensors: &[WeightTensor]) -> u32 {
        let mut hasher = crc32fast::Hasher::new();
        for tensor in tensors {
            hasher.update(tensor.name.as_bytes());
            hasher.update(&tensor.data);
        }
        hasher.finalize()
    }

    /// Bytes of all tensors.
    pub fn size_bytes(&self) -> usize {
        self.tensors.iter().map(|t| t.data.len()).sum()
    }
}

/// An engine's answer: what it now serves.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WeightAck {
    /// Version in use for every token sampled from now on.
    pub version: PolicyVersion,
    /// Checksum of the tensors as received.
    pub checksum: u32,
}

/// Why an update was refused. The old weights stay in use.
#[derive(Clone, Debug, thiserror::Error, Serialize, Deserialize)]
pub enum WeightError {
    /// The bytes are not those that were sent.
    #[error("weights of version {version} arrived with checksum {got:08x} instead of {want:08x}")]
    Checksum {
        /// Version that was sent.
        version: PolicyVersion,
        /// Checksum that was announced.
        want: u32,
        /// Checksum of what arrived.
        got: u32,
    },
    /// A tensor is missing, unknown or of another shape.
    #[error("tensor `{name}`: {problem}")]
    Tensor {
        /// Checkpoint name.
        name: String,
        /// What is wrong with it.
        problem: String,
    },
    /// The replica does not answer.
    #[error("the engine replica is lost: {0}")]
    ReplicaLost(String),
}

/// Whoever takes new weights.
#[async_trait]
pub trait WeightTarget: Send + Sync {
    /// Swaps the weights. Running generations are interrupted between two tokens and go on under the
    /// new version with the tokens they have. Returns when the new version is in use.
    async fn update_weights(&self, update: Arc<WeightUpdate>) -> Result<WeightAck, WeightError>;
}
