//! Ranks that share a sequence or the experts of a layer, against the policy.

use crate::{
    config::{values::ModelEngine, Settings},
    plan::shape::ModelShape,
    preflight::{fatal, ok, skip, Facts, Outcome, Rule, TRAINING},
};

pub(super) const RULE: Rule = Rule {
    id: "parallel-sizes",
    runs: TRAINING,
    what: "SP_SIZE divides the query heads of the policy (and a delta net's value heads), divides its key-value heads (and a delta net's key heads) or is a multiple of them; EP_SIZE divides its experts and the trainer ranks.",
    why: "A layer is shared by whole heads and whole experts; the trainer refuses others after the weights were loaded.",
    evidence: "By construction: key heads are copied where there are fewer than ranks, other heads and experts are not.",
    fix: "Choose SP_SIZE among the divisors of num_attention_heads (and linear_num_value_heads) that divide num_key_value_heads (and linear_num_key_heads) or are multiples of it, EP_SIZE among those of num_experts.",
    check,
};

fn check(s: &Settings, facts: Option<&Facts>) -> Vec<Outcome> {
    let (sp, ep) = (u64::from(s.topology.sp_size), u64::from(s.plan.ep_size));
    if sp == 1 && ep == 1 {
        return Vec::new();
    }
    let mut found = Vec::new();
    if ep > 1 && s.run.model_engine != ModelEngine::Veomni {
        found.push(fatal(format!(
            "EP_SIZE={ep} with MODEL_ENGINE={}; only veomni shares experts: set MODEL_ENGINE=veomni or EP_SIZE=1",
            s.run.model_engine
        )));
    }
    let ranks = u64::from(s.train_ranks());
    if !ranks.is_multiple_of(ep) {
        found.push(fatal(format!(
            "EP_SIZE={ep} does not divide the {ranks} trainer ranks"
        )));
    }
    match facts.map(|f| &f.model) {
        None => found.push(skip(format!(
            "SP_SIZE={sp} and EP_SIZE={ep} against heads and experts: needs config.json"
        ))),
        Some(Err(_)) => found.push(skip(format!(
            "SP_SIZE={sp} and EP_SIZE={ep}: the checkpoint cannot be read"
        ))),
        Some(Ok(model)) => {
            let before = found.len();
            let shape = &model.shape;
            let copied = |heads| copied(heads, sp);
            let mut uneven: Vec<(&str, u64)> = Vec::new();
            uneven.extend((!shape.heads.is_multiple_of(sp)).then_some(("num_attention_heads", shape.heads)));
            uneven.extend((!copied(shape.kv_heads)).then_some(("num_key_value_heads", shape.kv_heads)));
            if let Some(delta) = &shape.delta {
                let values = delta.value_heads;
                uneven.extend((!values.is_multiple_of(sp)).then_some(("linear_num_value_heads", values)));
                uneven
                    .extend((!copied(delta.key_heads)).then_some(("linear_num_key_heads", delta.key_heads)));
            }
            found.extend(uneven.iter().map(|(name, heads)| {
                let nor_multiple = match *name {
                    "num_key_value_heads" | "linear_num_key_heads" => " and is no multiple of it",
                    _ => "",
                };
                let sizes: Vec<String> = shared_by(shape).iter().map(u64::to_string).collect();
                fatal(format!(
                    "SP_SIZE={sp} does not divide {name}={heads}{nor_multiple}; this policy can be shared by {}",
                    sizes.join(", ")
                ))
            }));
            match &shape.experts {
                Some(experts) if !experts.count.is_multiple_of(ep) => found.push(fatal(format!(
                    "EP_SIZE={ep} does not divide num_experts={}",
                    experts.count
                ))),
                None if ep > 1 => found.push(fatal(format!(
                    "EP_SIZE={ep}: MODEL_PATH has no experts; set EP_SIZE=1"
                ))),
                _ => {}
            }
            if found.len() == before {
                found.push(ok(format!(
                    "SP_SIZE={sp} shares the heads and EP_SIZE={ep} the experts evenly"
                )));
            }
        }
    }
    found
}

/// Heads that ranks divide, or of which each rank has a copy of one.
fn copied(heads: u64, ranks: u64) -> bool {
    heads.is_multiple_of(ranks) || ranks.is_multiple_of(heads.max(1))
}

/// Every SP_SIZE that the heads of a policy allow.
fn shared_by(shape: &ModelShape) -> Vec<u64> {
    let delta = |ranks: u64| {
        shape
            .delta
            .is_none_or(|d| d.value_heads.is_multiple_of(ranks) && copied(d.key_heads, ranks))
    };
    (1..=shape.heads)
        .filter(|&ranks| shape.heads.is_multiple_of(ranks) && copied(shape.kv_heads, ranks) && delta(ranks))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        plan::shape::tests::qwen35_35b,
        preflight::{
            rules::testing::{facts, settings},
            Verdict,
        },
    };

    #[test]
    fn heads_and_experts_are_shared_whole() {
        let mut large = facts();
        if let Ok(model) = &mut large.model {
            model.shape = qwen35_35b();
        }
        // 16 heads, 2 key-value heads, 16 and 32 delta-net heads, 256 experts.
        let worst = |set: &[&str]| {
            let set = [&["NGPUS_PER_NODE=48", "MODEL_ENGINE=veomni"], set].concat();
            let found = check(&settings(&set), Some(&large));
            found.into_iter().map(|(v, _)| v).max()
        };
        assert_eq!(worst(&[]), None);
        assert_eq!(worst(&["SP_SIZE=8", "EP_SIZE=16"]), Some(Verdict::Ok));
        assert_eq!(worst(&["SP_SIZE=3"]), Some(Verdict::Fatal));
        assert_eq!(worst(&["EP_SIZE=3"]), Some(Verdict::Fatal));
        assert_eq!(worst(&["EP_SIZE=32"]), Some(Verdict::Fatal), "not of the ranks");
        assert_eq!(worst(&["EP_SIZE=2", "MODEL_ENGINE=fsdp"]), Some(Verdict::Fatal));
        let dense = ["NGPUS_PER_NODE=8", "MODEL_ENGINE=veomni", "EP_SIZE=2"];
        let found = check(&settings(&dense), Some(&facts()));
        assert!(
            found[0].0 == Verdict::Fatal && found[0].1.contains("no experts"),
            "{found:?}"
        );
    }

    #[test]
    fn key_value_heads_are_divided_or_copied_and_the_finding_says_both() {
        let mut facts = facts();
        if let Ok(model) = &mut facts.model {
            (model.shape.heads, model.shape.kv_heads) = (24, 4);
        }
        let found = check(&settings(&["NGPUS_PER_NODE=6", "SP_SIZE=6"]), Some(&facts));
        assert_eq!(found[0].0, Verdict::Fatal);
        assert!(
            found[0]
                .1
                .contains("SP_SIZE=6 does not divide num_key_value_heads=4 and is no multiple of it")
                && found[0].1.ends_with("can be shared by 1, 2, 4, 8, 12, 24"),
            "{found:?}"
        );
        for sp in ["SP_SIZE=2", "SP_SIZE=8"] {
            let found = check(&settings(&["NGPUS_PER_NODE=8", sp]), Some(&facts));
            assert_eq!(found[0].0, Verdict::Ok, "{sp}");
        }
    }
}
