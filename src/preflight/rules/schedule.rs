//! Length and cadence of the run.

use crate::{
    config::Settings,
    preflight::{ok, skip, warn, Facts, Outcome, Rule, TRAINING},
};

pub(super) const RULE: Rule = Rule {
    id: "schedule",
    runs: TRAINING,
    what: "The number of steps is known, and checkpoints and validations fall inside the run.",
    why:
        "A cadence longer than the run means one checkpoint at its end: a failure before it costs everything.",
    evidence: "Steps are TOTAL_TRAINING_STEPS, or rows x TOTAL_EPOCHS / TRAIN_BSZ rounded down.",
    fix: "Lower TRAINER_SAVE_FREQ and TRAINER_TEST_FREQ, or lengthen the run.",
    check,
};

fn check(s: &Settings, facts: Option<&Facts>) -> Vec<Outcome> {
    let rows = facts
        .and_then(|f| f.train_index.as_ref().ok())
        .map(|index| index.rows as u64);
    let steps = match (s.schedule.total_training_steps, rows) {
        (Some(steps), _) => u64::from(steps),
        (None, Some(rows)) => s.total_steps(rows),
        (None, None) => return vec![skip("number of steps: needs the training index")],
    };
    let mut found = Vec::new();
    if let Some(every) = s.schedule.save_freq.filter(|every| u64::from(*every) > steps) {
        found.push(warn(format!(
            "TRAINER_SAVE_FREQ={every} of {steps} steps: the only checkpoint would be the last"
        )));
    }
    if let Some(every) = s.schedule.test_freq.filter(|every| u64::from(*every) > steps) {
        found.push(warn(format!(
            "TRAINER_TEST_FREQ={every} of {steps} steps: the only validation would be the last"
        )));
    }
    if found.is_empty() {
        let every = |freq: Option<u32>| freq.map_or("at the end".to_owned(), |n| format!("every {n}"));
        found.push(ok(format!(
            "{steps} steps, checkpoints {}, validations {}",
            every(s.schedule.save_freq),
            every(s.schedule.test_freq)
        )));
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::preflight::{
        rules::testing::{facts, settings},
        Verdict,
    };

    #[test]
    fn a_cadence_fits_into_the_run() {
        // 100 rows in batches of 8: 12 steps.
        let found = check(&settings(&[]), Some(&facts()));
        assert!(found[0].1.starts_with("12 steps"), "{found:?}");
        assert_eq!(
            check(&settings(&["TRAINER_SAVE_FREQ=13"]), Some(&facts()))[0].0,
            Verdict::Warn
        );
        assert_eq!(check(&settings(&[]), None)[0].0, Verdict::Skip);
        let steps = settings(&[
            "TOTAL_TRAINING_STEPS=5",
            "TRAINER_SAVE_FREQ=5",
            "TRAINER_TEST_FREQ=-1",
        ]);
        assert_eq!(check(&steps, None)[0].0, Verdict::Ok);
    }
}
