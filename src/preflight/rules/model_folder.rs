//! The starting policy can be loaded.

use crate::{
    config::Settings,
    preflight::{fatal, ok, skip, Facts, Outcome, Rule, EVERY_RUN},
};

pub(super) const RULE: Rule = Rule {
    id: "model-folder",
    runs: EVERY_RUN,
    what: "MODEL_PATH is a complete folder: config.json can be read and no weight is missing.",
    why: "A missing or truncated file is otherwise found by every rank after minutes of loading.",
    evidence: "config.json and the header of every weight file are read.",
    fix: "Correct MODEL_PATH, fetch the checkpoint again, or make one with `legorl-rank init-policy`.",
    check,
};

fn check(s: &Settings, facts: Option<&Facts>) -> Vec<Outcome> {
    let Some(facts) = facts else {
        return vec![skip("MODEL_PATH: structure-only run")];
    };
    let path = s.model.path.display();
    let model = match &facts.model {
        Ok(model) => model,
        Err(problem) => return vec![fatal(format!("MODEL_PATH={path}: {problem}"))],
    };
    if let Some(Err(problem)) = &model.weights {
        return vec![fatal(format!("MODEL_PATH={path}: {problem}"))];
    }
    let parameters = model.shape.parameters() as f64;
    vec![ok(format!(
        "model: {} with {}",
        model.shape.model_type,
        if parameters < 1e9 {
            format!("{:.1} M parameters", parameters / 1e6)
        } else {
            format!("{:.1} B parameters", parameters / 1e9)
        }
    ))]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::preflight::{
        rules::testing::{facts, settings},
        Verdict,
    };

    #[test]
    fn a_missing_part_is_named() {
        let s = settings(&[]);
        assert_eq!(check(&s, Some(&facts()))[0].0, Verdict::Ok);
        let mut broken = facts();
        if let Ok(model) = &mut broken.model {
            model.weights = Some(Err("model.safetensors is truncated".into()));
        }
        let found = check(&s, Some(&broken));
        assert!(found[0].0 == Verdict::Fatal && found[0].1.contains("truncated"));
        broken.model = Err("no such folder".into());
        assert_eq!(check(&s, Some(&broken))[0].0, Verdict::Fatal);
        assert_eq!(check(&s, None)[0].0, Verdict::Skip);
    }
}
