//! Task folders: what loads, what is refused, and that Harbor judges alike.

use super::*;
use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

mod index;

/// A task folder that loads.
fn write_task(dir: &Path, toml: &str) {
    for folder in ["environment", "tests", "solution"] {
        fs::create_dir_all(dir.join(folder)).unwrap();
    }
    fs::write(dir.join("task.toml"), toml).unwrap();
    fs::write(dir.join("instruction.md"), "Count the lines.\n").unwrap();
    fs::write(dir.join("environment/Dockerfile"), "FROM debian:12\n").unwrap();
    fs::write(dir.join("tests/test.sh"), "echo 1 > /logs/verifier/reward.txt\n").unwrap();
}

/// Puts a named pipe, which nobody writes into, in a file's place.
fn pipe(path: &Path) {
    let _ = fs::remove_file(path);
    assert!(Command::new("mkfifo").arg(path).status().unwrap().success());
}

const TABLE: &str = include_str!("verdicts.txt");

/// `(verdict, name, document)` of every variant.
fn variants() -> Vec<(&'static str, &'static str, &'static str)> {
    TABLE
        .split("#: ")
        .skip(1)
        .map(|block| {
            let (head, document) = block.split_once('\n').unwrap();
            let (verdict, name) = head.split_once(": ").unwrap();
            (verdict, name, document)
        })
        .collect()
}

/// The verdicts are those of `harbor`, recorded in `verdicts.txt`.
#[test]
fn verdicts_agree_with_harbor() {
    let variants = variants();
    assert!(variants.len() > 100, "the table was read");
    let wrong: Vec<_> = variants
        .iter()
        .filter_map(|(verdict, name, document)| {
            let (_, findings) = TaskConfig::parse("task.toml", document);
            let errors: Vec<_> = findings
                .iter()
                .filter(|f| f.severity == Severity::Error)
                .collect();
            let accepted = errors.is_empty();
            (accepted != (*verdict == "accept"))
                .then(|| format!("{name}: harbor: {verdict}, here: {errors:?}"))
        })
        .collect();
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// Compares the recorded verdicts with an installed `harbor`: `LEGORL_HARBOR_PYTHON` names a Python (3.12 or
/// newer) that can import it.
#[test]
fn recorded_verdicts_are_those_of_the_installed_harbor() {
    let Some(python) = std::env::var_os("LEGORL_HARBOR_PYTHON") else {
        eprintln!("skipped: LEGORL_HARBOR_PYTHON names no Python with harbor");
        return;
    };
    let script = "
import sys, warnings
from harbor.models.task.config import TaskConfig
warnings.simplefilter('ignore')
for block in open(sys.argv[1], newline='').read().split('#: ')[1:]:
    head, document = block.split('\\n', 1)
    verdict, name = head.split(': ', 1)
    try:
        TaskConfig.model_validate_toml(document)
        found = 'accept'
    except Exception:
        found = 'refuse'
    if found != verdict:
        print(f'{name}: recorded {verdict}, harbor says {found}')
";
    let table = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/rollout/task/tests/verdicts.txt");
    let output = Command::new(python)
        .args(["-c", script])
        .arg(table)
        .output()
        .unwrap();
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    assert_eq!(String::from_utf8_lossy(&output.stdout), "");
}

/// The demo's own tasks, read by an installed `harbor` (`LEGORL_HARBOR_PYTHON`) as a whole: configuration,
/// instruction and the files that it looks for.
#[test]
fn the_installed_harbor_reads_every_demo_task() {
    let Some(python) = std::env::var_os("LEGORL_HARBOR_PYTHON") else {
        eprintln!("SKIP harbor: LEGORL_HARBOR_PYTHON names no Python with harbor");
        return;
    };
    let script = "
import pathlib, sys
from harbor.models.task.task import Task
read = 0
for folder in sorted(pathlib.Path(sys.argv[1]).iterdir()):
    task = Task(folder)
    assert task.instruction.strip(), folder
    assert Task.is_valid_dir(folder), folder
    read += 1
print(read)
";
    let tasks = Path::new(env!("CARGO_MANIFEST_DIR")).join("jobs/demo/tasks");
    let output = Command::new(python)
        .args(["-c", script])
        .arg(&tasks)
        .output()
        .unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{errors}");
    let read: usize = String::from_utf8_lossy(&output.stdout).trim().parse().unwrap();
    let folders = std::fs::read_dir(&tasks).unwrap().count();
    assert_eq!(read, folders);
    eprintln!("harbor reads {read} of {folders} demo tasks");
}

#[test]
fn findings_name_file_line_and_field() {
    let text = "schema_version = \"1.4\"\n\n[agent]\ntimeout_sec = \"long\"\ntimeout_secs = 5\n\n\
                [environment]\ncpus = [1]\n[[environment.mcp_servers]]\nname = 5\nurl = \"x\"\n";
    let (_, findings) = TaskConfig::parse("a/task.toml", text);
    let lines: Vec<_> = findings.iter().map(ToString::to_string).collect();
    assert_eq!(
        lines,
        [
            "a/task.toml:4: `agent.timeout_sec` must be a number and is a string",
            "a/task.toml:5: warning: `agent.timeout_secs` is not a field of the task format and has no effect; \
             the nearest one is `timeout_sec`",
            "a/task.toml:8: `environment.cpus` must be a number and is a list",
            "a/task.toml:10: `environment.mcp_servers[0].name` must be a string and is an integer",
        ]
    );

    let (_, findings) = TaskConfig::parse("task.toml", "[agent]\n\ntimeout_sec =\n");
    assert_eq!(findings.len(), 1);
    assert_eq!(findings[0].line, 3, "{}", findings[0]);
}

#[test]
fn values_and_defaults_are_read() {
    let text = "[task]\nname = \"demo/count-lines\"\nkeywords = [\"counting\"]\n\
                [agent]\ntimeout_sec = 45\n[environment]\ncpus = 0.5\nmemory = \"1G\"\nallow_internet = false\n\
                [metadata]\ndifficulty = 3\n";
    let (config, findings) = TaskConfig::parse("task.toml", text);
    assert!(
        findings.iter().all(|f| f.severity == Severity::Warning),
        "{findings:?}"
    );
    assert_eq!(config.agent.timeout_sec, Some(45.0));
    assert_eq!(config.verifier.timeout_sec, 600.0);
    assert_eq!(config.environment.cpus, Some(0.5));
    assert_eq!(config.environment.memory_mb, Some(1024));
    assert_eq!(config.environment.network.mode, Some(NetworkMode::NoNetwork));
    assert_eq!(config.metadata["difficulty"], 3);

    let folder = tempfile::tempdir().unwrap();
    let dir = folder.path().join("a-task");
    write_task(&dir, text);
    let spec = TaskSpec::load(&dir).unwrap();
    assert_eq!(spec.name, "demo/count-lines");
    assert_eq!(spec.slug(), "count-lines");
    assert_eq!(spec.family, "counting");
    assert_eq!(spec.instruction, "Count the lines.\n");
    assert_eq!(spec.solution_script(), None);

    write_task(&dir, "[metadata]\nfamily = \"sums\"\n");
    fs::write(
        dir.join("instruction.md"),
        "<!-- benchmark CANARY guid -->\n# canary\n\n# Title\ncanary stays\n",
    )
    .unwrap();
    let spec = TaskSpec::load(&dir).unwrap();
    assert_eq!((spec.name.as_str(), spec.family.as_str()), ("a-task", "sums"));
    assert_eq!(spec.instruction, "# Title\ncanary stays\n");
}

/// Each entry spoils a good folder; the error must name the path and hold the words.
#[test]
fn unusable_folders_are_refused_by_path() {
    type Spoil = fn(&Path);
    let cases: &[(Spoil, &str, &str)] = &[
        (|d| fs::remove_dir_all(d).unwrap(), "task", "does not exist"),
        (
            |d| fs::remove_file(d.join("task.toml")).unwrap(),
            "task/task.toml",
            "is missing",
        ),
        (
            |d| fs::remove_file(d.join("instruction.md")).unwrap(),
            "task/instruction.md",
            "is missing",
        ),
        (
            |d| fs::write(d.join("instruction.md"), " \n").unwrap(),
            "task/instruction.md",
            "is empty",
        ),
        (
            |d| fs::write(d.join("instruction.md"), b"\xff\xfe").unwrap(),
            "task/instruction.md",
            "UTF-8",
        ),
        (
            |d| fs::remove_dir_all(d.join("environment")).unwrap(),
            "task/environment",
            "is missing",
        ),
        (
            |d| fs::remove_file(d.join("tests/test.sh")).unwrap(),
            "task/tests/test.sh",
            "is missing",
        ),
        (
            |d| fs::write(d.join("tests/test.sh"), "").unwrap(),
            "task/tests/test.sh",
            "holds no command",
        ),
        (
            |d| fs::write(d.join("tests/test.sh"), "#!/bin/sh\n\n  # to do\n").unwrap(),
            "task/tests/test.sh",
            "holds no command",
        ),
        (
            |d| pipe(&d.join("tests/test.sh")),
            "task/tests/test.sh",
            "a named pipe",
        ),
        (
            |d| pipe(&d.join("instruction.md")),
            "task/instruction.md",
            "a named pipe",
        ),
        (|d| pipe(&d.join("task.toml")), "task/task.toml", "a named pipe"),
        (
            |d| std::os::unix::fs::symlink("/etc/passwd", d.join("tests/data")).unwrap(),
            "task/tests/data",
            "leads out of the task",
        ),
        (
            |d| std::os::unix::fs::symlink("..", d.join("tests/up")).unwrap(),
            "task/tests/up",
            "a folder that holds it",
        ),
        (
            |d| fs::write(d.join("tests/.harborignore"), "x\n").unwrap(),
            "task/tests/.harborignore",
            "not applied",
        ),
        (
            |d| fs::write(d.join("task.toml"), "agent = 5\n").unwrap(),
            "task/task.toml:1",
            "must be a table",
        ),
        (
            |d| fs::write(d.join("task.toml"), "[[steps]]\nname = \"a\"\n").unwrap(),
            "task/task.toml",
            "several steps",
        ),
        (
            |d| fs::write(d.join("task.toml"), "[agent]\nuser = 1000\n").unwrap(),
            "task/task.toml",
            "run as root",
        ),
        (
            |d| fs::write(d.join("task.toml"), "[agent]\ntimeout_sec = nan\n").unwrap(),
            "task/task.toml",
            "positive number of seconds",
        ),
        (
            |d| fs::write(d.join("task.toml"), "[environment]\nmemory_mb = -1\n").unwrap(),
            "task/task.toml",
            "above 0",
        ),
    ];
    for (spoil, path, words) in cases {
        let folder = tempfile::tempdir().unwrap();
        let dir = folder.path().join("task");
        write_task(&dir, "");
        TaskSpec::load(&dir).expect("the folder is good before it is spoilt");
        spoil(&dir);
        let error = TaskSpec::load(&dir).unwrap_err().to_string();
        assert!(
            error.contains(path) && error.contains(words),
            "{path}, {words}: {error}"
        );
    }
}

#[test]
fn a_report_covers_all_folders() {
    let folder = tempfile::tempdir().unwrap();
    write_task(&folder.path().join("b"), "colour = 1\n");
    write_task(&folder.path().join("a"), "[agent]\ntimeout_sec = []\n");
    fs::create_dir(folder.path().join("not-a-task")).unwrap();
    let dirs = find_tasks(folder.path()).unwrap();
    let names: Vec<_> = dirs
        .iter()
        .map(|d| d.file_name().unwrap().to_str().unwrap())
        .collect();
    assert_eq!(names, ["a", "b"]);
    let report = check_tasks(&dirs);
    assert!(!report.is_ok());
    assert_eq!(report.num_valid(), 1);
    let text = report.to_string();
    assert!(
        text.contains("a/task.toml:2") && text.contains("1 of 2 tasks can run, 1 warnings"),
        "{text}"
    );

    assert_eq!(
        find_tasks(&folder.path().join("b")).unwrap(),
        [folder.path().join("b")]
    );
    let missing: PathBuf = folder.path().join("nowhere");
    assert!(find_tasks(&missing).unwrap_err().to_string().contains("nowhere"));
    let empty = find_tasks(&folder.path().join("not-a-task"))
        .unwrap_err()
        .to_string();
    assert!(empty.contains("no task folder"), "{empty}");
}
