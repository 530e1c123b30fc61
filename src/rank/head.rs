//! Rank 0: the run from its start, or from where it stopped, to its last step.
//!
//! ```text
//!   buffer ──batch──> trainer ──weights──> engines          this thread, one step after the other
//!     ▲                  └──snapshot──> checkpoint writer   its own thread
//!     │ trial ends
//!   workers ──agent──> proxy ──tokens──> balancer ──> engines      control, proxy and engine threads
//! ```
//!
//! | Waits | For | Unblocked by | At most |
//! |---|---|---|---|
//! | this thread | a batch | workers that end trials; a stop | the time of all attempts of a trial |
//! | this thread | engines to take weights | engine threads | [`PUSH_DEADLINE`] |
//! | this thread | the end of the checkpoint before | the writer, and the other ranks' | its queue deadline |
//! | workers | a trial to start | [`Buffer::step_done`] | until the run ends |
//! | agents | model calls | engine threads, never this one | their own limits |
//!
//! A step is: batch, trainer, weights to the engines, `step_done`, metrics, checkpoint, validation. The
//! order matters: trials of the next version start only when every engine has the new weights, and a step
//! that is in a checkpoint has its row of metrics.

use super::{
    checkpointing::Checkpointing,
    control::Control,
    report::{Learned, Report},
    roles::RoleMap,
    signals::{StopFlag, EXIT_REQUEUE},
    stages,
    team::Team,
    validation::{self, Round, Validation},
    wiring::Parts,
};
use crate::{
    base::PolicyVersion,
    config::settings::Settings,
    rollout::{
        lease::{LeaseConfig, LeaseTable},
        workers::{run_workers, WorkersConfig, WorkersEnd},
    },
    train::{
        batch::TrainBatch,
        buffer::{Buffer, BufferError},
        checkpoint::WriteReport,
        trainer::{TrainError, Trainer},
        weights::push,
    },
};
use anyhow::{bail, Context};
use std::{
    collections::BTreeMap,
    process::ExitCode,
    sync::Arc,
    time::{Duration, Instant},
};
use tokio::task::JoinHandle;

/// Longest time for all engines to take new weights.
pub const PUSH_DEADLINE: Duration = Duration::from_secs(600);
/// Running trials are cancelled and their sandboxes deleted within this time at the end.
const WIND_DOWN: Duration = Duration::from_secs(120);
/// Batches in a row without any verdict that end a run.
const EMPTY_BATCHES_MAX: u32 = 2;
/// How often the wait for a batch looks at the stop flag and at the workers.
const WAIT_SLICE: Duration = Duration::from_millis(200);

/// A run on rank 0.
pub struct Head<'a> {
    settings: &'a Settings,
    parts: Parts,
    trainer: Trainer,
    team: Team,
    buffer: Arc<Buffer>,
    checkpoints: Checkpointing,
    report: Arc<Report>,
    control: Control,
    stop: StopFlag,
    total_steps: u32,
    /// Step of the newest checkpoint that is published.
    last_published: u32,
    /// Batches in a row without a single verdict.
    empty_batches: u32,
}

/// Seconds by stage of one step.
type Timing = BTreeMap<String, f64>;

impl<'a> Head<'a> {
    /// Puts a run together from its parts.
    #[allow(clippy::too_many_arguments, reason = "one call, from wiring")]
    pub fn new(
        settings: &'a Settings,
        parts: Parts,
        trainer: Trainer,
        team: Team,
        buffer: Arc<Buffer>,
        checkpoints: Checkpointing,
        report: Arc<Report>,
        control: Control,
        stop: StopFlag,
        total_steps: u32,
    ) -> Self {
        let last_published = trainer.version().0;
        Self {
            settings,
            parts,
            trainer,
            team,
            buffer,
            checkpoints,
            report,
            control,
            stop,
            total_steps,
            last_published,
            empty_batches: 0,
        }
    }

    /// The control plane's threads.
    pub fn control(&self) -> &Control {
        &self.control
    }

    /// Runs to the last step or to a stop.
    pub fn run(&mut self, roles: &RoleMap) -> anyhow::Result<ExitCode> {
        let first = self.trainer.version().0;
        self.report.started(roles, first, self.total_steps);
        // The engines started with some weights; what they serve from here on is the trainer's version.
        self.publish_weights()?;
        let rounds = self.settings.paths.run.join("validation");
        validation::set_aside_after(&rounds, first).with_context(|| rounds.display().to_string())?;
        if first == 0 && self.settings.schedule.val_before_train {
            self.validate(0)?;
        }
        if first == self.total_steps && !self.report.has_validation(first) {
            // The last attempt was killed between its last checkpoint and the end of the validation.
            self.validate(first)?;
        }
        let rollouts = self.start_rollouts();
        let outcome = self.steps(&rollouts);
        self.control.stop_trials();
        let wound_down = self.control.wait("the running trials", WIND_DOWN, rollouts);
        // Even after an error the steps that were made are kept, unless the trainer ranks broke off in a step:
        // they all end with it, and their weights may be those of half a step.
        let saved = match &outcome {
            Err(error) if !self.team.is_alone() && error.chain().any(|cause| cause.is::<TrainError>()) => {
                self.drain()
            }
            _ => self.save_last(),
        };
        let finished = outcome?;
        wound_down?.context("the task that runs trials panicked")?;
        saved?;
        self.team.end()?;
        let step = self.trainer.version().0;
        let learned = self.report.finished(step, self.total_steps);
        if finished && learned == Learned::Nothing {
            bail!(
                "no step of this run had a trial with a verdict: its weights are those that it began with. {} says what \
                 failed; when it is mended, start again under another EXP_NAME",
                self.settings.paths.run.join("journal.jsonl").display()
            );
        }
        Ok(if finished {
            ExitCode::SUCCESS
        } else {
            ExitCode::from(EXIT_REQUEUE)
        })
    }

    fn start_rollouts(&self) -> JoinHandle<WorkersEnd> {
        let table = Arc::new(LeaseTable::new(self.buffer.clone(), LeaseConfig::default()));
        let config = WorkersConfig::new(
            self.settings.rollout.n_concurrent as usize,
            self.parts.owner.clone(),
        );
        self.control.spawn(run_workers(
            config,
            table,
            self.parts.runner.clone(),
            self.parts.tasks.clone(),
            self.buffer.clone(),
            self.control.stopping(),
            self.report.on_worker_event(),
        ))
    }

    /// True when the last step was made, false after a stop.
    fn steps(&mut self, rollouts: &JoinHandle<WorkersEnd>) -> anyhow::Result<bool> {
        while self.trainer.version().0 < self.total_steps {
            let begin = Instant::now();
            let mut timing = Timing::new();
            let step = self.trainer.version().0 + 1;

            let Some(batch) = timed(&mut timing, "gen", || self.next_batch(step, rollouts))? else {
                return Ok(false);
            };
            self.report.batch(&batch);
            self.check_verdicts(&batch)?;
            self.team.step(&batch)?;
            let metrics = self
                .trainer
                .step(&batch)
                .with_context(|| format!("step {step}"))?;
            timed(&mut timing, "update_weights", || self.publish_weights())?;
            self.buffer.step_done(PolicyVersion(step))?;

            timing.insert("step".into(), begin.elapsed().as_secs_f64());
            // Before the checkpoint: a step that survives has its row.
            self.report.step(
                metrics,
                &timing,
                self.buffer.status(),
                &self.parts.engine_status(),
            );

            let last = step == self.total_steps;
            if last || due(step, self.settings.schedule.save_freq) {
                self.save()?;
            }
            if last || due(step, self.settings.schedule.test_freq) {
                self.validate(step)?;
            }
            let reports = self.checkpoints.collect(&self.buffer)?;
            self.note_checkpoints(&reports);
            if self.stop.is_set() && !last {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Waits for the groups of a step; nothing after a stop.
    fn next_batch(
        &mut self,
        step: u32,
        rollouts: &JoinHandle<WorkersEnd>,
    ) -> anyhow::Result<Option<TrainBatch>> {
        let deadline = Instant::now() + stages::trial_deadline(self.settings);
        loop {
            if self.stop.is_set() {
                return Ok(None);
            }
            let slice = (Instant::now() + WAIT_SLICE).min(deadline);
            match self.buffer.next_batch(step, slice) {
                Ok(batch) => return Ok(Some(batch)),
                Err(BufferError::Deadline { .. }) if Instant::now() < deadline => {}
                Err(error) => return Err(error.into()),
            }
            if rollouts.is_finished() && !self.stop.is_set() {
                bail!("the task that runs trials ended before step {step} had its groups");
            }
            let reports = self.checkpoints.collect(&self.buffer)?;
            self.note_checkpoints(&reports);
        }
    }

    fn note_checkpoints(&mut self, reports: &[WriteReport]) {
        for report in reports {
            self.report.checkpoint(report);
            if let Ok(done) = &report.result {
                self.last_published = self.last_published.max(done.step);
            }
        }
    }

    /// Stops a run whose trials all fail: going on would use up its tasks and train on nothing.
    fn check_verdicts(&mut self, batch: &TrainBatch) -> anyhow::Result<()> {
        if batch.groups.iter().any(|group| !group.trajectories.is_empty()) {
            self.empty_batches = 0;
            return Ok(());
        }
        self.empty_batches += 1;
        let mut reasons: BTreeMap<String, usize> = BTreeMap::new();
        for (_, reason) in batch.groups.iter().flat_map(|group| &group.dropped) {
            *reasons.entry(reason.to_string()).or_default() += 1;
        }
        let step = batch.step;
        if self.empty_batches < EMPTY_BATCHES_MAX {
            tracing::warn!(
                step,
                ?reasons,
                "no trial of this step has a verdict; nothing is learned from it"
            );
            return Ok(());
        }
        bail!(
            "no trial of the last {EMPTY_BATCHES_MAX} steps has a verdict ({reasons:?} in step {step}); the run stops rather \
             than use up its tasks. {} says what failed; when it is mended, the same command goes on",
            self.settings.paths.run.join("journal.jsonl").display()
        )
    }

    fn publish_weights(&self) -> anyhow::Result<()> {
        self.team.weights()?;
        let update = Arc::new(self.trainer.weight_update(self.trainer.version())?);
        let pushed = push(update, &self.parts.weight_targets, PUSH_DEADLINE);
        // `push` has the same deadline for every replica; this one only guards against a hang of its own.
        let report = self
            .control
            .wait("the push of weights", PUSH_DEADLINE + WIND_DOWN, pushed)??;
        self.report.weights(&report);
        Ok(())
    }

    fn save(&self) -> anyhow::Result<()> {
        let Some(order) = self.checkpoints.begin(&self.trainer, &self.buffer)? else {
            return Ok(());
        };
        self.team.save(order)?;
        self.checkpoints.save(order, &self.trainer, &self.buffer)
    }

    /// Waits for all writing.
    fn drain(&mut self) -> anyhow::Result<()> {
        let reports = self.checkpoints.drain(&self.buffer)?;
        self.note_checkpoints(&reports);
        Ok(())
    }

    /// Waits for all writing, and writes the last step that was made if it is not published yet.
    fn save_last(&mut self) -> anyhow::Result<()> {
        let step = self.trainer.version().0;
        self.drain()?;
        if step == self.last_published {
            return Ok(());
        }
        self.save()?;
        let mut reports = self.checkpoints.drain(&self.buffer)?;
        self.note_checkpoints(&reports);
        match reports.pop().map(|report| report.result) {
            Some(Err(error)) => Err(error).with_context(|| {
                format!(
                    "step {step} is in no checkpoint; the same command would go on from step {}",
                    self.last_published
                )
            }),
            _ => Ok(()),
        }
    }

    /// Runs the held-out tasks at the current version. Nothing without `VAL_FILES`, or after a stop.
    fn validate(&self, step: u32) -> anyhow::Result<()> {
        let Some(index) = &self.parts.tasks.val else {
            return Ok(());
        };
        let begin = Instant::now();
        let round = Arc::new(
            Validation::open(
                &self.settings.paths.run.join("validation"),
                &Round {
                    step,
                    n_rows: index.len(),
                    val_n: self.settings.validation.n,
                    sampling: self.settings.validation.sampling.params(),
                    seed: self.settings.run.seed,
                    max_attempts: self.settings.validation.max_retries + 1,
                },
            )
            .with_context(|| format!("validation of step {step}"))?,
        );
        self.report.validation_started(step, round.remaining());
        let table = Arc::new(LeaseTable::new(round.clone(), LeaseConfig::default()));
        let config = WorkersConfig::new(
            self.settings.rollout.n_concurrent as usize,
            self.parts.owner.clone(),
        );
        let workers = run_workers(
            config,
            table,
            self.parts.runner.clone(),
            self.parts.tasks.clone(),
            round.clone(),
            self.control.stopping(),
            self.report.on_worker_event(),
        );
        let waves = (index.len() as u32 * self.settings.validation.n)
            .div_ceil(self.settings.rollout.n_concurrent.max(1));
        let limit = stages::trial_deadline(self.settings) * waves.max(1);
        let end = self
            .control
            .wait(&format!("validation of step {step}"), limit, workers)?;
        if end == WorkersEnd::Stopped {
            return Ok(());
        }
        self.report.validation(step, &round.score(), begin.elapsed());
        Ok(())
    }
}

fn due(step: u32, freq: Option<u32>) -> bool {
    freq.is_some_and(|f| f > 0 && step.is_multiple_of(f))
}

fn timed<T>(timing: &mut Timing, name: &str, work: impl FnOnce() -> T) -> T {
    let begin = Instant::now();
    let value = work();
    timing.insert(name.into(), begin.elapsed().as_secs_f64());
    value
}
