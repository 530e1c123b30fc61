//! Claude Code.

use super::{
    bench::{installed, scripted, Limits},
    check::check,
    script::{Markup, Turn},
};
use legorl::{
    base::BranchKind,
    rollout::scaffold::{Cc, CcConfig},
};
use serde_json::json;
use std::sync::Arc;

fn cc() -> Option<Arc<Cc>> {
    let cc = Cc::new(CcConfig::default());
    installed(&cc, true).then(|| Arc::new(cc))
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
    assert_eq!(outcome.reward(), 1.0, "{}", outcome.story());
    check(&outcome);
    let kinds: Vec<_> = outcome.captured.branches.iter().map(|b| b.kind).collect();
    assert_eq!(kinds, [BranchKind::Main], "{}", outcome.story());

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
    assert_eq!(outcome.reward(), 1.0, "{}", outcome.story());
    check(&outcome);
}
