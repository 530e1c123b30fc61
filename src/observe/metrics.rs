//! Metrics of every step, in two files under verl's names:
//!
//! ```text
//! <exp>.log     step:1 - actor/entropy:0.61 - critic/score/mean:0.25 - …      keys sorted
//! <exp>.jsonl   {"step":1,"actor/entropy":0.61,"critic/score/mean":0.25,…}
//! ```
//!
//! A step may have several lines with different keys (a validation that ends later); readers merge
//! them. A run that resumes from step N cuts the lines after N, so that no step is shown twice: they go
//! to `<exp>.superseded.jsonl`, and both files are rewritten and renamed into place.

use serde_json::{Map, Value};
use std::{
    collections::BTreeMap,
    fmt::Write as _,
    fs::{self, File, OpenOptions},
    io::{self, Write},
    path::{Path, PathBuf},
};

/// Values of one step by key.
pub type Row = BTreeMap<String, f64>;

/// The open files.
#[derive(Debug)]
pub struct MetricsFiles {
    log: (PathBuf, File),
    jsonl: (PathBuf, File),
    last_step: Option<u64>,
}

/// A metric file that cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum MetricsError {
    /// Reading or writing failed.
    #[error("{path}: {source}")]
    Io {
        /// File.
        path: String,
        /// Operating system's error.
        #[source]
        source: io::Error,
    },
    /// A line is not one that this module wrote.
    #[error("{path}:{line}: {problem}")]
    Damaged {
        /// File.
        path: String,
        /// Line, from 1.
        line: usize,
        /// What is wrong.
        problem: String,
    },
    /// Steps are written in order.
    #[error("step {step} comes after step {last}")]
    Order {
        /// Step that was to be written.
        step: u64,
        /// Step before it.
        last: u64,
    },
}

fn io_at(path: &Path) -> impl FnOnce(io::Error) -> MetricsError + '_ {
    move |source| MetricsError::Io {
        path: path.display().to_string(),
        source,
    }
}

impl MetricsFiles {
    /// Opens the files of experiment `exp` in `folder`. `resume_from_step` is the step of the checkpoint
    /// that the run continues from, or `None` for a run from the start; later lines are cut.
    pub fn open(folder: &Path, exp: &str, resume_from_step: Option<u64>) -> Result<Self, MetricsError> {
        fs::create_dir_all(folder).map_err(io_at(folder))?;
        let log_path = folder.join(format!("{exp}.log"));
        let jsonl_path = folder.join(format!("{exp}.jsonl"));
        let keep = |step: u64| resume_from_step.is_some_and(|last| step <= last);
        let cut = cut(&jsonl_path, step_of_json, keep)?;
        if !cut.is_empty() {
            let path = folder.join(format!("{exp}.superseded.jsonl"));
            let mut file = OpenOptions::new()
                .create(true)
                .append(true)
                .open(&path)
                .map_err(io_at(&path))?;
            file.write_all(cut.as_bytes()).map_err(io_at(&path))?;
        }
        self::cut(&log_path, step_of_text, keep)?;
        let open = |path: &Path| {
            OpenOptions::new()
                .create(true)
                .append(true)
                .open(path)
                .map_err(io_at(path))
        };
        Ok(Self {
            log: (log_path.clone(), open(&log_path)?),
            jsonl: (jsonl_path.clone(), open(&jsonl_path)?),
            last_step: None,
        })
    }

    /// Appends the values of a step to both files.
    pub fn write(&mut self, step: u64, row: &Row) -> Result<(), MetricsError> {
        if let Some(last) = self.last_step.filter(|last| step < *last) {
            return Err(MetricsError::Order { step, last });
        }
        self.last_step = Some(step);
        let mut object = Map::new();
        object.insert("step".into(), step.into());
        for (key, value) in row {
            // JSON has no NaN: null stands for a value that is not finite.
            object.insert(key.clone(), Value::from(*value));
        }
        let lines = [
            (&mut self.jsonl, Value::Object(object).to_string()),
            (&mut self.log, text_line(step, row)),
        ];
        for ((path, file), mut line) in lines {
            line.push('\n');
            file.write_all(line.as_bytes()).map_err(io_at(path))?;
        }
        Ok(())
    }

    /// The text file.
    pub fn log_path(&self) -> &Path {
        &self.log.0
    }

    /// The file of JSON lines.
    pub fn jsonl_path(&self) -> &Path {
        &self.jsonl.0
    }
}

/// `step:N - key:value - …`
pub fn text_line(step: u64, row: &Row) -> String {
    let mut line = format!("step:{step}");
    for (key, value) in row {
        // Writing to a String cannot fail.
        let _ = write!(line, " - {key}:{value}");
    }
    line
}

/// Rows of a file of JSON lines by step, lines of one step merged. A torn last line is left out.
pub fn read(jsonl: &Path) -> Result<BTreeMap<u64, Row>, MetricsError> {
    let text = fs::read_to_string(jsonl).map_err(io_at(jsonl))?;
    let mut rows: BTreeMap<u64, Row> = BTreeMap::new();
    for (number, line) in whole_lines(&text).enumerate() {
        let damaged = |problem: String| MetricsError::Damaged {
            path: jsonl.display().to_string(),
            line: number + 1,
            problem,
        };
        let object: Map<String, Value> =
            serde_json::from_str(line).map_err(|error| damaged(error.to_string()))?;
        let step = object["step"]
            .as_u64()
            .ok_or_else(|| damaged("`step` is missing".into()))?;
        let row = rows.entry(step).or_default();
        for (key, value) in object.iter().filter(|(key, _)| *key != "step") {
            row.insert(key.clone(), value.as_f64().unwrap_or(f64::NAN));
        }
    }
    Ok(rows)
}

fn whole_lines(text: &str) -> impl Iterator<Item = &str> {
    text.rfind('\n').map_or("", |end| &text[..end]).lines()
}

fn step_of_json(line: &str) -> Option<u64> {
    serde_json::from_str::<Map<String, Value>>(line)
        .ok()?
        .get("step")?
        .as_u64()
}

fn step_of_text(line: &str) -> Option<u64> {
    line.strip_prefix("step:")?.split(" - ").next()?.parse().ok()
}

/// Rewrites a file without the lines that are not to be kept, and returns those. A torn last line goes
/// as well. Lines without a step stay.
fn cut(
    path: &Path,
    step_of: impl Fn(&str) -> Option<u64>,
    keep: impl Fn(u64) -> bool,
) -> Result<String, MetricsError> {
    let text = match fs::read_to_string(path) {
        Ok(text) => text,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(String::new()),
        Err(error) => return Err(io_at(path)(error)),
    };
    let (mut kept, mut removed) = (String::new(), String::new());
    for line in whole_lines(&text) {
        let into = if step_of(line).is_none_or(&keep) {
            &mut kept
        } else {
            &mut removed
        };
        into.push_str(line);
        into.push('\n');
    }
    if kept.len() != text.len() {
        let mut name = path.as_os_str().to_owned();
        name.push(".tmp");
        let temporary = PathBuf::from(name);
        let mut file = File::create(&temporary).map_err(io_at(&temporary))?;
        file.write_all(kept.as_bytes()).map_err(io_at(&temporary))?;
        file.sync_all().map_err(io_at(&temporary))?;
        fs::rename(&temporary, path).map_err(io_at(path))?;
    }
    Ok(removed)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(pairs: &[(&str, f64)]) -> Row {
        pairs.iter().map(|(k, v)| ((*k).to_owned(), *v)).collect()
    }

    #[test]
    fn lines_have_verls_form_with_sorted_keys() {
        let row = row(&[
            ("critic/score/mean", 0.5),
            ("actor/lr", 1e-6),
            ("num_turns/max", 3.0),
        ]);
        assert_eq!(
            text_line(7, &row),
            "step:7 - actor/lr:0.000001 - critic/score/mean:0.5 - num_turns/max:3"
        );
    }

    #[test]
    fn a_resumed_run_shows_no_step_twice() {
        let folder = tempfile::tempdir().unwrap();
        let open = |resume| MetricsFiles::open(folder.path(), "e", resume).unwrap();
        let mut files = open(None);
        for step in 0..=4 {
            files
                .write(step, &row(&[("critic/score/mean", step as f64)]))
                .unwrap();
        }
        files
            .write(4, &row(&[("val-core/harbor/reward/mean@4", 0.5)]))
            .unwrap();
        let jsonl = folder.path().join("e.jsonl");
        OpenOptions::new()
            .append(true)
            .open(&jsonl)
            .unwrap()
            .write_all(b"{\"step\":5,")
            .unwrap();

        let mut files = open(Some(2));
        files.write(3, &row(&[("critic/score/mean", 33.0)])).unwrap();
        let rows = read(&jsonl).unwrap();
        assert_eq!(rows.keys().copied().collect::<Vec<_>>(), [0, 1, 2, 3]);
        assert_eq!(rows[&3]["critic/score/mean"], 33.0);
        let log = fs::read_to_string(folder.path().join("e.log")).unwrap();
        assert_eq!(log.lines().filter(|line| line.starts_with("step:3 ")).count(), 1);
        let superseded = fs::read_to_string(folder.path().join("e.superseded.jsonl")).unwrap();
        assert_eq!(
            superseded.lines().count(),
            3,
            "steps 3 and 4, and the validation of 4"
        );

        open(None);
        assert!(
            read(&jsonl).unwrap().is_empty(),
            "a run from the start begins with empty files"
        );
    }

    #[test]
    fn steps_go_forward_and_lines_of_one_step_are_merged() {
        let folder = tempfile::tempdir().unwrap();
        let mut files = MetricsFiles::open(folder.path(), "e", None).unwrap();
        files.write(2, &row(&[("a", 1.0)])).unwrap();
        files.write(2, &row(&[("b", f64::NAN)])).unwrap();
        assert!(matches!(
            files.write(1, &row(&[])),
            Err(MetricsError::Order { step: 1, last: 2 })
        ));
        let rows = read(files.jsonl_path()).unwrap();
        assert_eq!(rows[&2]["a"], 1.0);
        assert!(rows[&2]["b"].is_nan());
    }
}
