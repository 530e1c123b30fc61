//! Folders can be written to.

use crate::{
    config::Settings,
    plan::memory::size,
    preflight::{fatal, ok, skip, warn, Facts, Outcome, Rule, EVERY_RUN},
};

pub(super) const RULE: Rule = Rule {
    id: "folders",
    runs: EVERY_RUN,
    what: "The run's folders can be written to, and have some room.",
    why: "A folder that cannot be written to ends the run when it first matters: at the first trial, metric or checkpoint.",
    evidence: "The nearest existing folder is asked for the right to write and for its free space.",
    fix: "Free space, correct the rights, or choose other folders.",
    check,
};

/// Shards, logs and trial folders of a short run.
const ROOM: u64 = 256 << 20;

fn check(_: &Settings, facts: Option<&Facts>) -> Vec<Outcome> {
    let Some(facts) = facts else {
        return vec![skip(
            "RUN_DIR, CKPTS_DIR, LOG_DIR, HARBOR_TRIALS_DIR: structure-only run",
        )];
    };
    let mut found = Vec::new();
    for folder in &facts.folders {
        let at = format!("{}={}", folder.variable, folder.path.display());
        match (&folder.writable, folder.free_bytes) {
            (Err(problem), _) => found.push(fatal(format!("{at}: {problem}"))),
            (Ok(()), Some(free)) if free < 1 << 20 => found.push(fatal(format!("{at}: {} free", size(free)))),
            (Ok(()), Some(free)) if free < ROOM => {
                found.push(warn(format!("{at}: {} free, {} advised", size(free), size(ROOM))))
            }
            (Ok(()), Some(_)) => {}
            (Ok(()), None) => found.push(warn(format!("{at}: free space unknown"))),
        }
    }
    if found.is_empty() {
        let least = facts
            .folders
            .iter()
            .filter_map(|f| f.free_bytes)
            .min()
            .unwrap_or(0);
        found.push(ok(format!("folders writable, at least {} free", size(least))));
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
    fn rights_and_room() {
        let with = |writable, free_bytes| {
            let mut facts = facts();
            facts.folders[0].writable = writable;
            facts.folders[0].free_bytes = free_bytes;
            check(&settings(&[]), Some(&facts)).remove(0)
        };
        assert_eq!(with(Ok(()), Some(1 << 30)).0, Verdict::Ok);
        assert_eq!(with(Ok(()), Some(1 << 24)).0, Verdict::Warn);
        assert_eq!(with(Ok(()), Some(0)).0, Verdict::Fatal);
        let refused = with(
            Err("/ckpt cannot be written to: Read-only file system".into()),
            None,
        );
        assert!(refused.0 == Verdict::Fatal && refused.1.contains("CKPTS_DIR=/ckpt"));
    }
}
