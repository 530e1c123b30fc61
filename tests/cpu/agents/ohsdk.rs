//! The OpenHands SDK.

use super::{
    bench::{agent, scripted, Limits},
    script::{Asked, Markup, Turn},
    solved, stop,
};
use crate::support::long;
use legorl::{
    base::{BranchKind, StopReason},
    rollout::scaffold::{ohsdk, PythonScaffold, RuntimeConfig, Scaffold},
};
use serde_json::json;
use std::sync::Arc;

fn ohsdk() -> Option<Arc<dyn Scaffold>> {
    agent(
        PythonScaffold::new(ohsdk::AGENT, RuntimeConfig::default()),
        long(),
    )
}

fn limits() -> Limits {
    Limits {
        time: std::time::Duration::from_secs(300),
        ..Limits::default()
    }
}

fn terminal(command: &str) -> Turn {
    Turn::calls("terminal", json!({"command": command}))
}

fn finish() -> Turn {
    Turn::calls("finish", json!({"message": "It is done."}))
}

#[test]
fn ohsdk_solves_tasks_and_every_token_is_the_engines() {
    let Some(agent) = ohsdk() else { return };
    let outcome = scripted(
        "copy-01",
        agent.clone(),
        Markup::Hermes,
        &limits(),
        |asked| match asked.replies() {
            0 => terminal("ls -R").thinking("What is here?"),
            1 => {
                let mut turn = terminal("cp sugar.txt otter");
                turn.text = "I copy the file — with ümläuts, 日本 and `quotes`.".into();
                turn.and("terminal", json!({"command": "cat daisy.txt"}))
            }
            _ => finish(),
        },
    );
    solved(&outcome);
    assert_eq!(outcome.kinds(), [BranchKind::Main], "{}", outcome.story());

    let outcome = scripted(
        "count-01",
        agent,
        Markup::Qwen3Coder,
        &limits(),
        |asked| match asked.replies() {
            0 => Turn::calls(
                "file_editor",
                json!({"command": "create", "path": "/app/sage.txt", "file_text": "7\n"}),
            ),
            1 => Turn::calls(
                "file_editor",
                json!({"command": "str_replace", "path": "/app/sage.txt", "old_str": "7", "new_str": "8"}),
            ),
            _ => Turn::says("Eight lines."),
        },
    );
    solved(&outcome);
}

#[test]
fn ohsdk_sums_up_when_the_proxy_says_that_the_context_is_full() {
    let Some(agent) = ohsdk() else { return };
    let script = |asked: &Asked<'_>| {
        // The condenser asks without tools, the agent with them.
        if !asked.prompt.contains("<tools>") {
            return Turn::says("USER_CONTEXT: copy sugar.txt into otter. Nothing is copied yet.");
        }
        if asked.prompt.contains("Nothing is copied yet") {
            return match asked.last().contains("<tool_response>") {
                false => terminal("cp sugar.txt otter"),
                true => finish(),
            };
        }
        // About 3,000 tokens a time.
        terminal("seq 1000 1700")
    };
    let small = Limits {
        context: 14_000,
        reply: 1_000,
        ..limits()
    };
    let outcome = scripted("copy-01", agent, Markup::Hermes, &small, script);
    solved(&outcome);
    let kinds = outcome.trained();
    assert_eq!(
        kinds,
        [
            (BranchKind::Main, true),
            (BranchKind::Summary, false),
            (BranchKind::Compaction, true)
        ],
        "{}",
        outcome.story()
    );
    assert_eq!(stop(&outcome), StopReason::AgentCompleted, "{}", outcome.story());
    assert!(outcome.exchanges.iter().any(|exchange| exchange.status == 400));
}

#[test]
fn ohsdk_without_an_end_is_ended_by_its_turns() {
    let Some(agent) = ohsdk() else { return };
    super::endless(agent, |n| terminal(&format!("echo {n}")));
}

#[test]
fn ohsdk_survives_a_policy_that_answers_nonsense() {
    let Some(agent) = ohsdk() else { return };
    super::nonsense(agent);
}
