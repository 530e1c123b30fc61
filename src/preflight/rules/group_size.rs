//! Groups that can be compared.

use crate::{
    config::{values::AdvEstimator, Settings},
    preflight::{fatal, Facts, Outcome, Rule, TRAINING},
};

pub(super) const RULE: Rule = Rule {
    id: "group-size",
    runs: TRAINING,
    what: "A group holds at least two trials.",
    why: "These estimators compare the trials of a prompt; a single one has advantage 0 and teaches nothing.",
    evidence: "By definition of grpo, rloo and reinforce_plus_plus_baseline: a reward minus the mean of one is zero.",
    fix: "Set N_RESP to 2 or more (8 is usual), or ADV_ESTIMATOR to gae or reinforce_plus_plus.",
    check,
};

fn check(s: &Settings, _: Option<&Facts>) -> Vec<Outcome> {
    let estimator = s.algorithm.adv_estimator;
    let compares_trials = matches!(
        estimator,
        AdvEstimator::Grpo | AdvEstimator::Rloo | AdvEstimator::ReinforcePlusPlusBaseline
    );
    if compares_trials && s.batch.n_resp < 2 {
        return vec![fatal(format!(
            "N_RESP={} with ADV_ESTIMATOR={estimator}: every advantage would be 0",
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
        let with = |estimator: &str| check(&settings(&["N_RESP=1", estimator]), None);
        assert_eq!(with("ADV_ESTIMATOR=rloo")[0].0, Verdict::Fatal);
        assert!(with("ADV_ESTIMATOR=gae").is_empty());
    }
}
