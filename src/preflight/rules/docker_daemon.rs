//! The Docker daemon answers.

use crate::{
    config::{values::Backend, Settings},
    preflight::{fatal, ok, skip, Facts, Outcome, Rule, EVERY_RUN},
};

pub(super) const RULE: Rule = Rule {
    id: "docker-daemon",
    runs: EVERY_RUN,
    what: "The daemon of DOCKER_HOST answers.",
    why: "Without it every trial fails in its set-up.",
    evidence: "The daemon is asked for its version.",
    fix: "Start the daemon, correct DOCKER_HOST, or join the group that may use its socket.",
    check,
};

fn check(s: &Settings, facts: Option<&Facts>) -> Vec<Outcome> {
    if s.run.backend != Backend::Docker {
        return Vec::new();
    }
    vec![match facts.and_then(|f| f.docker.as_ref()).map(|d| &d.version) {
        None => skip("Docker daemon: needs this machine"),
        Some(Ok(version)) => ok(format!("Docker {version} answers")),
        Some(Err(problem)) => fatal(format!("Docker daemon: {problem}")),
    }]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::preflight::{
        facts::DockerFacts,
        rules::testing::{facts, settings},
        Verdict,
    };

    #[test]
    fn a_daemon_that_does_not_answer_is_fatal() {
        let s = settings(&["BACKEND=docker"]);
        let with = |version| Facts {
            docker: Some(DockerFacts { version, image: None }),
            ..facts()
        };
        assert_eq!(check(&s, Some(&with(Ok("28".into()))))[0].0, Verdict::Ok);
        assert_eq!(check(&s, Some(&with(Err("gone".into()))))[0].0, Verdict::Fatal);
        assert_eq!(check(&s, None)[0].0, Verdict::Skip);
        assert!(check(&settings(&[]), Some(&facts())).is_empty());
    }
}
