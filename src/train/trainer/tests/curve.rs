//! Against PyTorch and transformers, over many steps: the same data, the same hyper-parameters, two programs that
//! share nothing but the starting folder (`tests/references/transformers_reference.py`). `LEGORL_TEST_PYTHON` names
//! a Python with both; `make test-long` installs one.

use super::*;
use crate::{
    model::{hf::export_folder, net::PackedLayout},
    train::algorithm::ppo_clip::PpoClip,
};
use serde_json::{json, Value};
use std::{
    path::{Path, PathBuf},
    process::Command,
};

mod ppo;

const STEPS: u32 = 200;
const LR: f64 = 1e-3;
const WEIGHT_DECAY: f64 = 0.05;
const CLIP: PpoClip = PpoClip {
    low: 0.2,
    high: 0.28,
    dual: 3.0,
};
const KL: f64 = 0.05;
const ENTROPY: f64 = 0.003;

fn fixture(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
        .join("tests/fixtures/models")
        .join(name)
}

fn load(folder: &Path) -> Policy {
    tch::set_num_threads(1);
    Policy::load(folder, Device::Cpu).unwrap()
}

/// What the reference is to compute in: as the policy does.
fn arithmetic(policy: &Policy) -> &'static str {
    match policy.compute_kind() {
        Kind::Double => "f64",
        _ => "f32",
    }
}

/// A copy of a hybrid for many steps, with a larger epsilon, which makes the norm behind the delta rule less sharp; see
/// [`the_first_losses_of_hybrids_are_those_of_pytorch_with_transformers`].
fn steady(name: &str, dir: &Path) -> PathBuf {
    let folder = dir.join("start");
    std::fs::create_dir(&folder).unwrap();
    for entry in std::fs::read_dir(fixture(name)).unwrap() {
        let path = entry.unwrap().path();
        std::fs::copy(&path, folder.join(path.file_name().unwrap())).unwrap();
    }
    let config = folder.join("config.json");
    let mut value: Value = serde_json::from_slice(&std::fs::read(&config).unwrap()).unwrap();
    let text = match value.get("text_config") {
        Some(_) => &mut value["text_config"],
        None => &mut value,
    };
    assert!(text["rms_norm_eps"].is_number());
    text["rms_norm_eps"] = json!(1e-2);
    std::fs::write(&config, value.to_string()).unwrap();
    folder
}

/// Runs the reference; `None` where this machine has none.
fn reference(arguments: &[&std::ffi::OsStr]) -> Option<()> {
    run_reference("transformers_reference.py", arguments)
}

fn run_reference(script: &str, arguments: &[&std::ffi::OsStr]) -> Option<()> {
    let Some(python) = std::env::var_os("LEGORL_TEST_PYTHON") else {
        eprintln!("SKIP transformers: LEGORL_TEST_PYTHON names no Python with torch and transformers");
        return None;
    };
    let script = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/references")
        .join(script);
    let run = Command::new(python).arg(script).args(arguments).output().unwrap();
    assert!(run.status.success(), "{}", String::from_utf8_lossy(&run.stderr));
    Some(())
}

/// Two prompts with four trials each; one trial has two leaves. Log-probabilities of the rollout are those of
/// `policy`, moved by up to 0.15 as if an older one had sampled.
fn fixed_batch(policy: &Policy) -> TrainBatch {
    let mut rng = ChaCha8Rng::seed_from_u64(17);
    let vocabulary = policy.config.vocab_size as u32;
    let mut groups = Vec::new();
    for group in 0..2u64 {
        let mut trajectories = Vec::new();
        for sample in 0..4u32 {
            let leaves: &[f32] = if (group, sample) == (1, 2) {
                &[0.25, 0.75]
            } else {
                &[1.0]
            };
            let mut sequences = Vec::new();
            for weight in leaves {
                let mut s = sequence(&mut rng);
                for id in &mut s.token_ids {
                    *id = rng.random_range(0..vocabulary);
                }
                s.weight = *weight;
                let ids: Vec<i64> = s.token_ids.iter().map(|id| i64::from(*id)).collect();
                let layout = PackedLayout::single(ids.len(), Device::Cpu);
                let rows = no_grad(|| {
                    let hidden = policy.forward_hidden(&Tensor::from_slice(&ids), &layout);
                    policy.logits(&hidden).log_softmax(-1, None::<Kind>)
                });
                for t in (0..s.len()).filter(|t| s.loss_mask[*t]).collect::<Vec<_>>() {
                    let exact = rows.double_value(&[t as i64 - 1, ids[t]]) as f32;
                    s.logprobs[t] = (exact + rng.random_range(-0.15..0.15)).min(0.0);
                }
                sequences.push(s);
            }
            let reward = if group == 0 {
                f64::from(sample % 2)
            } else {
                f64::from(sample) / 3.0
            };
            trajectories.push(trajectory(group, sample, reward, sequences));
        }
        groups.push(TrainGroup {
            id: GroupId(group),
            start_version: PolicyVersion(0),
            trajectories,
            dropped: vec![],
        });
    }
    TrainBatch { step: 1, groups }
}

/// The batch as the reference reads it.
fn as_json(batch: &TrainBatch, steps: u32) -> Value {
    let sequence = |s: &TokenSequence| {
        let sampled: Vec<usize> = (0..s.len()).filter(|t| s.loss_mask[*t]).collect();
        let logprobs: Vec<f32> = sampled.iter().map(|t| s.logprobs[*t]).collect();
        json!({"ids": s.token_ids, "sampled": sampled, "rollout_logprobs": logprobs, "weight": s.weight})
    };
    let trial = |t: &Trajectory| {
        let sequences: Vec<Value> = t.sequences.iter().map(sequence).collect();
        json!({"reward": t.outcome.reward, "sequences": sequences})
    };
    let group = |g: &TrainGroup| g.trajectories.iter().map(trial).collect::<Vec<Value>>();
    json!({
        "settings": {"steps": steps, "lr": LR, "weight_decay": WEIGHT_DECAY, "max_grad_norm": 1.0,
            "low": CLIP.low, "high": CLIP.high, "dual": CLIP.dual, "kl": KL, "entropy": ENTROPY},
        "groups": batch.groups.iter().map(group).collect::<Vec<_>>(),
    })
}

fn curve_config() -> TrainerConfig {
    TrainerConfig {
        objective: Objective {
            policy_loss: PolicyLoss::Ppo(CLIP),
            aggregation: Aggregation::SeqMeanTokenMean,
            kl: Some(KlLoss {
                estimator: KlEstimator::K3,
                coefficient: KL,
            }),
            entropy_coefficient: ENTROPY,
        },
        bypass_old_logprobs: true,
        max_token_len_per_gpu: 48,
        optimizer: AdamWConfig {
            weight_decay: WEIGHT_DECAY,
            ..AdamWConfig::default()
        },
        lr: LrSchedule::constant(LR),
        ..config()
    }
}

fn train([policy, reference]: [Policy; 2], batch: &TrainBatch, steps: u32) -> (Trainer, Vec<StepMetrics>) {
    let mut trainer = Trainer::new(curve_config(), policy, Some(reference)).unwrap();
    let mut batch = batch.clone();
    let metrics = (1..=steps).map(|step| {
        batch.step = step;
        trainer.step(&batch).unwrap()
    });
    let metrics = metrics.collect();
    (trainer, metrics)
}

/// Loss and entropy of every step, ours beside PyTorch's.
struct Curves {
    ours: Vec<StepMetrics>,
    theirs: Value,
}

impl Curves {
    /// The difference in one step.
    fn gap(&self, key: &str, of: &str, step: u32) -> f64 {
        let place = step as usize - 1;
        let theirs = self.theirs[of][place].as_f64().unwrap();
        (self.ours[place].get(key).unwrap() - theirs).abs()
    }

    /// Of the first `steps`: the largest difference in loss and in entropy.
    fn gaps(&self, steps: u32) -> (f64, f64) {
        let largest = |key, of| {
            (1..=steps)
                .map(|step| self.gap(key, of, step))
                .fold(0.0, f64::max)
        };
        (largest("actor/loss", "loss"), largest("actor/entropy", "entropy"))
    }
}

/// PyTorch's curve from a folder in `arithmetic`, and ours with parameters that `make` turns into what they are in.
fn curves(folder: &Path, arithmetic: &str, make: fn(Policy) -> Policy, steps: u32) -> Option<Curves> {
    let dir = tempfile::tempdir().unwrap();
    let batch = fixed_batch(&load(folder));
    let (data, out) = (dir.path().join("data.json"), dir.path().join("curves.json"));
    std::fs::write(&data, as_json(&batch, steps).to_string()).unwrap();
    let arguments = [
        "train".as_ref(),
        arithmetic.as_ref(),
        folder.as_os_str(),
        data.as_os_str(),
        out.as_os_str(),
    ];
    reference(&arguments)?;
    let theirs = serde_json::from_slice(&std::fs::read(&out).unwrap()).unwrap();
    let (_, ours) = train([(); 2].map(|()| make(load(folder))), &batch, steps);
    Some(Curves { ours, theirs })
}

/// The whole curve.
fn check_curve(name: &str, folder: &Path, arithmetic: &str, make: fn(Policy) -> Policy) {
    let Some(curves) = curves(folder, arithmetic, make, STEPS) else {
        return;
    };
    let (loss, entropy) = curves.gaps(STEPS);
    let at = |step: u32| curves.ours[step as usize - 1].get("actor/loss").unwrap();
    println!(
        "{name} in {arithmetic}: loss {:.4} in step 1, {:.4} in step {STEPS}; largest difference to PyTorch over all \
         steps: loss {loss:.1e}, entropy {entropy:.1e}",
        at(1),
        at(STEPS)
    );
    assert!(at(STEPS) < at(1) - 0.1, "{name}: it learns nothing");
    assert!(loss < 1e-3, "{name}: {loss}");
    assert!(entropy < 1e-2, "{name}: {entropy}");
}

#[test]
fn the_loss_curve_is_that_of_pytorch_with_transformers() {
    for name in ["qwen3", "qwen3_moe"] {
        check_curve(name, &fixture(name), "f32", |policy| policy);
    }
    // In f64 with parameters and moments, as the test below.
    for name in ["qwen3_next", "qwen3_5", "qwen3_5_moe"] {
        let dir = tempfile::tempdir().unwrap();
        check_curve(name, &steady(name, dir.path()), "f64", to_double);
    }
}

/// Random hybrids as they are. The norm behind their delta rule bends the loss so sharply that training at this rate
/// is chaotic: in f64, parameters and moments included, the difference to PyTorch grows from 1e-15 in the first step
/// evenly on a logarithmic scale, tenfold with every step of `qwen3_next` and every other step of the others. As long
/// as it has not grown, it is that of f64.
#[test]
fn the_first_losses_of_hybrids_are_those_of_pytorch_with_transformers() {
    for (name, steps) in [("qwen3_5", 20), ("qwen3_next", 5), ("qwen3_5_moe", 15)] {
        let Some(curves) = curves(&fixture(name), "f64", to_double, steps) else {
            return;
        };
        let gaps = |step| {
            curves
                .gap("actor/loss", "loss", step)
                .max(curves.gap("actor/entropy", "entropy", step))
        };
        let by_step: Vec<String> = (1..=steps).map(|step| format!("{:.0e}", gaps(step))).collect();
        println!("{name}: difference to PyTorch by step: {}", by_step.join(" "));
        assert!(gaps(1) < 1e-12 && gaps(2) < 1e-11, "{name}");
        let (loss, entropy) = curves.gaps(steps);
        assert!(loss < 1e-6 && entropy < 1e-6, "{name}: {loss} {entropy}");
    }
}

/// Whatever training does to the weights, transformers loads the exported folder strictly and computes the same.
#[test]
fn transformers_loads_what_was_trained() {
    for name in [
        "llama",
        "qwen3",
        "qwen3_untied_bias",
        "qwen3_moe",
        "qwen3_moe_mixed",
        "qwen3_next",
        "qwen3_5",
        "qwen3_5_moe",
        "qwen3_5_moe_stacked",
    ] {
        let batch = fixed_batch(&load(&fixture(name)));
        let (trainer, _) = train([(); 2].map(|()| load(&fixture(name))), &batch, 5);
        let dir = tempfile::tempdir().unwrap();
        let (folder, out) = (dir.path().join("export"), dir.path().join("logits.safetensors"));
        let weights = trainer.policy().export();
        export_folder(&fixture(name), &folder, |spec| {
            Ok(weights.iter().find(|w| w.name == spec.name).unwrap().clone())
        })
        .unwrap();
        if logits_agree(name, &folder, trainer.policy(), &out).is_none() {
            return;
        }
    }
}

/// Whether transformers loads a folder strictly and computes the logits of `policy`; `None` where this machine has
/// no reference.
pub(super) fn logits_agree(name: &str, folder: &Path, policy: &Policy, out: &Path) -> Option<()> {
    let ids: Vec<i64> = (0..90).map(|i| (i * i * 5 + i) % 80).collect();
    let text = ids.iter().map(i64::to_string).collect::<Vec<_>>().join(",");
    let arguments = [
        "logits".as_ref(),
        arithmetic(policy).as_ref(),
        folder.as_os_str(),
        text.as_ref(),
        out.as_os_str(),
    ];
    reference(&arguments)?;
    let want = stored_numbers(out, "logits");
    let got = no_grad(|| {
        let layout = PackedLayout::single(ids.len(), Device::Cpu);
        let hidden = policy.forward_hidden(&Tensor::from_slice(&ids), &layout);
        block_loop::to_vec(&policy.logits(&hidden))
    });
    assert_eq!(got.len(), want.len());
    let gaps = got.iter().zip(&want).map(|(a, b)| (a - b).abs());
    let mean = want.iter().sum::<f64>() / want.len() as f64;
    let variance = want.iter().map(|w| (w - mean).powi(2)).sum::<f64>() / want.len() as f64;
    let gap = gaps.fold(0.0, f64::max) / variance.sqrt();
    println!("{name}: logits differ by {gap:.1e} of their standard deviation at most");
    let wide = policy.compute_kind() == Kind::Double;
    assert!(gap < if wide { 1e-10 } else { 1e-4 }, "{name}: {gap}");
    Some(())
}

/// Numbers of a tensor of a safetensors file, f32 or f64.
fn stored_numbers(path: &Path, name: &str) -> Vec<f64> {
    let file = std::fs::read(path).unwrap();
    let file = safetensors::SafeTensors::deserialize(&file).unwrap();
    let tensor = file.tensor(name).unwrap();
    match tensor.dtype() {
        safetensors::Dtype::F32 => {
            let numbers = tensor.data().chunks_exact(4).map(|b| b.try_into().unwrap());
            numbers.map(|b| f64::from(f32::from_le_bytes(b))).collect()
        }
        safetensors::Dtype::F64 => {
            let numbers = tensor.data().chunks_exact(8).map(|b| b.try_into().unwrap());
            numbers.map(f64::from_le_bytes).collect()
        }
        other => panic!("{other:?}"),
    }
}
