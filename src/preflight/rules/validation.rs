//! Validation that can take place.

use crate::{
    config::Settings,
    preflight::{warn, Facts, Outcome, Rule, TRAINING},
};

pub(super) const RULE: Rule = Rule {
    id: "validation",
    runs: TRAINING,
    what: "A run that asks for validation has a held-out index.",
    why: "Without VAL_FILES nothing shows whether the reward on unseen tasks rises.",
    evidence: "By definition: validation runs over the rows of VAL_FILES.",
    fix: "Set VAL_FILES (`legorl-rank index build --split-ratio`), or set TRAINER_VAL_BEFORE_TRAIN=False and TRAINER_TEST_FREQ=-1.",
    check,
};

fn check(s: &Settings, _: Option<&Facts>) -> Vec<Outcome> {
    let asked = s.schedule.val_before_train || s.schedule.test_freq.is_some();
    match (&s.data.val_files, asked) {
        (None, true) => vec![warn(
            "VAL_FILES is empty: TRAINER_VAL_BEFORE_TRAIN and TRAINER_TEST_FREQ have nothing to run on",
        )],
        (Some(val), _) if *val == s.data.train_files && !val.ends_with("CHANGEME") => {
            vec![warn(
                "VAL_FILES equals TRAIN_FILES: validation measures seen tasks",
            )]
        }
        _ => Vec::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::preflight::{rules::testing::settings, Verdict};

    #[test]
    fn validation_needs_an_index_of_its_own() {
        assert!(check(&settings(&[]), None).is_empty());
        assert_eq!(check(&settings(&["VAL_FILES="]), None)[0].0, Verdict::Warn);
        assert_eq!(
            check(&settings(&["VAL_FILES=t.parquet"]), None)[0].0,
            Verdict::Warn
        );
        let off = [
            "VAL_FILES=",
            "TRAINER_VAL_BEFORE_TRAIN=False",
            "TRAINER_TEST_FREQ=-1",
        ];
        assert!(check(&settings(&off), None).is_empty());
    }
}
