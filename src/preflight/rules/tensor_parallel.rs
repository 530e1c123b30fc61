//! Ranks that share a replica's heads.

use crate::{
    config::Settings,
    preflight::{fatal, ok, skip, Facts, Outcome, Rule, EVERY_RUN},
};

pub(super) const RULE: Rule = Rule {
    id: "tensor-parallel",
    runs: EVERY_RUN,
    what: "GEN_TP divides the ranks of a node, the attention heads and the key-value heads, or is a multiple of the latter.",
    why: "An engine that cannot cut its heads evenly refuses to start, after the weights were loaded.",
    evidence: "By construction: a head is not cut, and key-value heads are copied only in whole.",
    fix: "Choose GEN_TP among the divisors of num_key_value_heads.",
    check,
};

fn check(s: &Settings, facts: Option<&Facts>) -> Vec<Outcome> {
    let ranks = u64::from(s.plan.gen_tp);
    let per_node = u64::from(s.topology.ngpus_per_node);
    if ranks == 1 {
        return Vec::new();
    }
    let mut found = Vec::new();
    if !per_node.is_multiple_of(ranks) && !ranks.is_multiple_of(per_node) {
        found.push(fatal(format!(
            "GEN_TP={ranks} does not fit NGPUS_PER_NODE={per_node}"
        )));
    }
    match facts.map(|f| &f.model) {
        None => found.push(skip(format!(
            "GEN_TP={ranks} against the key-value heads: needs config.json"
        ))),
        Some(Err(_)) => found.push(skip(format!("GEN_TP={ranks}: the checkpoint cannot be read"))),
        Some(Ok(model)) => {
            let (heads, kv) = (model.shape.heads, model.shape.kv_heads);
            let even = heads.is_multiple_of(ranks) && (kv.is_multiple_of(ranks) || ranks.is_multiple_of(kv));
            found.push(if even {
                ok(format!(
                    "GEN_TP={ranks} divides {heads} heads and {kv} key-value heads"
                ))
            } else {
                fatal(format!(
                    "GEN_TP={ranks} does not divide num_attention_heads={heads} and num_key_value_heads={kv}"
                ))
            });
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::preflight::{
        rules::testing::{facts, settings},
        Verdict,
    };

    #[test]
    fn heads_are_not_cut() {
        // 16 heads, 8 key-value heads.
        let worst = |set: &[&str]| {
            let set = [&["NGPUS_PER_NODE=8"], set].concat();
            check(&settings(&set), Some(&facts()))
                .into_iter()
                .map(|(v, _)| v)
                .max()
        };
        assert_eq!(worst(&["GEN_TP=4"]), Some(Verdict::Ok));
        assert_eq!(worst(&["GEN_TP=3"]), Some(Verdict::Fatal));
        assert_eq!(
            worst(&["GEN_TP=16"]),
            Some(Verdict::Ok),
            "two nodes, one copy of each head"
        );
        assert_eq!(
            worst(&["GEN_TP=32"]),
            Some(Verdict::Fatal),
            "more ranks than heads"
        );
        assert_eq!(worst(&[]), None);
    }
}
