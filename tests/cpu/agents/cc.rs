//! Claude Code.

use super::{
    bench::{agent, scripted, Limits},
    script::{Markup, Turn},
    solved, stop,
};
use legorl::{
    base::{BranchKind, StopReason},
    rollout::scaffold::{Cc, CcConfig, Scaffold},
};
use serde_json::json;
use std::{collections::BTreeSet, sync::Arc};

fn cc() -> Option<Arc<dyn Scaffold>> {
    agent(Cc::new(CcConfig::default()), true)
}

#[test]
fn cc_solves_tasks_and_every_token_is_the_engines() {
    let Some(cc) = cc() else { return };
    let outcome = scripted(
        "copy-01",
        cc.clone(),
        Markup::Hermes,
        &Limits::default(),
        |asked| match asked.replies() {
            0 => Turn::calls("Bash", json!({"command": "ls -R", "description": "Look around"}))
                .thinking("What is here?"),
            1 => {
                let mut turn = Turn::calls("Bash", json!({"command": "cp sugar.txt otter/"}));
                turn.text = "I copy the file — with ümläuts, 日本 and `quotes`.".into();
                turn.and("Read", json!({"file_path": "/app/daisy.txt"}))
            }
            _ => Turn::says("The file is copied."),
        },
    );
    solved(&outcome);
    assert_eq!(outcome.kinds(), [BranchKind::Main], "{}", outcome.story());

    let outcome = scripted(
        "count-01",
        cc,
        Markup::Qwen3Coder,
        &Limits::default(),
        |asked| match asked.replies() {
            0 => Turn::calls("Write", json!({"file_path": "/app/sage.txt", "content": "7\n"})),
            1 => Turn::calls(
                "Edit",
                json!({"file_path": "/app/sage.txt", "old_string": "7", "new_string": "8", "replace_all": false}),
            ),
            _ => Turn::says("Eight lines."),
        },
    );
    solved(&outcome);
}

/// Two sub-agents at once, one of which starts a third.
#[test]
fn cc_sub_agents_are_branches_of_their_own() {
    let Some(cc) = cc() else { return };
    let agent =
        |task: &str| json!({"description": "a part", "prompt": task, "subagent_type": "general-purpose"});
    let outcome = scripted(
        "folders-01",
        cc,
        Markup::Hermes,
        &Limits::default(),
        move |asked| {
            let (first, replies) = (asked.first(), asked.replies());
            if first.contains("SUBTASK-DEEP") {
                Turn::says("Nothing to do so deep.")
            } else if first.contains("SUBTASK-ONE") {
                match replies {
                    0 => Turn::calls("Agent", agent("SUBTASK-DEEP: say that there is nothing to do.")),
                    _ => Turn::says("One is done."),
                }
            } else if first.contains("SUBTASK-TWO") {
                match replies {
                    0 => Turn::calls("Bash", json!({"command": super::solution("folders-01")})),
                    _ => Turn::says("Two is done."),
                }
            } else {
                match replies {
                    0 => Turn::calls("Agent", agent("SUBTASK-ONE: ask another agent."))
                        .and("Agent", agent("SUBTASK-TWO: solve it.")),
                    _ => Turn::says("Both are done."),
                }
            }
        },
    );
    solved(&outcome);
    let marked = outcome
        .exchanges
        .iter()
        .filter(|e| e.header("x-claude-code-agent-id").is_some());
    assert_eq!(marked.count(), 5, "{}", outcome.story());
    let mut kinds = outcome.trained();
    kinds.sort();
    let sub = (BranchKind::SubAgent, true);
    assert_eq!(
        kinds,
        [(BranchKind::Main, true), sub, sub, sub],
        "{}",
        outcome.story()
    );
}

/// Results that do not fit: the API refuses, the agent asks for a summary and begins anew.
#[test]
fn cc_compaction_begins_a_branch() {
    let Some(cc) = cc() else { return };
    let limits = Limits {
        context: 60_000,
        ..Limits::default()
    };
    let outcome = scripted("copy-01", cc, Markup::Hermes, &limits, |asked| {
        if asked.last().contains("summary of the conversation") {
            return Turn::says(&format!("<summary>{}: copy sugar.txt</summary>", super::SUMMARY));
        }
        if asked.first().contains(super::SUMMARY) {
            // The new history keeps the newest round as it was.
            return if asked.prompt.contains("cp sugar.txt otter/") {
                Turn::says("Done after the summary.")
            } else {
                Turn::calls("Bash", json!({"command": "cp sugar.txt otter/"}))
            };
        }
        // A digit is a token. The first result fits, both do not, the second one alone does.
        let digits = [14_000, 29_000][asked.replies().min(1)];
        Turn::calls(
            "Bash",
            json!({"command": format!("seq -s 7 10000 15500 | head -c {digits}")}),
        )
    });
    solved(&outcome);
    let refused: Vec<_> = outcome.exchanges.iter().filter(|e| e.status == 400).collect();
    assert!(!refused.is_empty() && refused[0].answer.contains("prompt is too long"));
    // How often it sums up depends on its own margins.
    let kinds = outcome.trained().into_iter();
    let expected = [
        (BranchKind::Main, true),
        (BranchKind::Compaction, true),
        (BranchKind::Summary, false),
    ];
    let story = outcome.story();
    assert_eq!(
        kinds.collect::<BTreeSet<_>>(),
        BTreeSet::from(expected),
        "{story}"
    );
    assert_eq!(stop(&outcome), StopReason::AgentCompleted, "{story}");
}

#[test]
fn cc_without_an_end_is_ended_by_the_turn_limit() {
    let Some(cc) = cc() else { return };
    super::endless(cc, |n| {
        Turn::calls("Bash", json!({"command": format!("echo {n}")}))
    });
}

#[test]
fn cc_survives_a_policy_that_answers_nonsense() {
    let Some(_) = cc() else { return };
    // A short prompt: all that the policy needs for nonsense.
    let disallowed_tools = [
        "Agent",
        "Artifact",
        "CronCreate",
        "CronDelete",
        "CronList",
        "EnterWorktree",
        "ExitWorktree",
        "ListAgents",
        "Monitor",
        "NotebookEdit",
        "ReportFindings",
        "ScheduleWakeup",
        "SendMessage",
        "Skill",
        "Task",
        "TaskStop",
        "TodoWrite",
        "WebFetch",
        "WebSearch",
        "Workflow",
    ];
    super::nonsense(Arc::new(Cc::new(CcConfig {
        disallowed_tools: disallowed_tools.map(str::to_owned).into(),
        ..CcConfig::default()
    })));
}

/// The agent repeats calls as it carried them out, with defaults, without white space at the ends of lines and
/// without a `cd` to where it is; the conversation stays one.
#[test]
fn cc_tidies_calls_and_the_conversation_stays_one() {
    let Some(cc) = cc() else { return };
    let outcome = scripted(
        "copy-01",
        cc,
        Markup::Qwen3Coder,
        &Limits::default(),
        |asked| match asked.replies() {
            0 => Turn::calls("Bash", json!({"command": "cd /app && cp sugar.txt otter/"}))
                .and(
                    "Write",
                    json!({"file_path": "/tmp/x.py", "content": "a = 1   \n\n  b = 2\t\n"}),
                )
                .and(
                    "Bash",
                    json!({"command": r"find . -name '*.txt' -exec echo {} \\;"}),
                )
                .and("Read", json!({"file_path": "daisy.txt"}))
                .and("Bash", json!({"cmd": "ls"})),
            1 => Turn::calls(
                "Edit",
                json!({"file_path": "/tmp/x.py", "old_string": "a = 1", "new_string": "a = 3  "}),
            )
            .and("Read", json!({"file_path": "/app/daisy.txt", "offset": 1}))
            .and("Nope", json!({"x": "1"}))
            .and("Bash", json!({"command": "  ls  \n"})),
            _ => Turn::says("Done."),
        },
    );
    solved(&outcome);
    let (kinds, turns): (Vec<_>, Vec<_>) = outcome
        .captured
        .branches
        .iter()
        .map(|b| (b.kind, b.turns))
        .unzip();
    assert_eq!(
        (kinds, turns),
        (vec![BranchKind::Main], vec![3]),
        "{}",
        outcome.story()
    );
}
