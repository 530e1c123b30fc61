//! Writes an index, with or without a split.

use super::super::{check_tasks, find_tasks, TaskSpec};
use super::IndexError;
use arrow::array::{ArrayRef, Int64Array, ListArray, NullArray, RecordBatch, StringArray, StructArray};
use arrow::buffer::OffsetBuffer;
use arrow::datatypes::{DataType, Field, Schema};
use parquet::arrow::ArrowWriter;
use parquet::basic::Compression;
use parquet::file::properties::WriterProperties;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use std::{
    collections::BTreeMap,
    fmt,
    fs::File,
    path::{Path, PathBuf},
    sync::Arc,
};

/// What [`build_index`] wrote.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IndexReport {
    /// The file of all rows, or of the training rows.
    pub train_file: PathBuf,
    /// Its rows.
    pub num_train: usize,
    /// The held-out file, when a ratio was given.
    pub val_file: Option<PathBuf>,
    /// Its rows.
    pub num_val: usize,
    /// Rows by family: training, held out.
    pub families: BTreeMap<String, (usize, usize)>,
    /// Warnings of the tasks, as lines.
    pub warnings: Vec<String>,
}

impl fmt::Display for IndexReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for warning in &self.warnings {
            writeln!(f, "{warning}")?;
        }
        write!(f, "{}: {} tasks", self.train_file.display(), self.num_train)?;
        if let Some(file) = &self.val_file {
            write!(f, "\n{}: {} tasks", file.display(), self.num_val)?;
        }
        for (family, (train, val)) in &self.families {
            let name = if family.is_empty() { "(no family)" } else { family };
            write!(f, "\n  {name}: {train} train, {val} held out")?;
        }
        Ok(())
    }
}

/// Name of the held-out file beside a training file: a stem `train`, `…_train` or `…-train` becomes `val`,
/// `…_val`, `…-val`; any other stem gets `_val` appended.
pub fn val_sibling(train_file: &Path) -> PathBuf {
    let stem = train_file
        .file_stem()
        .map_or_else(String::new, |s| s.to_string_lossy().into_owned());
    let sibling = match stem.strip_suffix("train") {
        Some(head) if head.is_empty() || head.ends_with(['_', '-', '.']) => format!("{head}val"),
        _ => format!("{stem}_val"),
    };
    let extension = train_file
        .extension()
        .map_or_else(|| "parquet".into(), |e| e.to_string_lossy());
    train_file.with_file_name(format!("{sibling}.{extension}"))
}

/// Indexes the tasks of a folder (see [`find_tasks`]); every one of them must load.
///
/// With `split_ratio` (share of training tasks, between 0 and 1) the training rows go to `output` and the
/// held-out rows to its [`val_sibling`]. Each family is split by that ratio, to the nearest whole task, and
/// which tasks are held out depends only on the names, the ratio and the seed.
pub fn build_index(
    dir: &Path,
    output: &Path,
    split_ratio: Option<f64>,
    seed: u64,
) -> Result<IndexReport, IndexError> {
    if let Some(ratio) = split_ratio {
        if !(ratio > 0.0 && ratio < 1.0) {
            return Err(IndexError::Tasks(format!(
                "the split ratio is {ratio}; it is the share of training tasks, between 0 and 1"
            )));
        }
    }
    let dirs = find_tasks(dir).map_err(|e| IndexError::Tasks(e.to_string()))?;
    let report = check_tasks(&dirs);
    if !report.is_ok() {
        return Err(IndexError::Tasks(format!("nothing was written\n{report}")));
    }
    let warnings = report
        .tasks
        .iter()
        .flat_map(|t| t.findings.iter().map(ToString::to_string))
        .collect();
    let mut tasks: Vec<TaskSpec> = report.tasks.into_iter().filter_map(|t| t.spec).collect();
    tasks.sort_by(|a, b| a.name.cmp(&b.name));
    if let Some(pair) = tasks.windows(2).find(|p| p[0].name == p[1].name) {
        return Err(IndexError::Tasks(format!(
            "{} and {} have the same task name `{}`",
            pair[0].dir.display(),
            pair[1].dir.display(),
            pair[0].name
        )));
    }

    let held_out = match split_ratio {
        Some(ratio) => choose_held_out(&tasks, ratio, seed)?,
        None => vec![false; tasks.len()],
    };
    let mut families: BTreeMap<String, (usize, usize)> = BTreeMap::new();
    for (task, &out) in tasks.iter().zip(&held_out) {
        let counts = families.entry(task.family.clone()).or_default();
        *(if out { &mut counts.1 } else { &mut counts.0 }) += 1;
    }
    let part = |out: bool| -> Vec<&TaskSpec> {
        tasks
            .iter()
            .zip(&held_out)
            .filter(|(_, &o)| o == out)
            .map(|(t, _)| t)
            .collect()
    };
    let (train, val) = (part(false), part(true));
    write_rows(output, &train, "train")?;
    let val_file = split_ratio.map(|_| val_sibling(output));
    if let Some(file) = &val_file {
        write_rows(file, &val, "val")?;
    }
    Ok(IndexReport {
        train_file: output.to_owned(),
        num_train: train.len(),
        val_file,
        num_val: val.len(),
        families,
        warnings,
    })
}

/// Marks the held-out tasks. The total is the nearest whole number of tasks, and the families' fractions
/// are rounded so that they add up to it (largest remainder first).
fn choose_held_out(tasks: &[TaskSpec], ratio: f64, seed: u64) -> Result<Vec<bool>, IndexError> {
    let mut families: BTreeMap<&str, Vec<usize>> = BTreeMap::new();
    for (i, task) in tasks.iter().enumerate() {
        families.entry(&task.family).or_default().push(i);
    }
    let wanted = (tasks.len() as f64 * (1.0 - ratio)).round() as usize;
    if wanted == 0 || wanted == tasks.len() {
        return Err(IndexError::Tasks(format!(
            "a split ratio of {ratio} leaves one side of {} tasks empty",
            tasks.len()
        )));
    }
    let mut shares: Vec<(f64, &str, usize)> = families
        .iter()
        .map(|(name, members)| {
            let exact = members.len() as f64 * (1.0 - ratio);
            (exact.fract(), *name, exact as usize)
        })
        .collect();
    let missing = wanted.saturating_sub(shares.iter().map(|s| s.2).sum());
    shares.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(b.1)));
    for share in shares.iter_mut().take(missing) {
        share.2 += 1;
    }

    let mut held_out = vec![false; tasks.len()];
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    shares.sort_by(|a, b| a.1.cmp(b.1));
    for (_, name, count) in shares {
        let members = families.get_mut(name).into_iter().flatten();
        let mut members: Vec<usize> = members.map(|m| *m).collect();
        for i in 0..count.min(members.len()) {
            let j = rng.random_range(i..members.len());
            members.swap(i, j);
            held_out[members[i]] = true;
        }
    }
    Ok(held_out)
}

fn write_rows(file: &Path, tasks: &[&TaskSpec], split: &str) -> Result<(), IndexError> {
    let io = |source| IndexError::Io {
        file: file.to_owned(),
        source,
    };
    let parquet = |source| IndexError::Parquet {
        file: file.to_owned(),
        source,
    };
    let batch = to_batch(tasks, split).map_err(|e| parquet(e.into()))?;
    let parent = file
        .parent()
        .filter(|p| !p.as_os_str().is_empty())
        .unwrap_or(Path::new("."));
    std::fs::create_dir_all(parent).map_err(io)?;
    // Readers see the old file or the new one, never a part.
    let mut name = file.file_name().unwrap_or_default().to_owned();
    name.push(format!(".{}.part", std::process::id()));
    let part = file.with_file_name(name);
    let write = || -> Result<(), IndexError> {
        let handle = File::create(&part).map_err(io)?;
        let properties = WriterProperties::builder()
            .set_compression(Compression::SNAPPY)
            .build();
        let mut writer = ArrowWriter::try_new(&handle, batch.schema(), Some(properties)).map_err(parquet)?;
        writer.write(&batch).map_err(parquet)?;
        writer.close().map_err(parquet)?;
        handle.sync_all().map_err(io)?;
        std::fs::rename(&part, file).map_err(io)?;
        File::open(parent).and_then(|d| d.sync_all()).map_err(io)
    };
    write().inspect_err(|_| {
        // The error that matters is the one being reported.
        let _ = std::fs::remove_file(&part);
    })
}

fn to_batch(tasks: &[&TaskSpec], split: &str) -> Result<RecordBatch, arrow::error::ArrowError> {
    let texts = |of: &dyn Fn(&TaskSpec) -> String| -> ArrayRef {
        Arc::new(StringArray::from_iter_values(tasks.iter().map(|t| of(t))))
    };
    let constant = |value: &'static str| texts(&|_| value.to_owned());
    let path = |t: &TaskSpec| t.dir.to_string_lossy().into_owned();
    let field = |name: &str, column: &ArrayRef| Arc::new(Field::new(name, column.data_type().clone(), true));
    let group = |columns: Vec<(&str, ArrayRef)>| -> ArrayRef {
        Arc::new(StructArray::from(
            columns
                .into_iter()
                .map(|(name, column)| (field(name, &column), column))
                .collect::<Vec<_>>(),
        ))
    };

    let messages = group(vec![("role", constant("user")), ("content", texts(&path))]);
    let prompt: ArrayRef = Arc::new(ListArray::try_new(
        field("element", &messages),
        OffsetBuffer::from_lengths(std::iter::repeat_n(1, tasks.len())),
        messages,
        None,
    )?);
    let reward_model = group(vec![
        ("style", constant("rule")),
        (
            "ground_truth",
            arrow::compute::cast(&NullArray::new(tasks.len()), &DataType::Utf8)?,
        ),
    ]);
    let extra_info = group(vec![
        (
            "index",
            Arc::new(Int64Array::from_iter_values(0..tasks.len() as i64)),
        ),
        ("split", texts(&|_| split.to_owned())),
        ("task_name", texts(&|t| t.name.clone())),
        ("harbor_task_path", texts(&path)),
        (
            "instance_id",
            texts(&|t| {
                t.dir
                    .file_name()
                    .map_or_else(String::new, |n| n.to_string_lossy().into_owned())
            }),
        ),
        ("data_source", constant("harbor")),
        ("family", texts(&|t| t.family.clone())),
    ]);
    let columns = [
        ("data_source", constant("harbor")),
        ("prompt", prompt),
        ("ability", constant("agent")),
        ("reward_model", reward_model),
        ("extra_info", extra_info),
    ];
    let fields: Vec<_> = columns.iter().map(|(name, column)| field(name, column)).collect();
    RecordBatch::try_new(
        Arc::new(Schema::new(fields)),
        columns.into_iter().map(|(_, column)| column).collect(),
    )
}
