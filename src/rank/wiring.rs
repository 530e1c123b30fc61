//! The one place where `rollout`, `serve` and `train` meet.
//!
//! ```text
//!                      ┌────────────── rank 0 ───────────────────────────────┐   other ranks
//!   workers ─ runner ─▶│ sandbox ─ agent ─▶ proxy ─▶ router ─▶ NativeEngine  │
//!     ▲                │                              │   └──▶ RemoteEngine ─┼─▶ EngineServer ─ NativeEngine
//!     │ plan, sink     │                                                     │
//!   buffer ──batch────▶│ trainer ── weights ──▶ every engine                 │
//!                      │    └── team ── the same step, on its share ─────────┼─▶ trainer
//!                      └─────────────────────────────────────────────────────┘
//! ```
//!
//! A world of one rank takes the same path with one local replica: it is the special case with nothing
//! on the right.

use super::{
    checkpointing::Checkpointing,
    control::Control,
    head::Head,
    placement::{placement, Placement},
    report::Report,
    roles::RoleMap,
    run_lock::RunLocks,
    serving,
    signals::StopFlag,
    stages,
    team::{self, Team},
};
use crate::{
    base::{Engine, EngineStatus, ReplicaId, RoutingShape, WeightTarget},
    comm::Communicator,
    config::settings::{
        values::{Backend, Scaffold as ScaffoldName},
        Settings,
    },
    model::{
        hf::{ModelConfig, ModelError},
        net::{Device, Policy},
    },
    rollout::{
        sandbox::{
            process::{ProcessBackend, ProcessBackendConfig},
            SandboxBackend,
        },
        scaffold::{
            oh, ohsdk, terminus2, Cc, CcConfig, Custom, CustomConfig, Mini, MiniConfig, Oc, OcConfig,
            PythonScaffold, RuntimeConfig, Scaffold,
        },
        task::TaskIndex,
        trial::TrialRunner,
        workers::{AttemptRunner, TaskIndexes},
    },
    serve::{
        engine::{
            native::{NativeEngine, NativeEngineConfig},
            remote::RemoteEngine,
        },
        proxy::{router::Router, Proxy},
    },
    train::{
        buffer::Buffer,
        checkpoint::LoadedCheckpoint,
        trainer::{Mesh, Trainer},
    },
};
use anyhow::{bail, Context};
use std::{path::Path, process::ExitCode, sync::Arc, time::Duration};

/// Sandboxes of an earlier process of this run are deleted within this time.
const REAP_DEADLINE: Duration = Duration::from_secs(120);
/// The proxy answers running requests for at most this long when the run ends.
const PROXY_DRAIN: Duration = Duration::from_secs(10);

/// What the head's loop uses.
pub struct Parts {
    /// Owner of leases and sandboxes: this process of this run.
    pub owner: String,
    /// Runs trials.
    pub runner: Arc<dyn AttemptRunner>,
    /// Indexes that assignments refer to.
    pub tasks: TaskIndexes,
    /// Every replica, in the order of their ids.
    pub engines: Vec<Arc<dyn Engine>>,
    /// The same replicas, as takers of weights.
    pub weight_targets: Vec<Arc<dyn WeightTarget>>,
}

impl Parts {
    /// Load of every replica, in the order of their ids.
    pub fn engine_status(&self) -> Vec<EngineStatus> {
        self.engines.iter().map(|e| e.status()).collect()
    }
}

/// Threads that libtorch and the engine may use.
pub fn compute_threads(settings: &Settings) -> usize {
    settings.optim.torch_num_threads.map_or_else(
        || std::thread::available_parallelism().map_or(1, std::num::NonZero::get),
        |threads| threads as usize,
    )
}

/// Tokens of a step of an engine on a GPU: enough to keep it busy with prompts, little enough that the
/// sequences that decode meanwhile do not wait long.
const GPU_BATCHED_TOKENS: usize = 8192;

/// Size of a replica.
pub fn engine_config(settings: &Settings, place: Placement) -> NativeEngineConfig {
    let defaults = NativeEngineConfig::default();
    NativeEngineConfig {
        device: place.device,
        compute: place.compute,
        max_num_batched_tokens: match place.device {
            Device::Cpu => defaults.max_num_batched_tokens,
            _ => GPU_BATCHED_TOKENS,
        },
        max_num_seqs: settings.engine.max_num_seqs as usize,
        max_model_len: settings.engine.max_model_len as usize,
        kv_cache_tokens: settings.engine.kv_cache_tokens as usize,
        num_threads: compute_threads(settings),
        ..defaults
    }
}

/// Rank 0 from start to end.
pub fn run_head(
    settings: &Settings,
    attempt: &Path,
    comm: &Arc<dyn Communicator>,
    roles: &RoleMap,
    stop: StopFlag,
) -> anyhow::Result<ExitCode> {
    let _locks = RunLocks::acquire(settings)?;
    let model = ModelConfig::from_dir(&settings.model.path)?;
    let place = placement(settings)?;
    let tasks = TaskIndexes {
        train: Arc::new(TaskIndex::open(&settings.data.train_files)?),
        val: settings
            .data
            .val_files
            .as_deref()
            .map(TaskIndex::open)
            .transpose()?
            .map(Arc::new),
    };
    let n_rows = u32::try_from(tasks.train.len()).context("the training index has more than 2^32 rows")?;
    let total_steps = u32::try_from(settings.total_steps(n_rows.into())).context("more than 2^32 steps")?;
    if total_steps == 0 {
        bail!(
            "TOTAL_EPOCHS={} passes over {n_rows} rows make less than one batch of TRAIN_BSZ={}",
            settings.schedule.total_epochs,
            settings.batch.train_bsz
        );
    }

    // Checking a large checkpoint takes minutes, in which the other ranks hear that this one is there.
    let team = Team::gather(comm, &roles.trainer_ranks)?;
    let checkpoints = Checkpointing::open(settings, &model, &**comm, &roles.trainer_ranks)?;
    let resume = checkpoints.latest()?;
    let step = resume.as_ref().map_or(0, |r| r.content.state.global_step);
    let report = Arc::new(Report::open(settings, step, total_steps, attempt)?);
    report.placement(&place);
    if let Some(resume) = &resume {
        report.resumed(&resume.checkpoint);
    }
    let buffer = Buffer::open(
        stages::buffer(settings, n_rows, total_steps),
        resume.as_ref().map(|r| &r.manifest),
    )?;
    let replay = stages::replay(settings, &model)?;
    team.start(total_steps, resume.as_ref())?;
    let mesh = team::mesh(settings, place, comm, &roles.trainer_ranks)?;
    let is_alone = mesh.is_none();
    let content = resume.as_ref().map(|r| &r.content);
    let trainer =
        make_trainer(settings, place, total_steps, replay, content, mesh).with_context(|| match &resume {
            Some(resume) => format!("checkpoint {}", resume.checkpoint.path.display()),
            None => format!("MODEL_PATH {}", settings.model.path.display()),
        })?;
    drop(resume);
    let control = Control::start(stop.clone())?;

    let engines = make_engines(settings, place, comm, roles, is_alone.then(|| trainer.policy()))?;
    let router = Arc::new(Router::new(serving::router(settings)));
    for (place, engine) in engines.iter().enumerate() {
        router.join(ReplicaId(place as u32), engine.clone());
    }
    let proxy = Proxy::start(stages::proxy(settings, replay)?, router)?;
    report.proxy(proxy.tcp());

    let owner = stages::owner(settings);
    let backend = make_backend(settings, &owner)?;
    let scaffold = make_scaffold(settings)?;
    scaffold.check()?;
    let sandboxes = control.wait("the check of the sandbox backend", REAP_DEADLINE, backend.check())??;
    let reaped = control.wait("the removal of old sandboxes", REAP_DEADLINE, backend.reap())??;
    report.sandboxes(&sandboxes, reaped);

    let runner = TrialRunner::new(stages::trials(settings, &owner), backend, scaffold, proxy.clone())?;
    let parts = Parts {
        owner,
        runner: Arc::new(runner),
        tasks,
        weight_targets: engines
            .iter()
            .map(|e| e.clone() as Arc<dyn WeightTarget>)
            .collect(),
        engines,
    };
    let mut head = Head::new(
        settings,
        parts,
        trainer,
        team,
        buffer,
        checkpoints,
        report,
        control,
        stop,
        total_steps,
    );
    let outcome = head.run(roles);
    let drained = head.control().wait(
        "the end of the proxy",
        PROXY_DRAIN * 2,
        proxy.shutdown(PROXY_DRAIN),
    );
    let code = outcome?;
    drained??;
    Ok(code)
}

/// The trainer, or this rank's part of it, at its start or as a checkpoint left it.
pub fn make_trainer(
    settings: &Settings,
    place: Placement,
    total_steps: u32,
    replay: Option<RoutingShape>,
    resume: Option<&LoadedCheckpoint>,
    mesh: Option<Arc<Mesh>>,
) -> anyhow::Result<Trainer> {
    let threads = compute_threads(settings) as i32;
    let config = stages::trainer(settings, total_steps, threads, replay);
    let path = &settings.model.path;
    let load = || {
        let policy = match &mesh {
            None => Policy::load(path, place.device)?,
            Some(mesh) => Policy::load_parts(path, place.device, |spec, t| mesh.share(&spec.name, &t))?,
        };
        Ok::<_, ModelError>(policy.with_compute_type(place.compute))
    };
    let policy = load()?;
    let reference = config.needs_reference().then(load).transpose()?;
    let critic = config.estimator.needs_critic().then(load).transpose()?;
    let mut trainer = Trainer::over_ranks(config, policy, reference, mesh.clone())?;
    if let Some(trunk) = critic {
        trainer = trainer.with_critic(trunk);
    }
    if let Some(content) = resume {
        let (tensors, state) = (&content.tensors, &content.state);
        trainer.load_state(
            &tensors.actor,
            &tensors.optimizer,
            tensors.critic.as_ref(),
            state.trainer,
            state.weight_version,
        )?;
    }
    Ok(trainer)
}

fn make_engines(
    settings: &Settings,
    place: Placement,
    comm: &Arc<dyn Communicator>,
    roles: &RoleMap,
    policy: Option<&Policy>,
) -> anyhow::Result<Vec<Arc<dyn Engine>>> {
    let mut engines: Vec<Arc<dyn Engine>> = Vec::with_capacity(roles.replicas());
    if roles.head_has_engine {
        // Of a policy that is spread over ranks nobody has the whole; the first push of weights sets it.
        let config = engine_config(settings, place);
        engines.push(match policy {
            Some(policy) => NativeEngine::from_policy(config, policy)?,
            None => NativeEngine::start(config, &settings.model.path)?,
        });
    }
    for rank in &roles.engine_ranks {
        let remote = RemoteEngine::connect(comm.clone(), *rank, stages::remote())
            .with_context(|| format!("engine replica on rank {rank}"))?;
        engines.push(remote);
    }
    Ok(engines)
}

fn make_backend(settings: &Settings, owner: &str) -> anyhow::Result<Arc<dyn SandboxBackend>> {
    match settings.run.backend {
        Backend::Process => Ok(Arc::new(ProcessBackend::new(ProcessBackendConfig {
            state_dir: stages::node_folder(settings)?.join("sandboxes"),
            rootfs: settings.sandbox.rootfs.clone(),
            helper: None,
            owner: owner.to_owned(),
        }))),
        other => bail!("BACKEND={other} is not in this version"),
    }
}

fn make_scaffold(settings: &Settings) -> anyhow::Result<Arc<dyn Scaffold>> {
    let agent = &settings.agent;
    let runtime = RuntimeConfig {
        root: agent.runtimes.clone(),
        version: agent.version.clone(),
    };
    let disallowed_tools = agent.disallowed_tools.clone();
    match settings.run.scaffold {
        ScaffoldName::Mini => Ok(Arc::new(Mini::new(MiniConfig::default()))),
        ScaffoldName::Cc => Ok(Arc::new(Cc::new(CcConfig {
            runtime,
            disallowed_tools,
        }))),
        ScaffoldName::Oc => Ok(Arc::new(Oc::new(OcConfig {
            runtime,
            disallowed_tools,
        }))),
        ScaffoldName::Custom => Ok(Arc::new(Custom::new(CustomConfig {
            command: agent.command.clone().unwrap_or_default(),
            runtime: agent.custom_runtime.clone(),
        }))),
        ScaffoldName::Ohsdk => Ok(Arc::new(PythonScaffold::new(ohsdk::AGENT, runtime))),
        ScaffoldName::Oh => Ok(Arc::new(PythonScaffold::new(oh::AGENT, runtime))),
        ScaffoldName::Terminus2 => Ok(Arc::new(PythonScaffold::new(terminus2::AGENT, runtime))),
    }
}
