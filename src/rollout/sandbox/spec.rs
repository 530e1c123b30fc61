//! What is asked of a sandbox and what it answers.

use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

/// Bytes of a command's output that a log file keeps when the caller has no other wish.
pub const DEFAULT_LOG_CAP_BYTES: u64 = 4 << 20;

/// Whose sandbox it is. Kept beside the sandbox, so that a later run can find and delete it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Labels {
    /// Run (experiment and attempt).
    pub run: String,
    /// Trial key.
    pub trial: String,
    /// Process that owns it, stable over restarts of the same job, for example `head` or `sidecar-3`.
    pub owner: String,
}

/// A file or folder of the host that a sandbox sees and cannot change. Programs in it run, their
/// set-user-id bits do not count.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReadOnlyMount {
    /// File or folder on the host.
    pub host: PathBuf,
    /// Absolute path inside; made when it is not there.
    pub inside: String,
}

/// A sandbox to start.
#[derive(Clone, Debug)]
pub struct SandboxSpec {
    /// Name in logs and of its folder; unique among living sandboxes of the backend.
    pub name: String,
    /// Whose it is.
    pub labels: Labels,
    /// The task's `environment/` folder: build context and, where there is one, `Dockerfile`.
    pub environment: Option<PathBuf>,
    /// Working directory of commands; wins over the Dockerfile's `WORKDIR`.
    pub workdir: Option<String>,
    /// Processors; fractions allowed.
    pub cpus: Option<f64>,
    /// Memory of all processes together, MiB.
    pub memory_mb: Option<u64>,
    /// Largest single file, MiB.
    pub storage_mb: Option<u64>,
    /// Processes and threads that may exist at once.
    pub pids_limit: Option<u32>,
    /// The sandbox ends by itself after this time.
    pub wall_limit: Duration,
    /// Time for start and Dockerfile together.
    pub setup_timeout: Duration,
    /// Unix socket of the proxy; without one there is no way out at all.
    pub proxy_socket: Option<PathBuf>,
    /// Environment of every command.
    pub env: BTreeMap<String, String>,
    /// Files of the host, such as an agent's runtime. A backend that cannot mount them refuses the sandbox
    /// and names itself.
    pub mounts: Vec<ReadOnlyMount>,
}

impl SandboxSpec {
    /// A sandbox without limits but one hour of life, no task and no proxy.
    pub fn new(name: impl Into<String>) -> Self {
        Self {
            name: name.into(),
            labels: Labels::default(),
            environment: None,
            workdir: None,
            cpus: None,
            memory_mb: None,
            storage_mb: None,
            pids_limit: None,
            wall_limit: Duration::from_secs(3600),
            setup_timeout: Duration::from_secs(600),
            proxy_socket: None,
            env: BTreeMap::new(),
            mounts: Vec::new(),
        }
    }
}

/// Where a command's combined output goes.
#[derive(Clone, Debug)]
pub struct LogFile {
    /// File on the host; created or overwritten, its folder must exist.
    pub path: PathBuf,
    /// Bytes kept; a note and the tail of the output follow what was cut.
    pub cap_bytes: u64,
}

impl LogFile {
    /// A log of at most [`DEFAULT_LOG_CAP_BYTES`].
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self {
            path: path.into(),
            cap_bytes: DEFAULT_LOG_CAP_BYTES,
        }
    }
}

/// A command to run.
#[derive(Clone, Debug, Default)]
pub struct ExecSpec {
    /// Program and arguments; the program is looked up in `PATH` of the sandbox.
    pub argv: Vec<String>,
    /// Added to the sandbox's environment.
    pub env: BTreeMap<String, String>,
    /// Working directory; the sandbox's own when absent.
    pub cwd: Option<String>,
    /// User name or id; the sandbox's user (root) when absent.
    pub user: Option<String>,
    /// The command and all its descendants are killed after this time; no limit of its own when absent
    /// (the sandbox's wall-time limit still holds).
    pub timeout: Option<Duration>,
    /// Keeps the output on the host.
    pub log: Option<LogFile>,
}

impl ExecSpec {
    /// A command with arguments and nothing else.
    pub fn new<S: Into<String>>(argv: impl IntoIterator<Item = S>) -> Self {
        Self {
            argv: argv.into_iter().map(Into::into).collect(),
            ..Self::default()
        }
    }

    /// `/bin/sh -c script`.
    pub fn shell(script: impl Into<String>) -> Self {
        Self::new(["/bin/sh".to_string(), "-c".to_string(), script.into()])
    }
}

/// How a command ended.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ExecResult {
    /// Exit status; `None` when a signal ended it.
    pub exit_code: Option<i32>,
    /// Signal that ended it.
    pub signal: Option<i32>,
    /// The time limit ended it.
    pub timed_out: bool,
    /// A process of the sandbox was killed for memory while it ran.
    pub oom_killed: bool,
    /// The process limit ended it.
    pub pids_limit_hit: bool,
    /// Last bytes of the combined output (lossy UTF-8), at most 64 KiB.
    pub tail: String,
    /// Bytes written to stdout and stderr, those not kept included.
    pub output_bytes: u64,
}

impl ExecResult {
    /// Ended by itself with status 0.
    pub fn success(&self) -> bool {
        self.exit_code == Some(0)
    }
}

/// What enforces the limits of sandboxes on this machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LimitsBy {
    /// Control groups, version 1 or 2, below the named folder.
    Cgroup {
        /// 1 or 2.
        version: u8,
        /// Folders in which each sandbox gets its own group.
        parents: Vec<PathBuf>,
    },
    /// Resource limits, a processor set, and a watchdog on the resident memory and the number of the
    /// sandbox's processes.
    Watchdog {
        /// Why control groups cannot be used.
        because: String,
    },
}

impl fmt::Display for LimitsBy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            LimitsBy::Cgroup { version, .. } => write!(f, "cgroup v{version}"),
            LimitsBy::Watchdog { because } => write!(f, "rlimits and a watchdog ({because})"),
        }
    }
}

/// What [`super::SandboxBackend::check`] found.
#[derive(Clone, Debug)]
pub struct BackendReport {
    /// Backend and version of what runs it, for example `bubblewrap 0.8.0`.
    pub runtime: String,
    /// What enforces the limits.
    pub limits: LimitsBy,
    /// Where the root file system comes from.
    pub root: String,
    /// Time that the probe sandbox took to start.
    pub probe: Duration,
}

impl fmt::Display for BackendReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            runtime,
            limits,
            root,
            probe,
        } = self;
        write!(
            f,
            "{runtime}, limits by {limits}, root {root}, started in {} ms",
            probe.as_millis()
        )
    }
}
