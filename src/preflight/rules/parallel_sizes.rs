//! Ranks that share a sequence or the experts of a layer, against the policy.

use crate::{
    config::{values::ModelEngine, Settings},
    preflight::{fatal, ok, skip, Facts, Outcome, Rule, TRAINING},
};

pub(super) const RULE: Rule = Rule {
    id: "parallel-sizes",
    runs: TRAINING,
    what: "SP_SIZE divides the heads of the policy, and EP_SIZE its experts and the trainer ranks.",
    why: "A layer is shared by whole heads and whole experts; the trainer refuses others after the weights were loaded.",
    evidence: "By construction: key heads are copied where there are fewer than ranks, other heads and experts are not.",
    fix: "Choose SP_SIZE among the divisors of num_attention_heads (and linear_num_value_heads), EP_SIZE among those of num_experts.",
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
            let copied = |heads: u64| heads.is_multiple_of(sp) || sp.is_multiple_of(heads);
            let mut uneven: Vec<(&str, u64)> = Vec::new();
            uneven.extend((!shape.heads.is_multiple_of(sp)).then_some(("num_attention_heads", shape.heads)));
            uneven.extend((!copied(shape.kv_heads)).then_some(("num_key_value_heads", shape.kv_heads)));
            if let Some(delta) = &shape.delta {
                let values = delta.value_heads;
                uneven.extend((!values.is_multiple_of(sp)).then_some(("linear_num_value_heads", values)));
                uneven
                    .extend((!copied(delta.key_heads)).then_some(("linear_num_key_heads", delta.key_heads)));
            }
            found.extend(
                uneven
                    .iter()
                    .map(|(name, heads)| fatal(format!("SP_SIZE={sp} does not divide {name}={heads}"))),
            );
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
}
