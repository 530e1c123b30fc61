//! Values that are valid and cannot be launched yet.

use crate::{
    config::{
        values::{Backend, ModelEngine, Scaffold},
        Settings,
    },
    preflight::{Facts, Outcome, Rule, Verdict},
};

pub(super) const RULE: Rule = Rule {
    id: "not-in-this-version",
    what: "Backend, engine and scaffold are parts of this version.",
    why: "The value is a valid name, and the part behind it does not exist here.",
    evidence: "By definition: the list in this rule is what the program can start.",
    fix: "Choose one of the values that the finding names.",
    check,
};

fn check(s: &Settings, facts: Option<&Facts>) -> Vec<Outcome> {
    let run = &s.run;
    let rows: [(&str, &str, &str, bool); 4] = [
        (
            "BACKEND",
            run.backend.name(),
            "process",
            run.backend == Backend::Process,
        ),
        (
            "MODEL_ENGINE",
            run.model_engine.name(),
            "fsdp",
            run.model_engine == ModelEngine::Fsdp,
        ),
        (
            "SCAFFOLD",
            run.scaffold.name(),
            "mini",
            run.scaffold == Scaffold::Mini,
        ),
        (
            "SP_SIZE",
            if s.topology.sp_size == 1 { "1" } else { "above 1" },
            "1",
            s.topology.sp_size == 1,
        ),
    ];
    let verdict = if facts.is_some() {
        Verdict::Fatal
    } else {
        Verdict::Warn
    };
    let by_row = rows
        .iter()
        .filter(|(.., available)| !available)
        .map(|(name, value, known, _)| (*name, *value, *known));
    // Rows of the table of variables that name what can be launched.
    let by_table = s
        .unavailable
        .iter()
        .map(|u| (u.name.as_str(), u.value.as_str(), u.instead.as_str()));
    let missing: Vec<Outcome> = by_row
        .chain(by_table)
        .map(|(name, value, known)| {
            (
                verdict,
                format!("{name}={value} is not in this version; use {known}"),
            )
        })
        .collect();
    if missing.is_empty() {
        vec![(
            Verdict::Ok,
            format!(
                "backend={} engine={} scaffold={} are in this version",
                run.backend, run.model_engine, run.scaffold
            ),
        )]
    } else {
        missing
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::preflight::rules::testing::{facts, settings};

    #[test]
    fn an_unavailable_part_is_named() {
        let s = settings(&["BACKEND=k8s", "SCAFFOLD=cc"]);
        let found = check(&s, Some(&facts()));
        assert_eq!(found.len(), 2);
        assert!(found.iter().all(|(v, _)| *v == Verdict::Fatal));
        assert!(found[0].1.contains("BACKEND=k8s"));
        assert!(check(&s, None).iter().all(|(v, _)| *v == Verdict::Warn));
    }
}
