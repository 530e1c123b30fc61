//! Ranks that were started against ranks that are needed.

use crate::{
    config::Settings,
    preflight::{fatal, ok, Facts, Outcome, Rule, EVERY_RUN},
};

pub(super) const RULE: Rule = Rule {
    id: "world-size",
    runs: EVERY_RUN,
    what: "As many ranks were started as the topology needs.",
    why: "With fewer ranks a role is missing; with more, some have none.",
    evidence: "By construction: rank numbers are dealt out by NNODES x NGPUS_PER_NODE.",
    fix: "Start with `mpirun -n N` or `srun -n N`, or correct NNODES and NGPUS_PER_NODE.",
    check,
};

fn check(s: &Settings, facts: Option<&Facts>) -> Vec<Outcome> {
    let Some(started) = facts.and_then(|f| f.world_size) else {
        return Vec::new();
    };
    let needed = s.world_size();
    if started == needed {
        return vec![ok(format!("{started} of {needed} ranks started"))];
    }
    let how = if started == 1 {
        format!("; start it with `mpirun -n {needed}` or `srun -n {needed}`")
    } else {
        String::new()
    };
    vec![fatal(format!(
        "{started} ranks were started and NNODES={} x NGPUS_PER_NODE={} needs {needed}{how}",
        s.topology.nnodes, s.topology.ngpus_per_node
    ))]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::preflight::{
        rules::testing::{facts, settings},
        Verdict,
    };

    #[test]
    fn a_launch_needs_the_right_number_of_ranks() {
        let launch = |n| Facts {
            world_size: Some(n),
            ..facts()
        };
        assert_eq!(check(&settings(&[]), Some(&launch(1)))[0].0, Verdict::Ok);
        assert_eq!(
            check(&settings(&["NGPUS_PER_NODE=2"]), Some(&launch(1)))[0].0,
            Verdict::Fatal
        );
        assert!(
            check(&settings(&["NGPUS_PER_NODE=2"]), Some(&facts())).is_empty(),
            "nothing is launched"
        );
    }
}
