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

use super::python::PythonAgent;
use super::{AgentRequest, AgentRun, RuntimeConfig, Scaffold, ScaffoldError};
use crate::rollout::sandbox::{ReadOnlyMount, Sandbox};
use async_trait::async_trait;

/// The version that this scaffold was tested with.
pub const VERSION: &str = "1.11.0";
/// Tokens of its first request behind a task of one line, system prompt and tools included: [`VERSION`], Qwen3's
/// tokenizer.
pub const FIRST_REQUEST_TOKENS: u32 = 10_700;
const AGENT: PythonAgent = PythonAgent {
    name: "oh",
    pinned: VERSION,
    driver: include_str!("oh/driver.py"),
};

/// See the module.
#[derive(Clone, Debug, Default)]
pub struct Oh {
    runtime: RuntimeConfig,
}

impl Oh {
    /// A scaffold that uses this runtime.
    pub fn new(runtime: RuntimeConfig) -> Self {
        Self { runtime }
    }
}

#[async_trait]
impl Scaffold for Oh {
    fn name(&self) -> &'static str {
        AGENT.name
    }

    fn check(&self) -> Result<(), ScaffoldError> {
        AGENT.check(&self.runtime)
    }

    fn mounts(&self) -> Result<Vec<ReadOnlyMount>, ScaffoldError> {
        AGENT.mounts(&self.runtime)
    }

    async fn run(&self, sandbox: &dyn Sandbox, request: AgentRequest) -> Result<AgentRun, ScaffoldError> {
        AGENT.run(&self.runtime, sandbox, &request).await
    }
}
