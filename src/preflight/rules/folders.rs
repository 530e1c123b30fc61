//! Folders can be written to, and are no folders of the system.

use crate::{
    config::Settings,
    plan::memory::size,
    preflight::{fatal, ok, skip, warn, Facts, Outcome, Rule, EVERY_RUN},
};
use std::path::Path;

pub(super) const RULE: Rule = Rule {
    id: "folders",
    runs: EVERY_RUN,
    what: "The run's folders can be written to, have some room, and are none of the system's.",
    why: "A folder that cannot be written to ends the run when it first matters: at the first trial, metric or checkpoint. A run in `/` or `/tmp` mixes its files with those of others, which are then removed together.",
    evidence: "The nearest existing folder is asked for the right to write and for its free space; links and `..` are resolved.",
    fix: "Free space, correct the rights, or choose other folders.",
    check,
};

/// Shards, logs and trial folders of a short run.
const ROOM: u64 = 256 << 20;

/// Folders of the system. A run may lie in one of the first, in none of the second.
const SHARED: [&str; 14] = [
    "/", "/bin", "/boot", "/etc", "/home", "/lib", "/lib64", "/media", "/mnt", "/root", "/sbin", "/tmp",
    "/usr", "/var",
];
const KERNEL: [&str; 3] = ["/dev", "/proc", "/sys"];
/// A file system in memory that users may have files in.
const IN_MEMORY: &str = "/dev/shm";

fn is_of_the_system(path: &Path) -> bool {
    let is_the_kernels = KERNEL.iter().any(|folder| path.starts_with(folder));
    SHARED.iter().any(|folder| path == Path::new(folder))
        || path == Path::new(IN_MEMORY)
        || is_the_kernels && !path.starts_with(IN_MEMORY)
}

fn check(_: &Settings, facts: Option<&Facts>) -> Vec<Outcome> {
    let Some(facts) = facts else {
        return vec![skip(
            "RUN_DIR, CKPTS_DIR, LOG_DIR, HARBOR_TRIALS_DIR: structure-only run",
        )];
    };
    let mut found = Vec::new();
    for folder in &facts.folders {
        let at = format!("{}={}", folder.variable, folder.path.display());
        if is_of_the_system(&folder.named) {
            found.push(fatal(format!(
                "{}={}: it is a folder of the system; set {} to a folder of your own",
                folder.variable,
                folder.named.display(),
                folder.variable
            )));
            continue;
        }
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

    #[test]
    fn a_run_is_not_mixed_with_the_system() {
        let at = |named: &str| {
            let mut facts = facts();
            facts.folders[0].named = named.into();
            check(&settings(&[]), Some(&facts)).remove(0)
        };
        for named in ["/", "/tmp", "/usr", "/dev", "/dev/shm", "/proc/self", "/sys/fs"] {
            let (verdict, text) = at(named);
            assert_eq!(verdict, Verdict::Fatal, "{named}");
            assert!(text.starts_with(&format!("CKPTS_DIR={named}: ")), "{text}");
        }
        for named in ["/data", "/tmp/me", "/root/runs", "/dev/shm/me", "/devices"] {
            assert_eq!(at(named).0, Verdict::Ok, "{named}");
        }
    }
}
