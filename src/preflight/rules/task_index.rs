//! Indexes and the tasks that they point at.

use crate::{
    config::{values::RunKind, Settings},
    preflight::{facts::IndexFacts, fatal, ok, skip, Facts, Outcome, Rule, WITH_INDEX},
};

pub(super) const RULE: Rule = Rule {
    id: "task-index",
    runs: WITH_INDEX,
    what: "The indexes can be read, every row's folder exists, and sampled tasks are complete.",
    why: "An index is only a table of paths: the tasks may have moved, or lack their tests/test.sh.",
    evidence: "Every row's folder, task.toml, instruction.md and tests/test.sh are looked up; up to 16 tasks spread over the index are loaded whole.",
    fix: "Restore the folders, complete the tasks (`legorl-rank task check DIR`), or build the index again (`legorl-rank index build`).",
    check,
};

fn check(s: &Settings, facts: Option<&Facts>) -> Vec<Outcome> {
    let Some(facts) = facts else {
        return vec![skip("TRAIN_FILES, VAL_FILES: structure-only run")];
    };
    let variable = match s.run.kind {
        RunKind::Infer => "INDEX_FILE",
        _ => "TRAIN_FILES",
    };
    let mut found = one(variable, &facts.train_index);
    if let (Some(index), Some(_)) = (&facts.val_index, &s.data.val_files) {
        found.extend(one("VAL_FILES", index));
    }
    found
}

fn one(variable: &str, index: &Result<IndexFacts, String>) -> Vec<Outcome> {
    match index {
        Err(problem) => vec![fatal(format!(
            "{variable}: {problem}; `legorl-rank index build TASKS --output FILE.parquet` makes an index of a folder of tasks"
        ))],
        Ok(index) if index.problems.is_empty() => vec![ok(format!(
            "{variable}: {} tasks, {} of them loaded",
            index.rows, index.sampled
        ))],
        Ok(index) => index
            .problems
            .iter()
            .map(|problem| fatal(format!("{variable}: {problem}")))
            .collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::preflight::{
        rules::testing::{facts, settings},
        Verdict,
    };

    #[test]
    fn problems_of_either_index_are_fatal() {
        let s = settings(&[]);
        assert!(check(&s, Some(&facts())).iter().all(|(v, _)| *v == Verdict::Ok));
        let mut broken = facts();
        broken.val_index = Some(Err(
            "val.parquet row 3: the task folder /t/x does not exist".into()
        ));
        if let Ok(index) = &mut broken.train_index {
            index
                .problems
                .push("train.parquet row 0: no tests/test.sh".into());
        }
        let found = check(&s, Some(&broken));
        assert_eq!(found.iter().filter(|(v, _)| *v == Verdict::Fatal).count(), 2);
        assert!(found[0].1.contains("TRAIN_FILES") && found[1].1.contains("row 3"));
        broken.train_index = Err("t.parquet: No such file or directory".into());
        let found = check(&s, Some(&broken));
        assert!(found[0].1.contains("legorl-rank index build"), "{found:?}");
    }
}
