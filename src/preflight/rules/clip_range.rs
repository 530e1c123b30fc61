//! Clip bounds of the right size for the ratio.

use crate::{
    config::{values::PolicyLossMode, Settings},
    preflight::{ok, warn, Facts, Outcome, Rule, TRAINING},
};

pub(super) const RULE: Rule = Rule {
    id: "clip-range",
    runs: TRAINING,
    what: "CLIP_LOW and CLIP_HIGH have the size that the kind of ratio needs.",
    why: "Sequence ratios are averaged over tokens and stay within thousandths of 1; token ratios move by tenths.",
    evidence: "Usual values: 3e-4 and 4e-4 for gspo, 0.2 and 0.28 for vanilla.",
    fix: "Set CLIP_LOW and CLIP_HIGH together with POLICY_LOSS_MODE, or use a module of algorithm/.",
    check,
};

fn check(s: &Settings, _: Option<&Facts>) -> Vec<Outcome> {
    let a = &s.algorithm;
    let (low, high) = (a.clip_low, a.clip_high);
    let verdict = match a.policy_loss_mode {
        PolicyLossMode::Vanilla if low.max(high) < 0.01 => {
            Some("clips nearly every token: these bounds are for sequence ratios")
        }
        _ if low >= 1.0 || high >= 1.0 => {
            Some("allows a token or sequence to change its probability without a bound worth the name")
        }
        PolicyLossMode::Gspo if low.min(high) > 0.05 => {
            Some("never clips: these bounds are for token ratios")
        }
        _ => None,
    };
    vec![match verdict {
        Some(problem) => warn(format!(
            "CLIP_LOW={low} CLIP_HIGH={high} with POLICY_LOSS_MODE={} {problem}",
            a.policy_loss_mode
        )),
        None => ok(format!("clip {low}/{high} suits {}", a.policy_loss_mode)),
    }]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::preflight::{rules::testing::settings, Verdict};

    #[test]
    fn bounds_of_the_other_loss_are_noticed() {
        let verdict = |set: &[&str]| check(&settings(set), None)[0].0;
        assert_eq!(verdict(&[]), Verdict::Ok);
        assert_eq!(verdict(&["POLICY_LOSS_MODE=vanilla"]), Verdict::Warn);
        assert_eq!(verdict(&["CLIP_LOW=0.2", "CLIP_HIGH=0.28"]), Verdict::Warn);
        assert_eq!(
            verdict(&["POLICY_LOSS_MODE=vanilla", "CLIP_LOW=0.2", "CLIP_HIGH=0.28"]),
            Verdict::Ok
        );
        assert_eq!(
            verdict(&["POLICY_LOSS_MODE=vanilla", "CLIP_LOW=0.2", "CLIP_HIGH=28"]),
            Verdict::Warn,
            "the point was forgotten"
        );
    }
}
