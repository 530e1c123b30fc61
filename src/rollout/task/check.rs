//! Findings over many task folders.

use super::{Finding, Severity, TaskError, TaskSpec};
use std::{
    fmt, io,
    path::{Path, PathBuf},
};

/// One folder and what was found in it.
#[derive(Clone, Debug)]
pub struct CheckedTask {
    /// Folder, as given.
    pub dir: PathBuf,
    /// The task, if it can run.
    pub spec: Option<TaskSpec>,
    /// Errors first, then warnings.
    pub findings: Vec<Finding>,
}

/// Result of [`check_tasks`]; `Display` prints it for people.
#[derive(Clone, Debug, Default)]
pub struct TaskCheckReport {
    /// One entry a folder, in the order given.
    pub tasks: Vec<CheckedTask>,
}

impl TaskCheckReport {
    /// Tasks that can run.
    pub fn num_valid(&self) -> usize {
        self.tasks.iter().filter(|t| t.spec.is_some()).count()
    }

    /// True when every task can run and there is at least one.
    pub fn is_ok(&self) -> bool {
        !self.tasks.is_empty() && self.num_valid() == self.tasks.len()
    }
}

impl fmt::Display for TaskCheckReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for task in &self.tasks {
            for finding in &task.findings {
                writeln!(f, "{finding}")?;
            }
        }
        let warnings = self
            .tasks
            .iter()
            .flat_map(|t| &t.findings)
            .filter(|x| x.severity == Severity::Warning)
            .count();
        write!(
            f,
            "{} of {} tasks can run, {warnings} warnings",
            self.num_valid(),
            self.tasks.len()
        )
    }
}

/// The task folders of a folder: itself if it holds `task.toml` or `instruction.md`, else every folder directly
/// in it that does, by name. Folders without either file are not tasks.
pub fn find_tasks(root: &Path) -> Result<Vec<PathBuf>, TaskError> {
    let is_task = |dir: &Path| dir.join("task.toml").is_file() || dir.join("instruction.md").is_file();
    let read = |source: io::Error| match source.kind() {
        io::ErrorKind::NotFound => TaskError::Folder {
            path: root.to_owned(),
            problem: "the folder does not exist".to_owned(),
        },
        _ => TaskError::Io {
            path: root.to_owned(),
            source,
        },
    };
    if is_task(root) {
        return Ok(vec![root.to_owned()]);
    }
    let mut tasks = Vec::new();
    for entry in root.read_dir().map_err(read)? {
        let path = entry.map_err(read)?.path();
        if is_task(&path) {
            tasks.push(path);
        }
    }
    tasks.sort();
    if tasks.is_empty() {
        return Err(TaskError::Folder {
            path: root.to_owned(),
            problem: "holds no task folder (one with a task.toml in it)".to_owned(),
        });
    }
    Ok(tasks)
}

/// Loads every folder and reports all findings.
pub fn check_tasks(dirs: &[PathBuf]) -> TaskCheckReport {
    let tasks = dirs
        .iter()
        .map(|dir| match TaskSpec::load(dir) {
            Ok(spec) => CheckedTask {
                dir: dir.clone(),
                findings: spec.warnings.clone(),
                spec: Some(spec),
            },
            Err(error) => CheckedTask {
                dir: dir.clone(),
                spec: None,
                findings: error.into_findings(),
            },
        })
        .collect();
    TaskCheckReport { tasks }
}
