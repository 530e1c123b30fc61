//! Paths of evaluations and sampling runs.

use crate::{
    config::Settings,
    preflight::{fatal, ok, Facts, Outcome, Rule, EVERY_RUN},
};

pub(super) const RULE: Rule = Rule {
    id: "input-paths",
    runs: EVERY_RUN,
    what: "What an evaluation or a sampling run reads exists: DATASET_PATH, INDEX_FILE, INSTANCES_FILE.",
    why: "A missing list is otherwise found after the model was loaded.",
    evidence: "The paths are looked up.",
    fix: "Correct the path, counted from REPO_ROOT where it is relative.",
    check,
};

fn check(_: &Settings, facts: Option<&Facts>) -> Vec<Outcome> {
    let Some(facts) = facts else {
        return Vec::new();
    };
    facts
        .inputs
        .iter()
        .map(|(variable, path, exists)| {
            if *exists {
                ok(format!("{variable}={path} exists"))
            } else {
                fatal(format!("{variable}={path} does not exist"))
            }
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::preflight::{
        rules::testing::{facts, settings},
        Verdict,
    };

    #[test]
    fn a_missing_path_is_named() {
        let mut some = facts();
        some.inputs = vec![
            ("INDEX_FILE", "/a.parquet".into(), true),
            ("INSTANCES_FILE", "/b.txt".into(), false),
        ];
        let found = check(&settings(&[]), Some(&some));
        assert_eq!((found[0].0, found[1].0), (Verdict::Ok, Verdict::Fatal));
        assert!(found[1].1.contains("INSTANCES_FILE=/b.txt"));
    }
}
