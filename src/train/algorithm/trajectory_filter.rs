//! Which trials with a verdict are trained on.
//!
//! A trial that was cut off (time, turns, context) or whose agent crashed was judged as it stood, and its
//! reward may say more about the limit than about the policy. The filter (`TRAJ_FILTER_ENABLE`,
//! `TRAJ_FILTER_DROP_REASONS`) takes such trials out: they leave the group statistics and the loss, as if
//! they had not been sampled, and are counted by reason.
//!
//! Trials without a verdict (sandbox, engine or verifier failed) never get here: the buffer hands them over
//! as dropped. No setting turns them into rewards of zero.

use crate::base::StopReason;

/// Reasons for which a trial with a verdict is left out; none by default.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TrajectoryFilter {
    drop: Vec<StopReason>,
}

impl TrajectoryFilter {
    /// Leaves out trials that ended for one of `reasons`.
    pub fn new(reasons: impl IntoIterator<Item = StopReason>) -> Self {
        Self {
            drop: reasons.into_iter().collect(),
        }
    }

    /// Whether a trial that ended so is trained on.
    pub fn keeps(&self, stop: StopReason) -> bool {
        !self.drop.contains(&stop)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn off_by_default_and_by_reason_when_on() {
        let all = [
            StopReason::AgentCompleted,
            StopReason::MaxTurnsReached,
            StopReason::Timeout,
            StopReason::Overlong,
            StopReason::AgentCrash,
        ];
        assert!(all.iter().all(|stop| TrajectoryFilter::default().keeps(*stop)));
        let filter = TrajectoryFilter::new([StopReason::Timeout, StopReason::AgentCrash]);
        let kept: Vec<bool> = all.iter().map(|stop| filter.keeps(*stop)).collect();
        assert_eq!(kept, [true, true, false, true, false]);
    }
}
