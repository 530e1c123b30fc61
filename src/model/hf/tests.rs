//! The safetensors package and hand-made JSON are the references here.

use super::*;
use crate::base::{DType, WeightTensor};
use bytes::Bytes;
use safetensors::{tensor::TensorView, Dtype, SafeTensors};
use serde_json::{json, Value};
use std::path::Path;

fn tiny() -> ModelConfig {
    ModelConfig::qwen3(7, 4, 6, 2, 2, 1, 2)
}

/// Tensors whose values are their running numbers.
fn numbered(config: &ModelConfig) -> Vec<WeightTensor> {
    let mut next = 0.0f32;
    let mut tensors = Vec::new();
    for spec in config.tensor_table() {
        let mut data = Vec::new();
        for _ in 0..spec.numel() {
            data.extend(next.to_le_bytes());
            next += 1.0;
        }
        tensors.push(WeightTensor {
            name: spec.name,
            dtype: DType::F32,
            shape: spec.shape,
            data: Bytes::from(data),
        });
    }
    tensors
}

fn parse(value: Value) -> Result<ModelConfig, ModelError> {
    let Value::Object(map) = value else {
        panic!("not an object")
    };
    ModelConfig::from_value(map, Path::new("/m/config.json"))
}

fn published() -> Value {
    json!({"model_type": "qwen3", "vocab_size": 151936, "hidden_size": 1024, "intermediate_size": 3072,
        "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
        "rope_theta": 1000000, "rms_norm_eps": 1e-6, "tie_word_embeddings": true, "hidden_act": "silu",
        "use_sliding_window": false, "max_window_layers": 28, "rope_scaling": null, "eos_token_id": 151645,
        "some_other_key": [1, 2]})
}

fn error_of(value: Value) -> String {
    parse(value).expect_err("should be refused").to_string()
}

#[test]
fn reads_a_published_config() {
    let config = parse(published()).unwrap();
    assert_eq!(config.rope.theta, 1e6);
    assert_eq!(config.eos_token_ids, [151645]);
    // Qwen3-0.6B has 596,049,920 parameters with its tied head.
    assert_eq!(config.num_parameters(), 596_049_920);
    assert_eq!(config.to_value()["some_other_key"], json!([1, 2]));
    assert_eq!(config.to_value()["eos_token_id"], json!(151645));
}

#[test]
fn reads_the_newer_rope_key_and_writes_it_back() {
    let mut value = published();
    value["rope_theta"] = Value::Null;
    value["rope_parameters"] = json!({"rope_type": "default", "rope_theta": 5e5});
    let config = parse(value).unwrap();
    assert_eq!(config.rope.theta, 5e5);
    assert_eq!(config.to_value()["rope_parameters"]["rope_theta"], json!(5e5));
}

#[test]
fn refuses_what_it_would_compute_wrongly() {
    let with = |key: &str, v: Value| {
        let mut value = published();
        value[key] = v;
        error_of(value)
    };
    assert!(with("model_type", json!("mamba")).contains("`mamba` is not supported"));
    assert!(with("hidden_act", json!("gelu")).contains("`hidden_act`"));
    assert!(with("quantization_config", json!({"quant_method": "fp8"})).contains("quantised"));
    assert!(with("num_key_value_heads", json!(3)).contains("does not divide"));
    assert!(with("hidden_size", Value::Null).contains("`hidden_size`: is missing"));
    assert!(with("vocab_size", json!("many")).contains("not a positive integer"));
    let mut window = published();
    window["use_sliding_window"] = json!(true);
    window["max_window_layers"] = json!(3);
    assert!(error_of(window).contains("sliding"));
}

#[test]
fn stop_ids_are_the_union_of_both_files() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("config.json"), published().to_string()).unwrap();
    std::fs::write(
        dir.path().join("generation_config.json"),
        r#"{"eos_token_id": [151645, 151643]}"#,
    )
    .unwrap();
    let config = ModelConfig::from_dir(dir.path()).unwrap();
    assert_eq!(config.eos_token_ids, [151645, 151643]);
}

#[test]
fn saved_folder_is_read_by_the_safetensors_package_and_by_us() {
    let config = tiny();
    let tensors = numbered(&config);
    for limit in [MAX_SHARD_BYTES, 200] {
        let dir = tempfile::tempdir().unwrap();
        let from = tempfile::tempdir().unwrap();
        std::fs::write(from.path().join("tokenizer.json"), "{}").unwrap();
        save_folder_sharded(dir.path(), &config, &tensors, Some(from.path()), limit).unwrap();
        assert!(dir.path().join("tokenizer.json").is_file());
        assert_eq!(
            dir.path().join("model.safetensors").is_file(),
            limit == MAX_SHARD_BYTES
        );

        let mut found = 0;
        for file in std::fs::read_dir(dir.path()).unwrap() {
            let path = file.unwrap().path();
            if path.extension().is_some_and(|e| e == "safetensors") {
                let bytes = std::fs::read(&path).unwrap();
                let reference = SafeTensors::deserialize(&bytes).unwrap();
                for (name, view) in reference.tensors() {
                    let want = tensors.iter().find(|t| t.name == name).unwrap();
                    assert_eq!(
                        (view.shape(), view.data()),
                        (want.shape.as_slice(), want.data.as_ref())
                    );
                    found += 1;
                }
            }
        }
        assert_eq!(found, tensors.len());

        let back = ModelConfig::from_dir(dir.path()).unwrap();
        assert_eq!(back.tensor_table(), config.tensor_table());
        let stored = Checkpoint::open(dir.path()).unwrap().read_all(&back).unwrap();
        for (stored, want) in stored.iter().zip(&tensors) {
            let weight = stored.to_weight();
            assert_eq!((weight.name, weight.data), (want.name.clone(), want.data.clone()));
        }
    }
}

#[test]
fn reads_half_precision_written_by_the_safetensors_package() {
    let dir = tempfile::tempdir().unwrap();
    let half: Vec<u8> = [1.5f32, -2.0]
        .iter()
        .flat_map(|v| half::f16::from_f32(*v).to_le_bytes())
        .collect();
    let brain: Vec<u8> = [1.5f32, -2.0]
        .iter()
        .flat_map(|v| half::bf16::from_f32(*v).to_le_bytes())
        .collect();
    let views = [
        ("a", TensorView::new(Dtype::F16, vec![2], &half).unwrap()),
        ("b", TensorView::new(Dtype::BF16, vec![2, 1], &brain).unwrap()),
        ("c", TensorView::new(Dtype::F8_E4M3, vec![1], &[7]).unwrap()),
    ];
    std::fs::write(
        dir.path().join("model.safetensors"),
        safetensors::serialize(views, None).unwrap(),
    )
    .unwrap();
    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    let a = checkpoint.get("a", &[2]).unwrap().to_weight();
    assert_eq!(
        a.data.as_ref(),
        [1.5f32.to_le_bytes(), (-2.0f32).to_le_bytes()].concat()
    );
    let b = checkpoint.get("b", &[2, 1]).unwrap().to_weight();
    assert_eq!((b.dtype, b.data.as_ref()), (DType::Bf16, brain.as_slice()));
    let error = checkpoint.get("c", &[1]).unwrap_err().to_string();
    assert!(
        error.contains("`c`") && error.contains("F8_E4M3") && error.contains("model.safetensors"),
        "{error}"
    );
}

#[test]
fn broken_folders_name_tensor_and_file() {
    let config = tiny();
    let save = || {
        let dir = tempfile::tempdir().unwrap();
        save_folder(dir.path(), &config, &numbered(&config), None).unwrap();
        dir
    };
    let open = |dir: &Path| {
        Checkpoint::open(dir)
            .and_then(|c| c.read_all(&config))
            .map(|_| ())
    };
    let message = |dir: &Path| open(dir).expect_err("should be refused").to_string();

    // Cut inside the last tensor, then inside the header, then everything.
    let dir = save();
    let file = dir.path().join("model.safetensors");
    let whole = std::fs::read(&file).unwrap();
    std::fs::write(&file, &whole[..whole.len() - 4]).unwrap();
    let text = message(dir.path());
    assert!(
        text.contains("`model.norm.weight`") && text.contains("cut off"),
        "{text}"
    );
    std::fs::write(&file, &whole[..100]).unwrap();
    assert!(message(dir.path()).contains("announces a header"));
    std::fs::write(&file, b"abc").unwrap();
    assert!(message(dir.path()).contains("only 3 bytes"));
    std::fs::remove_file(&file).unwrap();
    assert!(message(dir.path()).contains("model.safetensors"));

    // A config that wants another shape, and one that wants a tensor more.
    let dir = save();
    let mut wider = config.clone();
    wider.intermediate_size = 8;
    let text = Checkpoint::open(dir.path())
        .unwrap()
        .read_all(&wider)
        .unwrap_err()
        .to_string();
    assert!(
        text.contains("mlp.gate_proj") && text.contains("[6, 4]") && text.contains("[8, 4]"),
        "{text}"
    );
    let mut untied = config.clone();
    untied.tie_word_embeddings = false;
    let text = Checkpoint::open(dir.path())
        .unwrap()
        .read_all(&untied)
        .unwrap_err()
        .to_string();
    assert!(text.contains("`lm_head.weight`"), "{text}");

    // An index that names a tensor which its shard lacks.
    let dir = tempfile::tempdir().unwrap();
    save_folder_sharded(dir.path(), &config, &numbered(&config), None, 200).unwrap();
    let index = dir.path().join("model.safetensors.index.json");
    let mut value: Value = serde_json::from_slice(&std::fs::read(&index).unwrap()).unwrap();
    let shard = value["weight_map"]["model.norm.weight"].clone();
    value["weight_map"]["model.layers.9.x"] = shard;
    std::fs::write(&index, value.to_string()).unwrap();
    assert!(message(dir.path()).contains("`model.layers.9.x`"));

    // An index that leads out of the folder, to a file that is there.
    let outside = tempfile::tempdir().unwrap();
    save_folder(outside.path(), &config, &numbered(&config), None).unwrap();
    let absolute = outside.path().join("model.safetensors").display().to_string();
    let relative = format!("..{absolute}");
    let inner = dir.path().join("inner/../../x.safetensors").display().to_string();
    for file in [
        absolute.as_str(),
        relative.as_str(),
        "../x.safetensors",
        "a/../../x",
        &inner,
        "",
    ] {
        value["weight_map"] = json!({"model.norm.weight": file});
        std::fs::write(&index, value.to_string()).unwrap();
        let text = message(dir.path());
        assert!(
            text.contains(&format!("`{file}`"))
                && text.contains("`model.norm.weight`")
                && text.contains("inside"),
            "{text}"
        );
    }
}

#[test]
fn saving_refuses_an_incomplete_or_misshapen_set() {
    let config = tiny();
    let dir = tempfile::tempdir().unwrap();
    let save = |tensors: &[WeightTensor]| {
        save_folder(dir.path(), &config, tensors, None)
            .unwrap_err()
            .to_string()
    };
    let mut tensors = numbered(&config);
    tensors.pop();
    assert!(save(&tensors).contains("`model.norm.weight`"));
    let mut tensors = numbered(&config);
    tensors[1].shape = vec![2, 2];
    assert!(save(&tensors).contains("input_layernorm"));
    let mut tensors = numbered(&config);
    tensors[1].name = "model.layers.0.extra".into();
    assert!(save(&tensors).contains("input_layernorm"));
}
