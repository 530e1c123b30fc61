//! The trial's folder on disk, in Harbor's layout.
//!
//! ```text
//! <HARBOR_TRIALS_DIR>/<train | val_step_0010>/<session>/
//!   agent/                    the scaffold's own logs
//!   verifier/                 test-stdout.txt, reward.json or reward.txt
//!   proxy_trajectory.json     what the proxy recorded: every branch with its kind and its conversation
//!   exception.txt             why there is no verdict
//!   result.json               written last: a folder without it belongs to an attempt that was cut short
//! ```
//!
//! It is a record for people and tools. Nothing reads it back: tokens and rewards travel through the sink.

use super::time::rfc3339;
use super::AttemptFailure;
use crate::base::{files, CapturedBranch, CapturedSession, Purpose, StopReason, TrialAssignment};
use crate::rollout::task::TaskSpec;
use crate::rollout::verifier::Verdict;
use serde_json::{json, Value};
use std::{
    fs::{self, File},
    io::{self, Write},
    path::{Path, PathBuf},
    time::SystemTime,
};

/// Start and end of a phase.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Phase {
    pub(super) started: Option<SystemTime>,
    pub(super) finished: Option<SystemTime>,
}

impl Phase {
    pub(super) fn begin(&mut self) {
        self.started = Some(SystemTime::now());
    }

    pub(super) fn end(&mut self) {
        self.finished = Some(SystemTime::now());
    }

    /// Duration in seconds; 0 for a phase that did not end.
    pub(super) fn secs(&self) -> f64 {
        match (self.started, self.finished) {
            (Some(from), Some(to)) => to.duration_since(from).unwrap_or_default().as_secs_f64(),
            _ => 0.0,
        }
    }

    fn json(&self) -> Value {
        match self.started {
            None => Value::Null,
            Some(started) => json!({
                "started_at": rfc3339(started),
                "finished_at": self.finished.map(rfc3339),
            }),
        }
    }
}

/// Everything that is known about an attempt, filled while it runs.
#[derive(Default)]
pub(super) struct Record {
    pub(super) whole: Phase,
    pub(super) env_setup: Phase,
    pub(super) agent_setup: Phase,
    pub(super) agent_execute: Phase,
    pub(super) verifier: Phase,
    pub(super) capture: Option<CapturedSession>,
    pub(super) stop: Option<StopReason>,
    pub(super) verdict: Option<Verdict>,
}

/// The folder of one attempt.
pub(super) struct TrialFolder {
    pub(super) dir: PathBuf,
    trials_dir: PathBuf,
}

impl TrialFolder {
    /// Makes the folder and its parts.
    pub(super) fn create(trials_dir: &Path, purpose: Purpose, session: &str) -> io::Result<Self> {
        let group = match purpose {
            Purpose::Train => "train".to_owned(),
            Purpose::Val { step } => format!("val_step_{step:04}"),
        };
        let dir = trials_dir.join(group).join(session);
        fs::create_dir_all(dir.join("agent"))?;
        fs::create_dir_all(dir.join("verifier"))?;
        Ok(Self {
            dir,
            trials_dir: trials_dir.to_owned(),
        })
    }

    pub(super) fn agent_dir(&self) -> PathBuf {
        self.dir.join("agent")
    }

    pub(super) fn verifier_dir(&self) -> PathBuf {
        self.dir.join("verifier")
    }

    fn name(&self) -> String {
        self.dir
            .file_name()
            .map_or_else(String::new, |n| n.to_string_lossy().into_owned())
    }

    /// Writes what is left to write, `result.json` last.
    pub(super) fn finish(
        &self,
        task: &TaskSpec,
        assignment: &TrialAssignment,
        scaffold: &str,
        backend: &str,
        record: &Record,
        failure: Option<&AttemptFailure>,
    ) -> io::Result<()> {
        if let Some(capture) = &record.capture {
            self.write_json(
                "proxy_trajectory.json",
                &json!({
                    "session": self.name(),
                    "task": task.name,
                    "key": assignment.key.to_string(),
                    "attempt": assignment.attempt,
                    "reward": record.verdict.as_ref().map(Verdict::reward),
                    "stop": record.stop,
                    "requests": capture.requests,
                    "refused": capture.refused,
                    "branches": branches(capture),
                }),
            )?;
        }
        if let Some(failure) = failure {
            self.write(
                "exception.txt",
                format!("{}: {}\n", failure.reason, failure.detail).as_bytes(),
            )?;
        }
        self.write_json(
            "result.json",
            &self.result(task, assignment, scaffold, backend, record, failure),
        )
    }

    fn result(
        &self,
        task: &TaskSpec,
        assignment: &TrialAssignment,
        scaffold: &str,
        backend: &str,
        record: &Record,
        failure: Option<&AttemptFailure>,
    ) -> Value {
        let mut result = json!({
            "schema_version": 1,
            "id": uuid(),
            "task_name": task.name,
            "trial_name": self.name(),
            "trial_uri": format!("file://{}", self.dir.display()),
            "task_id": { "path": task.dir },
            "source": task.config.source,
            "task_checksum": checksum(task),
            "config": {
                "task": { "path": task.dir },
                "trial_name": self.name(),
                "trials_dir": self.trials_dir,
                "agent": { "name": scaffold },
                // Harbor knows no backend of this kind, and takes any import path.
                "environment": { "import_path": format!("legorl:{backend}") },
            },
            "agent_info": { "name": scaffold, "version": env!("CARGO_PKG_VERSION") },
            "verifier_environment_mode": "shared",
            "started_at": record.whole.started.map(rfc3339),
            "finished_at": record.whole.finished.map(rfc3339),
            "environment_setup": record.env_setup.json(),
            "agent_setup": record.agent_setup.json(),
            "agent_execution": record.agent_execute.json(),
            "verifier": record.verifier.json(),
            "reward_valid": record.verdict.is_some(),
        });
        if let Some(capture) = &record.capture {
            result["agent_result"] = json!({
                "n_input_tokens": capture.prompt_tokens,
                "n_output_tokens": capture.completion_tokens,
                "metadata": {
                    "key": assignment.key.to_string(),
                    "attempt": assignment.attempt,
                    "turns": capture.turns,
                    "stop_reason": record.stop,
                    "aborted": capture.aborted,
                    "malformed_tool_calls": capture.malformed_tool_calls,
                    "length_finishes": capture.length_finishes,
                    "model_inference_sec": capture.model_inference_secs,
                    "admission_wait_sec": capture.admission_wait_secs,
                    "min_version": capture.min_version,
                    "max_version": capture.max_version,
                },
            });
        }
        if let Some(verdict) = &record.verdict {
            result["verifier_result"] = json!({ "rewards": verdict.rewards });
        }
        if let Some(failure) = failure {
            result["exception_info"] = json!({
                "exception_type": failure.reason.to_string(),
                "exception_message": failure.detail,
                "exception_traceback": "",
                "occurred_at": rfc3339(SystemTime::now()),
            });
        }
        result
    }

    fn write_json(&self, name: &str, value: &Value) -> io::Result<()> {
        let mut text = serde_json::to_vec_pretty(value)?;
        text.push(b'\n');
        self.write(name, &text)
    }

    /// Readers see the whole file or none.
    fn write(&self, name: &str, bytes: &[u8]) -> io::Result<()> {
        let part = self.dir.join(format!(".{name}.part"));
        let written = File::create(&part)
            .and_then(|mut file| file.write_all(bytes))
            .and_then(|()| fs::rename(&part, self.dir.join(name)));
        written.inspect_err(|_| {
            // The error that matters is the one being reported.
            let _ = fs::remove_file(&part);
        })
    }
}

/// The branches without their tokens, which are in the buffer's shard.
fn branches(capture: &CapturedSession) -> Vec<Value> {
    let one = |branch: &CapturedBranch| {
        json!({
            "kind": branch.kind,
            "trainable": branch.trainable,
            "weight": branch.tokens.weight,
            "parent": branch.parent,
            "turns": branch.turns,
            "tokens": branch.tokens.len(),
            "sampled_tokens": branch.tokens.sampled(),
            "messages": branch.messages,
        })
    };
    capture.branches.iter().map(one).collect()
}

/// CRC-32 over the files that define the task's question and answer.
fn checksum(task: &TaskSpec) -> String {
    let mut hasher = crc32fast::Hasher::new();
    for name in ["task.toml", "instruction.md", "tests/test.sh"] {
        // A file that vanished after the task was loaded changes the sum, which is what it is for.
        hasher.update(&files::read(&task.dir.join(name)).unwrap_or_default());
    }
    format!("crc32:{:08x}", hasher.finalize())
}

/// A random (version 4) UUID.
fn uuid() -> String {
    let mut bytes: [u8; 16] = rand::random();
    bytes[6] = (bytes[6] & 0x0f) | 0x40;
    bytes[8] = (bytes[8] & 0x3f) | 0x80;
    let hex: String = bytes.iter().map(|b| format!("{b:02x}")).collect();
    format!(
        "{}-{}-{}-{}-{}",
        &hex[..8],
        &hex[8..12],
        &hex[12..16],
        &hex[16..20],
        &hex[20..]
    )
}
