//! The task index: a thin parquet table whose rows name task folders.
//!
//! Columns, as in verl and in the indexes of the original (`?` marks what may be absent or null when read):
//!
//! ```text
//! data_source?   string                          "harbor"
//! prompt?        list<struct<role, content>>     one user message whose content is the task folder
//! ability?       string                          "agent"
//! reward_model?  struct<style, ground_truth>     "rule", null: the task's verifier gives the reward
//! extra_info?    struct<index, split, harbor_task_path?, task_path?, instance_id?, task_name?, family?, …>
//! ```
//!
//! The task folder of a row is the first of `extra_info.harbor_task_path`, `extra_info.task_path` and the
//! content of the first prompt message. A relative path is taken from the folder of the index file.
//! Strings may be plain, large, view or dictionary-encoded; `extra_info` may also be a JSON string.
//!
//! Invariant: every row of an open index names a folder that exists.

mod build;
mod read;

pub use build::{build_index, val_sibling, IndexReport};

use super::{TaskError, TaskSpec};
use std::{
    io,
    path::{Path, PathBuf},
};

/// Why an index cannot be read or built.
#[derive(Debug, thiserror::Error)]
pub enum IndexError {
    /// The file could not be opened or written.
    #[error("{}: {source}", file.display())]
    Io {
        /// Index file.
        file: PathBuf,
        /// The operating system's error.
        #[source]
        source: io::Error,
    },
    /// The file is not parquet, is damaged, or uses a codec that is not built in (snappy and zstd are).
    #[error("{} cannot be read as parquet: {source}", file.display())]
    Parquet {
        /// Index file.
        file: PathBuf,
        /// The reader's error.
        #[source]
        source: parquet::errors::ParquetError,
    },
    /// The table lacks what a row needs.
    #[error("{}: {problem}", file.display())]
    Schema {
        /// Index file.
        file: PathBuf,
        /// What is missing or of another type.
        problem: String,
    },
    /// A row is unusable.
    #[error("{} row {row}: {problem}", file.display())]
    Row {
        /// Index file.
        file: PathBuf,
        /// Row, from 0.
        row: usize,
        /// What is wrong, with the path.
        problem: String,
    },
    /// The tasks to be indexed are unusable, or the split is.
    #[error("{0}")]
    Tasks(String),
}

/// A row.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IndexRow {
    /// The task folder.
    pub dir: PathBuf,
    /// `data_source`; metrics are grouped by it. `harbor` where the column is absent.
    pub data_source: String,
    /// `extra_info.family`, empty where it is absent.
    pub family: String,
}

/// An index in memory.
#[derive(Clone, Debug)]
pub struct TaskIndex {
    file: PathBuf,
    rows: Vec<IndexRow>,
}

impl TaskIndex {
    /// Reads an index file and checks that every row's folder exists.
    pub fn open(file: &Path) -> Result<Self, IndexError> {
        let rows = read::read_rows(file)?;
        if rows.is_empty() {
            return Err(IndexError::Schema {
                file: file.to_owned(),
                problem: "the index has no rows".to_owned(),
            });
        }
        for (row, entry) in rows.iter().enumerate() {
            if !entry.dir.is_dir() {
                return Err(IndexError::Row {
                    file: file.to_owned(),
                    row,
                    problem: format!(
                        "the task folder {} does not exist; restore it or build the index again",
                        entry.dir.display()
                    ),
                });
            }
        }
        Ok(Self {
            file: file.to_owned(),
            rows,
        })
    }

    /// The index file.
    pub fn file(&self) -> &Path {
        &self.file
    }

    /// Number of rows.
    pub fn len(&self) -> usize {
        self.rows.len()
    }

    /// Never true: an index without rows does not open.
    pub fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }

    /// All rows in file order.
    pub fn rows(&self) -> &[IndexRow] {
        &self.rows
    }

    /// Loads the task of a row. Errors name the index file, the row and the task's problem.
    pub fn load(&self, row: u32) -> Result<TaskSpec, IndexError> {
        let error = |problem: String| IndexError::Row {
            file: self.file.clone(),
            row: row as usize,
            problem,
        };
        let entry = self
            .rows
            .get(row as usize)
            .ok_or_else(|| error(format!("the index has only {} rows", self.rows.len())))?;
        TaskSpec::load(&entry.dir).map_err(|e: TaskError| error(e.to_string()))
    }
}
