//! Staleness belongs to async.

use crate::{
    config::{values::TrainingMode, Settings},
    preflight::{fatal, ok, warn, Facts, Outcome, Rule, TRAINING},
};

pub(super) const RULE: Rule = Rule {
    id: "staleness",
    runs: TRAINING,
    what: "STALENESS is 0 under sync, and at least 1 under async.",
    why: "One pool has no second policy to lag behind; two pools with a bound of 0 wait for each other at every step.",
    evidence: "By construction: under sync a step's trials start after the last update.",
    fix: "Remove STALENESS, or set TRAINING_MODE=async.",
    check,
};

fn check(s: &Settings, _: Option<&Facts>) -> Vec<Outcome> {
    let bound = s.rollout.staleness;
    vec![match s.run.training_mode {
        TrainingMode::Sync if bound > 0.0 => fatal(format!(
            "STALENESS={bound} under TRAINING_MODE=sync, where every token is fresh; set 0 or use async"
        )),
        TrainingMode::Async if bound < 1.0 => warn(format!(
            "STALENESS={bound} under TRAINING_MODE=async: the pools take turns instead of overlapping"
        )),
        mode => ok(format!("staleness bound {bound} under {mode}")),
    }]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::preflight::{rules::testing::settings, Verdict};

    #[test]
    fn the_bound_fits_the_mode() {
        let verdict = |set: &[&str]| check(&settings(set), None)[0].0;
        assert_eq!(verdict(&[]), Verdict::Ok);
        assert_eq!(verdict(&["STALENESS=1"]), Verdict::Fatal);
        assert_eq!(verdict(&["TRAINING_MODE=async"]), Verdict::Ok);
        assert_eq!(verdict(&["TRAINING_MODE=async", "STALENESS=0"]), Verdict::Warn);
    }
}
