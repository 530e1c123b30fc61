//! Memory of a trainer and of an engine rank.

use crate::{
    config::{
        values::{AdvEstimator, DeviceName, ModelEngine, TrainingMode},
        Settings,
    },
    plan::{
        layout,
        memory::{engine, size, train},
        shape::ModelShape,
    },
    preflight::{fatal, model_family, ok, skip, warn, Facts, Outcome, Rule, TRAINING},
};

pub(super) const RULE: Rule = Rule {
    id: "memory",
    runs: TRAINING,
    what: "Weights, gradients, optimizer state, activations and key-value cache fit into a GPU.",
    why: "A step that does not fit ends in the first backward pass of a long trial, after hours.",
    evidence: "The estimate counts tensors from config.json. It is within 12% of 23 training steps measured on an H200 (bf16, by automatic differentiation and with a hand-written backward pass), and within 8% of the published 149 and 122 GB of Qwen3.5-35B-A3B with a window of 131,072 tokens on one and two nodes (another trainer, whose head is whole).",
    fix: "Raise N_NODES_TRAIN or SP_SIZE, or lower MAX_RESP, ACTOR_PPO_MAX_TOKEN_LEN_PER_GPU or ENGINE_KV_CACHE_TOKENS.",
    check,
};

/// What an H200 offers to a program.
const H200_BYTES: u64 = (139.8 * (1u64 << 30) as f64) as u64;

/// Share of the capacity that is planned with: an allocator cannot use the last bit of it.
const USABLE: f64 = 0.95;

/// How far the estimate may be off.
const TOLERANCE: f64 = 0.15;

/// Window from which one node of 8 GPUs was measured to be too small for Qwen3.5-35B-A3B.
const LONG_WINDOW: u64 = 120_000;

fn check(s: &Settings, facts: Option<&Facts>) -> Vec<Outcome> {
    let Some(facts) = facts else {
        return vec![by_name(s)];
    };
    let Ok(model) = &facts.model else {
        return vec![skip("memory: the checkpoint cannot be read")];
    };
    let cores_wanted = s.model.device == DeviceName::Cpu;
    let gpu = facts.gpus.iter().map(|gpu| gpu.memory_bytes).min();
    let gpu = gpu.filter(|_| !cores_wanted);
    // A launch on a machine without GPUs computes on its cores; elsewhere the GPUs are just not here.
    let on_cores = cores_wanted || (gpu.is_none() && facts.world_size.is_some());
    let (capacity, of) = match (gpu, facts.memory_bytes) {
        (Some(bytes), _) => (bytes, "this machine's GPU"),
        (None, Some(bytes)) if on_cores => (
            bytes / u64::from(s.topology.ngpus_per_node.max(1)),
            "a rank's share of main memory",
        ),
        _ => (H200_BYTES, "an H200; this machine has no GPU"),
    };
    let trainer = train(&model.shape, &layout::train_plan(s, !on_cores));
    let cache = engine(&model.shape, &layout::engine_plan(s, !on_cores));
    let mut found = vec![
        judge("trainer", trainer.total(), &trainer.describe(), capacity, of),
        judge("engine", cache.total(), &cache.describe(), capacity, of),
    ];
    // The native engine stays where it is while its rank trains.
    if s.run.training_mode == TrainingMode::Sync && s.run.model_engine != ModelEngine::Megatron {
        let both = trainer.total() + cache.total();
        found.push(judge(
            "trainer and engine on one rank",
            both,
            "TRAINING_MODE=sync",
            capacity,
            of,
        ));
    }
    found.extend(snapshots(s, facts, &model.shape));
    found
}

/// Bytes a parameter of what is copied to main memory for a checkpoint: weight and two moments in f32.
const SNAPSHOT_BYTES: u64 = 12;

/// A warning where the copies that a node's ranks make of their shares for a checkpoint do not fit into its
/// memory.
fn snapshots(s: &Settings, facts: &Facts, shape: &ModelShape) -> Option<Outcome> {
    // Elsewhere the machine that was looked at is none of the run's.
    facts.world_size?;
    let memory = facts.memory_bytes?;
    let networks = if s.algorithm.adv_estimator == AdvEstimator::Gae {
        2
    } else {
        1
    };
    let ranks = u64::from(s.train_ranks().max(1));
    let share = (shape.parameters() * SNAPSHOT_BYTES * networks).div_ceil(ranks);
    let here = share * u64::from(s.topology.ngpus_per_node.max(1)).min(ranks);
    (here as f64 > memory as f64 * USABLE).then(|| {
        warn(format!(
            "memory: saving copies {} of weights and moments into this node's {} of main memory; spread the trainer \
             over more nodes (N_NODES_TRAIN)",
            size(here),
            size(memory)
        ))
    })
}

fn judge(what: &str, bytes: u64, parts: &str, capacity: u64, of: &str) -> Outcome {
    let text = format!(
        "memory: {what} about {} of {} ({of}): {parts}",
        size(bytes),
        size(capacity)
    );
    let least = bytes as f64 * (1.0 - TOLERANCE);
    if least > capacity as f64 && !of.starts_with("an H200") {
        fatal(text)
    } else if bytes as f64 > capacity as f64 * USABLE {
        warn(text)
    } else {
        ok(text)
    }
}

/// Without config.json only the model that was measured can be judged, and only where it was measured.
fn by_name(s: &Settings) -> Outcome {
    let (_, how) = model_family::of(s, None);
    let window = s.window_tokens();
    let nodes = s.topology.n_nodes_train;
    if !model_family::is_measured(s) {
        return skip("memory: needs config.json");
    }
    if nodes <= 1 && window >= LONG_WINDOW {
        warn(format!(
            "memory: a 35B-A3B ({how}) with a window of {window} tokens was measured with another trainer at \
             149 GB a GPU on one train node of 8, and at 122 GB on two; set N_NODES_TRAIN=2 or MAX_RESP below {}",
            LONG_WINDOW.saturating_sub(u64::from(s.data.max_prompt_tokens))
        ))
    } else {
        ok(format!(
            "memory: {nodes} train nodes and a window of {window} tokens are within what was measured ({how})"
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        plan::{memory::Estimate, shape::tests::qwen35_35b},
        preflight::{
            facts::GpuFacts,
            rules::testing::{facts, settings},
            Verdict,
        },
    };

    use serde_json::json;

    const PUBLISHED: [&str; 7] = [
        "MODEL_ENGINE=megatron",
        "MODEL_PATH=/m/Qwen3.5-35B-A3B",
        "MAX_PROMPT=40000",
        "MAX_RESP=91072",
        "NGPUS_PER_NODE=8",
        "SP_SIZE=8",
        "GEN_TP=8",
    ];

    fn with(extra: &[&str]) -> Settings {
        settings(&[&PUBLISHED, extra].concat())
    }

    fn large() -> Facts {
        let mut facts = facts();
        if let Ok(model) = &mut facts.model {
            model.shape = qwen35_35b();
        }
        facts
    }

    /// The plan of the published trainer, whose head is whole, is that of `megatron`.
    #[test]
    fn the_published_run_needs_two_nodes() {
        let one = check(&with(&[]), Some(&large()));
        assert_eq!(one[0].0, Verdict::Warn);
        assert!(
            one[0].1.contains("about 145 GiB of 140 GiB") && one[0].1.contains("head 61 GiB"),
            "{one:?}"
        );
        let two = check(&with(&["NNODES=2"]), Some(&large()));
        assert_eq!(two[0].0, Verdict::Ok);
        assert!(two[0].1.contains("about 113 GiB"), "{two:?}");
        let short = check(&with(&["MAX_RESP=48304"]), Some(&large()));
        assert_eq!(short[0].0, Verdict::Ok);
    }

    #[test]
    fn a_gpu_that_is_here_and_too_small_is_fatal() {
        let mut small = large();
        small.gpus = vec![GpuFacts {
            index: 0,
            name: "small".into(),
            driver: "1".into(),
            memory_bytes: 80 << 30,
            used_bytes: 0,
            processes: Vec::new(),
        }];
        assert_eq!(check(&with(&[]), Some(&small))[0].0, Verdict::Fatal);
    }

    #[test]
    fn copies_for_a_checkpoint_fit_into_the_memory_of_the_node() {
        let told = |set: &[&str], memory_bytes: u64, world_size| -> Vec<String> {
            let facts = Facts {
                memory_bytes: Some(memory_bytes),
                world_size,
                ..large()
            };
            let found = check(&settings(set), Some(&facts)).into_iter();
            let told = found.filter(|(_, text)| text.contains("saving copies"));
            told.map(|(verdict, text)| {
                assert_eq!(verdict, Verdict::Warn);
                text
            })
            .collect()
        };
        let bytes = qwen35_35b().parameters() * 12;
        let node = ["NGPUS_PER_NODE=8", "DEVICE=cuda"];
        assert!(told(&node, bytes * 2, Some(8)).is_empty());
        let found = told(&node, bytes, Some(8));
        assert!(found[0].contains(&size(bytes)), "{found:?}");
        let critic = ["NGPUS_PER_NODE=8", "DEVICE=cuda", "ADV_ESTIMATOR=gae"];
        assert_eq!(told(&critic, bytes * 2, Some(8)).len(), 1);
        let two = ["NGPUS_PER_NODE=8", "DEVICE=cuda", "NNODES=2"];
        assert!(told(&two, bytes, Some(16)).is_empty());
        assert!(told(&node, bytes, None).is_empty());
    }

    #[test]
    fn the_name_alone_tells_about_the_measured_model() {
        let verdict = |extra: &[&str]| check(&with(extra), None)[0].0;
        assert_eq!(verdict(&[]), Verdict::Warn);
        assert_eq!(verdict(&["MAX_RESP=58304"]), Verdict::Ok);
        assert_eq!(verdict(&["NNODES=2"]), Verdict::Ok);
        assert_eq!(verdict(&["MODEL_PATH=/m/Qwen3-8B"]), Verdict::Skip);
        assert_eq!(verdict(&["MODEL_PATH=/m/Qwen3.6-27B"]), Verdict::Skip);
    }

    /// Qwen3-30B-A3B's config.json.
    fn qwen3_30b() -> ModelShape {
        let config = json!({"model_type": "qwen3_moe", "vocab_size": 151936, "hidden_size": 2048,
            "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
            "intermediate_size": 6144, "num_experts": 128, "num_experts_per_tok": 8,
            "moe_intermediate_size": 768, "tie_word_embeddings": false, "max_position_embeddings": 40960});
        ModelShape::from_value(&config).unwrap()
    }

    #[test]
    fn fsdp_and_veomni_are_one_trainer_and_one_engine() {
        let (shape, common) = (
            qwen3_30b(),
            [
                "NGPUS_PER_NODE=8",
                "USE_KL_LOSS=True",
                "SP_SIZE=2",
                "MAX_RESP=30000",
            ],
        );
        for extra in [
            &[][..],
            &["MODEL_DTYPE=f32"],
            &["USE_KL_LOSS=False", "ADV_ESTIMATOR=gae"],
        ] {
            let of = |engine: &str| settings(&[&common[..], extra, &[engine]].concat());
            let (fsdp, veomni) = (of("MODEL_ENGINE=fsdp"), of("MODEL_ENGINE=veomni"));
            for gpu in [false, true] {
                assert_eq!(
                    layout::train_plan(&fsdp, gpu),
                    layout::train_plan(&veomni, gpu),
                    "{extra:?}"
                );
                assert_eq!(
                    layout::engine_plan(&fsdp, gpu),
                    layout::engine_plan(&veomni, gpu),
                    "{extra:?}"
                );
            }
        }
        let s = settings(&[&common[..], &["MODEL_ENGINE=veomni"]].concat());
        let (trainer, replica) = (
            train(&shape, &layout::train_plan(&s, true)),
            engine(&shape, &layout::engine_plan(&s, true)),
        );
        let part =
            |estimate: &Estimate, name: &str| estimate.parts.iter().find(|(n, _)| *n == name).unwrap().1;
        assert_eq!(part(&trainer, "reference"), (shape.parameters() * 4).div_ceil(8));
        // The product and its gradient in bf16, three f32 copies.
        assert_eq!(part(&trainer, "head"), 2048 * 151_936 * 16);
        // 48 layers, keys and values of 4 heads x 128, bf16.
        assert_eq!(
            part(&replica, "key-value cache"),
            s.engine.kv_cache_tokens * 48 * 2 * 4 * 128 * 2
        );
    }

    #[test]
    fn ranks_that_share_experts_gather_their_own_alone() {
        let shape = qwen3_30b();
        let with = |ep: &str| {
            let set = ["NGPUS_PER_NODE=8", "MODEL_ENGINE=veomni", ep];
            train(&shape, &layout::train_plan(&settings(&set), true))
        };
        let (one, eight) = (with("EP_SIZE=1"), with("EP_SIZE=8"));
        let differ: Vec<_> = one
            .parts
            .iter()
            .zip(&eight.parts)
            .filter(|(a, b)| a != b)
            .collect();
        // 7 of 8 of 128 experts with three matrices of 2048 x 768: two layers in bf16, one of f32 gradients.
        assert_eq!(differ.len(), 1, "{differ:?}");
        let saved = differ[0].0 .1 - differ[0].1 .1;
        assert_eq!(
            (differ[0].0 .0, saved),
            ("gathered layer", 112 * 3 * 2048 * 768 * 8)
        );
    }

    #[test]
    fn under_sync_every_launched_trainer_shares_its_rank_with_an_engine() {
        let both = |set: &[&str]| {
            let found = check(&settings(set), Some(&large()));
            found
                .iter()
                .any(|(_, text)| text.contains("trainer and engine on one rank"))
        };
        assert!(both(&["MODEL_ENGINE=fsdp"]) && both(&["MODEL_ENGINE=veomni"]));
        assert!(!both(&["MODEL_ENGINE=megatron"]));
        let apart = [
            "TRAINING_MODE=async",
            "NNODES=2",
            "N_NODES_ROLLOUT=1",
            "MODEL_ENGINE=veomni",
        ];
        assert!(!both(&apart));
    }
}
