//! Between the trainer, the buffer and the checkpoint folder: what a checkpoint of step N holds is what
//! exactly the first N steps have seen.

use super::stages;
use crate::{
    comm::Communicator,
    config::settings::Settings,
    model::hf::{stored_layout, Checkpoint, ModelConfig},
    train::{
        buffer::{Buffer, BufferManifest},
        checkpoint::{
            CheckpointHead, CheckpointStore, CheckpointWriter, CommittedCheckpoint, ExportLayout,
            LoadedCheckpoint, ModelFiles, PartInboxes, PartWriter, Place, RunState, Save, SavedTensors,
            WriteReport,
        },
        trainer::{TrainError, Trainer, TrainerSnapshot},
    },
};
use anyhow::{bail, Context};
use serde::{Deserialize, Serialize};
use std::{
    cell::Cell,
    path::PathBuf,
    sync::Arc,
    time::{Duration, Instant},
};

/// Longest wait for the checkpoint before this one: it is longer than what its writer waits for other ranks.
const QUEUE_DEADLINE: Duration = Duration::from_secs(3600);
/// Longest wait for the other ranks to write their parts after rank 0 has written its own.
const PARTS_DEADLINE: Duration = Duration::from_secs(1800);

/// Saves and restores a run, on rank 0.
pub struct Checkpointing {
    store: CheckpointStore,
    writer: CheckpointWriter,
    model_files: ModelFiles,
    /// In the layout of the starting policy.
    export: Arc<ExportLayout>,
    fingerprint: String,
    /// Saves that were begun.
    saves: Cell<u64>,
}

/// A save that all trainer ranks make together.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct SaveOrder {
    /// From 1, in this process of the run.
    number: u64,
    /// Step of the weights.
    step: u32,
}

/// Where a run goes on.
pub struct ResumePoint {
    /// The checkpoint.
    pub checkpoint: CommittedCheckpoint,
    /// Its content.
    pub content: LoadedCheckpoint,
    /// What the buffer had handed out.
    pub manifest: BufferManifest,
}

/// What a checkpoint that rank 0 has chosen holds.
pub fn read(settings: &Settings, step: u32, path: PathBuf) -> anyhow::Result<LoadedCheckpoint> {
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
    /// Opens the run's checkpoint folder and starts the writer. `trainers` are all ranks that save.
    pub fn open(
        settings: &Settings,
        model: &ModelConfig,
        comm: &dyn Communicator,
        trainers: &[u32],
    ) -> anyhow::Result<Self> {
        let store = CheckpointStore::open(&settings.paths.checkpoints)?;
        let others = PartInboxes::open(comm, trainers, PARTS_DEADLINE)?;
        let writer = CheckpointWriter::start(store.clone(), settings.paths.max_ckpt_to_keep, others)
            .context("cannot start the checkpoint writer")?;
        // The layout keeps the memory map of what is passed through.
        let source = Checkpoint::open(&settings.model.path)?;
        Ok(Self {
            store,
            writer,
            model_files: ModelFiles::read(&settings.model.path)?,
            export: Arc::new(ExportLayout::new(stored_layout(model, &source)?)),
            fingerprint: stages::fingerprint(settings, model),
            saves: Cell::new(0),
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

    /// Begins a checkpoint of the steps that trainer and buffer have seen, once the one before it is written.
    /// All trainer ranks save next, this one with [`Checkpointing::save`]. Nothing where the disk refuses: that
    /// is reported as a failed write.
    pub fn begin(&self, trainer: &Trainer, buffer: &Buffer) -> anyhow::Result<Option<SaveOrder>> {
        let step = trainer.version().0;
        let counted = buffer.manifest().step;
        if counted != step {
            bail!("the trainer has made {step} steps and the buffer counts {counted}");
        }
        self.writer.ready(QUEUE_DEADLINE)?;
        if !self.writer.begin(step, trainer.has_critic()) {
            return Ok(None);
        }
        let number = self.saves.get() + 1;
        self.saves.set(number);
        Ok(Some(SaveOrder { number, step }))
    }

    /// Copies rank 0's part of the state, queues the checkpoint, and returns.
    pub fn save(&self, order: SaveOrder, trainer: &Trainer, buffer: &Buffer) -> anyhow::Result<()> {
        let begin = Instant::now();
        let snapshot = trainer.save_state()?;
        tracing::debug!(order.step, secs = begin.elapsed().as_secs_f64(), "snapshot taken");
        let head = CheckpointHead {
            state: RunState {
                global_step: snapshot.version.0,
                weight_version: snapshot.version,
                trainer: snapshot.progress,
                buffer: serde_json::to_value(buffer.manifest())?,
                config_fingerprint: self.fingerprint.clone(),
            },
            model_files: self.model_files.clone(),
            export: self.export.clone(),
        };
        let save = Save {
            number: order.number,
            tensors: tensors(snapshot),
            head,
        };
        Ok(self.writer.submit(save, QUEUE_DEADLINE)?)
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

/// The parts of the checkpoints that another trainer rank writes.
pub struct PartSaver(PartWriter);

impl PartSaver {
    /// Opens the run's checkpoint folder and starts the thread that writes. `trainers` are all ranks that save.
    pub fn start(
        settings: &Settings,
        comm: &Arc<dyn Communicator>,
        trainers: &[u32],
    ) -> anyhow::Result<Self> {
        let own = comm.rank();
        let index = trainers.iter().position(|rank| *rank == own);
        let index = index.with_context(|| format!("rank {own} does not train and cannot save"))?;
        let place = Place {
            index,
            of: trainers.len(),
        };
        let store = CheckpointStore::open(&settings.paths.checkpoints)?;
        let writer = PartWriter::start(store, comm.clone(), 0, place)
            .context("cannot start the thread that writes parts of checkpoints")?;
        Ok(Self(writer))
    }

    /// Copies this rank's part of the state and returns; writing and the report to rank 0 follow behind.
    pub fn save(&self, order: SaveOrder, trainer: &Trainer) -> anyhow::Result<()> {
        let version = trainer.version();
        if version.0 != order.step {
            bail!(
                "rank 0 saves step {} and this rank has made {version} steps",
                order.step
            );
        }
        let snapshot = || Ok::<_, TrainError>(tensors(trainer.save_state()?));
        Ok(self.0.save(order.number, order.step, snapshot)?)
    }

    /// Waits until everything is written and reported.
    pub fn finish(self) -> anyhow::Result<()> {
        Ok(self.0.finish(PARTS_DEADLINE)?)
    }
}

fn tensors(snapshot: TrainerSnapshot) -> SavedTensors {
    SavedTensors {
        actor: snapshot.actor,
        optimizer: snapshot.optimizer,
        critic: snapshot.critic,
    }
}
