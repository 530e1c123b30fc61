//! Scaffolds: the agent that works on a task, run inside a sandbox.
//!
//! Takes a running [`Sandbox`] and a session of the proxy, gives how the agent ended ([`AgentRun`]). What
//! the agent said and sampled is not known here: the proxy has it. A scaffold is a foreign program that
//! speaks HTTP to `http://<Sandbox::proxy_address><SessionEndpoint::path>/v1`.
//!
//! One kind of agent is one file; those written in Python are data for one scaffold ([`python`]). A foreign agent
//! is never installed in a sandbox: its files are a [`runtime`] tree of the host, mounted read-only. [`process`]
//! holds what all have in common: the instruction's file, the log, the time limit, and what the agent's last words
//! say about a failure.

pub mod cc;
pub mod custom;
pub mod mini;
pub mod oc;
pub mod oh;
pub mod ohsdk;
pub mod process;
pub mod python;
pub mod runtime;
pub mod terminus2;

pub use cc::{Cc, CcConfig};
pub use custom::{Custom, CustomConfig};
pub use mini::{Mini, MiniConfig};
pub use oc::{Oc, OcConfig};
pub use python::{PythonAgent, PythonScaffold};
pub use runtime::{Runtime, RuntimeConfig};

use crate::base::SessionEndpoint;
use crate::rollout::sandbox::{ReadOnlyMount, Sandbox, SandboxError};
use async_trait::async_trait;
use std::path::PathBuf;
use std::time::Duration;

/// Scaffolds with a runtime tree, and the versions that they were tested with.
pub const RUNTIMES: &[(&str, &str)] = &[
    ("cc", cc::VERSION),
    ("oc", oc::VERSION),
    ("ohsdk", ohsdk::VERSION),
    ("oh", oh::VERSION),
    ("terminus2", terminus2::VERSION),
];

/// Tokens of each agent's first request, before it has done anything. A command of one's own (`custom`) is not
/// known.
pub const FIRST_REQUESTS: &[(&str, u32)] = &[
    ("mini", mini::FIRST_REQUEST_TOKENS),
    ("cc", cc::FIRST_REQUEST_TOKENS),
    ("oc", oc::FIRST_REQUEST_TOKENS),
    ("ohsdk", ohsdk::FIRST_REQUEST_TOKENS),
    ("oh", oh::FIRST_REQUEST_TOKENS),
    ("terminus2", terminus2::FIRST_REQUEST_TOKENS),
];

/// One kind of agent.
#[async_trait]
pub trait Scaffold: Send + Sync {
    /// Value of `SCAFFOLD` that selects it.
    fn name(&self) -> &'static str;
    /// Proves before launch that the agent's files are there.
    fn check(&self) -> Result<(), ScaffoldError> {
        Ok(())
    }
    /// What the sandbox must carry; asked before it starts.
    fn mounts(&self) -> Result<Vec<ReadOnlyMount>, ScaffoldError> {
        Ok(Vec::new())
    }
    /// Prepares a fresh sandbox for the agent.
    async fn setup(&self, sandbox: &dyn Sandbox) -> Result<(), ScaffoldError> {
        let _ = sandbox;
        Ok(())
    }
    /// Runs the agent to its end or to its time limit.
    async fn run(&self, sandbox: &dyn Sandbox, request: AgentRequest) -> Result<AgentRun, ScaffoldError>;
}

/// What an agent is to do.
#[derive(Clone, Debug)]
pub struct AgentRequest {
    /// Text of `instruction.md`.
    pub instruction: String,
    /// Session of the proxy.
    pub endpoint: SessionEndpoint,
    /// The agent and everything it started is killed after this time.
    pub timeout: Duration,
    /// Model calls it may make.
    pub max_turns: u32,
    /// Context window: prompt plus reply of a model call, tokens.
    pub context_tokens: u32,
    /// Longest reply of a model call, tokens.
    pub max_tokens_per_turn: u32,
    /// Folder on the host for the agent's own log; must exist.
    pub log_dir: PathBuf,
}

/// How an agent ended.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct AgentRun {
    /// Exit status; `None` when a signal ended it.
    pub exit_code: Option<i32>,
    /// Its time limit ended it.
    pub timed_out: bool,
    /// It ended because it had made all its model calls.
    pub turn_limit_reached: bool,
    /// A process of the sandbox was killed for memory while it ran.
    pub oom_killed: bool,
    /// What the agent said about a failure, for people; empty after a normal end.
    pub detail: String,
    /// Duration.
    pub elapsed: Duration,
}

/// An agent that could not be installed or started. An agent that ran and failed is an [`AgentRun`].
#[derive(Debug, thiserror::Error)]
pub enum ScaffoldError {
    /// The sandbox failed.
    #[error("scaffold `{scaffold}`")]
    Sandbox {
        /// Scaffold.
        scaffold: &'static str,
        /// What failed.
        #[source]
        source: SandboxError,
    },
    /// The agent's files are not on this machine or do not run.
    #[error("scaffold `{scaffold}`: {problem}\n  fix: {fix}")]
    NotInstalled {
        /// Scaffold.
        scaffold: &'static str,
        /// What is missing.
        problem: String,
        /// What the reader can do.
        fix: String,
    },
}
