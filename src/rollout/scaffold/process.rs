//! What scaffolds of foreign programs have in common: files for the agent, one command with its log and its
//! time limit, and what its last words say about a failure.

use super::{AgentRequest, AgentRun, ScaffoldError};
use crate::base::SessionEndpoint;
use crate::rollout::sandbox::{ExecResult, ExecSpec, LogFile, Sandbox, SandboxError};
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::time::Instant;

/// Folder inside for what a scaffold uploads: instruction, configuration, start script.
pub const FOLDER: &str = "/run/legorl-agent";
/// Bytes of an agent's log that are kept.
const LOG_CAP_BYTES: u64 = 16 << 20;
/// Characters of the last words that become [`AgentRun::detail`].
const DETAIL_CHARS: usize = 600;

/// The agent's command.
#[derive(Clone, Debug)]
pub struct AgentCommand {
    /// Value of `SCAFFOLD`.
    pub scaffold: &'static str,
    /// Program and arguments.
    pub argv: Vec<String>,
    /// Added to the sandbox's environment.
    pub env: BTreeMap<String, String>,
    /// Name of the log in the trial's `agent/` folder; it gets both outputs.
    pub log: String,
    /// Exit status that means that the agent made all its model calls.
    pub turn_limit_code: Option<i32>,
    /// Finds in the end of the log (64 KiB) what a failed agent says of its failure. Where it finds nothing, or
    /// the agent crashed, the last lines stand for it.
    pub reason: fn(&str) -> Option<String>,
}

/// Where the session's API begins for an agent in `sandbox`, without `/v1`.
pub fn base_url(sandbox: &dyn Sandbox, endpoint: &SessionEndpoint) -> String {
    format!("http://{}{}", sandbox.proxy_address(), endpoint.path)
}

/// Gives a sandbox's failure its scaffold.
pub fn failed(scaffold: &'static str) -> impl Fn(SandboxError) -> ScaffoldError {
    move |source| ScaffoldError::Sandbox { scaffold, source }
}

/// Writes a text into the sandbox, as [`FOLDER`]`/name`, and keeps it beside the agent's log. Gives its path
/// inside.
pub async fn put(
    scaffold: &'static str,
    sandbox: &dyn Sandbox,
    log_dir: &Path,
    name: &str,
    text: &str,
) -> Result<String, ScaffoldError> {
    let local = log_dir.join(name);
    fs::write(&local, text).map_err(|e| failed(scaffold)(SandboxError::io("write", &local, e)))?;
    let inside = format!("{FOLDER}/{name}");
    sandbox.upload(&local, &inside).await.map_err(failed(scaffold))?;
    Ok(inside)
}

/// Runs the agent to its end or to its time limit.
pub async fn run(
    sandbox: &dyn Sandbox,
    request: &AgentRequest,
    command: AgentCommand,
) -> Result<AgentRun, ScaffoldError> {
    let spec = ExecSpec {
        env: command.env,
        timeout: Some(request.timeout),
        log: Some(LogFile {
            path: request.log_dir.join(&command.log),
            cap_bytes: LOG_CAP_BYTES,
        }),
        ..ExecSpec::new(command.argv)
    };
    let begin = Instant::now();
    let result = sandbox.exec(spec).await.map_err(failed(command.scaffold))?;
    let turn_limit_reached = command
        .turn_limit_code
        .is_some_and(|code| result.exit_code == Some(code));
    Ok(AgentRun {
        exit_code: result.exit_code,
        timed_out: result.timed_out,
        turn_limit_reached,
        oom_killed: result.oom_killed,
        detail: if turn_limit_reached {
            String::new()
        } else {
            detail(&result, command.reason)
        },
        elapsed: begin.elapsed(),
    })
}

/// How a failed command was ended, what it says of that, or its last lines; empty after a success.
pub fn detail(result: &ExecResult, reason: fn(&str) -> Option<String>) -> String {
    if result.success() {
        return String::new();
    }
    if result.timed_out {
        return "the time limit ended it".into();
    }
    let said = reason(&result.tail).filter(|said| result.signal.is_none() && !said.trim().is_empty());
    if let Some(said) = said {
        return one_line(&said).chars().take(DETAIL_CHARS).collect();
    }
    let last = last_words(&result.tail);
    match result.signal {
        Some(signal) if last.is_empty() => format!("ended by signal {signal}"),
        Some(signal) => format!("ended by signal {signal}; it last said: {last}"),
        None => last,
    }
}

/// For agents that write no record of their failure.
pub fn no_reason(_: &str) -> Option<String> {
    None
}

/// The last event of a type in a log of one JSON event a line, whatever the order of its keys and whatever stands
/// between the events.
pub fn last_event(log: &str, kind: &str) -> Option<Value> {
    let parse = |line: &str| serde_json::from_str::<Value>(line.trim()).ok();
    let mut events = log.lines().rev().filter_map(parse);
    events.find(|event| event["type"] == kind)
}

fn one_line(text: &str) -> String {
    let lines = text.lines().map(str::trim).filter(|line| !line.is_empty());
    lines.collect::<Vec<_>>().join(" | ")
}

/// The last lines that are not empty, at most [`DETAIL_CHARS`] characters of their end, in one line.
fn last_words(tail: &str) -> String {
    let mut lines: Vec<&str> = tail
        .lines()
        .rev()
        .map(str::trim)
        .filter(|line| !line.is_empty())
        .take(4)
        .collect();
    lines.reverse();
    let text = lines.join(" | ");
    let skip = text.chars().count().saturating_sub(DETAIL_CHARS);
    text.chars().skip(skip).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failure_is_told_by_its_last_words() {
        let result = |exit_code, signal, tail: &str| ExecResult {
            exit_code,
            signal,
            tail: tail.into(),
            ..ExecResult::default()
        };
        let detail = |result: &ExecResult| detail(result, no_reason);
        assert_eq!(detail(&result(Some(0), None, "all is well")), "");
        assert_eq!(
            detail(&result(Some(1), None, "a\n\nno route\n\n")),
            "a | no route"
        );
        assert_eq!(detail(&result(None, Some(9), "")), "ended by signal 9");
        assert!(detail(&result(None, Some(11), "boom")).ends_with("said: boom"));
        let long = detail(&result(Some(1), None, &"ö".repeat(5000)));
        assert_eq!(long.chars().count(), DETAIL_CHARS);
        let late = ExecResult {
            timed_out: true,
            ..result(None, Some(9), "x")
        };
        assert_eq!(detail(&late), "the time limit ended it");
    }

    #[test]
    fn what_an_agent_says_of_its_failure_goes_before_its_last_lines() {
        let said = |signal, tail: &str| {
            let result = ExecResult {
                exit_code: Some(1),
                signal,
                tail: tail.into(),
                ..ExecResult::default()
            };
            let reason = |log: &str| last_event(log, "end").map(|e| e["why"].as_str().unwrap_or("").into());
            detail(&result, reason)
        };
        let long = format!(
            "{{\"n\":1,\"why\":\"no room\\nat all\",\"pad\":\"{}\",\"type\":\"end\"}}",
            "x".repeat(3000)
        );
        assert_eq!(said(None, &format!("{long}\nbye\n")), "no room | at all");
        assert_eq!(
            said(None, "{\"type\":\"end\",\"why\":\"\"}\nbye"),
            "{\"type\":\"end\",\"why\":\"\"} | bye"
        );
        assert!(said(Some(11), &format!("{long}\nboom")).starts_with("ended by signal 11"));
        // The line is cut at its start: it is no event.
        assert_eq!(last_event(&long[10..], "end"), None);
    }
}
