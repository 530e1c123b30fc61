//! The run-configuration block: the values that decide a run, before its checks. It computes nothing that
//! the run would not use; numbers stand as they were written.

use super::report::{titled, WIDTH};
use crate::{
    config::{
        settings::Settings,
        values::{RunKind, TrainingMode},
        variables::{self, DefaultValue},
        Loaded,
    },
    preflight::Facts,
};
use std::{fmt::Write as _, path::Path};

/// What stands in a copied run config where a value is still missing.
const PLACEHOLDER: &str = "CHANGEME";

/// Label and value of a line; an empty label continues the one above.
type Row = (&'static str, String);

/// The block.
pub fn text(loaded: &Loaded, facts: Option<&Facts>) -> String {
    let kind = loaded.settings.run.kind;
    let model = Model::of(facts);
    let rows = match kind {
        RunKind::Train => train(loaded, facts, &model),
        RunKind::Eval | RunKind::Infer => offline(loaded, &model),
    };
    let title = format!("run configuration ({kind})");
    let mut out = format!("\n{}\n", titled(&title, '═', WIDTH - 1));
    for (label, value) in rows {
        // Writing to a String cannot fail.
        let _ = writeln!(out, "  {label:<12} {value}");
    }
    out.push_str(&"═".repeat(WIDTH));
    out.push_str("\n\n");
    out
}

/// What is known of the checkpoint.
enum Model {
    /// It was not opened, or cannot be read.
    Unknown,
    Known {
        model_type: String,
        is_moe: bool,
    },
}

impl Model {
    fn of(facts: Option<&Facts>) -> Self {
        match facts.map(|f| &f.model) {
            Some(Ok(model)) => Model::Known {
                model_type: model.shape.model_type.clone(),
                is_moe: model.shape.is_moe(),
            },
            _ => Model::Unknown,
        }
    }

    /// As the rules see it, so that block and findings agree.
    fn family(&self) -> &'static str {
        match self {
            Model::Unknown => "unknown",
            Model::Known { is_moe: true, .. } => "moe",
            Model::Known { .. } => "dense",
        }
    }

    fn bracket(&self) -> String {
        match self {
            Model::Unknown => "unknown".into(),
            Model::Known { model_type, .. } => format!("{}: {model_type}", self.family()),
        }
    }
}

/// A value as it was written, or its default.
fn written(loaded: &Loaded, name: &str) -> String {
    if let Some(entry) = loaded.layered.get(name).filter(|entry| !entry.text.is_empty()) {
        return crate::config::show::redacted(name, &entry.text);
    }
    if let Some((_, text)) = loaded.derived.iter().find(|(derived, _)| *derived == name) {
        return text.clone();
    }
    match variables::find(name).map(|variable| variable.default) {
        Some(DefaultValue::Value(text)) => text.to_owned(),
        _ => "null".to_owned(),
    }
}

/// A path as the run uses it; a placeholder as it stands, since it is no path yet.
fn path(loaded: &Loaded, name: &str, path: &Path) -> String {
    let text = written(loaded, name);
    if text.contains(PLACEHOLDER) {
        text
    } else {
        path.display().to_string()
    }
}

fn yes_no(value: bool) -> &'static str {
    if value {
        "True"
    } else {
        "False"
    }
}

fn head(loaded: &Loaded, model: &Model) -> Vec<Row> {
    let s = &loaded.settings;
    let axes = match s.run.kind {
        RunKind::Train => format!(
            "mode={} engine={} scaffold={} backend={}",
            s.run.training_mode, s.run.model_engine, s.run.scaffold, s.run.backend
        ),
        RunKind::Eval | RunKind::Infer => format!("scaffold={} backend={}", s.run.scaffold, s.run.backend),
    };
    let site = loaded.layered.site_path.as_ref();
    let mut rows = vec![("config", s.run.config_path.display().to_string())];
    rows.extend(site.map(|path| ("", format!("site={}", path.display()))));
    rows.extend([
        (
            "experiment",
            format!("project={}  exp={}", s.run.project_name, s.run.exp_name),
        ),
        ("axes", axes),
        (
            "model",
            format!(
                "{}  [{}]",
                path(loaded, "MODEL_PATH", &s.model.path),
                model.bracket()
            ),
        ),
        (
            "",
            format!(
                "served={}  tool_parser={}",
                s.model.served_model_name, s.model.tool_call_parser
            ),
        ),
    ]);
    rows
}

fn topology(s: &Settings) -> String {
    let t = &s.topology;
    // A mesh that does not divide is a finding of the checks; here it must only not stop the block.
    let dp = s.train_ranks() / t.sp_size.max(1);
    let pools = match s.run.training_mode {
        TrainingMode::Sync => format!("{} nodes × {} gpu (colocated)", t.nnodes, t.ngpus_per_node),
        TrainingMode::Async => format!(
            "{} nodes × {} gpu = train {} / rollout {}",
            t.nnodes, t.ngpus_per_node, t.n_nodes_train, t.n_nodes_rollout
        ),
    };
    format!("{pools}  SP={} → dp={dp}  vllm_TP={}", t.sp_size, s.plan.gen_tp)
}

fn context(s: &Settings) -> Row {
    (
        "context",
        format!(
            "prompt={} + resp={} = {}",
            s.data.max_prompt_tokens,
            s.data.max_response_tokens,
            s.window_tokens()
        ),
    )
}

fn train(loaded: &Loaded, facts: Option<&Facts>, model: &Model) -> Vec<Row> {
    let s = &loaded.settings;
    let value = |name: &str| written(loaded, name);
    let val = s.data.val_files.as_ref();
    let routing_replay = match (s.plan.enable_r3, model.family()) {
        (Some(on), _) => yes_no(on),
        (None, "moe") => "True",
        (None, "dense") => "False",
        (None, _) => "auto",
    };
    let kl = if s.algorithm.use_kl_loss {
        value("KL_LOSS_COEF")
    } else {
        "off".into()
    };
    let steps = match (
        s.schedule.total_training_steps,
        facts.and_then(|f| f.train_index.as_ref().ok()),
    ) {
        (Some(n), _) => format!("  steps={n}"),
        (None, Some(index)) => format!("  steps={}", s.total_steps(index.rows as u64)),
        (None, None) => String::new(),
    };
    let mut rows = head(loaded, model);
    rows.extend([
        (
            "data",
            format!("train={}", path(loaded, "TRAIN_FILES", &s.data.train_files)),
        ),
        (
            "",
            format!(
                "val  ={}",
                val.map_or("none".to_owned(), |file| path(loaded, "VAL_FILES", file))
            ),
        ),
        ("topology", topology(s)),
        (
            "batch",
            format!(
                "{} prompts × {} resp = {} trials/step  mini={}  dynamic_bsz=True",
                s.batch.train_bsz,
                s.batch.n_resp,
                u64::from(s.batch.train_bsz) * u64::from(s.batch.n_resp),
                s.batch.train_mini_bsz,
            ),
        ),
        context(s),
        (
            "algorithm",
            format!(
                "{}  lr={}  lr_sched={}  kl_loss_coef={kl}  loss={}",
                s.algorithm.adv_estimator,
                value("ACTOR_LR"),
                s.optim.scheduler,
                s.algorithm.policy_loss_mode
            ),
        ),
        (
            "rollout",
            format!(
                "temp={} top_p={}  val_temp={}  val_n={}",
                value("TEMPERATURE"),
                value("TOP_P"),
                value("VAL_TEMPERATURE"),
                s.validation.n
            ),
        ),
        (
            "",
            format!(
                "R3={routing_replay} (model is {})  rollout_is={}  max_num_seqs={}",
                model.family(),
                value("ROLLOUT_IS"),
                s.engine.max_num_seqs
            ),
        ),
        (
            "",
            format!(
                "staleness={}  in_flight={}  kv_cache_tokens={}",
                s.rollout.staleness, s.rollout.n_concurrent, s.engine.kv_cache_tokens
            ),
        ),
        (
            "schedule",
            format!(
                "save_freq={}  test_freq={}  val_before_train={}  epochs={}{steps}",
                value("TRAINER_SAVE_FREQ"),
                value("TRAINER_TEST_FREQ"),
                yes_no(s.schedule.val_before_train),
                s.schedule.total_epochs
            ),
        ),
        (
            "logs",
            format!(
                "train={}",
                s.paths.logs.join(format!("{}.log", s.run.exp_name)).display()
            ),
        ),
        ("", format!("trials={}", s.paths.trials.display())),
        ("", format!("ckpts={}", s.paths.checkpoints.display())),
    ]);
    rows
}

fn offline(loaded: &Loaded, model: &Model) -> Vec<Row> {
    let s = &loaded.settings;
    let mut rows = head(loaded, model);
    if let Some(eval) = &s.eval {
        let data = match (&eval.dataset_path, &eval.dataset_name) {
            (Some(path), _) => format!("dataset={}", path.display()),
            (None, name) => format!("dataset={}", name.as_deref().unwrap_or("none")),
        };
        let tasks = eval.n_tasks.map_or("all".to_owned(), |n| n.to_string());
        rows.push(("data", format!("{data}  tasks={tasks}")));
    }
    if let Some(infer) = &s.infer {
        let instances = infer.instances_file.as_ref();
        let instances = instances.map_or("the whole index".to_owned(), |p| p.display().to_string());
        rows.extend([
            ("data", format!("index={}", infer.index_file.display())),
            ("", format!("instances={instances}")),
            ("output", format!("results={}", infer.results_dir.display())),
            ("", format!("index={}", infer.output_index.display())),
        ]);
    }
    let trials = s.infer.as_ref().map_or(1, |infer| infer.n_trials);
    rows.extend([
        (
            "topology",
            format!(
                "{} nodes × {} gpu  vllm_TP={}",
                s.topology.nnodes, s.topology.ngpus_per_node, s.plan.gen_tp
            ),
        ),
        context(s),
        (
            "rollout",
            format!(
                "temp={} top_p={}  trials/task={trials}  in_flight={}",
                written(loaded, "TEMPERATURE"),
                written(loaded, "TOP_P"),
                s.rollout.n_concurrent
            ),
        ),
        (
            "logs",
            format!(
                "log={}",
                s.paths.logs.join(format!("{}.log", s.run.exp_name)).display()
            ),
        ),
        ("", format!("trials={}", s.paths.trials.display())),
    ]);
    rows
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{load, LoadRequest};

    fn block(kind: RunKind, text_of_config: &str) -> String {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("run.env"), text_of_config).unwrap();
        let request = LoadRequest {
            kind,
            ..LoadRequest::isolated("run.env", folder.path())
        };
        text(&load(&request).unwrap_or_else(|error| panic!("{error}")), None)
    }

    /// Labels and their order are a contract: people and programs read them.
    #[test]
    fn a_training_run_has_all_labels_in_order() {
        let text = block(
            RunKind::Train,
            "PROJECT_NAME=p\nEXP_NAME=e\nMODEL_PATH=m\nTRAIN_FILES=t.parquet\nVAL_FILES=v.parquet\n\
             ACTOR_LR=1e-6\nTEMPERATURE=1.0\nTRAIN_BSZ=8\nN_RESP=4\nSP_SIZE=8\nGEN_TP=4\n\
             MAX_PROMPT=30000\nMAX_RESP=58304\nTRAINER_SAVE_FREQ=5\n",
        );
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(
            lines[1],
            "═════════════════════ run configuration (train) ═════════════════════"
        );
        let labels: Vec<&str> = lines[2..]
            .iter()
            .filter_map(|line| line.get(2..15))
            .map(str::trim)
            .filter(|label| !label.is_empty() && !label.starts_with('═'))
            .collect();
        assert_eq!(
            labels,
            [
                "config",
                "experiment",
                "axes",
                "model",
                "data",
                "topology",
                "batch",
                "context",
                "algorithm",
                "rollout",
                "schedule",
                "logs"
            ]
        );
        for part in [
            "  experiment   project=p  exp=e\n",
            "  axes         mode=sync engine=fsdp scaffold=mini backend=process\n",
            "  [unknown]\n               served=vllm_model  tool_parser=hermes\n",
            "  topology     1 nodes × 8 gpu (colocated)  SP=8 → dp=1  vllm_TP=4\n",
            "  batch        8 prompts × 4 resp = 32 trials/step  mini=8  dynamic_bsz=True\n",
            "  context      prompt=30000 + resp=58304 = 88304\n",
            "  algorithm    grpo  lr=1e-6  lr_sched=constant  kl_loss_coef=0.001",
            "  rollout      temp=1.0 top_p=1.0  val_temp=0.7  val_n=1\n",
            "               R3=auto (model is unknown)  rollout_is=null  max_num_seqs=64\n",
            "  schedule     save_freq=5  test_freq=10  val_before_train=True  epochs=1\n",
        ] {
            assert!(text.contains(part), "`{part}` is missing in\n{text}");
        }
    }

    /// Every number at the end of its range: nothing overflows on the way to a verdict.
    #[test]
    fn extreme_numbers_reach_the_checks() {
        use crate::config::variables::Kind;
        let base = "PROJECT_NAME=p\nEXP_NAME=e\nMODEL_PATH=m\nTRAIN_FILES=t\nINDEX_FILE=i\nRESULTS_DIR=r\n\
                    OUTPUT_INDEX=o\nDATASET_NAME=d\n";
        for largest in [true, false] {
            let mut config = base.to_owned();
            for variable in variables::all() {
                let text = match variable.kind {
                    Kind::Integer { min, max } => if largest { max } else { min }.to_string(),
                    Kind::Number { min, max } => if largest { max } else { min }.to_string(),
                    _ => continue,
                };
                config.push_str(&format!("{}={text}\n", variable.name));
            }
            for kind in RunKind::ALL {
                let folder = tempfile::tempdir().unwrap();
                std::fs::write(folder.path().join("run.env"), &config).unwrap();
                let request = LoadRequest {
                    kind: *kind,
                    ..LoadRequest::isolated("run.env", folder.path())
                };
                let loaded = load(&request).unwrap_or_else(|error| panic!("{error}"));
                assert!(text(&loaded, None).contains("run configuration"));
                assert!(crate::cli::dry_run::text(&loaded, &[]).contains("=== Ranks ==="));
                let report = crate::preflight::check(&loaded.settings, None);
                assert!(!report.findings.is_empty());
            }
        }
    }

    #[test]
    fn a_placeholder_is_not_made_a_path() {
        let base = "PROJECT_NAME=p\nEXP_NAME=e\n";
        let text = block(
            RunKind::Train,
            &format!("{base}MODEL_PATH=CHANGEME\nTRAIN_FILES=CHANGEME\nVAL_FILES=v.parquet\n"),
        );
        assert!(text.contains("  model        CHANGEME  [unknown]\n"), "{text}");
        assert!(
            text.contains("  data         train=CHANGEME\n               val  =/"),
            "{text}"
        );
    }

    #[test]
    fn evaluations_and_sampling_runs_have_their_own_blocks() {
        let base = "PROJECT_NAME=p\nEXP_NAME=e\nMODEL_PATH=m\n";
        let text = block(
            RunKind::Eval,
            &format!("{base}DATASET_NAME=verified\nN_TASKS=5\n"),
        );
        assert!(text.contains("run configuration (eval)"), "{text}");
        assert!(text.contains("dataset=verified  tasks=5"), "{text}");
        let more = "INDEX_FILE=/i.parquet\nRESULTS_DIR=/r\nOUTPUT_INDEX=/o.parquet\n";
        let text = block(RunKind::Infer, &format!("{base}{more}"));
        assert!(
            text.contains("index=/i.parquet") && text.contains("trials/task=4"),
            "{text}"
        );
    }
}
