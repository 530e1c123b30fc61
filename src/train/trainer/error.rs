//! Why a step cannot be made.

use crate::{
    base::{PolicyVersion, TrialKey, WeightError},
    comm::CommError,
};

/// A batch or a state that cannot be trained on. The weights are unchanged.
#[derive(Debug, thiserror::Error)]
pub enum TrainError {
    /// A setting is out of range.
    #[error("{variable}={value}: {problem}")]
    Config {
        /// Configuration variable.
        variable: &'static str,
        /// Its value.
        value: String,
        /// What is wrong with it.
        problem: &'static str,
    },
    /// The objective or the reward needs a reference policy.
    #[error("USE_KL_LOSS or USE_KL_IN_REWARD is on and no reference policy was loaded from MODEL_PATH")]
    NoReference,
    /// The estimator needs a critic.
    #[error("ADV_ESTIMATOR=gae reads a critic and none was loaded from MODEL_PATH")]
    NoCritic,
    /// A checkpoint of a run without a critic cannot continue one with a critic.
    #[error(
        "the checkpoint holds no critic and ADV_ESTIMATOR=gae continues one; go on with the estimator of the step \
         that wrote it, or move it and those after the last one with a folder `critic` away, or start anew with another \
         EXP_NAME"
    )]
    NoSavedCritic,
    /// Batches are consumed once each and in order.
    #[error("the batch of step {batch} was given to weights of version {version}; it must be the next step")]
    OutOfOrder {
        /// Step of the batch.
        batch: u32,
        /// Version of the weights.
        version: PolicyVersion,
    },
    /// A trajectory breaks its own rules.
    #[error("trial {trial}, sequence {sequence}: {problem}")]
    Sequence {
        /// Which trial.
        trial: TrialKey,
        /// Which of its sequences, from 0.
        sequence: usize,
        /// What is wrong.
        problem: String,
    },
    /// The other ranks of the trainer did not come, or are elsewhere. This trainer is of no use any more.
    #[error("between the trainer ranks: {0}")]
    Ranks(#[from] CommError),
    /// What another trainer rank computed does not belong to the sequences that it was dealt.
    #[error("phase `{phase}`: trainer rank {rank} sent {problem}; all ranks must run the same program and settings")]
    Shared {
        /// Phase.
        phase: String,
        /// Rank among those that share the batch.
        rank: usize,
        /// What is wrong.
        problem: String,
    },
    /// A saved state does not fit the policy.
    #[error("saved trainer state: {0}")]
    State(#[from] WeightError),
}
