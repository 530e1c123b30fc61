//! OpenCode.

use super::{
    bench::{agent, scripted, Limits},
    script::{Markup, Turn},
    solved,
};
use legorl::{
    base::BranchKind,
    rollout::scaffold::{Oc, OcConfig, Scaffold},
};
use serde_json::json;
use std::sync::Arc;

fn oc() -> Option<Arc<dyn Scaffold>> {
    agent(Oc::new(OcConfig::default()), true)
}

#[test]
fn oc_solves_tasks_and_every_token_is_the_engines() {
    let Some(oc) = oc() else { return };
    let outcome = scripted(
        "copy-01",
        oc.clone(),
        Markup::Hermes,
        &Limits::default(),
        |asked| match asked.replies() {
            0 => Turn::calls("bash", json!({"command": "ls -R", "description": "Look around"}))
                .thinking("What is here?"),
            1 => {
                let mut turn = Turn::calls(
                    "bash",
                    json!({"command": "cp sugar.txt otter/", "description": "Copy"}),
                );
                turn.text = "I copy the file — with ümläuts, 日本 and `quotes`.".into();
                turn.and("read", json!({"filePath": "/app/daisy.txt"}))
            }
            _ => Turn::says("The file is copied."),
        },
    );
    solved(&outcome);
    assert_eq!(outcome.kinds(), [BranchKind::Main], "{}", outcome.story());

    let outcome = scripted(
        "count-01",
        oc,
        Markup::Qwen3Coder,
        &Limits::default(),
        |asked| match asked.replies() {
            0 => Turn::calls("write", json!({"filePath": "/app/sage.txt", "content": "7\n"})),
            1 => Turn::calls(
                "edit",
                json!({"filePath": "/app/sage.txt", "oldString": "7", "newString": "8"}),
            ),
            _ => Turn::says("Eight lines."),
        },
    );
    solved(&outcome);
}

/// Two sub-agents at once.
#[test]
fn oc_sub_agents_are_branches_of_their_own() {
    let Some(oc) = oc() else { return };
    let agent = |task: &str| json!({"description": "a part", "prompt": task, "subagent_type": "general"});
    let outcome = scripted(
        "folders-01",
        oc,
        Markup::Hermes,
        &Limits::default(),
        move |asked| {
            let (first, replies) = (asked.first(), asked.replies());
            if first.contains("SUBTASK-ONE") {
                Turn::says("One is done.")
            } else if first.contains("SUBTASK-TWO") {
                match replies {
                    0 => Turn::calls(
                        "bash",
                        json!({"command": super::solution("folders-01"), "description": "Solve"}),
                    ),
                    _ => Turn::says("Two is done."),
                }
            } else {
                match replies {
                    0 => Turn::calls("task", agent("SUBTASK-ONE: do nothing."))
                        .and("task", agent("SUBTASK-TWO: solve it.")),
                    _ => Turn::says("Both are done."),
                }
            }
        },
    );
    solved(&outcome);
    let mut kinds = outcome.trained();
    kinds.sort();
    let sub = (BranchKind::SubAgent, true);
    assert_eq!(kinds, [(BranchKind::Main, true), sub, sub], "{}", outcome.story());
}

/// A result that does not fit: the API refuses, the agent asks for a summary and begins anew.
#[test]
fn oc_compaction_begins_a_branch() {
    let Some(oc) = oc() else { return };
    let limits = Limits {
        context: 40_000,
        ..Limits::default()
    };
    let outcome = scripted("copy-01", oc, Markup::Hermes, &limits, |asked| {
        if !asked.prompt.contains("<tools>") {
            return Turn::says(&format!("{}: copy sugar.txt", super::SUMMARY));
        }
        if asked.prompt.contains(super::SUMMARY) {
            return if asked.prompt.contains("cp sugar.txt") {
                Turn::says("Done after the summary.")
            } else {
                Turn::calls(
                    "bash",
                    json!({"command": "cp sugar.txt otter/", "description": "Copy"}),
                )
            };
        }
        let big = json!({"command": "seq -s 7 10000 15500 | head -c 29000", "description": "Count"});
        Turn::calls("bash", big.clone()).and("bash", big)
    });
    solved(&outcome);
    let refused: Vec<_> = outcome.exchanges.iter().filter(|e| e.status == 400).collect();
    assert!(!refused.is_empty() && refused[0].answer.contains("maximum context length"));
    let kinds = outcome.trained();
    let expected = [
        (BranchKind::Main, true),
        (BranchKind::Side, false),
        (BranchKind::Compaction, true),
    ];
    assert_eq!(kinds, expected, "{}", outcome.story());
}

#[test]
fn oc_without_an_end_is_ended_by_the_turn_limit() {
    let Some(oc) = oc() else { return };
    super::endless(oc, |n| {
        Turn::calls(
            "bash",
            json!({"command": format!("echo {n}"), "description": "Say"}),
        )
    });
}

#[test]
fn oc_survives_a_policy_that_answers_nonsense() {
    let Some(oc) = oc() else { return };
    super::nonsense(oc);
}
