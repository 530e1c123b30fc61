//! The starting policy can be loaded.

use crate::{
    config::Settings,
    preflight::{Facts, Outcome, Rule, Verdict},
};

pub(super) const RULE: Rule = Rule {
    id: "model-folder",
    what: "MODEL_PATH is a complete folder of a supported architecture.",
    why: "A missing or truncated file is otherwise found by every rank after minutes of loading.",
    evidence: "config.json, tokenizer.json and the header of every weight file are read.",
    fix: "Correct MODEL_PATH, fetch the checkpoint again, or make one with `legorl-rank init-policy`.",
    check,
};

fn check(s: &Settings, facts: Option<&Facts>) -> Vec<Outcome> {
    let Some(facts) = facts else {
        return vec![(Verdict::Skip, "MODEL_PATH: structure-only run".into())];
    };
    let path = s.model.path.display();
    let model = match &facts.model {
        Ok(model) => model,
        Err(problem) => return vec![(Verdict::Fatal, format!("MODEL_PATH={path}: {problem}"))],
    };
    let mut found = Vec::new();
    if let Err(problem) = &model.weights {
        found.push((Verdict::Fatal, format!("MODEL_PATH={path}: {problem}")));
    }
    for file in &model.missing {
        found.push((Verdict::Fatal, format!("MODEL_PATH={path} has no {file}")));
    }
    if found.is_empty() {
        found.push((
            Verdict::Ok,
            format!(
                "model: {} with {:.1} M parameters",
                model.model_type,
                model.num_parameters as f64 / 1e6
            ),
        ));
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::preflight::rules::testing::{facts, settings};

    #[test]
    fn a_missing_part_is_named() {
        let s = settings(&[]);
        assert_eq!(check(&s, Some(&facts()))[0].0, Verdict::Ok);
        let mut broken = facts();
        if let Ok(model) = &mut broken.model {
            model.missing = vec!["tokenizer.json"];
            model.weights = Err("model.safetensors is truncated".into());
        }
        let found = check(&s, Some(&broken));
        assert_eq!(found.len(), 2);
        assert!(found[0].1.contains("truncated") && found[1].1.contains("tokenizer.json"));
    }
}
