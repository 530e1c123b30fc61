//! Sandboxes can start.

use crate::{
    config::{values::Backend, Settings},
    preflight::{fatal, ok, skip, Facts, Outcome, Rule, EVERY_RUN},
};

pub(super) const RULE: Rule = Rule {
    id: "sandbox",
    runs: EVERY_RUN,
    what: "A sandbox of the chosen backend starts on this machine.",
    why: "Without it every trial fails in its set-up, and the run trains on nothing.",
    evidence: "The static helper is looked for, and the smallest sandbox with all namespaces of a trial is started.",
    fix: "Install bubblewrap, and allow user namespaces (sysctl user.max_user_namespaces, kernel.unprivileged_userns_clone).",
    check,
};

fn check(s: &Settings, facts: Option<&Facts>) -> Vec<Outcome> {
    let Some(facts) = facts else {
        return vec![skip(format!("BACKEND={}: needs this machine", s.run.backend))];
    };
    match &facts.sandbox {
        Some(Ok(version)) => vec![ok(format!("sandboxes start ({version})"))],
        Some(Err(problem)) => vec![fatal(format!("BACKEND={}: {problem}", s.run.backend))],
        None if s.run.backend == Backend::Process => {
            vec![skip("BACKEND=process: not probed")]
        }
        None => Vec::new(),
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
    fn a_sandbox_that_does_not_start_is_fatal() {
        let broken = Facts {
            sandbox: Some(Err("bwrap: No permissions to create new namespace".into())),
            ..facts()
        };
        assert_eq!(check(&settings(&[]), Some(&broken))[0].0, Verdict::Fatal);
        assert_eq!(check(&settings(&[]), Some(&facts()))[0].0, Verdict::Ok);
        assert_eq!(check(&settings(&[]), None)[0].0, Verdict::Skip);
    }
}
