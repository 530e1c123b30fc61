//! `SCAFFOLD=mini`: the built-in agent, one `bash` tool in a loop over chat completions.
//!
//! It is the sub-command `mini` of the static helper, so it runs in a root that holds only a shell. Its
//! run is kept as JSON lines in `agent/mini.jsonl` of the trial folder.

#[cfg(test)]
mod tests;

use super::{AgentRequest, AgentRun, Scaffold, ScaffoldError};
use crate::rollout::sandbox::process::helper;
use crate::rollout::sandbox::{ExecResult, ExecSpec, LogFile, Sandbox, SandboxError};
use async_trait::async_trait;
use std::fs;
use std::path::PathBuf;
use std::time::Instant;

const NAME: &str = "mini";
/// Tokens of its first request behind a task of one line, system prompt and tool included: Qwen3's tokenizer.
pub const FIRST_REQUEST_TOKENS: u32 = 170;
/// Where the agent's files lie inside.
const FOLDER: &str = "/run/legorl-mini";
/// Exit status of the agent when it has made all its model calls.
const TURN_LIMIT: i32 = 3;
/// Bytes of the agent's log that are kept.
const LOG_CAP_BYTES: u64 = 16 << 20;

/// Choices of the scaffold.
#[derive(Clone, Debug, Default)]
pub struct MiniConfig {
    /// The static helper; searched for by [`helper::find`] when absent.
    pub helper: Option<PathBuf>,
    /// Ask for streamed replies.
    pub stream: bool,
    /// Time limit of one command of the tool, seconds; the agent's own default when absent.
    pub command_timeout_secs: Option<u32>,
}

/// See the module.
#[derive(Clone, Debug, Default)]
pub struct Mini {
    config: MiniConfig,
}

impl Mini {
    /// A scaffold.
    pub fn new(config: MiniConfig) -> Self {
        Self { config }
    }

    fn helper(&self) -> Result<PathBuf, ScaffoldError> {
        helper::resolve(self.config.helper.as_deref()).map_err(|e| match e {
            SandboxError::Unavailable { what, detail, fix } => ScaffoldError::NotInstalled {
                scaffold: NAME,
                problem: format!("{what}: {detail}"),
                fix,
            },
            other => failed(other),
        })
    }

    /// Path of the agent's program inside.
    fn program(sandbox: &dyn Sandbox) -> String {
        sandbox
            .helper()
            .map_or_else(|| format!("{FOLDER}/agent"), str::to_string)
    }

    fn command(&self, sandbox: &dyn Sandbox, request: &AgentRequest) -> ExecSpec {
        let endpoint = &request.endpoint;
        let mut argv = vec![
            Self::program(sandbox),
            "mini".into(),
            "--instruction-file".into(),
            format!("{FOLDER}/instruction.md"),
            "--max-turns".into(),
            request.max_turns.to_string(),
        ];
        if let Some(secs) = self.config.command_timeout_secs {
            argv.extend(["--command-timeout".into(), secs.to_string()]);
        }
        if self.config.stream {
            argv.push("--stream".into());
        }
        let url = format!("http://{}{}/v1", sandbox.proxy_address(), endpoint.path);
        let mut spec = ExecSpec::new(argv);
        spec.env = [
            ("OPENAI_BASE_URL", url),
            ("OPENAI_API_KEY", endpoint.secret.clone()),
            ("MODEL", endpoint.model.clone()),
        ]
        .map(|(name, value)| (name.to_string(), value))
        .into();
        spec.timeout = Some(request.timeout);
        spec.log = Some(LogFile {
            path: request.log_dir.join("mini.jsonl"),
            cap_bytes: LOG_CAP_BYTES,
        });
        spec
    }
}

fn failed(source: SandboxError) -> ScaffoldError {
    ScaffoldError::Sandbox {
        scaffold: NAME,
        source,
    }
}

#[async_trait]
impl Scaffold for Mini {
    fn name(&self) -> &'static str {
        NAME
    }

    fn check(&self) -> Result<(), ScaffoldError> {
        self.helper().map(drop)
    }

    async fn setup(&self, sandbox: &dyn Sandbox) -> Result<(), ScaffoldError> {
        if sandbox.helper().is_some() {
            return Ok(());
        }
        let helper = self.helper()?;
        sandbox
            .upload(&helper, &Self::program(sandbox))
            .await
            .map_err(failed)
    }

    async fn run(&self, sandbox: &dyn Sandbox, request: AgentRequest) -> Result<AgentRun, ScaffoldError> {
        let instruction = request.log_dir.join("instruction.md");
        let io = |e| failed(SandboxError::io("write", &instruction, e));
        fs::write(&instruction, &request.instruction).map_err(io)?;
        let inside = format!("{FOLDER}/instruction.md");
        sandbox.upload(&instruction, &inside).await.map_err(failed)?;

        let begin = Instant::now();
        let result = sandbox
            .exec(self.command(sandbox, &request))
            .await
            .map_err(failed)?;
        Ok(AgentRun {
            exit_code: result.exit_code,
            timed_out: result.timed_out,
            turn_limit_reached: result.exit_code == Some(TURN_LIMIT),
            oom_killed: result.oom_killed,
            detail: detail(&result),
            elapsed: begin.elapsed(),
        })
    }
}

/// What the last line of the agent's log says about a failure, or how it was ended.
fn detail(result: &ExecResult) -> String {
    if result.success() || result.exit_code == Some(TURN_LIMIT) {
        return String::new();
    }
    if result.timed_out {
        return "the time limit ended it".into();
    }
    if let Some(signal) = result.signal {
        return format!("ended by signal {signal}");
    }
    let last = result.tail.lines().next_back().unwrap_or_default();
    let event: Option<serde_json::Value> = serde_json::from_str(last).ok();
    match event.as_ref().and_then(|e| e["detail"].as_str()) {
        Some(detail) => detail.to_string(),
        None => last.to_string(),
    }
}
