//! Several hundred mutated configurations, judged by these rules and by the original's preflight.
//!
//! The original's verdicts are facts and lie in `corpus/original.txt`, one line a case:
//! `number exit fatal-rules warning-rules`, with its checks under the names of our rules. The table is made
//! by `corpus/original.py` from the cases that the test writes:
//!
//! ```text
//! LEGORL_WRITE_CORPUS=/tmp/cases.jsonl cargo nextest run -p legorl --lib preflight::corpus
//! src/preflight/corpus/original.py --original CHECKOUT --cases /tmp/cases.jsonl > src/preflight/corpus/original.txt
//! ```
//!
//! Every disagreement needs a row in [`EXCUSES`], which says why the original is wrong or does not apply;
//! a row that excuses nothing fails as well.

use super::{check, model_family, rules::testing, Facts, Verdict};
use crate::{
    config::{self, values::RunKind, LoadRequest, Settings},
    plan::shape::{tests as shapes, ModelShape},
};
use serde_json::json;
use std::collections::{BTreeMap, BTreeSet};

/// Our rules that have a counterpart.
const SHARED: [&str; 14] = [
    "tool-parser",
    "topology",
    "memory",
    "veomni",
    "routing-replay",
    "agent-name",
    "docker-scaffold",
    "image-source",
    "kubeconfig",
    "image-mirror",
    "lr-schedule",
    "val-timeout",
    "importance-weights",
    "paths",
];

/// A configuration of the original, in its own variable names.
const BASE: &[(&str, &str)] = &[
    ("PROJECT_NAME", "p"),
    ("EXP_NAME", "e"),
    ("BACKEND", "k8s"),
    ("SCAFFOLD", "ohsdk"),
    ("TRAINING_MODE", "sync"),
    ("MODEL_ENGINE", "veomni"),
    ("TOOL_CALL_PARSER", "qwen3_coder"),
    ("TRAIN_FILES", "/data/train.parquet"),
    ("VAL_FILES", "/data/val.parquet"),
    ("K8S_KUBECONFIG", "/data/kubeconfig"),
    ("NNODES", "1"),
    ("N_NODES_TRAIN", "1"),
    ("N_NODES_ROLLOUT", "0"),
    ("NGPUS_PER_NODE", "8"),
    ("SP_SIZE", "8"),
    ("TRAIN_BSZ", "8"),
    ("TRAIN_MINI_BSZ", "8"),
    ("N_RESP", "4"),
    ("TOTAL_EPOCHS", "1"),
    ("HARBOR_K8S_INLINE_BUILD", "true"),
    ("MAX_PROMPT", "30000"),
    ("MAX_RESP", "58304"),
    ("LR_SCHEDULER", "constant"),
    ("HARBOR_VAL_AGENT_MAX_TIMEOUT_SEC", "4800"),
];

/// What lies at MODEL_PATH.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Checkpoint {
    /// Nothing was looked at: structure-only.
    Unread,
    Dense,
    Moe,
    Moe30b,
    Dense35,
    /// A folder whose config.json is cut off.
    Broken,
    /// No folder.
    Absent,
}

impl Checkpoint {
    const READ: [Self; 4] = [Self::Dense, Self::Moe, Self::Moe30b, Self::Dense35];

    fn name(self) -> &'static str {
        match self {
            Self::Unread => "unread",
            Self::Dense => "dense",
            Self::Moe => "moe",
            Self::Moe30b => "moe30b",
            Self::Dense35 => "dense35",
            Self::Broken => "broken",
            Self::Absent => "absent",
        }
    }

    /// Its config.json; the same as in the original's run.
    fn shape(self) -> Option<ModelShape> {
        match self {
            Self::Dense => Some(shapes::qwen3(4096, 36, 32, 12288)),
            Self::Moe => Some(shapes::qwen35_35b()),
            Self::Moe30b => Some(ModelShape {
                model_type: "qwen3_moe".into(),
                delta: None,
                gated_attention: false,
                ..shapes::qwen35_35b()
            }),
            Self::Dense35 => Some(ModelShape {
                model_type: "qwen3_5".into(),
                ..shapes::qwen3(5120, 64, 24, 17408)
            }),
            Self::Unread | Self::Broken | Self::Absent => None,
        }
    }
}

/// One configuration and its surroundings.
#[derive(Clone, Debug)]
struct Case {
    kind: RunKind,
    /// Folder of the checkpoint, below a folder of models.
    model: String,
    checkpoint: Checkpoint,
    /// Index and kubeconfig files that are missing.
    missing: Vec<&'static str>,
    set: Vec<(String, String)>,
}

impl Case {
    fn new(set: &[(&str, &str)]) -> Self {
        Self {
            kind: RunKind::Train,
            model: "Qwen3.5-35B-A3B".into(),
            checkpoint: Checkpoint::Unread,
            missing: Vec::new(),
            set: set
                .iter()
                .map(|(k, v)| ((*k).to_owned(), (*v).to_owned()))
                .collect(),
        }
    }

    fn model(mut self, model: &str) -> Self {
        self.model = model.to_owned();
        self
    }

    fn at(mut self, checkpoint: Checkpoint) -> Self {
        self.checkpoint = checkpoint;
        self
    }

    fn get(&self, name: &str) -> &str {
        let own = self
            .set
            .iter()
            .rev()
            .find(|(k, _)| k == name)
            .map(|(_, v)| v.as_str());
        own.or_else(|| BASE.iter().find(|(k, _)| *k == name).map(|(_, v)| *v))
            .unwrap_or("")
    }

    fn number(&self, name: &str) -> u64 {
        self.get(name).parse().unwrap_or(0)
    }

    /// Base and overrides, each variable once.
    fn values(&self) -> BTreeMap<String, String> {
        let base = BASE.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned()));
        base.chain(self.set.iter().cloned()).collect()
    }

    fn settings(&self) -> Option<Settings> {
        let folder = tempfile::tempdir().unwrap();
        let config = folder.path().join("run.env");
        let mut text = format!("MODEL_PATH=/models/{}\n", self.model);
        for (name, value) in self.values() {
            text.push_str(&format!("{name}='{value}'\n"));
        }
        // What evaluations and sampling runs need besides; the original's checks do not look at it.
        text.push_str(
            "DATASET_PATH=/data/tasks\nINDEX_FILE=/data/i.parquet\nRESULTS_DIR=/r\nOUTPUT_INDEX=/o.parquet\n",
        );
        std::fs::write(&config, text).unwrap();
        let request = LoadRequest {
            kind: self.kind,
            ..LoadRequest::isolated(config, folder.path())
        };
        Some(config::load(&request).ok()?.settings)
    }

    fn facts(&self) -> Option<Facts> {
        if self.checkpoint == Checkpoint::Unread {
            return None;
        }
        let mut facts = testing::facts();
        let index = facts.train_index.clone();
        let file = |name: &str| {
            if self.missing.contains(&name) {
                Err(format!("{name} does not exist"))
            } else {
                index.clone()
            }
        };
        facts.train_index = file("TRAIN_FILES");
        facts.val_index = Some(file("VAL_FILES"));
        let kubeconfig = if self.missing.contains(&"K8S_KUBECONFIG") {
            Err("No such file or directory".to_owned())
        } else {
            Ok("c".to_owned())
        };
        facts.kubernetes = Some(super::facts::KubernetesFacts {
            context: kubeconfig,
            version: None,
            create: None,
        });
        facts.model = match (self.checkpoint.shape(), facts.model) {
            (Some(shape), Ok(model)) => Ok(super::facts::ModelFacts {
                shape,
                // No template: the family decides, as in the original.
                markup: Ok(None),
                ..model
            }),
            _ => Err("cannot be read".into()),
        };
        Some(facts)
    }

    /// Ours: exit code, and the rules that warn or refuse.
    fn judge(&self) -> (i32, BTreeSet<(String, Verdict)>) {
        let Some(settings) = self.settings() else {
            return (1, BTreeSet::new());
        };
        let report = check(&settings, self.facts().as_ref());
        let bad = report.findings.iter().filter(|f| f.verdict >= Verdict::Warn);
        let found = bad.map(|f| (shared_name(f.rule).to_owned(), f.verdict));
        (i32::from(!report.passes()), found.collect())
    }
}

/// Files of three rules are one check of the original.
fn shared_name(rule: &str) -> &str {
    match rule {
        "model-folder" | "task-index" | "input-paths" => "paths",
        other => other,
    }
}

const MODELS: [&str; 10] = [
    "Qwen3.5-35B-A3B",
    "Qwen3.6-27B",
    "qwen3_5-9b",
    "Qwen3-30B-A3B-Instruct-2507",
    "qwen3_30b_sft",
    "Qwen3-8B",
    "CHANGEME",
    "qwen3.5-runs/Qwen3-8B-sft",
    "my35b/Qwen3-30B-A3B",
    "qwen3-8b/global_step_35",
];

const SCAFFOLDS: [&str; 4] = ["ohsdk", "oh", "cc", "oc"];

/// Every case; the number of a case is its place.
fn cases() -> Vec<Case> {
    let mut all = vec![Case::new(&[])];
    for model in MODELS {
        for scaffold in SCAFFOLDS {
            for parser in ["qwen3_coder", "hermes"] {
                all.push(Case::new(&[("SCAFFOLD", scaffold), ("TOOL_CALL_PARSER", parser)]).model(model));
            }
        }
    }
    for mode in ["sync", "async"] {
        for nodes in ["1", "2", "3", "4"] {
            for train in ["1", "2", "3"] {
                for rollout in ["0", "1", "2"] {
                    let set = [
                        ("TRAINING_MODE", mode),
                        ("NNODES", nodes),
                        ("N_NODES_TRAIN", train),
                        ("N_NODES_ROLLOUT", rollout),
                    ];
                    all.push(Case::new(&set));
                }
            }
        }
        for sp in ["1", "2", "3", "4", "5", "6", "8", "12", "16", "32"] {
            for (nodes, gpus) in [("1", "8"), ("2", "8"), ("3", "4")] {
                let rollout = if mode == "async" { "1" } else { "0" };
                let total = (nodes.parse::<u32>().unwrap() + rollout.parse::<u32>().unwrap()).to_string();
                let set = [
                    ("TRAINING_MODE", mode),
                    ("NNODES", total.as_str()),
                    ("N_NODES_TRAIN", nodes),
                    ("N_NODES_ROLLOUT", rollout),
                    ("NGPUS_PER_NODE", gpus),
                    ("SP_SIZE", sp),
                ];
                all.push(Case::new(&set));
            }
        }
    }
    for response in ["58304", "80000", "89999", "90000", "101072", "170000"] {
        for nodes in ["1", "2"] {
            for model in ["Qwen3.5-35B-A3B", "Qwen3.6-27B", "Qwen3-8B"] {
                let set = [
                    ("MAX_RESP", response),
                    ("NNODES", nodes),
                    ("N_NODES_TRAIN", nodes),
                ];
                all.push(Case::new(&set).model(model));
                all.push(Case::new(&set).model(model).at(Checkpoint::Moe));
            }
        }
    }
    for engine in ["fsdp", "veomni"] {
        for fused in ["True", "False", "true"] {
            for offload in ["True", "False", "true"] {
                let set = [
                    ("MODEL_ENGINE", engine),
                    ("FUSED_KERNELS", fused),
                    ("ENABLE_ACTIVATION_OFFLOAD", offload),
                ];
                all.push(Case::new(&set));
            }
        }
        for replay in ["True", "False", ""] {
            for sp in ["1", "8"] {
                let case = Case::new(&[("MODEL_ENGINE", engine), ("ENABLE_R3", replay), ("SP_SIZE", sp)]);
                all.push(case.clone());
                let read = Checkpoint::READ
                    .iter()
                    .chain([&Checkpoint::Broken, &Checkpoint::Absent]);
                all.extend(read.map(|checkpoint| case.clone().at(*checkpoint)));
            }
        }
    }
    for scaffold in SCAFFOLDS {
        for name in ["null", "", "claude-code", "opencode", "openhands", "Claude-Code"] {
            all.push(Case::new(&[("SCAFFOLD", scaffold), ("HARBOR_AGENT_NAME", name)]));
        }
        all.push(Case::new(&[("BACKEND", "docker"), ("SCAFFOLD", scaffold)]));
    }
    for backend in ["k8s", "docker"] {
        for registry in ["", "r:5000"] {
            for inline in ["true", "false", "True", ""] {
                for mirror in ["", "m:5000"] {
                    let set = [
                        ("BACKEND", backend),
                        ("HARBOR_OPENSWE_IMAGE_REGISTRY", registry),
                        ("HARBOR_K8S_INLINE_BUILD", inline),
                        ("HARBOR_NYDUS_MIRROR", mirror),
                    ];
                    all.push(Case::new(&set));
                }
            }
        }
    }
    for scheduler in ["constant", "cosine", ""] {
        for timeout in ["4800", "", "600", "2400"] {
            for weights in ["null", "token", "sequence", ""] {
                let set = [
                    ("LR_SCHEDULER", scheduler),
                    ("HARBOR_VAL_AGENT_MAX_TIMEOUT_SEC", timeout),
                    ("ROLLOUT_IS", weights),
                ];
                all.push(Case::new(&set));
            }
        }
    }
    for bits in 0..16 {
        let mut case = Case::new(&[]).at(if bits & 1 == 0 {
            Checkpoint::Moe
        } else {
            Checkpoint::Absent
        });
        let files = [(2, "TRAIN_FILES"), (4, "VAL_FILES"), (8, "K8S_KUBECONFIG")];
        case.missing = files
            .iter()
            .filter(|(bit, _)| bits & bit != 0)
            .map(|(_, name)| *name)
            .collect();
        all.push(case);
    }
    for checkpoint in Checkpoint::READ {
        for model in [
            "Qwen3.5-35B-A3B",
            "Qwen3-30B-A3B",
            "Qwen3-8B",
            "qwen3.5-runs/Qwen3-8B-sft",
        ] {
            for (scaffold, parser) in [
                ("ohsdk", "hermes"),
                ("ohsdk", "qwen3_coder"),
                ("cc", "hermes"),
                ("cc", "qwen3_coder"),
            ] {
                let set = [("SCAFFOLD", scaffold), ("TOOL_CALL_PARSER", parser)];
                all.push(Case::new(&set).model(model).at(checkpoint));
            }
        }
    }
    for kind in [RunKind::Eval, RunKind::Infer] {
        for model in MODELS {
            for (scaffold, parser) in [("ohsdk", "hermes"), ("cc", "qwen3_coder")] {
                let mut case =
                    Case::new(&[("SCAFFOLD", scaffold), ("TOOL_CALL_PARSER", parser)]).model(model);
                case.kind = kind;
                all.push(case);
            }
        }
    }
    all.extend(mixtures(&all, 250));
    all
}

/// Cases with the overrides of three others, drawn by a fixed sequence.
fn mixtures(from: &[Case], count: usize) -> Vec<Case> {
    let mut state = 0x2545_f491_4f6c_dd1du64;
    let mut draw = |below: usize| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state % below as u64) as usize
    };
    let train: Vec<&Case> = from.iter().filter(|case| case.kind == RunKind::Train).collect();
    (0..count)
        .map(|_| {
            let mut case = train[draw(train.len())].clone();
            for _ in 0..2 {
                case.set.extend(train[draw(train.len())].set.iter().cloned());
            }
            case
        })
        .collect()
}

/// Rule, what it is about, and why the original's verdict does not hold.
type Excuse = (
    &'static str,
    fn(&Case, Option<Verdict>, Option<Verdict>) -> bool,
    &'static str,
);

/// Ours, theirs: `None` is no complaint.
const EXCUSES: &[Excuse] = &[
    (
        "tool-parser",
        |c, _, _| c.checkpoint == Checkpoint::Unread && c.model.contains('/'),
        "the original matches the whole path: a folder above the checkpoint, or a step number, is no family",
    ),
    (
        "tool-parser",
        |c, _, _| c.checkpoint.shape().is_some(),
        "config.json says which family it is, the original goes by the path",
    ),
    (
        "memory",
        |c, _, theirs| {
            c.checkpoint == Checkpoint::Unread && c.model.contains('/') && theirs == Some(Verdict::Warn)
        },
        "the original matches the whole path, and another model is meant",
    ),
    (
        "memory",
        |c, ours, theirs| c.checkpoint.shape().is_some() && theirs.is_none() && ours == Some(Verdict::Warn),
        "the estimate counts SP_SIZE and every family; the original looks at the name, the nodes and the window",
    ),
    (
        "memory",
        |c, ours, theirs| c.checkpoint != Checkpoint::Unread && theirs == Some(Verdict::Warn) && ours.is_none(),
        "the checkpoint is another model than its folder's name says, or its window is spread over more GPUs",
    ),
    (
        "topology",
        |c, ours, _| c.get("TRAINING_MODE") == "async" && c.number("N_NODES_ROLLOUT") == 0 && ours == Some(Verdict::Fatal),
        "an async run without a rollout node generates nothing",
    ),
    (
        "topology",
        |c, _, _| c.get("TRAINING_MODE") == "sync" && c.number("N_NODES_ROLLOUT") > 0,
        "under sync all nodes train: the original's own trainer takes NNODES, its check N_NODES_TRAIN",
    ),
    (
        "routing-replay",
        |c, _, theirs| c.get("MODEL_ENGINE") == "fsdp" && c.get("SP_SIZE") != "1" && theirs == Some(Verdict::Fatal),
        "its FSDP cannot replay over sequence parallelism; ours is judged by `not in this version`",
    ),
    (
        "agent-name",
        |c, ours, theirs| {
            ["cc", "oc"].contains(&c.get("SCAFFOLD")) && ours.is_none() && theirs == Some(Verdict::Warn)
        },
        "the original's own cc and oc templates set no name, and its check warns about them",
    ),
    (
        "lr-schedule",
        |c, ours, theirs| c.checkpoint != Checkpoint::Unread && ours.is_none() && theirs == Some(Verdict::Warn),
        "the index tells the number of steps here; the original's trainer puts -1 in its place",
    ),
    (
        "val-timeout",
        |c, ours, theirs| {
            c.number("HARBOR_VAL_AGENT_MAX_TIMEOUT_SEC") < 2400 && theirs.is_none() && ours == Some(Verdict::Warn)
        },
        "the original only looks whether a value is set; a validation that is cut off before training is the same mistake",
    ),
    (
        "paths",
        |c, ours, _| c.checkpoint == Checkpoint::Broken && ours == Some(Verdict::Fatal),
        "a folder whose config.json is cut off exists, and cannot be loaded",
    ),
];

#[test]
fn verdicts_agree_with_the_original_where_it_is_right() {
    let cases = cases();
    if let Some(path) = std::env::var_os("LEGORL_WRITE_CORPUS") {
        let lines = cases.iter().map(|case| {
            json!({"kind": case.kind.name(), "model": case.model, "checkpoint": case.checkpoint.name(),
                "missing": case.missing, "values": case.values(), "ours": format!("{:?}", case.judge())})
            .to_string()
        });
        std::fs::write(path, lines.collect::<Vec<_>>().join("\n")).unwrap();
    }
    let table = std::fs::read_to_string(concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/src/preflight/corpus/original.txt"
    ))
    .unwrap();
    let table: Vec<&str> = table.lines().filter(|line| !line.starts_with('#')).collect();
    assert_eq!(
        table.len(),
        cases.len(),
        "write the table again: see the head of this file"
    );
    let mut used: BTreeMap<usize, usize> = BTreeMap::new();
    let mut wrong = Vec::new();
    for (number, (case, line)) in cases.iter().zip(table).enumerate() {
        let theirs = parse(line, number);
        let (exit, found) = case.judge();
        let ours: BTreeMap<&str, Verdict> = found
            .iter()
            .map(|(rule, verdict)| (rule.as_str(), *verdict))
            .collect();
        let mut excused = false;
        for rule in SHARED {
            let (our, their) = (ours.get(rule).copied(), theirs.1.get(rule).copied());
            if our == their {
                continue;
            }
            match EXCUSES
                .iter()
                .position(|(r, applies, _)| *r == rule && applies(case, our, their))
            {
                Some(at) => {
                    *used.entry(at).or_default() += 1;
                    excused = true;
                }
                None => wrong.push(format!(
                    "case {number} {rule}: ours {our:?}, theirs {their:?}: {case:?}"
                )),
            }
        }
        // Other rules of ours refuse for reasons that the original does not look at.
        let others = found
            .iter()
            .any(|(rule, v)| *v == Verdict::Fatal && !SHARED.contains(&rule.as_str()));
        if exit != theirs.0 && !excused && !others {
            wrong.push(format!(
                "case {number}: exit {exit}, theirs {}: {case:?}",
                theirs.0
            ));
        }
        // Without facts nothing but shared rules may refuse: the figure that counts.
        if case.checkpoint == Checkpoint::Unread && others {
            wrong.push(format!("case {number}: refused by {found:?}: {case:?}"));
        }
    }
    for (at, (rule, _, reason)) in EXCUSES.iter().enumerate() {
        let times = used.get(&at).copied().unwrap_or(0);
        eprintln!("{times:4} x {rule}: {reason}");
        if times == 0 {
            wrong.push(format!("nothing needs the excuse of {rule}: {reason}"));
        }
    }
    eprintln!("{} cases", cases.len());
    assert!(
        wrong.is_empty(),
        "{} disagreements:\n{}",
        wrong.len(),
        wrong.join("\n")
    );
    assert!(cases.len() > 500);
}

/// `number exit fatal,rules warn,rules`; `-` is none.
fn parse(line: &str, number: usize) -> (i32, BTreeMap<String, Verdict>) {
    let fields: Vec<&str> = line.split(' ').collect();
    assert_eq!(fields[0].parse(), Ok(number), "{line}");
    let list = |field: &str, verdict: Verdict| -> Vec<(String, Verdict)> {
        let names = field.split(',').filter(|name| *name != "-");
        names.map(|name| (name.to_owned(), verdict)).collect()
    };
    let mut found: BTreeMap<String, Verdict> = list(fields[3], Verdict::Warn).into_iter().collect();
    found.extend(list(fields[2], Verdict::Fatal));
    (fields[1].parse().unwrap(), found)
}

#[test]
fn names_of_the_corpus_are_of_both_kinds() {
    let families: BTreeSet<String> = MODELS
        .iter()
        .map(|name| format!("{:?}", model_family::by_name(name.rsplit('/').next().unwrap())))
        .collect();
    assert_eq!(families.len(), 3);
}
