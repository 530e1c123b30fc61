//! What rank 0 tells about the run: journal, metrics, progress, the table at the end.
//!
//! Keys of a step's row are verl's where verl has one. Of our own:
//! `staleness/{min,mean,max}` (lag of the batch's groups in versions), `buffer/*` (state after the step),
//! `engine/*` (sums over replicas), `timing_s/{gen,update_weights,step}`. A validation has a row of its own with
//! the same step: `timing_s/testing`, `val-core/<project>/reward/mean@N` with `val-aux/…` for counts.
//!
//! Nothing here stops a run; what cannot be written is said once in the log.

use super::{placement::Placement, roles::RoleMap, validation::ValidationScore};
use crate::{
    base::{EngineStatus, Purpose, TrialEnd},
    config::settings::Settings,
    observe::{metrics, summary, Journal, MetricsFiles, Progress, Row},
    rollout::{
        sandbox::BackendReport,
        workers::{OnEvent, WorkerEvent},
    },
    train::{
        batch::TrainBatch,
        buffer::BufferStatus,
        checkpoint::{CommittedCheckpoint, WriteReport},
        trainer::StepMetrics,
        weights::PushReport,
    },
};
use anyhow::Context;
use serde_json::json;
use std::{
    collections::BTreeMap,
    net::SocketAddr,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

/// What a run that is over has trained on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Learned {
    /// Trials with a verdict, or it cannot be told.
    Something,
    /// Steps were made, and none of them had a verdict.
    Nothing,
}

/// The run's voice. Shared with the workers.
pub struct Report {
    journal: Journal,
    metrics: Mutex<MetricsFiles>,
    progress: Progress,
    begin: Instant,
    engine_before: Mutex<EngineTotals>,
    places: Vec<(&'static str, PathBuf)>,
    status_path: PathBuf,
    status: Mutex<serde_json::Map<String, serde_json::Value>>,
    trials_per_step: u64,
    val_key: String,
}

/// Sums over replicas at a moment.
#[derive(Clone, Copy)]
struct EngineTotals {
    generated: u64,
    prefill: u64,
    at: Instant,
}

impl Report {
    /// Opens the files. Rows after `step` are of weights that did not survive and are set aside.
    pub fn open(settings: &Settings, step: u32, total_steps: u32, attempt: &Path) -> anyhow::Result<Self> {
        let journal_path = settings.paths.run.join("journal.jsonl");
        let journal = Journal::open(&journal_path).with_context(|| journal_path.display().to_string())?;
        let files = MetricsFiles::open(
            &settings.paths.logs,
            &settings.run.exp_name,
            // A validation before the first step has its row at step 0; it is repeated by a fresh start.
            (step > 0).then_some(u64::from(step)),
        )?;
        let places = vec![
            ("checkpoints", settings.paths.checkpoints.clone()),
            ("trajectories", settings.paths.trials.clone()),
            ("metrics", files.log_path().to_owned()),
            ("journal", journal_path),
            ("messages", attempt.to_owned()),
        ];
        Ok(Self {
            journal,
            metrics: Mutex::new(files),
            progress: Progress::new(total_steps.into(), step.into()),
            begin: Instant::now(),
            engine_before: Mutex::new(EngineTotals {
                generated: 0,
                prefill: 0,
                at: Instant::now(),
            }),
            places,
            status_path: settings.paths.run.join("status.json"),
            status: Mutex::default(),
            trials_per_step: u64::from(settings.batch.train_bsz) * u64::from(settings.batch.n_resp),
            val_key: format!(
                "{}/reward/mean@{}",
                settings.run.project_name, settings.validation.n
            ),
        })
    }

    /// The run begins or goes on.
    pub fn started(&self, roles: &RoleMap, step: u32, total_steps: u32) {
        let ranks = roles.describe();
        tracing::info!(step, total_steps, ?ranks, "run");
        self.journal.record(
            "run_started",
            json!({ "step": step, "total_steps": total_steps, "ranks": ranks }),
        );
        self.set_status(&[
            ("pid", json!(std::process::id())),
            ("host", json!(super::run_lock::host_name())),
            ("step", json!(step)),
            ("total_steps", json!(total_steps)),
            ("state", json!("running")),
        ]);
        self.progress.stage("rollout", self.trials_per_step);
    }

    /// Where the head's trainer and engine compute.
    pub fn placement(&self, place: &Placement) {
        self.progress.note(&place.describe());
        self.journal
            .record("placement", json!({ "what": place.describe() }));
    }

    /// It goes on from a checkpoint.
    pub fn resumed(&self, checkpoint: &CommittedCheckpoint) {
        self.progress.note(&format!(
            "resuming after step {} from {}",
            checkpoint.step,
            checkpoint.path.display()
        ));
        self.journal.record(
            "resumed",
            json!({ "step": checkpoint.step, "checkpoint": checkpoint.path }),
        );
    }

    /// The proxy listens.
    pub fn proxy(&self, tcp: Option<SocketAddr>) {
        tracing::info!(?tcp, "proxy");
        self.set_status(&[("proxy", json!(tcp.map(|a| a.to_string())))]);
    }

    /// What enforces the limits of sandboxes, and how many old ones were deleted.
    pub fn sandboxes(&self, backend: &BackendReport, reaped: usize) {
        tracing::info!(%backend, reaped, "sandboxes");
        self.journal.record(
            "sandboxes",
            json!({ "backend": backend.to_string(), "reaped": reaped }),
        );
    }

    /// A batch is complete.
    pub fn batch(&self, batch: &TrainBatch) {
        let lags: Vec<u32> = batch
            .groups
            .iter()
            .map(|g| (batch.step - 1).saturating_sub(g.start_version.0))
            .collect();
        let groups: Vec<u64> = batch.groups.iter().map(|g| g.id.0).collect();
        self.journal.record(
            "batch",
            json!({ "step": batch.step, "groups": groups, "lags": lags }),
        );
        self.progress.stage("train", 0);
    }

    /// Every engine has new weights.
    pub fn weights(&self, push: &PushReport) {
        tracing::debug!(
            version = push.version.0,
            bytes = push.size_bytes,
            secs = push.elapsed.as_secs_f64(),
            "weights"
        );
    }

    /// A checkpoint was published, or could not be.
    pub fn checkpoint(&self, report: &WriteReport) {
        match &report.result {
            Ok(done) => {
                tracing::info!(step = done.step, path = %done.path.display(), bytes = done.size_bytes, "checkpoint");
                self.journal.record(
                    "checkpoint",
                    json!({ "step": done.step, "path": done.path, "bytes": done.size_bytes, "secs": report.elapsed.as_secs_f64() }),
                );
            }
            Err(error) => {
                self.journal.record(
                    "checkpoint_failed",
                    json!({ "step": report.step, "error": error.to_string() }),
                );
            }
        }
    }

    /// The end of a step: one row.
    pub fn step(
        &self,
        metrics: StepMetrics,
        timing: &BTreeMap<String, f64>,
        buffer: BufferStatus,
        engines: &[EngineStatus],
    ) {
        let step = metrics.step;
        let mut row: Row = metrics.values;
        for (stage, secs) in timing {
            row.insert(format!("timing_s/{stage}"), *secs);
        }
        if let (Some(tokens), Some(secs)) = (row.get("perf/total_num_tokens"), timing.get("step")) {
            let rate = tokens / secs.max(1e-9);
            row.insert("perf/throughput".into(), rate);
        }
        row.insert("staleness/min".into(), buffer.last_lag.min.into());
        row.insert("staleness/mean".into(), buffer.last_lag.mean);
        row.insert("staleness/max".into(), buffer.last_lag.max.into());
        row.insert(
            "buffer/outstanding_groups".into(),
            buffer.outstanding_groups as f64,
        );
        row.insert("buffer/ready_groups".into(), buffer.ready_groups as f64);
        row.insert("buffer/cut_trials".into(), buffer.cut_trials as f64);
        row.insert("buffer/dropped_trials".into(), buffer.dropped_trials as f64);
        row.insert("buffer/shard_bytes".into(), buffer.shard_bytes as f64);
        self.add_engines(&mut row, engines);
        let line = step_line(&row);
        self.write(step, &row);
        self.progress.step_done(step.into(), &line);
        self.progress.stage("rollout", self.trials_per_step);
        self.set_status(&[("step", json!(step))]);
    }

    fn add_engines(&self, row: &mut Row, engines: &[EngineStatus]) {
        let generated: u64 = engines.iter().map(|e| e.generated_tokens).sum();
        let prefill: u64 = engines.iter().map(|e| e.prefill_tokens).sum();
        let now = EngineTotals {
            generated,
            prefill,
            at: Instant::now(),
        };
        let before = std::mem::replace(&mut *lock(&self.engine_before), now);
        let secs = (now.at - before.at).as_secs_f64().max(1e-9);
        row.insert(
            "engine/generated_tokens_per_s".into(),
            generated.saturating_sub(before.generated) as f64 / secs,
        );
        row.insert(
            "engine/prefill_tokens_per_s".into(),
            prefill.saturating_sub(before.prefill) as f64 / secs,
        );
        let total: u64 = engines.iter().map(|e| e.kv_tokens_total).sum();
        let used: u64 = engines.iter().map(|e| e.kv_tokens_used).sum();
        row.insert("engine/kv_cache_usage".into(), used as f64 / total.max(1) as f64);
    }

    fn add_score(&self, row: &mut Row, score: &ValidationScore) {
        if let Some(mean) = score.mean_reward {
            row.insert(format!("val-core/{}", self.val_key), mean);
        }
        row.insert("val-aux/trials".into(), score.trials as f64);
        row.insert("val-aux/dropped".into(), score.dropped as f64);
    }

    /// Whether the held-out tasks were scored at this step, by this attempt or an earlier one.
    pub fn has_validation(&self, step: u32) -> bool {
        let path = lock(&self.metrics).jsonl_path().to_owned();
        let scored = |row: &Row| row.contains_key("val-aux/trials");
        metrics::read(&path).is_ok_and(|rows| rows.get(&u64::from(step)).is_some_and(scored))
    }

    /// Held-out tasks begin.
    pub fn validation_started(&self, step: u32, trials: usize) {
        self.journal
            .record("validation_started", json!({ "step": step, "trials": trials }));
        self.progress.stage("validation", trials as u64);
    }

    /// Held-out tasks are done.
    pub fn validation(&self, step: u32, score: &ValidationScore, elapsed: Duration) {
        self.journal.record(
            "validation",
            json!({ "step": step, "mean_reward": score.mean_reward, "trials": score.trials, "dropped": score.dropped, "by_task": score.by_task }),
        );
        let mean = score
            .mean_reward
            .map_or_else(|| "no verdict".to_owned(), |m| format!("mean reward {m:.3}"));
        self.progress.note(&format!(
            "held out after step {step}: {mean} over {} tasks, {} trials, {} dropped",
            score.tasks, score.trials, score.dropped
        ));
        let mut row = Row::from([("timing_s/testing".to_owned(), elapsed.as_secs_f64())]);
        self.add_score(&mut row, score);
        self.write(step, &row);
    }

    /// What the workers call at every event of a trial.
    pub fn on_worker_event(self: &Arc<Self>) -> OnEvent {
        let this = Arc::clone(self);
        Arc::new(move |event| this.worker_event(event))
    }

    fn worker_event(&self, event: &WorkerEvent<'_>) {
        match event {
            WorkerEvent::Started { assignment, task } => self.journal.record(
                "trial_started",
                json!({ "trial": assignment.key.to_string(), "attempt": assignment.attempt, "task": task }),
            ),
            WorkerEvent::Finished { trajectory, submitted } => {
                self.journal.record(
                    "trial_finished",
                    json!({
                        "trial": trajectory.key.to_string(), "attempt": trajectory.attempt, "task": trajectory.task,
                        "reward": trajectory.outcome.reward, "stop": trajectory.outcome.stop, "turns": trajectory.turns,
                        "secs": trajectory.timing.total, "submitted": format!("{submitted:?}"),
                    }),
                );
                self.progress.advance(1, &trajectory.task);
            }
            WorkerEvent::Dropped { end, submitted } => {
                if let TrialEnd::Dropped { key, attempt, task, reason, detail } = end {
                    tracing::warn!(trial = %key, %reason, detail, "trial dropped");
                    self.journal.record(
                        "trial_dropped",
                        json!({
                            "trial": key.to_string(), "attempt": attempt, "task": task, "reason": reason,
                            "detail": detail, "submitted": format!("{submitted:?}"),
                        }),
                    );
                    if matches!(key.purpose, Purpose::Train) {
                        self.progress.advance(1, task);
                    }
                }
            }
            WorkerEvent::Retried { failure, next } => {
                tracing::warn!(
                    trial = %next.key, attempt = failure.assignment.attempt, reason = %failure.reason, detail = failure.detail,
                    "attempt failed, the trial runs again"
                );
                self.journal.record(
                    "trial_retried",
                    json!({
                        "trial": next.key.to_string(), "attempt": failure.assignment.attempt, "reason": failure.reason,
                        "detail": failure.detail,
                    }),
                );
            }
            WorkerEvent::Cancelled { assignment, reason } => self.journal.record(
                "trial_cancelled",
                json!({ "trial": assignment.key.to_string(), "attempt": assignment.attempt, "reason": format!("{reason:?}") }),
            ),
            WorkerEvent::SinkFailed { error, retry_in } => {
                tracing::warn!(%error, retry_in_secs = retry_in.as_secs_f64(), "a trial's end is not stored yet");
                self.journal.record("sink_failed", json!({ "error": error.to_string() }));
            }
            WorkerEvent::Panicked { detail } => {
                tracing::error!(detail, "a worker panicked; its trial runs again");
                self.journal.record("worker_panicked", json!({ "detail": detail }));
            }
        }
    }

    /// The run is over: the table.
    pub fn finished(&self, step: u32, total_steps: u32) -> Learned {
        self.progress.finish();
        let done = step == total_steps;
        self.journal.record(
            "run_finished",
            json!({ "step": step, "total_steps": total_steps }),
        );
        self.set_status(&[("state", json!(if done { "finished" } else { "stopped" }))]);
        let path = lock(&self.metrics).jsonl_path().to_owned();
        let mut learned = Learned::Something;
        match metrics::read(&path) {
            Ok(rows) => {
                if summary::learned_nothing(&rows) {
                    learned = Learned::Nothing;
                }
                let table = summary::render(&summary::Summary {
                    rows: &rows,
                    wall: self.wall(),
                    places: &self.places,
                });
                println!("{table}");
            }
            Err(error) => tracing::warn!(%error, "no summary"),
        }
        if !done {
            println!("stopped after step {step} of {total_steps}; the same command goes on from here");
        }
        learned
    }

    fn wall(&self) -> Duration {
        self.begin.elapsed()
    }

    fn write(&self, step: u32, row: &Row) {
        if let Err(error) = lock(&self.metrics).write(step.into(), row) {
            tracing::warn!(%error, "metrics of a step are not written");
        }
    }

    /// Replaces `status.json`, which other programs read while the run goes on.
    fn set_status(&self, fields: &[(&str, serde_json::Value)]) {
        let mut status = lock(&self.status);
        for (key, value) in fields {
            status.insert((*key).to_owned(), value.clone());
        }
        let text = serde_json::Value::Object(status.clone()).to_string();
        let part = self.status_path.with_extension("json.part");
        let written = std::fs::write(&part, text).and_then(|()| std::fs::rename(&part, &self.status_path));
        if let Err(error) = written {
            tracing::warn!(path = %self.status_path.display(), %error, "the status file is out of date");
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The few numbers that a person watches.
fn step_line(row: &Row) -> String {
    // A step has no policy figures while the critic warms up, and none of the critic without one.
    let figures = [
        ("reward", "critic/score/mean", 3),
        ("grad", "actor/grad_norm", 3),
        ("entropy", "actor/entropy", 3),
        ("vf_loss", "critic/vf_loss", 4),
        ("pearson", "training/rollout_actor_probs_pearson_corr", 5),
    ];
    let shown = |(name, key, digits): (&str, &str, usize)| {
        row.get(key).map(|value| format!("{name} {value:.digits$}  "))
    };
    let of = |key: &str| row.get(key).copied().unwrap_or(f64::NAN);
    format!(
        "{}{:.0} tok/s  {:.1} s (rollout {:.1} s)",
        figures.into_iter().filter_map(shown).collect::<String>(),
        of("perf/throughput"),
        of("timing_s/step"),
        of("timing_s/gen"),
    )
}
