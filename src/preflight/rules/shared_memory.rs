//! Room in /dev/shm.

use crate::{
    config::Settings,
    plan::memory::size,
    preflight::{fatal, ok, warn, Facts, Outcome, Rule, EVERY_RUN},
};

pub(super) const RULE: Rule = Rule {
    id: "shared-memory",
    runs: EVERY_RUN,
    what: "/dev/shm has room for the messages between the ranks of a node.",
    why: "A rank that writes to a full /dev/shm dies of a bus error that names nothing.",
    evidence: "MPI and NCCL keep some megabytes there for every pair of ranks of a node.",
    fix: "Remove segments that dead processes left, or give the job or container a larger /dev/shm.",
    check,
};

/// What a pair of ranks keeps there: queues of the MPI library and a ring of NCCL, rounded up.
const PER_PAIR: u64 = 8 << 20;

fn check(s: &Settings, facts: Option<&Facts>) -> Vec<Outcome> {
    let Some(facts) = facts else {
        return Vec::new();
    };
    let ranks = u64::from(s.topology.ngpus_per_node.min(s.world_size()));
    let needed = ranks * (ranks - 1) / 2 * PER_PAIR;
    if needed == 0 {
        return Vec::new();
    }
    let Some(shm) = facts.shared_memory else {
        return vec![warn(format!(
            "/dev/shm is not mounted; {ranks} ranks of a node talk through it"
        ))];
    };
    let text = format!(
        "/dev/shm: {} of {} free, {} needed by {ranks} ranks",
        size(shm.free),
        size(shm.total),
        size(needed)
    );
    vec![if shm.free < needed {
        fatal(text)
    } else if shm.free < shm.total / 2 {
        warn(format!(
            "{text}; more than half is taken, perhaps by dead processes"
        ))
    } else {
        ok(text)
    }]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::preflight::{
        facts::SharedMemory,
        rules::testing::{facts, settings},
        Verdict,
    };

    #[test]
    fn a_full_one_is_fatal_and_a_used_one_a_warning() {
        let s = settings(&["NGPUS_PER_NODE=8"]);
        let with = |total: u64, free: u64| Facts {
            shared_memory: Some(SharedMemory { total, free }),
            ..facts()
        };
        assert_eq!(check(&s, Some(&with(64 << 20, 64 << 20)))[0].0, Verdict::Fatal);
        assert_eq!(check(&s, Some(&with(64 << 30, 1 << 30)))[0].0, Verdict::Warn);
        assert_eq!(check(&s, Some(&with(64 << 30, 60 << 30)))[0].0, Verdict::Ok);
        assert!(
            check(&settings(&[]), Some(&facts())).is_empty(),
            "one rank talks to nobody"
        );
    }
}
