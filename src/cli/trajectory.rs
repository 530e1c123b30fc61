//! `legorl-rank trajectory show`: what a trial said, for a person.
//!
//! The file is `proxy_trajectory.json` of a trial's folder. What the policy sampled has a bar at its left
//! (and a colour on a terminal); everything else was given to it.

use anyhow::{bail, Context};
use clap::{Args, Subcommand};
use serde_json::Value;
use std::{
    fmt::Write,
    io::IsTerminal,
    path::{Path, PathBuf},
    process::ExitCode,
};

/// Commands on trajectories.
#[derive(Subcommand)]
pub enum TrajectoryCommand {
    /// Print the branches of a trial, sampled and given text told apart
    Show(ShowArgs),
}

/// Arguments of `trajectory show`.
#[derive(Args)]
pub struct ShowArgs {
    /// Folder of a trial, or its proxy_trajectory.json
    #[arg(value_name = "TRIAL")]
    trial: PathBuf,
    /// Only this branch
    #[arg(long, value_name = "N")]
    branch: Option<usize>,
    /// Lines of a message that are printed; 0 prints all
    #[arg(long, value_name = "N", default_value_t = 40)]
    lines: usize,
}

/// Runs the command.
pub fn run(command: &TrajectoryCommand) -> anyhow::Result<ExitCode> {
    let TrajectoryCommand::Show(args) = command;
    let trajectory = read(&args.trial)?;
    let branches = trajectory["branches"].as_array().map_or(0, Vec::len);
    if let Some(branch) = args.branch.filter(|n| *n >= branches) {
        bail!("--branch {branch}: the trial has {branches} branches, numbered from 0");
    }
    let colour = std::io::stdout().is_terminal() && std::env::var_os("NO_COLOR").is_none();
    super::print(&text(&trajectory, args.branch, args.lines, colour));
    Ok(ExitCode::SUCCESS)
}

fn read(trial: &Path) -> anyhow::Result<Value> {
    let path = if trial.is_dir() {
        trial.join("proxy_trajectory.json")
    } else {
        trial.to_owned()
    };
    let data = std::fs::read(&path).with_context(|| {
        format!(
            "cannot read {}; give the folder of a trial, below HARBOR_TRIALS_DIR",
            path.display()
        )
    })?;
    let value: Value =
        serde_json::from_slice(&data).with_context(|| format!("{} is not JSON", path.display()))?;
    if !value["branches"].is_array() {
        bail!(
            "{} has no `branches`: it is not a proxy_trajectory.json",
            path.display()
        );
    }
    Ok(value)
}

/// The whole output.
fn text(trajectory: &Value, only: Option<usize>, lines: usize, colour: bool) -> String {
    let mut out = String::new();
    let word = |key: &str| match &trajectory[key] {
        Value::String(text) => text.clone(),
        Value::Null => "none".to_owned(),
        other => other.to_string(),
    };
    // Writing to a string cannot fail.
    let _ = writeln!(
        out,
        "{}  task {}  key {}  attempt {}  reward {}  stop {}  requests {} ({} refused)",
        word("session"),
        word("task"),
        word("key"),
        word("attempt"),
        word("reward"),
        word("stop"),
        word("requests"),
        word("refused")
    );
    for (number, branch) in trajectory["branches"]
        .as_array()
        .into_iter()
        .flatten()
        .enumerate()
    {
        if only.is_some_and(|only| only != number) {
            continue;
        }
        let parent = branch["parent"]
            .as_u64()
            .map_or(String::new(), |p| format!(", from branch {p}"));
        let trained = match branch["trainable"].as_bool() {
            Some(true) => format!("weight {:.3}", branch["weight"].as_f64().unwrap_or_default()),
            _ => "not trained".to_owned(),
        };
        let _ = writeln!(
            out,
            "\n=== branch {number}: {}{parent}, {trained}, {} turns, {} tokens, {} of them sampled ===",
            branch["kind"].as_str().unwrap_or("?"),
            branch["turns"],
            branch["tokens"],
            branch["sampled_tokens"]
        );
        for message in branch["messages"].as_array().into_iter().flatten() {
            render(&mut out, message, lines, colour);
        }
    }
    out
}

fn render(out: &mut String, message: &Value, lines: usize, colour: bool) {
    let sampled = message["sampled"] == true;
    let role = message["role"].as_str().unwrap_or("?");
    let _ = writeln!(out, "\n--- {role}{}", if sampled { " (sampled)" } else { "" });
    let mut put = |label: &str, text: &str| {
        if text.is_empty() {
            return;
        }
        if !label.is_empty() {
            line(out, label, sampled, colour);
        }
        let all: Vec<&str> = text.lines().collect();
        let shown = if lines == 0 {
            all.len()
        } else {
            lines.min(all.len())
        };
        for text in &all[..shown] {
            line(out, text, sampled, colour);
        }
        if shown < all.len() {
            let more = format!("… {} more lines (--lines 0 prints all)", all.len() - shown);
            line(out, &more, sampled, colour);
        }
    };
    put(
        "[reasoning]",
        message["reasoning_content"].as_str().unwrap_or_default(),
    );
    match &message["content"] {
        Value::String(text) => put("", text),
        Value::Null => {}
        other => put("", &other.to_string()),
    }
    for call in message["tool_calls"].as_array().into_iter().flatten() {
        let arguments = match &call["function"]["arguments"] {
            Value::String(text) => text.clone(),
            other => other.to_string(),
        };
        let name = call["function"]["name"].as_str().unwrap_or("?");
        put("", &format!("[call {name}] {arguments}"));
    }
}

fn line(out: &mut String, text: &str, sampled: bool, colour: bool) {
    // Control characters of a tool's output must not move the cursor.
    let text: String = text
        .chars()
        .map(|c| {
            if c.is_control() && c != '\t' {
                '\u{fffd}'
            } else {
                c
            }
        })
        .collect();
    let _ = match (sampled, colour) {
        (true, true) => writeln!(out, "\x1b[32m▌ {text}\x1b[0m"),
        (true, false) => writeln!(out, "▌ {text}"),
        (false, _) => writeln!(out, "  {text}"),
    };
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn sampled_and_given_text_are_told_apart() {
        let trajectory = json!({"session": "s__1", "task": "t", "key": "train-g000001-s0", "attempt": 0, "reward": 1.0,
            "stop": "agent_completed", "requests": 3, "refused": 1, "branches": [
                {"kind": "main", "trainable": true, "weight": 1.0, "parent": null, "turns": 1, "tokens": 9, "sampled_tokens": 4,
                 "messages": [{"role": "user", "content": "one\ntwo\nthree"},
                    {"role": "assistant", "content": "I look.", "reasoning_content": "hm", "sampled": true,
                     "tool_calls": [{"id": "c", "function": {"name": "run", "arguments": "{\"cmd\":\"ls\"}"}}]},
                    {"role": "tool", "content": "a\u{1b}[2Jb"}]},
                {"kind": "side", "trainable": false, "weight": 0.0, "parent": 0, "turns": 1, "tokens": 2, "sampled_tokens": 1, "messages": []}]});
        let shown = text(&trajectory, None, 2, false);
        for part in [
            "task t  key train-g000001-s0  attempt 0  reward 1.0  stop agent_completed  requests 3 (1 refused)",
            "=== branch 0: main, weight 1.000, 1 turns, 9 tokens, 4 of them sampled ===",
            "--- user\n  one\n  two\n  … 1 more lines",
            "--- assistant (sampled)\n▌ [reasoning]\n▌ hm\n▌ I look.\n▌ [call run] {\"cmd\":\"ls\"}",
            "--- tool\n  a\u{fffd}[2Jb",
            "=== branch 1: side, from branch 0, not trained",
        ] {
            assert!(shown.contains(part), "{part}\n{shown}");
        }
        let one = text(&trajectory, Some(1), 2, true);
        assert!(!one.contains("branch 0:") && one.contains("branch 1:"), "{one}");
    }

    #[test]
    fn a_folder_without_a_trajectory_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let error = format!("{:#}", read(dir.path()).unwrap_err());
        assert!(
            error.contains("proxy_trajectory.json") && error.contains("HARBOR_TRIALS_DIR"),
            "{error}"
        );
        std::fs::write(dir.path().join("proxy_trajectory.json"), "{}").unwrap();
        assert!(read(dir.path()).unwrap_err().to_string().contains("branches"));
    }
}
