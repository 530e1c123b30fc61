//! The table of rules, in the order in which they are printed.

mod advantage;
mod batch;
mod clip_range;
mod context_window;
mod folders;
mod group_size;
mod lr_schedule;
mod model_folder;
mod not_in_this_version;
mod open_files;
mod placeholder;
mod proxy_port;
mod sampling;
mod sandbox;
mod staleness;
mod task_index;
mod tool_parser;
mod topology;
mod validation;
mod world_size;

use super::Rule;

/// Every rule.
pub const ALL: &[&Rule] = &[
    &placeholder::RULE,
    &not_in_this_version::RULE,
    &tool_parser::RULE,
    &topology::RULE,
    &world_size::RULE,
    &batch::RULE,
    &group_size::RULE,
    &advantage::RULE,
    &context_window::RULE,
    &clip_range::RULE,
    &sampling::RULE,
    &lr_schedule::RULE,
    &staleness::RULE,
    &validation::RULE,
    &model_folder::RULE,
    &task_index::RULE,
    &sandbox::RULE,
    &folders::RULE,
    &proxy_port::RULE,
    &open_files::RULE,
];

#[cfg(test)]
pub(crate) mod testing;

#[cfg(test)]
mod tests {
    use super::ALL;
    use std::collections::BTreeSet;

    #[test]
    fn every_rule_says_what_why_evidence_and_fix() {
        let mut ids = BTreeSet::new();
        for rule in ALL {
            assert!(ids.insert(rule.id), "{} stands twice", rule.id);
            assert!(
                rule.id.chars().all(|c| c.is_ascii_lowercase() || c == '-'),
                "{}",
                rule.id
            );
            for text in [rule.what, rule.why, rule.evidence, rule.fix] {
                assert!(text.ends_with('.'), "{}: `{text}` must be a sentence", rule.id);
            }
        }
    }
}
