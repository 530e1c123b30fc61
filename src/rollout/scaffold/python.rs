//! The scaffold of agents written in Python. [`PythonAgent`] holds what is an agent's own, one file each.
//!
//! The runtime (`setup/runtimes/python.sh`) is a Python of its own with the agent's packages. A small driver
//! of ours, one for each agent, is put into the sandbox beside its settings and started with that Python:
//!
//! ```text
//! <runtime>/bin/python3 /run/legorl-agent/driver.py /run/legorl-agent/settings.json
//! ```
//!
//! What a driver writes into its logs folder comes into the trial's `agent/` folder when the agent has ended,
//! whatever its end was.
//!
//! | Exit status of a driver | Meaning |
//! |---|---|
//! | 0 | the agent ended by itself |
//! | 1 | it failed; the last line of the log says how |
//! | 3 | it made all its model calls, or the proxy let it make no more |

use super::{process, AgentRequest, AgentRun, Runtime, RuntimeConfig, Scaffold, ScaffoldError};
use crate::base::error_chain;
use crate::rollout::sandbox::{ReadOnlyMount, Sandbox, SandboxError};
use async_trait::async_trait;
use serde_json::{json, Value};
use std::collections::BTreeMap;
use std::time::Duration;

/// Exit status of a driver whose agent made all its model calls.
const TURN_LIMIT: i32 = 3;
/// Where drivers keep their records inside.
const LOGS: &str = "/logs/agent";

/// One of these agents: what tells it from the others.
#[derive(Clone, Copy, Debug)]
pub struct PythonAgent {
    /// Value of `SCAFFOLD`, and name of the runtime.
    pub name: &'static str,
    /// Version of the runtime that this program was tested with.
    pub version: &'static str,
    /// Source of the driver.
    pub driver: &'static str,
}

/// An agent, run from its runtime.
#[derive(Clone, Debug)]
pub struct PythonScaffold {
    agent: PythonAgent,
    runtime: RuntimeConfig,
}

#[async_trait]
impl Scaffold for PythonScaffold {
    fn name(&self) -> &'static str {
        self.agent.name
    }

    fn check(&self) -> Result<(), ScaffoldError> {
        self.runtime()?.check()
    }

    fn mounts(&self) -> Result<Vec<ReadOnlyMount>, ScaffoldError> {
        Ok(vec![self.runtime()?.mount()])
    }

    /// Runs the driver to its end and takes its records out.
    async fn run(&self, sandbox: &dyn Sandbox, request: AgentRequest) -> Result<AgentRun, ScaffoldError> {
        let name = self.agent.name;
        let runtime = self.runtime()?;
        let put = |file, text| process::put(name, sandbox, &request.log_dir, file, text);
        let instruction = put("instruction.md", request.instruction.as_str()).await?;
        let settings = settings(sandbox, &request, &instruction).to_string();
        let settings = put("settings.json", settings.as_str()).await?;
        // The driver is the same in every trial: it does not stay in the trial's folder.
        let driver = put("driver.py", self.agent.driver).await?;
        let copy = request.log_dir.join("driver.py");
        std::fs::remove_file(&copy)
            .map_err(|e| process::failed(name)(SandboxError::io("remove", &copy, e)))?;

        let command = process::AgentCommand {
            scaffold: name,
            argv: vec![runtime.entry(), "-u".into(), driver, settings],
            env: environment(&runtime),
            log: format!("{name}.log"),
            turn_limit_code: Some(TURN_LIMIT),
            reason: failure_text,
        };
        let run = process::run(sandbox, &request, command).await?;
        self.take_records(sandbox, &request).await;
        Ok(run)
    }
}

impl PythonScaffold {
    /// A scaffold that runs this agent from this runtime.
    pub fn new(agent: PythonAgent, runtime: RuntimeConfig) -> Self {
        Self { agent, runtime }
    }

    fn runtime(&self) -> Result<Runtime, ScaffoldError> {
        Runtime::find(self.agent.name, self.agent.version, &self.runtime)
    }

    /// Copies what the driver wrote out of the sandbox. The folder is in the policy's reach: a record that it
    /// spoiled is lost, and the trial counts all the same.
    async fn take_records(&self, sandbox: &dyn Sandbox, request: &AgentRequest) {
        // An agent that ended before it wrote anything left no folder.
        let taken = match sandbox.make_dir(LOGS).await {
            Ok(()) => sandbox.download(LOGS, &request.log_dir).await,
            Err(error) => Err(error),
        };
        if let Err(error) = taken {
            tracing::warn!(
                scaffold = self.agent.name,
                session = %request.endpoint.session,
                "the agent's records in {LOGS} cannot be read: {}",
                error_chain(&error)
            );
        }
    }
}

/// What a driver is told.
fn settings(sandbox: &dyn Sandbox, request: &AgentRequest, instruction: &str) -> Value {
    let endpoint = &request.endpoint;
    json!({
        "instruction": instruction,
        "logs": LOGS,
        "model": endpoint.model,
        "base_url": format!("{}/v1", process::base_url(sandbox, endpoint)),
        "api_key": endpoint.secret,
        "session": endpoint.session.to_string(),
        "max_turns": request.max_turns,
        "context_tokens": request.context_tokens,
        "output_tokens": request.max_tokens_per_turn,
        "timeout": request.timeout.max(Duration::from_secs(1)).as_secs(),
    })
}

/// Nothing here reaches the libraries of what the agent starts; see `setup/runtimes/python.sh`.
fn environment(runtime: &Runtime) -> BTreeMap<String, String> {
    let root = runtime.inside();
    [
        ("PYTHONNOUSERSITE", "1".to_owned()),
        ("PYTHONDONTWRITEBYTECODE", "1".to_owned()),
        ("LITELLM_LOCAL_MODEL_COST_MAP", "True".to_owned()),
        (
            "TERMINFO_DIRS",
            format!("/etc/terminfo:/lib/terminfo:/usr/share/terminfo:{root}/share/terminfo"),
        ),
    ]
    .map(|(name, value)| (name.to_owned(), value))
    .into()
}

/// What the driver said last of the agent's failure, `NAME failed: …`, without the trace before it. It may go on
/// over several lines.
fn failure_text(log: &str) -> Option<String> {
    let starts = log.match_indices(" failed: ").map(|(at, _)| {
        let line = log[..at].rfind('\n').map_or(0, |end| end + 1);
        (line, &log[line..at])
    });
    let ours = ["OpenHands", "Terminus 2"];
    let (line, _) = starts.filter(|(_, name)| ours.contains(name)).last()?;
    Some(log[line..].to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_driver_says_why_its_agent_failed() {
        let trace = "Traceback (most recent call last):\n  File \"x\", line 3\nValueError: call failed: no\n";
        let end = format!(
            "Terminus 2 failed: BadRequest: {}\nsecond line\n",
            "x".repeat(900)
        );
        assert_eq!(failure_text(&format!("{trace}{end}")).as_deref(), Some(&end[..]));
        assert_eq!(failure_text(trace), None);
        // Every driver uses these words.
        for agent in [include_str!("oh/driver.py"), include_str!("ohsdk/driver.py")] {
            assert!(agent.contains("OpenHands failed: {"));
        }
        assert!(include_str!("terminus2/driver.py").contains("Terminus 2 failed: {"));
    }
}
