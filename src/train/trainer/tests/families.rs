//! The block loop over every family, on the reference checkpoints.

use super::*;
use crate::model::net::ComputeType;
use std::path::PathBuf;

pub(super) const FAMILIES: [&str; 7] = [
    "llama",
    "qwen3_untied_bias",
    "qwen3_moe",
    "qwen3_moe_mixed",
    "qwen3_next",
    "qwen3_5",
    "qwen3_5_moe",
];

pub(super) fn load(name: &str) -> Policy {
    tch::set_num_threads(1);
    let dir = PathBuf::from(env!("CARGO_MANIFEST_DIR"))
        .join("tests/fixtures/models")
        .join(name);
    Policy::load(&dir, Device::Cpu).unwrap()
}

/// A reference policy near the one that is trained.
pub(super) fn neighbour(name: &str, double: bool) -> Policy {
    let policy = build(name, double);
    nudge(&policy);
    policy
}

fn nudge(policy: &Policy) {
    no_grad(|| {
        for (i, (_, mut parameter)) in policy.parameters().into_iter().enumerate() {
            let _ = parameter.g_mul_scalar_(1.0 + 0.01 * (i as f64).sin());
        }
    });
}

pub(super) fn build(name: &str, double: bool) -> Policy {
    if double {
        to_double(load(name))
    } else {
        load(name)
    }
}

/// The block loop cuts the batch in another way than the oracle, except where f32 is the arithmetic: there both
/// see the same rows, because the rounding of another cut is not what is compared.
#[test]
fn block_loop_gradients_equal_those_of_one_graph() {
    for name in FAMILIES {
        for (double, limit) in [(true, 1e-10), (false, 1e-5)] {
            let mut config = with_kl_and_entropy(config());
            let is_wide = build(name, double).compute_kind() == Kind::Double || double;
            config.max_token_len_per_gpu = if is_wide { 64 } else { 10_000 };
            let batch = batch(3, 3);
            let mut oracle = config.clone();
            oracle.backward = BackwardMode::WholeGraph;
            oracle.max_token_len_per_gpu = 10_000;
            let (whole, whole_sums) =
                gradients_of(oracle, build(name, double), neighbour(name, double), &batch);
            for mode in [BackwardMode::BlockLoop, BackwardMode::BlockGraphs] {
                config.backward = mode;
                let (ours, sums) = gradients_of(
                    config.clone(),
                    build(name, double),
                    neighbour(name, double),
                    &batch,
                );
                let gap = relative_gap(&ours, &whole);
                println!("{name} {mode:?} double {double}: {gap:.1e}");
                assert!(gap < limit, "{name}, {mode:?}, double {double}: {gap:e}");
                assert!((sums.loss - whole_sums.loss).abs() < limit);
                assert_eq!(sums.tokens, whole_sums.tokens);
            }
        }
    }
}

/// What f32 parameters cost a hybrid, whose arithmetic is f64: the rounding of the gradients and of their sums.
#[test]
fn gradients_of_hybrids_in_f32_are_those_in_f64() {
    for name in ["qwen3_next", "qwen3_5", "qwen3_5_moe"] {
        let gradients = |make: fn(Policy) -> Policy| {
            let networks = (make(load(name)), make(neighbour(name, false)));
            gradients_of(
                with_kl_and_entropy(config()),
                networks.0,
                networks.1,
                &batch(3, 3),
            )
        };
        let (single, sums) = gradients(|policy| policy);
        let (double, exact) = gradients(to_double);
        assert!(single.iter().all(|g| g.kind() == Kind::Float));
        assert!(double.iter().all(|g| g.kind() == Kind::Double));
        let gap = relative_gap(&single, &double);
        println!("{name}: {gap:.1e}");
        assert!(gap < 1e-6, "{name}: {gap:e}");
        assert!(
            (sums.loss - exact.loss).abs() < 1e-12,
            "{} {}",
            sums.loss,
            exact.loss
        );
    }
}

/// The objective itself, moved along single entries of every parameter: no autograd, no derivative formula.
#[test]
fn gradients_agree_with_finite_differences_of_the_loss() {
    for family in FAMILIES {
        let batch = batch(5, 1);
        let config = config();
        let mut samples = samples(&batch, &config);
        let trainer = Trainer::new(config, build(family, true), None).unwrap();
        trainer.recompute_logprobs(&mut samples).unwrap();
        for sample in &mut samples.sequences {
            for (t, l) in sample.training_logprobs.as_mut().unwrap().iter_mut().enumerate() {
                *l += [0.05, -0.08, 0.1][t % 3];
            }
        }
        let all = samples.mini_batches()[0].clone();
        let mut run = || {
            trainer
                .gradients(&mut samples, &all, &mut StageTimer::default())
                .unwrap()
        };
        let (gradients, _) = run();
        let parameters = trainer.policy.parameters();
        for (place, (name, parameter)) in parameters.into_iter().enumerate() {
            let flat = gradients.tensors[place].view(-1);
            let entry = flat.abs().argmax(None, false).int64_value(&[]);
            let nudge = |delta: f64| {
                no_grad(|| {
                    let mut value = parameter.view(-1).get(entry);
                    let _ = value.g_add_scalar_(delta);
                });
            };
            // Small, because the hybrids' norms of small numbers bend sharply.
            let h = 1e-7;
            nudge(h);
            let up = run().1.loss;
            nudge(-2.0 * h);
            let down = run().1.loss;
            nudge(h);
            let numeric = (up - down) / (2.0 * h);
            let got = flat.double_value(&[entry]);
            assert!(
                (got - numeric).abs() < 1e-4 * (1e-2 + got.abs()),
                "{family}: {name}[{entry}]: {got} instead of {numeric}"
            );
        }
    }
}

/// bf16 rows with f32 master weights: the gradient points where that of f32 does. The epsilon is raised,
/// because a norm of the delta rule's smallest outputs turns their rounding into noise.
#[test]
fn bf16_gradients_are_near_those_of_f32() {
    for name in FAMILIES {
        let batch = batch(3, 3);
        let gradients = |compute| {
            let mut shape = load(name).config;
            shape.rms_norm_eps = 1e-2;
            shape.initializer_range = 0.2;
            let policy = Policy::random(shape, 3, Device::Cpu).with_compute_type(compute);
            let trainer = Trainer::new(config(), policy, None).unwrap();
            let mut samples = samples(&batch, &trainer.config);
            let all = samples.mini_batches()[0].clone();
            let (gradients, _) = trainer
                .gradients(&mut samples, &all, &mut StageTimer::default())
                .unwrap();
            let flat: Vec<Tensor> = gradients.tensors.iter().map(|g| g.view(-1)).collect();
            assert!(flat.iter().all(|g| g.kind() == Kind::Float));
            Tensor::cat(&flat, 0)
        };
        let (narrow, wide) = (gradients(ComputeType::Bf16), gradients(ComputeType::F32));
        let dot = |a: &Tensor, b: &Tensor| (a * b).sum(Kind::Double).double_value(&[]);
        let cosine = dot(&narrow, &wide) / (dot(&narrow, &narrow) * dot(&wide, &wide)).sqrt();
        println!("{name}: {cosine:.4}");
        assert!(cosine > 0.9 && cosine < 1.0 - 1e-7, "{name}: {cosine}");
    }
}

#[test]
fn a_step_raises_what_was_rewarded_and_resumes() {
    for name in ["qwen3_moe", "qwen3_5_moe"] {
        let mut config = config();
        config.lr = LrSchedule::constant(1e-3);
        let mut trainer = Trainer::new(config.clone(), load(name), None).unwrap();
        let batch = sampled_batch(&load(name), 0);
        let rewarded = |trainer: &Trainer| {
            let mut samples = samples(&batch, &trainer.config);
            trainer.recompute_logprobs(&mut samples).unwrap();
            let weigh = |s: &samples::Sample| {
                s.advantages[0] * s.training_logprobs.as_ref().unwrap().iter().sum::<f64>()
            };
            samples.sequences.iter().map(weigh).sum::<f64>()
        };
        let before = rewarded(&trainer);
        trainer.step(&batch).unwrap();
        let after = rewarded(&trainer);
        assert!(after > before + 1e-3, "{name}: {before} {after}");
        let saved = trainer.save_state().unwrap();
        let mut other = Trainer::new(config, load(name), None).unwrap();
        other
            .load_state(
                &saved.actor,
                &saved.optimizer,
                None,
                saved.progress,
                saved.version,
            )
            .unwrap();
        assert_eq!(rewarded(&other), after);
    }
}
