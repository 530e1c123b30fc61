//! Second names. The original has several names for one setting, most of them derived in its template
//! modules. Here each is the same variable as the name on the right: setting one sets the other, and
//! two different values are an error.

/// A second name and the variable that it is.
pub const ALIASES: &[(&str, &str)] = &[
    ("ACTIVATION_OFFLOAD", "ENABLE_ACTIVATION_OFFLOAD"),
    ("ACTOR_PPO_MINI_BATCH_SIZE", "TRAIN_MINI_BSZ"),
    ("ACTOR_VEOMNI_EXPERT_PARALLEL_SIZE", "EP_SIZE"),
    ("ACTOR_VEOMNI_ULYSSES_PARALLEL_SIZE", "SP_SIZE"),
    ("AGENT_NAME", "HARBOR_AGENT_NAME"),
    ("ENABLE_ROLLOUT_ROUTING_REPLAY", "ENABLE_R3"),
    ("ENGINE", "MODEL_ENGINE"),
    ("EVAL_JOBS_DIR", "HARBOR_TRIALS_DIR"),
    ("EVAL_LOG_DIR", "LOG_DIR"),
    ("EVAL_TEMPERATURE", "TEMPERATURE"),
    ("EXP_TAG", "EXP_NAME"),
    ("GPUS_PER_NODE", "NGPUS_PER_NODE"),
    ("HARBOR_AGENT_PARSER_NAME", "TOOL_CALL_PARSER"),
    ("HARBOR_AGENT_TEMPERATURE", "TEMPERATURE"),
    ("HARBOR_LOG_DIR", "LOG_DIR"),
    (
        "HARBOR_POD_ACTIVE_DEADLINE_SEC",
        "K8S_POD_ACTIVE_DEADLINE_SECONDS",
    ),
    ("HARBOR_SERVED_MODEL_NAME", "SERVED_MODEL_NAME"),
    ("HARBOR_TOOL_PARSER", "TOOL_CALL_PARSER"),
    ("HARBOR_TRIAL_HARD_TIMEOUT_SEC", "TRIAL_HARD_TIMEOUT_SEC"),
    ("IMAGE_REGISTRY", "HARBOR_OPENSWE_IMAGE_REGISTRY"),
    ("INFER_LOG_DIR", "LOG_DIR"),
    ("INLINE_BUILD", "HARBOR_K8S_INLINE_BUILD"),
    ("KUBECONFIG", "K8S_KUBECONFIG"),
    ("MAX_INPUT_TOKENS", "MAX_PROMPT"),
    ("MAX_ITERATIONS", "HARBOR_AGENT_MAX_ITERATIONS"),
    ("MAX_MODEL_LEN", "ROLLOUT_MAX_MODEL_LEN"),
    ("MAX_OUTPUT_TOKENS", "MAX_RESP"),
    ("MAX_PROMPT_LEN", "MAX_PROMPT"),
    ("MAX_RESPONSE_LEN", "MAX_RESP"),
    ("MAX_RETRIES", "HARBOR_MAX_RETRIES"),
    ("NYDUS_MIRROR", "HARBOR_NYDUS_MIRROR"),
    ("POD_NAME_PREFIX", "HARBOR_POD_NAME_PREFIX"),
    ("ROLLOUT_MAX_NUM_SEQS", "ENGINE_MAX_NUM_SEQS"),
    ("ROLLOUT_NNODES", "N_NODES_ROLLOUT"),
    ("ROLLOUT_N_GPUS_PER_NODE", "NGPUS_PER_NODE"),
    ("SAVE_FREQ", "TRAINER_SAVE_FREQ"),
    ("TEST_FREQ", "TRAINER_TEST_FREQ"),
    ("TOOL_PARSER", "TOOL_CALL_PARSER"),
    ("TRAINER_EXPERIMENT_NAME", "EXP_NAME"),
    ("TRAINER_N_GPUS_PER_NODE", "NGPUS_PER_NODE"),
    ("TRAINER_PROJECT_NAME", "PROJECT_NAME"),
    ("TRAINER_TOTAL_EPOCHS", "TOTAL_EPOCHS"),
    ("TRAIN_INDEX", "TRAIN_FILES"),
    ("TRAIN_MODE", "TRAINING_MODE"),
    ("VAL_BEFORE_TRAIN", "TRAINER_VAL_BEFORE_TRAIN"),
    ("VAL_INDEX", "VAL_FILES"),
    ("VAL_TIMEOUT", "HARBOR_VAL_AGENT_MAX_TIMEOUT_SEC"),
    ("VLLM_MAX_MODEL_LEN", "ROLLOUT_MAX_MODEL_LEN"),
];

/// The variable that `name` is, which is `name` itself for most.
pub fn canonical(name: &str) -> &str {
    ALIASES
        .iter()
        .find(|(alias, _)| *alias == name)
        .map_or(name, |(_, variable)| variable)
}
