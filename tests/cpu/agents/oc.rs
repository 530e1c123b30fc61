//! OpenCode.

use super::{
    bench::{installed, scripted, Limits},
    check::check,
    script::{Markup, Turn},
};
use legorl::{
    base::BranchKind,
    rollout::scaffold::{Oc, OcConfig},
};
use serde_json::json;
use std::sync::Arc;

fn oc() -> Option<Arc<Oc>> {
    let oc = Oc::new(OcConfig::default());
    installed(&oc, true).then(|| Arc::new(oc))
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
    assert_eq!(outcome.reward(), 1.0, "{}", outcome.story());
    check(&outcome);
    let kinds: Vec<_> = outcome.captured.branches.iter().map(|b| b.kind).collect();
    assert_eq!(kinds, [BranchKind::Main], "{}", outcome.story());

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
    assert_eq!(outcome.reward(), 1.0, "{}", outcome.story());
    check(&outcome);
}
