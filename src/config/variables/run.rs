//! Variables of the run itself: identity, axes, model, data, folders, topology, schedule.

use super::{between, integer, number, row, whole, DefaultValue::*, Kind, Kind::*, Tier::*, Variable};
use crate::config::settings::values::{
    Backend, DeviceName, ModelDtype, ModelEngine, RunKind, Scaffold, ToolCallParser, TrainingMode,
};

const IDENTITY: &str = "Identity";
const AXES: &str = "Axes";
const MODEL: &str = "Model and data";
const FOLDERS: &str = "Folders";
const TOPOLOGY: &str = "Topology";
const SCHEDULE: &str = "Schedule";
const VALIDATION: &str = "Validation";

#[rustfmt::skip]
pub(super) const VARIABLES: &[Variable] = &[
    row(IDENTITY, "PROJECT_NAME", Text, Required, "", Essential,
        "Groups experiments; part of folder names."),
    row(IDENTITY, "EXP_NAME", Text, Required, "", Essential,
        "Names this experiment. Starting the same name again continues it from its last checkpoint."),
    row(IDENTITY, "SEED", Integer { min: 0, max: i64::MAX }, Value("1"), "", Common,
        "Seeds the order of tasks and the sampling of every trial."),

    row(AXES, "TRAINING_MODE", Choice(TrainingMode::NAMES), Value("sync"), "", Essential,
        "`sync`: one pool that trains and generates in turn. `async`: separate pools, and the trainer never waits for the slowest trial."),
    row(AXES, "MODEL_ENGINE", Choice(ModelEngine::NAMES), Value("fsdp"), "", Essential,
        "Parallel plan of the trainer. `fsdp` shards dense policies; `veomni` adds expert and sequence parallelism for mixture-of-experts policies; `megatron` is tensor parallelism."),
    row(AXES, "SCAFFOLD", Choice(Scaffold::NAMES), Value("mini"), "", Essential,
        "The agent that works on a task. `mini` is the built-in shell agent, `ohsdk` the OpenHands SDK, `oh` OpenHands, `cc` Claude Code, `oc` OpenCode, `terminus2` Terminus 2, `custom` a command of yours. docs/scaffolds.md describes them."),
    row(AXES, "BACKEND", Choice(Backend::NAMES), Value("process"), "", Essential,
        "Where sandboxes run. `process` uses bubblewrap on the machine itself, `docker` a Docker daemon, `k8s` Kubernetes pods, `apptainer` Apptainer on the node."),

    row(MODEL, "MODEL_PATH", Path, Required, "", Essential,
        "Starting policy: a folder in Hugging Face layout."),
    row(MODEL, "SERVED_MODEL_NAME", Text, Value("vllm_model"), "", Advanced,
        "Model name that agents see at the proxy."),
    row(MODEL, "TOOL_CALL_PARSER", Choice(ToolCallParser::NAMES), Value("hermes"), "", Essential,
        "Markup of tool calls; it must be the one that the checkpoint's chat template writes. `auto` finds it out."),
    row(MODEL, "TRAIN_FILES", Path, Required, "", Essential,
        "Training index: a parquet table that points at task folders (`legorl-rank index build`).").only_for(&[RunKind::Train]),
    row(MODEL, "VAL_FILES", Path, Unset("the run has no validation"), "", Essential,
        "Held-out index, in the same form."),
    row(MODEL, "MAX_PROMPT", whole(1, 1 << 30), Value("30000"), "tokens", Common,
        "Tokens meant for system prompt, tools and the task's text. By itself it limits and cuts nothing: the sum MAX_PROMPT + MAX_RESP is the window of a trial, and a longer first prompt leaves less for the rest."),
    row(MODEL, "MAX_RESP", whole(1, 1 << 30), Value("170000"), "tokens", Common,
        "Everything after the first prompt: sampled turns and tool results. MAX_PROMPT + MAX_RESP is the window of a trial."),

    row(FOLDERS, "RUN_DIR", Path, Derived("`runs/<PROJECT_NAME>/<EXP_NAME>`"), "", Common,
        "State of the run: buffer of finished trials, event journal, sockets. On a file system that survives the job."),
    row(FOLDERS, "CKPTS_DIR", Path, Value("checkpoints"), "", Common,
        "Checkpoints lie in `<CKPTS_DIR>/<PROJECT_NAME>/<EXP_NAME>/global_step_N`."),
    row(FOLDERS, "MAX_CKPT_TO_KEEP", integer(0), Value("0"), "checkpoints", Common,
        "Older checkpoints beyond this number are deleted once a newer one is complete; 0 keeps all."),
    row(FOLDERS, "LOG_DIR", Path, Value("logs"), "", Common,
        "Metrics (`<EXP_NAME>.log`, `<EXP_NAME>.jsonl`) and one folder per attempt."),
    row(FOLDERS, "HARBOR_TRIALS_DIR", Path, Derived("`harbor_trials/<PROJECT_NAME>/<EXP_NAME>`"), "", Common,
        "One folder per trial, in Harbor's layout."),

    row(TOPOLOGY, "NNODES", whole(1, 65_536), Value("1"), "nodes", Essential,
        "Nodes of the run; the sum of N_NODES_TRAIN and N_NODES_ROLLOUT."),
    row(TOPOLOGY, "N_NODES_TRAIN", whole(1, 65_536), Derived("NNODES - N_NODES_ROLLOUT"), "nodes", Essential,
        "Nodes that train."),
    row(TOPOLOGY, "N_NODES_ROLLOUT", whole(0, 65_536), Value("0"), "nodes", Essential,
        "Nodes that only generate; 0 under `sync`, at least 1 under `async`."),
    row(TOPOLOGY, "NGPUS_PER_NODE", whole(1, 1024), Value("8"), "GPUs", Common,
        "GPUs of a node; on machines without GPUs, ranks of a node."),
    row(TOPOLOGY, "SP_SIZE", whole(1, 65_536), Value("1"), "ranks", Common,
        "Ranks that share one sequence; it divides the number of trainer ranks and the heads of the policy."),
    row(TOPOLOGY, "DEVICE", Choice(DeviceName::NAMES), Value("auto"), "", Common,
        "Where trainer and engine compute. `auto` takes CUDA where the driver shows a device, else the CPU; `cuda` refuses to start without one. A rank takes the device with its number on the node (`SLURM_LOCALID`), or the only one that it sees."),
    row(TOPOLOGY, "MODEL_DTYPE", Choice(ModelDtype::NAMES), Unset("bf16 on a GPU, f32 on the CPU"), "", Common,
        "Element type of matrix products in the trainer and in an engine on a GPU. With `bf16` the trainer keeps parameters, gradients and moments in f32; the engine on the CPU computes in f32. Families with a delta net (`qwen3_next`, `qwen3_5`, `qwen3_5_moe`) compute in f64 where this says `f32`: in f32 their log-probabilities would depend on how a text is cut. Their parameters, gradients and moments stay f32."),
    row(TOPOLOGY, "TORCH_NUM_THREADS", whole(0, 65_536), Value("0"), "threads", Advanced,
        "CPU threads of tensor operations per rank; 0 takes the cores that the process may use."),

    row(SCHEDULE, "TOTAL_EPOCHS", whole(1, 1_000_000), Value("1"), "passes", Common,
        "Passes over the training index."),
    row(SCHEDULE, "TOTAL_TRAINING_STEPS", Integer { min: 1, max: u32::MAX as i64 }, Unset("TOTAL_EPOCHS decides"), "steps", Common,
        "Length of the run in optimizer steps; wins over TOTAL_EPOCHS."),
    row(SCHEDULE, "TRAINER_SAVE_FREQ", CADENCE, Value("10"), "steps", Common,
        "Steps between checkpoints; -1 or 0 saves only at the end."),
    row(SCHEDULE, "TRAINER_TEST_FREQ", CADENCE, Value("10"), "steps", Common,
        "Steps between validations; -1 or 0 validates only at the end."),
    row(SCHEDULE, "TRAINER_VAL_BEFORE_TRAIN", Bool, Value("True"), "", Common,
        "Validate the starting policy."),

    row(VALIDATION, "VAL_N", whole(1, 4096), Value("1"), "trials", Common,
        "Trials of each held-out task."),
    row(VALIDATION, "VAL_TEMPERATURE", between(0.0, 100.0), Value("0.7"), "", Common,
        "Sampling temperature in validation; 0 is greedy."),
    row(VALIDATION, "VAL_DO_SAMPLE", Bool, Value("True"), "", Advanced,
        "False makes validation greedy, whatever VAL_TEMPERATURE says."),
    row(VALIDATION, "VAL_TOP_P", between(1e-6, 1.0), Value("1.0"), "", Advanced,
        "Nucleus in validation; 1.0 keeps all tokens."),
    row(VALIDATION, "VAL_TOP_K", Integer { min: -1, max: u32::MAX as i64 }, Value("-1"), "tokens", Advanced,
        "Most likely tokens in validation; -1 or 0 keeps all."),
    row(VALIDATION, "HARBOR_VAL_AGENT_MAX_TIMEOUT_SEC", number(0.1), Value("4800"), "seconds", Common,
        "Cap on the agent's time in validation."),
    row(VALIDATION, "HARBOR_VAL_MAX_RETRIES", whole(0, 1000), Value("2"), "attempts", Advanced,
        "Further attempts of a validation trial whose infrastructure failed."),
];

const CADENCE: Kind = Integer {
    min: -1,
    max: u32::MAX as i64,
};
