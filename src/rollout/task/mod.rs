//! Tasks in Harbor's folder format and the index that names them.
//!
//! ```text
//! <task>/task.toml            limits, environment, metadata (schema 1.4)
//! <task>/instruction.md       what the agent is asked to do
//! <task>/environment/         Dockerfile and what it copies
//! <task>/tests/test.sh        verifier; enters the sandbox only after the agent ended
//! <task>/solution/solve.sh    optional
//! ```
//!
//! | Part | Gives |
//! |---|---|
//! | [`TaskConfig`] | a checked `task.toml` |
//! | [`TaskSpec`] | a task folder that can run |
//! | [`check_tasks`] | all findings over many folders (`legorl-rank task check`) |
//! | [`TaskIndex`] | the parquet table whose rows name task folders |
//! | [`build_index`] | that table from a folder of tasks |
//!
//! Invariant: a task that loads can run. What the format allows and this program does not run (several
//! steps, a separate verifier, Windows, accelerators) is refused by name, never ignored.

mod check;
mod config;
mod env;
mod headers;
mod index;
mod network;
mod reader;
mod sections;
mod spec;
#[cfg(test)]
mod tests;

pub use check::{check_tasks, find_tasks, CheckedTask, TaskCheckReport};
pub use config::{
    AgentConfig, Author, EnvironmentConfig, PackageInfo, TaskConfig, VerifierConfig, SCHEMA_VERSION,
};
pub use env::resolve_env;
pub use index::{build_index, val_sibling, IndexError, IndexReport, IndexRow, TaskIndex};
pub use network::{NetworkMode, NetworkPolicy};
pub use reader::{Finding, Severity};
pub use sections::{Artifact, CollectHook, Healthcheck, McpServer, StepConfig, Tpu};
pub use spec::{TaskError, TaskSpec};
