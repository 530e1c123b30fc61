//! A fixed port that the kernel does not hand out itself.

use crate::{
    config::Settings,
    preflight::{ok, skip, warn, Facts, Outcome, Rule, EVERY_RUN},
};

pub(super) const RULE: Rule = Rule {
    id: "port-range",
    runs: EVERY_RUN,
    what: "A fixed PROXY_PORT lies outside the range of ephemeral ports.",
    why: "Any outgoing connection may get the port first; the restarted proxy then cannot bind it.",
    evidence: "The range is read from ip_local_port_range.",
    fix: "Choose a port below the range, or set PROXY_PORT=0.",
    check,
};

fn check(s: &Settings, facts: Option<&Facts>) -> Vec<Outcome> {
    let port = s.proxy.port;
    if port == 0 {
        return Vec::new();
    }
    vec![match facts.map(|f| f.ephemeral_ports) {
        None => skip(format!(
            "PROXY_PORT={port} against the ephemeral range: needs this machine"
        )),
        Some(Some((first, last))) if (first..=last).contains(&port) => warn(format!(
            "PROXY_PORT={port} lies in the ephemeral range {first}-{last}; choose one below {first}, or 0"
        )),
        Some(Some((first, last))) => ok(format!(
            "PROXY_PORT={port} is outside the ephemeral range {first}-{last}"
        )),
        Some(None) => skip(format!("PROXY_PORT={port}: the ephemeral range cannot be read")),
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
    fn inside_the_range_is_a_warning() {
        let verdict = |port: &str| check(&settings(&[port]), Some(&facts())).first().map(|(v, _)| *v);
        assert_eq!(verdict("PROXY_PORT=40000"), Some(Verdict::Warn));
        assert_eq!(verdict("PROXY_PORT=8011"), Some(Verdict::Ok));
        assert_eq!(verdict("PROXY_PORT=0"), None);
    }
}
