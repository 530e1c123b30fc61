//! The native engine: continuous batching on libtorch with a paged KV cache.
//!
//! ```text
//!  callers ──Command──▶ run (one thread) ──plan──▶ scheduler ── pages (who holds what, prefix tree)
//!     ▲                  │        ▲
//!     │                  ▼        │ draws   ┌ forward ── kernels, cache, sampler
//!     └──EngineEvent── on_step   workers ───┴ blocks ── model::net, step_memory, state_memory, draws
//! ```
//!
//! | Module | Holds | Needs libtorch |
//! |---|---|---|
//! | `scheduler`, `sequence`, `pages`, `states` | which tokens a step computes; pages, prefixes, states | no |
//! | `sampler` | drawing from log-probabilities | no |
//! | `forward`, `attention`, `mlp`, `weights` | the host's own network: attention families, f32 | yes |
//! | `cache`, `kernels` | its memory; its row work between the products | no |
//! | `blocks`, `step_memory`, `state_memory`, `draws` | the network of the trainer's blocks: any device | yes |
//! | `memory` | bytes that an engine reserves | yes |
//! | `workers`, `compute`, `run` | threads; which of the two networks | – |
//!
//! What callers can rely on:
//! - The tokens of a request depend on its seed, prompt and weights, not on the rest of the batch (up to
//!   the rounding of matrix products, which depends on the number of rows).
//! - The log-probability of a token is that of the weights whose version it carries, over the whole text
//!   before it: after new weights arrive, running sequences are computed again from their first token
//!   before the next one is sampled. Nothing that older weights computed is reused.
//! - A prompt is computed in chunks of `max_num_batched_tokens`, between which all others decode.
//! - The experts that a request asks for are those that computed each token first; those of a reused
//!   prefix come from its pages.
//! - Pages are reused by exact token prefix: between the turns and branches of a session and between the
//!   samples of a group. Models with a delta net reuse them as far as a snapshot of its state goes.
//!
//! Families without a delta net are computed on the host in f32 with kernels of its own. Everything else, on a GPU
//! and on the host, is computed by the blocks of [`crate::model::net`] in what [`ComputeType::kind_for`] says.

mod attention;
mod blocks;
mod cache;
mod compute;
mod draws;
mod forward;
mod kernels;
mod memory;
mod mlp;
mod pages;
mod run;
mod sampler;
mod scheduler;
mod sequence;
mod state_memory;
mod states;
mod step_memory;
#[cfg(test)]
mod tests;
mod weights;
mod workers;

use crate::{
    base::{
        Engine, EngineError, EngineEvent, EngineStatus, GenerateRequest, PolicyVersion, RequestId, SessionId,
        WeightAck, WeightError, WeightTarget, WeightTensor, WeightUpdate,
    },
    model::{
        hf::{Checkpoint, MixerKind, ModelConfig, ModelError},
        net::{ComputeType, Device, Policy},
    },
};
use async_trait::async_trait;
use blocks::{BlockNetwork, DeviceError};
use cache::{KvCache, RoutingMemory};
use compute::{is_on_host, Compute, LoadedWeights};
use forward::{Forward, Shape};
pub use memory::EngineMemory;
use pages::{PagePool, PAGE_TOKENS};
use run::{Command, NewWeights, RequestBounds, Runner, Shared};
use scheduler::{Limits, Scheduler};
use states::SLOTS_A_SEAT;
use std::{
    path::Path,
    sync::{
        mpsc::{channel, Sender},
        Arc,
    },
    thread::JoinHandle,
};
use tokio::sync::{mpsc::UnboundedSender, oneshot};
use weights::EngineWeights;
use workers::Workers;

/// Size of an engine, in vLLM's words.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NativeEngineConfig {
    /// Sequences in the batch at most.
    pub max_num_seqs: usize,
    /// Tokens of a step at most: decoding sequences first, the rest for prompts.
    pub max_num_batched_tokens: usize,
    /// Prompt and response of a sequence at most.
    pub max_model_len: usize,
    /// Capacity of the KV cache, rounded down to whole pages of 16; at least `max_model_len`.
    pub kv_cache_tokens: usize,
    /// Threads that compute.
    pub num_threads: usize,
    /// Version of the weights that the engine starts with.
    pub version: PolicyVersion,
    /// Where it computes.
    pub device: Device,
    /// Element type of products, keys and values; the host computes families without a delta net in f32.
    pub compute: ComputeType,
}

impl Default for NativeEngineConfig {
    fn default() -> Self {
        Self {
            max_num_seqs: 64,
            max_num_batched_tokens: 512,
            max_model_len: 4096,
            kv_cache_tokens: 131_072,
            num_threads: 2,
            version: PolicyVersion(0),
            device: Device::Cpu,
            compute: ComputeType::F32,
        }
    }
}

/// Why an engine did not start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// A size that cannot work.
    #[error("native engine: {0}")]
    Config(String),
    /// The model folder.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// The weights do not belong to the configuration.
    #[error(transparent)]
    Weights(#[from] WeightError),
    /// Cache or states do not fit into memory.
    #[error(
        "native engine: a KV cache of {cache_tokens} tokens for ENGINE_MAX_NUM_SEQS={max_num_seqs} sequences of \
         {max_model_len} tokens takes {bytes} bytes ({}), which cannot be had: {why}; lower ENGINE_MAX_NUM_SEQS, \
         MAX_PROMPT + MAX_RESP (or ROLLOUT_MAX_MODEL_LEN), or set ENGINE_KV_CACHE_TOKENS to fewer tokens",
        gibibytes(*bytes)
    )]
    Memory {
        /// Bytes that were asked for.
        bytes: u64,
        /// `ENGINE_KV_CACHE_TOKENS`.
        cache_tokens: usize,
        /// `ROLLOUT_MAX_MODEL_LEN`.
        max_model_len: usize,
        /// `ENGINE_MAX_NUM_SEQS`.
        max_num_seqs: usize,
        /// What the system said.
        why: String,
    },
    /// No thread could be started.
    #[error("native engine: cannot start a thread: {0}")]
    Thread(#[source] std::io::Error),
}

fn gibibytes(bytes: u64) -> String {
    format!("{:.1} GiB", bytes as f64 / (1u64 << 30) as f64)
}

/// What is made on the starting thread and used on the engine's.
enum Place {
    Host(Forward),
    Blocks(Box<BlockNetwork>),
}

/// An engine replica in this process. Dropping the last handle ends its threads; requests that are still
/// running end with [`EngineError::ReplicaLost`].
pub struct NativeEngine {
    shared: Arc<Shared>,
    commands: Sender<Command>,
    model: ModelConfig,
    device: Device,
    thread: Option<JoinHandle<()>>,
}

impl NativeEngine {
    /// Starts an engine on the weights of a model folder.
    pub fn start(config: NativeEngineConfig, policy_dir: &Path) -> Result<Arc<Self>, StartError> {
        let model = ModelConfig::from_dir(policy_dir)?;
        // Before the weights are read.
        check_config(&config)?;
        config.check_memory(&model)?;
        let checkpoint = Checkpoint::open(policy_dir)?;
        checkpoint.check_unambiguous(&model)?;
        let stored = checkpoint.read_all(&model)?;
        let tensors: Vec<WeightTensor> = stored.iter().map(|t| t.to_weight()).collect();
        Self::from_weights(config, model, &tensors)
    }

    /// Starts an engine on a copy of a policy's weights.
    pub fn from_policy(config: NativeEngineConfig, policy: &Policy) -> Result<Arc<Self>, StartError> {
        Self::from_weights(config, policy.config.clone(), &policy.export())
    }

    /// Starts an engine on these weights.
    pub fn from_weights(
        config: NativeEngineConfig,
        model: ModelConfig,
        tensors: &[WeightTensor],
    ) -> Result<Arc<Self>, StartError> {
        check_config(&config)?;
        config.check_memory(&model)?;
        let no_memory = |none: memory::NoMemory| config.too_large(none.0, "the system gives no more memory");
        let num_pages = config.kv_cache_tokens / PAGE_TOKENS;
        let has_states = model.layers.iter().any(|l| l.mixer == MixerKind::LinearAttention);
        let num_slots = if has_states {
            config.max_num_seqs * SLOTS_A_SEAT
        } else {
            0
        };
        let mut pool = PagePool::new(num_pages);
        if has_states {
            pool = pool.with_states(num_slots);
        }
        let shared = Arc::new(Shared::new(pool, config.version));
        let place = if is_on_host(&model, config.device) {
            let (layers, heads) = (model.num_hidden_layers, model.num_key_value_heads);
            let cache = KvCache::new(layers, num_pages, heads, model.head_dim).map_err(no_memory)?;
            let top_k = model.experts.map_or(0, |e| e.top_k);
            let routing = RoutingMemory::new(model.num_sparse_layers(), top_k, num_pages);
            Place::Host(Forward {
                shape: Arc::new(Shape::new(model.clone(), config.max_model_len)),
                cache: Arc::new(cache),
                routing: Arc::new(routing.map_err(no_memory)?),
                weights: EngineWeights::new(&model, tensors)?,
            })
        } else {
            let place = (config.device, config.compute);
            let network = BlockNetwork::new(&model, tensors, place, (num_pages, num_slots));
            Place::Blocks(Box::new(network.map_err(|error| match error {
                DeviceError::Weights(error) => StartError::Weights(error),
                DeviceError::Memory(why) => {
                    let needed = config.memory(&model);
                    config.too_large(needed.cache().saturating_add(needed.states), &why)
                }
            })?))
        };
        let (commands, inbox) = channel();
        let (started, ready) = channel();
        let bounds = RequestBounds {
            max_model_len: config.max_model_len,
            vocab_size: model.vocab_size,
        };
        let on_gpu = config.device != Device::Cpu;
        let run = {
            let shared = shared.clone();
            move || {
                let compute = match place {
                    // One thread hands a GPU its work.
                    Place::Blocks(network) => {
                        let threads = if on_gpu { 1 } else { config.num_threads };
                        Workers::start(*network, threads).map(|w| Compute::Blocks(Box::new(w)))
                    }
                    Place::Host(forward) => Workers::start(forward, config.num_threads).map(Compute::Host),
                };
                let compute = match compute {
                    Ok(compute) => compute,
                    Err(error) => return drop(started.send(Err(error))),
                };
                if started.send(Ok(())).is_err() {
                    return;
                }
                let runner = Runner {
                    shared: &shared,
                    commands: &inbox,
                    scheduler: Scheduler::new(Limits {
                        max_num_seqs: config.max_num_seqs,
                        max_num_batched_tokens: config.max_num_batched_tokens,
                        max_model_len: config.max_model_len,
                    }),
                    compute,
                    bounds,
                    version: config.version,
                };
                runner.run();
            }
        };
        let thread = std::thread::Builder::new()
            .name("engine".into())
            .spawn(run)
            .map_err(StartError::Thread)?;
        match ready.recv() {
            Ok(started) => started.map_err(StartError::Thread)?,
            Err(_) => return Err(StartError::Config("its thread ended while it started".into())),
        }
        Ok(Arc::new(Self {
            shared,
            commands,
            model,
            device: config.device,
            thread: Some(thread),
        }))
    }

    /// Configuration of the model that it serves.
    pub fn model_config(&self) -> &ModelConfig {
        &self.model
    }
}

fn check_config(config: &NativeEngineConfig) -> Result<(), StartError> {
    let bad = |text: String| Err(StartError::Config(text));
    for (name, value) in [
        ("max_num_seqs", config.max_num_seqs),
        ("max_num_batched_tokens", config.max_num_batched_tokens),
        ("num_threads", config.num_threads),
    ] {
        if value == 0 {
            return bad(format!("{name} is 0"));
        }
    }
    if config.max_model_len < 2 {
        return bad(format!(
            "max_model_len is {}; it must hold a prompt and a token",
            config.max_model_len
        ));
    }
    let capacity = config.kv_cache_tokens / PAGE_TOKENS * PAGE_TOKENS;
    if capacity < config.max_model_len {
        return bad(format!(
            "the KV cache holds {capacity} tokens and one sequence may have {}: raise kv_cache_tokens or lower max_model_len",
            config.max_model_len
        ));
    }
    Ok(())
}

impl Engine for NativeEngine {
    fn submit(&self, request: GenerateRequest, events: UnboundedSender<EngineEvent>) {
        if let Err(lost) = self.commands.send(Command::Submit(request, events)) {
            if let Command::Submit(_, events) = lost.0 {
                let error = EngineError::ReplicaLost("the engine's thread has ended".into());
                // A caller that went away needs no answer.
                let _ = events.send(EngineEvent::Failed(error));
            }
        }
    }

    fn abort(&self, id: RequestId) {
        // A thread that has ended runs nothing that could be aborted.
        let _ = self.commands.send(Command::Abort(id));
    }

    fn status(&self) -> EngineStatus {
        self.shared.status()
    }

    fn resident_prefix(&self, _session: &SessionId, prompt: &[u32]) -> usize {
        self.shared.pool().find_reusable(prompt).len() * PAGE_TOKENS
    }

    fn end_session(&self, session: &SessionId) {
        self.shared.pool().end_session(session);
    }
}

#[async_trait]
impl WeightTarget for NativeEngine {
    /// The bytes are verified and laid out on a thread of their own while the engine goes on decoding;
    /// the swap itself is a change of pointers between two steps.
    async fn update_weights(&self, update: Arc<WeightUpdate>) -> Result<WeightAck, WeightError> {
        let (done, answer) = oneshot::channel();
        let (commands, model, device) = (self.commands.clone(), self.model.clone(), self.device);
        let prepare = move || {
            let new = match verified_weights(&model, device, &update) {
                Ok(weights) => NewWeights {
                    version: update.version,
                    checksum: update.checksum,
                    weights,
                    done,
                },
                // The caller may have stopped waiting.
                Err(error) => return drop(done.send(Err(error))),
            };
            if let Err(lost) = commands.send(Command::Update(Box::new(new))) {
                if let Command::Update(new) = lost.0 {
                    let _ = new.done.send(Err(replica_lost()));
                }
            }
        };
        std::thread::Builder::new()
            .name("engine-update".into())
            .spawn(prepare)
            .map_err(|e| WeightError::ReplicaLost(format!("cannot start a thread for new weights: {e}")))?;
        answer.await.unwrap_or_else(|_| Err(replica_lost()))
    }
}

fn replica_lost() -> WeightError {
    WeightError::ReplicaLost("the engine's thread ended before it took the new weights".into())
}

fn verified_weights(
    model: &ModelConfig,
    device: Device,
    update: &WeightUpdate,
) -> Result<LoadedWeights, WeightError> {
    let got = WeightUpdate::checksum_of(&update.tensors);
    if got != update.checksum {
        return Err(WeightError::Checksum {
            version: update.version,
            want: update.checksum,
            got,
        });
    }
    if is_on_host(model, device) {
        return EngineWeights::new(model, &update.tensors).map(LoadedWeights::Host);
    }
    Ok(LoadedWeights::Blocks(update.tensors.clone()))
}

impl Drop for NativeEngine {
    fn drop(&mut self) {
        // The thread finishes its step and ends; if it has ended already, there is nobody to tell.
        let _ = self.commands.send(Command::Shutdown);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
