//! The two seams to the runners of trials: which trial next ([`TrialPlan`]), and its end ([`TrialSink`]).

use super::{record, schedule::Admission, shard::WriteError, Buffer};
use crate::base::{
    DropReason, Purpose, SinkError, Submitted, TrialAssignment, TrialEnd, TrialKey, TrialPlan, TrialPlanStep,
    TrialSink,
};
use std::{sync::PoisonError, time::Duration};

impl Buffer {
    /// Waits until no other submit of the trial is under way, then asks the schedule.
    fn admit_end(&self, key: &TrialKey, oldest: Option<u32>) -> Admission {
        let mut state = self.state();
        while state.storing.contains(key) {
            state = self
                .changed_blocking
                .wait(state)
                .unwrap_or_else(PoisonError::into_inner);
        }
        let admission = state.schedule.admit_end(key, oldest);
        if matches!(admission, Admission::Store { .. } | Admission::TooOld { .. }) {
            state.storing.insert(*key);
        }
        admission
    }

    fn store(&self, end: &TrialEnd, start_version: u32) -> Result<Submitted, SinkError> {
        let key = end.key();
        let written = record::encode(end, start_version)
            .map_err(|problem| SinkError {
                key,
                problem: format!("the trial cannot be stored: {problem}"),
                source: None,
            })
            .and_then(|record| self.writer.append(record).map_err(|error| sink_error(key, error)));
        let mut state = self.state();
        state.storing.remove(&key);
        let answer = written.map(|location| state.record(end, location));
        drop(state);
        self.wake();
        answer
    }
}

#[async_trait::async_trait]
impl TrialPlan for Buffer {
    fn next(&self) -> TrialPlanStep {
        let mut state = self.state();
        if state.closed.is_some() {
            return TrialPlanStep::Finished;
        }
        state.schedule.next()
    }

    fn retry(&self, failed: &TrialAssignment) -> Option<TrialAssignment> {
        let mut state = self.state();
        if state.closed.is_some() || failed.key.purpose != Purpose::Train {
            return None;
        }
        state.schedule.retry(failed)
    }

    fn is_wanted(&self, key: &TrialKey) -> bool {
        self.state().schedule.is_wanted(key)
    }

    async fn changed(&self) {
        // A change between the caller's question and this call is not seen: half a second bounds that.
        let _ = tokio::time::timeout(Duration::from_millis(500), self.changed.notified()).await;
    }
}

impl TrialSink for Buffer {
    fn submit(&self, end: TrialEnd) -> Result<Submitted, SinkError> {
        let key = end.key();
        let oldest = match &end {
            TrialEnd::Finished(trajectory) => trajectory
                .sequences
                .iter()
                .flat_map(|s| s.versions.iter().zip(&s.loss_mask))
                .filter_map(|(version, sampled)| sampled.then_some(*version))
                .min(),
            TrialEnd::Dropped { .. } => None,
        };
        match (self.admit_end(&key, oldest), end) {
            (Admission::Answer(answer), _) => Ok(answer),
            (Admission::Unknown, _) => Err(SinkError {
                key,
                problem: "the buffer never handed this trial out; forget it".to_owned(),
                source: None,
            }),
            (Admission::TooOld { start_version }, TrialEnd::Finished(trajectory)) => {
                let drop = TrialEnd::Dropped {
                    key,
                    attempt: trajectory.attempt,
                    task: trajectory.task,
                    reason: DropReason::TooOld,
                    detail: format!(
                        "its oldest token is of version {}, and its group, started at version \
                         {start_version}, would pass STALENESS={}",
                        oldest.unwrap_or(0),
                        self.config.staleness
                    ),
                };
                self.store(&drop, start_version).map(|_| Submitted::CutOff)
            }
            (Admission::Store { start_version } | Admission::TooOld { start_version }, end) => {
                self.store(&end, start_version)
            }
        }
    }
}

fn sink_error(key: TrialKey, error: WriteError) -> SinkError {
    let advice = match error.source.raw_os_error() {
        Some(libc::ENOSPC) => "; the disk is full: free some space, the trial is kept until then",
        Some(libc::EDQUOT) => "; the disk quota is used up: free some space, the trial is kept until then",
        Some(libc::EFBIG) => "; the file-size limit is reached: raise `ulimit -f`",
        _ => "",
    };
    SinkError {
        key,
        problem: format!("cannot {} `{}`{advice}", error.action, error.path.display()),
        source: Some(error.source),
    }
}
