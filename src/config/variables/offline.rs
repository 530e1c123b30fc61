//! Variables of evaluation (`legorl-rank eval`) and of sampling runs (`legorl-rank infer`).

use super::{integer, number, row, DefaultValue::*, Kind::*, Tier::*, Variable};
use crate::config::settings::values::RunKind;

/// Section of `legorl-rank eval`.
pub const EVAL: &str = "Evaluation";
/// Section of `legorl-rank infer`.
pub const INFER: &str = "Sampling runs";

#[rustfmt::skip]
pub(super) const VARIABLES: &[Variable] = &[
    row(EVAL, "DATASET_PATH", Path, Unset("DATASET_NAME names the tasks"), "", Essential,
        "Folder of Harbor tasks. An evaluation sets this or DATASET_NAME.").only_for(&[RunKind::Eval]),
    row(EVAL, "DATASET_NAME", Text, Unset("DATASET_PATH holds the tasks"), "", Essential,
        "Name of a data set in Harbor's registry.").only_for(&[RunKind::Eval]),
    row(EVAL, "N_TASKS", integer(1), Unset("all tasks"), "tasks", Common,
        "First tasks of the data set.").only_for(&[RunKind::Eval]),

    row(INFER, "INDEX_FILE", Path, Required, "", Essential,
        "Task index: a parquet table that points at task folders.").only_for(&[RunKind::Infer]),
    row(INFER, "INSTANCES_FILE", Path, Unset("the whole index"), "", Common,
        "Text file with one task name a line: the share of this run.").only_for(&[RunKind::Infer]),
    row(INFER, "RESULTS_DIR", Path, Required, "", Essential,
        "Folder of results, one file a trial; finished trials are not run again.").only_for(&[RunKind::Infer]),
    row(INFER, "OUTPUT_INDEX", Path, Required, "", Essential,
        "Index to write: tasks that some trials solved and some did not.").only_for(&[RunKind::Infer]),
    row(INFER, "N_TRIALS", integer(1), Value("4"), "trials", Common,
        "Trials of each task.").only_for(&[RunKind::Infer]),
    row(INFER, "TRIAL_HARD_TIMEOUT_SEC", number(1.0), Value("4500"), "seconds", Common,
        "Longest time of one trial, sandbox and verifier included.").only_for(&[RunKind::Infer]),
];
