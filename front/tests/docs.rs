//! What the documents name is there: files, folders, and the functions of the walk through the code.

use std::{fs, path::Path};

/// README and everything under docs/, as (name, text).
fn documents() -> Vec<(String, String)> {
    let root = root();
    let mut names = vec!["README.md".to_owned()];
    for entry in fs::read_dir(root.join("docs")).unwrap() {
        names.push(format!("docs/{}", entry.unwrap().file_name().to_str().unwrap()));
    }
    names
        .into_iter()
        .map(|name| (name.clone(), fs::read_to_string(root.join(name)).unwrap()))
        .collect()
}

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap()
}

/// Texts between single backticks, outside of code blocks.
fn quoted(text: &str) -> Vec<&str> {
    let mut in_block = false;
    let lines = text.lines().filter(|line| {
        let fence = line.trim_start().starts_with("```");
        in_block ^= fence;
        !in_block && !fence
    });
    lines
        .flat_map(|line| line.split('`').skip(1).step_by(2))
        .collect()
}

#[test]
fn files_that_documents_name_are_there() {
    // Folders of the repository; what a run or a build makes lies elsewhere. Sources are also named from `src`.
    let ours = [
        "src/", "docs/", "setup/", "slurm/", "jobs/", "configs/", "bench/", "tests/", "front/",
    ];
    let mut named = 0;
    for (document, text) in documents() {
        for path in quoted(&text) {
            let path = path.split([' ', ':']).next().unwrap_or_default();
            let is_source = path.ends_with(".rs") && path.contains('/');
            let is_ours = is_source || ours.iter().any(|folder| path.starts_with(folder));
            // Patterns, and a run config of the reader's own.
            let is_any =
                path.contains(['<', '*', '…', '{', '$']) || path.contains("NAME") || path.contains("my_run");
            if !is_ours || is_any {
                continue;
            }
            named += 1;
            let is_there = root().join(path).exists() || is_source && root().join("src").join(path).exists();
            assert!(is_there, "{document} names `{path}`, which is not there");
        }
    }
    assert!(named > 40, "the documents were read: {named}");
}

/// Rows of the form ``| 1 | `FILE`: `FUNCTION` | …``.
#[test]
fn the_walk_through_the_code_names_functions_that_are_there() {
    let text = fs::read_to_string(root().join("docs/ARCHITECTURE.md")).unwrap();
    let mut steps = 0;
    for line in text.lines().filter(|line| line.contains("`: `")) {
        let quoted: Vec<&str> = line.split('`').collect();
        let (file, function) = (quoted[1], quoted[3]);
        let source = fs::read_to_string(root().join(file)).unwrap_or_else(|e| panic!("{file}: {e}"));
        let definitions = [format!("fn {function}("), format!("fn {function}<")];
        let is_there = definitions.iter().any(|text| source.contains(text.as_str()));
        assert!(is_there, "{file} has no function `{function}`");
        steps += 1;
    }
    assert!(steps > 15, "the table was read: {steps}");
}
