//! Routing replay and the kind of checkpoint.

use crate::{
    config::{values::ModelEngine, Settings},
    preflight::{fatal, ok, skip, warn, Facts, Outcome, Rule, TRAINING},
};

pub(super) const RULE: Rule = Rule {
    id: "routing-replay",
    runs: TRAINING,
    what: "ENABLE_R3 fits the checkpoint: on for a mixture of experts, off for a dense policy.",
    why: "Off, a mixture of experts trains with other experts than it sampled with; on, a dense policy has nothing to replay.",
    evidence: "Correlation of training and rollout log-probabilities: .9993 with replay, .9946 without, .7503 when it is shifted by a token.",
    fix: "Leave ENABLE_R3 unset, which goes by config.json, or correct it.",
    check,
};

fn check(s: &Settings, facts: Option<&Facts>) -> Vec<Outcome> {
    let on = s.plan.enable_r3;
    let mut found = Vec::new();
    let Some(facts) = facts else {
        found.push(skip("R3 against the checkpoint: needs config.json"));
        found.extend(advice(s, on == Some(true)));
        return found;
    };
    let is_moe = match &facts.model {
        Ok(model) => model.shape.is_moe(),
        Err(_) => {
            found.push(warn(format!(
                "ENABLE_R3={} could not be compared with the checkpoint, which cannot be read",
                on.map_or("unset".to_owned(), |on| on.to_string())
            )));
            return found;
        }
    };
    let kind = if is_moe { "a mixture of experts" } else { "dense" };
    found.push(match (on, is_moe) {
        (None, _) => ok(format!("R3 goes by the checkpoint, which is {kind}: {}", if is_moe { "on" } else { "off" })),
        (Some(true), true) | (Some(false), false) => ok(format!(
            "R3 {} suits the checkpoint, which is {kind}",
            if is_moe { "on" } else { "off" }
        )),
        (Some(true), false) => fatal(
            "ENABLE_R3=True, and the checkpoint is dense: it has no experts to replay; set False or leave it unset",
        ),
        (Some(false), true) => warn(
            "ENABLE_R3=False, and the checkpoint is a mixture of experts: training will choose its own experts",
        ),
    });
    found.extend(advice(s, on.unwrap_or(is_moe) && is_moe));
    found
}

fn advice(s: &Settings, on: bool) -> Option<Outcome> {
    (on && s.run.model_engine == ModelEngine::Veomni).then(|| {
        ok("R3 with veomni: look at the correlation of log-probabilities after step 1 (about 0.999)")
    })
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
    fn the_switch_is_compared_with_the_checkpoint() {
        let mut moe = facts();
        if let Ok(model) = &mut moe.model {
            model.shape = qwen35_35b();
        }
        let verdict = |set: &[&str], facts: &Facts| check(&settings(set), Some(facts))[0].0;
        assert_eq!(verdict(&["ENABLE_R3=True"], &facts()), Verdict::Fatal);
        assert_eq!(verdict(&["ENABLE_R3=False"], &facts()), Verdict::Ok);
        assert_eq!(verdict(&["ENABLE_R3=True"], &moe), Verdict::Ok);
        assert_eq!(verdict(&["ENABLE_R3=False"], &moe), Verdict::Warn);
        assert_eq!(
            verdict(&[], &facts()),
            Verdict::Ok,
            "unset goes by the checkpoint"
        );
        let unread = Facts {
            model: Err("gone".into()),
            ..facts()
        };
        assert_eq!(verdict(&["ENABLE_R3=True"], &unread), Verdict::Warn);
        assert_eq!(check(&settings(&[]), None)[0].0, Verdict::Skip);
    }
}
