//! [`Settings`]: every value of a run, typed, with its unit, resolved once.
//!
//! Stages receive these structs, never text, command-line flags or the process environment. A field
//! is named after its variable, which `docs/configuration.md` explains; durations are [`Duration`],
//! sizes carry their unit. Paths are absolute.
//!
//! Settings hold no secrets: no variable that they are made from has a secret name. They are written to
//! logs, sent between ranks and stored with checkpoints.

mod algorithm;
mod offline;
mod remote;
mod resolve;
pub mod values;

pub use algorithm::{
    AlgorithmSettings, CriticSettings, ImportanceSettings, KlRewardSettings, RejectionSettings,
};
pub use offline::{EvalSettings, InferSettings};
pub use remote::{AgentRuntimeSettings, DockerSettings, HostMount, ImageSettings, KubernetesSettings};
pub use resolve::{check_text, resolve, Derived};

use serde::{Deserialize, Serialize};
use std::{path::PathBuf, time::Duration};
use values::*;

/// A resolved run. Rank 0 resolves it and sends it to the other ranks, so that `$(date …)` in a name
/// means the same everywhere.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Settings {
    /// Names and axes.
    pub run: RunSettings,
    /// Folders that the run writes to.
    pub paths: PathSettings,
    /// Starting policy.
    pub model: ModelSettings,
    /// Task indexes and token budgets.
    pub data: DataSettings,
    /// Nodes and ranks.
    pub topology: TopologySettings,
    /// Sizes of a step.
    pub batch: BatchSettings,
    /// Length and cadence.
    pub schedule: ScheduleSettings,
    /// Sampling in training.
    pub sampling: SamplingSettings,
    /// Validation.
    pub validation: ValidationSettings,
    /// Advantages and losses.
    pub algorithm: AlgorithmSettings,
    /// Optimizer.
    pub optim: OptimSettings,
    /// Trials: concurrency and staleness.
    pub rollout: RolloutSettings,
    /// Agent limits.
    pub agent: AgentSettings,
    /// Sandbox limits.
    pub sandbox: SandboxSettings,
    /// Proxy.
    pub proxy: ProxySettings,
    /// Session scheduler.
    pub scheduler: SchedulerSettings,
    /// Native engine.
    pub engine: EngineSettings,
    /// Parallel plan of trainer and engine.
    pub plan: PlanSettings,
    /// Agent files of remote sandboxes.
    pub agent_runtime: AgentRuntimeSettings,
    /// `BACKEND=k8s`.
    pub kubernetes: KubernetesSettings,
    /// `BACKEND=docker`.
    pub docker: DockerSettings,
    /// Task images of remote sandboxes.
    pub images: ImageSettings,
    /// `legorl-rank eval`; `None` for other kinds of run.
    pub eval: Option<EvalSettings>,
    /// `legorl-rank infer`; `None` for other kinds of run.
    pub infer: Option<InferSettings>,
    /// Values that are valid and that this version cannot launch, from the table of variables.
    pub unavailable: Vec<Unavailable>,
}

/// Parallel plan of trainer and engine.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PlanSettings {
    /// `EP_SIZE`: ranks that share a layer's experts.
    pub ep_size: u32,
    /// `GEN_TP`: ranks of an engine replica.
    pub gen_tp: u32,
    /// `ENABLE_R3`; `None` goes by the checkpoint.
    pub enable_r3: Option<bool>,
    /// `FUSED_KERNELS`.
    pub fused_kernels: bool,
    /// `ENABLE_ACTIVATION_OFFLOAD`.
    pub activation_offload: bool,
    /// `ROLLOUT_IS`; `None` is without importance weights.
    pub rollout_is: Option<RolloutIs>,
    /// `HARBOR_AGENT_NAME`; `None` leaves it to the scaffold.
    pub agent_name: Option<String>,
}

/// A value that is valid and that this version cannot launch.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Unavailable {
    /// Variable.
    pub name: String,
    /// Its value.
    pub value: String,
    /// What can be launched, to complete the sentence `use …`.
    pub instead: String,
}

/// Names and axes of a run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RunSettings {
    /// The command: training, evaluation or sampling run.
    pub kind: RunKind,
    /// `PROJECT_NAME`.
    pub project_name: String,
    /// `EXP_NAME`.
    pub exp_name: String,
    /// `TRAINING_MODE`.
    pub training_mode: TrainingMode,
    /// `MODEL_ENGINE`.
    pub model_engine: ModelEngine,
    /// `SCAFFOLD`.
    pub scaffold: Scaffold,
    /// `BACKEND`.
    pub backend: Backend,
    /// `SEED`.
    pub seed: u64,
    /// The run config, absolute.
    pub config_path: PathBuf,
    /// `REPO_ROOT`: relative paths of the configuration count from here.
    pub repo_root: PathBuf,
}

/// Folders that the run writes to.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PathSettings {
    /// `CKPTS_DIR/<project>/<exp>`: holds `global_step_N/`.
    pub checkpoints: PathBuf,
    /// `MAX_CKPT_TO_KEEP`; `None` keeps all.
    pub max_ckpt_to_keep: Option<usize>,
    /// `LOG_DIR`: `<exp>.log`, `<exp>.jsonl` and one folder per attempt.
    pub logs: PathBuf,
    /// `RUN_DIR`: buffer, journal, sockets.
    pub run: PathBuf,
    /// `HARBOR_TRIALS_DIR`: one folder per trial.
    pub trials: PathBuf,
}

/// The starting policy.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ModelSettings {
    /// `MODEL_PATH`: a folder in Hugging Face layout.
    pub path: PathBuf,
    /// `SERVED_MODEL_NAME`.
    pub served_model_name: String,
    /// `TOOL_CALL_PARSER`.
    pub tool_call_parser: ToolCallParser,
    /// `DEVICE`: where trainer and engine compute.
    pub device: DeviceName,
    /// `MODEL_DTYPE`; `None` is bf16 on a GPU and f32 on the CPU.
    pub dtype: Option<ModelDtype>,
}

/// Task indexes and token budgets.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct DataSettings {
    /// `TRAIN_FILES`: parquet index; empty in evaluations and sampling runs.
    pub train_files: PathBuf,
    /// `VAL_FILES`: parquet index; `None` runs without validation.
    pub val_files: Option<PathBuf>,
    /// `MAX_PROMPT`: tokens before the first sampled one.
    pub max_prompt_tokens: u32,
    /// `MAX_RESP`: tokens after it, tool results included.
    pub max_response_tokens: u32,
}

/// Nodes and ranks.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TopologySettings {
    /// `NNODES`.
    pub nnodes: u32,
    /// `N_NODES_TRAIN`.
    pub n_nodes_train: u32,
    /// `N_NODES_ROLLOUT`; 0 under `sync`.
    pub n_nodes_rollout: u32,
    /// `NGPUS_PER_NODE`: GPUs, or ranks on a machine without GPUs, per node.
    pub ngpus_per_node: u32,
    /// `SP_SIZE`: ranks that share a sequence.
    pub sp_size: u32,
}

/// Sizes of a step.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct BatchSettings {
    /// `TRAIN_BSZ`: prompts (groups) of a step.
    pub train_bsz: u32,
    /// `TRAIN_MINI_BSZ`: prompts of an optimizer update.
    pub train_mini_bsz: u32,
    /// `N_RESP`: trials of a prompt.
    pub n_resp: u32,
    /// `PPO_EPOCHS`: passes over a batch.
    pub ppo_epochs: u32,
    /// `ENABLE_GRADIENT_CHECKPOINTING`: recompute blocks in the backward pass instead of keeping them.
    pub gradient_checkpointing: bool,
    /// `ACTOR_PPO_MAX_TOKEN_LEN_PER_GPU`: tokens of a micro-batch.
    pub max_token_len_per_gpu: u32,
}

/// Length and cadence.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ScheduleSettings {
    /// `TOTAL_EPOCHS`: passes over the training index.
    pub total_epochs: u32,
    /// `TOTAL_TRAINING_STEPS`: steps; wins over the epochs.
    pub total_training_steps: Option<u32>,
    /// `TRAINER_SAVE_FREQ`: steps between checkpoints; `None` saves only at the end.
    pub save_freq: Option<u32>,
    /// `TRAINER_TEST_FREQ`: steps between validations; `None` validates only at the end.
    pub test_freq: Option<u32>,
    /// `TRAINER_VAL_BEFORE_TRAIN`.
    pub val_before_train: bool,
}

/// Sampling of training trials.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SamplingSettings {
    /// `TEMPERATURE`.
    pub temperature: f32,
    /// `TOP_P`.
    pub top_p: f32,
    /// `TOP_K`; 0 keeps all (the configs write -1).
    pub top_k: u32,
}

/// Validation.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ValidationSettings {
    /// `VAL_N`: trials of a held-out task.
    pub n: u32,
    /// `VAL_TEMPERATURE`, `VAL_TOP_P`, `VAL_TOP_K`; temperature 0 where `VAL_DO_SAMPLE` is false.
    pub sampling: SamplingSettings,
    /// `HARBOR_VAL_AGENT_MAX_TIMEOUT_SEC`: cap on the agent's time.
    pub agent_max_timeout: Duration,
    /// `HARBOR_VAL_MAX_RETRIES`: attempts after the first.
    pub max_retries: u32,
}

/// Optimizer.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct OptimSettings {
    /// `ACTOR_LR`.
    pub lr: f64,
    /// `LR_SCHEDULER`.
    pub scheduler: LrScheduler,
    /// `LR_WARMUP_STEPS`.
    pub warmup_steps: u32,
    /// `LR_MIN_RATIO`: lowest rate of a decaying schedule as a share of the peak.
    pub min_ratio: f64,
    /// `WEIGHT_DECAY`.
    pub weight_decay: f64,
    /// `ADAM_BETA1`.
    pub beta1: f64,
    /// `ADAM_BETA2`.
    pub beta2: f64,
    /// `GRAD_CLIP`: largest global norm.
    pub grad_clip: f64,
    /// `TORCH_NUM_THREADS`; `None` lets the program choose.
    pub torch_num_threads: Option<u32>,
}

/// Trials.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RolloutSettings {
    /// `N_CONCURRENT`: trials in flight.
    pub n_concurrent: u32,
    /// `STALENESS`: optimizer steps by which a token may lag behind; 0 under `sync`.
    pub staleness: f64,
    /// `PARTIAL_ROLLOUT`: new weights interrupt running generations instead of waiting for them.
    pub partial_rollout: bool,
    /// `HARBOR_MAX_RETRIES`: attempts after the first.
    pub max_retries: u32,
}

/// Agent limits.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct AgentSettings {
    /// `HARBOR_AGENT_MAX_ITERATIONS`: answered model calls.
    pub max_iterations: u32,
    /// `HARBOR_AGENT_MAX_TIMEOUT_SEC`: cap on the task's own time limit.
    pub max_timeout: Duration,
    /// `HARBOR_AGENT_TIMEOUT_MULTIPLIER`.
    pub timeout_multiplier: f64,
    /// `HARBOR_VERIFIER_TIMEOUT_MULTIPLIER`.
    pub verifier_timeout_multiplier: f64,
    /// `HARBOR_MAX_CONSECUTIVE_NO_TOOL`; 0 = no limit.
    pub max_consecutive_no_tool: u32,
    /// `LEGORL_RUNTIMES`: folder of agents' runtimes; `None` is the user's cache.
    pub runtimes: Option<PathBuf>,
    /// `SCAFFOLD_VERSION`: version of the agent's runtime; `None` is the tested one.
    pub version: Option<String>,
    /// `HARBOR_AGENT_DISALLOWED_TOOLS`: tools that the agent does not get, by its own names.
    pub disallowed_tools: Vec<String>,
    /// `SCAFFOLD_COMMAND`: shell command of `SCAFFOLD=custom`.
    pub command: Option<String>,
    /// `SCAFFOLD_RUNTIME`: files of `SCAFFOLD=custom`.
    pub custom_runtime: Option<PathBuf>,
}

/// Sandbox limits.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SandboxSettings {
    /// `SANDBOX_ROOTFS`: root tree; `None` uses the host's system folders.
    pub rootfs: Option<PathBuf>,
    /// `SANDBOX_PIDS_LIMIT`.
    pub pids_limit: u32,
    /// `HARBOR_ENVIRONMENT_OVERRIDE_CPUS`; `None` uses the task's.
    pub override_cpus: Option<f64>,
    /// `HARBOR_ENVIRONMENT_OVERRIDE_MEMORY_MB`, MiB; `None` uses the task's.
    pub override_memory_mb: Option<u64>,
}

/// Proxy.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ProxySettings {
    /// `PROXY_HOST`.
    pub host: String,
    /// `PROXY_PORT`; 0 takes any free port.
    pub port: u16,
    /// `MAX_REQUEST_BODY_MB`, as bytes.
    pub max_request_body_bytes: usize,
    /// `PROXY_TRAIN_BRANCHES`: kinds of branches that are trained on.
    pub train_branches: Vec<crate::base::BranchKind>,
    /// `PROXY_MAX_SESSION_TOKENS`: sampled tokens of a session; `None` for no cap.
    pub max_session_tokens: Option<u64>,
}

/// Session scheduler.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SchedulerSettings {
    /// `HARBOR_SESSION_LEVEL_SCHEDULER`.
    pub enabled: bool,
    /// `HARBOR_SESSION_SCHEDULER_HIGH_WATERMARK`: share of the cache from which turns may wait.
    pub high_watermark: f64,
    /// `HARBOR_SESSION_SCHEDULER_HIT_THRESHOLD`: share of a prompt that must be resident.
    pub hit_threshold: f64,
    /// `HARBOR_SESSION_SCHEDULER_WAIT_POLL_SEC`.
    pub wait_poll: Duration,
    /// `HARBOR_SESSION_SCHEDULER_IDLE_GRACE_SEC`.
    pub idle_grace: Duration,
}

/// Native engine.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct EngineSettings {
    /// `ROLLOUT_MAX_MODEL_LEN`: context of a sequence, tokens.
    pub max_model_len: u32,
    /// `ENGINE_KV_CACHE_TOKENS`.
    pub kv_cache_tokens: u64,
    /// `ENGINE_MAX_NUM_SEQS`: sequences in the running batch.
    pub max_num_seqs: u32,
    /// `ENGINE_MAX_TOKENS_PER_TURN`: sampled tokens of a turn.
    pub max_tokens_per_turn: u32,
}

impl Settings {
    /// Ranks that the run needs: 1 for the embedded default.
    pub fn world_size(&self) -> u32 {
        self.topology.nnodes * self.topology.ngpus_per_node
    }

    /// Ranks of the trainer.
    pub fn train_ranks(&self) -> u32 {
        match self.run.training_mode {
            TrainingMode::Sync => self.world_size(),
            TrainingMode::Async => self.topology.n_nodes_train * self.topology.ngpus_per_node,
        }
    }

    /// Tokens of the longest sequence, `MAX_PROMPT + MAX_RESP`.
    pub fn window_tokens(&self) -> u64 {
        u64::from(self.data.max_prompt_tokens) + u64::from(self.data.max_response_tokens)
    }

    /// Steps of the run over an index of `rows` rows: `TOTAL_TRAINING_STEPS`, or whole batches of
    /// `TOTAL_EPOCHS` passes.
    pub fn total_steps(&self, rows: u64) -> u64 {
        match self.schedule.total_training_steps {
            Some(steps) => u64::from(steps),
            None => rows * u64::from(self.schedule.total_epochs) / u64::from(self.batch.train_bsz),
        }
    }

    /// Attempts of a training trial.
    pub fn max_attempts(&self) -> u32 {
        self.rollout.max_retries + 1
    }
}

impl SamplingSettings {
    /// Parameters of a request, without its seed.
    pub fn params(&self) -> crate::base::SamplingParams {
        crate::base::SamplingParams {
            temperature: self.temperature,
            top_p: self.top_p,
            top_k: self.top_k,
            seed: 0,
        }
    }
}
