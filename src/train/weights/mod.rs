//! New weights to all engines.
//!
//! A version is handed to every replica at the same time; each swaps it in between two tokens and answers
//! with the version it now serves and a checksum of what it received.
//!
//! Invariant: [`push`] succeeds only if every replica serves exactly the tensors that were sent. An engine
//! that answers with something else is named, and so is one that does not answer in time.

use crate::base::{PolicyVersion, ReplicaId, WeightAck, WeightError, WeightTarget, WeightUpdate};
use crate::train::trainer::{TrainError, Trainer};
use futures::future::join_all;
use std::{
    sync::Arc,
    time::{Duration, Instant},
};

impl Trainer {
    /// The trainer's weights as an update for the engines, f32, gathered tensor by tensor. `version` is
    /// normally [`Trainer::version`].
    ///
    /// # Errors
    /// Only over several ranks, which all call it: one did not come.
    pub fn weight_update(&self, version: PolicyVersion) -> Result<WeightUpdate, TrainError> {
        Ok(WeightUpdate::new(version, self.export_weights()?))
    }
}

/// What a push took.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PushReport {
    /// Version in use everywhere.
    pub version: PolicyVersion,
    /// Replicas.
    pub replicas: usize,
    /// Bytes sent to each.
    pub size_bytes: usize,
    /// Until the last replica answered.
    pub elapsed: Duration,
}

/// Why a replica does not serve the new weights.
#[derive(Clone, Debug, thiserror::Error)]
pub enum PushProblem {
    /// It refused; it goes on with the weights it had.
    #[error(transparent)]
    Refused(#[from] WeightError),
    /// It says that it serves another version.
    #[error("it answered that it serves version {0}")]
    Version(PolicyVersion),
    /// It received other bytes.
    #[error("it received tensors with checksum {got:08x} instead of {want:08x}")]
    Checksum {
        /// Of what was sent.
        want: u32,
        /// Of what arrived.
        got: u32,
    },
    /// No answer in time.
    #[error("no answer within {:.1} s", .0.as_secs_f64())]
    Deadline(Duration),
}

/// Replicas that do not serve the version.
#[derive(Clone, Debug, thiserror::Error)]
#[error("version {version} did not reach {} of {replicas} engine replicas: {}", failed.len(), list(failed))]
pub struct PushError {
    /// Version that was sent.
    pub version: PolicyVersion,
    /// How many replicas there are.
    pub replicas: usize,
    /// Those that failed, and why.
    pub failed: Vec<(ReplicaId, PushProblem)>,
}

fn list(failed: &[(ReplicaId, PushProblem)]) -> String {
    let one = |(replica, problem): &(ReplicaId, PushProblem)| format!("replica {replica}: {problem}");
    failed.iter().map(one).collect::<Vec<_>>().join("; ")
}

/// Sends an update to all replicas (numbered by their place in `targets`) and waits for all answers. A
/// failing replica does not keep the others from swapping.
pub async fn push(
    update: Arc<WeightUpdate>,
    targets: &[Arc<dyn WeightTarget>],
    deadline: Duration,
) -> Result<PushReport, PushError> {
    let started = Instant::now();
    let answers = join_all(targets.iter().map(|target| {
        let update = update.clone();
        async move {
            match tokio::time::timeout(deadline, target.update_weights(update.clone())).await {
                Ok(Ok(ack)) => check(&update, ack),
                Ok(Err(refused)) => Err(refused.into()),
                Err(_) => Err(PushProblem::Deadline(deadline)),
            }
        }
    }))
    .await;
    let failed: Vec<_> = answers
        .into_iter()
        .enumerate()
        .filter_map(|(place, answer)| Some((ReplicaId(place as u32), answer.err()?)))
        .collect();
    if !failed.is_empty() {
        return Err(PushError {
            version: update.version,
            replicas: targets.len(),
            failed,
        });
    }
    Ok(PushReport {
        version: update.version,
        replicas: targets.len(),
        size_bytes: update.size_bytes(),
        elapsed: started.elapsed(),
    })
}

fn check(update: &WeightUpdate, ack: WeightAck) -> Result<(), PushProblem> {
    if ack.version != update.version {
        return Err(PushProblem::Version(ack.version));
    }
    if ack.checksum != update.checksum {
        return Err(PushProblem::Checksum {
            want: update.checksum,
            got: ack.checksum,
        });
    }
    Ok(())
}

#[cfg(test)]
mod tests;
