//! Folders can be written, and checkpoints fit.

use crate::{
    config::Settings,
    preflight::{Facts, Outcome, Rule, Verdict},
};

pub(super) const RULE: Rule = Rule {
    id: "folders",
    what: "The run's folders can be written to, and the file system holds its checkpoints.",
    why: "A full disk in the middle of a run costs every step since the last checkpoint.",
    evidence:
        "A checkpoint holds 16 bytes a parameter: f32 weights, two f32 moments, an export of up to 4 bytes.",
    fix: "Free space, set MAX_CKPT_TO_KEEP, or choose other folders.",
    check,
};

/// Weights, two moments and the export.
const BYTES_PER_PARAMETER: u64 = 16;

/// Shards, logs and trial folders beside the checkpoints.
const OTHER_BYTES: u64 = 256 << 20;

fn check(s: &Settings, facts: Option<&Facts>) -> Vec<Outcome> {
    let Some(facts) = facts else {
        return vec![(
            Verdict::Skip,
            "RUN_DIR, CKPTS_DIR, LOG_DIR, HARBOR_TRIALS_DIR: structure-only run".into(),
        )];
    };
    let checkpoint = facts
        .model
        .as_ref()
        .map_or(0, |m| m.num_parameters * BYTES_PER_PARAMETER);
    // One more than is kept: nothing is deleted before the next one is complete.
    let copies = s.paths.max_ckpt_to_keep.map_or(2, |keep| keep as u64 + 1);
    let mut found = Vec::new();
    for folder in &facts.folders {
        let at = format!("{}={}", folder.variable, folder.path.display());
        if let Err(problem) = &folder.writable {
            found.push((Verdict::Fatal, format!("{at}: {problem}")));
            continue;
        }
        let Some(free) = folder.free_bytes else {
            found.push((Verdict::Warn, format!("{at}: free space unknown")));
            continue;
        };
        let (least, wanted) = match folder.variable {
            "CKPTS_DIR" => (checkpoint, checkpoint * copies + OTHER_BYTES),
            _ => (1 << 20, OTHER_BYTES),
        };
        if free < least {
            found.push((
                Verdict::Fatal,
                format!("{at}: {} free, {} needed", size(free), size(least)),
            ));
        } else if free < wanted {
            found.push((
                Verdict::Warn,
                format!("{at}: {} free, {} advised", size(free), size(wanted)),
            ));
        }
    }
    if found.is_empty() {
        let free = facts
            .folders
            .iter()
            .filter_map(|f| f.free_bytes)
            .min()
            .unwrap_or(0);
        found.push((
            Verdict::Ok,
            format!(
                "folders writable, at least {} free; a checkpoint takes {}",
                size(free),
                size(checkpoint)
            ),
        ));
    }
    found
}

fn size(bytes: u64) -> String {
    let mut value = bytes as f64;
    for unit in ["B", "KiB", "MiB", "GiB"] {
        if value < 1024.0 {
            return format!("{value:.0} {unit}");
        }
        value /= 1024.0;
    }
    format!("{value:.1} TiB")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::preflight::rules::testing::{facts, settings};

    #[test]
    fn space_for_one_checkpoint_is_needed_and_for_all_advised() {
        let with = |free: u64| {
            let mut facts = facts();
            facts.folders[0].free_bytes = Some(free);
            check(&settings(&["MAX_CKPT_TO_KEEP=3"]), Some(&facts))[0].0
        };
        // 1.5 M parameters take 24 MB.
        assert_eq!(with(23_000_000), Verdict::Fatal);
        assert_eq!(with(25_000_000), Verdict::Warn);
        assert_eq!(with(1 << 30), Verdict::Ok);
    }

    #[test]
    fn a_folder_that_cannot_be_written_is_fatal() {
        let mut facts = facts();
        facts.folders[0].writable = Err("/ckpt cannot be written to: Read-only file system".into());
        let found = check(&settings(&[]), Some(&facts));
        assert_eq!(found[0].0, Verdict::Fatal);
        assert!(found[0].1.contains("CKPTS_DIR=/ckpt"));
    }
}
