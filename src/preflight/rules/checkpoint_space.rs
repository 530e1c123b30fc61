//! Checkpoints fit on their file system.

use crate::{
    config::Settings,
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

/// Bytes of one checkpoint of the policy.
pub(super) fn checkpoint_bytes(facts: &Facts) -> Option<u64> {
    facts
        .model
        .as_ref()
        .ok()
        .map(|m| m.shape.parameters() * BYTES_PER_PARAMETER)
}

fn check(s: &Settings, facts: Option<&Facts>) -> Vec<Outcome> {
    let Some(facts) = facts else {
        return vec![skip("checkpoint space: needs config.json and the file system")];
    };
    let folder = facts.folders.iter().find(|f| f.variable == "CKPTS_DIR");
    let (Some(one), Some(free)) = (checkpoint_bytes(facts), folder.and_then(|f| f.free_bytes)) else {
        return Vec::new();
    };
    // One more than is kept: nothing is deleted before the next one is complete.
    let copies = s.paths.max_ckpt_to_keep.map_or(2, |keep| keep as u64 + 1);
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
        let one = checkpoint_bytes(&facts()).unwrap();
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
}
