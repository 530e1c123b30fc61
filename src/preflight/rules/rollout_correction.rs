//! Corrections and penalties that do what their switch says.

use crate::{
    config::{
        values::{AdvEstimator, ImportanceLevelName},
        Settings,
    },
    preflight::{Facts, Outcome, Rule, Verdict},
};

pub(super) const RULE: Rule = Rule {
    id: "rollout-correction",
    what: "Importance weights are by token, and a penalty that is switched on has a weight.",
    why: "A product of ratios over a long sequence spreads over many orders of magnitude: few sequences keep any weight.",
    evidence: "With token log ratios of standard deviation s the effective sample size of the product over n tokens is about exp(-n s^2): 0.06 at n = 54000 and s = 0.0072.",
    fix: "Set ROLLOUT_IS=token or null; set KL_COEF above 0 with USE_KL_IN_REWARD, and CRITIC_WARMUP below the number of steps.",
    check,
};

fn check(s: &Settings, _: Option<&Facts>) -> Vec<Outcome> {
    let a = &s.algorithm;
    let mut found = Vec::new();
    if let Some(importance) = &a.importance {
        if importance.level == ImportanceLevelName::Sequence {
            found.push((
                Verdict::Warn,
                format!(
                    "ROLLOUT_IS=sequence over up to {} tokens: few sequences keep any weight",
                    s.data.max_response_tokens
                ),
            ));
        }
    }
    if a.kl_reward
        .as_ref()
        .is_some_and(|penalty| penalty.coefficient == 0.0)
    {
        found.push((
            Verdict::Warn,
            "USE_KL_IN_REWARD=True with KL_COEF=0: a reference policy is loaded and nothing is subtracted"
                .into(),
        ));
    }
    let has_critic = a.adv_estimator == AdvEstimator::Gae;
    let steps = s.schedule.total_training_steps;
    if has_critic && steps.is_some_and(|steps| a.critic.warmup_steps >= steps) {
        found.push((
            Verdict::Fatal,
            format!(
                "CRITIC_WARMUP={} of {} steps: the policy would never be trained",
                a.critic.warmup_steps,
                steps.unwrap_or_default()
            ),
        ));
    }
    if found.is_empty() {
        let level = a.importance.as_ref().map_or("null", |i| i.level.name());
        found.push((
            Verdict::Ok,
            format!("adv_estimator={} rollout_is={level}", a.adv_estimator),
        ));
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::preflight::rules::testing::settings;

    #[test]
    fn what_has_no_effect_or_too_much_is_noticed() {
        let verdict = |set: &[&str]| check(&settings(set), None)[0].0;
        assert_eq!(verdict(&[]), Verdict::Ok);
        assert_eq!(verdict(&["ROLLOUT_IS=token"]), Verdict::Ok);
        assert_eq!(verdict(&["ROLLOUT_IS=sequence"]), Verdict::Warn);
        assert_eq!(verdict(&["USE_KL_IN_REWARD=True"]), Verdict::Warn);
        assert_eq!(verdict(&["USE_KL_IN_REWARD=True", "KL_COEF=0.01"]), Verdict::Ok);
        let warm = ["ADV_ESTIMATOR=gae", "CRITIC_WARMUP=5", "TOTAL_TRAINING_STEPS=5"];
        assert_eq!(verdict(&warm), Verdict::Fatal);
        assert_eq!(verdict(&warm[1..]), Verdict::Ok, "there is no critic to wait for");
    }
}
