//! Checkpoints fit on their file system.

use crate::{
    config::{values::AdvEstimator, Settings},
    plan::memory::size,
    preflight::{fatal, ok, skip, warn, Facts, Outcome, Rule, TRAINING},
};

pub(super) const RULE: Rule = Rule {
    id: "checkpoint-space",
    runs: TRAINING,
    what: "The file system of CKPTS_DIR holds the checkpoints of the run.",
    why: "A full disk in the middle of a run costs every step since the last checkpoint.",
    evidence:
        "A checkpoint holds 16 bytes a parameter: f32 weights, two f32 moments, an export of up to 4 bytes.",
    fix: "Free space, set MAX_CKPT_TO_KEEP, or choose another CKPTS_DIR.",
    check,
};

/// Weights, two moments and the export.
const BYTES_PER_PARAMETER: u64 = 16;

/// The critic's weights and two moments; it is not exported.
const CRITIC_BYTES_PER_PARAMETER: u64 = 12;

/// Bytes of one checkpoint of the policy, and of its critic.
pub(super) fn checkpoint_bytes(s: &Settings, facts: &Facts) -> Option<u64> {
    let critic = s.algorithm.adv_estimator == AdvEstimator::Gae;
    let bytes = BYTES_PER_PARAMETER + if critic { CRITIC_BYTES_PER_PARAMETER } else { 0 };
    facts.model.as_ref().ok().map(|m| m.shape.parameters() * bytes)
}

/// Checkpoints that exist at the same time: one more than is kept, since nothing is deleted before the next
/// one is complete; all of them where all are kept.
fn copies(s: &Settings, facts: &Facts) -> u64 {
    if let Some(keep) = s.paths.max_ckpt_to_keep {
        return keep as u64 + 1;
    }
    let rows = facts.train_index.as_ref().map_or(0, |index| index.rows as u64);
    let every = u64::from(s.schedule.save_freq.unwrap_or(0));
    // The last step is saved in any case.
    s.total_steps(rows).checked_div(every).unwrap_or(0) + 1
}

fn check(s: &Settings, facts: Option<&Facts>) -> Vec<Outcome> {
    let Some(facts) = facts else {
        return vec![skip("checkpoint space: needs config.json and the file system")];
    };
    let folder = facts.folders.iter().find(|f| f.variable == "CKPTS_DIR");
    let (Some(one), Some(free)) = (checkpoint_bytes(s, facts), folder.and_then(|f| f.free_bytes)) else {
        return Vec::new();
    };
    let copies = copies(s, facts);
    let text = format!(
        "CKPTS_DIR={}: {} free; a checkpoint takes {}, {copies} of them {}",
        s.paths.checkpoints.display(),
        size(free),
        size(one),
        size(one * copies)
    );
    vec![if free < one {
        fatal(text)
    } else if free < one * copies {
        warn(text)
    } else {
        ok(text)
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
    fn room_for_one_is_needed_and_for_all_advised() {
        let one = checkpoint_bytes(&settings(&[]), &facts()).unwrap();
        let with = |free: u64| {
            let mut facts = facts();
            facts.folders[0].free_bytes = Some(free);
            check(&settings(&["MAX_CKPT_TO_KEEP=3"]), Some(&facts))[0].0
        };
        assert_eq!(with(one - 1), Verdict::Fatal);
        assert_eq!(with(one), Verdict::Warn);
        assert_eq!(with(4 * one - 1), Verdict::Warn);
        assert_eq!(with(4 * one), Verdict::Ok);
    }

    #[test]
    fn a_run_that_keeps_all_needs_room_for_all_and_a_critic_for_itself() {
        let all = settings(&[
            "MAX_CKPT_TO_KEEP=0",
            "TOTAL_TRAINING_STEPS=1000",
            "TRAINER_SAVE_FREQ=10",
        ]);
        assert_eq!(copies(&all, &facts()), 101);
        let bytes = |set: &[&str]| checkpoint_bytes(&settings(set), &facts()).unwrap();
        assert_eq!(bytes(&["ADV_ESTIMATOR=gae"]) * 16, bytes(&[]) * 28);
    }
}
