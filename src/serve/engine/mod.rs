//! Engine replicas behind [`crate::base::Engine`].

#[cfg(feature = "torch")]
pub mod native;
pub mod remote;
pub mod scripted;
pub mod vllm;
