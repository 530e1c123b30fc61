//! The demo tasks: as they are drawn, and solved by their solutions.

use super::*;
use std::{collections::BTreeMap, process::Command};

fn committed() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("jobs/demo/tasks")
}

#[test]
fn committed_folders_are_the_drawn_tasks() {
    let tasks = demo_tasks();
    let mut names: Vec<String> = fs::read_dir(committed())
        .expect("jobs/demo/tasks")
        .map(|entry| entry.expect("entry").file_name().to_string_lossy().into_owned())
        .collect();
    names.sort();
    let mut drawn: Vec<String> = tasks.iter().map(|(name, _)| name.clone()).collect();
    drawn.sort();
    assert_eq!(names, drawn);
    for (name, draft) in &tasks {
        let drawn: BTreeMap<String, String> = task_files(name, draft).into_iter().collect();
        let mut found = BTreeMap::new();
        read_files(&committed().join(name), "", &mut found);
        assert_eq!(found, drawn, "{name}");
    }
}

/// All files below a folder: path and content.
fn read_files(folder: &Path, prefix: &str, files: &mut BTreeMap<String, String>) {
    for entry in fs::read_dir(folder).expect("task folder") {
        let entry = entry.expect("entry");
        let path = format!("{prefix}{}", entry.file_name().to_string_lossy());
        if entry.path().is_dir() {
            read_files(&entry.path(), &format!("{path}/"), files);
        } else {
            files.insert(path, fs::read_to_string(entry.path()).expect("text"));
        }
    }
}

/// Runs every candidate script against every task in one private root and returns
/// `(task, candidate) -> passed`. The driver resets `/app` before each pair.
fn matrix(
    tasks: &[(String, Draft)],
    candidates: &BTreeMap<String, String>,
) -> BTreeMap<(String, String), bool> {
    let scratch = tempfile::tempdir().expect("scratch folder");
    for (name, draft) in tasks {
        write_task(&scratch.path().join("tasks"), name, draft).expect("task folder");
    }
    fs::create_dir(scratch.path().join("candidates")).expect("candidates");
    for (name, script) in candidates {
        fs::write(scratch.path().join("candidates").join(name), script).expect("candidate");
    }
    let driver = r#"
        shopt -s dotglob
        for task in /scratch/tasks/*; do
            for candidate in /scratch/candidates/*; do
                rm -rf /app/* /logs/*
                cp -r "$task"/environment/files/. /app/
                (cd /app && timeout 5 bash "$candidate") > /dev/null 2>&1 < /dev/null
                bash "$task"/tests/test.sh > /dev/null
                echo "${task##*/} ${candidate##*/} $(< /logs/verifier/reward.txt)"
            done
        done"#;
    let output = Command::new("bwrap")
        .args(["--unshare-all", "--die-with-parent", "--ro-bind", "/usr", "/usr"])
        .args(["--symlink", "usr/bin", "/bin", "--symlink", "usr/lib", "/lib"])
        .args([
            "--symlink",
            "usr/lib64",
            "/lib64",
            "--proc",
            "/proc",
            "--dev",
            "/dev",
        ])
        .args(["--tmpfs", "/tmp", "--tmpfs", "/app", "--tmpfs", "/logs"])
        .arg("--ro-bind")
        .arg(scratch.path())
        .args(["/scratch", "bash", "-c", driver])
        .output()
        .expect("bwrap runs (apt install bubblewrap)");
    assert!(
        output.status.success(),
        "driver: {}",
        String::from_utf8_lossy(&output.stderr)
    );
    String::from_utf8(output.stdout)
        .expect("text")
        .lines()
        .map(|line| {
            let mut parts = line.split(' ');
            let mut next = || parts.next().expect("three fields").to_owned();
            let (task, candidate, reward) = (next(), next(), next());
            ((task, candidate), reward == "1")
        })
        .collect()
}

/// Sequences that use neither the instruction nor the names of files.
fn generic_sequences() -> Vec<&'static str> {
    vec![
        "true",
        "echo Done.",
        "ls",
        "cat *",
        "rm *",
        "rm -rf ./*",
        "rm $(ls | head -n 1)",
        "rm $(ls | tail -n 1)",
        "rm -r $(ls -d */)",
        "mkdir $(cat *)",
        "mkdir $(grep -oh '[a-z]*' *)",
        "for f in *.txt; do bash $f; done",
        "for f in *.txt; do mkdir $(sed -n 's/.*folder \\(.*\\)\\./\\1/p' $f); done",
        "mkdir $(sed -n 's/.*folder \\(.*\\)\\./\\1/p' $(ls *.txt | head -n 1))",
        "mkdir $(sed -n 's/.*folder \\(.*\\)\\./\\1/p' $(ls *.txt | tail -n 1))",
        "cp *.txt */",
        "cp $(ls *.txt | head -n 1) */",
        "cp $(ls *.txt | tail -n 1) */",
        "mv *.txt */",
        "for f in *.txt; do wc -l < $f > out.txt; done",
        "for f in *.txt; do mv $f new-$f; done",
        "set -- *.txt; mv $1 new.txt",
        "set -- *.txt; awk '{print $3}' $1 > out.txt",
        "mkdir amber apple arrow",
        "echo amber > apple.txt",
    ]
}

/// By default every candidate meets one task of each family and each solution its own task; with
/// `LEGORL_TEST_LEVEL=long` every candidate meets every task.
#[test]
fn tasks_need_reading_and_solutions_solve_them() {
    let tasks = demo_tasks();
    let scripts = |drafts: &[(String, Draft)]| -> BTreeMap<String, String> {
        drafts
            .iter()
            .map(|(name, draft)| (format!("solution-{name}"), draft.solution().join("\n")))
            .collect()
    };
    let mut candidates = scripts(&tasks);
    for (i, script) in generic_sequences().iter().enumerate() {
        candidates.insert(format!("generic-{i:02}"), (*script).to_owned());
    }
    for (name, draft) in &tasks {
        for (i, slip) in draft.slips.iter().enumerate() {
            candidates.insert(format!("slip{i}-{name}"), commands(draft, slip).join("\n"));
        }
    }
    let long = std::env::var("LEGORL_TEST_LEVEL").is_ok_and(|level| level == "long");
    let mut passed = BTreeMap::new();
    if long {
        passed = matrix(&tasks, &candidates);
    } else {
        let sample: Vec<_> = tasks
            .iter()
            .filter(|(name, _)| name.ends_with("-01"))
            .cloned()
            .collect();
        candidates.retain(|name, _| !name.starts_with("slip") || name.ends_with("-01"));
        passed.extend(matrix(&sample, &candidates));
        for task in tasks.iter().filter(|(name, _)| !name.ends_with("-01")) {
            passed.extend(matrix(
                std::slice::from_ref(task),
                &scripts(std::slice::from_ref(task)),
            ));
        }
    }
    for (name, _) in &tasks {
        assert!(
            passed[&(name.clone(), format!("solution-{name}"))],
            "{name}: its solution fails"
        );
    }
    let met = if long { tasks.len() } else { Family::ALL.len() };
    for candidate in candidates.keys() {
        let passes: Vec<&String> = passed
            .iter()
            .filter(|((_, c), ok)| c == candidate && **ok)
            .map(|((task, _), _)| task)
            .collect();
        assert!(
            passes.len() * 100 <= met * 15,
            "`{}` passes {passes:?}",
            candidates[candidate]
        );
        if candidate.starts_with("slip") {
            assert!(
                passes.is_empty(),
                "the slip `{}` passes {passes:?}",
                candidates[candidate]
            );
        }
    }
}

/// The read command of a task, then `last`.
fn commands<'d>(draft: &'d Draft, last: &'d super::super::families::Step) -> Vec<&'d str> {
    draft
        .read
        .iter()
        .chain([last])
        .map(|s| s.command.as_str())
        .collect()
}

/// The outputs that transcripts show are those of a real shell.
#[test]
fn steps_print_what_they_say() {
    for (name, draft) in demo_tasks().iter().step_by(2) {
        let folder = tempfile::tempdir().expect("folder");
        let listing = super::super::families::Step {
            command: "ls".into(),
            output: draft.listing(),
        };
        let mut steps: Vec<_> = vec![&listing];
        steps.extend(draft.read.iter().chain([&draft.act]).chain(&draft.slips));
        for step in steps {
            let app = folder.path().join(step.command.replace(['/', ' '], "_"));
            for (path, content) in &draft.before {
                let file = app.join(path);
                fs::create_dir_all(file.parent().expect("parent")).expect("folder");
                fs::write(file, content).expect("file");
            }
            let output = Command::new("bash")
                .args(["-c", &step.command])
                .current_dir(&app)
                .output()
                .expect("bash");
            let text = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
            assert_eq!(text.trim_end(), step.output, "{name}: {}", step.command);
            assert!(output.status.success(), "{name}: {}", step.command);
        }
    }
}

#[test]
fn verifiers_use_bash_and_coreutils_alone() {
    for (_, draft) in demo_tasks() {
        let script = test_script(&draft);
        for program in ["find ", "grep ", "sed ", "awk ", "diff ", "python"] {
            assert!(!script.contains(program), "{program} in a verifier");
        }
    }
}
