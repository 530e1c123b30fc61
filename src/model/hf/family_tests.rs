//! Configurations of all families. Numbers of parameters are those that transformers 5.17 counts for the
//! same configuration.

use super::*;
use serde_json::{json, Value};
use std::path::Path;

fn parse(value: Value) -> Result<ModelConfig, ModelError> {
    let Value::Object(map) = value else {
        panic!("not an object")
    };
    ModelConfig::from_value(map, Path::new("/m/config.json"))
}

fn qwen3_moe() -> Value {
    json!({"model_type": "qwen3_moe", "vocab_size": 151936, "hidden_size": 2048, "num_hidden_layers": 48,
        "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "intermediate_size": 6144,
        "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": true,
        "rope_theta": 1e6, "use_sliding_window": false, "max_window_layers": 48, "sliding_window": null})
}

fn qwen3_5(text: Value) -> Value {
    json!({"model_type": "qwen3_5", "text_config": text, "vision_config": {"depth": 27},
        "tie_word_embeddings": false, "architectures": ["Qwen3_5ForConditionalGeneration"]})
}

fn qwen3_5_text() -> Value {
    json!({"model_type": "qwen3_5_text", "vocab_size": 248320, "hidden_size": 5120, "num_hidden_layers": 64,
        "num_attention_heads": 24, "num_key_value_heads": 4, "head_dim": 256, "intermediate_size": 17408,
        "linear_num_key_heads": 16, "linear_num_value_heads": 48, "linear_key_head_dim": 128,
        "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "full_attention_interval": 4,
        "eos_token_id": 248044, "attn_output_gate": true, "mtp_num_hidden_layers": 1,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25,
            "mrope_interleaved": true, "mrope_section": [11, 11, 10]}})
}

fn with(mut value: Value, key: &str, new: Value) -> Value {
    value[key] = new;
    value
}

fn error_of(value: Value) -> String {
    parse(value).expect_err("should be refused").to_string()
}

#[test]
fn published_shapes_have_the_published_numbers_of_parameters() {
    let config = parse(qwen3_moe()).unwrap();
    assert_eq!(config.num_parameters(), 30_532_122_624);
    assert_eq!(config.num_sparse_layers(), 48);

    let next = json!({"model_type": "qwen3_next", "vocab_size": 151936, "hidden_size": 2048,
        "num_hidden_layers": 48, "num_attention_heads": 16, "num_key_value_heads": 2,
        "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512});
    let config = parse(next).unwrap();
    assert_eq!(config.num_parameters(), 79_674_391_296);
    assert_eq!(config.rope.dim, 64);
    assert_eq!(config.experts.unwrap().top_k, 10);

    let config = parse(qwen3_5(qwen3_5_text())).unwrap();
    assert_eq!(config.num_parameters(), 26_895_998_464);
    assert_eq!((config.rope.dim, config.rope.theta), (64, 1e7));
    assert_eq!(config.eos_token_ids, [248044]);
    let mixers: Vec<_> = config.layers.iter().map(|l| l.mixer).collect();
    let attending = |i: usize| mixers[i] == MixerKind::FullAttention;
    assert!((0..64).all(|i| attending(i) == (i % 4 == 3)));
    assert_eq!(
        config.embedding_spec().name,
        "model.language_model.embed_tokens.weight"
    );
    // What `save_pretrained` of the text model alone writes.
    let flat = parse(qwen3_5_text()).unwrap();
    assert_eq!(flat.embedding_spec().name, "model.embed_tokens.weight");
    assert_eq!(flat.num_parameters(), config.num_parameters());

    let moe = json!({"model_type": "qwen3_5_moe_text", "vocab_size": 248320, "hidden_size": 2048,
        "num_hidden_layers": 40, "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256,
        "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512, "num_experts": 256,
        "num_experts_per_tok": 8});
    assert_eq!(parse(moe).unwrap().num_parameters(), 34_660_610_688);

    let llama = json!({"model_type": "llama", "vocab_size": 128256, "hidden_size": 4096,
        "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "rope_theta": 5e5});
    assert_eq!(parse(llama).unwrap().num_parameters(), 8_030_261_248);
}

#[test]
fn sparse_layers_follow_their_keys() {
    let value = with(qwen3_moe(), "mlp_only_layers", json!([1, 5]));
    let value = with(value, "decoder_sparse_step", json!(2));
    let config = parse(value).unwrap();
    let sparse: Vec<usize> = (0..8)
        .filter(|i| config.layers[*i].mlp == MlpKind::Sparse)
        .collect();
    assert_eq!(sparse, [3, 7]);
    assert_eq!((config.sparse_index(3), config.sparse_index(7)), (0, 1));
    let value = with(qwen3_moe(), "num_experts", Value::Null);
    let value = with(value, "num_local_experts", json!(64));
    assert_eq!(parse(value).unwrap().experts.unwrap().num_experts, 64);
}

#[test]
fn what_would_be_computed_wrongly_is_refused_by_name() {
    let text = |key: &str, v: Value| error_of(qwen3_5(with(qwen3_5_text(), key, v)));
    assert!(error_of(json!({"model_type": "qwen2_moe"})).contains("llama, qwen3, qwen3_moe"));
    assert!(error_of(with(qwen3_moe(), "text_config", json!({}))).contains("`text_config`"));
    assert!(error_of(json!({"model_type": "qwen3_5"})).contains("`text_config`: is missing"));
    assert!(error_of(json!({"model_type": "llama_text"})).contains("`llama_text` is not supported"));
    assert!(text("layer_types", json!(["full_attention"])).contains("1 entries"));
    assert!(text("attn_output_gate", json!(false)).contains("`attn_output_gate`"));
    assert!(text("linear_num_value_heads", json!(20)).contains("not a multiple"));
    assert!(text("hidden_act", json!("gelu")).contains("silu"));
    assert!(
        text("rope_parameters", json!({"partial_rotary_factor": 0.001})).contains("partial_rotary_factor")
    );
    assert!(error_of(with(qwen3_moe(), "num_experts_per_tok", json!(200))).contains("among 128"));
    assert!(error_of(with(qwen3_moe(), "use_sliding_window", json!(true))).contains("sliding"));
    let fp8 = with(
        qwen3_5(qwen3_5_text()),
        "quantization_config",
        json!({"quant_method": "fp8"}),
    );
    assert!(error_of(fp8).contains("(fp8)"));
}

/// A folder of tiny fused experts, and what goes wrong with it.
#[test]
fn broken_expert_folders_name_tensor_and_file() {
    let fixture = |name: &str| {
        Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("tests/fixtures/models")
            .join(name)
    };
    let dir = tempfile::tempdir().unwrap();
    let write = |drop: &str, fp8: bool| {
        let bytes = std::fs::read(fixture("qwen3_moe/model.safetensors")).unwrap();
        let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
        let mut views: Vec<_> = file.tensors().into_iter().filter(|(n, _)| n != drop).collect();
        let weight = [0u8; 16];
        if fp8 {
            let view = safetensors::tensor::TensorView::new(safetensors::Dtype::F8_E4M3, vec![16], &weight);
            views.retain(|(n, _)| !n.ends_with("layers.2.self_attn.o_proj.weight"));
            views.push(("model.layers.2.self_attn.o_proj.weight".into(), view.unwrap()));
        }
        let data = safetensors::serialize(views, None).unwrap();
        std::fs::write(dir.path().join("model.safetensors"), data).unwrap();
        let mut config: Value =
            serde_json::from_slice(&std::fs::read(fixture("qwen3_moe/config.json")).unwrap()).unwrap();
        if fp8 {
            config["quantization_config"] = json!({"quant_method": "fp8"});
        }
        std::fs::write(dir.path().join("config.json"), config.to_string()).unwrap();
    };
    let problem = || {
        let config = ModelConfig::from_dir(dir.path()).map_err(|e| e.to_string())?;
        Checkpoint::open(dir.path())
            .unwrap()
            .check(&config)
            .map_err(|e| e.to_string())
    };
    write("", false);
    assert_eq!(problem(), Ok(()));
    write("model.layers.1.mlp.experts.5.up_proj.weight", false);
    assert!(problem()
        .unwrap_err()
        .contains("`model.layers.1.mlp.experts.5.up_proj.weight`"));
    write("", true);
    let text = problem().unwrap_err();
    assert!(
        text.contains("`model.layers.2.self_attn.o_proj.weight`")
            && text.contains("model.safetensors")
            && text.contains("F8_E4M3"),
        "{text}"
    );
}

#[test]
fn a_trained_policy_takes_the_layout_of_its_source() {
    let folders = [
        "qwen3",
        "qwen3_moe",
        "qwen3_next",
        "qwen3_5",
        "qwen3_5_moe",
        "qwen3_5_moe_stacked",
    ];
    for folder in folders {
        let dir = Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("tests/fixtures/models")
            .join(folder);
        let config = ModelConfig::from_dir(&dir).unwrap();
        let source = Checkpoint::open(&dir).unwrap();
        let tensors: std::collections::HashMap<String, _> = source
            .read_all(&config)
            .unwrap()
            .iter()
            .map(|tensor| (tensor.name.clone(), tensor.to_weight()))
            .collect();
        let mut stored = stored_layout(&config, &source).unwrap();
        stored.sort_by(|a, b| a.name.cmp(&b.name));
        let names: Vec<&str> = stored.iter().map(|t| t.name.as_str()).collect();
        assert_eq!(names, source.names().collect::<Vec<_>>(), "{folder}");
        for tensor in &stored {
            let want = source.get_any(&tensor.name).unwrap();
            let data = match &tensor.source {
                LayoutSource::Folder(bytes) => bytes.clone(),
                LayoutSource::Network { tensor: from, start } => {
                    let from = &tensors[from];
                    let width = from.dtype.size_bytes();
                    from.data.slice(start * width..(start + tensor.numel()) * width)
                }
            };
            assert_eq!(
                (&tensor.shape, &data),
                (&want.shape, &want.data),
                "{}",
                tensor.name
            );
        }
    }
}
