//! `legorl-rank check` and `explain`, as a user meets them.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
    process::{Command, Output},
};

const CONFIG: &str =
    "PROJECT_NAME=p\nEXP_NAME=e\nMODEL_PATH=models/none\nTRAIN_FILES=t.parquet\nVAL_FILES=v.parquet\n\
    NGPUS_PER_NODE=1\nTRAIN_BSZ=8\nMAX_PROMPT=256\nMAX_RESP=512\n";

fn run(arguments: &[&str], dir: &Path) -> Output {
    Command::new(env!("CARGO_BIN_EXE_legorl-rank"))
        .args(arguments)
        .current_dir(dir)
        .env_remove("SLURM_JOB_ID")
        .env("NO_COLOR", "1")
        .output()
        .unwrap()
}

fn out(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned()
}

fn everything_below(dir: &Path) -> BTreeSet<PathBuf> {
    let mut found = BTreeSet::new();
    let mut open = vec![dir.to_path_buf()];
    while let Some(dir) = open.pop() {
        for entry in fs::read_dir(dir).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                open.push(path.clone());
            }
            found.insert(path);
        }
    }
    found
}

#[test]
fn check_says_no_with_numbered_steps_and_changes_nothing() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("run.env"), CONFIG).unwrap();
    let before = everything_below(dir.path());
    let output = run(&["check", "run.env"], dir.path());
    let text = out(&output);
    assert_eq!(output.status.code(), Some(1), "{text}");
    assert_eq!(text.matches("SAFE TO RUN: NO").count(), 1, "{text}");
    assert!(
        text.contains("MODEL_PATH=") && text.contains("  1. fix [model-folder]"),
        "{text}"
    );
    assert!(
        text.contains("this machine") && text.contains("/dev/shm"),
        "{text}"
    );
    assert_eq!(everything_below(dir.path()), before, "check changes nothing");
}

#[test]
fn check_for_machines_is_one_json_object() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("run.env"), CONFIG).unwrap();
    let output = run(&["check", "--json", "run.env"], dir.path());
    let value: serde_json::Value = serde_json::from_str(&out(&output)).unwrap();
    assert_eq!(value["safe_to_run"], false);
    assert!(!value["findings"].as_array().unwrap().is_empty());
    assert!(!value["machine"].as_array().unwrap().is_empty());
    assert!(value["next_steps"][0].as_str().unwrap().starts_with("fix ["));
}

#[test]
fn a_truncated_tokenizer_is_found_before_the_launch() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("run.env"), CONFIG).unwrap();
    let model = dir.path().join("models/none");
    fs::create_dir_all(&model).unwrap();
    fs::write(
        model.join("config.json"),
        r#"{"model_type":"qwen3","vocab_size":300,"hidden_size":64,"num_hidden_layers":2,
            "num_attention_heads":4,"num_key_value_heads":2,"head_dim":16,"intermediate_size":128}"#,
    )
    .unwrap();
    fs::write(
        model.join("tokenizer.json"),
        r#"{"version":"1.0","model":{"type":"BPE","vocab":{"a":0"#,
    )
    .unwrap();
    let text = out(&run(&["--preflight-only", "run.env"], dir.path()));
    let line = text
        .lines()
        .find(|l| l.contains("FATAL") && l.contains("tokenizer"))
        .unwrap_or("");
    assert!(line.contains("MODEL_PATH="), "{text}");
    assert!(text.contains("[tokenizer]"), "{text}");
}

#[test]
fn explain_prints_a_rule_and_names_the_nearest() {
    let dir = tempfile::tempdir().unwrap();
    let output = run(&["explain", "topology"], dir.path());
    assert_eq!(output.status.code(), Some(0));
    for part in ["topology", "what", "why", "evidence", "fix"] {
        assert!(out(&output).contains(part));
    }
    let output = run(&["explain", "topologi"], dir.path());
    assert_eq!(output.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&output.stderr).contains("nearest is `topology`"));
}

/// Situations that the documentation of the original lists as common failures: what is set, what the
/// structure check ends with, and what its line says.
#[test]
fn common_failures_are_one_line_each() {
    let k8s = ["BACKEND=k8s", "K8S_KUBECONFIG=/k", "HARBOR_K8S_INLINE_BUILD=true"];
    let cases: [(&str, Vec<&str>, i32, &[&str]); 6] = [
        (
            "placeholder left in",
            vec!["MODEL_PATH=CHANGEME", "SCAFFOLD=ohsdk", "MAX_RESP=30000"],
            0,
            &["WARN", "MODEL_PATH still CHANGEME"],
        ),
        (
            "unknown model",
            vec!["MODEL_PATH=CHANGEME", "SCAFFOLD=ohsdk", "MAX_RESP=30000"],
            0,
            &["WARN", "no rule knows this model"],
        ),
        (
            "no kubeconfig",
            vec!["BACKEND=k8s", "HARBOR_K8S_INLINE_BUILD=true"],
            1,
            &["FATAL", "K8S_KUBECONFIG is required"],
        ),
        (
            "no image source",
            vec!["BACKEND=k8s", "K8S_KUBECONFIG=/k"],
            1,
            &[
                "FATAL",
                "HARBOR_OPENSWE_IMAGE_REGISTRY is empty and HARBOR_K8S_INLINE_BUILD=false",
            ],
        ),
        (
            "two image sources",
            [&k8s[..], &["HARBOR_OPENSWE_IMAGE_REGISTRY=r:5000"]].concat(),
            1,
            &["FATAL", "choose one"],
        ),
        (
            "a rule violated",
            vec!["NNODES=3", "N_NODES_TRAIN=1"],
            1,
            &["FATAL", "NNODES=3 but N_NODES_TRAIN=1 + N_NODES_ROLLOUT=0 = 1"],
        ),
    ];
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("run.env"), CONFIG).unwrap();
    for (what, set, code, parts) in cases {
        let mut arguments = vec!["--structure-only", "run.env"];
        for value in &set {
            arguments.extend(["--set", value]);
        }
        let output = run(&arguments, dir.path());
        let text = out(&output).replace("\n           ", " ");
        assert_eq!(output.status.code(), Some(code), "{what}:\n{text}");
        let found = text
            .lines()
            .any(|line| parts.iter().all(|part| line.contains(part)));
        assert!(found, "{what}: no line holds {parts:?}:\n{text}");
    }
    let full = run(
        &["--preflight-only", "run.env", "--set", "MODEL_PATH=CHANGEME"],
        dir.path(),
    );
    assert_eq!(
        full.status.code(),
        Some(1),
        "a placeholder stops everything but the structure check"
    );
}
