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
const INTERFACE: &str = "MPI chooses the interface; steer it with the options of the MPI library.";
const WORKERS: &str = "N_CONCURRENT bounds the trials in flight.";
const IDENTITY: &str = "PROJECT_NAME, EXP_NAME and the TRAINER_ frequencies are used directly.";
const IN_PROCESS: &str =
    "The engine is part of the program; its limits are ENGINE_MAX_NUM_SEQS and ENGINE_KV_CACHE_TOKENS.";

macro_rules! table {
    ($($reason:expr => $($name:literal)+;)+) => {
        /// The table, by reason.
        pub const NO_EFFECT: &[NoEffect] = &[$($(NoEffect { name: $name, reason: $reason },)+)+];
    };
}

table! {
    PYTHON => "VENV_PATH" "PYTHONPATH" "PYTHON_BIN";
    RAY => "RAY_PORT" "RAY_DASHBOARD_PORT" "RAY_OBJECT_STORE_MEMORY";
    VERL => "VERL_ENTRY_MODULE" "VERL_CONFIG_NAME" "HYBRID_ENGINE" "TRAIN_PROMPT_BSZ" "GEN_PROMPT_BSZ"
        "TOTAL_ROLLOUT_STEPS" "VAL_BSZ" "AGENT_LOOP_CONFIG_PATH" "VERL_LOGGING_LEVEL";
    MICRO => "ACTOR_PPO_MICRO_BATCH_SIZE_PER_GPU" "USE_DYNAMIC_BSZ";
    ONE_BUDGET => "ROLLOUT_LOG_PROB_MAX_TOKEN_LEN_PER_GPU" "ROLLOUT_LOG_PROB_MICRO_BATCH_SIZE_PER_GPU"
        "ROLLOUT_LOG_PROB_USE_DYNAMIC_BSZ" "REF_LOG_PROB_MAX_TOKEN_LEN_PER_GPU"
        "REF_LOG_PROB_MICRO_BATCH_SIZE_PER_GPU" "REF_LOG_PROB_USE_DYNAMIC_BSZ";
    SAME_MODEL => "ACTOR_STRATEGY" "ACTOR_FSDP_STRATEGY" "REF_STRATEGY" "REF_FSDP_STRATEGY" "FSDP_STRATEGY";
    ALWAYS => "USE_REMOVE_PADDING" "CALCULATE_LOG_PROBS" "RETURN_RAW_CHAT"
        "ENABLE_CHUNKED_PREFILL" "SEQ_DIST_METRICS" "HARBOR_VERIFIER_ENABLED" "HARBOR_ENVIRONMENT_DELETE";
    INTERFACE => "GLOO_SOCKET_IFNAME" "TP_SOCKET_IFNAME";
    WORKERS => "AGENT_NUM_WORKERS";
    IDENTITY => "TRAINER_PROJECT_NAME" "TRAINER_EXPERIMENT_NAME" "TRAINER_TOTAL_EPOCHS" "TRAIN_LOG" "EXP_TAG"
        "HARBOR_EXP_NAME";
    IN_PROCESS => "ROLLOUT_NAME" "ROLLOUT_MODE" "VLLM_USE_V1" "VLLM_LOG" "VLLM_LOGGING_LEVEL"
        "VLLM_WORKER_MULTIPROC_METHOD" "GPU_MEM_UTIL" "ENFORCE_EAGER" "ENABLE_SLEEP_MODE" "DISABLE_LOG_STATS";
    "One token stream per process needs no such switch." => "TOKENIZERS_PARALLELISM";
    "LOG_DIR names the folder." => "HARBOR_LOG_DIR";
    "TRAINING_MODE=async always synchronises after each step." => "TRIGGER_PARAMETER_SYNC_STEP" "REQUIRE_BATCHES";
}
