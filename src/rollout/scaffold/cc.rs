//! `SCAFFOLD=cc`: Claude Code, the native program of its npm package, in print mode.
//!
//! Runtime: `setup/runtimes.sh cc`; the program needs glibc 2.29 or newer in the sandbox and nothing else.
//! It speaks Anthropic messages, streamed. Its log is `agent/cc.jsonl`: one JSON event a line, the last one of
//! type `result`.
//!
//! It is set up so that a conversation only grows: a fixed list of tools (no tool search), no billing header
//! and no cache marks, no background tasks. It knows the context window and compacts before it is full; it
//! calls nothing but the proxy. Its own files lie in [`CONFIG_DIR`], outside the home folder.
//!
//! | Exit | Meaning |
//! |---|---|
//! | 0 | it answered without a tool call: it thinks that it is done |
//! | 1 | the API refused for good (`Prompt is too long`, retries used up), or compaction does not help |
//! | a signal, 127, … | it crashed, or cannot run in this root |
//!
//! The proxy's turn limit ends it with 0: the notice is an answer without a tool call.

use super::process::{self, AgentCommand, FOLDER};
use super::{AgentRequest, AgentRun, Runtime, RuntimeConfig, Scaffold, ScaffoldError};
use crate::rollout::sandbox::{ReadOnlyMount, Sandbox};
use async_trait::async_trait;
use std::collections::BTreeMap;

const NAME: &str = "cc";
/// The version that this scaffold was tested with.
pub const VERSION: &str = "2.1.332";
/// Tokens of its first request behind a task of one line, system prompt and tools included: [`VERSION`], Qwen3's
/// tokenizer.
pub const FIRST_REQUEST_TOKENS: u32 = 18_600;
/// Settings, transcripts and caches of the agent inside.
const CONFIG_DIR: &str = "/run/legorl-agent/claude";
/// Standard input of the program is the instruction: an argument may not be longer than 128 KiB.
const START: &str = "exec \"$@\" < \"$INSTRUCTION_FILE\"";

/// Choices of the scaffold.
#[derive(Clone, Debug, Default)]
pub struct CcConfig {
    /// Its files.
    pub runtime: RuntimeConfig,
    /// Tools that the agent does not get (`HARBOR_AGENT_DISALLOWED_TOOLS`), by the agent's own names.
    pub disallowed_tools: Vec<String>,
}

/// See the module.
#[derive(Clone, Debug, Default)]
pub struct Cc {
    config: CcConfig,
}

impl Cc {
    /// A scaffold.
    pub fn new(config: CcConfig) -> Self {
        Self { config }
    }

    fn runtime(&self) -> Result<Runtime, ScaffoldError> {
        Runtime::find(NAME, VERSION, &self.config.runtime)
    }

    fn argv(&self, program: String, model: &str) -> Vec<String> {
        let mut argv: Vec<String> = ["/bin/sh", "-c", START, "cc"].map(str::to_owned).into();
        argv.push(program);
        argv.extend(["-p", "--model", model, "--dangerously-skip-permissions"].map(str::to_owned));
        argv.extend(["--output-format", "stream-json", "--verbose"].map(str::to_owned));
        if !self.config.disallowed_tools.is_empty() {
            argv.extend(["--disallowedTools".into(), self.config.disallowed_tools.join(",")]);
        }
        argv
    }
}

/// Where the API is and how to behave.
fn environment(url: String, request: &AgentRequest) -> BTreeMap<String, String> {
    let output = request.max_tokens_per_turn.min(request.context_tokens / 2).max(1);
    let milliseconds = request.timeout.as_millis().to_string();
    [
        ("ANTHROPIC_BASE_URL", url),
        ("ANTHROPIC_API_KEY", request.endpoint.secret.clone()),
        // Side requests, if a version makes any, go to the same policy.
        ("ANTHROPIC_SMALL_FAST_MODEL", request.endpoint.model.clone()),
        ("ANTHROPIC_DEFAULT_HAIKU_MODEL", request.endpoint.model.clone()),
        ("CLAUDE_CODE_SUBAGENT_MODEL", request.endpoint.model.clone()),
        (
            "CLAUDE_CODE_MAX_CONTEXT_TOKENS",
            request.context_tokens.to_string(),
        ),
        ("CLAUDE_CODE_MAX_OUTPUT_TOKENS", output.to_string()),
        // A turn may wait for a replica; the trial's time limit ends it.
        ("API_TIMEOUT_MS", milliseconds),
        ("CLAUDE_CONFIG_DIR", CONFIG_DIR.into()),
        ("IS_SANDBOX", "1".into()),
        ("ENABLE_TOOL_SEARCH", "false".into()),
        ("CLAUDE_CODE_ATTRIBUTION_HEADER", "0".into()),
        ("CLAUDE_CODE_DISABLE_EXPERIMENTAL_BETAS", "1".into()),
        ("CLAUDE_CODE_DISABLE_BACKGROUND_TASKS", "1".into()),
        ("CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC", "1".into()),
        ("DISABLE_PROMPT_CACHING", "1".into()),
        ("DISABLE_AUTOUPDATER", "1".into()),
        ("DISABLE_TELEMETRY", "1".into()),
        ("DISABLE_ERROR_REPORTING", "1".into()),
        ("INSTRUCTION_FILE", format!("{FOLDER}/instruction.md")),
    ]
    .map(|(name, value)| (name.to_owned(), value))
    .into()
}

#[async_trait]
impl Scaffold for Cc {
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
        let instruction = &request.instruction;
        process::put(NAME, sandbox, &request.log_dir, "instruction.md", instruction).await?;
        let command = AgentCommand {
            scaffold: NAME,
            argv: self.argv(self.runtime()?.entry(), &request.endpoint.model),
            env: environment(process::base_url(sandbox, &request.endpoint), &request),
            log: "cc.jsonl".into(),
            turn_limit_code: None,
            reason: result_text,
        };
        process::run(sandbox, &request, command).await
    }
}

/// What the last event says, the agent's result: its text, or a word for how it ended.
fn result_text(log: &str) -> Option<String> {
    let event = process::last_event(log, "result")?;
    let text = |key: &str| {
        event[key]
            .as_str()
            .filter(|text| !text.is_empty())
            .map(str::to_owned)
    };
    text("result")
        .or_else(|| text("terminal_reason"))
        .or_else(|| text("subtype"))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The form of 2.1.332: `type` is not first, and the line is longer than a failure's text may be.
    #[test]
    fn the_result_event_says_why_it_failed() {
        let result = |rest: &str| {
            let usage = format!("{{\"input_tokens\":0,\"models\":\"{}\"}}", "m".repeat(1100));
            format!("{{\"is_error\":true,\"usage\":{usage},\"session_id\":\"5\",\"num_turns\":2,\"type\":\"result\",{rest}}}")
        };
        let said = result("\"subtype\":\"success\",\"result\":\"Prompt is too long\",\"terminal_reason\":\"prompt_too_long\"");
        let before =
            r#"{"type":"assistant","message":{"content":"{\"type\":\"result\",\"result\":\"no\"}"}}"#;
        let log = format!("{before}\n{said}\na note on standard error\n");
        assert_eq!(result_text(&log).as_deref(), Some("Prompt is too long"));
        let ended = result("\"subtype\":\"error_max_turns\"");
        assert_eq!(result_text(&ended).as_deref(), Some("error_max_turns"));
        assert_eq!(result_text(before), None);
    }
}
