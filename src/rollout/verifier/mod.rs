//! The verifier: the task's own tests, run after the agent ended, give the reward.
//!
//! 1. What the agent left at `/tests` and `/logs/verifier/reward.*` is removed.
//! 2. `tests/` of the task is uploaded to `/tests`; it was not in the sandbox before.
//! 3. `/tests/test.sh` runs, by its first line's interpreter, with `[verifier] env`, `user` and time limit.
//!    Its exit code does not matter. Output goes to `verifier/test-stdout.txt` of the trial folder.
//! 4. The reward is read: `/logs/verifier/reward.json` (flat map of numbers, wins) or `reward.txt` (one number).
//!
//! What the agent left running lives on while its work is graded, since a running service can be the answer.
//! A sandbox is therefore as trustworthy as the task's tests are against a process that watches them.
//!
//! A reward that is missing, empty, not a number or not finite is an error that shows what was found. It is
//! never a zero.

mod reward;

pub use reward::{parse_json, parse_text, RewardError};

use crate::base::DropReason;
use crate::rollout::sandbox::{ExecResult, ExecSpec, LogFile, Sandbox, SandboxError};
use crate::rollout::task::{resolve_env, TaskError, TaskSpec};
use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    time::Duration,
};

/// Bytes of a reward file that are read; a longer one is refused.
pub const REWARD_FILE_BYTES_MAX: usize = 32 << 10;
/// Time for the small commands around the test script.
const HOUSEKEEPING_TIMEOUT: Duration = Duration::from_secs(60);

const CLEAN: &str = "\
set -e
[ ! -L /logs/verifier ] || rm -f /logs/verifier
mkdir -p /logs/verifier
rm -rf /logs/verifier/reward.json /logs/verifier/reward.txt
if [ -L /tests ] || [ ! -d /tests ]; then rm -f /tests; else rm -rf /tests/* /tests/.[!.]* /tests/..?*; fi
mkdir -p /tests";

/// The verifier's judgement.
#[derive(Clone, Debug, PartialEq)]
pub struct Verdict {
    /// All numbers; finite, at least one.
    pub rewards: BTreeMap<String, f64>,
    /// Exit status of the test script, for people.
    pub exit_code: Option<i32>,
}

impl Verdict {
    /// The number that training uses: `reward`, or the mean of all where there is no such entry.
    pub fn reward(&self) -> f64 {
        match self.rewards.get("reward") {
            Some(reward) => *reward,
            None => self.rewards.values().sum::<f64>() / self.rewards.len() as f64,
        }
    }
}

/// Why there is no judgement.
#[derive(Debug, thiserror::Error)]
pub enum VerifierError {
    /// The test script did not end in time.
    #[error("{}: the test script did not end within {} s", script.display(), limit.as_secs_f64())]
    TimedOut {
        /// The task's test script.
        script: PathBuf,
        /// The limit.
        limit: Duration,
    },
    /// It ended and its reward is unusable.
    #[error("{}: {problem} (the script ended with {ending}); end of its output: {tail}", script.display())]
    Reward {
        /// The task's test script.
        script: PathBuf,
        /// What is wrong with the reward.
        problem: RewardError,
        /// How the script ended.
        ending: String,
        /// Last lines of its output.
        tail: String,
    },
    /// `[verifier] env` needs what the host does not have.
    #[error(transparent)]
    Task(#[from] TaskError),
    /// The sandbox failed while it was graded.
    #[error("grading failed: {0}")]
    Sandbox(#[from] SandboxError),
    /// A command around the test script failed.
    #[error("grading failed: {action} ended with {ending}: {tail}")]
    Housekeeping {
        /// What was tried.
        action: &'static str,
        /// How it ended.
        ending: String,
        /// Last lines of its output.
        tail: String,
    },
}

impl VerifierError {
    /// How the trial is dropped when no attempt is left.
    pub fn drop_reason(&self) -> DropReason {
        match self {
            VerifierError::TimedOut { .. } => DropReason::VerifierTimeout,
            _ => DropReason::VerifierFailed,
        }
    }
}

/// Grades a sandbox. `time_limit` bounds the test script; its output and the reward file are kept in
/// `log_dir`, which must exist.
pub async fn verify(
    sandbox: &dyn Sandbox,
    task: &TaskSpec,
    time_limit: Duration,
    log_dir: &Path,
) -> Result<Verdict, VerifierError> {
    let tests = task.tests_dir();
    let script = tests.join("test.sh");
    let env = resolve_env(
        &task.config.verifier.env,
        &task.dir.join("task.toml"),
        "verifier.env",
        |name| std::env::var(name).ok(),
    )?;

    housekeeping(sandbox, "removing what the agent left for the verifier", CLEAN).await?;
    sandbox.upload(&tests, "/tests").await?;
    housekeeping(
        sandbox,
        "making /tests/test.sh executable",
        "chmod +x /tests/test.sh",
    )
    .await?;

    let ran = sandbox
        .exec(ExecSpec {
            // Through a shell, so that a script without an interpreter line runs too.
            argv: ["/bin/sh", "-c", "/tests/test.sh"].map(str::to_owned).to_vec(),
            env,
            user: task.config.verifier.user.clone(),
            timeout: Some(time_limit),
            log: Some(LogFile::new(log_dir.join("test-stdout.txt"))),
            ..ExecSpec::default()
        })
        .await?;
    if ran.timed_out {
        return Err(VerifierError::TimedOut {
            script,
            limit: time_limit,
        });
    }
    let rewards = read_reward(sandbox, log_dir).await?;
    rewards.map_or_else(
        |problem| {
            Err(VerifierError::Reward {
                script,
                problem,
                ending: ending(&ran),
                tail: last_lines(&ran.tail),
            })
        },
        |rewards| {
            Ok(Verdict {
                rewards,
                exit_code: ran.exit_code,
            })
        },
    )
}

/// Reads the reward through a bounded command: the file is written by whoever ran in the sandbox.
async fn read_reward(
    sandbox: &dyn Sandbox,
    log_dir: &Path,
) -> Result<Result<BTreeMap<String, f64>, RewardError>, VerifierError> {
    for (name, parse) in [
        ("reward.json", parse_json as fn(&str) -> _),
        ("reward.txt", parse_text),
    ] {
        let file = format!("/logs/verifier/{name}");
        let read = format!(
            "[ -e {file} ] || exit 44; [ -f {file} ] || exit 45; head -c {} {file}",
            REWARD_FILE_BYTES_MAX + 1
        );
        let result = exec_short(sandbox, &read).await?;
        match result.exit_code {
            Some(44) => continue,
            Some(45) => return Ok(Err(RewardError::NotAFile(file))),
            Some(0) => {}
            _ => {
                return Err(VerifierError::Housekeeping {
                    action: "reading the reward",
                    ending: ending(&result),
                    tail: last_lines(&result.tail),
                })
            }
        }
        if result.output_bytes > REWARD_FILE_BYTES_MAX as u64 {
            return Ok(Err(RewardError::TooLong(file)));
        }
        let copy = log_dir.join(name);
        std::fs::write(&copy, &result.tail)
            .map_err(|source| SandboxError::io("cannot write the copy of the reward", copy, source))?;
        return Ok(parse(&result.tail));
    }
    Ok(Err(RewardError::Missing))
}

async fn exec_short(sandbox: &dyn Sandbox, script: &str) -> Result<ExecResult, SandboxError> {
    let mut spec = ExecSpec::shell(script);
    spec.cwd = Some("/".to_owned());
    spec.user = Some("root".to_owned());
    spec.timeout = Some(HOUSEKEEPING_TIMEOUT);
    sandbox.exec(spec).await
}

async fn housekeeping(
    sandbox: &dyn Sandbox,
    action: &'static str,
    script: &str,
) -> Result<(), VerifierError> {
    let result = exec_short(sandbox, script).await?;
    if result.success() {
        return Ok(());
    }
    Err(VerifierError::Housekeeping {
        action,
        ending: ending(&result),
        tail: last_lines(&result.tail),
    })
}

/// How a command ended, in words.
pub(crate) fn ending(result: &ExecResult) -> String {
    let how = match (result.exit_code, result.signal) {
        _ if result.timed_out => "its time limit".to_owned(),
        (Some(code), _) => format!("exit code {code}"),
        (None, Some(signal)) => format!("signal {signal}"),
        (None, None) => "an unknown status".to_owned(),
    };
    if result.oom_killed {
        format!("{how}, out of memory")
    } else if result.pids_limit_hit {
        format!("{how}, at the process limit")
    } else {
        how
    }
}

/// The end of an output for an error message: at most 5 lines and 500 characters.
fn last_lines(tail: &str) -> String {
    let lines: Vec<_> = tail.trim_end().lines().collect();
    let text = lines[lines.len().saturating_sub(5)..].join(" | ");
    let skip = text.chars().count().saturating_sub(500);
    let text: String = text.chars().skip(skip).collect();
    if text.is_empty() {
        "(none)".to_owned()
    } else {
        text
    }
}

#[cfg(test)]
mod tests;
