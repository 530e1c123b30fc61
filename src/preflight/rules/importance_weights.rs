//! Importance weights over long responses.

use crate::{
    config::{values::RolloutIs, Settings},
    preflight::{warn, Facts, Outcome, Rule, TRAINING},
};

pub(super) const RULE: Rule = Rule {
    id: "importance-weights",
    runs: TRAINING,
    what: "ROLLOUT_IS is not `sequence` for long responses.",
    why:
        "The product of thousands of token ratios is near 0 or above its bound; few sequences keep a weight.",
    evidence: "Effective sample size about 0.06 at responses of about 54,000 tokens.",
    fix: "Set ROLLOUT_IS=token, or leave it unset.",
    check,
};

fn check(s: &Settings, _: Option<&Facts>) -> Vec<Outcome> {
    if s.plan.rollout_is == Some(RolloutIs::Sequence) {
        return vec![warn(
            "ROLLOUT_IS=sequence: at long responses few sequences keep a weight; use token or leave it unset",
        )];
    }
    Vec::new()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::preflight::{rules::testing::settings, Verdict};

    #[test]
    fn weights_of_whole_sequences_are_a_warning() {
        assert_eq!(
            check(&settings(&["ROLLOUT_IS=sequence"]), None)[0].0,
            Verdict::Warn
        );
        assert!(check(&settings(&["ROLLOUT_IS=token"]), None).is_empty());
        assert!(check(&settings(&["ROLLOUT_IS=null"]), None).is_empty());
    }
}
