//! Model folders that are damaged, and exports that fail: one error that names file and tensor, nothing left behind.

use super::{export_folder, Checkpoint, ModelConfig, ModelError};
use serde_json::{json, Value};
use std::{
    fs,
    os::unix::ffi::OsStrExt,
    path::{Path, PathBuf},
};
use tempfile::TempDir;

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/fixtures/models")
        .join(name)
}

/// A copy of a committed folder.
fn copy(name: &str) -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    for entry in fs::read_dir(fixture(name)).unwrap() {
        let path = entry.unwrap().path();
        fs::copy(&path, dir.path().join(path.file_name().unwrap())).unwrap();
    }
    dir
}

fn fifo(path: &Path) {
    let _ = fs::remove_file(path);
    let name = std::ffi::CString::new(path.as_os_str().as_bytes()).unwrap();
    // SAFETY: `name` is a NUL-terminated string that lives through the call.
    assert_eq!(unsafe { libc::mkfifo(name.as_ptr(), 0o600) }, 0);
}

/// The first error of reading a whole folder.
fn problem(dir: &Path) -> String {
    let read = || -> Result<(), ModelError> {
        let config = ModelConfig::from_dir(dir)?;
        Checkpoint::open(dir)?.check(&config)
    };
    read().unwrap_err().to_string()
}

/// Splits the one file of a folder into two shards with an index.
fn shard(dir: &Path) -> Value {
    let whole = dir.join("model.safetensors");
    let data = fs::read(&whole).unwrap();
    let file = safetensors::SafeTensors::deserialize(&data).unwrap();
    let mut names: Vec<String> = file.names().into_iter().map(str::to_owned).collect();
    names.sort();
    let mut map = json!({});
    for (i, names) in names.chunks(names.len().div_ceil(2)).enumerate() {
        let shard = format!("model-{i}.safetensors");
        let views = names.iter().map(|name| (name, file.tensor(name).unwrap()));
        safetensors::serialize_to_file(views, None, &dir.join(&shard)).unwrap();
        for name in names {
            map[name] = json!(shard);
        }
    }
    fs::remove_file(whole).unwrap();
    let index = json!({"weight_map": map});
    write_index(dir, &index);
    index
}

fn write_index(dir: &Path, index: &Value) {
    fs::write(dir.join("model.safetensors.index.json"), index.to_string()).unwrap();
}

/// A pipe would hold its reader for ever; a folder has no bytes.
#[test]
fn what_is_no_file_is_named_and_not_waited_for() {
    for name in [
        "config.json",
        "model.safetensors",
        "generation_config.json",
        "model.safetensors.index.json",
    ] {
        let dir = copy("qwen3");
        fifo(&dir.path().join(name));
        let text = problem(dir.path());
        assert!(text.contains(name) && text.contains("a named pipe"), "{text}");
        fs::remove_file(dir.path().join(name)).unwrap();
        fs::create_dir(dir.path().join(name)).unwrap();
        let text = problem(dir.path());
        assert!(text.contains(name) && text.contains("a folder, not a"), "{text}");
    }
}

#[test]
fn damaged_shards_name_tensor_and_file() {
    let dir = copy("qwen3_moe");
    let index = shard(dir.path());
    assert!(Checkpoint::open(dir.path()).is_ok());

    let second = dir.path().join("model-1.safetensors");
    let bytes = fs::read(&second).unwrap();
    fs::write(&second, &bytes[..bytes.len() - 10]).unwrap();
    let text = problem(dir.path());
    assert!(
        text.contains("model-1.safetensors") && text.contains("tensor `model.") && text.contains("cut off"),
        "{text}"
    );
    fs::write(&second, []).unwrap();
    assert!(problem(dir.path()).contains("it has only 0 bytes"));
    fs::remove_file(&second).unwrap();
    let text = problem(dir.path());
    assert!(
        text.contains("tensor `model.")
            && text.contains("model-1.safetensors")
            && text.contains("says that it is in this file"),
        "{text}"
    );
    // Both shards hold the same tensors.
    fs::copy(dir.path().join("model-0.safetensors"), &second).unwrap();
    let text = problem(dir.path());
    assert!(
        text.contains("it is also in") && text.contains("model-0.safetensors"),
        "{text}"
    );
    // An index that names a tensor which no file has.
    fs::write(&second, &bytes).unwrap();
    let mut wrong = index.clone();
    wrong["weight_map"]["model.norm.bias"] = json!("model-0.safetensors");
    write_index(dir.path(), &wrong);
    assert!(problem(dir.path()).contains("tensor `model.norm.bias`"));
    // A single file beside the shards.
    write_index(dir.path(), &index);
    fs::copy(&second, dir.path().join("model.safetensors")).unwrap();
    assert!(problem(dir.path()).contains("remove one"));
}

/// Adds a tensor of zeros to the one file of a folder.
fn add_zeros(dir: &Path, name: &str, shape: &[usize]) {
    let path = dir.join("model.safetensors");
    let data = fs::read(&path).unwrap();
    let file = safetensors::SafeTensors::deserialize(&data).unwrap();
    let zeros = vec![0u8; shape.iter().product::<usize>() * 4];
    let zeros =
        safetensors::tensor::TensorView::new(safetensors::Dtype::F32, shape.to_vec(), &zeros).unwrap();
    let mut views: Vec<(String, safetensors::tensor::TensorView<'_>)> = file
        .names()
        .into_iter()
        .map(|n| (n.to_owned(), file.tensor(n).unwrap()))
        .collect();
    views.push((name.to_owned(), zeros));
    let whole = safetensors::serialize(views, None).unwrap();
    fs::write(path, whole).unwrap();
}

#[test]
fn weights_that_are_there_twice_are_refused() {
    let dir = copy("qwen3_moe");
    let config = ModelConfig::from_dir(dir.path()).unwrap();
    let stacked = config
        .layer_table(0)
        .into_iter()
        .find(|s| s.name.ends_with("gate_up_proj"))
        .unwrap();
    add_zeros(dir.path(), &stacked.name, &stacked.shape);
    let text = problem(dir.path());
    assert!(
        text.contains(&stacked.name) && text.contains("experts.0.gate_proj.weight"),
        "{text}"
    );

    // A head of its own under a flag that says that there is none.
    let dir = copy("qwen3");
    let config = ModelConfig::from_dir(dir.path()).unwrap();
    assert!(config.tie_word_embeddings);
    let embedding = config.embedding_spec();
    add_zeros(dir.path(), "lm_head.weight", &embedding.shape);
    let text = problem(dir.path());
    assert!(
        text.contains("lm_head.weight") && text.contains("tie_word_embeddings"),
        "{text}"
    );
    assert!(text.contains("model.safetensors"), "{text}");
}

#[test]
fn absurd_sizes_are_refused_by_key() {
    let huge = 1_000_000_000_000u64;
    let cases = [
        ("num_attention_heads", json!(0), "not a positive integer"),
        ("num_attention_heads", json!(-4), "not a positive integer"),
        ("num_key_value_heads", json!(3), "does not divide"),
        ("vocab_size", json!(huge), "larger than any model's"),
        ("vocab_size", json!(1e12), "not a positive integer"),
        ("num_hidden_layers", json!(huge), "larger than any model's"),
        ("num_hidden_layers", json!(1_000_000), "more than 10000"),
        ("num_experts", json!(huge), "larger than any model's"),
        ("num_experts", json!(100_000), "more than 65536"),
        ("num_experts_per_tok", json!(9), "among 8"),
        ("rms_norm_eps", json!(0), "not a positive number"),
        ("head_dim", json!(7), "even number"),
        ("tie_word_embeddings", json!("yes"), "neither true nor false"),
    ];
    for (key, value, wanted) in cases {
        let dir = copy("qwen3_moe");
        let path = dir.path().join("config.json");
        let mut config: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
        config[key] = value;
        fs::write(&path, config.to_string()).unwrap();
        let text = problem(dir.path());
        assert!(
            text.contains("config.json") && text.contains(wanted),
            "{key}: {text}"
        );
    }
    // Each is possible and all together are not.
    let dir = copy("qwen3_moe");
    let path = dir.path().join("config.json");
    let mut config: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    for key in ["hidden_size", "moe_intermediate_size", "head_dim", "vocab_size"] {
        config[key] = json!(1u64 << 30);
    }
    fs::write(&path, config.to_string()).unwrap();
    assert!(problem(dir.path()).contains("one of the sizes is wrong"));
}

#[test]
fn a_failed_export_leaves_nothing() {
    let source = fixture("qwen3_moe");
    let checkpoint = Checkpoint::open(&source).unwrap();
    let fails_late = || {
        let mut left = 5;
        let checkpoint = &checkpoint;
        move |spec: &super::TensorSpec| {
            left -= 1;
            match left {
                0 => Err(ModelError::Tensor {
                    name: spec.name.clone(),
                    path: PathBuf::from("somewhere"),
                    problem: "gone".into(),
                }),
                _ => Ok(checkpoint.read(spec)?.to_weight()),
            }
        }
    };
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("a/b");
    assert!(export_folder(&source, &out, fails_late()).is_err());
    assert_eq!(
        fs::read_dir(dir.path()).unwrap().count(),
        0,
        "folders that were made are gone"
    );
    fs::create_dir_all(&out).unwrap();
    fs::write(out.join("notes.txt"), "mine").unwrap();
    assert!(export_folder(&source, &out, fails_late()).is_err());
    assert_eq!(fs::read_dir(&out).unwrap().count(), 1, "what was there stays");
    let whole = |spec: &super::TensorSpec| Ok(checkpoint.read(spec)?.to_weight());
    export_folder(&source, &out, whole).unwrap();
    for name in ["config.json", "model.safetensors"] {
        assert_eq!(
            fs::read(out.join(name)).unwrap(),
            fs::read(source.join(name)).unwrap()
        );
    }
    assert_eq!(fs::read_dir(&out).unwrap().count(), 3);
    // The same again, and over the source itself.
    for out in [out.as_path(), source.as_path()] {
        let text = export_folder(&source, out, whole).unwrap_err().to_string();
        assert!(
            text.contains("model.safetensors") && text.contains("empty folder"),
            "{text}"
        );
    }
    let file = dir.path().join("file");
    fs::write(&file, "").unwrap();
    assert!(export_folder(&source, &file, whole)
        .unwrap_err()
        .to_string()
        .contains("file"));
}
