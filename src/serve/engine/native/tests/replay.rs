//! Replay of the engine's experts in the trainer (R3), with a control.
//!
//! The engine's router has bf16 weights, the trainer's f32: routing flips where two experts are nearly
//! equal. The correlation of the probabilities that both give to the sampled tokens is computed with the
//! engine's experts replayed, with free routing, and with the experts of the token before.

use super::{engine::pearson, *};
use crate::base::{DType, WeightTensor};
use tch::no_grad;

const LAYERS: usize = 4;
const EXPERTS: usize = 16;
const TOP_K: usize = 2;

fn mixture(seed: i64) -> Policy {
    tch::set_num_threads(1);
    let config = serde_json::json!({"model_type": "qwen3_moe", "vocab_size": VOCAB, "hidden_size": 32,
        "num_hidden_layers": LAYERS, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "intermediate_size": 48, "moe_intermediate_size": 24, "num_experts": EXPERTS,
        "num_experts_per_tok": TOP_K, "norm_topk_prob": true, "initializer_range": 0.2});
    let serde_json::Value::Object(map) = config else {
        unreachable!()
    };
    let config = ModelConfig::from_value(map, std::path::Path::new("config.json")).unwrap();
    let policy = Policy::random(config, seed, Device::Cpu);
    no_grad(|| {
        for (name, mut t) in policy.parameters() {
            if name.ends_with("experts.down_proj") {
                let _ = t.g_mul_scalar_(3.0);
            }
        }
    });
    policy
}

/// Share of the experts in the residual stream behind a layer: the least over all layers.
fn share_of_experts(policy: &Policy, text: &[i64]) -> f64 {
    let without = Policy::random(policy.config.clone(), 0, Device::Cpu);
    without.copy_from(&policy.export()).unwrap();
    no_grad(|| {
        for (name, mut t) in without.parameters() {
            if name.ends_with("experts.down_proj") {
                let _ = t.zero_();
            }
        }
        let layout = PackedLayout::single(text.len(), Device::Cpu);
        let mut x = policy.embed(&Tensor::from_slice(text));
        let mut least = f64::INFINITY;
        for (block, bare) in policy.blocks().iter().zip(without.blocks()) {
            let (full, bare) = (block.forward(&x, &layout), bare.forward(&x, &layout));
            least = least.min((&full - &bare).norm().double_value(&[]) / full.norm().double_value(&[]));
            x = full;
        }
        least
    })
}

/// The weights of a policy with its routers rounded to bf16.
fn with_rounded_routers(policy: &Policy) -> Vec<WeightTensor> {
    let round = |t: WeightTensor| {
        if !t.name.ends_with("mlp.gate.weight") {
            return t;
        }
        let values = t
            .data
            .chunks_exact(4)
            .map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]));
        let data: Vec<u8> = values
            .flat_map(|v| half::bf16::from_f32(v).to_le_bytes())
            .collect();
        WeightTensor {
            dtype: DType::Bf16,
            data: data.into(),
            ..t
        }
    };
    policy.export().into_iter().map(round).collect()
}

/// Experts for replay by layer, `[T,k]` each; the tokens that have none are free.
fn replayed(routing: &RoutedExperts, tokens: usize, shift: usize) -> Vec<Tensor> {
    let row = |t: usize| routing.experts.chunks(LAYERS * TOP_K).nth(t);
    let layer = |l: usize| {
        let experts = |t: usize| -> Vec<i64> {
            match t.checked_sub(shift).and_then(row) {
                Some(row) => row[l * TOP_K..(l + 1) * TOP_K]
                    .iter()
                    .map(|e| i64::from(*e))
                    .collect(),
                None => vec![-1; TOP_K],
            }
        };
        let all: Vec<i64> = (0..tokens).flat_map(experts).collect();
        Tensor::from_slice(&all).view([tokens as i64, TOP_K as i64])
    };
    (0..LAYERS).map(layer).collect()
}

#[tokio::test]
async fn replay_restores_the_correlation_that_routing_noise_costs() {
    let policy = mixture(3);
    let config = NativeEngineConfig {
        max_num_seqs: 16,
        max_num_batched_tokens: 256,
        kv_cache_tokens: 4096,
        ..small()
    };
    let engine =
        NativeEngine::from_weights(config, policy.config.clone(), &with_rounded_routers(&policy)).unwrap();
    let clients: Vec<_> = (0..40u32)
        .map(|i| {
            let mut r = request(u64::from(i), &format!("s{i}"), &prompt(20, i), 80);
            r.routing_from = Some(0);
            (r.prompt.clone(), Client::submit(&engine, r))
        })
        .collect();
    let mut sampled = Vec::new();
    let mut recomputed = [Vec::new(), Vec::new(), Vec::new()];
    let (mut flips, mut rows) = (0, 0);
    let mut share = f64::INFINITY;
    for (prompt, client) in clients {
        let ended = client.end().await.unwrap();
        let routing = ended.routing.as_ref().unwrap();
        let text: Vec<i64> = prompt.iter().copied().chain(ended.ids()).map(i64::from).collect();
        share = share.min(share_of_experts(&policy, &text));
        sampled.extend(ended.tokens.iter().map(|t| f64::from(t.logprob).exp()));
        let free = Vec::new();
        let ways = [
            replayed(routing, text.len(), 0),
            free,
            replayed(routing, text.len(), 1),
        ];
        for (way, out) in ways.into_iter().zip(&mut recomputed) {
            let is_free = way.is_empty();
            let layout = PackedLayout::single(text.len(), Device::Cpu).with_replay(way);
            layout.start_recording();
            let logits =
                no_grad(|| policy.logits(&policy.forward_hidden(&Tensor::from_slice(&text), &layout)));
            let probabilities = Vec::<Vec<f32>>::try_from(logits.softmax(-1, Kind::Float)).unwrap();
            for (n, token) in ended.tokens.iter().enumerate() {
                out.push(f64::from(probabilities[prompt.len() + n - 1][token.id as usize]));
            }
            if is_free {
                for (l, layer) in layout.recorded().iter().enumerate() {
                    let chosen = Vec::<Vec<i64>>::try_from(&layer.experts).unwrap();
                    for (chosen, row) in chosen.iter().zip(routing.experts.chunks(LAYERS * TOP_K)) {
                        let mut ours: Vec<u16> = chosen.iter().map(|e| *e as u16).collect();
                        let mut theirs = row[l * TOP_K..(l + 1) * TOP_K].to_vec();
                        ours.sort_unstable();
                        theirs.sort_unstable();
                        flips += usize::from(ours != theirs);
                        rows += 1;
                    }
                }
            }
        }
    }
    let [on, off, shifted] = recomputed.map(|r| pearson(&sampled, &r));
    println!(
        "{} tokens, {flips} of {rows} rows routed differently, experts carry {share:.2}: on {on:.5}, off {off:.5}, shifted {shifted:.4}",
        sampled.len()
    );
    assert!(share >= 0.3, "experts carry {share}");
    assert!(flips > 0, "nothing was routed differently");
    assert!(on >= 0.999, "on {on}");
    assert!(on - off >= 0.002, "on {on}, off {off}");
    assert!(shifted <= 0.9, "shifted {shifted}");
}
