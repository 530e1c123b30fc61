//! Against transformers: `tests/fixtures/models/make.py` wrote the checkpoints and the numbers.

use super::*;
use crate::model::hf::{export_folder, save_folder, Checkpoint, ModelConfig, ModelError, ModelType};
use safetensors::SafeTensors;
use std::{
    path::{Path, PathBuf},
    process::Command,
};
use tch::{no_grad, Device, Kind, Tensor};

/// Folder, and the reference that belongs to it.
const FIXTURES: [(&str, &str); 9] = [
    ("llama", "llama"),
    ("qwen3", "qwen3"),
    ("qwen3_untied_bias", "qwen3_untied_bias"),
    ("qwen3_moe", "qwen3_moe"),
    ("qwen3_moe_mixed", "qwen3_moe_mixed"),
    ("qwen3_next", "qwen3_next"),
    ("qwen3_5", "qwen3_5"),
    ("qwen3_5_moe", "qwen3_5_moe"),
    ("qwen3_5_moe_stacked", "qwen3_5_moe"),
];

fn fixtures() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/models")
}

/// A tensor of a safetensors file.
fn stored(path: &Path, name: &str) -> Option<Tensor> {
    let bytes = std::fs::read(path).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let view = file.tensor(name).ok()?;
    let shape: Vec<i64> = view.shape().iter().map(|n| *n as i64).collect();
    let kind = match view.dtype() {
        safetensors::Dtype::I64 => Kind::Int64,
        safetensors::Dtype::F64 => Kind::Double,
        _ => Kind::Float,
    };
    Some(Tensor::from_data_size(view.data(), &shape, kind))
}

fn reference(name: &str, tensor: &str) -> Option<Tensor> {
    stored(&fixtures().join(format!("{name}.reference.safetensors")), tensor)
}

fn load(name: &str) -> Policy {
    // Waiting OpenMP threads spin, and tests run beside each other.
    tch::set_num_threads(1);
    Policy::load(&fixtures().join(name), Device::Cpu).unwrap()
}

fn rows(ids: &Tensor) -> Vec<Vec<i64>> {
    Vec::try_from(ids).unwrap()
}

fn floats(traced: &[PlainTensor], name: &str) -> Tensor {
    let found = traced.iter().find(|t| t.name == name).unwrap();
    let shape: Vec<i64> = found.shape.iter().map(|n| *n as i64).collect();
    match &found.values {
        PlainValues::Floats(values) => Tensor::from_slice(values).view(&shape[..]),
        PlainValues::Integers(values) => Tensor::from_slice(values).view(&shape[..]),
    }
}

/// Largest difference over the reference's standard deviation.
fn distance(got: &Tensor, want: &Tensor) -> f64 {
    assert_eq!(got.size(), want.size());
    (got - want).abs().max().double_value(&[]) / want.std(true).double_value(&[])
}

fn logits_of(policy: &Policy, ids: &Tensor) -> Tensor {
    floats(&trace(policy, &rows(ids)), "logits")
}

#[test]
fn logits_hidden_states_and_routing_are_those_of_transformers() {
    for (folder, name) in FIXTURES {
        let policy = load(folder);
        let traced = trace(&policy, &rows(&reference(name, "input_ids").unwrap()));
        // The hybrids' references are f32 and the network is not: what differs is the rounding of transformers
        // (see the two tests at the end of this file).
        let hybrid = policy.config.model_type.is_hybrid();
        let bound = if hybrid { 2e-4 } else { 5e-5 };
        for tensor in ["logits", "logprobs", "hidden"] {
            let gap = distance(&floats(&traced, tensor), &reference(name, tensor).unwrap());
            println!("{folder}: {tensor} differ by {gap:.1e}");
            assert!(gap < bound, "{folder}: {tensor} differ by {gap}");
        }
        let Some(want) = reference(name, "topk") else {
            assert_eq!(policy.config.num_sparse_layers(), 0);
            continue;
        };
        let sorted = |t: Tensor| t.sort(-1, false).0;
        assert_eq!(
            sorted(floats(&traced, "topk")),
            sorted(want),
            "{folder}: other experts"
        );
        let gap = distance(&floats(&traced, "topk_w"), &reference(name, "topk_w").unwrap());
        assert!(gap < bound, "{folder}: weights of experts differ by {gap}");
    }
}

#[test]
fn greedy_decoding_is_that_of_transformers() {
    for (folder, name) in FIXTURES {
        let want = rows(&reference(name, "greedy").unwrap()).remove(0);
        let got = greedy_without_cache(&load(folder), &want[..8], want.len() - 8);
        assert_eq!(got, want[8..], "{folder}");
    }
}

#[test]
fn rows_of_a_batch_do_not_see_each_other() {
    for (folder, _) in FIXTURES {
        let policy = load(folder);
        let ids = |seed: i64| {
            (0..70)
                .map(|i| (i * i * 7 + seed * 13) % 120)
                .collect::<Vec<i64>>()
        };
        let together = trace(&policy, &[ids(1), ids(2), ids(3)]);
        let logits = floats(&together, "logits");
        for seed in 1..=3 {
            let alone = floats(&trace(&policy, &[ids(seed)]), "logits");
            let gap = distance(&logits.narrow(0, seed - 1, 1), &alone);
            assert!(gap < 2e-5, "{folder}: {gap}");
        }
    }
}

#[test]
fn bf16_stays_near_f32() {
    for (folder, name) in FIXTURES {
        let policy = load(folder).with_compute_type(ComputeType::Bf16);
        let ids = reference(name, "input_ids").unwrap();
        let (got, want) = (logits_of(&policy, &ids), reference(name, "logits").unwrap());
        // Routing may flip where two experts are nearly equal, so the mean is bounded and not the largest.
        let gap = (&got - &want).abs().mean(Kind::Float) / want.std(true);
        let gap = gap.double_value(&[]);
        println!("{folder}: bf16 differs by {gap:.1e} on average");
        assert!(gap > 1e-5 && gap < 0.2, "{folder}: {gap}");
    }
}

/// Every file of one folder is that of another, byte for byte.
fn assert_same_files(a: &Path, b: &Path) {
    let mut names: Vec<_> = std::fs::read_dir(a)
        .unwrap()
        .map(|e| e.unwrap().file_name())
        .collect();
    names.sort();
    assert!(names.len() >= 2);
    for name in names {
        let read = |dir: &Path| std::fs::read(dir.join(&name)).unwrap();
        assert!(read(a) == read(b), "{}: {name:?} differs", a.display());
    }
}

#[test]
fn an_export_without_training_is_the_source_byte_for_byte() {
    for (folder, _) in FIXTURES {
        let source = fixtures().join(folder);
        let policy = load(folder);
        let out = tempfile::tempdir().unwrap();
        let weights = policy.export();
        let report = export_folder(&source, out.path(), |spec| {
            Ok(weights.iter().find(|w| w.name == spec.name).unwrap().clone())
        })
        .unwrap();
        assert_same_files(&source, out.path());
        let drafts_and_vision = folder.starts_with("qwen3_5");
        assert_eq!(report.passed_through > 0, drafts_and_vision, "{folder}");
        let again = export_folder(&source, out.path(), |_| unreachable!());
        assert!(matches!(again, Err(ModelError::Io { .. })));
    }
}

#[test]
fn a_new_policy_folder_has_the_names_that_transformers_writes() {
    for (folder, _) in FIXTURES {
        let source = fixtures().join(folder);
        let config = ModelConfig::from_dir(&source).unwrap();
        let copy = tempfile::tempdir().unwrap();
        save_folder(copy.path(), &config, &load(folder).export(), None).unwrap();
        // Writing the folder again loses no key of config.json.
        let read = |dir: &Path| -> serde_json::Value {
            serde_json::from_slice(&std::fs::read(dir.join("config.json")).unwrap()).unwrap()
        };
        assert_eq!(read(copy.path()), read(&source));
        let names = |dir: &Path| -> Vec<String> {
            let checkpoint = Checkpoint::open(dir).unwrap();
            let text = |n: &&str| !n.starts_with("mtp.") && !n.starts_with("model.visual.");
            checkpoint.names().filter(text).map(str::to_owned).collect()
        };
        // transformers saves split experts; folders of Qwen3.5 MoE are released stacked.
        let stacked = config.model_type == ModelType::Qwen3_5Moe;
        if folder == "qwen3_5_moe" {
            assert_ne!(names(copy.path()), names(&source));
        } else {
            assert_eq!(names(copy.path()), names(&source), "{folder}");
        }
        assert_eq!(
            stacked,
            names(copy.path()).iter().any(|n| n.ends_with("gate_up_proj"))
        );
        let ids = reference("qwen3", "input_ids").unwrap();
        let again = Policy::load(copy.path(), Device::Cpu).unwrap();
        assert_eq!(
            logits_of(&again, &ids),
            logits_of(&load(folder), &ids),
            "{folder}"
        );
    }
}

/// `LEGORL_TEST_PYTHON` names a Python with torch and transformers. It computes in what the network computes in: to
/// f64 the distance is that of f64.
#[test]
fn transformers_loads_what_we_write() {
    let Some(python) = std::env::var_os("LEGORL_TEST_PYTHON") else {
        eprintln!("SKIP transformers: LEGORL_TEST_PYTHON names no Python with torch and transformers");
        return;
    };
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/references/transformers_reference.py");
    for (folder, _) in FIXTURES {
        let source = fixtures().join(folder);
        let config = ModelConfig::from_dir(&source).unwrap();
        let (a, b) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        // Trained weights: those of another seed, so that nothing of the source can slip through.
        let mut wild = config.clone();
        wild.initializer_range = 0.2;
        let policy = Policy::random(wild, 4, Device::Cpu);
        let weights = policy.export();
        export_folder(&source, a.path(), |spec| {
            Ok(weights.iter().find(|w| w.name == spec.name).unwrap().clone())
        })
        .unwrap();
        let mut written = vec![a.path()];
        if !config.nested {
            // A new folder has no vision tower, which the nested classes ask for.
            save_folder(b.path(), &config, &weights, None).unwrap();
            written.push(b.path());
        }
        for dir in written {
            let ids: Vec<i64> = (0..70).map(|i| i * i % 80).collect();
            let text = ids.iter().map(i64::to_string).collect::<Vec<_>>().join(",");
            let out = dir.join("logits.out");
            let (arithmetic, bound) = match policy.compute_kind() {
                Kind::Double => ("f64", 1e-10),
                _ => ("f32", 1e-4),
            };
            let run = Command::new(&python)
                .arg(&script)
                .args(["logits", arithmetic])
                .args([dir.as_os_str(), text.as_ref(), out.as_os_str()])
                .output()
                .unwrap();
            assert!(run.status.success(), "{}", String::from_utf8_lossy(&run.stderr));
            let want = stored(&out, "logits").unwrap();
            let got = no_grad(|| {
                let layout = PackedLayout::single(ids.len(), Device::Cpu);
                policy.logits(&policy.forward_hidden(&Tensor::from_slice(&ids), &layout))
            });
            let gap = distance(&got, &want);
            println!("{folder}: {arithmetic} logits differ by {gap:.1e}");
            assert!(gap < bound, "{folder}: {gap}");
        }
    }
}

/// How far f32 is from f64 for the same network. The hybrids normalise small outputs of the delta rule, which is where
/// transformers loses digits; here they compute in f64 with f32 parameters, and nothing on the way may be f32.
#[test]
fn f32_is_as_near_to_f64_as_transformers_is() {
    let logits = |policy: &Policy, ids: &Tensor| {
        let layout = PackedLayout::single(ids.size()[1] as usize, Device::Cpu);
        no_grad(|| policy.logits(&policy.forward_hidden(&ids.view(-1), &layout))).unsqueeze(0)
    };
    for (folder, name) in FIXTURES {
        let ids = reference(name, "input_ids").unwrap();
        let single = logits(&load(folder), &ids);
        let policy = load(folder);
        for (_, mut parameter) in policy.parameters() {
            let wide = parameter.detach().to_kind(Kind::Double);
            parameter.set_data(&wide);
        }
        let exact = logits(&policy, &ids);
        let (ours, theirs) = (
            distance(&single, &exact),
            distance(&reference(name, "logits").unwrap(), &exact),
        );
        println!("{folder}: ours {ours:.1e}, transformers {theirs:.1e}");
        let bound = match policy.compute_kind() {
            Kind::Double => 1e-13,
            _ => 4.0 * theirs,
        };
        assert!(ours < bound && theirs < 2e-4, "{folder}: {ours} {theirs}");
    }
}
