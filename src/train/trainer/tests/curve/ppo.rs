//! PPO with its critic against PyTorch and transformers, over many steps (`tests/references/ppo_reference.py`):
//! generalised advantages over rewards with a penalty at every token, whitening, the clipped value loss, several
//! updates of critic and policy a step.

use super::*;
use crate::train::algorithm::{KlReward, ValueClip};

const STEPS: u32 = 60;
const LR: f64 = 3e-4;
const CRITIC_LR: f64 = 1e-4;
const GAMMA: f64 = 0.99;
const LAMBDA: f64 = 0.95;
/// Small, so that the bound is in force at some tokens.
const VALUE_CLIP: f64 = 0.005;
const KL: f64 = 0.02;
const EPOCHS: usize = 2;

/// What is compared in every step, and how far apart it may be. Over some seventy steps the differences stay near
/// rounding; then a token lies on the edge of a clip, the two programs take different sides of it, and their curves
/// part.
const FIGURES: [(&str, f64); 9] = [
    ("critic/vf_loss", 1e-3),
    ("critic/vf_explained_var", 1e-3),
    ("critic/values/mean", 1e-3),
    ("critic/returns/mean", 1e-3),
    ("critic/advantages/max", 1e-2),
    ("critic/grad_norm", 1e-2),
    ("actor/pg_loss", 1e-3),
    ("actor/reward_kl_penalty", 1e-3),
    ("actor/grad_norm", 1e-2),
];

fn ppo_config() -> TrainerConfig {
    let mut config = config();
    config.estimator = AdvantageEstimator::Gae {
        gamma: GAMMA,
        lambda: LAMBDA,
    };
    config.objective.policy_loss = PolicyLoss::Ppo(CLIP);
    config.objective.aggregation = Aggregation::TokenMean;
    config.critic = CriticConfig {
        lr: LrSchedule::constant(CRITIC_LR),
        clip: ValueClip(VALUE_CLIP),
        warmup_steps: 0,
    };
    config.kl_reward = Some(KlReward {
        estimator: KlEstimator::K1,
        coefficient: KL,
        adaptive: None,
    });
    // Against the log-probabilities in the data: against its own, a policy on fixed data has no bound.
    config.bypass_old_logprobs = true;
    config.mini_batch_groups = 1;
    config.ppo_epochs = EPOCHS;
    config.max_token_len_per_gpu = 48;
    config.optimizer.weight_decay = WEIGHT_DECAY;
    config.lr = LrSchedule::constant(LR);
    config
}

fn settings() -> Value {
    json!({"dtype": "float32", "steps": STEPS, "epochs": EPOCHS, "mini_batch_groups": 1, "lr": LR,
        "critic_lr": CRITIC_LR, "weight_decay": WEIGHT_DECAY, "max_grad_norm": 1.0, "gamma": GAMMA,
        "lambda": LAMBDA, "value_clip": VALUE_CLIP, "low": CLIP.low, "high": CLIP.high, "dual": CLIP.dual, "kl": KL})
}

#[test]
fn the_curves_of_ppo_are_those_of_pytorch_with_transformers() {
    let folder = fixture("qwen3");
    let dir = tempfile::tempdir().unwrap();
    let mut batch = fixed_batch(&load(&folder));
    let (data, out) = (dir.path().join("data.json"), dir.path().join("curves.json"));
    let mut content = as_json(&batch, STEPS);
    content["settings"] = settings();
    std::fs::write(&data, content.to_string()).unwrap();
    let arguments = [folder.as_os_str(), data.as_os_str(), out.as_os_str()];
    if run_reference("ppo_reference.py", &arguments).is_none() {
        return;
    }
    let curves: Value = serde_json::from_slice(&std::fs::read(&out).unwrap()).unwrap();

    let trainer = Trainer::new(ppo_config(), load(&folder), Some(load(&folder))).unwrap();
    let mut trainer = trainer.with_critic(load(&folder));
    let metrics: Vec<StepMetrics> = (1..=STEPS)
        .map(|step| {
            batch.step = step;
            trainer.step(&batch).unwrap()
        })
        .collect();
    let ours = |step: usize, key: &str| metrics[step].get(key).unwrap();
    let last = STEPS as usize - 1;
    for (key, limit) in FIGURES {
        let gaps = (0..=last).map(|i| (ours(i, key) - curves[key][i].as_f64().unwrap()).abs());
        let gap = gaps.fold(0.0, f64::max);
        println!(
            "{key}: {:.4} in step 1, {:.4} in step {STEPS}; largest difference to PyTorch {gap:.1e}",
            ours(0, key),
            ours(last, key)
        );
        assert!(gap < limit, "{key}: {gap}");
    }
    // Both clips are in force somewhere, and the critic learns the fixed trials.
    for key in ["critic/vf_clipfrac", "actor/pg_clipfrac"] {
        let largest = (0..STEPS as usize).map(|i| ours(i, key)).fold(0.0, f64::max);
        let theirs = curves[key].as_array().unwrap().iter();
        let theirs = theirs.map(|x| x.as_f64().unwrap()).fold(0.0, f64::max);
        println!("{key}: {largest:.3} at most, {theirs:.3} in PyTorch");
        assert!(
            largest > 0.01 && (largest - theirs).abs() < 0.02,
            "{key}: {largest} {theirs}"
        );
    }
    let explained = ours(last, "critic/vf_explained_var");
    assert!(explained > 0.5, "{explained}");
}
