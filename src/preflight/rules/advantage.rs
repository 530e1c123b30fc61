//! Penalties and warm-ups that leave something to learn.

use crate::{
    config::{values::AdvEstimator, Settings},
    preflight::{Facts, Outcome, Rule, Verdict, TRAINING},
};

pub(super) const RULE: Rule = Rule {
    id: "advantage",
    runs: TRAINING,
    what: "A penalty that is switched on has a weight, and the policy learns within the run.",
    why: "A penalty of weight 0 costs a forward pass of the reference and changes nothing; a policy that waits for its critic is not trained.",
    evidence: "By definition: rewards are r - KL_COEF x divergence, and the policy is updated after CRITIC_WARMUP steps.",
    fix: "Set KL_COEF or KL_LOSS_COEF above 0, or USE_KL_IN_REWARD or USE_KL_LOSS to False; set CRITIC_WARMUP below the number of steps.",
    check,
};

fn check(s: &Settings, _: Option<&Facts>) -> Vec<Outcome> {
    let a = &s.algorithm;
    let mut found = Vec::new();
    if a.kl_reward
        .as_ref()
        .is_some_and(|penalty| penalty.coefficient == 0.0)
    {
        let text =
            "USE_KL_IN_REWARD=True with KL_COEF=0: a reference policy is loaded and nothing is subtracted";
        found.push((Verdict::Warn, text.to_owned()));
    }
    if a.use_kl_loss && a.kl_loss_coef == 0.0 {
        let text = "USE_KL_LOSS=True with KL_LOSS_COEF=0: a reference policy is loaded and changes nothing";
        found.push((Verdict::Warn, text.to_owned()));
    }
    let has_critic = a.adv_estimator == AdvEstimator::Gae;
    let warmup = a.critic.warmup_steps;
    if let Some(steps) = s.schedule.total_training_steps {
        if has_critic && warmup >= steps {
            let text = format!("CRITIC_WARMUP={warmup} of {steps} steps: the policy would never be trained");
            found.push((Verdict::Fatal, text));
        }
    }
    if found.is_empty() {
        found.push((Verdict::Ok, format!("adv_estimator={}", a.adv_estimator)));
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::preflight::rules::testing::settings;

    #[test]
    fn what_would_change_nothing_is_noticed() {
        let verdict = |set: &[&str]| check(&settings(set), None)[0].0;
        assert_eq!(verdict(&[]), Verdict::Ok);
        assert_eq!(verdict(&["USE_KL_IN_REWARD=True"]), Verdict::Warn);
        assert_eq!(verdict(&["USE_KL_LOSS=True", "KL_LOSS_COEF=0"]), Verdict::Warn);
        assert_eq!(verdict(&["USE_KL_IN_REWARD=True", "KL_COEF=0.01"]), Verdict::Ok);
        let warm = ["ADV_ESTIMATOR=gae", "CRITIC_WARMUP=5", "TOTAL_TRAINING_STEPS=5"];
        assert_eq!(verdict(&warm), Verdict::Fatal);
        assert_eq!(verdict(&warm[1..]), Verdict::Ok, "there is no critic to wait for");
    }
}
