//! Memory of a trainer and of an engine rank.

use crate::{
    config::{
        values::{DeviceName, ModelEngine, TrainingMode},
        Settings,
    },
    plan::{
        layout,
        memory::{engine, size, train},
    },
    preflight::{fatal, model_family, ok, skip, warn, Facts, Outcome, Rule, TRAINING},
};

pub(super) const RULE: Rule = Rule {
    id: "memory",
    runs: TRAINING,
    what: "Weights, gradients, optimizer state, activations and key-value cache fit into a GPU.",
    why: "A step that does not fit ends in the first backward pass of a long trial, after hours.",
    evidence: "The estimate counts tensors from config.json. It is within 12% of 23 training steps measured on an H200 (bf16, by automatic differentiation and with a hand-written backward pass), and within 8% of the published 149 and 122 GB of Qwen3.5-35B-A3B with a window of 131,072 tokens on one and two nodes.",
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
    // The engine of this version stays where it is while its rank trains.
    if s.run.training_mode == TrainingMode::Sync && s.run.model_engine == ModelEngine::Fsdp {
        let both = trainer.total() + cache.total();
        found.push(judge(
            "trainer and engine on one rank",
            both,
            "TRAINING_MODE=sync",
            capacity,
            of,
        ));
    }
    found
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
            "memory: a 35B-A3B ({how}) with a window of {window} tokens was measured at 149 GB a GPU on one \
             train node of 8, and at 122 GB on two; set N_NODES_TRAIN=2 or MAX_RESP below {}",
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
        plan::shape::tests::qwen35_35b,
        preflight::{
            facts::GpuFacts,
            rules::testing::{facts, settings},
            Verdict,
        },
    };

    const PUBLISHED: [&str; 7] = [
        "MODEL_ENGINE=veomni",
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
    fn the_name_alone_tells_about_the_measured_model() {
        let verdict = |extra: &[&str]| check(&with(extra), None)[0].0;
        assert_eq!(verdict(&[]), Verdict::Warn);
        assert_eq!(verdict(&["MAX_RESP=58304"]), Verdict::Ok);
        assert_eq!(verdict(&["NNODES=2"]), Verdict::Ok);
        assert_eq!(verdict(&["MODEL_PATH=/m/Qwen3-8B"]), Verdict::Skip);
        assert_eq!(verdict(&["MODEL_PATH=/m/Qwen3.6-27B"]), Verdict::Skip);
    }
}
