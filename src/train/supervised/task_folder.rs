//! Harbor task folders of the demo: writes a [`Draft`] as `task.toml` (schema 1.4), `instruction.md`,
//! `environment/`, `tests/test.sh` and `solution/solve.sh`.
//!
//! The folders under `jobs/demo/tasks/` come from [`demo_tasks`]; `cargo run --example make_demo_tasks`
//! writes them again, and a test holds the two equal.

use super::families::{Draft, Family};
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;
use std::{
    collections::BTreeSet,
    fs, io,
    path::{Path, PathBuf},
};

/// Tasks of a family.
pub const TASKS_PER_FAMILY: usize = 6;

const SEED: u64 = 7;

/// The demo's tasks: folder name and draft, [`TASKS_PER_FAMILY`] of every family. No two share an
/// instruction or the command that does it, so no solution solves two tasks.
pub fn demo_tasks() -> Vec<(String, Draft)> {
    let mut rng = ChaCha8Rng::seed_from_u64(SEED);
    let mut seen = BTreeSet::new();
    let mut tasks = Vec::new();
    for family in Family::ALL {
        for number in 1..=TASKS_PER_FAMILY {
            let draft = loop {
                let draft = Draft::draw(family, &mut rng);
                if !seen.contains(&draft.act.command) && seen.insert(draft.instruction.clone()) {
                    seen.insert(draft.act.command.clone());
                    break draft;
                }
            };
            tasks.push((format!("{}-{number:02}", family.name()), draft));
        }
    }
    tasks
}

/// Writes one task folder below `root` and returns its path.
pub fn write_task(root: &Path, name: &str, draft: &Draft) -> io::Result<PathBuf> {
    let folder = root.join(name);
    // A file of an earlier draw would be in the sandbox and nobody would know of it.
    match fs::remove_dir_all(&folder) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    for (path, content) in task_files(name, draft) {
        let file = folder.join(path);
        if let Some(parent) = file.parent() {
            fs::create_dir_all(parent)?;
        }
        fs::write(file, content)?;
    }
    Ok(folder)
}

/// The files of a task folder: path below it and content.
pub fn task_files(name: &str, draft: &Draft) -> Vec<(String, String)> {
    let mut files = vec![
        ("task.toml".to_owned(), task_toml(name, draft)),
        ("instruction.md".to_owned(), format!("{}\n", draft.instruction)),
        (
            "environment/Dockerfile".to_owned(),
            "FROM debian:bookworm-slim\nWORKDIR /app\nCOPY files/ /app/\n".to_owned(),
        ),
        ("tests/test.sh".to_owned(), test_script(draft)),
        (
            "solution/solve.sh".to_owned(),
            format!("#!/bin/bash\nset -e\ncd /app\n{}\n", draft.solution().join("\n")),
        ),
    ];
    files.extend(
        draft
            .before
            .iter()
            .map(|(path, content)| (format!("environment/files/{path}"), content.clone())),
    );
    files
}

fn task_toml(name: &str, draft: &Draft) -> String {
    let family = draft.family.name();
    format!(
        r#"schema_version = "1.4"

[task]
name = "legorl-demo/{name}"
description = "A shell task of the {family} family."
keywords = ["shell", "{family}"]

[metadata]
family = "{family}"

[agent]
timeout_sec = 60.0

[verifier]
timeout_sec = 30.0

[environment]
build_timeout_sec = 120.0
cpus = 1
memory_mb = 512
network_mode = "no-network"
"#
    )
}

/// The end state that passes, one line a path: sorted, contents as words.
fn wanted_state(draft: &Draft) -> Vec<String> {
    let mut lines = BTreeSet::new();
    for (path, content) in &draft.after {
        if let Some((folder, _)) = path.rsplit_once('/') {
            lines.insert(format!("folder {folder}"));
        }
        let words: Vec<&str> = content.split_whitespace().collect();
        lines.insert(format!("file {path}: {}", words.join(" ")));
    }
    lines.extend(draft.new_folders.iter().map(|folder| format!("folder {folder}")));
    lines.into_iter().collect()
}

fn test_script(draft: &Draft) -> String {
    format!(
        r#"#!/bin/bash
# Passes when /app holds exactly what the task asked for: every path, every word, nothing else.
export LC_ALL=C
shopt -s globstar dotglob nullglob
mkdir -p /logs/verifier
echo 0 > /logs/verifier/reward.txt
cd /app || exit 1

state() {{
    local path words
    for path in **; do
        path=${{path%/}}
        if [[ -L $path ]]; then
            echo "link $path"
        elif [[ -d $path ]]; then
            echo "folder $path"
        elif [[ -f $path ]]; then
            words=$(tr -s '[:space:]' ' ' < "$path")
            words=${{words# }}
            echo "file $path: ${{words% }}"
        else
            echo "other $path"
        fi
    done | sort
}}

wanted=$(sort << 'END'
{}
END
)
found=$(state)
if [[ $found == "$wanted" ]]; then
    echo 1 > /logs/verifier/reward.txt
    echo "passed"
else
    printf 'wanted:\n%s\nfound:\n%s\n' "$wanted" "$found"
fi
"#,
        wanted_state(draft).join("\n")
    )
}

#[cfg(test)]
mod tests;
