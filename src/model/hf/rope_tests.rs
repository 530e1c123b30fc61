//! Frequencies against transformers' (`tests/fixtures/rope/make.py`), and what is refused.

use super::{config::ModelConfig, rope::RopeScaling};
use serde_json::{json, Map, Value};
use std::path::Path;

fn object(value: Value) -> Map<String, Value> {
    match value {
        Value::Object(map) => map,
        other => panic!("{other}"),
    }
}

fn parse(keys: Value) -> Result<ModelConfig, String> {
    let mut config = object(
        json!({"model_type": "qwen3", "vocab_size": 16, "hidden_size": 64, "head_dim": 64,
        "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2,
        "max_position_embeddings": 40960}),
    );
    config.extend(object(keys));
    ModelConfig::from_value(config, Path::new("config.json")).map_err(|error| error.to_string())
}

#[test]
fn frequencies_are_those_of_transformers() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/rope/rope.json");
    let cases: Vec<Value> = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
    assert!(cases.len() > 15);
    for case in cases {
        let config = parse(case["config"].clone()).unwrap();
        let ours = config.rope.frequencies();
        let theirs: Vec<f64> = case["frequencies"]
            .as_array()
            .unwrap()
            .iter()
            .map(|f| f.as_f64().unwrap())
            .collect();
        assert_eq!(ours.len(), theirs.len());
        for (ours, theirs) in ours.iter().zip(&theirs) {
            // transformers computes them in f32.
            let gap = (ours - theirs).abs() / theirs;
            assert!(gap < 2e-6, "{ours} for {theirs}: {}", case["config"]);
        }
        for (ours, theirs) in config.rope.frequencies_f32().iter().zip(&theirs) {
            let gap = (f64::from(*ours) - theirs).abs() / theirs;
            assert!(gap < 2e-7, "{ours} for {theirs}: {}", case["config"]);
        }
        let factor = case["factor"].as_f64().unwrap();
        assert!(
            (config.rope.attention_factor() - factor).abs() < 1e-12,
            "{}",
            case["config"]
        );
    }
}

/// A config that is read, written and read again has the same frequencies; also one that was made here.
#[test]
fn scalings_are_written_back() {
    let scaled = [
        json!({"rope_theta": 1e6, "rope_scaling": {"type": "yarn", "factor": 4.0,
            "original_max_position_embeddings": 32768}}),
        json!({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}),
        json!({"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0,
            "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}}),
    ];
    for keys in scaled {
        let config = parse(keys).unwrap();
        assert!(config.rope.scaling.is_some());
        let again = parse(config.to_value()).unwrap();
        assert_eq!(again.rope, config.rope);
        let mut made = ModelConfig::qwen3(16, 64, 8, 1, 2, 2, 64);
        made.rope = config.rope.clone();
        assert_eq!(parse(made.to_value()).unwrap().rope, config.rope);
    }
}

#[test]
fn the_window_grows_with_the_scaling() {
    let window = |rope: Value| {
        let config = parse(json!({"rope_scaling": rope})).unwrap();
        config.context_tokens()
    };
    assert_eq!(window(Value::Null), 40960);
    let yarn = json!({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768});
    assert_eq!(window(yarn), 131_072);
    assert_eq!(window(json!({"type": "yarn", "factor": 2.0})), 81_920);
    assert_eq!(window(json!({"type": "linear", "factor": 2.5})), 102_400);
    let llama = json!({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192});
    assert_eq!(window(llama), 40960, "the file has the stretched window");
}

#[test]
fn what_a_cache_cannot_follow_is_refused_with_the_reason() {
    let refused = |keys: Value| parse(keys).unwrap_err();
    let dynamic = refused(json!({"rope_scaling": {"type": "dynamic", "factor": 2.0}}));
    assert!(
        dynamic.contains("`rope_scaling`") && dynamic.contains("length of the text"),
        "{dynamic}"
    );
    let long = json!({"rope_parameters": {"rope_type": "longrope", "factor": 2.0}});
    assert!(refused(long).contains("keys in a cache"));
    let unknown = refused(json!({"rope_scaling": {"rope_type": "spiral"}}));
    assert!(unknown.contains("`spiral` is not supported (supported: default, linear, llama3, yarn)"));
    assert!(refused(json!({"rope_scaling": {"type": "yarn"}})).contains("`factor`: is missing"));
    assert!(refused(json!({"rope_scaling": {"type": "yarn", "factor": "four"}})).contains("`factor`"));
    assert!(refused(json!({"rope_scaling": {"type": "linear", "factor": -1}})).contains("`factor`"));
    let nested = json!({"rope_parameters": {"full_attention": {"rope_type": "default"}}});
    assert!(refused(nested).contains("by kind of layer"));
    let partial = refused(json!({"partial_rotary_factor": 0.5}));
    assert!(partial.contains("turns whole heads"), "{partial}");
    let two = json!({"rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        "rope_scaling": {"type": "linear", "factor": 2.0}});
    assert!(refused(two).contains("contradicts `rope_parameters`"));
    let same = json!({"rope_theta": 1e6, "rope_parameters": {"rope_type": "linear", "factor": 2.0},
        "rope_scaling": {"type": "linear", "factor": 2.0}});
    let rope = parse(same).unwrap().rope;
    assert_eq!(
        (rope.theta, rope.scaling),
        (1e6, Some(RopeScaling::Linear { factor: 2.0 }))
    );
}
