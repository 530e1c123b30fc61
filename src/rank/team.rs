//! The trainer ranks: how the head leads them, and what the others do.
//!
//! ```text
//! rank 0       order ─┬─▶ its own part of the work ─┬─▶ next order …
//! other ranks         └─▶ the same work            ─┘      collectives keep them together
//! ```
//!
//! Rank 0 sends an order (a step with its batch, weights for the engines, a checkpoint, the end) and then
//! does the same itself; every order is one call of the trainer that all ranks make. Between two orders
//! it says every [`ALIVE_INTERVAL`] that it is there, and a rank that hears nothing for [`SILENCE_MAX`]
//! ends with an error.

use super::{
    checkpointing::{self, PartSaver, SaveOrder},
    placement::{placement, Placement},
    stages, wiring,
};
use crate::{
    comm::{CommError, Communicator, Inbox, InboxError, Tag},
    config::settings::Settings,
    model::{hf::ModelConfig, net::Device},
    train::{
        batch::TrainBatch,
        trainer::{Mesh, MeshConfig, Trainer},
    },
};
use anyhow::{anyhow, bail, Context};
use bytes::Bytes;
use serde::{Deserialize, Serialize};
use std::{
    path::PathBuf,
    sync::{
        mpsc::{channel, RecvTimeoutError, Sender},
        Arc,
    },
    thread::JoinHandle,
    time::{Duration, Instant},
};

/// Longest wait for another rank inside of a step: the slowest one may read a checkpoint meanwhile.
const STEP_DEADLINE: Duration = Duration::from_secs(1800);
/// How often the head says that it is there.
const ALIVE_INTERVAL: Duration = Duration::from_secs(10);
/// Silence after which the head is lost.
const SILENCE_MAX: Duration = Duration::from_secs(300);
/// A batch travels in pieces of this size.
const PIECE_BYTES: usize = 64 << 20;

/// What all trainer ranks do next.
#[derive(Debug, Serialize, Deserialize)]
enum Order {
    /// Make the trainer.
    Start {
        total_steps: u32,
        /// Checkpoint to go on from.
        checkpoint: Option<(u32, PathBuf)>,
    },
    /// A step, on the batch in so many messages that follow.
    Step { pieces: usize },
    /// Gather the weights.
    Weights,
    /// Save their parts of a checkpoint, whose folder is there.
    Save(SaveOrder),
    /// The head is there.
    Alive,
    /// The run is over.
    End,
}

/// The mesh of the trainer ranks; none when there is one.
pub fn mesh(
    settings: &Settings,
    place: Placement,
    comm: &Arc<dyn Communicator>,
    ranks: &[u32],
) -> anyhow::Result<Option<Arc<Mesh>>> {
    if ranks.len() < 2 {
        return Ok(None);
    }
    let config = MeshConfig {
        ranks: ranks.to_vec(),
        sequence: settings.topology.sp_size,
        experts: settings.plan.ep_size,
        device: match place.device {
            Device::Cuda(number) => Some(number),
            _ => None,
        },
        timeout: STEP_DEADLINE,
    };
    Ok(Some(Arc::new(Mesh::new(comm, &config)?)))
}

/// The other trainer ranks, as the head leads them. Without any, nothing is sent.
pub struct Team {
    comm: Arc<dyn Communicator>,
    ranks: Vec<u32>,
    alive: Option<(Sender<()>, JoinHandle<()>)>,
}

impl Team {
    /// Leads the trainers of the other ranks from here on.
    pub fn gather(comm: &Arc<dyn Communicator>, trainers: &[u32]) -> anyhow::Result<Self> {
        let ranks: Vec<u32> = trainers.iter().copied().filter(|r| *r != comm.rank()).collect();
        let alive = match ranks.is_empty() {
            true => None,
            false => Some(keep_saying(comm.clone(), ranks.clone())?),
        };
        Ok(Self {
            comm: comm.clone(),
            ranks,
            alive,
        })
    }

    /// The others make their trainers.
    pub fn start(&self, total_steps: u32, resume: Option<&checkpointing::ResumePoint>) -> anyhow::Result<()> {
        Ok(self.order(&Order::Start {
            total_steps,
            checkpoint: resume.map(|r| (r.checkpoint.step, r.checkpoint.path.clone())),
        })?)
    }

    /// True when nobody else trains.
    pub fn is_alone(&self) -> bool {
        self.ranks.is_empty()
    }

    /// The others make the step of this batch; the caller does the same next. So with all of them.
    pub fn step(&self, batch: &TrainBatch) -> anyhow::Result<()> {
        if self.ranks.is_empty() {
            return Ok(());
        }
        let bytes = Bytes::from(batch.to_bytes().map_err(|problem| anyhow!(problem))?);
        let pieces: Vec<Bytes> = (0..bytes.len())
            .step_by(PIECE_BYTES)
            .map(|at| bytes.slice(at..(at + PIECE_BYTES).min(bytes.len())))
            .collect();
        // A word of the other thread may come between an order and its pieces; the reader knows it by its
        // first byte.
        self.order(&Order::Step { pieces: pieces.len() })?;
        for piece in pieces {
            let mut message = vec![PIECE];
            message.extend_from_slice(&piece);
            self.send(message.into())?;
        }
        Ok(())
    }

    /// Weights are gathered next.
    pub fn weights(&self) -> anyhow::Result<()> {
        Ok(self.order(&Order::Weights)?)
    }

    /// Every rank saves its part next.
    pub fn save(&self, save: SaveOrder) -> anyhow::Result<()> {
        Ok(self.order(&Order::Save(save))?)
    }

    /// The run is over. Nothing is said afterwards: the others may have left the world.
    pub fn end(&mut self) -> anyhow::Result<()> {
        self.fall_silent();
        Ok(self.order(&Order::End)?)
    }

    fn fall_silent(&mut self) {
        if let Some((stop, thread)) = self.alive.take() {
            drop(stop);
            let _ = thread.join();
        }
    }

    fn order(&self, order: &Order) -> Result<(), CommError> {
        self.send(message(order))
    }

    fn send(&self, message: Bytes) -> Result<(), CommError> {
        self.ranks
            .iter()
            .try_for_each(|rank| self.comm.send(*rank, Tag::TRAINER, message.clone()))
    }
}

impl Drop for Team {
    fn drop(&mut self) {
        self.fall_silent();
    }
}

/// First byte of a message.
const ORDER: u8 = 0;
const PIECE: u8 = 1;

fn message(order: &Order) -> Bytes {
    let mut message = vec![ORDER];
    let json = serde_json::to_vec(order);
    message.extend(json.unwrap_or_else(|e| unreachable!("an order is numbers and a path: {e}")));
    message.into()
}

fn keep_saying(comm: Arc<dyn Communicator>, ranks: Vec<u32>) -> anyhow::Result<(Sender<()>, JoinHandle<()>)> {
    let (stop, stopped) = channel();
    let thread = std::thread::Builder::new()
        .name("trainer-team".to_owned())
        .spawn(move || {
            while stopped.recv_timeout(ALIVE_INTERVAL) == Err(RecvTimeoutError::Timeout) {
                // A world that has ended is noticed by whoever needs it.
                for rank in &ranks {
                    let _ = comm.send(*rank, Tag::TRAINER, message(&Order::Alive));
                }
            }
        })
        .context("no thread to lead the trainer ranks")?;
    Ok((stop, thread))
}

/// Follows the head until the run is over. `look` is asked between two messages whether this rank can go on.
pub fn follow(
    settings: &Settings,
    comm: &Arc<dyn Communicator>,
    trainers: &[u32],
    look: impl Fn() -> anyhow::Result<()>,
) -> anyhow::Result<()> {
    let mut orders = Orders {
        inbox: comm.inbox(0, Tag::TRAINER)?,
        look: &look,
    };
    let Order::Start {
        total_steps,
        checkpoint,
    } = orders.order()?
    else {
        bail!("the first order of rank 0 is not to start: do all ranks run the same build?");
    };
    let model = ModelConfig::from_dir(&settings.model.path)?;
    let place = placement(settings)?;
    let replay = stages::replay(settings, &model)?;
    let mesh = mesh(settings, place, comm, trainers)?;
    let resume = checkpoint
        .map(|(step, path)| checkpointing::read(settings, step, path))
        .transpose()?;
    let mut trainer: Trainer =
        wiring::make_trainer(settings, place, total_steps, replay, resume.as_ref(), mesh)?;
    drop(resume);
    let parts = PartSaver::start(settings, comm, trainers)?;
    loop {
        match orders.order()? {
            Order::Step { pieces } => {
                let batch = TrainBatch::from_bytes(&orders.pieces(pieces)?).map_err(|p| anyhow!(p))?;
                trainer
                    .step(&batch)
                    .with_context(|| format!("step {}", batch.step))?;
            }
            Order::Weights => trainer.assist_export()?,
            Order::Save(save) => parts.save(save, &trainer)?,
            Order::End => return parts.finish(),
            Order::Start { .. } | Order::Alive => bail!("rank 0 started the trainer twice"),
        }
    }
}

struct Orders<'a> {
    inbox: Inbox,
    look: &'a dyn Fn() -> anyhow::Result<()>,
}

impl Orders<'_> {
    /// The next message that is not just a sign of life.
    fn next(&self) -> anyhow::Result<Bytes> {
        let mut last_word = Instant::now();
        let alive = message(&Order::Alive);
        loop {
            match self.inbox.recv(Duration::from_secs(1)) {
                Ok(message) if message == alive => last_word = Instant::now(),
                Ok(message) => return Ok(message),
                Err(InboxError::Timeout) if last_word.elapsed() < SILENCE_MAX => (self.look)()?,
                Err(InboxError::Timeout) => bail!(
                    "rank 0 has said nothing for {} s: look at its log",
                    SILENCE_MAX.as_secs()
                ),
                Err(InboxError::Closed) => bail!("the world ended before rank 0 said that the run is over"),
            }
        }
    }

    fn order(&mut self) -> anyhow::Result<Order> {
        let message = self.next()?;
        match message.split_first() {
            Some((&ORDER, json)) => {
                serde_json::from_slice(json).context("an order of rank 0 is not readable here")
            }
            _ => bail!("rank 0 sent part of a batch where an order was expected"),
        }
    }

    fn pieces(&mut self, count: usize) -> anyhow::Result<Vec<u8>> {
        let mut bytes = Vec::new();
        for _ in 0..count {
            let message = self.next()?;
            match message.split_first() {
                Some((&PIECE, piece)) => bytes.extend_from_slice(piece),
                _ => bail!("rank 0 sent an order where part of a batch was expected"),
            }
        }
        Ok(bytes)
    }
}
