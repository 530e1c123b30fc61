//! From text to [`Settings`]. Every problem is collected, so that one run of the program shows all.

use super::values::*;
use super::*;
use crate::base::BranchKind;
use crate::config::{
    error::{ConfigError, ValueProblem},
    layers::Layered,
    variables::{self, DefaultValue, Kind, Variable},
};
use std::path::Path;

/// Checks a text against the form of its variable; the error completes the sentence `NAME …`.
pub fn check_text(variable: &Variable, text: &str) -> Result<(), String> {
    let shown = if variables::is_secret(variable.name) {
        "<redacted>"
    } else {
        text
    };
    match variable.kind {
        Kind::Text | Kind::Path if text.contains('\0') => Err("must not contain a NUL character".into()),
        Kind::Text | Kind::Path => Ok(()),
        Kind::Integer { min, max } => match text.parse::<i64>() {
            Ok(n) if (min..=max).contains(&n) => Ok(()),
            _ => Err(format!(
                "must be a whole number {}, and is `{shown}`{}",
                range(&min, &max, i64::from(u32::MAX)),
                digits_hint(text)
            )),
        },
        Kind::Number { min, max } => match text.parse::<f64>() {
            Ok(n) if n.is_finite() && (min..=max).contains(&n) => Ok(()),
            _ => Err(format!(
                "must be a number {}, and is `{shown}`",
                range(&min, &max, 1e12)
            )),
        },
        Kind::Bool => match parse_bool(text) {
            Some(_) => Ok(()),
            None => Err(format!("must be True or False, and is `{shown}`")),
        },
        Kind::Choice(names) if names.contains(&text) => Ok(()),
        Kind::Choice(names) => {
            if let Some(hint) = misplaced(variable.name, text) {
                return Err(format!("must be one of {}; {hint}", names.join(", ")));
            }
            let near = names
                .iter()
                .map(|name| (strsim::damerau_levenshtein(name, &text.to_lowercase()), name))
                .min()
                .filter(|(distance, _)| *distance <= 2)
                .map(|(_, name)| format!("; did you mean `{name}`?"))
                .unwrap_or_default();
            Err(format!(
                "must be one of {}, and is `{shown}`{near}",
                names.join(", ")
            ))
        }
    }
}

/// For numbers that are written for readers: `30,000`, `30_000`, `30k`, `1e3`.
fn digits_hint(text: &str) -> &'static str {
    let number = text.starts_with(|c: char| c.is_ascii_digit())
        && text
            .chars()
            .all(|c| c.is_ascii_digit() || ",_'kKmMgGeE".contains(c));
    if number && text.contains(|c: char| !c.is_ascii_digit()) {
        "; write digits alone"
    } else {
        ""
    }
}

/// What people type for something that has another name or another place.
fn misplaced(variable: &str, text: &str) -> Option<&'static str> {
    match (variable, text.to_ascii_lowercase().as_str()) {
        ("ADV_ESTIMATOR", "ppo") => {
            Some("PPO's own estimator is `gae`, and its loss is POLICY_LOSS_MODE=vanilla")
        }
        ("ADV_ESTIMATOR", "gspo") => Some("`gspo` is a loss: POLICY_LOSS_MODE=gspo"),
        ("POLICY_LOSS_MODE", "ppo" | "grpo") => Some("the clipped loss of both is `vanilla`"),
        ("BACKEND", "kubernetes") => Some("Kubernetes is `k8s`"),
        ("SCAFFOLD", "claude-code" | "claude") => Some("Claude Code is `cc`"),
        ("SCAFFOLD", "opencode") => Some("OpenCode is `oc`"),
        ("SCAFFOLD", "terminus-2" | "terminus") => Some("Terminus 2 is `terminus2`"),
        ("SCAFFOLD", "openhands") => Some("OpenHands is `ohsdk` (its SDK) or `oh` (the full program)"),
        _ => None,
    }
}

fn range<T: PartialOrd + std::fmt::Display>(min: &T, max: &T, no_bound: T) -> String {
    if *max >= no_bound {
        format!("of at least {min}")
    } else {
        format!("from {min} to {max}")
    }
}

fn parse_bool(text: &str) -> Option<bool> {
    match text.to_ascii_lowercase().as_str() {
        "1" | "true" | "yes" | "on" => Some(true),
        "0" | "false" | "no" | "off" => Some(false),
        _ => None,
    }
}

/// True for texts that mean "no value": the original writes `null` for it.
fn is_unset(text: &str) -> bool {
    text.is_empty() || text.eq_ignore_ascii_case("null") || text.eq_ignore_ascii_case("none")
}

/// Reads variables as the table says and collects problems.
pub(super) struct Resolver<'a> {
    pub(super) kind: RunKind,
    layered: &'a Layered,
    problems: Vec<ValueProblem>,
    derived: Derived,
    unavailable: Vec<Unavailable>,
    #[cfg(test)]
    read: std::collections::BTreeSet<&'static str>,
}

impl Resolver<'_> {
    /// The checked text, or the default's; `None` when there is none or when it is wrong (recorded).
    pub(super) fn text(&mut self, name: &'static str) -> Option<String> {
        #[cfg(test)]
        self.read.insert(name);
        let Some(variable) = variables::find(name) else {
            self.problem(name, "is not in the table of variables".into());
            return None;
        };
        if !variable.is_for(self.kind) {
            // A text that is nobody's business: the default keeps the arithmetic going.
            return match variable.default {
                DefaultValue::Value(text) => Some(text.to_owned()),
                _ => None,
            };
        }
        let set = self.layered.get(name).map(|entry| entry.text.clone());
        match set.filter(|text| !is_unset(text)) {
            Some(text) => match check_text(variable, &text) {
                Ok(()) => {
                    self.note_unavailable(variable, &text);
                    Some(text)
                }
                Err(problem) => {
                    self.problem(name, problem);
                    None
                }
            },
            None => match variable.default {
                DefaultValue::Value(text) => Some(text.to_owned()),
                DefaultValue::Required => {
                    self.problem(name, format!("has no value and is required: {}", variable.doc));
                    None
                }
                DefaultValue::Derived(_) | DefaultValue::Unset(_) => None,
            },
        }
    }

    /// Valid and not in this version.
    fn note_unavailable(&mut self, variable: &Variable, text: &str) {
        let Some(available) = variable.available else {
            return;
        };
        let same = |known: &&str| match variable.kind {
            Kind::Bool => parse_bool(known) == parse_bool(text),
            _ => known.eq_ignore_ascii_case(text),
        };
        if !available.iter().any(same) {
            self.unavailable.push(Unavailable {
                name: variable.name.to_owned(),
                value: text.to_owned(),
                instead: if available.is_empty() {
                    "no value".to_owned()
                } else {
                    available.join(" or ")
                },
            });
        }
    }

    pub(super) fn problem(&mut self, name: &str, problem: String) {
        self.problems.push(ValueProblem {
            name: name.to_owned(),
            origin: self.layered.get(name).map(|entry| entry.source.to_string()),
            problem,
        });
    }

    pub(super) fn string(&mut self, name: &'static str) -> String {
        self.text(name).unwrap_or_default()
    }

    pub(super) fn int(&mut self, name: &'static str) -> Option<i64> {
        self.text(name).and_then(|text| text.parse().ok())
    }

    pub(super) fn u32(&mut self, name: &'static str) -> u32 {
        self.int(name).and_then(|n| u32::try_from(n).ok()).unwrap_or(1)
    }

    pub(super) fn opt_u32(&mut self, name: &'static str) -> Option<u32> {
        self.int(name).and_then(|n| u32::try_from(n).ok())
    }

    /// A count for which 0 and -1 mean "not set".
    pub(super) fn positive(&mut self, name: &'static str) -> Option<u32> {
        self.opt_u32(name).filter(|n| *n > 0)
    }

    pub(super) fn opt_f64(&mut self, name: &'static str) -> Option<f64> {
        self.text(name).and_then(|text| text.parse().ok())
    }

    pub(super) fn f64(&mut self, name: &'static str) -> f64 {
        self.opt_f64(name).unwrap_or_default()
    }

    pub(super) fn seconds(&mut self, name: &'static str) -> Duration {
        Duration::from_secs_f64(self.f64(name))
    }

    pub(super) fn opt_bool(&mut self, name: &'static str) -> Option<bool> {
        self.text(name).and_then(|text| parse_bool(&text))
    }

    pub(super) fn bool(&mut self, name: &'static str) -> bool {
        self.opt_bool(name).unwrap_or_default()
    }

    /// A wrong name was recorded as a problem; `fallback` then never leaves [`resolve`].
    pub(super) fn choice<T>(
        &mut self,
        name: &'static str,
        from_name: fn(&str) -> Option<T>,
        fallback: T,
    ) -> T {
        self.text(name)
            .and_then(|text| from_name(&text))
            .unwrap_or(fallback)
    }

    pub(super) fn path(&mut self, name: &'static str) -> Option<PathBuf> {
        self.text(name)
            .map(|text| absolute(&self.layered.repo_root, &text))
    }

    /// Writes down what a computed default came to, for `config show`.
    pub(super) fn derive<T: ToString>(&mut self, name: &'static str, set: Option<T>, computed: T) -> T {
        set.unwrap_or_else(|| {
            self.derived.push((name, computed.to_string()));
            computed
        })
    }

    pub(super) fn derive_path(
        &mut self,
        name: &'static str,
        folder: &str,
        project: &str,
        exp: &str,
    ) -> PathBuf {
        let set = self.path(name);
        let computed = self.layered.repo_root.join(folder).join(project).join(exp);
        let text = computed.display().to_string();
        PathBuf::from(self.derive(name, set.map(|p| p.display().to_string()), text))
    }
}

/// Relative paths count from the repository root.
fn absolute(root: &Path, text: &str) -> PathBuf {
    let path = Path::new(text);
    let joined = if path.is_absolute() {
        path.to_path_buf()
    } else {
        root.join(path)
    };
    joined.components().collect()
}

/// What computed defaults came to: variable and text.
pub type Derived = Vec<(&'static str, String)>;

/// Settings, and the computed defaults that went into them.
pub fn resolve(layered: &Layered, kind: RunKind) -> Result<(Settings, Derived), ConfigError> {
    let mut r = Resolver {
        kind,
        layered,
        problems: Vec::new(),
        derived: Vec::new(),
        unavailable: Vec::new(),
        #[cfg(test)]
        read: Default::default(),
    };
    let mut settings = read(&mut r);
    settings.unavailable = std::mem::take(&mut r.unavailable);
    #[cfg(test)]
    tests::assert_reads_the_whole_table(&r.read);
    if r.problems.is_empty() {
        Ok((settings, r.derived))
    } else {
        Err(ConfigError::Values(r.problems))
    }
}

fn read(r: &mut Resolver<'_>) -> Settings {
    let run = RunSettings {
        kind: r.kind,
        project_name: folder_name(r, "PROJECT_NAME"),
        exp_name: folder_name(r, "EXP_NAME"),
        training_mode: r.choice("TRAINING_MODE", TrainingMode::from_name, TrainingMode::Sync),
        model_engine: r.choice("MODEL_ENGINE", ModelEngine::from_name, ModelEngine::Fsdp),
        scaffold: r.choice("SCAFFOLD", Scaffold::from_name, Scaffold::Mini),
        backend: r.choice("BACKEND", Backend::from_name, Backend::Process),
        seed: r
            .int("SEED")
            .and_then(|n| u64::try_from(n).ok())
            .unwrap_or_default(),
        config_path: r.layered.config_path.clone(),
        repo_root: r.layered.repo_root.clone(),
    };
    let is_async = run.training_mode == TrainingMode::Async;
    let (project, exp) = (run.project_name.clone(), run.exp_name.clone());
    let paths = PathSettings {
        checkpoints: r.path("CKPTS_DIR").unwrap_or_default().join(&project).join(&exp),
        max_ckpt_to_keep: r.positive("MAX_CKPT_TO_KEEP").map(|n| n as usize),
        logs: r.path("LOG_DIR").unwrap_or_default(),
        run: r.derive_path("RUN_DIR", "runs", &project, &exp),
        trials: r.derive_path("HARBOR_TRIALS_DIR", "harbor_trials", &project, &exp),
    };
    let data = DataSettings {
        train_files: r.path("TRAIN_FILES").unwrap_or_default(),
        val_files: r.path("VAL_FILES"),
        max_prompt_tokens: r.u32("MAX_PROMPT"),
        max_response_tokens: r.u32("MAX_RESP"),
    };
    let window = u64::from(data.max_prompt_tokens) + u64::from(data.max_response_tokens);
    let window = u32::try_from(window).unwrap_or(u32::MAX);
    let topology = topology(r);
    let batch = batch(r, window, topology.sp_size);
    let engine = engine(r, window, data.max_response_tokens);
    let staleness = r.opt_f64("STALENESS");
    let partial = r.opt_bool("PARTIAL_ROLLOUT");
    Settings {
        model: ModelSettings {
            path: r.path("MODEL_PATH").unwrap_or_default(),
            served_model_name: r.string("SERVED_MODEL_NAME"),
            tool_call_parser: r.choice(
                "TOOL_CALL_PARSER",
                ToolCallParser::from_name,
                ToolCallParser::Hermes,
            ),
            device: r.choice("DEVICE", DeviceName::from_name, DeviceName::Auto),
            dtype: r
                .text("MODEL_DTYPE")
                .and_then(|text| ModelDtype::from_name(&text)),
        },
        schedule: ScheduleSettings {
            total_epochs: r.u32("TOTAL_EPOCHS"),
            total_training_steps: r.opt_u32("TOTAL_TRAINING_STEPS"),
            save_freq: r.positive("TRAINER_SAVE_FREQ"),
            test_freq: r.positive("TRAINER_TEST_FREQ"),
            val_before_train: r.bool("TRAINER_VAL_BEFORE_TRAIN"),
        },
        sampling: sampling(r, ["TEMPERATURE", "TOP_P", "TOP_K"]),
        validation: ValidationSettings {
            n: r.u32("VAL_N"),
            sampling: validation_sampling(r),
            agent_max_timeout: r.seconds("HARBOR_VAL_AGENT_MAX_TIMEOUT_SEC"),
            max_retries: r.opt_u32("HARBOR_VAL_MAX_RETRIES").unwrap_or_default(),
        },
        algorithm: super::algorithm::read(r),
        optim: optim(r),
        rollout: RolloutSettings {
            n_concurrent: r.u32("N_CONCURRENT"),
            staleness: r.derive("STALENESS", staleness, if is_async { 1.0 } else { 0.0 }),
            partial_rollout: r.derive("PARTIAL_ROLLOUT", partial, is_async),
            max_retries: r.opt_u32("HARBOR_MAX_RETRIES").unwrap_or_default(),
        },
        agent: AgentSettings {
            max_iterations: r.u32("HARBOR_AGENT_MAX_ITERATIONS"),
            max_timeout: r.seconds("HARBOR_AGENT_MAX_TIMEOUT_SEC"),
            timeout_multiplier: r.f64("HARBOR_AGENT_TIMEOUT_MULTIPLIER"),
            verifier_timeout_multiplier: r.f64("HARBOR_VERIFIER_TIMEOUT_MULTIPLIER"),
            max_consecutive_no_tool: r.opt_u32("HARBOR_MAX_CONSECUTIVE_NO_TOOL").unwrap_or_default(),
            runtimes: r.path("LEGORL_RUNTIMES"),
            version: r.text("SCAFFOLD_VERSION"),
            disallowed_tools: words(r, "HARBOR_AGENT_DISALLOWED_TOOLS"),
            command: custom_command(r, run.scaffold),
            custom_runtime: r.path("SCAFFOLD_RUNTIME"),
        },
        sandbox: SandboxSettings {
            rootfs: r.path("SANDBOX_ROOTFS"),
            pids_limit: r.u32("SANDBOX_PIDS_LIMIT"),
            override_cpus: r.opt_f64("HARBOR_ENVIRONMENT_OVERRIDE_CPUS"),
            override_memory_mb: r
                .int("HARBOR_ENVIRONMENT_OVERRIDE_MEMORY_MB")
                .and_then(|n| u64::try_from(n).ok()),
        },
        proxy: ProxySettings {
            host: proxy_host(r, run.backend),
            port: r
                .int("PROXY_PORT")
                .and_then(|n| u16::try_from(n).ok())
                .unwrap_or_default(),
            max_request_body_bytes: (r.u32("MAX_REQUEST_BODY_MB") as usize) << 20,
            train_branches: branch_kinds(r, "PROXY_TRAIN_BRANCHES"),
            max_session_tokens: r
                .int("PROXY_MAX_SESSION_TOKENS")
                .and_then(|n| u64::try_from(n).ok()),
        },
        scheduler: SchedulerSettings {
            enabled: r.bool("HARBOR_SESSION_LEVEL_SCHEDULER"),
            high_watermark: r.f64("HARBOR_SESSION_SCHEDULER_HIGH_WATERMARK"),
            hit_threshold: r.f64("HARBOR_SESSION_SCHEDULER_HIT_THRESHOLD"),
            wait_poll: r.seconds("HARBOR_SESSION_SCHEDULER_WAIT_POLL_SEC"),
            idle_grace: r.seconds("HARBOR_SESSION_SCHEDULER_IDLE_GRACE_SEC"),
        },
        plan: plan(r),
        agent_runtime: remote::agent_runtime(r),
        kubernetes: remote::kubernetes(r),
        docker: remote::docker(r),
        images: remote::images(r),
        eval: offline::eval(r),
        infer: offline::infer(r),
        unavailable: Vec::new(),
        run,
        paths,
        data,
        topology,
        batch,
        engine,
    }
}

/// A name that becomes part of folder names.
fn folder_name(r: &mut Resolver<'_>, name: &'static str) -> String {
    let text = r.string(name);
    if text.contains('/') || text.starts_with('.') {
        r.problem(
            name,
            format!("becomes a folder name and must not hold `/` or start with `.`, and is `{text}`"),
        );
    }
    // File systems end at 255 bytes, and log, lock and temporary files append to it.
    if text.len() > MAX_FOLDER_NAME {
        r.problem(
            name,
            format!(
                "becomes a folder name of at most {MAX_FOLDER_NAME} bytes, and has {}",
                text.len()
            ),
        );
    }
    text
}

/// Longest PROJECT_NAME and EXP_NAME in bytes.
const MAX_FOLDER_NAME: usize = 200;

/// Names with commas between them.
/// Names, separated by commas or blanks.
fn words(r: &mut Resolver<'_>, name: &'static str) -> Vec<String> {
    let text = r.text(name).unwrap_or_default();
    let words = text.split([',', ' ', '\t', '\n']).map(str::trim);
    words.filter(|word| !word.is_empty()).map(str::to_owned).collect()
}

/// `SCAFFOLD_COMMAND`, which `SCAFFOLD=custom` must have and no other may.
fn custom_command(r: &mut Resolver<'_>, scaffold: Scaffold) -> Option<String> {
    let command = r.text("SCAFFOLD_COMMAND").filter(|text| !text.trim().is_empty());
    match (scaffold == Scaffold::Custom, &command) {
        (true, None) => r.problem(
            "SCAFFOLD_COMMAND",
            "is empty, and SCAFFOLD=custom is the agent that it starts; set it to a shell command".into(),
        ),
        (false, Some(_)) => r.problem(
            "SCAFFOLD_COMMAND",
            format!(
                "is set, and SCAFFOLD={scaffold} has its own command; use SCAFFOLD=custom or leave it out"
            ),
        ),
        _ => {}
    }
    command
}

fn branch_kinds(r: &mut Resolver<'_>, name: &'static str) -> Vec<BranchKind> {
    let text = r.string(name);
    let mut kinds = Vec::new();
    for word in text.split(',').map(str::trim).filter(|word| !word.is_empty()) {
        match BranchKind::from_name(word) {
            Some(kind) => kinds.push(kind),
            None => {
                let known: Vec<&str> = BranchKind::ALL.iter().map(|kind| kind.name()).collect();
                r.problem(
                    name,
                    format!("names the unknown kind `{word}`; known: {}", known.join(", ")),
                );
            }
        }
    }
    kinds
}

fn topology(r: &mut Resolver<'_>) -> TopologySettings {
    let nnodes = r.u32("NNODES");
    let n_nodes_rollout = r.opt_u32("N_NODES_ROLLOUT").unwrap_or_default();
    let train = r.opt_u32("N_NODES_TRAIN");
    TopologySettings {
        nnodes,
        n_nodes_train: r.derive("N_NODES_TRAIN", train, nnodes.saturating_sub(n_nodes_rollout)),
        n_nodes_rollout,
        ngpus_per_node: r.u32("NGPUS_PER_NODE"),
        sp_size: r.u32("SP_SIZE"),
    }
}

fn plan(r: &mut Resolver<'_>) -> PlanSettings {
    PlanSettings {
        ep_size: r.u32("EP_SIZE"),
        gen_tp: r.u32("GEN_TP"),
        enable_r3: r.opt_bool("ENABLE_R3"),
        fused_kernels: r.bool("FUSED_KERNELS"),
        activation_offload: r.bool("ENABLE_ACTIVATION_OFFLOAD"),
        rollout_is: r.text("ROLLOUT_IS").and_then(|text| RolloutIs::from_name(&text)),
        agent_name: r.text("HARBOR_AGENT_NAME"),
    }
}

/// Sandboxes on this machine need nothing but loopback; others come over the network.
fn proxy_host(r: &mut Resolver<'_>, backend: Backend) -> String {
    let set = r.text("PROXY_HOST");
    let computed = match backend {
        Backend::Process => "127.0.0.1",
        _ => "0.0.0.0",
    };
    r.derive("PROXY_HOST", set, computed.to_owned())
}

fn batch(r: &mut Resolver<'_>, window: u32, sp_size: u32) -> BatchSettings {
    let train_bsz = r.u32("TRAIN_BSZ");
    let mini = r.opt_u32("TRAIN_MINI_BSZ");
    let budget = r.opt_u32("ACTOR_PPO_MAX_TOKEN_LEN_PER_GPU");
    BatchSettings {
        train_bsz,
        train_mini_bsz: r.derive("TRAIN_MINI_BSZ", mini, train_bsz),
        n_resp: r.u32("N_RESP"),
        gradient_checkpointing: r.bool("ENABLE_GRADIENT_CHECKPOINTING"),
        ppo_epochs: r.u32("PPO_EPOCHS"),
        max_token_len_per_gpu: r.derive(
            "ACTOR_PPO_MAX_TOKEN_LEN_PER_GPU",
            budget,
            (window / sp_size.max(1)).max(1),
        ),
    }
}

fn engine(r: &mut Resolver<'_>, window: u32, max_response: u32) -> EngineSettings {
    let max_model_len = r.opt_u32("ROLLOUT_MAX_MODEL_LEN");
    let max_model_len = r.derive("ROLLOUT_MAX_MODEL_LEN", max_model_len, window);
    let max_num_seqs = r.u32("ENGINE_MAX_NUM_SEQS");
    let cache = r
        .int("ENGINE_KV_CACHE_TOKENS")
        .and_then(|n| u64::try_from(n).ok());
    let turn = r.opt_u32("ENGINE_MAX_TOKENS_PER_TURN");
    EngineSettings {
        max_model_len,
        kv_cache_tokens: r.derive(
            "ENGINE_KV_CACHE_TOKENS",
            cache,
            u64::from(max_num_seqs) * u64::from(max_model_len),
        ),
        max_num_seqs,
        max_tokens_per_turn: r.derive("ENGINE_MAX_TOKENS_PER_TURN", turn, max_response),
    }
}

fn sampling(r: &mut Resolver<'_>, [temperature, top_p, top_k]: [&'static str; 3]) -> SamplingSettings {
    SamplingSettings {
        temperature: r.f64(temperature) as f32,
        top_p: r.f64(top_p) as f32,
        top_k: r.positive(top_k).unwrap_or_default(),
    }
}

fn validation_sampling(r: &mut Resolver<'_>) -> SamplingSettings {
    let sampled = sampling(r, ["VAL_TEMPERATURE", "VAL_TOP_P", "VAL_TOP_K"]);
    if r.bool("VAL_DO_SAMPLE") {
        sampled
    } else {
        SamplingSettings {
            temperature: 0.0,
            ..sampled
        }
    }
}

fn optim(r: &mut Resolver<'_>) -> OptimSettings {
    OptimSettings {
        lr: r.f64("ACTOR_LR"),
        scheduler: r.choice("LR_SCHEDULER", LrScheduler::from_name, LrScheduler::Constant),
        warmup_steps: r.opt_u32("LR_WARMUP_STEPS").unwrap_or_default(),
        min_ratio: r.f64("LR_MIN_RATIO"),
        weight_decay: r.f64("WEIGHT_DECAY"),
        beta1: r.f64("ADAM_BETA1"),
        beta2: r.f64("ADAM_BETA2"),
        grad_clip: r.f64("GRAD_CLIP"),
        torch_num_threads: r.positive("TORCH_NUM_THREADS"),
    }
}

#[cfg(test)]
mod tests {
    use super::variables;
    use std::collections::BTreeSet;

    /// A variable that nothing reads would be documented and ignored.
    pub(super) fn assert_reads_the_whole_table(read: &BTreeSet<&'static str>) {
        for variable in variables::all() {
            assert!(read.contains(variable.name), "nothing reads {}", variable.name);
        }
    }
}
