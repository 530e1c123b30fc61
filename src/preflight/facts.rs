//! What the machine and the files are like, seen without changing anything.
//!
//! Probing never fails: what cannot be found out is recorded as the reason, and the rules judge it.

use crate::{
    config::{
        values::{Backend, ToolCallParser},
        Settings,
    },
    model::{
        chat_template::ChatTemplate,
        hf::{Checkpoint, ModelConfig},
        tool_calls::{format_by_name, UnknownFormat},
    },
    rollout::{sandbox::process::helper, task::TaskIndex},
};
use std::{
    fs,
    net::TcpListener,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::{Duration, Instant},
};

/// Tasks of an index that are loaded as a sample.
const SAMPLED_TASKS: usize = 16;

/// Longest time for the trial start of a sandbox.
const SANDBOX_DEADLINE: Duration = Duration::from_secs(10);

/// Facts about one run on this machine.
#[derive(Clone, Debug)]
pub struct Facts {
    /// The starting policy.
    pub model: Result<ModelFacts, String>,
    /// The training index.
    pub train_index: Result<IndexFacts, String>,
    /// The held-out index, where the run has one.
    pub val_index: Option<Result<IndexFacts, String>>,
    /// Folders that the run writes to.
    pub folders: Vec<FolderFacts>,
    /// A process sandbox was started: its version line, or what failed. `None` for other backends.
    pub sandbox: Option<Result<String, String>>,
    /// The proxy's port could be bound; `None` when any free port will do.
    pub proxy_port: Option<Result<(), String>>,
    /// Soft and hard limit of open files.
    pub open_files: (u64, u64),
    /// Ranks of this launch; `None` when nothing is being launched.
    pub world_size: Option<u32>,
}

/// Facts about a policy folder.
#[derive(Clone, Debug)]
pub struct ModelFacts {
    /// `model_type` of config.json.
    pub model_type: String,
    /// Longest sequence that it was made for.
    pub max_position_embeddings: u64,
    /// Parameters.
    pub num_parameters: u64,
    /// Weights and their tensors are complete.
    pub weights: Result<(), String>,
    /// Files that are missing from the folder.
    pub missing: Vec<&'static str>,
    /// Tool-call markup that its chat template writes; `None` for one that no parser here knows.
    pub markup: Result<Option<ToolCallParser>, String>,
}

/// Facts about a task index.
#[derive(Clone, Debug)]
pub struct IndexFacts {
    /// Rows.
    pub rows: usize,
    /// Tasks that were loaded.
    pub sampled: usize,
    /// What was wrong with some of them.
    pub problems: Vec<String>,
}

/// Facts about a folder that the run writes to.
#[derive(Clone, Debug)]
pub struct FolderFacts {
    /// Variable that names it.
    pub variable: &'static str,
    /// The folder.
    pub path: PathBuf,
    /// It, or the nearest existing parent, can be written to.
    pub writable: Result<(), String>,
    /// Bytes that this user may still write there.
    pub free_bytes: Option<u64>,
}

impl Facts {
    /// Looks at everything that `settings` name. `world_size` is given when a run is being launched.
    pub fn probe(settings: &Settings, world_size: Option<u32>) -> Self {
        let folders = [
            ("RUN_DIR", &settings.paths.run),
            ("CKPTS_DIR", &settings.paths.checkpoints),
            ("LOG_DIR", &settings.paths.logs),
            ("HARBOR_TRIALS_DIR", &settings.paths.trials),
        ];
        Self {
            model: model(&settings.model.path),
            train_index: index(&settings.data.train_files),
            val_index: settings.data.val_files.as_deref().map(index),
            folders: folders
                .into_iter()
                .map(|(variable, path)| folder(variable, path))
                .collect(),
            sandbox: (settings.run.backend == Backend::Process)
                .then(|| process_sandbox(settings.sandbox.rootfs.as_deref())),
            proxy_port: (settings.proxy.port != 0).then(|| port(&settings.proxy.host, settings.proxy.port)),
            open_files: open_files(),
            world_size,
        }
    }
}

fn model(dir: &Path) -> Result<ModelFacts, String> {
    if !dir.is_dir() {
        return Err(format!("{} is not a folder", dir.display()));
    }
    let config = ModelConfig::from_dir(dir).map_err(|error| error.to_string())?;
    let missing = ["tokenizer.json"]
        .into_iter()
        .filter(|file| !dir.join(file).is_file())
        .collect();
    Ok(ModelFacts {
        model_type: config.model_type.name().to_owned(),
        max_position_embeddings: config.max_position_embeddings as u64,
        num_parameters: config.num_parameters() as u64,
        weights: weights(dir, &config),
        missing,
        markup: markup(dir),
    })
}

/// Every tensor of the architecture is there with its shape.
fn weights(dir: &Path, config: &ModelConfig) -> Result<(), String> {
    let checkpoint = Checkpoint::open(dir).map_err(|error| error.to_string())?;
    checkpoint.check(config).map_err(|error| error.to_string())
}

/// The parser that reads what the folder's own template writes.
fn markup(dir: &Path) -> Result<Option<ToolCallParser>, String> {
    let template = ChatTemplate::from_dir(dir).map_err(|error| error.to_string())?;
    match format_by_name(ToolCallParser::Auto.name(), &template) {
        Ok(format) => Ok(ToolCallParser::from_name(format.name())),
        Err(UnknownFormat::Template { problem }) => Err(problem),
        Err(_) => Ok(None),
    }
}

fn index(file: &Path) -> Result<IndexFacts, String> {
    let index = TaskIndex::open(file).map_err(|error| error.to_string())?;
    let rows = index.len();
    let sampled = rows.min(SAMPLED_TASKS);
    let incomplete = index.rows().iter().enumerate().filter_map(|(row, entry)| {
        let missing = ["task.toml", "instruction.md", "tests/test.sh"]
            .into_iter()
            .find(|f| !entry.dir.join(f).is_file())?;
        Some(format!(
            "{} row {row}: {}/{missing} is missing",
            file.display(),
            entry.dir.display()
        ))
    });
    let sample = (0..sampled).filter_map(|i| {
        // Spread over the whole index: first and last row are always among them.
        let row = if sampled < 2 {
            0
        } else {
            i * (rows - 1) / (sampled - 1)
        };
        index.load(row as u32).err().map(|error| error.to_string())
    });
    let mut problems: Vec<String> = incomplete.collect();
    if problems.is_empty() {
        problems.extend(sample);
    }
    Ok(IndexFacts {
        rows,
        sampled,
        problems,
    })
}

fn folder(variable: &'static str, path: &Path) -> FolderFacts {
    let existing = path.ancestors().find(|p| p.exists()).unwrap_or(Path::new("/"));
    let writable = if !existing.is_dir() {
        Err(format!("{} is not a folder", existing.display()))
    } else {
        access_write(existing)
            .map_err(|error| format!("{} cannot be written to: {error}", existing.display()))
    };
    FolderFacts {
        variable,
        path: path.to_path_buf(),
        writable,
        free_bytes: free_bytes(existing),
    }
}

fn path_bytes(path: &Path) -> std::io::Result<std::ffi::CString> {
    use std::os::unix::ffi::OsStrExt;
    std::ffi::CString::new(path.as_os_str().as_bytes()).map_err(std::io::Error::other)
}

fn access_write(path: &Path) -> std::io::Result<()> {
    let path = path_bytes(path)?;
    // SAFETY: `path` is a NUL-terminated string that lives through the call; access only reads it.
    let refused = unsafe { libc::access(path.as_ptr(), libc::W_OK | libc::X_OK) } != 0;
    if refused {
        Err(std::io::Error::last_os_error())
    } else {
        Ok(())
    }
}

fn free_bytes(path: &Path) -> Option<u64> {
    let path = path_bytes(path).ok()?;
    let mut stat = std::mem::MaybeUninit::<libc::statvfs>::uninit();
    // SAFETY: `path` is a NUL-terminated string and `stat` is large enough for one statvfs.
    let failed = unsafe { libc::statvfs(path.as_ptr(), stat.as_mut_ptr()) } != 0;
    if failed {
        return None;
    }
    // SAFETY: statvfs succeeded, so it has filled the structure.
    let stat = unsafe { stat.assume_init() };
    Some(stat.f_bavail * stat.f_frsize)
}

fn open_files() -> (u64, u64) {
    let mut limit = libc::rlimit {
        rlim_cur: 0,
        rlim_max: 0,
    };
    // SAFETY: `limit` is a valid rlimit that the call fills.
    let failed = unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &mut limit) } != 0;
    if failed {
        (0, 0)
    } else {
        (limit.rlim_cur, limit.rlim_max)
    }
}

fn port(host: &str, port: u16) -> Result<(), String> {
    // Bound for a moment and given back: nothing else tells whether the proxy can have it.
    TcpListener::bind((host, port))
        .map(|_| ())
        .map_err(|error| format!("{host}:{port}: {error}"))
}

/// Finds what a process sandbox needs, and starts the smallest one with the same namespaces.
fn process_sandbox(rootfs: Option<&Path>) -> Result<String, String> {
    if let Some(rootfs) = rootfs.filter(|path| !path.is_dir()) {
        return Err(format!("SANDBOX_ROOTFS={} is not a folder", rootfs.display()));
    }
    helper::find().map_err(|error| error.to_string())?;
    let run = |arguments: &[&str]| -> Result<String, String> {
        let mut child = Command::new("bwrap")
            .args(arguments)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .map_err(|error| match error.kind() {
                std::io::ErrorKind::NotFound => {
                    "the program `bwrap` is not installed (package bubblewrap)".to_owned()
                }
                _ => format!("bwrap cannot be started: {error}"),
            })?;
        let deadline = Instant::now() + SANDBOX_DEADLINE;
        while child.try_wait().map_err(|error| error.to_string())?.is_none() {
            if Instant::now() > deadline {
                // It is ours and it hangs; a second failure changes nothing.
                let _ = child.kill();
                let _ = child.wait();
                return Err(format!(
                    "a trial sandbox did not end within {} s",
                    SANDBOX_DEADLINE.as_secs()
                ));
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        let output = child.wait_with_output().map_err(|error| error.to_string())?;
        if output.status.success() {
            Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
        } else {
            Err(String::from_utf8_lossy(&output.stderr).trim().to_owned())
        }
    };
    run(&[
        "--unshare-all",
        "--die-with-parent",
        "--ro-bind",
        "/",
        "/",
        "--proc",
        "/proc",
        "/bin/true",
    ])
    .map_err(|problem| explain_bwrap(&problem))?;
    run(&["--version"])
}

fn explain_bwrap(problem: &str) -> String {
    let forbidden = |file: &str| fs::read_to_string(file).is_ok_and(|text| text.trim() == "0");
    if forbidden("/proc/sys/user/max_user_namespaces") {
        return format!("{problem}; user namespaces are forbidden (user.max_user_namespaces is 0)");
    }
    if forbidden("/proc/sys/kernel/unprivileged_userns_clone") {
        return format!("{problem}; user namespaces are forbidden (kernel.unprivileged_userns_clone is 0)");
    }
    problem.to_owned()
}
