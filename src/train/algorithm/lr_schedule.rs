//! Learning rate by step.
//!
//! Warm-up is linear: step k of w warm-up steps (from 1) uses `k/w` of the peak, so no step is wasted at
//! rate zero. After it, with progress `p` in [0, 1] from the end of warm-up to the last step and the
//! floor `f` (`LR_MIN_RATIO`):
//!
//! - `constant`: the peak.
//! - `linear`: `peak · (f + (1 − f)(1 − p))`
//! - `cosine`: `peak · (f + (1 − f)(1 + cos πp)/2)` (Loshchilov and Hutter 2017, "SGDR", one period)
//!
//! Invariant: the rate never collapses because a total is not known. Without a total, or with one that
//! is not longer than the warm-up, decaying schedules hold the peak; beyond the total they hold the floor.

use super::UnknownAlgorithm;
use std::str::FromStr;

/// Shape after warm-up (`LR_SCHEDULER`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LrKind {
    /// Stay at the peak.
    Constant,
    /// Straight line to the floor.
    Linear,
    /// Half a cosine to the floor.
    Cosine,
}

impl FromStr for LrKind {
    type Err = UnknownAlgorithm;
    fn from_str(text: &str) -> Result<Self, UnknownAlgorithm> {
        match text {
            "constant" => Ok(Self::Constant),
            "linear" => Ok(Self::Linear),
            "cosine" => Ok(Self::Cosine),
            other => Err(UnknownAlgorithm {
                variable: "LR_SCHEDULER",
                value: other.to_owned(),
                known: "constant, linear, cosine",
            }),
        }
    }
}

/// A learning rate over the optimizer steps of a run.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LrSchedule {
    /// Shape after warm-up.
    pub kind: LrKind,
    /// Peak rate (`ACTOR_LR`).
    pub peak: f64,
    /// Warm-up steps; 0 starts at the peak.
    pub warmup_steps: u64,
    /// Optimizer steps of the run, where known.
    pub total_steps: Option<u64>,
    /// Lowest rate as a share of the peak.
    pub min_ratio: f64,
}

impl LrSchedule {
    /// The same rate for ever.
    pub fn constant(peak: f64) -> Self {
        Self {
            kind: LrKind::Constant,
            peak,
            warmup_steps: 0,
            total_steps: None,
            min_ratio: 0.0,
        }
    }

    /// Rate of the optimizer step with this number, from 1.
    pub fn rate(&self, step: u64) -> f64 {
        if step < self.warmup_steps {
            return self.peak * step.max(1) as f64 / self.warmup_steps as f64;
        }
        let Some(total) = self.total_steps.filter(|total| *total > self.warmup_steps) else {
            return self.peak;
        };
        // The first step after warm-up is at the peak and the last one still learns: p = 1 is only
        // reached one step beyond the total.
        let first = self.warmup_steps.max(1);
        let length = (total + 1).saturating_sub(first).max(1);
        let progress = ((step.saturating_sub(first)) as f64 / length as f64).min(1.0);
        let share = match self.kind {
            LrKind::Constant => return self.peak,
            LrKind::Linear => 1.0 - progress,
            LrKind::Cosine => 0.5 * (1.0 + (std::f64::consts::PI * progress).cos()),
        };
        self.peak * (self.min_ratio + (1.0 - self.min_ratio) * share)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn schedule(kind: LrKind, warmup_steps: u64, total_steps: Option<u64>) -> LrSchedule {
        LrSchedule {
            kind,
            peak: 1.0,
            warmup_steps,
            total_steps,
            min_ratio: 0.1,
        }
    }

    #[test]
    fn warm_up_then_decay() {
        let linear = schedule(LrKind::Linear, 4, Some(13));
        assert_eq!(
            (1..=4).map(|k| linear.rate(k)).collect::<Vec<_>>(),
            [0.25, 0.5, 0.75, 1.0]
        );
        // Steps 4 … 14 are the ten parts of the line from 1 to 0.1.
        assert!((linear.rate(9) - 0.55).abs() < 1e-12);
        assert!((linear.rate(14) - 0.1).abs() < 1e-12);
        assert!((linear.rate(1000) - 0.1).abs() < 1e-12);
        let cosine = schedule(LrKind::Cosine, 4, Some(13));
        assert!((cosine.rate(9) - 0.55).abs() < 1e-12);
        assert!(cosine.rate(6) > linear.rate(6));
    }

    #[test]
    fn an_unknown_or_silly_total_holds_the_peak() {
        for kind in [LrKind::Constant, LrKind::Linear, LrKind::Cosine] {
            for total in [None, Some(0), Some(3), Some(4)] {
                for step in [4, 5, 100, u64::MAX / 2] {
                    assert_eq!(
                        schedule(kind, 4, total).rate(step),
                        1.0,
                        "{kind:?} {total:?} {step}"
                    );
                }
            }
        }
    }

    #[test]
    fn no_step_of_a_run_has_rate_zero() {
        for kind in [LrKind::Linear, LrKind::Cosine] {
            for total in 1..20 {
                let mut s = schedule(kind, 0, Some(total));
                s.min_ratio = 0.0;
                for step in 1..=total {
                    assert!(s.rate(step) > 0.0, "{kind:?} {step}/{total}");
                }
                assert_eq!(s.rate(1), 1.0);
            }
        }
    }
}
