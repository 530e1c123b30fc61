//! Task indexes: built, split, read (also those of pandas), refused.

use super::{write_task, Path, PathBuf, TaskIndex};
use crate::rollout::task::{build_index, val_sibling, IndexError};
use arrow::array::{ArrayRef, Int64Array, StringArray};
use arrow::record_batch::RecordBatch;
use parquet::arrow::ArrowWriter;
use std::{collections::BTreeSet, fs, fs::File, sync::Arc};

/// Twelve tasks of two families of unequal size.
fn write_tasks(dir: &Path) {
    for i in 0..12 {
        let family = if i < 9 { "large" } else { "small" };
        write_task(
            &dir.join(format!("task-{i:02}")),
            &format!("[metadata]\nfamily = \"{family}\"\n"),
        );
    }
}

fn names(index: &TaskIndex) -> BTreeSet<String> {
    let name = |row: &super::super::IndexRow| row.dir.file_name().unwrap().to_str().unwrap().to_owned();
    index.rows().iter().map(name).collect()
}

#[test]
fn a_split_is_stratified_complete_and_depends_on_the_seed_alone() {
    let folder = tempfile::tempdir().unwrap();
    let tasks = folder.path().join("tasks");
    write_tasks(&tasks);
    let build = |name: &str, seed| {
        let file = folder.path().join(name);
        let report = build_index(&tasks, &file, Some(2.0 / 3.0), seed).unwrap();
        (
            report.clone(),
            TaskIndex::open(&file).unwrap(),
            TaskIndex::open(&report.val_file.unwrap()).unwrap(),
        )
    };
    let (report, train, val) = build("a/train.parquet", 7);
    assert_eq!(report.families["large"], (6, 3));
    assert_eq!(report.families["small"], (2, 1));
    assert_eq!(report.val_file, Some(folder.path().join("a/val.parquet")));
    assert!(names(&train).is_disjoint(&names(&val)));
    assert_eq!(names(&train).len() + names(&val).len(), 12);
    assert_eq!(val.rows().iter().filter(|row| row.family == "small").count(), 1);

    assert_eq!(names(&build("b.parquet", 7).2), names(&val));
    assert!((8..16).any(|seed| names(&build("c.parquet", seed).2) != names(&val)));

    let spec = train.load(0).unwrap();
    assert_eq!(spec.dir, train.rows()[0].dir);
    let error = train.load(8).unwrap_err().to_string();
    assert!(
        error.contains("train.parquet row 8") && error.contains("only 8 rows"),
        "{error}"
    );
}

#[test]
fn one_file_holds_all_without_a_split() {
    let folder = tempfile::tempdir().unwrap();
    write_tasks(&folder.path().join("tasks"));
    let file = folder.path().join("all.parquet");
    let report = build_index(&folder.path().join("tasks"), &file, None, 0).unwrap();
    assert_eq!((report.num_train, report.val_file, report.num_val), (12, None, 0));
    assert_eq!(TaskIndex::open(&file).unwrap().len(), 12);
    let left: Vec<_> = fs::read_dir(folder.path())
        .unwrap()
        .map(|e| e.unwrap().file_name())
        .collect();
    assert_eq!(left.len(), 2, "no part file is left: {left:?}");
}

#[test]
fn impossible_splits_and_bad_tasks_write_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let tasks = folder.path().join("tasks");
    write_tasks(&tasks);
    let file = folder.path().join("train.parquet");
    for (ratio, words) in [
        (1.0, "between 0 and 1"),
        (f64::NAN, "between 0 and 1"),
        (0.99, "empty"),
    ] {
        let error = build_index(&tasks, &file, Some(ratio), 0)
            .unwrap_err()
            .to_string();
        assert!(error.contains(words), "{error}");
    }
    fs::remove_file(tasks.join("task-03/tests/test.sh")).unwrap();
    let error = build_index(&tasks, &file, None, 0).unwrap_err().to_string();
    assert!(
        error.contains("task-03/tests/test.sh") && error.contains("11 of 12"),
        "{error}"
    );
    assert!(!file.exists());
}

#[test]
fn held_out_files_are_named_after_their_sibling() {
    for (train, val) in [
        ("d/train.parquet", "d/val.parquet"),
        ("my_train.parquet", "my_val.parquet"),
        ("my-train.parquet", "my-val.parquet"),
        ("tasks.parquet", "tasks_val.parquet"),
        ("constrain.parquet", "constrain_val.parquet"),
    ] {
        assert_eq!(val_sibling(Path::new(train)), PathBuf::from(val));
    }
}

/// The files were written by pandas and pyarrow, by `make_pandas_indexes.py`.
#[test]
fn indexes_of_pandas_are_read() {
    let folder = tempfile::tempdir().unwrap();
    for name in ["one", "two"] {
        write_task(&folder.path().join("tasks").join(name), "");
    }
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/rollout/task/tests");
    for (name, expected) in [
        ("pandas_lists.parquet", &["tasks/one", "tasks/two"][..]),
        ("pandas_arrays.parquet", &["tasks/one", "tasks/two"]),
        ("pandas_large.parquet", &["tasks/one", "tasks/two"]),
        ("pandas_nulls.parquet", &["tasks/two", "tasks/two", "tasks/one"]),
    ] {
        let file = folder.path().join(name);
        fs::copy(source.join(name), &file).unwrap();
        let index = TaskIndex::open(&file).unwrap_or_else(|e| panic!("{e}"));
        let dirs: Vec<_> = index
            .rows()
            .iter()
            .map(|row| row.dir.strip_prefix(folder.path()).unwrap().to_str().unwrap())
            .collect();
        assert_eq!(dirs, expected, "{name}");
        assert!(index.rows().iter().all(|row| row.data_source == "harbor"));
    }
}

/// What pandas reads from an index written here; `LEGORL_PANDAS_PYTHON` names a Python with pandas.
#[test]
fn pandas_reads_our_indexes() {
    let Some(python) = std::env::var_os("LEGORL_PANDAS_PYTHON") else {
        eprintln!("skipped: LEGORL_PANDAS_PYTHON names no Python with pandas");
        return;
    };
    let folder = tempfile::tempdir().unwrap();
    write_task(&folder.path().join("tasks/one"), "[task]\nname = \"a/b\"\n");
    let file = folder.path().join("all.parquet");
    build_index(&folder.path().join("tasks"), &file, None, 0).unwrap();
    let script = "
import sys, pandas
row = pandas.read_parquet(sys.argv[1]).iloc[0]
path = sys.argv[2]
assert row['prompt'][0] == {'role': 'user', 'content': path}, row['prompt']
assert row['reward_model'] == {'style': 'rule', 'ground_truth': None}, row['reward_model']
info = row['extra_info']
assert info['harbor_task_path'] == path and info['index'] == 0 and info['split'] == 'train', info
assert info['task_name'] == 'a/b' and info['instance_id'] == 'one' and info['data_source'] == 'harbor', info
assert row['data_source'] == 'harbor' and row['ability'] == 'agent'
";
    let output = std::process::Command::new(python)
        .args(["-c", script])
        .arg(&file)
        .arg(folder.path().join("tasks/one").canonicalize().unwrap())
        .output()
        .unwrap();
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
}

fn write_parquet(file: &Path, columns: Vec<(&str, ArrayRef)>) {
    let batch = RecordBatch::try_from_iter(columns).unwrap();
    let mut writer = ArrowWriter::try_new(File::create(file).unwrap(), batch.schema(), None).unwrap();
    writer.write(&batch).unwrap();
    writer.close().unwrap();
}

#[test]
fn unusable_indexes_are_refused_by_file_and_row() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("index.parquet");
    let refused = |words: &[&str]| {
        let error = TaskIndex::open(&file).unwrap_err();
        let text = error.to_string();
        for word in ["index.parquet"].iter().chain(words) {
            assert!(text.contains(word), "{word}: {text}");
        }
        error
    };
    refused(&["No such file"]);
    super::pipe(&file);
    refused(&["a named pipe"]);
    fs::remove_file(&file).unwrap();
    fs::write(&file, "not parquet at all").unwrap();
    assert!(matches!(refused(&["parquet"]), IndexError::Parquet { .. }));

    let text = |values: &[&str]| -> ArrayRef { Arc::new(StringArray::from(values.to_vec())) };
    write_parquet(&file, vec![("question", text(&["x"]))]);
    refused(&["extra_info", "prompt", "question"]);
    write_parquet(&file, vec![("prompt", Arc::new(Int64Array::from(vec![1])))]);
    refused(&["`prompt` holds Int64"]);
    write_parquet(&file, vec![("prompt", text(&[]))]);
    refused(&["no rows"]);
    write_parquet(&file, vec![("extra_info", text(&["{\"harbor_task_path\""]))]);
    refused(&["row 0", "not JSON"]);
    write_parquet(
        &file,
        vec![("extra_info", text(&["{}"])), ("prompt", text(&[""]))],
    );
    refused(&["row 0", "names no task"]);

    write_task(&folder.path().join("there"), "");
    write_parquet(&file, vec![("prompt", text(&["there", "gone"]))]);
    refused(&["row 1", "/gone does not exist"]);
}

#[test]
fn the_first_path_of_a_row_wins() {
    let folder = tempfile::tempdir().unwrap();
    for name in ["harbor", "plain", "prompt"] {
        write_task(&folder.path().join(name), "");
    }
    let file = folder.path().join("index.parquet");
    let infos = [
        r#"{"harbor_task_path": "harbor", "task_path": "plain"}"#,
        r#"{"harbor_task_path": "", "task_path": "plain"}"#,
        r#"{"harbor_task_path": null}"#,
    ];
    write_parquet(
        &file,
        vec![
            ("extra_info", Arc::new(StringArray::from(infos.to_vec()))),
            ("prompt", Arc::new(StringArray::from(vec!["prompt"; 3]))),
        ],
    );
    let index = TaskIndex::open(&file).unwrap();
    let dirs: Vec<_> = index
        .rows()
        .iter()
        .map(|row| row.dir.file_name().unwrap().to_owned())
        .collect();
    assert_eq!(dirs, ["harbor", "plain", "prompt"]);
}
