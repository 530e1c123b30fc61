//! Memory that may be locked.

use crate::{
    config::Settings,
    plan::memory::size,
    preflight::{ok, warn, Facts, Outcome, Rule, TRAINING},
};

pub(super) const RULE: Rule = Rule {
    id: "locked-memory",
    runs: TRAINING,
    what: "Ranks of several nodes may lock memory without a limit.",
    why: "InfiniBand registers its buffers with the card, which counts as locking; at the limit MPI and NCCL fail or fall back to TCP.",
    evidence: "The limit that Slurm hands to steps is often that of the login shell (PropagateResourceLimits).",
    fix: "Set `ulimit -l unlimited`, and PropagateResourceLimitsExcept=MEMLOCK in slurm.conf.",
    check,
};

/// Below this, registration of usual message buffers fails.
const SMALL: u64 = 64 << 20;

fn check(s: &Settings, facts: Option<&Facts>) -> Vec<Outcome> {
    let Some(facts) = facts.filter(|_| s.topology.nnodes > 1) else {
        return Vec::new();
    };
    let limit = facts.locked_memory.soft;
    vec![if limit == u64::MAX {
        ok("locked memory: no limit")
    } else if limit < SMALL {
        warn(format!(
            "locked memory: limit {}; with InfiniBand run `ulimit -l unlimited` first",
            size(limit)
        ))
    } else {
        ok(format!("locked memory: limit {}", size(limit)))
    }]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::preflight::{
        facts::Limit,
        rules::testing::{facts, settings},
        Verdict,
    };

    #[test]
    fn only_runs_over_several_nodes_need_it() {
        let with = |soft| Facts {
            locked_memory: Limit { soft, hard: soft },
            ..facts()
        };
        let many = settings(&["NNODES=2"]);
        assert_eq!(check(&many, Some(&with(64 << 10)))[0].0, Verdict::Warn);
        assert_eq!(check(&many, Some(&with(u64::MAX)))[0].0, Verdict::Ok);
        assert!(check(&settings(&[]), Some(&with(0))).is_empty());
    }
}
