//! `SCAFFOLD=oc`: OpenCode, the native program of its npm package, in run mode.
//!
//! Runtime: `setup/runtimes.sh oc`; the program needs glibc in the sandbox and nothing else. It speaks OpenAI
//! chat completions, streamed, through the provider that is built into it. Its log is `agent/oc.jsonl`: one
//! JSON event a line.
//!
//! It asks for no title (the run has one), keeps no snapshots of the working folder, takes every permission
//! as given, and knows the context window, so that it compacts before it is full.
//!
//! | Exit | Meaning |
//! |---|---|
//! | 0 | it answered without a tool call: it thinks that it is done |
//! | 1 | the API refused for good, or a request exceeded the context on the way, although it went on after it |
//! | a signal, 127, … | it crashed, or cannot run in this root |
//!
//! The proxy's turn limit ends it with 0: the notice is an answer without a tool call.

use super::process::{self, AgentCommand, FOLDER};
use super::{AgentRequest, AgentRun, Runtime, RuntimeConfig, Scaffold, ScaffoldError};
use crate::rollout::sandbox::{ReadOnlyMount, Sandbox};
use async_trait::async_trait;
use serde_json::{json, Map, Value};

const NAME: &str = "oc";
/// The version that this scaffold was tested with.
pub const VERSION: &str = "1.18.33";
/// Tokens of its first request behind a task of one line, system prompt and tools included: [`VERSION`], Qwen3's
/// tokenizer.
pub const FIRST_REQUEST_TOKENS: u32 = 7_200;
/// The provider in the agent's configuration.
const PROVIDER: &str = "policy";
/// The message comes on standard input: an argument may not be longer than 128 KiB.
const START: &str = "exec \"$@\" < \"$INSTRUCTION_FILE\"";

/// Choices of the scaffold.
#[derive(Clone, Debug, Default)]
pub struct OcConfig {
    /// Its files.
    pub runtime: RuntimeConfig,
    /// Tools that the agent does not get (`HARBOR_AGENT_DISALLOWED_TOOLS`), by the agent's own names.
    pub disallowed_tools: Vec<String>,
}

/// See the module.
#[derive(Clone, Debug, Default)]
pub struct Oc {
    config: OcConfig,
}

impl Oc {
    /// A scaffold.
    pub fn new(config: OcConfig) -> Self {
        Self { config }
    }

    fn runtime(&self) -> Result<Runtime, ScaffoldError> {
        Runtime::find(NAME, VERSION, &self.config.runtime)
    }

    /// The agent's configuration file.
    fn settings(&self, request: &AgentRequest) -> Value {
        let model = &request.endpoint.model;
        let output = request.max_tokens_per_turn.min(request.context_tokens / 2).max(1);
        let tools: Map<String, Value> = self
            .config
            .disallowed_tools
            .iter()
            .map(|tool| (tool.clone(), Value::Bool(false)))
            .collect();
        let mut settings = json!({
            "model": format!("{PROVIDER}/{model}"),
            "small_model": format!("{PROVIDER}/{model}"),
            "provider": {PROVIDER: {
                "npm": "@ai-sdk/openai-compatible",
                "name": PROVIDER,
                "options": {
                    // From the environment, so that no secret is in a file.
                    "baseURL": "{env:OPENAI_BASE_URL}",
                    "apiKey": "{env:OPENAI_API_KEY}",
                    // A turn may wait for a replica; the trial's time limit ends it.
                    "timeout": false,
                },
                "models": {model.as_str(): {
                    "name": model,
                    "tool_call": true,
                    "reasoning": true,
                    "limit": {"context": request.context_tokens, "output": output},
                }},
            }},
            "permission": {"edit": "allow", "bash": "allow", "webfetch": "allow", "external_directory": "allow", "doom_loop": "allow"},
            "autoupdate": false,
            "share": "disabled",
            "snapshot": false,
        });
        if !tools.is_empty() {
            settings["tools"] = Value::Object(tools);
        }
        settings
    }
}

#[async_trait]
impl Scaffold for Oc {
    fn name(&self) -> &'static str {
        NAME
    }

    fn check(&self) -> Result<(), ScaffoldError> {
        self.runtime()?.check()
    }

    fn mounts(&self) -> Result<Vec<ReadOnlyMount>, ScaffoldError> {
        Ok(vec![self.runtime()?.mount()])
    }

    async fn run(&self, sandbox: &dyn Sandbox, request: AgentRequest) -> Result<AgentRun, ScaffoldError> {
        let url = process::base_url(sandbox, &request.endpoint);
        let (log_dir, settings) = (&request.log_dir, self.settings(&request));
        process::put(NAME, sandbox, log_dir, "instruction.md", &request.instruction).await?;
        let settings = serde_json::to_string_pretty(&settings).unwrap_or_default();
        let config = process::put(NAME, sandbox, log_dir, "opencode.json", &settings).await?;
        let program = self.runtime()?.entry();
        let model = format!("{PROVIDER}/{}", request.endpoint.model);
        let argv = [
            "/bin/sh", "-c", START, NAME, &program, "run", "--format", "json", "--title", "trial", "--model",
            &model,
        ];
        let env = [
            ("OPENAI_BASE_URL", format!("{url}/v1")),
            ("OPENAI_API_KEY", request.endpoint.secret.clone()),
            ("OPENCODE_CONFIG", config),
            ("OPENCODE_DISABLE_AUTOUPDATE", "1".into()),
            ("OPENCODE_DISABLE_MODELS_FETCH", "1".into()),
            ("OPENCODE_DISABLE_LSP_DOWNLOAD", "1".into()),
            ("OPENCODE_DISABLE_DEFAULT_PLUGINS", "1".into()),
            ("INSTRUCTION_FILE", format!("{FOLDER}/instruction.md")),
        ];
        let command = AgentCommand {
            scaffold: NAME,
            argv: argv.map(str::to_owned).into(),
            env: env.map(|(name, value)| (name.to_owned(), value)).into(),
            log: "oc.jsonl".into(),
            turn_limit_code: None,
            reason: error_text,
        };
        process::run(sandbox, &request, command).await
    }
}

/// Name and message of the last error event.
fn error_text(log: &str) -> Option<String> {
    let event = process::last_event(log, "error")?;
    let error = &event["error"];
    let message = error["data"]["message"].as_str().or(error["message"].as_str())?;
    match error["name"].as_str() {
        Some(name) => Some(format!("{name}: {message}")),
        None => Some(message.to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_error_event_says_why_it_failed() {
        let error = |message: &str| {
            let headers = "h".repeat(2000);
            json!({"type": "error", "timestamp": 17, "sessionID": "ses_1", "error": {"name": "APIError",
                   "data": {"message": message, "statusCode": 400, "responseBody": headers}}})
            .to_string()
        };
        let log = format!(
            "{}\n{}\n{{\"type\":\"step_finish\"}}\n",
            error("first"),
            error("prompt is too long")
        );
        assert_eq!(error_text(&log).as_deref(), Some("APIError: prompt is too long"));
        assert_eq!(error_text("{\"type\":\"text\"}"), None);
    }
}
