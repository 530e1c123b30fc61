//! One attempt at a trial: a task, a fresh sandbox, an agent's run, a verdict.
//!
//! ```text
//! open session -> start sandbox -> install agent -> run agent -> close session -> verifier -> delete sandbox
//!                 env budget       setup budget     agent budget                  verifier budget
//! ```
//!
//! The session is closed before the verifier starts, so nothing that the agent left running can still
//! reach the policy. On every path, cancellation included, the session is closed and the sandbox deleted.
//!
//! How an attempt ends, first match wins:
//!
//! | What happened | Ends as |
//! |---|---|
//! | the trial is no longer wanted | [`AttemptEnd::Unwanted`] |
//! | task, sandbox or agent could not be set up; the sandbox was lost | failed: `env_setup_failed`, `agent_setup_failed` |
//! | the engine failed during the session | failed: `engine_failed` |
//! | the agent's time limit passed | judged, `timeout` |
//! | a request exceeded the context window, and the agent did not go on with a shorter one | judged, `overlong` |
//! | the turn limit was reached | judged, `max_turns_reached` |
//! | the agent crashed and no model call was ever answered | failed: `agent_setup_failed` |
//! | the agent crashed | judged, `agent_crash` |
//! | the agent ended | judged, `agent_completed` |
//! | the verifier gave no usable reward, or ran out of time | failed: `verifier_failed`, `verifier_timeout` |
//!
//! "Judged" means that the verifier's reward counts. "Failed" is never a reward: the trial is tried again as
//! long as its plan allows ([`crate::base::TrialPlan::retry`]) and dropped with the reason after that.

mod folder;
mod outcome;
mod runner;
#[cfg(test)]
mod tests;
mod time;

pub use runner::TrialRunner;

use crate::base::{DropReason, Purpose, SamplingParams, Trajectory, TrialAssignment, TrialEnd};
use std::{path::PathBuf, time::Duration};

/// Sampling and limits that differ between training and validation.
#[derive(Clone, Debug)]
pub struct PurposeConfig {
    /// Sampling of every turn; the seed is the assignment's.
    pub sampling: SamplingParams,
    /// Upper bound on the agent's time (`HARBOR_AGENT_MAX_TIMEOUT_SEC`).
    pub agent_timeout_max: Duration,
}

/// What every trial of a run has in common.
#[derive(Clone, Debug)]
pub struct TrialRunnerConfig {
    /// Folder of all trial folders (`HARBOR_TRIALS_DIR`).
    pub trials_dir: PathBuf,
    /// Run name in the labels of sandboxes.
    pub run: String,
    /// Owner in the labels of sandboxes: the process that reaps what it left.
    pub owner: String,
    /// Training trials.
    pub train: PurposeConfig,
    /// Validation trials.
    pub val: PurposeConfig,
    /// Model calls of an agent (`HARBOR_AGENT_MAX_ITERATIONS`).
    pub max_turns: u32,
    /// Prompt plus response tokens of a branch (`MAX_PROMPT + MAX_RESP`).
    pub max_total_tokens: u32,
    /// Sampled tokens of one turn.
    pub max_tokens_per_turn: u32,
    /// Turns in a row without a tool call; 0 = no limit (`HARBOR_MAX_CONSECUTIVE_NO_TOOL`).
    pub max_consecutive_no_tool: u32,
    /// Factor on `[agent] timeout_sec` (`HARBOR_AGENT_TIMEOUT_MULTIPLIER`).
    pub agent_timeout_multiplier: f64,
    /// Factor on `[verifier] timeout_sec` (`HARBOR_VERIFIER_TIMEOUT_MULTIPLIER`).
    pub verifier_timeout_multiplier: f64,
    /// Time for installing the agent.
    pub agent_setup_timeout: Duration,
    /// CPU cores of a sandbox; wins over the task's (`HARBOR_ENVIRONMENT_OVERRIDE_CPUS`).
    pub override_cpus: Option<f64>,
    /// Memory of a sandbox in MiB; wins over the task's (`HARBOR_ENVIRONMENT_OVERRIDE_MEMORY_MB`).
    pub override_memory_mb: Option<u64>,
    /// Processes and threads of a sandbox (`SANDBOX_PIDS_LIMIT`).
    pub pids_limit: Option<u32>,
    /// How long a trial waits for room in `trials_dir`: before it starts, and then counts as failed; and for its
    /// record at the end, which is given up then (tokens and reward are in the buffer).
    pub room_deadline: Duration,
}

/// A limit that no trial could keep.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{variable} is {value}; it must be {wanted}")]
pub struct TrialConfigError {
    /// Variable of the run configuration.
    pub variable: &'static str,
    /// Its value.
    pub value: String,
    /// What it may be.
    pub wanted: &'static str,
}

impl TrialRunnerConfig {
    /// Checks what types do not say. The upper bounds keep deadlines representable.
    fn check(&self) -> Result<(), TrialConfigError> {
        let refuse = |variable, value: String, wanted| {
            Err(TrialConfigError {
                variable,
                value,
                wanted,
            })
        };
        for (variable, factor) in [
            ("HARBOR_AGENT_TIMEOUT_MULTIPLIER", self.agent_timeout_multiplier),
            (
                "HARBOR_VERIFIER_TIMEOUT_MULTIPLIER",
                self.verifier_timeout_multiplier,
            ),
        ] {
            if !(factor > 0.0 && factor <= 1000.0) {
                return refuse(variable, factor.to_string(), "a number above 0, at most 1000");
            }
        }
        for (variable, limit) in [
            ("HARBOR_AGENT_MAX_TIMEOUT_SEC", self.train.agent_timeout_max),
            ("HARBOR_VAL_AGENT_MAX_TIMEOUT_SEC", self.val.agent_timeout_max),
        ] {
            if limit.is_zero() || limit.as_secs() > 1_000_000_000 {
                return refuse(
                    variable,
                    limit.as_secs().to_string(),
                    "a positive number of seconds",
                );
            }
        }
        if self.max_turns == 0 {
            return refuse("HARBOR_AGENT_MAX_ITERATIONS", "0".to_owned(), "at least 1");
        }
        if self
            .override_cpus
            .is_some_and(|cpus| !(cpus.is_finite() && cpus > 0.0))
        {
            let cpus = self.override_cpus.unwrap_or_default();
            return refuse("HARBOR_ENVIRONMENT_OVERRIDE_CPUS", cpus.to_string(), "above 0");
        }
        Ok(())
    }

    /// The part for a purpose.
    pub fn for_purpose(&self, purpose: Purpose) -> &PurposeConfig {
        match purpose {
            Purpose::Train => &self.train,
            Purpose::Val { .. } => &self.val,
        }
    }
}

/// An attempt without a verdict.
#[derive(Clone, Debug, PartialEq)]
pub struct AttemptFailure {
    /// The attempt.
    pub assignment: TrialAssignment,
    /// Task name.
    pub task: String,
    /// Kind of failure.
    pub reason: DropReason,
    /// What happened, for people.
    pub detail: String,
}

impl AttemptFailure {
    /// The end of the trial when no attempt is left.
    pub fn into_drop(self) -> TrialEnd {
        TrialEnd::Dropped {
            key: self.assignment.key,
            attempt: self.assignment.attempt,
            task: self.task,
            reason: self.reason,
            detail: self.detail,
        }
    }
}

/// How an attempt ended.
#[derive(Clone, Debug, PartialEq)]
pub enum AttemptEnd {
    /// With a verdict.
    Finished(Box<Trajectory>),
    /// Without one; it may be tried again.
    Failed(AttemptFailure),
    /// It was cancelled because its result is no longer wanted.
    Unwanted,
}
