//! Slurm's time limit leaves room for the last checkpoint.

use super::checkpoint_space::checkpoint_bytes;
use crate::{
    config::Settings,
    preflight::{fatal, ok, warn, Facts, Outcome, Rule, TRAINING},
};

pub(super) const RULE: Rule = Rule {
    id: "time-limit",
    runs: TRAINING,
    what: "The job's time limit is longer than the lead of its signal, and the lead is long enough for a checkpoint.",
    why: "Without the signal, or with too short a lead, Slurm kills the run in the middle of a checkpoint and the steps since the last one are lost.",
    evidence: "The lead is read from the batch script; saving is counted with 500 MB/s and a minute to finish the step.",
    fix: "Submit with `--signal=B:USR1@SECONDS` and a longer `--time`.",
    check,
};

/// Bytes a second that a shared file system is trusted with.
const SAVE_BYTES_PER_SEC: u64 = 500_000_000;

/// Seconds for the step that runs when the signal comes.
const STEP_SECS: u64 = 60;

fn check(s: &Settings, facts: Option<&Facts>) -> Vec<Outcome> {
    let Some((facts, job)) = facts.and_then(|f| f.slurm.as_ref().map(|job| (f, job))) else {
        return Vec::new();
    };
    let save = checkpoint_bytes(s, facts)
        .unwrap_or(0)
        .div_ceil(SAVE_BYTES_PER_SEC)
        + STEP_SECS;
    let id = &job.job;
    let Some(left) = job.time_left.map(|left| left.as_secs()) else {
        return vec![ok(format!("Slurm job {id} has no time limit"))];
    };
    let Some(lead) = job.signal_lead.map(|lead| lead.as_secs()) else {
        return vec![warn(format!(
            "Slurm job {id} ends in {left} s without a warning signal; submit with --signal=B:USR1@{save}"
        ))];
    };
    vec![if left <= lead {
        fatal(format!(
            "Slurm job {id} ends in {left} s and its signal comes {lead} s before: no step would finish; raise --time"
        ))
    } else if lead < save {
        warn(format!(
            "Slurm job {id}: the signal comes {lead} s before the end, and step and checkpoint may take {save} s"
        ))
    } else {
        ok(format!(
            "Slurm job {id}: {left} s left, signal {lead} s before, about {save} s needed"
        ))
    }]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::preflight::{
        facts::SlurmFacts,
        rules::testing::{facts, settings},
        Verdict,
    };
    use std::time::Duration;

    #[test]
    fn limit_lead_and_checkpoint_are_compared() {
        let with = |left: Option<u64>, lead: Option<u64>| {
            let facts = Facts {
                slurm: Some(SlurmFacts {
                    job: "7".into(),
                    time_left: left.map(Duration::from_secs),
                    signal_lead: lead.map(Duration::from_secs),
                }),
                ..facts()
            };
            check(&settings(&[]), Some(&facts))[0].0
        };
        assert_eq!(with(Some(7200), Some(120)), Verdict::Ok);
        assert_eq!(with(Some(100), Some(120)), Verdict::Fatal);
        assert_eq!(with(Some(7200), Some(10)), Verdict::Warn);
        assert_eq!(with(Some(7200), None), Verdict::Warn);
        assert_eq!(with(None, None), Verdict::Ok);
        assert!(check(&settings(&[]), Some(&facts())).is_empty(), "not in a job");
    }
}
