//! Values that are valid and cannot be launched yet. To make one available, add it to its row of [`ROWS`],
//! or delete the row; variables of less weight say it in their own row of the table of variables.

use crate::{
    config::{values::RunKind, Settings},
    preflight::{rules::tool_parser, Facts, Outcome, Rule, Verdict, EVERY_RUN},
};

pub(super) const RULE: Rule = Rule {
    id: "not-in-this-version",
    runs: EVERY_RUN,
    what: "Everything that the configuration chooses is a part of this version.",
    why: "The value is a valid name, and the part behind it does not exist here.",
    evidence: "By definition: the table in this rule is what the program can start.",
    fix: "Choose one of the values that the finding names.",
    check,
};

/// A variable, the value that a run has, and the values that can be launched.
type Row = (&'static str, fn(&Settings) -> String, &'static [&'static str]);

const ROWS: &[Row] = &[
    ("BACKEND", |s| s.run.backend.to_string(), &["process"]),
    (
        "MODEL_ENGINE",
        |s| s.run.model_engine.to_string(),
        &["fsdp", "veomni"],
    ),
    (
        "SCAFFOLD",
        |s| s.run.scaffold.to_string(),
        &["mini", "cc", "oc", "ohsdk", "oh", "terminus2", "custom"],
    ),
    (
        "TOOL_CALL_PARSER",
        |s| s.model.tool_call_parser.to_string(),
        PARSERS,
    ),
];

/// Parsers of this version.
pub(super) const PARSERS: &[&str] = &["hermes", "qwen3_coder", "auto"];

/// Kinds of run that can be launched.
const KINDS: &[RunKind] = &[RunKind::Train];

fn check(s: &Settings, facts: Option<&Facts>) -> Vec<Outcome> {
    let verdict = if facts.is_some() {
        Verdict::Fatal
    } else {
        Verdict::Warn
    };
    let mut missing: Vec<String> = ROWS
        .iter()
        .map(|(name, value, known)| (name, value(s), known))
        .filter(|(_, value, known)| !known.contains(&value.as_str()))
        .map(|(name, value, known)| {
            let instead = match tool_parser::needed(s, facts) {
                Some(parser) if *name == "TOOL_CALL_PARSER" => {
                    format!("{parser}, the markup of this policy")
                }
                _ => known.join(" or "),
            };
            format!("{name}={value} is not in this version; use {instead}")
        })
        .collect();
    // Rows of the table of variables that name what can be launched.
    missing.extend(
        s.unavailable
            .iter()
            .map(|u| format!("{}={} is not in this version; use {}", u.name, u.value, u.instead)),
    );
    if !KINDS.contains(&s.run.kind) {
        missing.push(format!(
            "launching `legorl-rank {}` is not in this version",
            s.run.kind
        ));
    }
    // What the checkpoint reader knows is the list of families; there is no other.
    if let Some(Ok(model)) = facts.map(|f| &f.model) {
        if let Err(problem) = &model.network {
            missing.push(format!(
                "MODEL_PATH: this network is not in this version: {problem}"
            ));
        }
    }
    if missing.is_empty() {
        let run = &s.run;
        return vec![(
            Verdict::Ok,
            format!(
                "backend={} engine={} scaffold={} are in this version",
                run.backend, run.model_engine, run.scaffold
            ),
        )];
    }
    missing.into_iter().map(|text| (verdict, text)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::preflight::rules::testing::{facts, settings};

    #[test]
    fn an_unavailable_part_is_named() {
        let s = settings(&["BACKEND=k8s", "MODEL_ENGINE=megatron", "SCAFFOLD=cc"]);
        let found = check(&s, Some(&facts()));
        assert_eq!(found.len(), 2);
        assert!(found.iter().all(|(v, _)| *v == Verdict::Fatal));
        assert!(found[0].1.contains("BACKEND=k8s"));
        assert!(check(&s, None).iter().all(|(v, _)| *v == Verdict::Warn));
    }

    #[test]
    fn several_trainer_ranks_can_be_launched() {
        let asynchronous = [
            "TRAINING_MODE=async",
            "NNODES=3",
            "N_NODES_ROLLOUT=1",
            "MODEL_ENGINE=veomni",
            "SP_SIZE=2",
        ];
        for set in [&asynchronous[..], &["NNODES=2"]] {
            let found = check(&settings(set), Some(&facts()));
            assert!(found.iter().all(|(v, _)| *v == Verdict::Ok), "{found:?}");
        }
        let found = check(&settings(&["MODEL_ENGINE=megatron"]), Some(&facts()));
        assert!(
            found[0].0 == Verdict::Fatal && found[0].1.contains("use fsdp or veomni"),
            "{found:?}"
        );
    }

    #[test]
    fn a_network_that_cannot_be_read_is_named() {
        let mut other = facts();
        if let Ok(model) = &mut other.model {
            model.network = Err("model_type `qwen3_5_moe` is not supported".into());
        }
        let found = check(&settings(&[]), Some(&other));
        assert!(found[0].0 == Verdict::Fatal && found[0].1.contains("qwen3_5_moe"));
    }

    #[test]
    fn a_parser_of_another_version_gets_one_advice() {
        let s = settings(&["TOOL_CALL_PARSER=glm45"]);
        let report = crate::preflight::check(&s, Some(&facts()));
        let about: Vec<_> = report
            .findings
            .iter()
            .filter(|f| f.verdict >= Verdict::Warn && f.text.contains("TOOL_CALL_PARSER"))
            .collect();
        assert_eq!(about.len(), 1, "{about:?}");
        assert_eq!(about[0].verdict, Verdict::Fatal);
        assert!(
            about[0].text.ends_with("use hermes, the markup of this policy"),
            "{about:?}"
        );
        for model in ["m", "Qwen3.5-9B"] {
            let s = settings(&["TOOL_CALL_PARSER=glm45", &format!("MODEL_PATH=/m/{model}")]);
            let findings = crate::preflight::check(&s, None).findings;
            let about = findings
                .iter()
                .filter(|f| f.text.contains("TOOL_CALL_PARSER=glm45"));
            let advice: Vec<bool> = about.map(|f| f.text.contains("qwen3_coder")).collect();
            assert!(
                !advice.is_empty() && advice.iter().all(|same| *same),
                "{findings:?}"
            );
        }
        let mut unread = facts();
        unread.model = Err("cannot be read".into());
        let found = check(&s, Some(&unread));
        assert!(
            found[0].1.ends_with("use hermes or qwen3_coder or auto"),
            "{found:?}"
        );
    }
}
