//! A trial: one task, one sandbox, one agent run, one reward. And the two seams around it.
//!
//! Invariant: every admitted trial reaches the sink exactly once, as a trajectory or as a dropped
//! trial with a reason.

use super::{GroupId, Trajectory};
use serde::{Deserialize, Serialize};
use std::{fmt, str::FromStr};

/// What a trial is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Purpose {
    /// Its tokens are trained on.
    Train,
    /// It measures the policy after `step` optimizer steps.
    Val {
        /// Global step.
        step: u32,
    },
}

/// Identity of a trial over all its attempts and over restarts of the run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct TrialKey {
    /// Training or validation.
    pub purpose: Purpose,
    /// Group in the order of the task cursor (training), or index row (validation).
    pub group: GroupId,
    /// Sample within the group, below `N_RESP` (training) or `VAL_N` (validation).
    pub sample: u32,
}

impl fmt::Display for TrialKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.purpose {
            Purpose::Train => write!(f, "train-g{:06}-s{}", self.group.0, self.sample),
            Purpose::Val { step } => write!(f, "val{step:04}-g{:06}-s{}", self.group.0, self.sample),
        }
    }
}

impl FromStr for TrialKey {
    type Err = String;
    /// Reads what `Display` writes.
    fn from_str(text: &str) -> Result<Self, String> {
        let bad = || format!("`{text}` is not a trial key");
        let mut parts = text.split('-');
        let (head, group, sample) = (
            parts.next().ok_or_else(bad)?,
            parts.next().ok_or_else(bad)?,
            parts.next().ok_or_else(bad)?,
        );
        let number = |t: &str, p: &str| {
            t.strip_prefix(p)
                .and_then(|n| n.parse::<u64>().ok())
                .ok_or_else(bad)
        };
        let purpose = match head {
            "train" => Purpose::Train,
            other => Purpose::Val {
                step: number(other, "val")? as u32,
            },
        };
        Ok(Self {
            purpose,
            group: GroupId(number(group, "g")?),
            sample: number(sample, "s")? as u32,
        })
    }
}

/// Why the agent's run ended; the trial has a verifier's verdict.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum StopReason {
    /// The agent ended by itself.
    AgentCompleted,
    /// `HARBOR_AGENT_MAX_ITERATIONS` was reached.
    MaxTurnsReached,
    /// The agent's time limit passed.
    Timeout,
    /// The context window was exceeded, and the agent did not go on after that.
    Overlong,
    /// The agent ended with an error of its own; the verifier still judged the sandbox.
    AgentCrash,
}

impl fmt::Display for StopReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            StopReason::AgentCompleted => "agent_completed",
            StopReason::MaxTurnsReached => "max_turns_reached",
            StopReason::Timeout => "timeout",
            StopReason::Overlong => "overlong",
            StopReason::AgentCrash => "agent_crash",
        })
    }
}

/// Why a trial has no verdict. None of these is a reward of zero.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DropReason {
    /// The sandbox or the task could not be set up.
    EnvSetupFailed,
    /// The agent could not be started.
    AgentSetupFailed,
    /// The verifier wrote no reward, or one that is not a finite number.
    VerifierFailed,
    /// The verifier's time limit passed.
    VerifierTimeout,
    /// The engine or the proxy failed.
    EngineFailed,
    /// The lease ran out on every attempt.
    LeaseLost,
    /// Its group reached the staleness bound while it still ran.
    Stale,
    /// A token would be older than the staleness bound.
    TooOld,
}

impl fmt::Display for DropReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            DropReason::EnvSetupFailed => "env_setup_failed",
            DropReason::AgentSetupFailed => "agent_setup_failed",
            DropReason::VerifierFailed => "verifier_failed",
            DropReason::VerifierTimeout => "verifier_timeout",
            DropReason::EngineFailed => "engine_failed",
            DropReason::LeaseLost => "lease_lost",
            DropReason::Stale => "stale",
            DropReason::TooOld => "too_old",
        })
    }
}

/// How a trial ended.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum TrialEnd {
    /// With a verdict.
    Finished(Trajectory),
    /// Without one, after all attempts.
    Dropped {
        /// Which trial.
        key: TrialKey,
        /// Last attempt, from 0.
        attempt: u32,
        /// Task name.
        task: String,
        /// Kind of failure.
        reason: DropReason,
        /// What happened, for people.
        detail: String,
    },
}

impl TrialEnd {
    /// The trial.
    pub fn key(&self) -> TrialKey {
        match self {
            TrialEnd::Finished(t) => t.key,
            TrialEnd::Dropped { key, .. } => *key,
        }
    }
}

/// A trial to run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TrialAssignment {
    /// Which trial.
    pub key: TrialKey,
    /// Attempt, from 0.
    pub attempt: u32,
    /// Row of the task index.
    pub row: u32,
    /// Seed of its sampling: run seed mixed with the key and the attempt.
    pub seed: u64,
}

/// What to do next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TrialPlanStep {
    /// Run this trial.
    Run(TrialAssignment),
    /// Nothing may start now; [`TrialPlan::changed`] tells when to ask again.
    Wait,
    /// No trial will ever start again.
    Finished,
}

/// Decides which trial starts next: order of tasks, missing trials after a restart, staleness pacing.
#[async_trait::async_trait]
pub trait TrialPlan: Send + Sync {
    /// Admits the next trial.
    fn next(&self) -> TrialPlanStep;
    /// The attempt ended without a result (lease lost, infrastructure failure). `Some` is the next
    /// attempt; `None` means that the attempts are used up and the caller must submit a drop.
    fn retry(&self, failed: &TrialAssignment) -> Option<TrialAssignment>;
    /// False once the trial has ended or its group was cut off: running it on is a waste.
    fn is_wanted(&self, key: &TrialKey) -> bool;
    /// Returns when `next` or `is_wanted` may answer differently than before.
    async fn changed(&self);
}

/// What became of a submitted trial.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Submitted {
    /// It is durable.
    Stored,
    /// This trial had already ended; nothing was stored.
    Duplicate,
    /// Its group went on without it; only the drop was recorded.
    CutOff,
}

/// The end could not be made durable. The trial stays unfinished and may be submitted again.
#[derive(Debug, thiserror::Error)]
#[error("trial {key}: {problem}")]
pub struct SinkError {
    /// Which trial.
    pub key: TrialKey,
    /// What went wrong, with the file.
    pub problem: String,
    /// The operating system's error, where there is one.
    #[source]
    pub source: Option<std::io::Error>,
}

/// Takes ended trials.
pub trait TrialSink: Send + Sync {
    /// Makes the end durable before it returns. Blocking: call it off the async threads.
    fn submit(&self, end: TrialEnd) -> Result<Submitted, SinkError>;
}
