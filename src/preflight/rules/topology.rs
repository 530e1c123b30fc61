//! Nodes and ranks.

use crate::{
    config::{values::TrainingMode, Settings},
    preflight::{Facts, Outcome, Rule, Verdict},
};

pub(super) const RULE: Rule = Rule {
    id: "topology",
    what: "NNODES is the sum of train and rollout nodes, and SP_SIZE divides the trainer ranks.",
    why: "Ranks without a role wait for each other until a deadline ends the run.",
    evidence: "By construction: every rank of the world gets its role from these numbers.",
    fix: "Correct NNODES, N_NODES_TRAIN, N_NODES_ROLLOUT or SP_SIZE.",
    check,
};

fn check(s: &Settings, _: Option<&Facts>) -> Vec<Outcome> {
    let t = &s.topology;
    let mut found = Vec::new();
    if u64::from(t.n_nodes_train) + u64::from(t.n_nodes_rollout) != u64::from(t.nnodes) {
        found.push((
            Verdict::Fatal,
            format!(
                "NNODES={} but N_NODES_TRAIN={} + N_NODES_ROLLOUT={} = {}",
                t.nnodes,
                t.n_nodes_train,
                t.n_nodes_rollout,
                u64::from(t.n_nodes_train) + u64::from(t.n_nodes_rollout)
            ),
        ));
    }
    match (s.run.training_mode, t.n_nodes_rollout) {
        (TrainingMode::Sync, n) if n > 0 => found.push((
            Verdict::Fatal,
            format!("N_NODES_ROLLOUT={n} under TRAINING_MODE=sync: one pool does both; set it to 0"),
        )),
        (TrainingMode::Async, 0) => found.push((
            Verdict::Fatal,
            "N_NODES_ROLLOUT=0 under TRAINING_MODE=async: nothing would generate; set at least 1".into(),
        )),
        _ => {}
    }
    let ranks = s.train_ranks();
    if !ranks.is_multiple_of(t.sp_size) {
        found.push((
            Verdict::Fatal,
            format!("SP_SIZE={} does not divide the {ranks} trainer ranks", t.sp_size),
        ));
    }
    if found.is_empty() {
        found.push((
            Verdict::Ok,
            format!(
                "topology consistent: NNODES={} = train {} + rollout {}, dp={} (train ranks {ranks} / sp {})",
                t.nnodes,
                t.n_nodes_train,
                t.n_nodes_rollout,
                ranks / t.sp_size,
                t.sp_size
            ),
        ));
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::preflight::rules::testing::settings;

    fn verdict(set: &[&str]) -> Verdict {
        check(&settings(set), None)[0].0
    }

    #[test]
    fn sums_pools_and_divisors() {
        assert_eq!(verdict(&[]), Verdict::Ok);
        assert_eq!(verdict(&["NNODES=3", "N_NODES_TRAIN=1"]), Verdict::Fatal);
        assert_eq!(
            verdict(&["NNODES=2", "N_NODES_ROLLOUT=1"]),
            Verdict::Fatal,
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
