//! Runs an attempt through its phases.

use super::folder::{Record, TrialFolder};
use super::outcome::judge;
use super::{AttemptEnd, AttemptFailure, TrialConfigError, TrialRunnerConfig};
use crate::base::{
    error_chain, CapturedSession, DropReason, Purpose, SamplingParams, SessionEndpoint, SessionHost,
    SessionId, SessionLimits, SessionSpec, Trajectory, TrialAssignment, TrialOutcome, TrialTiming,
};
use crate::rollout::sandbox::{Labels, Sandbox, SandboxBackend, SandboxError, SandboxSpec};
use crate::rollout::scaffold::{AgentRequest, AgentRun, Scaffold, ScaffoldError};
use crate::rollout::task::{resolve_env, TaskSpec};
use crate::rollout::verifier::verify;
use std::{
    error::Error,
    future::Future,
    io::ErrorKind,
    path::Path,
    sync::Arc,
    time::{Duration, Instant},
};
use tokio::{sync::watch, time::timeout};

/// A phase that enforces its own limit is given this much longer before it counts as hung.
const GRACE: Duration = Duration::from_secs(60);

/// How often a trial that waits for room on the disk tries again.
const ROOM_POLL: Duration = Duration::from_secs(1);

/// Writes as soon as the disk has room, and says so in the log while it waits.
async fn when_there_is_room<T>(
    patience: Duration,
    trial: &str,
    dir: &Path,
    write: impl Fn() -> std::io::Result<T>,
) -> std::io::Result<T> {
    let begin = Instant::now();
    loop {
        let error = match write() {
            Ok(written) => return Ok(written),
            Err(error) => error,
        };
        let full = matches!(error.kind(), ErrorKind::StorageFull | ErrorKind::QuotaExceeded);
        if !full || begin.elapsed() >= patience {
            return Err(error);
        }
        tracing::warn!(
            trial,
            "{}: {error}; trials wait until there is room",
            dir.display()
        );
        tokio::time::sleep(ROOM_POLL.min(patience)).await;
    }
}

/// Runs attempts; shared by all workers.
pub struct TrialRunner {
    config: TrialRunnerConfig,
    backend: Arc<dyn SandboxBackend>,
    scaffold: Arc<dyn Scaffold>,
    sessions: Arc<dyn SessionHost>,
}

/// An attempt that ends without a verdict.
struct Failure {
    reason: DropReason,
    detail: String,
}

impl Failure {
    fn new(reason: DropReason, detail: impl Into<String>) -> Self {
        Self {
            reason,
            detail: detail.into(),
        }
    }

    fn of(reason: DropReason, error: &dyn Error) -> Self {
        Self::new(reason, error_chain(error))
    }
}

/// Time limits of one attempt.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Budget {
    env: Duration,
    agent_setup: Duration,
    agent: Duration,
    verifier: Duration,
}

impl Budget {
    fn of(config: &TrialRunnerConfig, task: &TaskSpec, assignment: &TrialAssignment) -> Self {
        let cap = config.for_purpose(assignment.key.purpose).agent_timeout_max;
        let wanted = task
            .agent_timeout()
            .map_or(cap, |t| t.mul_f64(config.agent_timeout_multiplier));
        Self {
            env: task.build_timeout(),
            agent_setup: config.agent_setup_timeout,
            agent: wanted.min(cap),
            verifier: task
                .verifier_timeout()
                .mul_f64(config.verifier_timeout_multiplier),
        }
    }

    /// Until the agent must have ended.
    fn until_agent_end(&self) -> Duration {
        self.env + self.agent_setup + self.agent + 3 * GRACE
    }
}

/// What must be given back on every path.
struct Live<'a> {
    sessions: &'a Arc<dyn SessionHost>,
    session: Option<SessionId>,
    sandbox: Option<Box<dyn Sandbox>>,
}

impl Live<'_> {
    async fn close_session(&mut self) -> Result<CapturedSession, Failure> {
        let Some(session) = self.session.take() else {
            return Err(Failure::new(
                DropReason::EngineFailed,
                "the session is already closed",
            ));
        };
        match timeout(GRACE, self.sessions.close(&session)).await {
            Ok(Ok(capture)) => Ok(capture),
            Ok(Err(error)) => Err(Failure::of(DropReason::EngineFailed, &error)),
            Err(_) => Err(Failure::new(
                DropReason::EngineFailed,
                format!("waited {} s for session `{session}` to close", GRACE.as_secs()),
            )),
        }
    }

    /// Gives back what is still held. Failures are told and end nothing: the session's deadline and the
    /// sandbox's wall-time limit hold in any case, and leftovers are reaped.
    async fn release(&mut self, trial: &str) {
        if self.session.is_some() {
            if let Err(failure) = self.close_session().await {
                tracing::warn!(trial, "{}", failure.detail);
            }
        }
        if let Some(sandbox) = self.sandbox.take() {
            match timeout(GRACE, sandbox.delete()).await {
                Ok(Ok(())) => {}
                Ok(Err(error)) => tracing::warn!(trial, "sandbox not deleted: {}", error_chain(&error)),
                Err(_) => tracing::warn!(
                    trial,
                    "waited {} s for the sandbox to be deleted",
                    GRACE.as_secs()
                ),
            }
        }
    }
}

impl Drop for Live<'_> {
    /// Reached with a session only when the attempt's own future was dropped. A dropped sandbox deletes itself.
    fn drop(&mut self) {
        let (Some(session), Ok(runtime)) = (self.session.take(), tokio::runtime::Handle::try_current())
        else {
            return;
        };
        let sessions = Arc::clone(self.sessions);
        runtime.spawn(async move {
            // Nobody is left to take the capture or an error.
            let _ = sessions.close(&session).await;
        });
    }
}

impl TrialRunner {
    /// Puts the parts together; refuses limits that no trial could keep.
    pub fn new(
        config: TrialRunnerConfig,
        backend: Arc<dyn SandboxBackend>,
        scaffold: Arc<dyn Scaffold>,
        sessions: Arc<dyn SessionHost>,
    ) -> Result<Self, TrialConfigError> {
        config.check()?;
        Ok(Self {
            config,
            backend,
            scaffold,
            sessions,
        })
    }

    /// Runs one attempt to its end. When `cancel` turns true (or its sender is dropped) the attempt is ended
    /// and its sandbox deleted before this returns.
    pub async fn run(
        &self,
        assignment: &TrialAssignment,
        task: &TaskSpec,
        mut cancel: watch::Receiver<bool>,
    ) -> AttemptEnd {
        let trial = assignment.key.to_string();
        let mut record = Record::default();
        let mut folder = None;
        let mut live = Live {
            sessions: &self.sessions,
            session: None,
            sandbox: None,
        };
        record.whole.begin();
        let ended = tokio::select! {
            biased;
            _ = cancel.wait_for(|stop| *stop) => None,
            ended = self.attempt(assignment, task, &mut live, &mut record, &mut folder) => Some(ended),
        };
        record.whole.end();
        live.release(&trial).await;

        let failure = match &ended {
            Some(Err(failure)) => Some(AttemptFailure {
                assignment: *assignment,
                task: task.name.clone(),
                reason: failure.reason,
                detail: failure.detail.clone(),
            }),
            _ => None,
        };
        if let Some(folder) = &folder {
            let (scaffold, backend) = (self.scaffold.name(), self.backend.name());
            let write = || folder.finish(task, assignment, scaffold, backend, &record, failure.as_ref());
            // A trial that nobody wants any more does not hold a worker.
            let patience = if ended.is_some() {
                self.config.room_deadline
            } else {
                Duration::ZERO
            };
            if let Err(error) = when_there_is_room(patience, &trial, &folder.dir, write).await {
                // The folder is for people; the result itself is not lost.
                tracing::warn!(trial, "cannot write {}: {error}", folder.dir.display());
            }
        }
        match (ended, failure) {
            (Some(Ok(trajectory)), _) => AttemptEnd::Finished(Box::new(trajectory)),
            (_, Some(failure)) => AttemptEnd::Failed(failure),
            _ => AttemptEnd::Unwanted,
        }
    }

    async fn attempt(
        &self,
        assignment: &TrialAssignment,
        task: &TaskSpec,
        live: &mut Live<'_>,
        record: &mut Record,
        folder_slot: &mut Option<TrialFolder>,
    ) -> Result<Trajectory, Failure> {
        let budget = Budget::of(&self.config, task, assignment);
        let name = format!("{}__{:08x}", task.slug(), rand::random::<u32>());
        let folder = self.make_folder(assignment.key.purpose, &name).await?;
        let folder = folder_slot.insert(folder);
        let endpoint = self.open_session(assignment, name, &budget)?;
        live.session = Some(endpoint.session.clone());
        let session = endpoint.session.to_string();

        record.env_setup.begin();
        let mut spec = self.sandbox_spec(assignment, task, &endpoint, &budget)?;
        spec.mounts = self.scaffold.mounts().map_err(|e| scaffold_failure(&e))?;
        let sandbox = within(
            budget.env + GRACE,
            "the sandbox to start",
            self.backend.start(spec),
        )
        .await?
        .map_err(|e| Failure::of(DropReason::EnvSetupFailed, &e))?;
        let sandbox = live.sandbox.insert(sandbox);
        record.env_setup.end();

        record.agent_setup.begin();
        within(
            budget.agent_setup,
            "the agent to be installed",
            self.scaffold.setup(sandbox.as_ref()),
        )
        .await?
        .map_err(|e| scaffold_failure(&e))?;
        record.agent_setup.end();

        record.agent_execute.begin();
        let request = AgentRequest {
            instruction: task.instruction.clone(),
            endpoint,
            timeout: budget.agent,
            max_turns: self.config.max_turns,
            context_tokens: self.config.max_total_tokens,
            max_tokens_per_turn: self.config.max_tokens_per_turn,
            log_dir: folder.agent_dir(),
        };
        let ran = within(
            budget.agent + GRACE,
            "the agent to be ended at its time limit",
            self.scaffold.run(sandbox.as_ref(), request),
        )
        .await;
        record.agent_execute.end();
        // Before the verifier, whatever happened, so that no policy answers while the sandbox is graded.
        let capture = live.close_session().await?;
        let capture = &*record.capture.insert(capture);
        let sandbox = live
            .sandbox
            .as_deref()
            .ok_or_else(|| Failure::new(DropReason::EnvSetupFailed, "the sandbox was taken away"))?;
        let run: AgentRun = match ran {
            Ok(Ok(run)) => run,
            // An agent that lost its sandbox or its engine is no crash of its own.
            _ if capture.engine_failure.is_some() => AgentRun::default(),
            Ok(Err(error)) => return Err(scaffold_failure(&error)),
            Err(failure) => return Err(failure),
        };
        let stop = judge(&run, capture).map_err(|(reason, detail)| Failure::new(reason, detail))?;
        record.stop = Some(stop);

        record.verifier.begin();
        let verdict = within(
            budget.verifier + 3 * GRACE,
            "the verifier",
            verify(sandbox, task, budget.verifier, &folder.verifier_dir()),
        )
        .await
        .map_err(|failure| Failure::new(DropReason::VerifierFailed, failure.detail))?
        .map_err(|e| Failure::of(e.drop_reason(), &e))?;
        record.verifier.end();
        let verdict = record.verdict.insert(verdict);

        Ok(Trajectory {
            key: assignment.key,
            attempt: assignment.attempt,
            task: task.name.clone(),
            session,
            outcome: TrialOutcome {
                reward: verdict.reward(),
                rewards: verdict.rewards.clone(),
                stop,
            },
            sequences: capture.sequences.clone(),
            turns: capture.turns,
            malformed_tool_calls: capture.malformed_tool_calls,
            timing: TrialTiming {
                env_setup: record.env_setup.secs(),
                agent_setup: record.agent_setup.secs(),
                agent_execute: record.agent_execute.secs(),
                verifier: record.verifier.secs(),
                total: [
                    record.env_setup,
                    record.agent_setup,
                    record.agent_execute,
                    record.verifier,
                ]
                .iter()
                .map(|p| p.secs())
                .sum(),
                model_inference: capture.model_inference_secs,
            },
        })
    }

    /// Makes the trial's folder. A full disk is no verdict on a trial.
    async fn make_folder(&self, purpose: Purpose, name: &str) -> Result<TrialFolder, Failure> {
        let dir = &self.config.trials_dir;
        let make = || TrialFolder::create(dir, purpose, name);
        let made = when_there_is_room(self.config.room_deadline, name, dir, make).await;
        made.map_err(|error| {
            let detail = format!("cannot make a trial folder in {}: {error}", dir.display());
            Failure::new(DropReason::EnvSetupFailed, detail)
        })
    }

    fn open_session(
        &self,
        assignment: &TrialAssignment,
        name: String,
        budget: &Budget,
    ) -> Result<SessionEndpoint, Failure> {
        let config = &self.config;
        let spec = SessionSpec {
            key: assignment.key,
            attempt: assignment.attempt,
            name,
            sampling: SamplingParams {
                seed: assignment.seed,
                ..config.for_purpose(assignment.key.purpose).sampling
            },
            limits: SessionLimits {
                max_turns: config.max_turns,
                max_total_tokens: config.max_total_tokens,
                max_tokens_per_turn: config.max_tokens_per_turn,
                max_consecutive_no_tool: config.max_consecutive_no_tool,
                deadline: Instant::now() + budget.until_agent_end(),
            },
        };
        self.sessions
            .open(spec)
            .map_err(|e| Failure::of(DropReason::EngineFailed, &e))
    }

    fn sandbox_spec(
        &self,
        assignment: &TrialAssignment,
        task: &TaskSpec,
        endpoint: &SessionEndpoint,
        budget: &Budget,
    ) -> Result<SandboxSpec, Failure> {
        let environment = &task.config.environment;
        let env = resolve_env(
            &environment.env,
            &task.dir.join("task.toml"),
            "environment.env",
            |name| std::env::var(name).ok(),
        )
        .map_err(|e| Failure::of(DropReason::EnvSetupFailed, &e))?;
        let mebibytes = |size: Option<i64>| size.and_then(|n| u64::try_from(n).ok());
        let folder = task.environment_dir();
        Ok(SandboxSpec {
            labels: Labels {
                run: self.config.run.clone(),
                trial: assignment.key.to_string(),
                owner: self.config.owner.clone(),
            },
            environment: folder.is_dir().then_some(folder),
            workdir: environment.workdir.clone(),
            cpus: self.config.override_cpus.or(environment.cpus),
            memory_mb: self
                .config
                .override_memory_mb
                .or(mebibytes(environment.memory_mb)),
            storage_mb: mebibytes(environment.storage_mb),
            pids_limit: self.config.pids_limit,
            wall_limit: budget.until_agent_end() + budget.verifier + 4 * GRACE,
            setup_timeout: budget.env,
            proxy_socket: Some(endpoint.unix_socket.clone()),
            env,
            ..SandboxSpec::new(endpoint.session.to_string())
        })
    }
}

/// Bounds a phase; the failure says what was waited for.
async fn within<T>(limit: Duration, what: &str, future: impl Future<Output = T>) -> Result<T, Failure> {
    timeout(limit, future).await.map_err(|_| {
        Failure::new(
            DropReason::EnvSetupFailed,
            format!("waited {:.0} s for {what}", limit.as_secs_f64()),
        )
    })
}

/// A sandbox that fails under the agent is not the agent's failure.
fn scaffold_failure(error: &ScaffoldError) -> Failure {
    let reason = match error {
        ScaffoldError::Sandbox {
            source: SandboxError::Ended { .. } | SandboxError::Timeout { .. },
            ..
        } => DropReason::EnvSetupFailed,
        _ => DropReason::AgentSetupFailed,
    };
    Failure::of(reason, error)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::{GroupId, Purpose, TrialKey};
    use crate::rollout::task::TaskConfig;
    use crate::rollout::trial::PurposeConfig;

    fn config() -> TrialRunnerConfig {
        let purpose = |secs| PurposeConfig {
            sampling: SamplingParams::default(),
            agent_timeout_max: Duration::from_secs(secs),
        };
        TrialRunnerConfig {
            trials_dir: "trials".into(),
            run: "run".to_owned(),
            owner: "owner".to_owned(),
            train: purpose(100),
            val: purpose(1000),
            max_turns: 5,
            max_total_tokens: 100,
            max_tokens_per_turn: 10,
            max_consecutive_no_tool: 0,
            agent_timeout_multiplier: 0.5,
            verifier_timeout_multiplier: 2.0,
            agent_setup_timeout: Duration::from_secs(7),
            override_cpus: None,
            override_memory_mb: None,
            pids_limit: None,
            room_deadline: Duration::ZERO,
        }
    }

    #[test]
    fn budgets_follow_the_task_the_factor_and_the_cap() {
        let agent_secs = |toml: &str, purpose| {
            let task = TaskSpec {
                dir: "task".into(),
                name: "task".to_owned(),
                family: String::new(),
                instruction: "x".to_owned(),
                config: TaskConfig::parse("task.toml", toml).0,
                warnings: Vec::new(),
            };
            let assignment = TrialAssignment {
                key: TrialKey {
                    purpose,
                    group: GroupId(0),
                    sample: 0,
                },
                attempt: 0,
                row: 0,
                seed: 0,
            };
            let budget = Budget::of(&config(), &task, &assignment);
            assert_eq!(budget.verifier.as_secs(), 1200);
            budget.agent.as_secs_f64()
        };
        let (train, val) = (Purpose::Train, Purpose::Val { step: 0 });
        assert_eq!(agent_secs("[agent]\ntimeout_sec = 30\n", train), 15.0);
        assert_eq!(agent_secs("[agent]\ntimeout_sec = 900\n", train), 100.0);
        assert_eq!(agent_secs("[agent]\ntimeout_sec = 900\n", val), 450.0);
        assert_eq!(agent_secs("", train), 100.0);
    }

    #[test]
    fn impossible_limits_are_refused_by_name() {
        assert_eq!(config().check(), Ok(()));
        type Spoil = fn(&mut TrialRunnerConfig);
        let cases: [(Spoil, &str); 5] = [
            (
                |c| c.agent_timeout_multiplier = -1.0,
                "HARBOR_AGENT_TIMEOUT_MULTIPLIER",
            ),
            (
                |c| c.verifier_timeout_multiplier = f64::NAN,
                "HARBOR_VERIFIER_TIMEOUT_MULTIPLIER",
            ),
            (
                |c| c.train.agent_timeout_max = Duration::MAX,
                "HARBOR_AGENT_MAX_TIMEOUT_SEC",
            ),
            (|c| c.max_turns = 0, "HARBOR_AGENT_MAX_ITERATIONS"),
            (
                |c| c.override_cpus = Some(0.0),
                "HARBOR_ENVIRONMENT_OVERRIDE_CPUS",
            ),
        ];
        for (spoil, variable) in cases {
            let mut config = config();
            spoil(&mut config);
            assert_eq!(config.check().unwrap_err().variable, variable);
        }
    }
}
