//! OpenHands, the full program.

use super::{
    bench::{agent, scripted, Limits},
    script::{Asked, Markup, Turn},
    solved,
};
use crate::support::long;
use legorl::{
    base::BranchKind,
    rollout::scaffold::{oh, PythonScaffold, RuntimeConfig, Scaffold},
};
use serde_json::json;
use std::sync::Arc;

fn oh() -> Option<Arc<dyn Scaffold>> {
    agent(PythonScaffold::new(oh::AGENT, RuntimeConfig::default()), long())
}

#[test]
fn oh_solves_tasks_and_every_token_is_the_engines() {
    let Some(agent) = oh() else { return };
    let limits = Limits {
        time: std::time::Duration::from_secs(500),
        ..Limits::default()
    };
    for (task, markup, work) in [
        ("copy-01", Markup::Hermes, "cp sugar.txt otter"),
        ("count-01", Markup::Qwen3Coder, "wc -l < lilac.txt > sage.txt"),
    ] {
        let script = move |asked: &Asked<'_>| {
            if !asked.prompt.contains("<tools>") {
                return Turn::says("A title");
            }
            match asked.replies() {
                0 => Turn::calls("terminal", json!({"command": "ls -R"})).thinking("What is here?"),
                1 => Turn::calls("terminal", json!({"command": work})),
                _ => Turn::calls("finish", json!({"message": "It is done."})),
            }
        };
        let outcome = scripted(task, agent.clone(), markup, &limits, script);
        solved(&outcome);
        for branch in &outcome.captured.branches {
            let title = branch.kind == BranchKind::Side;
            assert!(title || branch.kind == BranchKind::Main, "{}", outcome.story());
            assert_eq!(branch.trainable, !title);
        }
        let main = outcome
            .captured
            .branches
            .iter()
            .filter(|b| b.kind == BranchKind::Main);
        assert_eq!(main.count(), 1, "{}", outcome.story());
    }
}

#[test]
fn oh_survives_a_policy_that_answers_nonsense() {
    let Some(agent) = oh() else { return };
    super::nonsense(agent);
}
