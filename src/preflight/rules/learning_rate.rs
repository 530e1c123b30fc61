//! The learning rate changes weights by little at a step.

use crate::{
    config::{values::AdvEstimator, Settings},
    preflight::{ok, warn, Facts, Outcome, Rule, TRAINING},
};

pub(super) const RULE: Rule = Rule {
    id: "learning-rate",
    runs: TRAINING,
    what: "ACTOR_LR and CRITIC_LR are small beside the weights, and not 0.",
    why: "AdamW moves a weight by about the learning rate at a step, whatever the loss is: a rate of the size of the weights replaces the network by noise.",
    evidence: "The first step of AdamW moves every weight with a gradient by exactly the rate (Kingma and Ba 2015, section 2.1; Loshchilov and Hutter 2019), and networks start from weights with a standard deviation of 0.02 (`initializer_range` of config.json).",
    fix: "Take the rate of a published run of this kind, between 1e-7 and 1e-4, or the template module's.",
    check,
};

/// A quarter of the usual standard deviation of a weight: four steps replace it.
const LARGE: f64 = 5e-3;

fn check(s: &Settings, _: Option<&Facts>) -> Vec<Outcome> {
    let critic =
        (s.algorithm.adv_estimator == AdvEstimator::Gae).then_some(("CRITIC_LR", s.algorithm.critic.lr));
    let rates = [Some(("ACTOR_LR", s.optim.lr)), critic];
    let mut found = Vec::new();
    for (variable, rate) in rates.into_iter().flatten() {
        if rate == 0.0 {
            found.push(warn(format!("{variable}=0: this network will not change")));
        } else if rate >= LARGE {
            found.push(warn(format!(
                "{variable}={rate}: a step moves each weight by up to {rate}, and weights are about 0.02; was 1e-6 meant?"
            )));
        }
    }
    if found.is_empty() {
        found.push(ok(format!("actor_lr={}", s.optim.lr)));
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::preflight::{rules::testing::settings, Verdict};

    #[test]
    fn a_rate_of_the_size_of_the_weights_is_noticed() {
        let verdict = |set: &[&str]| {
            let found = check(&settings(set), None);
            found.into_iter().map(|(verdict, _)| verdict).collect::<Vec<_>>()
        };
        for rate in ["1", "0.01", "5e-3", "0"] {
            assert_eq!(
                verdict(&[format!("ACTOR_LR={rate}").as_str()]),
                [Verdict::Warn],
                "{rate}"
            );
        }
        for rate in ["1e-6", "6e-4", "1e-3"] {
            assert_eq!(
                verdict(&[format!("ACTOR_LR={rate}").as_str()]),
                [Verdict::Ok],
                "{rate}"
            );
        }
        assert_eq!(verdict(&["CRITIC_LR=1"]), [Verdict::Ok], "no critic is trained");
        let critic = ["CRITIC_LR=1", "ADV_ESTIMATOR=gae", "N_RESP=1"];
        assert_eq!(verdict(&critic), [Verdict::Warn]);
    }
}
