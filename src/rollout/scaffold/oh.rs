//! `SCAFFOLD=oh`: OpenHands, the full program: its app server, the agent server that this starts, and the
//! agent in there, with the browser tools beside those of the SDK.
//!
//! Everything runs inside the sandbox, from its read-only runtime; the servers listen on loopback only. The
//! driver (`oh/driver.py`) starts the app server, gives it settings and task over its API, and polls until
//! the conversation has ended. What the program needs to run there is corrected in the driver and explained
//! at each place.
//!
//! | Exit status | Meaning |
//! |---|---|
//! | 0 | the conversation ended as finished, or its own detection of loops stopped it |
//! | 1 | a server did not start or the conversation ended in an error; the last line says how |
//! | 3 | it made all its turns |

use super::PythonAgent;

/// The version that this scaffold was tested with.
pub const VERSION: &str = "1.11.0";
/// Tokens of its first request behind a task of one line, system prompt and tools included: [`VERSION`], Qwen3's
/// tokenizer.
pub const FIRST_REQUEST_TOKENS: u32 = 10_700;
/// The agent, for [`PythonScaffold`](super::PythonScaffold).
pub const AGENT: PythonAgent = PythonAgent {
    name: "oh",
    version: VERSION,
    driver: include_str!("oh/driver.py"),
};
