//! The table of allowed edges between layers, and of folders that may use a heavy crate. A new edge is a
//! decision about the design: change docs/ARCHITECTURE.md and this table together.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
};

/// Module, and what its files may import from the crate (besides itself).
const EDGES: &[(&str, &[&str])] = &[
    ("base", &[]),
    ("config", &["base"]),
    ("observe", &["base"]),
    ("comm", &["base"]),
    ("model", &["base"]),
    ("rollout", &["base", "config", "observe", "model"]),
    ("serve", &["base", "config", "observe", "comm", "model"]),
    ("train", &["base", "config", "observe", "comm", "model"]),
    ("plan", &["base", "config", "model"]),
    (
        "preflight",
        &[
            "base", "config", "observe", "comm", "model", "rollout", "serve", "train", "plan",
        ],
    ),
    (
        "rank",
        &[
            "base",
            "config",
            "observe",
            "comm",
            "model",
            "rollout",
            "serve",
            "train",
            "plan",
            "preflight",
        ],
    ),
    (
        "cli",
        &[
            "base",
            "config",
            "observe",
            "comm",
            "model",
            "rollout",
            "serve",
            "train",
            "plan",
            "preflight",
            "rank",
        ],
    ),
];

/// Crate, and the folders under src/ whose files may name it.
const HEAVY: &[(&str, &[&str])] = &[
    ("mpi", &["comm"]),
    ("cudarc", &["comm"]),
    ("tch", &["model/net", "serve/engine/native", "train"]),
    ("axum", &["serve/proxy"]),
    ("parquet", &["rollout/task", "preflight"]),
    ("arrow", &["rollout/task", "preflight"]),
    ("clap", &["cli"]),
    ("indicatif", &["observe"]),
    ("minijinja", &["model/chat_template"]),
    ("kube", &["rollout/sandbox/kubernetes.rs"]),
    ("k8s_openapi", &["rollout/sandbox/kubernetes.rs"]),
    ("bollard", &["rollout/sandbox/docker.rs"]),
];

fn sources(dir: &Path, out: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        // Unit tests may look wherever they need.
        let name = path.file_stem().unwrap().to_str().unwrap().to_owned();
        if name == "tests" {
            continue;
        }
        if path.is_dir() {
            sources(&path, out);
        } else if path.extension().is_some_and(|e| e == "rs") {
            out.push(path);
        }
    }
}

/// Code without comments and without the unit tests at the end of a file.
fn code(path: &Path) -> String {
    let text = fs::read_to_string(path).unwrap();
    let text = text.split("#[cfg(test)]\nmod tests {").next().unwrap();
    text.lines()
        .map(|l| l.split("//").next().unwrap())
        .collect::<Vec<_>>()
        .join("\n")
}

/// Names that follow `crate::`, also inside a braced import.
fn crate_imports(code: &str) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    for part in code.split("crate::").skip(1) {
        let word = |t: &str| {
            t.chars()
                .take_while(|c| c.is_alphanumeric() || *c == '_')
                .collect::<String>()
        };
        match part.strip_prefix('{') {
            Some(list) => {
                let (mut depth, mut start) = (0, true);
                for (i, c) in list.char_indices() {
                    match c {
                        '{' => depth += 1,
                        '}' if depth == 0 => break,
                        '}' => depth -= 1,
                        ',' if depth == 0 => start = true,
                        c if start && !c.is_whitespace() => {
                            start = false;
                            found.insert(word(&list[i..]));
                        }
                        _ => {}
                    }
                }
            }
            None => {
                found.insert(word(part));
            }
        }
    }
    found
}

#[test]
fn imports_go_downward_only() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let modules: BTreeSet<&str> = EDGES.iter().map(|(m, _)| *m).collect();
    let mut wrong = Vec::new();
    let mut edges = 0;
    for (module, allowed) in EDGES {
        let mut files = Vec::new();
        sources(&root.join(module), &mut files);
        assert!(!files.is_empty(), "src/{module} has no source file");
        for file in files {
            for import in crate_imports(&code(&file)) {
                if modules.contains(import.as_str()) && import != *module {
                    edges += 1;
                    if !allowed.contains(&import.as_str()) {
                        wrong.push(format!("{} imports crate::{import}", file.display()));
                    }
                }
            }
        }
    }
    assert!(
        edges > 20,
        "only {edges} imports between layers were seen: does this test still read the code?"
    );
    assert!(
        wrong.is_empty(),
        "not in the table of allowed edges:\n{}",
        wrong.join("\n")
    );
}

#[test]
fn heavy_crates_stay_in_their_folders() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut files = Vec::new();
    sources(&root, &mut files);
    let mut wrong = Vec::new();
    for (name, folders) in HEAVY {
        let mut used = 0;
        for file in &files {
            let code = code(file);
            let names = code.match_indices(&format!("{name}::")).any(|(i, _)| {
                // `crate::mpi::`, `self::tch::` or `my_tch::` are not the crate
                !code[..i].ends_with(|c: char| c.is_alphanumeric() || c == '_' || c == ':')
                    || code[..i].ends_with(" ::")
            });
            if names {
                used += 1;
                let inside = file.strip_prefix(&root).unwrap();
                if !folders.iter().any(|f| inside.starts_with(f)) {
                    wrong.push(format!("{} uses {name}", inside.display()));
                }
            }
        }
        assert!(
            used > 0,
            "nothing uses {name}: does this test still read the code?"
        );
    }
    assert!(
        wrong.is_empty(),
        "a heavy crate outside its folder:\n{}",
        wrong.join("\n")
    );
}

#[test]
fn the_reader_of_imports_sees_nested_lists() {
    let names = crate_imports("use crate::{base::{A, B}, serve, train::x};\nlet a = crate::model::Y;");
    assert_eq!(
        names.into_iter().collect::<Vec<_>>(),
        ["base", "model", "serve", "train"]
    );
}
