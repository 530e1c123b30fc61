//! Scaffolds that were tried with Docker.

use crate::{
    config::{
        values::{Backend, Scaffold},
        Settings,
    },
    preflight::{ok, warn, Facts, Outcome, Rule, EVERY_RUN},
};

pub(super) const RULE: Rule = Rule {
    id: "docker-scaffold",
    runs: EVERY_RUN,
    what: "SCAFFOLD is one that was tried with BACKEND=docker.",
    why: "Claude Code and OpenCode come from a runtime image that Kubernetes mounts; with Docker it must be unpacked first.",
    evidence: "The original was run with a Docker daemon for OpenHands alone; this version does not launch BACKEND=docker.",
    fix: "Use BACKEND=process for cc and oc.",
    check,
};

fn check(s: &Settings, _: Option<&Facts>) -> Vec<Outcome> {
    if s.run.backend != Backend::Docker {
        return Vec::new();
    }
    let scaffold = s.run.scaffold;
    vec![match scaffold {
        Scaffold::Cc | Scaffold::Oc => warn(format!(
            "SCAFFOLD={scaffold} was not tried with BACKEND=docker; use BACKEND=process, which runs it in this version"
        )),
        _ => ok(format!("backend=docker with {scaffold}")),
    }]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::preflight::{rules::testing::settings, Verdict};

    #[test]
    fn mounted_agents_are_a_warning() {
        assert!(check(&settings(&["SCAFFOLD=cc"]), None).is_empty());
        let found = check(&settings(&["BACKEND=docker", "SCAFFOLD=cc"]), None);
        assert_eq!(found[0].0, Verdict::Warn);
        assert!(
            found[0].1.contains("BACKEND=process") && !found[0].1.contains("k8s"),
            "what is advised is in this version: {found:?}"
        );
        assert_eq!(
            check(&settings(&["BACKEND=docker", "SCAFFOLD=oh"]), None)[0].0,
            Verdict::Ok
        );
    }
}
