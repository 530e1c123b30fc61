//! The table of rules, in the order in which they are printed.
//!
//! # How to add a rule
//!
//! 1. Write `rules/my_rule.rs`: a head that says what it is about, `pub(super) const RULE: Rule` with five
//!    sentences, and `fn check`. [`group_size`](self) is a short one to start from.
//! 2. `check` is pure. It gets the resolved settings and, except under `--structure-only`, the facts; it
//!    returns any number of [`ok`](super::ok), [`skip`](super::skip), [`warn`](super::warn) and
//!    [`fatal`](super::fatal). A text names the variable and its value; a fatal one says what to set. Where
//!    a rule has nothing to say it returns an empty list.
//! 3. A fact that is missing becomes a field of [`Facts`](super::Facts) and a probe in `facts/`, with a
//!    deadline. Rules never look at the machine themselves.
//! 4. Add `mod my_rule;` and `&my_rule::RULE` below, in the place where it is to be printed.
//! 5. Test `check` with [`testing::settings`] and [`testing::facts`], spoiled in one point.
//! 6. `LEGORL_WRITE_DOCS=1 cargo nextest run -p legorl --lib preflight::pages` writes `docs/preflight.md`.
//!
//! A rule never checks its own default: it judges the value that reaches the run.

mod advantage;
mod agent_name;
mod batch;
mod checkpoint_space;
mod clip_range;
mod context_window;
mod device;
mod docker_daemon;
mod docker_scaffold;
mod folders;
mod group_size;
mod image_mirror;
mod image_source;
mod importance_weights;
mod input_paths;
mod kubeconfig;
mod kubernetes_api;
mod learning_rate;
mod locked_memory;
mod lr_schedule;
mod memory;
mod model_folder;
mod not_in_this_version;
mod open_files;
mod parallel_sizes;
mod placeholder;
mod port_range;
mod proxy_address;
mod proxy_port;
mod routing_replay;
mod run_lock;
mod sampling;
mod sandbox;
mod scaffold_context;
mod scaffold_runtime;
mod scaffold_variables;
mod schedule;
mod shared_memory;
mod staleness;
mod task_image;
mod task_index;
mod tensor_parallel;
mod time_limit;
mod tokenizer;
mod tool_parser;
mod topology;
mod val_timeout;
mod validation;
mod veomni;
mod world_size;

use super::Rule;

/// Id of the rule about values that cannot be launched yet.
pub const NOT_IN_THIS_VERSION: &str = not_in_this_version::RULE.id;

/// Every rule.
pub const ALL: &[&Rule] = &[
    &placeholder::RULE,
    &not_in_this_version::RULE,
    &tool_parser::RULE,
    &topology::RULE,
    &world_size::RULE,
    &tensor_parallel::RULE,
    &parallel_sizes::RULE,
    &device::RULE,
    &memory::RULE,
    &veomni::RULE,
    &routing_replay::RULE,
    &agent_name::RULE,
    &docker_scaffold::RULE,
    &image_source::RULE,
    &kubeconfig::RULE,
    &kubernetes_api::RULE,
    &image_mirror::RULE,
    &docker_daemon::RULE,
    &task_image::RULE,
    &proxy_address::RULE,
    &proxy_port::RULE,
    &port_range::RULE,
    &batch::RULE,
    &group_size::RULE,
    &advantage::RULE,
    &context_window::RULE,
    &clip_range::RULE,
    &sampling::RULE,
    &learning_rate::RULE,
    &lr_schedule::RULE,
    &schedule::RULE,
    &val_timeout::RULE,
    &importance_weights::RULE,
    &staleness::RULE,
    &validation::RULE,
    &model_folder::RULE,
    &tokenizer::RULE,
    &task_index::RULE,
    &input_paths::RULE,
    &sandbox::RULE,
    &scaffold_runtime::RULE,
    &scaffold_context::RULE,
    &scaffold_variables::RULE,
    &run_lock::RULE,
    &folders::RULE,
    &checkpoint_space::RULE,
    &open_files::RULE,
    &shared_memory::RULE,
    &locked_memory::RULE,
    &time_limit::RULE,
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
            assert!(!rule.runs.is_empty(), "{} is for no run", rule.id);
            for text in [rule.what, rule.why, rule.evidence, rule.fix] {
                assert!(text.ends_with('.'), "{}: `{text}` must be a sentence", rule.id);
            }
        }
    }

    #[test]
    fn every_file_of_this_folder_is_a_rule_of_the_table() {
        let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("src/preflight/rules");
        let files = std::fs::read_dir(folder)
            .unwrap()
            .map(|entry| entry.unwrap().path());
        let ids: BTreeSet<String> = files
            .map(|path| path.file_stem().unwrap().to_string_lossy().replace('_', "-"))
            .filter(|name| name != "mod" && name != "testing")
            .collect();
        let listed: BTreeSet<String> = ALL.iter().map(|rule| rule.id.to_owned()).collect();
        assert_eq!(ids, listed, "a rule's id is the name of its file");
    }
}
