//! No other run has these folders.

use crate::{
    config::Settings,
    preflight::{fatal, ok, Facts, Outcome, Rule, EVERY_RUN},
};

pub(super) const RULE: Rule = Rule {
    id: "run-lock",
    runs: EVERY_RUN,
    what: "No live run holds RUN_DIR, the experiment's checkpoints or its metrics.",
    why: "Two runs in one folder overwrite each other's buffer, checkpoints and metrics.",
    evidence: "A run holds a lock in each of the three while it lives; the kernel drops them when it dies.",
    fix: "Wait for the other run, end it, or give this one another EXP_NAME.",
    check,
};

fn check(_: &Settings, facts: Option<&Facts>) -> Vec<Outcome> {
    let Some(facts) = facts else {
        return Vec::new();
    };
    if facts.held.is_empty() {
        return vec![ok(
            "no live run holds RUN_DIR, CKPTS_DIR or LOG_DIR of this experiment",
        )];
    }
    facts
        .held
        .iter()
        .map(|held| {
            fatal(format!(
                "{}: {} is held by {}",
                held.variable,
                held.path.display(),
                held.holder
            ))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::preflight::{
        facts::HeldFolder,
        rules::testing::{facts, settings},
        Verdict,
    };

    #[test]
    fn the_holder_is_named() {
        assert_eq!(check(&settings(&[]), Some(&facts()))[0].0, Verdict::Ok);
        let mut taken = facts();
        taken.held.push(HeldFolder {
            variable: "CKPTS_DIR",
            path: "/c/run.lock".into(),
            holder: "host a, process 7".into(),
        });
        let found = check(&settings(&[]), Some(&taken));
        assert_eq!(found[0].0, Verdict::Fatal);
        assert!(found[0].1.contains("CKPTS_DIR") && found[0].1.contains("process 7"));
    }
}
