//! Estimates against measurements. None of these numbers is used by the code under test.

use super::*;
use crate::plan::shape::tests::{qwen3, qwen35_35b};

const GIB: f64 = (1u64 << 30) as f64;

/// Half of the 15% that the estimate may be off is enough for most rows; all of it for the worst.
fn assert_near(what: &str, estimate: &Estimate, measured_gib: f64) {
    let gib = estimate.total() as f64 / GIB;
    let off = gib / measured_gib - 1.0;
    eprintln!(
        "{what}: {gib:.1} GiB, measured {measured_gib} ({:+.1}%)",
        off * 100.0
    );
    assert!(
        off.abs() <= 0.15,
        "{what}: {gib:.1} GiB against {measured_gib}: {}",
        estimate.describe()
    );
}

/// bf16 weights, gradients and moments on one GPU; 16,384 tokens a step; the head in rows of 2,048.
fn one_gpu(tokens: u64, kept_blocks: u64, backward: Backward) -> TrainPlan {
    TrainPlan {
        shards: 1,
        expert_shards: 1,
        weight_bytes: 2,
        gradient_bytes: 2,
        moment_bytes: 4,
        master_bytes: 0,
        reference_bytes: 0,
        critic_bytes: 0,
        compute_bytes: 2,
        tokens,
        kept_blocks,
        backward,
        head_rows: 2048,
        gpu: true,
    }
}

#[test]
fn one_h200_with_dense_models() {
    let sizes = [
        ("0.6B", qwen3(1024, 28, 16, 3072)),
        ("1.7B", qwen3(2048, 28, 16, 6144)),
        ("4B", qwen3(2560, 36, 32, 9728)),
    ];
    let all = u64::MAX;
    // Memory on the device with its context, GiB, of 0.6B, 1.7B and 4B.
    let rows = [
        (
            "autograd, recompute, 4x4096",
            4096,
            0,
            Backward::Autograd,
            [10.0, 19.0, 37.0],
        ),
        (
            "autograd, recompute, packed",
            16384,
            0,
            Backward::Autograd,
            [11.0, 21.0, 41.0],
        ),
        (
            "autograd, kept, 4x4096",
            4096,
            all,
            Backward::Autograd,
            [16.0, 28.0, 56.0],
        ),
        (
            "autograd, kept, packed",
            16384,
            all,
            Backward::Autograd,
            [33.0, 54.0, 111.0],
        ),
        (
            "written, recompute, packed",
            16384,
            0,
            Backward::Written,
            [8.0, 17.0, 37.0],
        ),
        (
            "written, kept, 4x4096",
            4096,
            all,
            Backward::Written,
            [9.0, 19.0, 42.0],
        ),
        (
            "written, kept, packed",
            16384,
            all,
            Backward::Written,
            [18.0, 34.0, 72.0],
        ),
    ];
    for (what, tokens, kept, backward, measured) in rows {
        for ((name, shape), measured) in sizes.iter().zip(measured) {
            let estimate = train(shape, &one_gpu(tokens, kept, backward));
            assert_near(&format!("{name} {what}"), &estimate, measured);
        }
    }
    let (_, large) = &sizes[2];
    let half = train(large, &one_gpu(16384, 18, Backward::Written));
    assert_near("4B written, 18 of 36 blocks kept", &half, 54.0);
    let wide = TrainPlan {
        master_bytes: 4,
        gradient_bytes: 4,
        moment_bytes: 8,
        ..one_gpu(16384, all, Backward::Written)
    };
    assert_near("4B written, kept, f32 state", &train(large, &wide), 113.0);
}

/// The published points of Qwen3.5-35B-A3B, of another trainer whose head is whole, with a window of 131,072 tokens over 8 ranks: 149 GB on one
/// node of 8 GPUs, 122 GB on two. The source compares them with a capacity of 139.8, which is GiB on an
/// H200; both readings are within the bound.
#[test]
fn a_mixture_of_experts_on_one_and_two_nodes() {
    for (ranks, published) in [(8, 149.0), (16, 122.0)] {
        let plan = TrainPlan {
            shards: ranks,
            expert_shards: 1,
            weight_bytes: 4,
            gradient_bytes: 4,
            moment_bytes: 8,
            master_bytes: 0,
            reference_bytes: 0,
            critic_bytes: 0,
            compute_bytes: 2,
            tokens: 131_072 / 8,
            kept_blocks: 0,
            backward: Backward::Autograd,
            head_rows: u64::MAX,
            gpu: true,
        };
        let estimate = train(&qwen35_35b(), &plan);
        eprintln!("{}", estimate.describe());
        assert_near("35B-A3B in GiB", &estimate, published);
        assert_near("35B-A3B in GB", &estimate, published * 1e9 / GIB);
    }
}

/// Layers of Qwen3.5-35B-A3B in what `MODEL_DTYPE=f32` means: numbers have eight bytes, gathered weights four.
#[test]
fn a_trainer_computes_families_with_a_delta_net_in_f64_where_f32_is_asked_for() {
    let part = |shape: &ModelShape, compute_bytes: u64, name: &str| {
        let plan = TrainPlan {
            shards: 8,
            gradient_bytes: 4,
            compute_bytes,
            ..one_gpu(1000, 0, Backward::Autograd)
        };
        let estimate = train(shape, &plan);
        estimate.parts.iter().find(|(n, _)| *n == name).unwrap().1
    };
    let (hybrid, dense) = (qwen35_35b(), qwen3(2560, 36, 32, 9728));
    assert_eq!(part(&hybrid, 4, "block inputs"), 1000 * 40 * 2048 * 8);
    assert_eq!(part(&hybrid, 2, "block inputs"), 1000 * 40 * 2048 * 2);
    assert_eq!(part(&dense, 4, "block inputs"), 1000 * 36 * 2560 * 4);
    // Logits, log-softmax, the gradients of both, and one copy.
    assert_eq!(part(&hybrid, 4, "head"), 1000 * 248_320 * 5 * 8);
    let gathered = |bytes| part(&hybrid, bytes, "gathered layer");
    assert_eq!(gathered(4) * 8, gathered(2) * 12);
}

/// Qwen3.5-35B-A3B: ten layers attend with two heads of 256, thirty have a state of 32 x 128 x 128 and three inputs
/// of 8,192 channels.
#[test]
fn an_engine_holds_three_states_a_sequence_and_f64_where_f32_is_asked_for() {
    let shape = qwen35_35b();
    let part = |number_bytes: u64, name: &str| {
        let plan = EnginePlan {
            tensor_parallel: 1,
            number_bytes,
            cache_tokens: 1000,
            sequences: 7,
            states: 3,
            gpu: true,
        };
        let estimate = engine(&shape, &plan);
        estimate.parts.iter().find(|(n, _)| *n == name).unwrap().1
    };
    let (matrix, inputs) = (32 * 128 * 128, 3 * 8192);
    assert_eq!(
        part(2, "delta-net states"),
        7 * 3 * 30 * (4 * matrix + 2 * inputs)
    );
    assert_eq!(part(4, "delta-net states"), 7 * 3 * 30 * 8 * (matrix + inputs));
    assert_eq!(part(2, "key-value cache"), 1000 * 10 * 2 * 2 * 256 * 2);
    assert_eq!(part(4, "key-value cache"), 1000 * 10 * 2 * 2 * 256 * 8);
    assert_eq!(part(4, "weights"), 8 * shape.parameters());
}

#[test]
fn an_engine_holds_weights_and_cache() {
    let shape = qwen3(2560, 36, 32, 9728);
    let plan = EnginePlan {
        tensor_parallel: 1,
        number_bytes: 2,
        cache_tokens: 1 << 20,
        sequences: 64,
        states: 3,
        gpu: true,
    };
    let part = |estimate: &Estimate, name: &str| estimate.parts.iter().find(|(n, _)| *n == name).unwrap().1;
    let whole = engine(&shape, &plan);
    // 36 layers x 2 x 8 heads x 128 x 2 bytes = 144 KiB a token.
    assert_eq!(part(&whole, "key-value cache"), 144 << 30);
    let shared = engine(
        &shape,
        &EnginePlan {
            tensor_parallel: 4,
            ..plan
        },
    );
    assert_eq!(part(&shared, "key-value cache"), 36 << 30);
    assert_eq!(part(&shared, "weights"), part(&whole, "weights").div_ceil(4));
    let split_too_far = engine(
        &shape,
        &EnginePlan {
            tensor_parallel: 16,
            ..plan
        },
    );
    assert_eq!(
        part(&split_too_far, "key-value cache"),
        18 << 30,
        "one head remains on each rank"
    );
}

#[test]
fn sizes_are_short() {
    assert_eq!(size(512), "512 B");
    assert_eq!(size(3 << 20), "3 MiB");
    assert_eq!(size(1 << 29), "0.5 GiB");
    assert_eq!(size(149 << 30), "149 GiB");
    assert_eq!(size(20 << 40), "20.0 TiB");
}
