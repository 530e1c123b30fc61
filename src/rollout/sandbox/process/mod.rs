//! `BACKEND=process`: sandboxes made of namespaces by bubblewrap, for nodes without a container service.
//!
//! ```text
//! this process ──spawner thread──> bwrap ──> legorl-agent init (pid 1)  <── exec, files ── control socket
//!      │                          namespaces        ├─ agent, verifier, …
//!      └─ proxy's unix socket ──bound──> /run/legorl/proxy.sock <── forwarder ── 127.0.0.1:4141
//! ```
//!
//! - Namespaces: user, mount, pid, ipc, uts, net, cgroup. Inside, root is the user that runs this process;
//!   no other user exists. Capabilities are those of files and processes only, further user namespaces are
//!   disabled, and the settings of the kernel below `/proc/sys` are read-only.
//! - Root: [`root`]. Files of a sandbox live in its own folder below `state_dir` and go with it.
//! - Limits: [`limits`]: control groups where this process may make them, else resource limits and a
//!   watchdog inside; [`super::BackendReport`] says which.
//! - Ends: three independent ways, so that none survives. bwrap asks the kernel for SIGKILL when its
//!   parent dies (and is therefore started by a thread that lives as long as this process, since the
//!   kernel means the *thread*); the first process exits when its control socket closes; and with it the
//!   kernel kills the pid namespace.
//! - Leftovers: [`instance`].

mod bwrap;
mod channel;
pub mod helper;
mod instance;
mod limits;
mod mounts;
mod root;
mod running;
mod spawner;

#[cfg(test)]
mod tests;

use super::{
    dockerfile, BackendReport, ExecSpec, Labels, LimitsBy, Sandbox, SandboxBackend, SandboxError, SandboxSpec,
};
use async_trait::async_trait;
use root::{Base, Layout};
use running::ProcessSandbox;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::OnceCell;

/// Time for bubblewrap and the first process to come up, on a machine under load.
const BOOT_TIMEOUT: Duration = Duration::from_secs(30);

/// Where a [`ProcessBackend`] keeps its files and what its sandboxes look like.
#[derive(Clone, Debug)]
pub struct ProcessBackendConfig {
    /// Folder for the files of sandboxes: local to the node, with room for what agents write. Several
    /// runs and owners may share it.
    pub state_dir: PathBuf,
    /// Tree to use as root (`SANDBOX_ROOTFS`); the system folders of this machine when absent.
    pub rootfs: Option<PathBuf>,
    /// The helper; searched for by [`helper::find`] when absent.
    pub helper: Option<PathBuf>,
    /// Process that owns the sandboxes, stable over restarts of the same job.
    pub owner: String,
}

/// See the module.
pub struct ProcessBackend {
    config: ProcessBackendConfig,
    instance: OnceCell<Arc<instance::Instance>>,
    base: OnceCell<Arc<Base>>,
    limiter: OnceCell<Arc<limits::Limiter>>,
}

impl ProcessBackend {
    /// A backend; nothing is touched before the first call.
    pub fn new(config: ProcessBackendConfig) -> Self {
        Self {
            config,
            instance: OnceCell::new(),
            base: OnceCell::new(),
            limiter: OnceCell::new(),
        }
    }

    /// What enforces the limits here.
    pub async fn limits(&self) -> Result<LimitsBy, SandboxError> {
        Ok(self.limiter().await?.report())
    }

    async fn instance(&self) -> Result<Arc<instance::Instance>, SandboxError> {
        let make = || async {
            let (dir, owner) = (self.config.state_dir.clone(), self.config.owner.clone());
            blocking("making the state folder", move || {
                instance::Instance::create(&dir, &owner)
            })
            .await
            .map(Arc::new)
        };
        self.instance.get_or_try_init(make).await.cloned()
    }

    async fn limiter(&self) -> Result<Arc<limits::Limiter>, SandboxError> {
        let make = || async {
            let tag = self.instance().await?.tag().to_string();
            blocking("looking for control groups", move || {
                Ok(limits::Limiter::detect(&tag))
            })
            .await
            .map(Arc::new)
        };
        self.limiter.get_or_try_init(make).await.cloned()
    }

    /// The shared part of all roots. A first sandbox proves that an overlay can be mounted; without
    /// `SANDBOX_ROOTFS` there is another layout, and the report says so.
    async fn base(&self) -> Result<Arc<Base>, SandboxError> {
        let make = || async {
            let overlay = self.make_base(Layout::Overlay).await?;
            let probe = SandboxSpec::new(format!("overlay-{}", std::process::id()));
            match self.boot_on(&probe, overlay.clone()).await {
                Ok(sandbox) => Box::new(sandbox).delete().await.map(|()| overlay),
                Err(SandboxError::Unavailable { what, detail, .. })
                    if what == bwrap::OVERLAY && self.config.rootfs.is_none() =>
                {
                    let because = detail.lines().last().unwrap_or_default().to_string();
                    self.make_base(Layout::Folders { because }).await
                }
                Err(e) => Err(e),
            }
        };
        self.base.get_or_try_init(make).await.cloned()
    }

    async fn make_base(&self, layout: Layout) -> Result<Arc<Base>, SandboxError> {
        let (instance, rootfs) = (self.instance().await?, self.config.rootfs.clone());
        let make = move || Base::create(&instance, layout, rootfs.as_deref()).map(Arc::new);
        blocking("making the shared part of sandboxes", make).await
    }

    /// Starts namespaces and the first process, without the task's Dockerfile.
    async fn boot(&self, spec: &SandboxSpec) -> Result<ProcessSandbox, SandboxError> {
        let base = self.base().await?;
        self.boot_on(spec, base).await
    }

    async fn boot_on(&self, spec: &SandboxSpec, base: Arc<Base>) -> Result<ProcessSandbox, SandboxError> {
        let helper = helper::resolve(self.config.helper.as_deref())?;
        let bwrap = bwrap::find()?;
        let (instance, limiter) = (self.instance().await?, self.limiter().await?);
        let (mut spec, maker) = (spec.clone(), instance.clone());
        let launch = blocking("making the sandbox folder", move || {
            root::check_hidden(&spec, maker.path())?;
            mounts::resolve(&mut spec, maker.path())?;
            let folder = maker.sandbox(&spec)?;
            let root = base.root(&folder, &spec.mounts)?;
            let limits = limiter.limit(&spec, &folder)?;
            bwrap::Launch::new(bwrap, helper, spec, folder, root, limits)
        })
        .await?;
        launch.start(instance, BOOT_TIMEOUT).await
    }
}

#[async_trait]
impl SandboxBackend for ProcessBackend {
    fn name(&self) -> &'static str {
        "process"
    }

    async fn check(&self) -> Result<BackendReport, SandboxError> {
        let runtime = bwrap::version()?;
        let mut spec = SandboxSpec::new(format!("probe-{}", std::process::id()));
        spec.labels = Labels {
            owner: self.config.owner.clone(),
            ..Labels::default()
        };
        let begin = Instant::now();
        let sandbox = Box::new(self.boot(&spec).await?);
        let probe = begin.elapsed();
        let version = ExecSpec::new([legorl_agent::protocol::HELPER_PATH, "--version"]);
        let result = sandbox.exec(version).await;
        sandbox.delete().await?;
        let result = result?;
        if !result.success() {
            return Err(SandboxError::Unavailable {
                what: "sandboxes".into(),
                detail: format!("the probe command failed: {result:?}"),
                fix: "see the output above".into(),
            });
        }
        Ok(BackendReport {
            runtime,
            limits: self.limits().await?,
            root: match (&self.config.rootfs, self.base().await?.layout()) {
                (Some(tree), _) => format!("`{}` under an overlay", tree.display()),
                (None, Layout::Overlay) => "of this machine's system folders under an overlay".into(),
                (None, Layout::Folders { because }) => {
                    format!("of this machine's system folders and private folders (no overlay: {because})")
                }
            },
            probe,
        })
    }

    async fn start(&self, spec: SandboxSpec) -> Result<Box<dyn Sandbox>, SandboxError> {
        let setup = async {
            let mut sandbox = self.boot(&spec).await?;
            if let Some(environment) = &spec.environment {
                let image = dockerfile::apply(environment, &sandbox).await?;
                sandbox.adopt(image, &spec);
            }
            sandbox.make_workdir().await?;
            Ok(sandbox)
        };
        match tokio::time::timeout(spec.setup_timeout, setup).await {
            Ok(sandbox) => sandbox.map(|s| Box::new(s) as Box<dyn Sandbox>),
            Err(_) => Err(SandboxError::Timeout {
                name: spec.name.clone(),
                what: "its start and its Dockerfile".into(),
                waited: spec.setup_timeout,
            }),
        }
    }

    async fn reap(&self) -> Result<usize, SandboxError> {
        let (dir, owner) = (self.config.state_dir.clone(), self.config.owner.clone());
        blocking("reaping", move || instance::reap(&dir, &owner)).await
    }
}

/// Runs file system work off the async threads.
async fn blocking<T: Send + 'static>(
    what: &'static str,
    work: impl FnOnce() -> Result<T, SandboxError> + Send + 'static,
) -> Result<T, SandboxError> {
    match tokio::task::spawn_blocking(work).await {
        Ok(result) => result,
        Err(join) => Err(SandboxError::Unavailable {
            what: what.into(),
            detail: join.to_string(),
            fix: "this is a fault of the program; please report it with the log".into(),
        }),
    }
}
