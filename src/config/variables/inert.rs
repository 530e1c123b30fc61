//! Variables of the original that have no effect here, each with the reason. They are accepted with a
//! warning, so that a config written for the original shows what became of every line.

/// A variable without effect.
#[derive(Clone, Copy, Debug)]
pub struct NoEffect {
    /// Name.
    pub name: &'static str,
    /// Why, and what takes its place.
    pub reason: &'static str,
}

/// The entry for `name`.
pub fn no_effect(name: &str) -> Option<&'static NoEffect> {
    NO_EFFECT.iter().find(|entry| entry.name == name)
}

const PYTHON: &str = "There is no Python environment to select.";
const RAY: &str = "Processes are MPI ranks; there is no Ray.";
const VERL: &str = "It selects an entry point of verl, which has no counterpart.";
const MICRO: &str = "Micro-batches are filled up to ACTOR_PPO_MAX_TOKEN_LEN_PER_GPU tokens.";
const ONE_BUDGET: &str = "ACTOR_PPO_MAX_TOKEN_LEN_PER_GPU holds for every pass of the trainer.";
const SAME_MODEL: &str = "Actor and reference use the same plan (MODEL_ENGINE).";
const ALWAYS: &str = "It is always so.";
const NEVER: &str = "It is never so.";
const INTERFACE: &str = "MPI chooses the interface; steer it with the options of the MPI library.";
const COLLECTIVES: &str =
    "Ranks talk through MPI, and GPUs through NCCL; set their own variables in the job script.";
const WORKERS: &str = "N_CONCURRENT bounds the trials in flight.";
const IDENTITY: &str = "PROJECT_NAME and EXP_NAME name files and folders.";
const IN_PROCESS: &str =
    "The engine is part of the program; its limits are ENGINE_MAX_NUM_SEQS and ENGINE_KV_CACHE_TOKENS.";
const IN_PLACE: &str =
    "Parameters and optimizer state stay in the trainer's memory and are not moved out between passes.";
const WHOLE_MESH: &str = "State is sharded over all trainer ranks.";
const CHUNKS: &str = "Logits and entropy are always computed in chunks of tokens.";
const BY_SCAFFOLD: &str =
    "SCAFFOLD selects the agent and BACKEND the sandbox; both are parts of the program.";
const OWN_CONFIG: &str = "The scaffold writes the agent's own configuration.";
const PER_SESSION: &str = "The proxy gives every session its own address and key.";
const NO_WANDB: &str = "Metrics are written to LOG_DIR as text and JSON lines; nothing is uploaded.";
const REPLAY_KEY: &str = "ENABLE_R3 alone switches routing replay.";
const MESSAGES: &str = "LEGORL_LOG in the environment sets the level of messages.";
const CAPTURE: &str = "The proxy records the tokens that were sampled and never rebuilds them from text.";
const HELPER: &str = "It counts where another line refers to it, and none does.";
const TAIL: &str = "A trial that is late is cut off when its group reaches STALENESS.";
const PREFLIGHT: &str =
    "The program's own flags choose what is checked: --structure-only, --preflight-only, --dry-run.";

macro_rules! table {
    ($($reason:expr => $($name:literal)+;)+) => {
        /// The table, by reason.
        pub const NO_EFFECT: &[NoEffect] = &[$($(NoEffect { name: $name, reason: $reason },)+)+];
    };
}

table! {
    PYTHON => "VENV_PATH" "PYTHONPATH" "PYTHON_BIN" "EVAL_EXTRA_PYTHONPATH" "NEW_VERL_DIR" "USE_NEW_VERL"
        "HARBOR_K8S_PYTHONSAFEPATH";
    RAY => "RAY_PORT" "RAY_DASHBOARD_PORT" "RAY_OBJECT_STORE_MEMORY";
    VERL => "VERL_ENTRY_MODULE" "VERL_CONFIG_NAME" "HYBRID_ENGINE" "TRAIN_PROMPT_BSZ" "GEN_PROMPT_BSZ"
        "TOTAL_ROLLOUT_STEPS" "VAL_BSZ" "AGENT_LOOP_CONFIG_PATH" "AGENT_LOOP_CONFIG" "VERL_LOGGING_LEVEL" "PROFILE";
    MICRO => "ACTOR_PPO_MICRO_BATCH_SIZE_PER_GPU" "USE_DYNAMIC_BSZ";
    ONE_BUDGET => "ROLLOUT_LOG_PROB_MAX_TOKEN_LEN_PER_GPU" "ROLLOUT_LOG_PROB_MICRO_BATCH_SIZE_PER_GPU"
        "ROLLOUT_LOG_PROB_USE_DYNAMIC_BSZ" "REF_LOG_PROB_MAX_TOKEN_LEN_PER_GPU"
        "REF_LOG_PROB_MICRO_BATCH_SIZE_PER_GPU" "REF_LOG_PROB_USE_DYNAMIC_BSZ";
    SAME_MODEL => "ACTOR_STRATEGY" "ACTOR_FSDP_STRATEGY" "REF_STRATEGY" "REF_FSDP_STRATEGY" "FSDP_STRATEGY";
    IN_PLACE => "ACTOR_FSDP_PARAM_OFFLOAD" "ACTOR_FSDP_OPTIMIZER_OFFLOAD" "REF_FSDP_PARAM_OFFLOAD"
        "ACTOR_VEOMNI_PARAM_OFFLOAD" "ACTOR_VEOMNI_OPTIMIZER_OFFLOAD" "REF_VEOMNI_PARAM_OFFLOAD";
    WHOLE_MESH => "FSDP_SIZE" "ACTOR_VEOMNI_FSDP_SIZE" "ACTOR_VEOMNI_ENABLE_FULL_SHARD";
    CHUNKS => "ACTOR_VEOMNI_ENTROPY_FROM_LOGITS_WITH_CHUNKING" "ACTOR_VEOMNI_ENTROPY_CHECKPOINTING";
    REPLAY_KEY => "R3_FSDP_ROUTER_REPLAY_MODE" "R3_VEOMNI_ROUTER_REPLAY_MODE";
    ALWAYS => "USE_REMOVE_PADDING" "CALCULATE_LOG_PROBS" "RETURN_RAW_CHAT" "ENABLE_CHUNKED_PREFILL"
        "SEQ_DIST_METRICS" "HARBOR_VERIFIER_ENABLED" "HARBOR_ENVIRONMENT_DELETE";
    "A repository in a sandbox keeps the history that the task's Dockerfile gives it; cut it there." =>
        "HARBOR_BLOCK_GIT_HISTORY_LEAK";
    NEVER => "HARBOR_AGENT_DISABLE_TOOL_CALLS" "HARBOR_AGENT_RECORD_TERMINAL_SESSION";
    "Nothing is cut: a request that does not fit into MAX_PROMPT + MAX_RESP is refused, and the agent may shorten it." => "DATA_TRUNCATION";
    "Columns of a task index have fixed names." => "PROMPT_KEY";
    "MODEL_DTYPE says what trainer and engine compute in." => "ROLLOUT_DTYPE";
    "TRAINING_MODE and the node counts decide which nodes train." => "TRAINER_NNODES";
    "Validation shares the workers; N_CONCURRENT bounds them." => "VALIDATION_ROLLOUT_MIN_IDLE_WORKERS";
    INTERFACE => "GLOO_SOCKET_IFNAME" "TP_SOCKET_IFNAME";
    COLLECTIVES => "NCCL_DEBUG" "NCCL_TIMEOUT" "NCCL_SOCKET_IFNAME";
    WORKERS => "AGENT_NUM_WORKERS" "NUM_WORKERS";
    IDENTITY => "TRAIN_LOG" "EVAL_LOG" "INFER_LOG" "INFER_LOG_PREFIX" "HARBOR_EXP_NAME" "JOB_CFG";
    IN_PROCESS => "ROLLOUT_NAME" "ROLLOUT_MODE" "VLLM_USE_V1" "VLLM_LOG" "VLLM_LOGGING_LEVEL"
        "VLLM_WORKER_MULTIPROC_METHOD" "GPU_MEM_UTIL" "ENFORCE_EAGER" "ENABLE_SLEEP_MODE" "DISABLE_LOG_STATS"
        "VLLM_PORT" "VLLM_BIND_HOST" "VLLM_API_SERVER_COUNT" "VLLM_READY_TIMEOUT" "VLLM_NNODES" "VLLM_HEAD_HOST"
        "VLLM_ATTENTION_BACKEND" "EVAL_VLLM_EXTRA_ARGS" "EVAL_VLLM_READY_ITERS" "EVAL_ENABLE_EXPERT_PARALLEL"
        "PREFIX_CACHING_HASH_ALGO" "GEN_DP" "NODE0_IP";
    BY_SCAFFOLD => "HARBOR_AGENT_IMPORT_PATH" "HARBOR_ENVIRONMENT_IMPORT_PATH" "HARBOR_ENVIRONMENT_TYPE"
        "EVAL_AGENT_NAME" "AGENT_SCAFFOLD" "AGENT_MODEL_NAME";
    OWN_CONFIG => "HARBOR_AGENT_MODEL_INFO" "HARBOR_OPENCODE_CONFIG_CONTENT" "OPENCODE_DISABLE_STREAMING"
        "OPENCODE_TEMPERATURE" "HARBOR_CUSTOM_AGENT_OPENCODE" "HARBOR_CUSTOM_AGENT_CLAUDE"
        "HARBOR_CUSTOM_AGENT_RUNTIME_ENV_SCRIPT" "HARBOR_AGENT_ENABLE_SUMMARIZE"
        "HARBOR_AGENT_INTERLEAVED_THINKING" "HARBOR_AGENT_PROACTIVE_SUMMARIZATION_THRESHOLD"
        "HARBOR_AGENT_SUPPRESS_MAX_TURNS_WARNING" "CLAUDE_CODE_ATTRIBUTION_HEADER" "LITELLM_EXTRA_BODY"
        "MCP_SERVERS_JSON" "LOAD_SKILLS" "SKILL_PATHS" "LLM_TEMPERATURE" "HARBOR_OC_DETECT_RETRY_ATTEMPTS"
        "HARBOR_OC_DETECT_RETRY_SLEEP_SEC" "OPENCODE_CONFIG_CONTENT" "LLM_API_VERSION" "LLM_CACHING_PROMPT"
        "LLM_DISABLE_VISION" "LLM_DROP_PARAMS" "LLM_LOG_COMPLETIONS" "LLM_LOG_COMPLETIONS_FOLDER"
        "LLM_MAX_INPUT_TOKENS" "LLM_MAX_OUTPUT_TOKENS" "LLM_MODEL" "LLM_NATIVE_TOOL_CALLING" "LLM_NUM_RETRIES"
        "LLM_REASONING_EFFORT" "LLM_TOP_P";
    PER_SESSION => "HARBOR_OPENAI_BASE_URL" "HARBOR_OPENAI_API_KEY" "HARBOR_ANTHROPIC_BASE_URL"
        "HARBOR_ANTHROPIC_API_KEY" "HARBOR_ANTHROPIC_MODEL" "ANTHROPIC_API_KEY" "ANTHROPIC_BASE_URL" "LLM_API_KEY"
        "HOSTED_VLLM_API_KEY" "LLM_BASE_URL" "API_BASE";
    NO_WANDB => "WANDB_API_KEY" "WANDB_MODE" "TRAINER_LOGGER";
    MESSAGES => "HARBOR_LOGGING_LEVEL";
    CAPTURE => "HARBOR_RECOMPUTE_MISMATCH_LOGPROBS" "HARBOR_MAIN_AGENT_PREFIX_MATCH";
    TAIL => "HARBOR_TAIL_KILL_GRACE_SEC" "HARBOR_TAIL_KILL_MIN_TASKS" "HARBOR_TAIL_KILL_TARGET";
    PREFLIGHT => "PREFLIGHT_ONLY" "PF_STRUCTURE_ONLY" "PF_KIND" "DRY_RUN";
    HELPER => "MODEL_ROOT" "POD_PREFIX" "STEP_TAG";
    "Name the site file with --site FILE or with LEGORL_SITE in the environment." => "SITE_ENV_FILE";
    "REPO_ROOT is found from the run config's place." => "LEGO_RL_ROOT" "SWE_LEGO_RL_ROOT" "TEMPLATE_ROOT";
    "A task's own limit holds, up to HARBOR_AGENT_MAX_TIMEOUT_SEC." => "HARBOR_AGENT_OVERRIDE_TIMEOUT_SEC";
    "The agent is installed with its sandbox; there is no set-up of its own to wait for." =>
        "HARBOR_AGENT_SETUP_TIMEOUT_MULTIPLIER";
    "An agent that crashed without a verdict is an infrastructure failure and is retried (HARBOR_MAX_RETRIES)." =>
        "HARBOR_RETRY_ON_CRASH";
    "MAX_PROMPT + MAX_RESP ends a trial." => "HARBOR_TRIAL_OVERLONG_TOTAL_TOKENS";
    "Images are built by the daemon as it is configured." => "DOCKER_BUILDKIT";
    "One token stream per process needs no such switch." => "TOKENIZERS_PARALLELISM" "RAYON_NUM_THREADS";
    "TRAINING_MODE=async always synchronises after each step." => "TRIGGER_PARAMETER_SYNC_STEP" "REQUIRE_BATCHES";
}
