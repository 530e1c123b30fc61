//! Which family a checkpoint is of: by its config.json, or without one by the name of its folder.

use super::Facts;
use crate::config::Settings;

/// Families that rules treat apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Family {
    /// Qwen3.5 and 3.6, dense or not: tool calls in XML.
    Qwen35,
    /// Qwen3 mixture of experts (30B-A3B): the fine-tune decides about the markup.
    Qwen3Moe,
    /// Another one.
    Other,
}

/// The family, and what it was seen by, to complete the sentence `… by config.json`.
pub fn of(s: &Settings, facts: Option<&Facts>) -> (Family, &'static str) {
    if let Some(Ok(model)) = facts.map(|f| &f.model) {
        let family = match model.shape.model_type.as_str() {
            "qwen3_5" | "qwen3_5_moe" => Family::Qwen35,
            "qwen3_moe" => Family::Qwen3Moe,
            _ => Family::Other,
        };
        return (family, "by its config.json");
    }
    // Folders above it are the user's own order and say nothing about the checkpoint.
    let name = s.model.path.file_name().unwrap_or_default().to_string_lossy();
    (
        by_name(&name),
        "by the name of its folder; config.json was not read",
    )
}

/// True for a folder whose name claims the size and version whose memory was measured.
pub fn is_measured(s: &Settings) -> bool {
    let name = s
        .model
        .path
        .file_name()
        .unwrap_or_default()
        .to_string_lossy()
        .to_lowercase();
    by_name(&name) == Family::Qwen35 && !["3.6", "3_6", "36"].iter().any(|version| name.contains(version))
}

/// The family that a folder's name claims.
pub fn by_name(name: &str) -> Family {
    let name = name.to_lowercase();
    // `qwen3.5`, `Qwen3_6`, `qwen-3.5`: the version, and no longer number.
    let is_version = |rest: &str| {
        let rest = rest.trim_start_matches(['-', '_']);
        rest.strip_prefix('3').is_some_and(|rest| {
            let rest = rest.strip_prefix(['.', '_']).unwrap_or(rest);
            let mut chars = rest.chars();
            matches!(chars.next(), Some('5' | '6')) && !chars.next().is_some_and(|c| c.is_ascii_digit())
        })
    };
    let has_size = |size: &str| {
        name.match_indices(size)
            .any(|(at, _)| !name[..at].ends_with(|c: char| c.is_ascii_digit() || c == '.'))
    };
    if name
        .match_indices("qwen")
        .any(|(at, _)| is_version(&name[at + 4..]))
        || has_size("35b")
    {
        Family::Qwen35
    } else if ["qwen3-30b", "qwen3_30b", "30b-a3b", "30b_a3b"]
        .iter()
        .any(|part| name.contains(part))
    {
        Family::Qwen3Moe
    } else {
        Family::Other
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::preflight::rules::testing::{facts, settings};

    #[test]
    fn names_of_released_checkpoints() {
        for name in [
            "Qwen3.5-35B-A3B",
            "qwen3_6-27b",
            "Qwen3.6-27B",
            "my-35b-sft",
            "qwen-3.5-9b",
        ] {
            assert_eq!(by_name(name), Family::Qwen35, "{name}");
        }
        assert_eq!(by_name("Qwen3-30B-A3B-Instruct-2507"), Family::Qwen3Moe);
        for name in [
            "Qwen3-8B",
            "Qwen3-0.6B",
            "global_step_350",
            "qwen3-356b",
            "CHANGEME",
            "x-135b",
        ] {
            assert_eq!(by_name(name), Family::Other, "{name}");
        }
    }

    #[test]
    fn config_json_wins_over_the_name_and_folders_above_say_nothing() {
        let s = settings(&["MODEL_PATH=/exp/qwen3.5/global_step_10"]);
        assert_eq!(of(&s, None).0, Family::Other);
        let s = settings(&["MODEL_PATH=/models/Qwen3.5-35B-A3B"]);
        assert_eq!(of(&s, None).0, Family::Qwen35);
        assert_eq!(
            of(&s, Some(&facts())).0,
            Family::Other,
            "its config.json says qwen3"
        );
    }
}
