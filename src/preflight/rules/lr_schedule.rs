//! A decaying schedule knows its end.

use crate::{
    config::{values::LrScheduler, Settings},
    preflight::{fatal, ok, warn, Facts, Outcome, Rule, TRAINING},
};

pub(super) const RULE: Rule = Rule {
    id: "lr-schedule",
    runs: TRAINING,
    what: "A decaying learning rate has a known number of steps, and the warm-up ends before it.",
    why: "A schedule without an end decays at once or never; a warm-up longer than the run never reaches ACTOR_LR.",
    evidence: "With a total of -1 steps a cosine or linear schedule gives a learning rate of 0 from the first step.",
    fix: "Set TOTAL_TRAINING_STEPS, or LR_SCHEDULER=constant; shorten LR_WARMUP_STEPS.",
    check,
};

fn check(s: &Settings, facts: Option<&Facts>) -> Vec<Outcome> {
    let o = &s.optim;
    let rows = facts
        .and_then(|f| f.train_index.as_ref().ok())
        .map(|index| index.rows as u64);
    let total = match (s.schedule.total_training_steps, rows) {
        (Some(steps), _) => Some(u64::from(steps)),
        (None, Some(rows)) => Some(s.total_steps(rows)),
        (None, None) => None,
    };
    let mut found = Vec::new();
    if let Some(total) = total.filter(|total| u64::from(o.warmup_steps) >= *total) {
        found.push(fatal(format!(
            "LR_WARMUP_STEPS={} of {total} steps: ACTOR_LR is never reached",
            o.warmup_steps
        )));
    }
    if o.scheduler != LrScheduler::Constant && total.is_none() {
        found.push(warn(format!(
            "LR_SCHEDULER={} decays over a number of steps that is not known yet; set TOTAL_TRAINING_STEPS or constant",
            o.scheduler
        )));
    }
    if found.is_empty() {
        let steps = total.map_or_else(String::new, |total| format!(" over {total} steps"));
        found.push(ok(format!("lr_scheduler={}{steps}", o.scheduler)));
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
    fn decay_needs_a_total_and_warm_up_an_end() {
        assert_eq!(
            check(&settings(&["LR_SCHEDULER=cosine"]), None)[0].0,
            Verdict::Warn
        );
        assert_eq!(
            check(&settings(&["LR_SCHEDULER=cosine"]), Some(&facts()))[0].0,
            Verdict::Ok,
            "rows are known"
        );
        let unread = Facts {
            train_index: Err("gone".into()),
            ..facts()
        };
        assert_eq!(
            check(&settings(&["LR_SCHEDULER=linear"]), Some(&unread))[0].0,
            Verdict::Warn
        );
        let late = settings(&["LR_WARMUP_STEPS=10", "TOTAL_TRAINING_STEPS=10"]);
        assert_eq!(check(&late, None)[0].0, Verdict::Fatal);
    }
}
