//! The adapter for agents of one's own: an agent of a few lines of shell, in a runtime folder.

use super::{
    bench::{scripted, Limits, Outcome},
    check::check,
    script::{Markup, Turn},
    solved, stop,
};
use legorl::{
    base::{BranchKind, StopReason},
    rollout::scaffold::{Custom, CustomConfig, Scaffold, ScaffoldError},
};
use std::sync::Arc;

/// The agent of docs/scaffolds.md, taken from there.
fn agent() -> String {
    let page = std::fs::read_to_string(crate::support::root().join("docs/scaffolds.md")).unwrap();
    let from = page
        .find("#!/bin/bash\n# one-shot")
        .expect("the page shows the agent");
    let text = &page[from..];
    text[..text.find("```").expect("the example ends")].to_owned()
}

/// The checks of this bench fail where one bit is wrong.
fn damage_is_found(mut outcome: Outcome) {
    let fails = |outcome: &Outcome, what: &str| {
        let checked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| check(outcome)));
        assert!(checked.is_err(), "not found: {what}");
    };
    let sound = outcome.captured.branches[0].tokens.clone();
    let first = sound.prompt_len as usize;
    type Damage = fn(&mut legorl::base::TokenSequence, usize);
    let damages: [(&str, Damage); 6] = [
        ("a log-prob", |t, at| {
            t.logprobs[at] = f32::from_bits(t.logprobs[at].to_bits() ^ 1)
        }),
        ("a version", |t, at| t.versions[at] += 1),
        ("a sampled id", |t, at| t.token_ids[at + 1] ^= 1),
        ("an id of the prompt", |t, at| t.token_ids[at - 2] ^= 1),
        ("a token that the mask leaves out", |t, at| {
            t.loss_mask[at] = false;
            t.prompt_len += 1;
        }),
        ("a token that the mask takes in", |t, at| {
            t.loss_mask[at - 1] = true;
            t.prompt_len -= 1;
        }),
    ];
    for (what, damage) in damages {
        damage(&mut outcome.captured.branches[0].tokens, first);
        fails(&outcome, what);
        outcome.captured.branches[0].tokens = sound.clone();
    }
    check(&outcome);
    let answer = &mut outcome
        .exchanges
        .iter_mut()
        .find(|e| e.generates())
        .unwrap()
        .answer;
    *answer = answer.replace("I copy it.", "I copied it.");
    fails(&outcome, "a text on the wire");
}

#[test]
fn a_custom_agent_of_a_few_lines_solves_a_task() {
    let runtime = tempfile::tempdir().unwrap();
    std::fs::write(runtime.path().join("agent.sh"), agent()).unwrap();
    let custom = Arc::new(Custom::new(CustomConfig {
        command: "bash $LEGORL_RUNTIME/agent.sh".into(),
        runtime: Some(runtime.path().to_owned()),
    }));
    custom.check().unwrap();
    let outcome = scripted(
        "copy-01",
        custom.clone(),
        Markup::Hermes,
        &Limits::default(),
        |asked| {
            assert!(
                asked.last().contains("Copy the file sugar.txt"),
                "{}",
                asked.prompt
            );
            Turn::says("I copy it.\n$ cp sugar.txt otter/\n$ echo \"done\"")
        },
    );
    solved(&outcome);
    assert_eq!(outcome.captured.branches.len(), 1);
    assert_eq!(outcome.captured.branches[0].kind, BranchKind::Main);
    assert_eq!(stop(&outcome), StopReason::AgentCompleted);
    assert!(
        outcome.file("agent/custom.log").contains("done"),
        "{}",
        outcome.story()
    );

    damage_is_found(outcome);

    // What the agent's exit status means.
    for (command, expected) in [
        (
            "bash $LEGORL_RUNTIME/agent.sh; exit 3",
            StopReason::MaxTurnsReached,
        ),
        ("bash $LEGORL_RUNTIME/agent.sh; exit 7", StopReason::AgentCrash),
    ] {
        let custom = Custom::new(CustomConfig {
            command: command.into(),
            runtime: Some(runtime.path().to_owned()),
        });
        let outcome = scripted(
            "copy-01",
            Arc::new(custom),
            Markup::Hermes,
            &Limits::default(),
            |_| Turn::says("Nothing."),
        );
        assert_eq!(stop(&outcome), expected, "{}", outcome.story());
    }
    let missing = Custom::new(CustomConfig {
        command: "true".into(),
        runtime: Some("/no/such/folder".into()),
    });
    assert!(
        matches!(missing.check(), Err(ScaffoldError::NotInstalled { problem, .. }) if problem.contains("/no/such/folder"))
    );
}
