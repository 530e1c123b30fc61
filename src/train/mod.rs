//! Training: the buffer of finished trials, algorithms, the trainer, weights and checkpoints.

pub mod algorithm;
pub mod batch;
pub mod buffer;
pub mod checkpoint;
pub mod supervised;
#[cfg(feature = "torch")]
pub mod trainer;
#[cfg(feature = "torch")]
pub mod weights;
