//! Rollouts: from a task folder to a trial's end.

pub mod lease;
pub mod sandbox;
pub mod scaffold;
pub mod task;
pub mod trial;
pub mod verifier;
pub mod workers;
