//! The proxy's port is free.

use crate::{
    config::Settings,
    preflight::{fatal, ok, skip, Facts, Outcome, Rule, EVERY_RUN},
};

pub(super) const RULE: Rule = Rule {
    id: "proxy-port",
    runs: EVERY_RUN,
    what: "A fixed PROXY_PORT can be bound on the head's machine.",
    why: "Another run that holds the port would answer this run's agents.",
    evidence: "The port is bound for a moment and given back.",
    fix: "Set PROXY_PORT=0, which takes any free port, or end the process that holds it.",
    check,
};

fn check(s: &Settings, facts: Option<&Facts>) -> Vec<Outcome> {
    let port = s.proxy.port;
    match facts.map(|f| &f.proxy_port) {
        Some(Some(Ok(()))) => vec![ok(format!("PROXY_PORT={port} is free"))],
        Some(Some(Err(problem))) => vec![fatal(format!("PROXY_PORT={port} cannot be used: {problem}"))],
        None if port != 0 => vec![skip(format!("PROXY_PORT={port}: needs this machine"))],
        _ => Vec::new(),
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
    fn a_port_in_use_is_fatal() {
        let used = Facts {
            proxy_port: Some(Err("127.0.0.1:8000: Address already in use".into())),
            ..facts()
        };
        assert_eq!(
            check(&settings(&["PROXY_PORT=8000"]), Some(&used))[0].0,
            Verdict::Fatal
        );
        assert!(check(&settings(&[]), Some(&facts())).is_empty());
    }
}
