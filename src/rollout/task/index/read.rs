//! Parquet rows into [`IndexRow`]s, whatever wrote them.

use super::{IndexError, IndexRow};
use crate::base::files;
use arrow::array::{Array, ArrayRef, AsArray, RecordBatch, StringArray};
use arrow::buffer::NullBuffer;
use arrow::compute::cast;
use arrow::datatypes::{DataType, Field};
use parquet::arrow::{arrow_reader::ParquetRecordBatchReaderBuilder, ProjectionMask};
use std::{
    path::{Path, PathBuf},
    sync::Arc,
};

const COLUMNS: [&str; 3] = ["data_source", "prompt", "extra_info"];

pub(super) fn read_rows(file: &Path) -> Result<Vec<IndexRow>, IndexError> {
    let parquet = |source| IndexError::Parquet {
        file: file.to_owned(),
        source,
    };
    let open = files::open(file).map_err(|source| IndexError::Io {
        file: file.to_owned(),
        source,
    })?;
    let builder = ParquetRecordBatchReaderBuilder::try_new(open).map_err(parquet)?;
    let names: Vec<_> = builder
        .schema()
        .fields()
        .iter()
        .map(|f| f.name().clone())
        .collect();
    if !names.iter().any(|n| n == "prompt" || n == "extra_info") {
        return Err(IndexError::Schema {
            file: file.to_owned(),
            problem: format!(
                "has neither a column `extra_info` nor a column `prompt`, so no row can name its task; its columns are: {}",
                names.join(", ")
            ),
        });
    }
    let roots = names
        .iter()
        .enumerate()
        .filter(|(_, n)| COLUMNS.contains(&n.as_str()))
        .map(|(i, _)| i);
    let mask = ProjectionMask::roots(builder.parquet_schema(), roots);
    let reader = builder.with_projection(mask).build().map_err(parquet)?;

    let base = file.parent().unwrap_or(Path::new("")).to_owned();
    let mut rows = Vec::new();
    for batch in reader {
        let batch = batch.map_err(|source| parquet(source.into()))?;
        read_batch(file, &base, &batch, &mut rows)?;
    }
    Ok(rows)
}

fn read_batch(
    file: &Path,
    base: &Path,
    batch: &RecordBatch,
    rows: &mut Vec<IndexRow>,
) -> Result<(), IndexError> {
    let schema = |problem| IndexError::Schema {
        file: file.to_owned(),
        problem,
    };
    let data_source = batch
        .column_by_name("data_source")
        .map(|c| strings(c, "data_source"))
        .transpose()
        .map_err(schema)?;
    let extra = batch
        .column_by_name("extra_info")
        .map(ExtraInfo::new)
        .transpose()
        .map_err(schema)?;
    let prompt = batch
        .column_by_name("prompt")
        .map(Prompt::new)
        .transpose()
        .map_err(schema)?;

    for i in 0..batch.num_rows() {
        let error = |problem: String| IndexError::Row {
            file: file.to_owned(),
            row: rows.len(),
            problem,
        };
        let info = extra
            .as_ref()
            .map(|e| e.row(i))
            .transpose()
            .map_err(error)?
            .unwrap_or_default();
        let named = match info.harbor_task_path.or(info.task_path) {
            Some(path) => Some(path),
            None => prompt
                .as_ref()
                .map(|p| p.first_content(i))
                .transpose()
                .map_err(error)?
                .flatten(),
        };
        let named = named.ok_or_else(|| {
            error(
                "names no task: extra_info.harbor_task_path, extra_info.task_path and the first prompt's \
                 content are all empty"
                    .to_owned(),
            )
        })?;
        let path = PathBuf::from(&named);
        rows.push(IndexRow {
            dir: if path.is_absolute() { path } else { base.join(path) },
            data_source: data_source
                .as_ref()
                .and_then(|c| text(c, i))
                .or(info.data_source)
                .unwrap_or_else(|| "harbor".to_owned()),
            family: info.family.unwrap_or_default(),
        });
    }
    Ok(())
}

/// Any string type as plain strings; a column of nothing but nulls has the null type.
fn strings(column: &ArrayRef, name: &str) -> Result<StringArray, String> {
    let is_text = |t: &DataType| {
        matches!(
            t,
            DataType::Utf8 | DataType::LargeUtf8 | DataType::Utf8View | DataType::Null
        )
    };
    let accepted = match column.data_type() {
        DataType::Dictionary(_, values) => is_text(values),
        other => is_text(other),
    };
    if !accepted {
        return Err(format!(
            "column `{name}` holds {} instead of strings",
            column.data_type()
        ));
    }
    let plain = cast(column, &DataType::Utf8).map_err(|e| format!("column `{name}`: {e}"))?;
    Ok(plain.as_string::<i32>().clone())
}

/// The value of a row; empty text counts as absent.
fn text(column: &StringArray, row: usize) -> Option<String> {
    (column.is_valid(row) && !column.value(row).is_empty()).then(|| column.value(row).to_owned())
}

#[derive(Default)]
struct Info {
    harbor_task_path: Option<String>,
    task_path: Option<String>,
    data_source: Option<String>,
    family: Option<String>,
}

/// `extra_info`, as a struct or as JSON text.
enum ExtraInfo {
    Struct {
        nulls: Option<NullBuffer>,
        fields: Box<[Option<StringArray>; 4]>,
    },
    Json(StringArray),
}

const INFO_FIELDS: [&str; 4] = ["harbor_task_path", "task_path", "data_source", "family"];

impl ExtraInfo {
    fn new(column: &ArrayRef) -> Result<Self, String> {
        let Some(fields) = column.as_struct_opt() else {
            return strings(column, "extra_info").map(Self::Json).map_err(|_| {
                format!(
                    "column `extra_info` holds {} instead of a struct",
                    column.data_type()
                )
            });
        };
        let mut found = [None, None, None, None];
        for (slot, name) in found.iter_mut().zip(INFO_FIELDS) {
            *slot = fields
                .column_by_name(name)
                .map(|c| strings(c, &format!("extra_info.{name}")))
                .transpose()?;
        }
        Ok(Self::Struct {
            nulls: fields.nulls().cloned(),
            fields: Box::new(found),
        })
    }

    fn row(&self, row: usize) -> Result<Info, String> {
        let take = |values: [Option<String>; 4]| {
            let [harbor_task_path, task_path, data_source, family] = values;
            Info {
                harbor_task_path,
                task_path,
                data_source,
                family,
            }
        };
        match self {
            Self::Struct {
                nulls: Some(nulls), ..
            } if nulls.is_null(row) => Ok(Info::default()),
            Self::Struct { fields, .. } => Ok(take(
                fields
                    .each_ref()
                    .map(|field| field.as_ref().and_then(|c| text(c, row))),
            )),
            Self::Json(column) => {
                let Some(json) = text(column, row) else {
                    return Ok(Info::default());
                };
                let value: serde_json::Value = serde_json::from_str(&json)
                    .map_err(|e| format!("extra_info is text and not JSON: {e}"))?;
                Ok(take(INFO_FIELDS.map(|name| {
                    value[name].as_str().filter(|s| !s.is_empty()).map(str::to_owned)
                })))
            }
        }
    }
}

/// `prompt`, as a list of messages or as text.
enum Prompt {
    Messages {
        lists: Vec<Option<(usize, usize)>>,
        contents: StringArray,
    },
    Text(StringArray),
}

impl Prompt {
    fn new(column: &ArrayRef) -> Result<Self, String> {
        let lists = match column.data_type() {
            DataType::List(_) => column.clone(),
            DataType::LargeList(item)
            | DataType::FixedSizeList(item, _)
            | DataType::ListView(item)
            | DataType::LargeListView(item) => {
                let plain = DataType::List(Arc::new(Field::clone(item)));
                cast(column, &plain).map_err(|e| format!("column `prompt`: {e}"))?
            }
            _ => {
                return strings(column, "prompt").map(Self::Text).map_err(|_| {
                    format!(
                        "column `prompt` holds {} instead of a list of messages",
                        column.data_type()
                    )
                })
            }
        };
        let lists = lists.as_list::<i32>();
        let messages = lists.values().as_struct_opt().ok_or_else(|| {
            format!(
                "column `prompt` holds lists of {} instead of messages",
                lists.value_type()
            )
        })?;
        let contents = messages
            .column_by_name("content")
            .ok_or_else(|| "the messages of column `prompt` have no field `content`".to_owned())?;
        let offsets = lists.offsets();
        Ok(Self::Messages {
            lists: (0..lists.len())
                .map(|i| {
                    lists
                        .is_valid(i)
                        .then(|| (offsets[i] as usize, offsets[i + 1] as usize))
                })
                .collect(),
            contents: strings(contents, "prompt.content")?,
        })
    }

    fn first_content(&self, row: usize) -> Result<Option<String>, String> {
        match self {
            Self::Text(column) => Ok(text(column, row)),
            Self::Messages { lists, contents } => match lists[row] {
                Some((start, end)) if start < end => Ok(text(contents, start)),
                _ => Ok(None),
            },
        }
    }
}
