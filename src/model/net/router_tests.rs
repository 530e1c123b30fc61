//! Replay of recorded experts.

use super::*;
use std::path::PathBuf;
use tch::{Device, Kind, Tensor};

fn load(name: &str) -> Policy {
    tch::set_num_threads(1);
    let dir = PathBuf::from(env!("CARGO_MANIFEST_DIR"))
        .join("tests/fixtures/models")
        .join(name);
    Policy::load(&dir, Device::Cpu).unwrap()
}

fn ids() -> Tensor {
    Tensor::from_slice(&(0..40i64).map(|i| (i * i * 3 + i) % 120).collect::<Vec<_>>())
}

/// Output and routing of a forward pass.
fn forward(policy: &Policy, layout: &PackedLayout) -> (Tensor, Vec<Routing>) {
    layout.start_recording();
    let hidden = policy.forward_hidden(&ids(), layout);
    (hidden, layout.recorded())
}

fn experts(routing: &[Routing]) -> Vec<Tensor> {
    routing.iter().map(|r| r.experts.shallow_clone()).collect()
}

#[test]
fn replaying_the_own_choice_changes_nothing_and_rows_without_record_are_free() {
    for name in ["qwen3_moe", "qwen3_moe_mixed", "qwen3_next", "qwen3_5_moe"] {
        let policy = load(name);
        let layout = || PackedLayout::new(&[15, 25], Device::Cpu);
        let (free, routing) = forward(&policy, &layout());
        assert_eq!(routing.len(), policy.config.num_sparse_layers());
        let (replayed, again) = forward(&policy, &layout().with_replay(experts(&routing)));
        assert_eq!(replayed, free, "{name}");
        for (a, b) in routing.iter().zip(&again) {
            assert_eq!((&a.experts, &a.weights), (&b.experts, &b.weights));
        }
        let unknown = |r: &Routing| r.experts.full_like(-1);
        let nothing = routing.iter().map(unknown).collect();
        let (free_again, _) = forward(&policy, &layout().with_replay(nothing));
        assert_eq!(free_again, free, "{name}");
    }
}

/// Other experts than the router's: the weights are the current probabilities at those experts, and the
/// router learns from them.
#[test]
fn replayed_experts_get_the_current_probabilities_and_pass_gradients() {
    let policy = load("qwen3_moe");
    let shifted: Vec<Tensor> = experts(&forward(&policy, &PackedLayout::single(40, Device::Cpu)).1)
        .iter()
        .map(|e| (e + 3).remainder(8))
        .collect();
    // The second half of the row is routed freely.
    let half: Vec<Tensor> = shifted
        .iter()
        .map(|e| Tensor::cat(&[e.narrow(0, 0, 20), e.narrow(0, 20, 20).full_like(-1)], 0))
        .collect();
    let layout = PackedLayout::single(40, Device::Cpu).with_replay(half);
    let (hidden, routing) = forward(&policy, &layout);
    for (routing, shifted) in routing.iter().zip(&shifted) {
        assert_eq!(routing.experts.narrow(0, 0, 20), shifted.narrow(0, 0, 20));
        assert_ne!(routing.experts.narrow(0, 20, 20), shifted.narrow(0, 20, 20));
        let sums = routing.weights.sum_dim_intlist(-1, false, Kind::Float);
        assert!((sums - 1.0).abs().max().double_value(&[]) < 1e-5);
    }
    hidden.sin().sum(Kind::Float).backward();
    for (name, parameter) in policy.parameters() {
        if name.ends_with("mlp.gate.weight") {
            let grad = parameter.grad();
            assert!(
                grad.defined() && grad.abs().max().double_value(&[]) > 0.0,
                "{name}"
            );
        }
    }
}
