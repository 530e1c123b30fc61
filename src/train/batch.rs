//! What the buffer hands to the trainer.

use crate::base::{DropReason, GroupId, PolicyVersion, Trajectory, TrialKey};

/// One prompt with all of its ended samples.
#[derive(Clone, Debug)]
pub struct TrainGroup {
    /// Group number in cursor order.
    pub id: GroupId,
    /// Weight version when its first trial was admitted; no token of the group is older.
    pub start_version: PolicyVersion,
    /// Samples with a verdict, ordered by sample number.
    pub trajectories: Vec<Trajectory>,
    /// Samples without one. They leave the group statistics and the loss.
    pub dropped: Vec<(TrialKey, DropReason)>,
}

/// The data of one optimizer step.
#[derive(Clone, Debug)]
pub struct TrainBatch {
    /// Global step that this batch makes, from 1. The weights before it have version `step - 1`.
    pub step: u32,
    /// Complete groups in a fixed order.
    pub groups: Vec<TrainGroup>,
}
