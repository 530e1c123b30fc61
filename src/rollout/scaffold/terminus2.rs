//! `SCAFFOLD=terminus2`: Terminus 2 of Harbor, which works in a terminal.
//!
//! Harbor runs it beside the container. Here it runs inside the sandbox, from its read-only runtime, in a
//! driver (`terminus2/driver.py`) whose environment class starts commands as child processes; its terminal is
//! the tmux of the runtime. It asks over chat completions without tools and puts its commands into the text
//! as JSON; it ends when it has said twice that the task is complete.
//!
//! With `collect_rollout_details` it keeps the token ids and log-probs that the proxy tells it: they are
//! in `agent/rollout.json` of the trial, an independent record of what was sampled.
//!
//! | Exit status | Meaning |
//! |---|---|
//! | 0 | it confirmed that the task is complete, or its terminal ended |
//! | 1 | it failed, for example after three tries of one request; the last line says how |
//! | 3 | it made all its turns, or the proxy let it make no more |
//!
//! Before its context is full, or when the proxy says that it is, it asks for a summary, asks itself questions
//! about the summary in a conversation of its own, answers them, and begins anew with the first prompt, the
//! questions and the answers.

use super::PythonAgent;

/// The version that this scaffold was tested with.
pub const VERSION: &str = "0.26.0";
/// Tokens of its first request behind a task of one line, system prompt and tools included: [`VERSION`], Qwen3's
/// tokenizer.
pub const FIRST_REQUEST_TOKENS: u32 = 700;
/// The agent, for [`PythonScaffold`](super::PythonScaffold).
pub const AGENT: PythonAgent = PythonAgent {
    name: "terminus2",
    version: VERSION,
    driver: include_str!("terminus2/driver.py"),
};
