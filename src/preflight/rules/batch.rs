//! Batch sizes divide.

use crate::{
    config::Settings,
    preflight::{fatal, ok, Facts, Outcome, Rule, TRAINING},
};

pub(super) const RULE: Rule = Rule {
    id: "batch",
    runs: TRAINING,
    what: "TRAIN_MINI_BSZ divides TRAIN_BSZ, and the run makes at least one step.",
    why: "Prompts that fill no mini-batch would be sampled and never trained on; epochs over an index that is smaller than a batch have no step.",
    evidence: "By construction: a step is cut into TRAIN_BSZ / TRAIN_MINI_BSZ updates, an epoch into whole batches.",
    fix: "Choose TRAIN_MINI_BSZ as a divisor of TRAIN_BSZ, and TRAIN_BSZ not above TOTAL_EPOCHS times the rows of the index.",
    check,
};

fn check(s: &Settings, facts: Option<&Facts>) -> Vec<Outcome> {
    let b = &s.batch;
    let mut found = Vec::new();
    if !b.train_bsz.is_multiple_of(b.train_mini_bsz) {
        found.push(fatal(format!(
            "TRAIN_BSZ={} is not a multiple of TRAIN_MINI_BSZ={}",
            b.train_bsz, b.train_mini_bsz
        )));
    }
    if let Some(Ok(index)) = facts.map(|f| &f.train_index) {
        if s.total_steps(index.rows as u64) == 0 {
            found.push(fatal(format!(
                "TOTAL_EPOCHS={} over {} tasks is less than one batch of TRAIN_BSZ={}",
                s.schedule.total_epochs, index.rows, b.train_bsz
            )));
        }
    }
    if found.is_empty() {
        found.push(ok(format!(
            "batch: {} prompts = {} updates of {}",
            b.train_bsz,
            b.train_bsz / b.train_mini_bsz,
            b.train_mini_bsz
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
    fn remainders_and_empty_epochs_are_fatal() {
        assert_eq!(check(&settings(&["TRAIN_MINI_BSZ=3"]), None)[0].0, Verdict::Fatal);
        assert_eq!(check(&settings(&["TRAIN_MINI_BSZ=4"]), None)[0].0, Verdict::Ok);
        assert_eq!(
            check(&settings(&["TRAIN_MINI_BSZ=16"]), None)[0].0,
            Verdict::Fatal
        );
        let large = settings(&["TRAIN_BSZ=101"]);
        assert_eq!(check(&large, Some(&facts()))[0].0, Verdict::Fatal);
        let by_steps = settings(&["TRAIN_BSZ=101", "TOTAL_TRAINING_STEPS=2"]);
        assert_eq!(check(&by_steps, Some(&facts()))[0].0, Verdict::Ok);
    }
}
