//! Against transformers: `fixtures/make.py` wrote the checkpoints and the numbers.

use super::*;
use crate::model::hf::{save_folder, Checkpoint, ModelConfig};
use safetensors::SafeTensors;
use std::{path::PathBuf, process::Command};
use tch::{Device, Kind, Tensor};

const NAMES: [&str; 2] = ["qwen3", "qwen3_untied_bias"];

fn fixtures() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("src/model/net/fixtures")
}

struct Reference {
    ids: Tensor,
    hidden: Tensor,
    logits: Tensor,
}

fn reference(name: &str) -> Reference {
    let bytes = std::fs::read(fixtures().join(format!("{name}.reference.safetensors"))).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let take = |name: &str, kind: Kind| {
        let view = file.tensor(name).unwrap();
        let shape: Vec<i64> = view.shape().iter().map(|n| *n as i64).collect();
        Tensor::from_data_size(view.data(), &shape, kind)
    };
    Reference {
        ids: take("input_ids", Kind::Int64),
        hidden: take("hidden", Kind::Float),
        logits: take("logits", Kind::Float),
    }
}

fn logits(policy: &Policy, ids: &Tensor) -> (Tensor, Tensor) {
    tch::set_num_threads(1);
    let layout = PackedLayout::single(ids.numel(), Device::Cpu);
    let hidden = policy.forward_hidden(ids, &layout).detach();
    let logits = hidden.mm(&policy.head_weight().detach().tr());
    (hidden, logits)
}

/// Largest difference over the reference's standard deviation.
fn distance(got: &Tensor, want: &Tensor) -> f64 {
    assert_eq!(got.size(), want.size());
    (got - want).abs().max().double_value(&[]) / want.std(true).double_value(&[])
}

#[test]
fn hidden_states_and_logits_are_those_of_transformers() {
    for name in NAMES {
        let policy = Policy::load(&fixtures().join(name), Device::Cpu).unwrap();
        let want = reference(name);
        let (hidden, logits) = logits(&policy, &want.ids);
        assert!(
            distance(&hidden, &want.hidden) < 2e-5,
            "{name}: {}",
            distance(&hidden, &want.hidden)
        );
        assert!(
            distance(&logits, &want.logits) < 2e-5,
            "{name}: {}",
            distance(&logits, &want.logits)
        );
    }
}

#[test]
fn the_tensor_table_is_what_transformers_writes() {
    for name in NAMES {
        let dir = fixtures().join(name);
        let config = ModelConfig::from_dir(&dir).unwrap();
        assert_eq!(config.eos_token_ids, [3, 5]);
        let mut want: Vec<String> = config.tensor_table().into_iter().map(|t| t.name).collect();
        want.sort();
        let checkpoint = Checkpoint::open(&dir).unwrap();
        assert_eq!(checkpoint.names().collect::<Vec<_>>(), want, "{name}");
        // Writing the folder again loses no key of config.json.
        let copy = tempfile::tempdir().unwrap();
        save_folder(
            copy.path(),
            &config,
            &Policy::load(&dir, Device::Cpu).unwrap().export(),
            None,
        )
        .unwrap();
        let read = |dir: &std::path::Path| -> serde_json::Value {
            serde_json::from_slice(&std::fs::read(dir.join("config.json")).unwrap()).unwrap()
        };
        assert_eq!(read(copy.path()), read(&dir));
    }
}

/// `LEGORL_TEST_PYTHON` names a Python with torch and transformers.
#[test]
fn transformers_loads_what_we_write() {
    let Some(python) = std::env::var_os("LEGORL_TEST_PYTHON") else {
        eprintln!("SKIP transformers: LEGORL_TEST_PYTHON names no Python with torch and transformers");
        return;
    };
    let script = "
import sys, torch, transformers
from safetensors.torch import save_file
model, info = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1], output_loading_info=True, dtype=torch.float32)
assert not any(info[k] for k in ('missing_keys', 'unexpected_keys', 'mismatched_keys')), info
ids = torch.tensor([[int(i) for i in sys.argv[3].split(',')]])
with torch.no_grad():
    save_file({'logits': model(ids).logits[0].contiguous()}, sys.argv[2])
";
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path().join("model");
    for tied in [true, false] {
        let mut config = ModelConfig::qwen3(80, 32, 48, 2, 4, 2, 16);
        config.tie_word_embeddings = tied;
        config.initializer_range = 0.3;
        let policy = Policy::random(config.clone(), 4, Device::Cpu);
        save_folder(&folder, &config, &policy.export(), None).unwrap();
        let ids: Vec<i64> = (0..50).map(|i| i * i % 80).collect();
        let text = ids.iter().map(i64::to_string).collect::<Vec<_>>().join(",");
        let out = dir.path().join("logits.safetensors");
        let run = Command::new(&python)
            .args(["-c", script])
            .args([folder.as_os_str(), out.as_os_str(), text.as_ref()])
            .output()
            .unwrap();
        assert!(run.status.success(), "{}", String::from_utf8_lossy(&run.stderr));
        let bytes = std::fs::read(out).unwrap();
        let file = SafeTensors::deserialize(&bytes).unwrap();
        let want = Tensor::from_data_size(file.tensor("logits").unwrap().data(), &[50, 80], Kind::Float);
        let (_, got) = logits(&policy, &Tensor::from_slice(&ids));
        assert!(distance(&got, &want) < 2e-5, "{}", distance(&got, &want));
    }
}
