//! Between the trainer, the buffer and the checkpoint folder: what a checkpoint of step N holds is what
//! exactly the first N steps have seen.

use super::stages;
use crate::{
    config::settings::Settings,
    model::hf::{stored_layout, Checkpoint, ModelConfig},
    train::{
        buffer::{Buffer, BufferManifest},
        checkpoint::{
            CheckpointContent, CheckpointStore, CheckpointWriter, CommittedCheckpoint, ModelFiles, RunState,
            WriteReport,
        },
        trainer::Trainer,
    },
};
use anyhow::{bail, Context};
use std::{path::PathBuf, time::Duration};

/// Longest wait for the checkpoint before this one.
const QUEUE_DEADLINE: Duration = Duration::from_secs(1800);

/// Saves and restores a run.
pub struct Checkpointing {
    store: CheckpointStore,
    writer: CheckpointWriter,
    model_files: ModelFiles,
    /// The starting policy: its layout is that of the exports.
    source: Checkpoint,
    model: ModelConfig,
    fingerprint: String,
}

/// Where a run goes on.
pub struct ResumePoint {
    /// The checkpoint.
    pub checkpoint: CommittedCheckpoint,
    /// Its content.
    pub content: CheckpointContent,
    /// What the buffer had handed out.
    pub manifest: BufferManifest,
}

/// What a checkpoint that rank 0 has chosen holds.
pub fn read(settings: &Settings, step: u32, path: PathBuf) -> anyhow::Result<CheckpointContent> {
    let checkpoint = CommittedCheckpoint {
        step,
        path,
        size_bytes: 0,
    };
    let store = CheckpointStore::open(&settings.paths.checkpoints)?;
    store
        .load(&checkpoint)
        .with_context(|| format!("checkpoint {}", checkpoint.path.display()))
}

impl Checkpointing {
    /// Opens the run's checkpoint folder and starts the writer.
    pub fn open(settings: &Settings, model: &ModelConfig) -> anyhow::Result<Self> {
        let store = CheckpointStore::open(&settings.paths.checkpoints)?;
        let writer = CheckpointWriter::start(
            CheckpointStore::open(&settings.paths.checkpoints)?,
            settings.paths.max_ckpt_to_keep,
        )
        .context("cannot start the checkpoint writer")?;
        Ok(Self {
            store,
            writer,
            model_files: ModelFiles::read(&settings.model.path)?,
            source: Checkpoint::open(&settings.model.path)?,
            model: model.clone(),
            fingerprint: stages::fingerprint(settings, model),
        })
    }

    /// The newest published checkpoint, if there is one. Damaged and unfinished ones are named as warnings.
    pub fn latest(&self) -> anyhow::Result<Option<ResumePoint>> {
        let latest = self.store.latest_committed()?;
        let Some(checkpoint) = latest.checkpoint else {
            let published = self.store.committed_steps()?;
            if published.is_empty() {
                return Ok(None);
            }
            // Step 1 again would throw away what the run has learned, without a word.
            bail!(
                "every checkpoint in {} is damaged ({}); restore one from a copy, or start anew with another \
                 EXP_NAME",
                self.store.root().display(),
                latest
                    .skipped
                    .iter()
                    .map(|s| format!("{}: {}", s.path.display(), s.problem))
                    .collect::<Vec<_>>()
                    .join("; ")
            );
        };
        let content = self.store.load(&checkpoint)?;
        content
            .state
            .check_fingerprint(&self.fingerprint, &checkpoint.path)?;
        let manifest = serde_json::from_value(content.state.buffer.clone())
            .with_context(|| format!("{}: the buffer's part of state.json", checkpoint.path.display()))?;
        Ok(Some(ResumePoint {
            checkpoint,
            content,
            manifest,
        }))
    }

    /// Queues a checkpoint of the steps that trainer and buffer have seen, and returns.
    pub fn save(&self, trainer: &Trainer, buffer: &Buffer) -> anyhow::Result<()> {
        let snapshot = trainer.save_state()?;
        let manifest = buffer.manifest();
        if manifest.step != snapshot.version.0 {
            bail!(
                "the trainer has made {} steps and the buffer counts {}",
                snapshot.version,
                manifest.step
            );
        }
        let content = CheckpointContent {
            export: stored_layout(&self.model, &self.source, &snapshot.actor)?,
            actor: snapshot.actor,
            optimizer: snapshot.optimizer,
            critic: snapshot.critic,
            state: RunState {
                global_step: snapshot.version.0,
                weight_version: snapshot.version,
                trainer: snapshot.progress,
                buffer: serde_json::to_value(&manifest)?,
                config_fingerprint: self.fingerprint.clone(),
            },
            model_files: self.model_files.clone(),
        };
        Ok(self.writer.submit(content, QUEUE_DEADLINE)?)
    }

    /// Takes the reports of ended writes and frees what no checkpoint needs any more.
    pub fn collect(&self, buffer: &Buffer) -> anyhow::Result<Vec<WriteReport>> {
        let reports = self.writer.reports();
        self.release(&reports, buffer)?;
        Ok(reports)
    }

    /// Waits until everything is written.
    pub fn drain(&self, buffer: &Buffer) -> anyhow::Result<Vec<WriteReport>> {
        let reports = self.writer.drain(QUEUE_DEADLINE)?;
        self.release(&reports, buffer)?;
        Ok(reports)
    }

    fn release(&self, reports: &[WriteReport], buffer: &Buffer) -> anyhow::Result<()> {
        let Some(oldest) = reports
            .iter()
            .rev()
            .find_map(|r| r.result.is_ok().then(|| r.kept.first()).flatten())
        else {
            return Ok(());
        };
        let folder = CommittedCheckpoint {
            step: *oldest,
            path: self.store.folder(*oldest),
            size_bytes: 0,
        };
        let state = self.store.load_state(&folder)?;
        let manifest: BufferManifest = serde_json::from_value(state.buffer)
            .with_context(|| format!("{}: the buffer's part of state.json", folder.path.display()))?;
        let freed = buffer.retain(&manifest)?;
        if freed > 0 {
            tracing::debug!(freed, oldest, "deleted shards that no checkpoint needs");
        }
        Ok(())
    }
}
