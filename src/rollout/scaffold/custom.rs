//! `SCAFFOLD=custom`: any agent, started by a shell command of the run config (`SCAFFOLD_COMMAND`).
//!
//! The command runs in the sandbox with `/bin/sh -c`, in the task's working folder, with nothing on standard
//! input. `SCAFFOLD_RUNTIME` names a folder of the host with the agent's files; it is mounted read-only at
//! [`INSIDE`]. What a command must know is in its environment:
//!
//! | Variable | Value |
//! |---|---|
//! | `OPENAI_BASE_URL` | chat completions and responses, with `/v1` |
//! | `ANTHROPIC_BASE_URL` | messages, without `/v1` |
//! | `OPENAI_API_KEY`, `ANTHROPIC_API_KEY` | secret of the session |
//! | `LEGORL_MODEL` | name of the model |
//! | `LEGORL_INSTRUCTION_FILE` | file with the task's text |
//! | `LEGORL_RUNTIME` | [`INSIDE`], when there is a runtime |
//! | `LEGORL_MAX_TURNS` | model calls that the proxy answers |
//! | `LEGORL_CONTEXT_TOKENS`, `LEGORL_OUTPUT_TOKENS` | context window; longest reply |
//!
//! | Exit | Meaning |
//! |---|---|
//! | 0 | the agent ended by itself |
//! | 3 | it ended because it had made `LEGORL_MAX_TURNS` model calls |
//! | other, a signal | it crashed; its last lines are the reason |
//!
//! The log is `agent/custom.log`.

use super::process::{self, AgentCommand};
use super::{AgentRequest, AgentRun, Scaffold, ScaffoldError};
use crate::rollout::sandbox::{ReadOnlyMount, Sandbox};
use async_trait::async_trait;
use std::path::PathBuf;

const NAME: &str = "custom";
/// Where the runtime lies inside.
pub const INSIDE: &str = "/opt/legorl/runtimes/custom";
const TURN_LIMIT: i32 = 3;

/// Choices of the scaffold.
#[derive(Clone, Debug, Default)]
pub struct CustomConfig {
    /// Shell command (`SCAFFOLD_COMMAND`).
    pub command: String,
    /// Folder of the host (`SCAFFOLD_RUNTIME`).
    pub runtime: Option<PathBuf>,
}

/// See the module.
#[derive(Clone, Debug)]
pub struct Custom {
    config: CustomConfig,
}

impl Custom {
    /// A scaffold.
    pub fn new(config: CustomConfig) -> Self {
        Self { config }
    }
}

#[async_trait]
impl Scaffold for Custom {
    fn name(&self) -> &'static str {
        NAME
    }

    fn check(&self) -> Result<(), ScaffoldError> {
        if self.config.command.trim().is_empty() {
            return Err(ScaffoldError::NotInstalled {
                scaffold: NAME,
                problem: "SCAFFOLD_COMMAND is empty".into(),
                fix: "set SCAFFOLD_COMMAND to the shell command that starts the agent".into(),
            });
        }
        match &self.config.runtime {
            Some(folder) if !folder.is_dir() => Err(ScaffoldError::NotInstalled {
                scaffold: NAME,
                problem: format!("SCAFFOLD_RUNTIME={} is not a folder", folder.display()),
                fix: "set SCAFFOLD_RUNTIME to the folder with the agent's files, or leave it out".into(),
            }),
            _ => Ok(()),
        }
    }

    fn mounts(&self) -> Result<Vec<ReadOnlyMount>, ScaffoldError> {
        let mount = |host: &PathBuf| ReadOnlyMount {
            host: host.clone(),
            inside: INSIDE.into(),
        };
        Ok(self.config.runtime.iter().map(mount).collect())
    }

    async fn run(&self, sandbox: &dyn Sandbox, request: AgentRequest) -> Result<AgentRun, ScaffoldError> {
        let (log_dir, text) = (&request.log_dir, &request.instruction);
        let file = process::put(NAME, sandbox, log_dir, "instruction.md", text).await?;
        let url = process::base_url(sandbox, &request.endpoint);
        let secret = &request.endpoint.secret;
        let mut env = vec![
            ("OPENAI_BASE_URL", format!("{url}/v1")),
            ("OPENAI_API_KEY", secret.clone()),
            ("ANTHROPIC_BASE_URL", url),
            ("ANTHROPIC_API_KEY", secret.clone()),
            ("LEGORL_MODEL", request.endpoint.model.clone()),
            ("LEGORL_INSTRUCTION_FILE", file),
            ("LEGORL_MAX_TURNS", request.max_turns.to_string()),
            ("LEGORL_CONTEXT_TOKENS", request.context_tokens.to_string()),
            ("LEGORL_OUTPUT_TOKENS", request.max_tokens_per_turn.to_string()),
        ];
        if self.config.runtime.is_some() {
            env.push(("LEGORL_RUNTIME", INSIDE.to_owned()));
        }
        let command = AgentCommand {
            scaffold: NAME,
            argv: ["/bin/sh", "-c", &self.config.command].map(str::to_owned).into(),
            env: env
                .into_iter()
                .map(|(name, value)| (name.to_owned(), value))
                .collect(),
            log: "custom.log".into(),
            turn_limit_code: Some(TURN_LIMIT),
            reason: process::no_reason,
        };
        process::run(sandbox, &request, command).await
    }
}
