//! Variables of rollouts: sampling, trials, agent, sandbox, proxy, scheduler, engine.

use super::{between, integer, number, row, whole, DefaultValue::*, Kind::*, Tier::*, Variable};

const SAMPLING: &str = "Sampling";
const TRIALS: &str = "Trials";
const AGENT: &str = "Agent";
const SANDBOX: &str = "Sandbox";
const PROXY: &str = "Proxy";
const SCHEDULER: &str = "Session scheduler";
const ENGINE: &str = "Engine";

#[rustfmt::skip]
pub(super) const VARIABLES: &[Variable] = &[
    row(SAMPLING, "TEMPERATURE", between(1e-3, 100.0), Value("1.0"), "", Common,
        "Sampling temperature in training; the trainer divides the logits by the same value."),
    row(SAMPLING, "TOP_P", between(1e-6, 1.0), Value("1.0"), "", Common,
        "Nucleus in training; 1.0 keeps all tokens."),
    row(SAMPLING, "TOP_K", Integer { min: -1, max: u32::MAX as i64 }, Value("-1"), "tokens", Common,
        "Most likely tokens in training; -1 or 0 keeps all."),

    row(TRIALS, "N_CONCURRENT", whole(1, 1_000_000), Value("128"), "trials", Common,
        "Trials in flight at the same time."),
    row(TRIALS, "STALENESS", between(0.0, 100.0), Derived("1.0 under `async`, 0 under `sync`"), "steps", Common,
        "Optimizer steps by which a trained token may lag behind the policy."),
    row(TRIALS, "PARTIAL_ROLLOUT", Bool, Derived("True under `async`, False under `sync`"), "", Advanced,
        "New weights interrupt running generations, which go on with the tokens they have."),
    row(TRIALS, "HARBOR_MAX_RETRIES", whole(0, 1000), Value("2"), "attempts", Common,
        "Further attempts of a trial whose infrastructure failed."),

    row(AGENT, "HARBOR_AGENT_MAX_ITERATIONS", integer(1), Value("200"), "turns", Common,
        "Model calls that the proxy answers in a trial."),
    row(AGENT, "HARBOR_AGENT_MAX_TIMEOUT_SEC", number(0.1), Value("2400"), "seconds", Common,
        "Cap on the agent's time; the task's own limit holds where it is shorter."),
    row(AGENT, "HARBOR_AGENT_TIMEOUT_MULTIPLIER", between(1e-3, 1e3), Value("1.0"), "", Advanced,
        "Multiplies the task's own agent limit."),
    row(AGENT, "HARBOR_VERIFIER_TIMEOUT_MULTIPLIER", between(1e-3, 1e3), Value("1.0"), "", Advanced,
        "Multiplies the task's own verifier limit."),
    row(AGENT, "HARBOR_MAX_CONSECUTIVE_NO_TOOL", integer(0), Value("3"), "turns", Advanced,
        "Turns in a row without a tool call before the session is closed; 0 never closes it."),
    row(AGENT, "LEGORL_RUNTIMES", Path, Unset("`~/.cache/legorl/runtimes`, or `runtimes` below LEGORL_CACHE or XDG_CACHE_HOME/legorl"), "", Common,
        "Folder of the agents' runtimes, which `setup/runtimes.sh` makes and sandboxes carry read-only."),
    row(AGENT, "SCAFFOLD_VERSION", Text, Unset("the version that was tested"), "", Common,
        "Version of the agent's runtime; `setup/runtimes.sh NAME@VERSION` installs others."),
    row(AGENT, "HARBOR_AGENT_DISALLOWED_TOOLS", Text, Unset("all of the agent's tools"), "", Common,
        "Tools that `cc` or `oc` does not get, by the agent's own names, separated by commas."),
    row(AGENT, "SCAFFOLD_COMMAND", Text, Unset("needed by SCAFFOLD=custom alone"), "", Common,
        "Shell command that starts the agent of `SCAFFOLD=custom` in the sandbox. Write it in single quotes: its `$NAME` are the sandbox's."),
    row(AGENT, "SCAFFOLD_RUNTIME", Path, Unset("no files"), "", Common,
        "Folder with the files of `SCAFFOLD=custom`; sandboxes carry it read-only at /opt/legorl/runtimes/custom."),

    row(SANDBOX, "SANDBOX_ROOTFS", Path, Unset("the host's system folders, read-only"), "", Common,
        "Root tree of process sandboxes."),
    row(SANDBOX, "SANDBOX_PIDS_LIMIT", integer(8), Value("256"), "processes", Advanced,
        "Processes and threads of a sandbox."),
    row(SANDBOX, "HARBOR_ENVIRONMENT_OVERRIDE_CPUS", between(0.01, 4096.0), Unset("the task's own number"), "cores", Common,
        "CPU cores of a sandbox."),
    row(SANDBOX, "HARBOR_ENVIRONMENT_OVERRIDE_MEMORY_MB", Integer { min: 16, max: 1 << 30 }, Unset("the task's own number"), "MiB", Common,
        "Memory of a sandbox."),

    row(PROXY, "PROXY_HOST", Text, Derived("127.0.0.1 under BACKEND=process, else 0.0.0.0"), "", Advanced,
        "Address that the proxy listens on."),
    row(PROXY, "PROXY_PORT", Integer { min: 0, max: 65535 }, Value("0"), "", Advanced,
        "Port of the proxy; 0 takes any free one."),
    row(PROXY, "MAX_REQUEST_BODY_MB", Integer { min: 1, max: 65536 }, Value("256"), "MiB", Advanced,
        "Largest request body; a larger one is refused with status 413."),
    row(PROXY, "PROXY_TRAIN_BRANCHES", Text, Value("main,sub_agent,compaction,retry,rewritten"), "", Advanced,
        "Kinds of branches of a trial that are trained on; the others are `summary` (requests for a summary, from which a later conversation begins) and `side` (requests without tools, such as titles)."),
    row(PROXY, "PROXY_MAX_SESSION_TOKENS", integer(1), Unset("no cap"), "tokens", Advanced,
        "Sampled tokens of a trial over all its branches; then its requests are answered with a notice."),

    row(SCHEDULER, "HARBOR_SESSION_LEVEL_SCHEDULER", Bool, Value("False"), "", Common,
        "Hold turns back while the engine's cache is nearly full, so that running sessions keep their prefixes."),
    row(SCHEDULER, "HARBOR_SESSION_SCHEDULER_HIGH_WATERMARK", between(0.0, 1.0), Value("0.85"), "", Advanced,
        "Share of the cache in use from which turns may be held back."),
    row(SCHEDULER, "HARBOR_SESSION_SCHEDULER_HIT_THRESHOLD", between(0.0, 1.0), Value("0.80"), "", Advanced,
        "Share of a prompt that must be in the cache to pass above the watermark."),
    row(SCHEDULER, "HARBOR_SESSION_SCHEDULER_WAIT_POLL_SEC", between(1e-3, 3600.0), Value("5"), "seconds", Advanced,
        "Longest time between two decisions about a waiting turn."),
    row(SCHEDULER, "HARBOR_SESSION_SCHEDULER_IDLE_GRACE_SEC", between(0.0, 86400.0), Value("60"), "seconds", Advanced,
        "Time after which a session without requests loses its claim to the cache."),

    row(ENGINE, "ROLLOUT_MAX_MODEL_LEN", integer(2), Derived("MAX_PROMPT + MAX_RESP"), "tokens", Common,
        "Context of a sequence in the engine."),
    row(ENGINE, "ENGINE_KV_CACHE_TOKENS", Integer { min: 2, max: 1 << 40 }, Derived("ENGINE_MAX_NUM_SEQS x ROLLOUT_MAX_MODEL_LEN"), "tokens", Common,
        "Capacity of the engine's cache."),
    row(ENGINE, "ENGINE_MAX_NUM_SEQS", whole(1, 1_000_000), Value("64"), "sequences", Common,
        "Sequences in the engine's running batch."),
    row(ENGINE, "ENGINE_MAX_TOKENS_PER_TURN", integer(1), Derived("MAX_RESP"), "tokens", Common,
        "Sampled tokens of one turn."),
];
