//! `CHANGEME` left in.

use crate::{
    config::Settings,
    preflight::{Facts, Outcome, Rule, Verdict, EVERY_RUN},
};

pub(super) const RULE: Rule = Rule {
    id: "placeholder",
    runs: EVERY_RUN,
    what: "No value is still the placeholder CHANGEME.",
    why: "A placeholder is a path that does not exist, found out minutes later.",
    evidence: "By definition: templates mark the values that only the user knows with it.",
    fix: "Set the variable in the run config.",
    check,
};

fn check(s: &Settings, facts: Option<&Facts>) -> Vec<Outcome> {
    let val = s.data.val_files.as_ref();
    let paths = [
        ("MODEL_PATH", Some(&s.model.path)),
        ("TRAIN_FILES", Some(&s.data.train_files)),
        ("VAL_FILES", val),
        ("K8S_KUBECONFIG", s.kubernetes.kubeconfig.as_ref()),
    ];
    let is_left = |text: &str| text.contains("CHANGEME");
    let mut names: Vec<&str> = paths
        .into_iter()
        .filter(|(_, path)| path.is_some_and(|p| is_left(&p.to_string_lossy())))
        .map(|(name, _)| name)
        .collect();
    for (name, text) in [
        ("PROJECT_NAME", &s.run.project_name),
        ("EXP_NAME", &s.run.exp_name),
    ] {
        if is_left(text) {
            names.push(name);
        }
    }
    if names.is_empty() {
        return Vec::new();
    }
    // Before the inputs exist the structure can be checked all the same.
    let verdict = if facts.is_some() {
        Verdict::Fatal
    } else {
        Verdict::Warn
    };
    vec![(
        verdict,
        format!("{} still CHANGEME; set a real value", names.join(", ")),
    )]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::preflight::rules::testing::{facts, settings};

    #[test]
    fn a_placeholder_stops_the_launch_and_not_the_structure_check() {
        let s = settings(&["MODEL_PATH=CHANGEME"]);
        assert_eq!(check(&s, None)[0].0, Verdict::Warn);
        assert_eq!(check(&s, Some(&facts()))[0].0, Verdict::Fatal);
        assert!(check(&settings(&[]), Some(&facts())).is_empty());
    }
}
