//! Sampling whose distribution the trainer knows.

use crate::{
    config::Settings,
    preflight::{warn, Facts, Outcome, Rule, TRAINING},
};

pub(super) const RULE: Rule = Rule {
    id: "sampling",
    runs: TRAINING,
    what: "Training samples from the whole distribution.",
    why: "TOP_P and TOP_K cut the support, and the recorded log-probability is the one before the cut, so the ratio is biased.",
    evidence: "By definition: the trainer recomputes log-probabilities over the whole vocabulary.",
    fix: "Set TOP_P=1.0 and TOP_K=-1; steer exploration with TEMPERATURE.",
    check,
};

fn check(s: &Settings, _: Option<&Facts>) -> Vec<Outcome> {
    let sampling = &s.sampling;
    if sampling.top_p < 1.0 || sampling.top_k > 0 {
        return vec![warn(format!(
            "TOP_P={} TOP_K={} cut the distribution that is trained on",
            sampling.top_p,
            if sampling.top_k == 0 {
                -1
            } else {
                i64::from(sampling.top_k)
            }
        ))];
    }
    Vec::new()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::preflight::{rules::testing::settings, Verdict};

    #[test]
    fn a_cut_distribution_is_a_warning() {
        assert!(check(&settings(&[]), None).is_empty());
        assert_eq!(check(&settings(&["TOP_P=0.9"]), None)[0].0, Verdict::Warn);
        assert_eq!(check(&settings(&["TOP_K=50"]), None)[0].0, Verdict::Warn);
    }
}
