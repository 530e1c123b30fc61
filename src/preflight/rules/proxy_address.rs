//! Sandboxes can reach the proxy.

use crate::{
    config::{values::Backend, Settings},
    preflight::{fatal, ok, skip, warn, Facts, Outcome, Rule, EVERY_RUN},
};
use std::net::IpAddr;

pub(super) const RULE: Rule = Rule {
    id: "proxy-address",
    runs: EVERY_RUN,
    what: "The proxy listens where remote sandboxes can reach it.",
    why: "In a pod or a container, 127.0.0.1 is the pod or the container itself: every model call would be refused.",
    evidence: "By definition of the loopback address.",
    fix: "Leave PROXY_HOST unset, or set it to an address of this machine that the sandboxes reach.",
    check,
};

fn check(s: &Settings, facts: Option<&Facts>) -> Vec<Outcome> {
    if !matches!(s.run.backend, Backend::K8s | Backend::Docker) {
        return Vec::new();
    }
    let host = s.proxy.host.as_str();
    let address = host.parse::<IpAddr>().ok();
    if host == "localhost" || address.is_some_and(|a| a.is_loopback()) {
        return vec![fatal(format!(
            "PROXY_HOST={host} under BACKEND={}: sandboxes would call themselves; leave it unset",
            s.run.backend
        ))];
    }
    let everywhere = address.is_some_and(|a| a.is_unspecified());
    vec![match facts.map(|f| f.address) {
        None => skip(format!(
            "proxy address for sandboxes (PROXY_HOST={host}): needs this machine"
        )),
        Some(Some(own)) if everywhere => ok(format!("sandboxes reach the proxy at {own}")),
        Some(None) if everywhere => {
            warn("this machine has no address but loopback: sandboxes elsewhere cannot reach the proxy")
        }
        Some(_) => ok(format!("sandboxes reach the proxy at {host}")),
    }]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::preflight::{
        rules::testing::{facts, settings},
        Verdict,
    };

    #[test]
    fn loopback_serves_only_this_machine() {
        let verdict = |set: &[&str]| check(&settings(set), Some(&facts())).first().map(|(v, _)| *v);
        assert_eq!(
            verdict(&["BACKEND=k8s", "PROXY_HOST=127.0.0.1"]),
            Some(Verdict::Fatal)
        );
        assert_eq!(
            verdict(&["BACKEND=docker", "PROXY_HOST=localhost"]),
            Some(Verdict::Fatal)
        );
        assert_eq!(verdict(&["BACKEND=k8s"]), Some(Verdict::Ok));
        assert_eq!(
            verdict(&["BACKEND=k8s", "PROXY_HOST=10.0.0.7"]),
            Some(Verdict::Ok)
        );
        assert_eq!(verdict(&["PROXY_HOST=127.0.0.1"]), None);
        let alone = Facts {
            address: None,
            ..facts()
        };
        assert_eq!(
            check(&settings(&["BACKEND=k8s"]), Some(&alone))[0].0,
            Verdict::Warn
        );
    }
}
