//! Task indexes.

use crate::{base::files, rollout::task::TaskIndex};
use std::{io::ErrorKind, path::Path};

/// Tasks of an index that are loaded as a sample.
const SAMPLED_TASKS: usize = 16;

/// Problems that are listed; an index whose folder moved has as many as rows.
const LISTED_PROBLEMS: usize = 8;

/// Facts about a task index.
#[derive(Clone, Debug)]
pub struct IndexFacts {
    /// Rows.
    pub rows: usize,
    /// Tasks that were loaded.
    pub sampled: usize,
    /// What was wrong with some of them.
    pub problems: Vec<String>,
    /// Prebuilt image of the first sampled task that names one.
    pub image: Option<String>,
}

/// Reads an index, looks every row's folder up and loads a sample of tasks.
pub fn probe(file: &Path) -> Result<IndexFacts, String> {
    let index = TaskIndex::open(file).map_err(|error| error.to_string())?;
    let rows = index.len();
    let sampled = rows.min(SAMPLED_TASKS);
    let incomplete = index.rows().iter().enumerate().filter_map(|(row, entry)| {
        let needed = ["task.toml", "instruction.md", "tests/test.sh"];
        let (path, error) = needed.into_iter().find_map(|name| {
            let path = entry.dir.join(name);
            let error = files::check(&path).err()?;
            Some((path, error))
        })?;
        let problem = match error.kind() {
            ErrorKind::NotFound => "is missing".to_owned(),
            _ => format!("cannot be read: {error}"),
        };
        Some(format!(
            "{} row {row}: {} {problem}",
            file.display(),
            path.display()
        ))
    });
    let mut problems: Vec<String> = incomplete.collect();
    let mut image = None;
    if problems.is_empty() {
        for i in 0..sampled {
            // Spread over the whole index: first and last row are always among them.
            let row = if sampled < 2 {
                0
            } else {
                i * (rows - 1) / (sampled - 1)
            };
            match index.load(row as u32) {
                Ok(task) => image = image.or(task.config.environment.docker_image),
                Err(error) => problems.push(error.to_string()),
            }
        }
    }
    let more = problems.len().saturating_sub(LISTED_PROBLEMS);
    problems.truncate(LISTED_PROBLEMS);
    if more > 0 {
        problems.push(format!("{}: {more} more rows like these", file.display()));
    }
    Ok(IndexFacts {
        rows,
        sampled,
        problems,
        image,
    })
}
