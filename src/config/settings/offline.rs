//! Settings of evaluations and sampling runs.

use super::{resolve::Resolver, values::RunKind};
use serde::{Deserialize, Serialize};
use std::{path::PathBuf, time::Duration};

/// `legorl-rank eval`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct EvalSettings {
    /// `DATASET_PATH`; this or the name is set.
    pub dataset_path: Option<PathBuf>,
    /// `DATASET_NAME`.
    pub dataset_name: Option<String>,
    /// `N_TASKS`; `None` takes all.
    pub n_tasks: Option<u32>,
}

/// `legorl-rank infer`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct InferSettings {
    /// `INDEX_FILE`.
    pub index_file: PathBuf,
    /// `INSTANCES_FILE`; `None` takes the whole index.
    pub instances_file: Option<PathBuf>,
    /// `RESULTS_DIR`.
    pub results_dir: PathBuf,
    /// `OUTPUT_INDEX`.
    pub output_index: PathBuf,
    /// `N_TRIALS` of each task.
    pub n_trials: u32,
    /// `TRIAL_HARD_TIMEOUT_SEC`.
    pub trial_hard_timeout: Duration,
}

pub(super) fn eval(r: &mut Resolver<'_>) -> Option<EvalSettings> {
    let settings = EvalSettings {
        dataset_path: r.path("DATASET_PATH"),
        dataset_name: r.text("DATASET_NAME"),
        n_tasks: r.opt_u32("N_TASKS"),
    };
    if r.kind != RunKind::Eval {
        return None;
    }
    match (&settings.dataset_path, &settings.dataset_name) {
        (None, None) => r.problem(
            "DATASET_PATH",
            "has no value, and neither has DATASET_NAME: an evaluation needs one of them".into(),
        ),
        (Some(_), Some(_)) => {
            r.problem(
                "DATASET_NAME",
                "is set, and so is DATASET_PATH: set one of them".into(),
            );
        }
        _ => {}
    }
    Some(settings)
}

pub(super) fn infer(r: &mut Resolver<'_>) -> Option<InferSettings> {
    let settings = InferSettings {
        index_file: r.path("INDEX_FILE").unwrap_or_default(),
        instances_file: r.path("INSTANCES_FILE"),
        results_dir: r.path("RESULTS_DIR").unwrap_or_default(),
        output_index: r.path("OUTPUT_INDEX").unwrap_or_default(),
        n_trials: r.u32("N_TRIALS"),
        trial_hard_timeout: r.seconds("TRIAL_HARD_TIMEOUT_SEC"),
    };
    (r.kind == RunKind::Infer).then_some(settings)
}
