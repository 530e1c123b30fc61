//! What scaffolds of foreign programs have in common: files for the agent, one command with its log and its
//! time limit, and what its last words say about a failure.

use super::{AgentRequest, AgentRun, ScaffoldError};
use crate::base::SessionEndpoint;
use crate::rollout::sandbox::{ExecResult, ExecSpec, LogFile, Sandbox, SandboxError};
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
            detail(&result)
        },
        elapsed: begin.elapsed(),
    })
}

/// How a failed command was ended, or its last lines; empty after a success.
pub fn detail(result: &ExecResult) -> String {
    if result.success() {
        return String::new();
    }
    if result.timed_out {
        return "the time limit ended it".into();
    }
    let last = last_words(&result.tail);
    match result.signal {
        Some(signal) if last.is_empty() => format!("ended by signal {signal}"),
        Some(signal) => format!("ended by signal {signal}; it last said: {last}"),
        None => last,
    }
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
}
