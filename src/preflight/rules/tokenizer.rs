//! Tokenizer and chat template.

use crate::{
    config::Settings,
    preflight::{fatal, ok, skip, Facts, Outcome, Rule, EVERY_RUN},
};

pub(super) const RULE: Rule = Rule {
    id: "tokenizer",
    runs: EVERY_RUN,
    what: "The checkpoint's tokenizer and chat template are there, complete, and fit its embedding.",
    why: "A truncated tokenizer.json is otherwise found by the first model call, after weights and engines were loaded.",
    evidence: "tokenizer.json is parsed to its end, and the template renders a tool call.",
    fix: "Fetch the checkpoint's tokenizer files again; they belong to the weights.",
    check,
};

fn check(s: &Settings, facts: Option<&Facts>) -> Vec<Outcome> {
    let Some(facts) = facts else {
        return vec![skip("tokenizer and chat template: structure-only run")];
    };
    // Another rule has said that the folder cannot be read.
    let Ok(model) = &facts.model else {
        return Vec::new();
    };
    let path = s.model.path.display();
    let mut found = Vec::new();
    match &model.tokenizer {
        Err(problem) => found.push(fatal(format!("MODEL_PATH={path}: tokenizer: {problem}"))),
        Ok(ids) if *ids as u64 > model.shape.vocab => found.push(fatal(format!(
            "MODEL_PATH={path}: the tokenizer has {ids} ids and the embedding {} rows; they are of different checkpoints",
            model.shape.vocab
        ))),
        Ok(_) => {}
    }
    if let Err(problem) = &model.markup {
        found.push(fatal(format!("MODEL_PATH={path}: chat template: {problem}")));
    }
    if let (true, Ok(ids)) = (found.is_empty(), &model.tokenizer) {
        found.push(ok(format!(
            "tokenizer of {ids} ids, chat template renders tool calls"
        )));
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::preflight::{
        facts::ModelFacts,
        rules::testing::{facts, settings},
        Verdict,
    };

    #[test]
    fn each_defect_is_fatal() {
        let with = |spoil: fn(&mut ModelFacts)| {
            let mut facts = facts();
            if let Ok(model) = &mut facts.model {
                spoil(model);
            }
            check(&settings(&[]), Some(&facts))[0].0
        };
        assert_eq!(with(|_| ()), Verdict::Ok);
        assert_eq!(
            with(|m| m.tokenizer = Err("ends at byte 12".into())),
            Verdict::Fatal
        );
        assert_eq!(with(|m| m.tokenizer = Ok(1 << 20)), Verdict::Fatal);
        assert_eq!(
            with(|m| m.markup = Err("no chat template".into())),
            Verdict::Fatal
        );
        assert_eq!(check(&settings(&[]), None)[0].0, Verdict::Skip);
    }
}
