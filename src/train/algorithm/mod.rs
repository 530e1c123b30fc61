//! The arithmetic of reinforcement learning, without tensors.
//!
//! Everything here is a pure function of numbers per sampled token, so each formula can be read beside
//! its source and checked by hand. The trainer computes log-probabilities and entropies on tensors,
//! asks this module for the objective and for its derivatives with respect to them, and pushes those
//! derivatives back through the network.
//!
//! | File | Formula |
//! |---|---|
//! | [`trajectory_filter`] | which trials with a verdict are trained on |
//! | [`kl_reward`] | penalty in the reward for leaving the reference policy |
//! | [`advantage`] | GRPO, RLOO, REINFORCE++, generalised advantage estimation |
//! | [`ppo_clip`] | token-level clipped surrogate, asymmetric and dual clip |
//! | [`gspo`] | sequence-level ratio |
//! | [`aggregation`] | how token losses become one number |
//! | [`kl`] | estimators of the KL divergence to a reference policy |
//! | [`entropy`] | entropy of the next-token distribution and its bonus |
//! | [`objective`] | the sum of the above for one sequence, with derivatives |
//! | [`correction`] | how far the sampling policy is from the training policy; weights and rejection |
//! | [`value_loss`] | loss of the critic |
//! | [`lr_schedule`] | learning rate by step |
//!
//! Invariant: a sequence here holds its *sampled* tokens only. Prompt and environment tokens never
//! enter a loss, a mean or a count, so there is no mask to forget.

pub mod advantage;
pub mod aggregation;
pub mod correction;
pub mod entropy;
pub mod gspo;
pub mod kl;
pub mod kl_reward;
pub mod lr_schedule;
pub mod objective;
pub mod ppo_clip;
pub mod trajectory_filter;
pub mod value_loss;

pub use advantage::AdvantageEstimator;
pub use aggregation::{Aggregation, SequenceShape};
pub use correction::{CorrectionMetrics, ImportanceWeights, Rejection, SequencePair};
pub use kl::KlEstimator;
pub use kl_reward::{AdaptiveKl, KlReward};
pub use lr_schedule::{LrKind, LrSchedule};
pub use objective::{
    KlLoss, Objective, ObjectiveScale, ObjectiveSums, PolicyLoss, SequenceDerivatives, SequenceTerms,
};
pub use trajectory_filter::TrajectoryFilter;
pub use value_loss::{ValueClip, ValueSums};

/// A setting that names no known algorithm.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("{variable}=`{value}` is not known; use one of {known}")]
pub struct UnknownAlgorithm {
    /// Configuration variable.
    pub variable: &'static str,
    /// What it holds.
    pub value: String,
    /// What it may hold.
    pub known: &'static str,
}
