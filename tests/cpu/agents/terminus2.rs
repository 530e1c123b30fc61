//! Terminus 2, whose own record of token ids and log-probs is an independent witness of the capture.

use super::{
    bench::{agent, scripted, Limits, Outcome},
    check::check,
    script::{Asked, Markup, Turn},
    solved, stop,
};
use crate::support::long;
use legorl::{
    base::{BranchKind, StopReason},
    rollout::scaffold::{terminus2, PythonScaffold, RuntimeConfig, Scaffold},
};
use serde_json::{json, Value};
use std::sync::Arc;

fn terminus2() -> Option<Arc<dyn Scaffold>> {
    agent(
        PythonScaffold::new(terminus2::AGENT, RuntimeConfig::default()),
        long(),
    )
}

fn limits() -> Limits {
    Limits {
        time: std::time::Duration::from_secs(300),
        ..Limits::default()
    }
}

/// A reply in the agent's own format.
fn types(keystrokes: &[&str]) -> Turn {
    let commands: Vec<Value> = keystrokes
        .iter()
        .map(|keys| json!({"keystrokes": keys, "duration": 0.2}))
        .collect();
    Turn::says(&json!({"analysis": "ä", "plan": "b", "commands": commands}).to_string())
}

fn complete() -> Turn {
    Turn::says(&json!({"analysis": "a", "plan": "b", "commands": [], "task_complete": true}).to_string())
}

/// Harbor's record: every prompt, reply and log-probability that it was told is in the captured branches,
/// and every trained token is in the record.
fn witness(outcome: &Outcome) {
    let record: Value = serde_json::from_str(&outcome.file("agent/rollout.json")).unwrap();
    let ids = |value: &Value| -> Vec<u32> { serde_json::from_value(value.clone()).unwrap() };
    let mut told = 0;
    for detail in record["rollout_details"].as_array().unwrap() {
        let [prompts, replies, logprobs] =
            ["prompt_token_ids", "completion_token_ids", "logprobs"].map(|k| detail[k].as_array().unwrap());
        assert_eq!([prompts.len(), prompts.len()], [replies.len(), logprobs.len()]);
        let turns = prompts.iter().zip(replies).zip(logprobs);
        for (turn, ((prompt, reply), logprobs)) in turns.enumerate() {
            let (prompt, reply) = (ids(prompt), ids(reply));
            let logprobs: Vec<f32> = serde_json::from_value(logprobs.clone()).unwrap();
            assert_eq!(reply.len(), logprobs.len());
            let (start, end) = (prompt.len(), prompt.len() + reply.len());
            let holds = outcome.captured.branches.iter().filter(|branch| {
                let t = &branch.tokens;
                t.len() >= end
                    && t.token_ids[..start] == prompt
                    && t.token_ids[start..end] == reply
                    && t.loss_mask[start..end].iter().all(|m| *m)
                    && t.logprobs[start..end]
                        .iter()
                        .zip(&logprobs)
                        .all(|(a, b)| a.to_bits() == b.to_bits())
            });
            assert_eq!(holds.count(), 1, "turn {turn} of {detail}");
            told += reply.len();
        }
    }
    let branches = outcome.captured.branches.iter();
    let sampled: usize = branches.map(|branch| branch.tokens.sampled()).sum();
    assert_eq!(told, sampled, "tokens in Harbor's record and sampled tokens");
}

#[test]
fn terminus2_solves_tasks_and_keeps_the_same_tokens() {
    let Some(agent) = terminus2() else { return };
    for (task, work) in [
        ("copy-01", "cp sugar.txt otter\n"),
        ("count-01", "wc -l < lilac.txt > sage.txt\n"),
    ] {
        let script = move |asked: &Asked<'_>| match asked.replies() {
            0 => types(&["ls -R\n", "echo 'ümläut 日本 `q`'\n"]),
            1 => types(&[work]),
            _ => complete(),
        };
        let outcome = scripted(task, agent.clone(), Markup::Hermes, &limits(), script);
        solved(&outcome);
        witness(&outcome);
        assert_eq!(outcome.kinds(), [BranchKind::Main], "{}", outcome.story());
        assert_eq!(outcome.captured.branches[0].turns, 4);
        assert!(outcome.file("agent/terminus_2.pane").contains("ls -R"));
    }
}

/// Says what each conversation of a hand-over asks for. `noise` fills the context.
fn hand_over(noise: &'static str) -> impl Fn(&Asked<'_>) -> Turn {
    move |asked| {
        if asked.last().starts_with("You are about to hand off your work") {
            Turn::says("I looked around, and nothing is copied yet.")
        } else if asked.last().starts_with("You are picking up work") {
            Turn::says("Which of the two files goes into which folder?")
        } else if asked.last().starts_with("The next agent has a few questions") {
            Turn::says("The file sugar.txt goes into the folder otter.")
        } else if asked.last().starts_with("Here are the answers") {
            types(&["clear; cp sugar.txt otter\n"])
        } else if asked.prompt.contains("Here are the answers") {
            complete()
        } else {
            types(&[noise])
        }
    }
}

/// Its own estimate comes first, or the proxy refuses a request.
#[test]
fn terminus2_hands_over_when_its_context_is_full() {
    use BranchKind::{Compaction, Main, Rewritten, Side, Summary};
    let Some(agent) = terminus2() else { return };
    // 2,550 tokens a screen for Qwen3's tokenizer and for the agent's own count; 2,880 of which it counts 1,700.
    for (noise, context, refused, expected) in [
        // The summary is the main conversation's last turn; the questions are asked without it, and what they
        // are answered begins the new conversation.
        (
            "yes alpha beta | head -n 850\n",
            8_000,
            false,
            vec![Compaction, Main, Side, Summary],
        ),
        // It forgets its last turns before it asks for a summary.
        (
            "seq 1000 1575\n",
            6_000,
            true,
            vec![Compaction, Main, Rewritten, Side, Summary],
        ),
    ] {
        let small = Limits { context, ..limits() };
        let outcome = scripted("copy-01", agent.clone(), Markup::Hermes, &small, hand_over(noise));
        solved(&outcome);
        witness(&outcome);
        let mut kinds = Vec::new();
        for branch in &outcome.captured.branches {
            let trained = ![Side, Summary].contains(&branch.kind);
            assert_eq!(branch.trainable, trained, "{}", outcome.story());
            kinds.push(branch.kind);
        }
        kinds.sort_by_key(|kind| format!("{kind:?}"));
        assert_eq!(kinds, expected, "{}", outcome.story());
        assert_eq!(outcome.exchanges.iter().any(|e| e.status == 400), refused);
        let record: Value = serde_json::from_str(&outcome.file("agent/rollout.json")).unwrap();
        assert_eq!(record["summaries"], 1);
        assert_eq!(stop(&outcome), StopReason::AgentCompleted, "{}", outcome.story());
    }
}

#[test]
fn terminus2_that_never_ends_is_ended_by_its_turns() {
    let Some(agent) = terminus2() else { return };
    let few = Limits {
        max_turns: 3,
        ..limits()
    };
    let outcome = scripted("copy-01", agent, Markup::Hermes, &few, |_| types(&["ls\n"]));
    assert_eq!(stop(&outcome), StopReason::MaxTurnsReached, "{}", outcome.story());
    assert_eq!(outcome.reward(), 0.0);
    check(&outcome);
    witness(&outcome);
}

#[test]
fn terminus2_survives_a_policy_that_answers_nonsense() {
    let Some(agent) = terminus2() else { return };
    super::nonsense(agent);
}
