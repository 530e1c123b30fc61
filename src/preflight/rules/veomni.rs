//! Switches that MODEL_ENGINE=veomni cannot use.

use crate::{
    config::{values::ModelEngine, Settings},
    preflight::{fatal, ok, Facts, Outcome, Rule, TRAINING},
};

pub(super) const RULE: Rule = Rule {
    id: "veomni",
    runs: TRAINING,
    what: "MODEL_ENGINE=veomni runs without fused kernels and without activation offload.",
    why: "Both keep views of parameters that are gone after their block, and the backward pass ends in `storage of size 0`.",
    evidence: "Each of the two ended the first backward pass after parameters were sharded again.",
    fix: "Set FUSED_KERNELS=False and ENABLE_ACTIVATION_OFFLOAD=False.",
    check,
};

fn check(s: &Settings, _: Option<&Facts>) -> Vec<Outcome> {
    if s.run.model_engine != ModelEngine::Veomni {
        return Vec::new();
    }
    [
        ("FUSED_KERNELS", s.plan.fused_kernels),
        ("ENABLE_ACTIVATION_OFFLOAD", s.plan.activation_offload),
    ]
    .map(|(name, on)| {
        if on {
            fatal(format!("{name}=True with MODEL_ENGINE=veomni; set False"))
        } else {
            ok(format!("veomni: {name}=False"))
        }
    })
    .into()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::preflight::{rules::testing::settings, Verdict};

    #[test]
    fn each_switch_is_fatal_and_only_under_veomni() {
        let count = |set: &[&str]| {
            let found = check(&settings(set), None);
            found
                .iter()
                .filter(|(verdict, _)| *verdict == Verdict::Fatal)
                .count()
        };
        assert_eq!(count(&["MODEL_ENGINE=veomni"]), 0);
        assert_eq!(count(&["MODEL_ENGINE=veomni", "FUSED_KERNELS=True"]), 1);
        let both = [
            "MODEL_ENGINE=veomni",
            "FUSED_KERNELS=True",
            "ENABLE_ACTIVATION_OFFLOAD=True",
        ];
        assert_eq!(count(&both), 2);
        assert_eq!(count(&["FUSED_KERNELS=True"]), 0);
    }
}
