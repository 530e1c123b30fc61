//! Enough file descriptors.

use crate::{
    config::Settings,
    preflight::{facts::Limit, fatal, ok, warn, Facts, Outcome, Rule, EVERY_RUN},
};

pub(super) const RULE: Rule = Rule {
    id: "open-files",
    runs: EVERY_RUN,
    what: "The limit of open files holds for the trials in flight.",
    why: "At the limit, sandboxes, sockets and shards fail in turn, and every failure looks different.",
    evidence: "Counted with an allowance: 16 a trial for the pipes and sockets of its sandbox, log files and requests.",
    fix: "Raise it with `ulimit -n`, or lower N_CONCURRENT.",
    check,
};

const PER_TRIAL: u64 = 16;
const OTHER: u64 = 256;

fn check(s: &Settings, facts: Option<&Facts>) -> Vec<Outcome> {
    let Some(facts) = facts else {
        return Vec::new();
    };
    let Limit { soft, hard } = facts.open_files;
    let needed = u64::from(s.rollout.n_concurrent) * PER_TRIAL + OTHER;
    vec![if soft >= needed {
        ok(format!("open files: limit {soft}, {needed} needed"))
    } else if hard >= needed {
        warn(format!(
            "open files: limit {soft}, N_CONCURRENT={} needs {needed}; run `ulimit -n {needed}`",
            s.rollout.n_concurrent
        ))
    } else {
        fatal(format!(
            "open files: hard limit {hard}, N_CONCURRENT={} needs {needed}",
            s.rollout.n_concurrent
        ))
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
    fn soft_and_hard_limits_differ() {
        let s = settings(&["N_CONCURRENT=100"]);
        let with = |(soft, hard)| {
            let facts = Facts {
                open_files: Limit { soft, hard },
                ..facts()
            };
            check(&s, Some(&facts))[0].0
        };
        assert_eq!(with((4096, 4096)), Verdict::Ok);
        assert_eq!(with((1024, 4096)), Verdict::Warn);
        assert_eq!(with((1024, 1024)), Verdict::Fatal);
    }
}
