//! A task folder that can run.

use super::reader::{Finding, Severity};
use super::{NetworkMode, TaskConfig};
use crate::base::files;
use std::{
    fmt::Write as _,
    io,
    path::{Path, PathBuf},
    time::Duration,
};

/// Why a task cannot run.
#[derive(Debug, thiserror::Error)]
pub enum TaskError {
    /// Something of the folder is missing or unusable.
    #[error("{}: {problem}", path.display())]
    Folder {
        /// File or folder.
        path: PathBuf,
        /// What is wrong with it and what is needed.
        problem: String,
    },
    /// The file or folder could not be read.
    #[error("cannot read {}: {source}", path.display())]
    Io {
        /// File or folder.
        path: PathBuf,
        /// The operating system's error.
        #[source]
        source: io::Error,
    },
    /// `task.toml` breaks the format, or asks for what is not run here.
    #[error("{}", lines(findings))]
    Invalid {
        /// The errors; never empty.
        findings: Vec<Finding>,
    },
}

impl TaskError {
    /// The same as a list, one entry a problem.
    pub fn into_findings(self) -> Vec<Finding> {
        let (file, problem) = match self {
            TaskError::Invalid { findings } => return findings,
            TaskError::Folder { path, problem } => (path, problem),
            TaskError::Io { path, source } => (path, format!("cannot be read: {source}")),
        };
        vec![Finding {
            severity: Severity::Error,
            file: file.display().to_string(),
            line: 0,
            field: String::new(),
            problem,
        }]
    }
}

fn lines(findings: &[Finding]) -> String {
    let mut text = String::new();
    for (i, finding) in findings.iter().enumerate() {
        let separator = if i == 0 { "" } else { "\n" };
        // Writing to a string cannot fail.
        let _ = write!(text, "{separator}{finding}");
    }
    text
}

/// A task that can run.
#[derive(Clone, Debug, PartialEq)]
pub struct TaskSpec {
    /// The folder, absolute.
    pub dir: PathBuf,
    /// `[task] name`, or the folder's name.
    pub name: String,
    /// `metadata.family`, else the first keyword, else empty. Splits are stratified by it.
    pub family: String,
    /// `instruction.md` without leading canary comments.
    pub instruction: String,
    /// The whole `task.toml`.
    pub config: TaskConfig,
    /// What deserves attention and does not prevent a run.
    pub warnings: Vec<Finding>,
}

impl TaskSpec {
    /// Loads a task folder.
    pub fn load(dir: &Path) -> Result<Self, TaskError> {
        let dir = dir.canonicalize().map_err(|source| {
            if source.kind() == io::ErrorKind::NotFound {
                TaskError::Folder {
                    path: dir.to_owned(),
                    problem: "the task folder does not exist".to_owned(),
                }
            } else {
                TaskError::Io {
                    path: dir.to_owned(),
                    source,
                }
            }
        })?;
        if !dir.is_dir() {
            return Err(TaskError::Folder {
                path: dir,
                problem: "is not a folder; a task is a folder with task.toml in it".to_owned(),
            });
        }
        let file = dir.join("task.toml");
        let text = read_required(&file, "every task folder needs one")?;
        let (config, mut findings) = TaskConfig::parse(&file.display().to_string(), &text);
        unsupported(&config, &file, &mut findings);
        let (warnings, errors): (Vec<_>, Vec<_>) = findings
            .into_iter()
            .partition(|f| f.severity == Severity::Warning);
        if !errors.is_empty() {
            return Err(TaskError::Invalid { findings: errors });
        }

        let instruction_path = dir.join("instruction.md");
        let instruction = read_required(&instruction_path, "it tells the agent what to do")?;
        let instruction = strip_canary(&instruction).to_owned();
        if instruction.trim().is_empty() {
            return Err(TaskError::Folder {
                path: instruction_path,
                problem: "is empty; write what the agent shall do".to_owned(),
            });
        }
        check_folders(&dir, &config)?;

        let folder_name = dir
            .file_name()
            .map_or_else(|| "task".into(), |n| n.to_string_lossy());
        let name = config
            .task
            .as_ref()
            .map_or_else(|| folder_name.into_owned(), |t| t.name.clone());
        let family = config
            .metadata
            .get("family")
            .and_then(|v| v.as_str())
            .or_else(|| Some(config.task.as_ref()?.keywords.first()?.as_str()))
            .unwrap_or_default()
            .to_owned();
        Ok(Self {
            name,
            family,
            instruction,
            config,
            warnings,
            dir,
        })
    }

    /// `environment/`: Dockerfile and build context. Absent when the task names a prebuilt image.
    pub fn environment_dir(&self) -> PathBuf {
        self.dir.join("environment")
    }

    /// `tests/`.
    pub fn tests_dir(&self) -> PathBuf {
        self.dir.join("tests")
    }

    /// `solution/solve.sh`, where the task has one.
    pub fn solution_script(&self) -> Option<PathBuf> {
        let path = self.dir.join("solution/solve.sh");
        path.is_file().then_some(path)
    }

    /// `[agent] timeout_sec`.
    pub fn agent_timeout(&self) -> Option<Duration> {
        self.config.agent.timeout_sec.map(Duration::from_secs_f64)
    }

    /// `[verifier] timeout_sec`.
    pub fn verifier_timeout(&self) -> Duration {
        Duration::from_secs_f64(self.config.verifier.timeout_sec)
    }

    /// `[environment] build_timeout_sec`.
    pub fn build_timeout(&self) -> Duration {
        Duration::from_secs_f64(self.config.environment.build_timeout_sec)
    }

    /// The name as a path segment: lower-case letters, digits and `-`, at most 48 bytes.
    pub fn slug(&self) -> String {
        let short = self.name.rsplit('/').next().unwrap_or(&self.name);
        let mut slug = String::new();
        for c in short.chars().map(|c| c.to_ascii_lowercase()) {
            if c.is_ascii_alphanumeric() {
                slug.push(c);
            } else if !slug.is_empty() && !slug.ends_with('-') {
                slug.push('-');
            }
        }
        slug.truncate(48);
        let slug = slug.trim_end_matches('-');
        if slug.is_empty() { "task" } else { slug }.to_owned()
    }
}

fn read_required(path: &Path, why: &str) -> Result<String, TaskError> {
    files::read_text(path).map_err(|source| match source.kind() {
        io::ErrorKind::NotFound => TaskError::Folder {
            path: path.to_owned(),
            problem: format!("is missing; {why}"),
        },
        io::ErrorKind::InvalidData => TaskError::Folder {
            path: path.to_owned(),
            problem: "is not UTF-8 text".to_owned(),
        },
        _ => TaskError::Io {
            path: path.to_owned(),
            source,
        },
    })
}

/// Drops leading comment lines that hold the word "canary" (marks of benchmark files that no agent should
/// see) and the blank lines after them.
fn strip_canary(text: &str) -> &str {
    let is_canary = |line: &str| {
        let line = line.trim().to_lowercase();
        line.contains("canary")
            && (line.starts_with('#') || (line.starts_with("<!--") && line.ends_with("-->")))
    };
    let mut rest = text;
    let mut in_canary = true;
    while let Some(line) = rest.split_inclusive('\n').next() {
        in_canary = in_canary && is_canary(line);
        if !in_canary && !line.trim().is_empty() {
            break;
        }
        rest = &rest[line.len()..];
    }
    rest
}

fn check_folders(dir: &Path, config: &TaskConfig) -> Result<(), TaskError> {
    let environment = dir.join("environment");
    if config.environment.docker_image.is_none() && !environment.is_dir() {
        return Err(TaskError::Folder {
            path: environment,
            problem: "is missing; add the folder with a Dockerfile, or name a prebuilt image in \
                      [environment] docker_image"
                .to_owned(),
        });
    }
    let script = dir.join("tests/test.sh");
    let text = read_required(&script, "without a test script the task has no reward")?;
    let is_idle = |line: &str| line.trim().is_empty() || line.trim_start().starts_with('#');
    if text.lines().all(is_idle) {
        return Err(TaskError::Folder {
            path: script,
            problem: "holds no command, so that the task has no reward; write the checks and \
                      /logs/verifier/reward.txt"
                .to_owned(),
        });
    }
    for tree in ["tests", "solution"] {
        stay_inside(&dir.join(tree), dir)?;
    }
    Ok(())
}

/// Every link of a tree must lead to a place inside the task, or the sandbox would be given host files.
fn stay_inside(path: &Path, root: &Path) -> Result<(), TaskError> {
    let read = |source| TaskError::Io {
        path: path.to_owned(),
        source,
    };
    let metadata = match path.symlink_metadata() {
        Ok(metadata) => metadata,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(e) => return Err(read(e)),
    };
    if metadata.is_symlink() {
        let target = path.canonicalize().map_err(read)?;
        if !target.starts_with(root) {
            return Err(TaskError::Folder {
                path: path.to_owned(),
                problem: format!("leads out of the task, to {}", target.display()),
            });
        }
        if path.starts_with(&target) {
            return Err(TaskError::Folder {
                path: path.to_owned(),
                problem: "is a link to a folder that holds it".to_owned(),
            });
        }
        return Ok(());
    }
    if metadata.is_dir() {
        if path.join(".harborignore").exists() {
            return Err(TaskError::Folder {
                path: path.join(".harborignore"),
                problem: "ignore rules are not applied here; remove what the sandbox must not get".to_owned(),
            });
        }
        for entry in path.read_dir().map_err(read)? {
            stay_inside(&entry.map_err(read)?.path(), root)?;
        }
    }
    Ok(())
}

/// What the format allows and this program does not run.
fn unsupported(config: &TaskConfig, file: &Path, findings: &mut Vec<Finding>) {
    let mut find = |severity, condition: bool, field: &str, problem: &str| {
        if condition {
            findings.push(Finding {
                severity,
                file: file.display().to_string(),
                line: 0,
                field: field.to_owned(),
                problem: problem.to_owned(),
            });
        }
    };
    find(
        Severity::Warning,
        config.environment.network.mode == Some(NetworkMode::Allowlist)
            || config.agent.network.mode == Some(NetworkMode::Allowlist),
        "allowed_hosts",
        "has no effect: sandboxes reach the session's proxy and nothing else",
    );
    find(
        Severity::Warning,
        !config.artifacts.is_empty(),
        "artifacts",
        "has no effect: artifacts are not collected",
    );
    find(
        Severity::Warning,
        config.environment.docker_image.is_some(),
        "environment.docker_image",
        "is not pulled by the process backend: its root is that of this machine, or SANDBOX_ROOTFS",
    );
    let mut refuse = |condition, field, problem| find(Severity::Unsupported, condition, field, problem);
    let not_seconds = |value: f64| !(value.is_finite() && value > 0.0 && value < 1e9);
    let environment = &config.environment;
    refuse(
        !config.steps.is_empty(),
        "steps",
        "tasks of several steps are not run",
    );
    refuse(
        environment.os != "linux",
        "environment.os",
        "only linux tasks are run",
    );
    refuse(
        config.verifier.is_separate(),
        "verifier.environment_mode",
        "a separate verifier environment is not run; the tests run in the agent's sandbox",
    );
    refuse(
        !config.verifier.collect.is_empty(),
        "verifier.collect",
        "collect hooks are not run",
    );
    refuse(
        environment.gpus.is_some_and(|n| n > 0),
        "environment.gpus",
        "sandboxes have no GPU",
    );
    refuse(
        environment.tpu.is_some(),
        "environment.tpu",
        "sandboxes have no TPU",
    );
    refuse(
        !environment.mcp_servers.is_empty(),
        "environment.mcp_servers",
        "MCP servers are not offered to the agent",
    );
    refuse(
        environment.skills_dir.is_some(),
        "environment.skills_dir",
        "skills are not offered to the agent",
    );
    refuse(
        environment.healthcheck.is_some(),
        "environment.healthcheck",
        "health checks are not run",
    );
    refuse(
        config
            .agent
            .user
            .as_deref()
            .is_some_and(|user| user != "root" && user != "0"),
        "agent.user",
        "agents run as root of their sandbox",
    );
    let no_seconds = "must be a positive number of seconds";
    refuse(
        config.agent.timeout_sec.is_some_and(not_seconds),
        "agent.timeout_sec",
        no_seconds,
    );
    refuse(
        not_seconds(config.verifier.timeout_sec),
        "verifier.timeout_sec",
        no_seconds,
    );
    refuse(
        not_seconds(environment.build_timeout_sec),
        "environment.build_timeout_sec",
        no_seconds,
    );
    refuse(
        environment.cpus.is_some_and(|n| n <= 0.0),
        "environment.cpus",
        "must be above 0",
    );
    for (field, size) in [
        ("environment.memory_mb", environment.memory_mb),
        ("environment.storage_mb", environment.storage_mb),
    ] {
        refuse(size.is_some_and(|n| n <= 0), field, "must be above 0");
    }
}
