//! `SCAFFOLD=ohsdk`: the default agent of the OpenHands SDK in command line mode.
//!
//! Runs from its read-only runtime in a driver (`ohsdk/driver.py`), over chat completions with the tools
//! `terminal`, `file_editor`, `task_tracker`, `finish` and `think`. The SDK keeps its events in
//! `agent/events.jsonl` of the trial.
//!
//! | Exit status | Meaning |
//! |---|---|
//! | 0 | it called `finish`, replied without a tool call, or its own detection of loops stopped it |
//! | 1 | it failed; the last line says how |
//! | 3 | it made all its turns |
//!
//! When the proxy says that the context is full, its condenser asks for a summary in a request without tools,
//! and the conversation goes on as system prompt and summary.

use super::PythonAgent;

/// The version that this scaffold was tested with.
pub const VERSION: &str = "1.58.2";
/// Tokens of its first request behind a task of one line, system prompt and tools included: [`VERSION`], Qwen3's
/// tokenizer.
pub const FIRST_REQUEST_TOKENS: u32 = 7_200;
/// The agent, for [`PythonScaffold`](super::PythonScaffold).
pub const AGENT: PythonAgent = PythonAgent {
    name: "ohsdk",
    version: VERSION,
    driver: include_str!("ohsdk/driver.py"),
};
