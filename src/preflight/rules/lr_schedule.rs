//! A decaying schedule knows its end.

use crate::{
    config::{values::LrScheduler, Settings},
    preflight::{Facts, Outcome, Rule, Verdict},
};

pub(super) const RULE: Rule = Rule {
    id: "lr-schedule",
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
    if total.is_some_and(|total| u64::from(o.warmup_steps) >= total) {
        found.push((
            Verdict::Fatal,
            format!(
                "LR_WARMUP_STEPS={} of {} steps: ACTOR_LR is never reached",
                o.warmup_steps,
                total.unwrap_or(0)
            ),
        ));
    }
    if o.scheduler != LrScheduler::Constant && total.is_none() {
        let verdict = if facts.is_none() {
            Verdict::Skip
        } else {
            Verdict::Warn
        };
        found.push((
            verdict,
            format!(
                "LR_SCHEDULER={} needs a total: TOTAL_TRAINING_STEPS is unset and the index is unread",
                o.scheduler
            ),
        ));
    }
    if o.lr == 0.0 {
        found.push((Verdict::Warn, "ACTOR_LR=0: the policy will not change".into()));
    }
    if found.is_empty() {
        let steps = total.map_or_else(String::new, |total| format!(" over {total} steps"));
        found.push((Verdict::Ok, format!("lr_scheduler={}{steps}", o.scheduler)));
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::preflight::rules::testing::{facts, settings};

    #[test]
    fn decay_needs_a_total_and_warm_up_an_end() {
        assert_eq!(
            check(&settings(&["LR_SCHEDULER=cosine"]), None)[0].0,
            Verdict::Skip
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
