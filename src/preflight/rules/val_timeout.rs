//! Validation gives an agent at least the time that training gives.

use crate::{
    config::Settings,
    preflight::{ok, warn, Facts, Outcome, Rule, TRAINING},
};

pub(super) const RULE: Rule = Rule {
    id: "val-timeout",
    runs: TRAINING,
    what: "HARBOR_VAL_AGENT_MAX_TIMEOUT_SEC is not below HARBOR_AGENT_MAX_TIMEOUT_SEC.",
    why: "Validation tasks are longer; those that are cut off count as failed, and the score measures the limit.",
    evidence: "Under the training limit of 2,400 s only about 170 of 500 validation tasks were evaluated.",
    fix: "Raise HARBOR_VAL_AGENT_MAX_TIMEOUT_SEC; 4800 is usual.",
    check,
};

fn check(s: &Settings, _: Option<&Facts>) -> Vec<Outcome> {
    let (val, train) = (s.validation.agent_max_timeout, s.agent.max_timeout);
    vec![if val < train {
        warn(format!(
            "HARBOR_VAL_AGENT_MAX_TIMEOUT_SEC={} is below HARBOR_AGENT_MAX_TIMEOUT_SEC={}: validation would be cut off first",
            val.as_secs_f64(),
            train.as_secs_f64()
        ))
    } else {
        ok(format!(
            "validation timeout={}s, training {}s",
            val.as_secs_f64(),
            train.as_secs_f64()
        ))
    }]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::preflight::{rules::testing::settings, Verdict};

    #[test]
    fn validation_is_not_cut_off_first() {
        assert_eq!(check(&settings(&[]), None)[0].0, Verdict::Ok);
        let short = settings(&["HARBOR_VAL_AGENT_MAX_TIMEOUT_SEC=600"]);
        assert_eq!(check(&short, None)[0].0, Verdict::Warn);
    }
}
