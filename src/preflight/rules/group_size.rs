//! Groups that can be compared.

use crate::{
    config::{values::AdvEstimator, Settings},
    preflight::{fatal, Facts, Outcome, Rule, TRAINING},
};

pub(super) const RULE: Rule = Rule {
    id: "group-size",
    runs: TRAINING,
    what: "A group holds at least two trials.",
    why: "GRPO compares the trials of a prompt; a single one has advantage 0 and teaches nothing.",
    evidence: "By definition of the estimator: the reward minus its own mean is zero.",
    fix: "Set N_RESP to 2 or more; 8 is usual.",
    check,
};

fn check(s: &Settings, _: Option<&Facts>) -> Vec<Outcome> {
    if s.algorithm.adv_estimator == AdvEstimator::Grpo && s.batch.n_resp < 2 {
        return vec![fatal(format!(
            "N_RESP={} with ADV_ESTIMATOR=grpo: every advantage would be 0",
            s.batch.n_resp
        ))];
    }
    Vec::new()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::preflight::{rules::testing::settings, Verdict};

    #[test]
    fn a_group_of_one_is_fatal() {
        assert_eq!(check(&settings(&["N_RESP=1"]), None)[0].0, Verdict::Fatal);
        assert!(check(&settings(&["N_RESP=2"]), None).is_empty());
    }
}
