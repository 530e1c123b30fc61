//! Puts a trial together: engine, proxy, recorder, sandbox, agent, verifier.

use super::{
    script::{Asked, Markup, Turn},
    wire::{Exchange, Recorder},
};
use crate::support::{process_tree, root, skip};
use async_trait::async_trait;
use legorl::{
    base::{
        BranchKind, CapturedSession, Engine, EngineEvent, EngineStatus, GenerateRequest, GroupId, Purpose,
        ReplicaId, RequestId, SampledToken, SamplingParams, SessionEndpoint, SessionError, SessionHost,
        SessionId, SessionSpec, TrialAssignment, TrialKey, WeightAck, WeightError, WeightTarget,
        WeightUpdate,
    },
    rollout::{
        sandbox::{ProcessBackend, ProcessBackendConfig},
        scaffold::{runtime, Scaffold, ScaffoldError},
        task::TaskSpec,
        trial::{AttemptEnd, PurposeConfig, TrialRunner, TrialRunnerConfig},
    },
    serve::{
        engine::scripted::ScriptedEngine,
        proxy::{
            router::{Router, RouterConfig},
            Proxy, ProxyConfig,
        },
    },
};
use std::{
    path::{Path, PathBuf},
    sync::{Arc, Mutex, OnceLock},
    time::Duration,
};
use tokio::sync::{mpsc, watch};

/// A generation as the engine saw it.
#[derive(Clone, Debug)]
pub struct Call {
    /// What it was asked with.
    pub prompt: Arc<[u32]>,
    /// What it sent.
    pub tokens: Vec<SampledToken>,
    /// What the script meant, if the reply came from a script.
    pub turn: Option<Turn>,
    /// It ended by itself, and the receiver was still there.
    finished: bool,
}

/// What a script meant by the ids that it sent.
pub type Meant = Arc<Mutex<Vec<(Vec<u32>, Turn)>>>;

/// Passes everything on and keeps what goes in and out.
struct Recorded {
    inner: Arc<dyn Engine>,
    calls: Arc<Mutex<Vec<Call>>>,
    turns: Meant,
}

impl Engine for Recorded {
    fn submit(&self, request: GenerateRequest, events: mpsc::UnboundedSender<EngineEvent>) {
        let at = {
            let mut calls = self.calls.lock().unwrap();
            calls.push(Call {
                prompt: request.prompt.clone(),
                tokens: Vec::new(),
                turn: None,
                finished: false,
            });
            calls.len() - 1
        };
        let (sender, mut receiver) = mpsc::unbounded_channel();
        self.inner.submit(request, sender);
        let (calls, turns) = (self.calls.clone(), self.turns.clone());
        tokio::spawn(async move {
            loop {
                let event = tokio::select! {
                    event = receiver.recv() => event,
                    () = events.closed() => None,
                };
                let Some(event) = event else { break };
                match &event {
                    EngineEvent::Tokens(tokens) => calls.lock().unwrap()[at].tokens.extend(tokens),
                    EngineEvent::Finished { .. } => {
                        let mut calls = calls.lock().unwrap();
                        let ids: Vec<u32> = calls[at].tokens.iter().map(|t| t.id).collect();
                        let turns = turns.lock().unwrap();
                        calls[at].turn = turns.iter().find(|(sent, _)| *sent == ids).map(|t| t.1.clone());
                        calls[at].finished = true;
                    }
                    EngineEvent::Failed(_) => {}
                }
                if events.send(event).is_err() {
                    break;
                }
            }
        });
    }

    fn abort(&self, id: RequestId) {
        self.inner.abort(id);
    }

    fn status(&self) -> EngineStatus {
        self.inner.status()
    }

    fn resident_prefix(&self, session: &SessionId, prompt: &[u32]) -> usize {
        self.inner.resident_prefix(session, prompt)
    }

    fn end_session(&self, session: &SessionId) {
        self.inner.end_session(session);
    }
}

#[async_trait]
impl WeightTarget for Recorded {
    async fn update_weights(&self, update: Arc<WeightUpdate>) -> Result<WeightAck, WeightError> {
        self.inner.update_weights(update).await
    }
}

/// The proxy, reached through the recorder; keeps what it handed over.
struct Sessions {
    proxy: Arc<Proxy>,
    socket: PathBuf,
    captured: Arc<Mutex<Option<CapturedSession>>>,
}

#[async_trait]
impl SessionHost for Sessions {
    fn open(&self, spec: SessionSpec) -> Result<SessionEndpoint, SessionError> {
        let endpoint = self.proxy.open(spec)?;
        Ok(SessionEndpoint {
            unix_socket: self.socket.clone(),
            ..endpoint
        })
    }

    async fn close(&self, session: &SessionId) -> Result<CapturedSession, SessionError> {
        let captured = self.proxy.close(session).await?;
        *self.captured.lock().unwrap() = Some(captured.clone());
        Ok(captured)
    }

    fn cancel_group(&self, group: GroupId) {
        self.proxy.cancel_group(group);
    }
}

/// Limits of a trial.
#[derive(Clone, Debug)]
pub struct Limits {
    /// Model calls.
    pub max_turns: u32,
    /// Context window, tokens.
    pub context: u32,
    /// Longest reply, tokens.
    pub reply: u32,
    /// Time of the agent.
    pub time: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            max_turns: 60,
            context: 120_000,
            reply: 4_096,
            time: Duration::from_secs(120),
        }
    }
}

/// What a trial left.
pub struct Outcome {
    /// How it ended.
    pub end: AttemptEnd,
    /// What the proxy handed over.
    pub captured: CapturedSession,
    /// What the engine saw, without what was cancelled.
    pub calls: Vec<Call>,
    /// What went over the wire.
    pub exchanges: Vec<Exchange>,
    /// The policy's markup.
    pub markup: Markup,
    /// The trial's folder; deleted with this.
    pub trial_dir: PathBuf,
    library: &'static tokenizers::Tokenizer,
    _dir: tempfile::TempDir,
}

impl Outcome {
    /// The text of ids, control tokens included.
    pub fn decode(&self, ids: &[u32]) -> String {
        self.library.decode(ids, false).unwrap()
    }

    /// The text of a reply.
    pub fn decode_sampled(&self, call: &Call) -> String {
        let ids: Vec<u32> = call.tokens.iter().map(|t| t.id).collect();
        self.decode(&ids)
    }

    /// The reward; panics with the agent's log when there is no verdict.
    pub fn reward(&self) -> f64 {
        match &self.end {
            AttemptEnd::Finished(trajectory) => trajectory.outcome.reward,
            other => panic!("{other:?}\n{}", self.story()),
        }
    }

    /// The kinds of the session's branches.
    pub fn kinds(&self) -> Vec<BranchKind> {
        self.captured.branches.iter().map(|b| b.kind).collect()
    }

    /// The kinds of the session's branches, and whether each is trained on.
    pub fn trained(&self) -> Vec<(BranchKind, bool)> {
        let branches = self.captured.branches.iter();
        branches.map(|b| (b.kind, b.trainable)).collect()
    }

    /// A file of the trial's folder.
    pub fn file(&self, name: &str) -> String {
        std::fs::read_to_string(self.trial_dir.join(name)).unwrap_or_else(|e| format!("({name}: {e})"))
    }

    /// What happened, for a failed assertion.
    pub fn story(&self) -> String {
        let mut out = String::new();
        for exchange in &self.exchanges {
            let messages = exchange.json()["messages"].as_array().map_or(0, Vec::len);
            let tools = exchange.json()["tools"].as_array().map_or(0, Vec::len);
            out += &format!(
                "{} {} {messages} messages, {tools} tools -> {}\n",
                exchange.method, exchange.path, exchange.status
            );
            if exchange.status != 200 {
                out += &format!("  {}\n", exchange.answer);
            }
        }
        for branch in &self.captured.branches {
            out += &format!(
                "branch {:?} trained {} turns {} tokens {}\n",
                branch.kind,
                branch.trainable,
                branch.turns,
                branch.tokens.len()
            );
        }
        for entry in std::fs::read_dir(self.trial_dir.join("agent"))
            .into_iter()
            .flatten()
            .flatten()
        {
            let text = std::fs::read_to_string(entry.path()).unwrap_or_default();
            let tail: String = text
                .chars()
                .skip(text.chars().count().saturating_sub(3000))
                .collect();
            out += &format!("--- {}\n{tail}\n", entry.file_name().to_string_lossy());
        }
        out + "--- verifier\n" + &self.file("verifier/test-stdout.txt")
    }
}

/// Folder of Qwen3's tokenizer and chat template; `setup/tokenizer.sh` makes it.
pub fn tokenizer_dir() -> PathBuf {
    let given = std::env::var_os("LEGORL_TEST_TOKENIZER").map(PathBuf::from);
    let dir = given.unwrap_or_else(|| {
        let runtimes = runtime::default_root().expect("a cache folder");
        runtimes.parent().unwrap().join("references/tokenizer-qwen3")
    });
    assert!(
        dir.join("tokenizer.json").exists(),
        "{}: Qwen3's tokenizer is not there; run setup/tokenizer.sh",
        dir.display()
    );
    dir
}

/// The tokenizer in a folder, read by the library, once: every folder here holds the same one.
fn library(model: &Path) -> &'static tokenizers::Tokenizer {
    static LIBRARY: OnceLock<tokenizers::Tokenizer> = OnceLock::new();
    LIBRARY.get_or_init(|| tokenizers::Tokenizer::from_file(model.join("tokenizer.json")).unwrap())
}

/// True if the agent's runtime is there. Without it a test fails, or says SKIP where that is allowed: off line,
/// and for agents that only the long list needs; those the short list leaves out also where they are installed.
pub fn installed(scaffold: &dyn Scaffold, needed: bool) -> bool {
    if !needed && std::env::var("LEGORL_TEST_LEVEL").is_ok_and(|level| level == "short") {
        skip(
            &format!("the agent `{}`", scaffold.name()),
            "it is in `make test-long`",
        );
        return false;
    }
    let problem = match scaffold.check() {
        Ok(()) => return true,
        Err(ScaffoldError::NotInstalled { problem, fix, .. }) => format!("{problem}; fix: {fix}"),
        Err(other) => panic!("{other}"),
    };
    let offline = std::env::var_os("LEGORL_OFFLINE").is_some_and(|v| !v.is_empty());
    assert!(
        !needed || offline,
        "{problem} (LEGORL_OFFLINE=1 leaves these tests out)"
    );
    skip(&format!("the agent `{}`", scaffold.name()), &problem);
    false
}

/// The agent, where its runtime is there; see [`installed`].
pub fn agent(scaffold: impl Scaffold + 'static, needed: bool) -> Option<Arc<dyn Scaffold>> {
    installed(&scaffold, needed).then(|| Arc::new(scaffold) as Arc<dyn Scaffold>)
}

/// Runs a demo task with a scripted policy.
pub fn scripted(
    task: &str,
    scaffold: Arc<dyn Scaffold>,
    markup: Markup,
    limits: &Limits,
    script: impl Fn(&Asked<'_>) -> Turn + Send + Sync + 'static,
) -> Outcome {
    let model = tokenizer_dir();
    let library = library(&model);
    let turns: Meant = Arc::default();
    let meant = turns.clone();
    let reply = move |request: &GenerateRequest, _| {
        let prompt = library.decode(&request.prompt, false).unwrap();
        let turn = script(&Asked { prompt: &prompt });
        let encoded = library.encode(turn.render(markup), false).unwrap();
        let ids = encoded.get_ids().to_vec();
        meant.lock().unwrap().push((ids.clone(), turn));
        ids.into()
    };
    let engine = Arc::new(ScriptedEngine::new(1 << 30, Box::new(reply)));
    run(task, scaffold, engine, turns, &model, markup, limits)
}

/// Runs a demo task with any engine and the model folder that it belongs to.
pub fn run(
    task: &str,
    scaffold: Arc<dyn Scaffold>,
    engine: Arc<dyn Engine>,
    turns: Meant,
    model: &Path,
    markup: Markup,
    limits: &Limits,
) -> Outcome {
    let dir = tempfile::tempdir().unwrap();
    let calls: Arc<Mutex<Vec<Call>>> = Arc::default();
    let router = Arc::new(Router::new(RouterConfig::default()));
    let recorded = Recorded {
        inner: engine,
        calls: calls.clone(),
        turns,
    };
    router.join(ReplicaId(0), Arc::new(recorded));
    let mut config = ProxyConfig::new(dir.path().join("proxy.sock"), "policy".into(), model.to_owned());
    config.tool_call_parser = markup.parser().into();
    let proxy = Proxy::start(config, router).unwrap();
    let recorder = Recorder::start(dir.path().join("recorder.sock"), &dir.path().join("proxy.sock"));
    let captured = Arc::default();
    let sessions = Sessions {
        proxy: proxy.clone(),
        socket: recorder.socket.clone(),
        captured: Arc::clone(&captured),
    };
    let backend = ProcessBackend::new(ProcessBackendConfig {
        state_dir: dir.path().join("sandboxes"),
        rootfs: None,
        helper: None,
        owner: "test".into(),
    });
    let purpose = PurposeConfig {
        sampling: SamplingParams::default(),
        agent_timeout_max: limits.time,
    };
    let config = TrialRunnerConfig {
        trials_dir: dir.path().join("trials"),
        run: "agents".into(),
        owner: "test".into(),
        train: purpose.clone(),
        val: purpose,
        max_turns: limits.max_turns,
        max_total_tokens: limits.context,
        max_tokens_per_turn: limits.reply,
        max_consecutive_no_tool: 0,
        // The demo tasks allow the small agent a minute; these take longer to start on a busy machine.
        agent_timeout_multiplier: 100.0,
        verifier_timeout_multiplier: 4.0,
        agent_setup_timeout: Duration::from_secs(60),
        override_cpus: Some(2.0),
        override_memory_mb: Some(4096),
        pids_limit: Some(512),
        room_deadline: Duration::from_secs(60),
    };
    let runner = TrialRunner::new(config, Arc::new(backend), scaffold, Arc::new(sessions)).unwrap();
    let task = TaskSpec::load(&root().join("jobs/demo/tasks").join(task)).unwrap();
    let assignment = TrialAssignment {
        key: TrialKey {
            purpose: Purpose::Train,
            group: GroupId(0),
            sample: 0,
        },
        attempt: 0,
        row: 0,
        seed: 7,
    };
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()
        .unwrap();
    let end = runtime.block_on(async {
        let (_keep, cancel) = watch::channel(false);
        let end = runner.run(&assignment, &task, cancel).await;
        proxy.shutdown(Duration::from_secs(5)).await.unwrap();
        end
    });
    drop(runner);
    drop(runtime);
    let left = process_tree(std::process::id());
    assert_eq!(left.len(), 1, "processes are left: {left:?}");
    let sandboxes = std::fs::read_dir(dir.path().join("sandboxes"))
        .into_iter()
        .flatten()
        .count();
    assert_eq!(sandboxes, 0, "sandbox folders are left");
    let trials = dir.path().join("trials/train");
    let trial_dir = std::fs::read_dir(trials).unwrap().next().unwrap().unwrap().path();
    let captured = captured.lock().unwrap().take().expect("the session was closed");
    let mut calls = calls.lock().unwrap().clone();
    calls.retain(|call| call.finished);
    Outcome {
        end,
        captured,
        calls,
        exchanges: recorder.exchanges(),
        markup,
        trial_dir,
        library: library(model),
        _dir: dir,
    }
}
