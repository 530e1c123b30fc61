//! What the machine and the files are like, seen without changing anything.
//!
//! ```text
//! model      config.json, weights, tokenizer, chat template
//! tasks      task indexes and a sample of their tasks
//! folders    folders that the run writes to, and runs that hold them
//! machine    sandbox, ports, limits, /dev/shm, GPUs
//! slurm      the allocation's time and signal
//! remote     Kubernetes API, Docker daemon, task images
//! ```
//!
//! Probing never fails: what cannot be found out is recorded as the reason, and the rules judge it.
//! Everything that could wait has a deadline.

pub mod folders;
pub mod machine;
pub mod model;
pub mod program;
pub mod remote;
pub mod slurm;
pub mod tasks;

pub use folders::{FolderFacts, HeldFolder};
pub use machine::{GpuFacts, GpuProcess, Limit, SharedMemory};
pub use model::ModelFacts;
pub use remote::{DockerFacts, ImageFacts, KubernetesFacts};
pub use slurm::SlurmFacts;
pub use tasks::IndexFacts;

use crate::config::{
    values::{Backend, RunKind, Scaffold},
    Settings,
};
use crate::rollout::scaffold::{Runtime, RuntimeConfig, RUNTIMES};
use std::{net::IpAddr, path::Path};

/// Facts about one run on this machine.
#[derive(Clone, Debug)]
pub struct Facts {
    /// The starting policy.
    pub model: Result<ModelFacts, String>,
    /// The training index, or the index of a sampling run.
    pub train_index: Result<IndexFacts, String>,
    /// The held-out index, where the run has one.
    pub val_index: Option<Result<IndexFacts, String>>,
    /// Other paths that the run reads: variable, path, exists.
    pub inputs: Vec<(&'static str, String, bool)>,
    /// Folders that the run writes to.
    pub folders: Vec<FolderFacts>,
    /// Folders of this run that a live run holds.
    pub held: Vec<HeldFolder>,
    /// A process sandbox was started: its version line, or what failed. `None` for other backends.
    pub sandbox: Option<Result<String, String>>,
    /// The agent's files: name, version and place, or what is wrong with them. `None` for agents that need
    /// none and for other backends.
    pub scaffold_runtime: Option<Result<String, String>>,
    /// The proxy's port could be bound; `None` when any free port will do.
    pub proxy_port: Option<Result<(), String>>,
    /// An address of this machine that others can reach.
    pub address: Option<IpAddr>,
    /// Ports that the kernel hands out by itself.
    pub ephemeral_ports: Option<(u16, u16)>,
    /// Limit of open files.
    pub open_files: Limit,
    /// Limit of locked memory, bytes.
    pub locked_memory: Limit,
    /// `/dev/shm`; `None` where it is not mounted.
    pub shared_memory: Option<SharedMemory>,
    /// GPUs of this machine; empty without any.
    pub gpus: Vec<GpuFacts>,
    /// Main memory, bytes.
    pub memory_bytes: Option<u64>,
    /// The Slurm job that this process is in.
    pub slurm: Option<SlurmFacts>,
    /// The cluster, under `BACKEND=k8s`.
    pub kubernetes: Option<KubernetesFacts>,
    /// The daemon, under `BACKEND=docker`.
    pub docker: Option<DockerFacts>,
    /// Ranks of this launch; `None` when nothing is being launched.
    pub world_size: Option<u32>,
}

impl Facts {
    /// Looks at everything that `settings` name. `world_size` is given when a run is being launched.
    pub fn probe(settings: &Settings, world_size: Option<u32>) -> Self {
        let s = settings;
        // The network answers when it likes; files are read meanwhile.
        let (kubernetes, (docker, local)) = std::thread::scope(|scope| {
            let kubernetes = scope.spawn(|| (s.run.backend == Backend::K8s).then(|| remote::kubernetes(s)));
            let docker = (s.run.backend == Backend::Docker).then(|| remote::docker(s));
            let local = Self::local(s, world_size);
            let kubernetes = kubernetes.join().unwrap_or_else(|_| {
                Some(KubernetesFacts::unanswered(
                    "the probe of the cluster panicked".into(),
                ))
            });
            (kubernetes, (docker, local))
        });
        Self {
            kubernetes,
            docker,
            ..local
        }
    }

    fn local(s: &Settings, world_size: Option<u32>) -> Self {
        let train = s.run.kind == RunKind::Train;
        Self {
            model: model::probe(&s.model.path),
            train_index: match index_file(s) {
                Some(file) => tasks::probe(file),
                None => Err("this kind of run has no index".into()),
            },
            val_index: s.data.val_files.as_deref().filter(|_| train).map(tasks::probe),
            inputs: inputs(s),
            folders: folders::probe(s),
            held: folders::held(s),
            sandbox: (s.run.backend == Backend::Process)
                .then(|| machine::process_sandbox(s.sandbox.rootfs.as_deref())),
            scaffold_runtime: scaffold_runtime(s),
            proxy_port: (s.proxy.port != 0).then(|| machine::port(&s.proxy.host, s.proxy.port)),
            address: machine::address(),
            ephemeral_ports: machine::ephemeral_ports(),
            open_files: machine::limit(libc::RLIMIT_NOFILE),
            locked_memory: machine::limit(libc::RLIMIT_MEMLOCK),
            shared_memory: machine::shared_memory(),
            gpus: machine::gpus(),
            memory_bytes: crate::observe::memory::total(),
            slurm: slurm::probe(),
            kubernetes: None,
            docker: None,
            world_size,
        }
    }
}

/// The index that the run draws tasks from.
pub fn index_file(s: &Settings) -> Option<&Path> {
    match s.run.kind {
        RunKind::Train => Some(&s.data.train_files),
        RunKind::Infer => s.infer.as_ref().map(|infer| infer.index_file.as_path()),
        RunKind::Eval => None,
    }
}

/// Looks for the runtime tree of the chosen agent and at the size of every file in it.
fn scaffold_runtime(s: &Settings) -> Option<Result<String, String>> {
    if s.run.backend != Backend::Process {
        return None;
    }
    let name = s.run.scaffold.name();
    let agent = &s.agent;
    if let Some(folder) = agent
        .custom_runtime
        .as_ref()
        .filter(|_| s.run.scaffold == Scaffold::Custom)
    {
        return Some(if folder.is_dir() {
            Ok(format!("SCAFFOLD_RUNTIME={}", folder.display()))
        } else {
            Err(format!("SCAFFOLD_RUNTIME={} is not a folder", folder.display()))
        });
    }
    let (scaffold, pinned) = RUNTIMES.iter().find(|(known, _)| *known == name)?;
    let config = RuntimeConfig {
        root: agent.runtimes.clone(),
        version: agent.version.clone(),
    };
    let found = Runtime::find(scaffold, pinned, &config).and_then(|runtime| {
        runtime.check()?;
        Ok(format!(
            "{name} {} in {}",
            runtime.version(),
            runtime.host().display()
        ))
    });
    Some(found.map_err(|error| error.to_string()))
}

/// Paths that evaluations and sampling runs read besides an index.
fn inputs(s: &Settings) -> Vec<(&'static str, String, bool)> {
    let dataset = s.eval.as_ref().and_then(|eval| eval.dataset_path.as_ref());
    let instances = s.infer.as_ref().and_then(|infer| infer.instances_file.as_ref());
    [("DATASET_PATH", dataset), ("INSTANCES_FILE", instances)]
        .into_iter()
        .filter_map(|(name, path)| path.map(|p| (name, p.display().to_string(), p.exists())))
        .collect()
}
