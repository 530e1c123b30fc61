//! Nodes and ranks.

use crate::{
    config::{values::TrainingMode, Settings},
    preflight::{fatal, ok, warn, Facts, Outcome, Rule, TRAINING},
};

pub(super) const RULE: Rule = Rule {
    id: "topology",
    runs: TRAINING,
    what: "NNODES is the sum of train and rollout nodes, and SP_SIZE divides the trainer ranks.",
    why: "Ranks without a role wait for each other until a deadline ends the run.",
    evidence: "By construction: every rank of the world gets its role from these numbers.",
    fix: "Correct NNODES, N_NODES_TRAIN, N_NODES_ROLLOUT or SP_SIZE.",
    check,
};

fn check(s: &Settings, _: Option<&Facts>) -> Vec<Outcome> {
    let t = &s.topology;
    let mut found = Vec::new();
    let sum = u64::from(t.n_nodes_train) + u64::from(t.n_nodes_rollout);
    if sum != u64::from(t.nnodes) {
        found.push(fatal(format!(
            "NNODES={} but N_NODES_TRAIN={} + N_NODES_ROLLOUT={} = {sum}",
            t.nnodes, t.n_nodes_train, t.n_nodes_rollout,
        )));
    }
    match (s.run.training_mode, t.n_nodes_rollout) {
        (TrainingMode::Sync, n) if n > 0 && found.is_empty() => found.push(warn(format!(
            "N_NODES_ROLLOUT={n} has no effect under TRAINING_MODE=sync: one pool of {} nodes trains and generates",
            t.nnodes
        ))),
        (TrainingMode::Async, 0) => found.push(fatal(
            "N_NODES_ROLLOUT=0 under TRAINING_MODE=async: nothing would generate; set at least 1",
        )),
        _ => {}
    }
    let ranks = s.train_ranks();
    if !ranks.is_multiple_of(t.sp_size) {
        found.push(fatal(format!(
            "SP_SIZE={} does not divide the {ranks} trainer ranks",
            t.sp_size
        )));
    } else if found.is_empty() {
        found.push(ok(format!(
            "topology consistent: NNODES={} = train {} + rollout {}",
            t.nnodes, t.n_nodes_train, t.n_nodes_rollout
        )));
        found.push(ok(format!(
            "device mesh: dp={} (trainer ranks {ranks} / sp {})",
            ranks / t.sp_size,
            t.sp_size
        )));
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::preflight::{rules::testing::settings, Verdict};

    fn verdict(set: &[&str]) -> Verdict {
        check(&settings(set), None)[0].0
    }

    #[test]
    fn sums_pools_and_divisors() {
        assert_eq!(verdict(&[]), Verdict::Ok);
        assert_eq!(verdict(&["NNODES=3", "N_NODES_TRAIN=1"]), Verdict::Fatal);
        assert_eq!(
            verdict(&["NNODES=2", "N_NODES_ROLLOUT=1"]),
            Verdict::Warn,
            "sync has one pool"
        );
        assert_eq!(
            verdict(&["NNODES=2", "N_NODES_ROLLOUT=1", "TRAINING_MODE=async"]),
            Verdict::Ok
        );
        assert_eq!(verdict(&["TRAINING_MODE=async"]), Verdict::Fatal);
        assert_eq!(verdict(&["NGPUS_PER_NODE=8", "SP_SIZE=3"]), Verdict::Fatal);
        assert_eq!(verdict(&["NGPUS_PER_NODE=8", "SP_SIZE=4"]), Verdict::Ok);
    }
}
