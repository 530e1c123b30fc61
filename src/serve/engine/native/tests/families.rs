//! Every family, on the reference checkpoints and on networks of their shapes.

use super::{engine::batch_equals_naive, *};
use crate::model::net::ComputeType;
use std::path::PathBuf;
use tch::no_grad;

const FOLDERS: [&str; 9] = [
    "llama",
    "qwen3",
    "qwen3_untied_bias",
    "qwen3_moe",
    "qwen3_moe_mixed",
    "qwen3_next",
    "qwen3_5",
    "qwen3_5_moe",
    "qwen3_5_moe_stacked",
];

fn fixtures() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/models")
}

/// Random weights in the shape of a reference checkpoint, norms away from one.
fn shaped_like(folder: &str, seed: i64) -> Policy {
    tch::set_num_threads(1);
    let mut config = ModelConfig::from_dir(&fixtures().join(folder)).unwrap();
    config.vocab_size = VOCAB;
    config.initializer_range = 0.15;
    let policy = Policy::random(config, seed, Device::Cpu);
    no_grad(|| {
        for (name, mut t) in policy.parameters() {
            if name.ends_with("norm.weight") {
                let steps = Tensor::arange(t.numel() as i64, (Kind::Float, Device::Cpu));
                let _ = t.g_add_(&((steps * 0.7).sin() * 0.3));
            }
        }
    });
    policy
}

#[tokio::test]
async fn greedy_tokens_are_those_of_transformers() {
    for folder in FOLDERS {
        let name = folder.trim_end_matches("_stacked");
        let reference = std::fs::read(fixtures().join(format!("{name}.reference.safetensors"))).unwrap();
        let reference = safetensors::SafeTensors::deserialize(&reference).unwrap();
        let bytes = reference.tensor("greedy").unwrap().data().chunks_exact(8);
        let greedy: Vec<u32> = bytes
            .map(|b| i64::from_le_bytes(b.try_into().unwrap()) as u32)
            .collect();
        let engine = NativeEngine::start(small(), &fixtures().join(folder)).unwrap();
        let mut r = request(1, "s", &greedy[..8], 64);
        r.sampling.temperature = 0.0;
        // transformers stops at the ids of its generation config, which the reference cleared.
        let ended = Client::submit(&engine, r).end().await.unwrap();
        assert_eq!(ended.ids(), greedy[8..], "{folder}");
    }
}

/// The whole reference text as a prompt, in chunks; then log-probabilities of what is sampled behind it.
#[tokio::test]
async fn logprobs_of_the_reference_checkpoints_are_those_of_a_full_recompute() {
    for folder in FOLDERS {
        let policy = Policy::load(&fixtures().join(folder), Device::Cpu).unwrap();
        tch::set_num_threads(1);
        let engine = engine(&policy, small());
        let text: Vec<u32> = (0..100).map(|i| (i * i * 7 + i) % 120).collect();
        let mut r = request(1, "s", &text, 60);
        r.sampling.temperature = 0.8;
        let ended = Client::submit(&engine, r.clone()).end().await.unwrap();
        let text: Vec<i64> = r
            .prompt
            .iter()
            .copied()
            .chain(ended.ids())
            .map(i64::from)
            .collect();
        let rows = Vec::<Vec<f32>>::try_from(logprobs(&policy, &text, 0.8)).unwrap();
        let gap = |(n, token): (usize, &SampledToken)| {
            (token.logprob - rows[r.prompt.len() + n - 1][token.id as usize]).abs()
        };
        let largest = ended.tokens.iter().enumerate().map(gap).fold(0.0, f32::max);
        println!("{folder}: log-probabilities differ by {largest:.1e}");
        assert!(largest < 1e-5, "{folder}: {largest}");
    }
}

#[tokio::test]
async fn a_mixed_batch_is_that_of_the_loop_without_a_cache() {
    for folder in [
        "llama",
        "qwen3_moe",
        "qwen3_moe_mixed",
        "qwen3_next",
        "qwen3_5",
        "qwen3_5_moe",
    ] {
        println!("{folder}");
        // The hybrids over several seeds: their rounding depends on the weights.
        let seeds = if shaped_like(folder, 1).config.model_type.is_hybrid() {
            1..5
        } else {
            1..3
        };
        for seed in seeds {
            batch_equals_naive(&shaped_like(folder, seed), small(), 1e-5).await;
        }
        let policy = shaped_like(folder, 1);
        let tight = NativeEngineConfig {
            kv_cache_tokens: 256,
            num_threads: 1,
            ..small()
        };
        batch_equals_naive(&policy, tight, 1e-5).await;
    }
}

/// On the host the hybrids compute in what was asked for, as on a GPU: states in f32, everything else in bf16.
#[tokio::test]
async fn bf16_reports_the_log_probabilities_of_a_trainer_in_bf16() {
    for folder in ["qwen3_next", "qwen3_5", "qwen3_5_moe"] {
        let policy = Policy::load(&fixtures().join(folder), Device::Cpu)
            .unwrap()
            .with_compute_type(ComputeType::Bf16);
        tch::set_num_threads(1);
        let config = NativeEngineConfig {
            compute: ComputeType::Bf16,
            ..small()
        };
        let engine = engine(&policy, config);
        let text: Vec<u32> = (0..100).map(|i| (i * i * 7 + i) % 120).collect();
        let ended = Client::submit(&engine, request(1, "s", &text, 60)).end().await;
        let ended = ended.unwrap();
        let text: Vec<i64> = text.into_iter().chain(ended.ids()).map(i64::from).collect();
        let of = |policy: &Policy| Vec::<Vec<f32>>::try_from(logprobs(policy, &text, 1.0)).unwrap();
        let mean = |rows: &[Vec<f32>]| {
            let gap = |(n, t): (usize, &SampledToken)| (t.logprob - rows[99 + n][t.id as usize]).abs();
            ended.tokens.iter().enumerate().map(gap).sum::<f32>() / ended.tokens.len() as f32
        };
        let gap = mean(&of(&policy));
        // The control: what rounding to bf16 itself costs.
        let rounding = mean(&of(&policy.with_compute_type(ComputeType::F32)));
        println!("{folder}: {gap:.1e} from the trainer in bf16, {rounding:.1e} from that in f32");
        assert!(gap < 5e-3, "{folder}: {gap}");
        assert!(rounding > 1e-4, "{folder}: nothing was rounded");
    }
}

#[tokio::test]
async fn turns_and_branches_start_from_snapshots_of_the_state() {
    let policy = shaped_like("qwen3_5", 3);
    let engine = engine(&policy, small());
    let check = |r: &GenerateRequest, ended: &Ended| {
        let want = naive(&policy, &r.prompt, &r.sampling, 0, r.max_new_tokens as usize);
        assert_eq!(ended.ids(), want.iter().map(|w| w.0).collect::<Vec<_>>());
    };
    let first = request(1, "s", &prompt(50, 1), 30);
    let ended = Client::submit(&engine, first.clone()).end().await.unwrap();
    check(&first, &ended);
    // Snapshots: behind the chunks of 40 - 8 = 32 tokens and 48, and at the last page of the reply.
    let mut text = first.prompt.to_vec();
    text.extend(ended.ids());
    assert_eq!(engine.resident_prefix(&first.session, &text), 64);
    assert_eq!(engine.resident_prefix(&first.session, &text[..60]), 48);
    text.extend(prompt(20, 9));
    let before = engine.status().prefill_tokens;
    let second = request(2, "s", &text, 25);
    let ended = Client::submit(&engine, second.clone()).end().await.unwrap();
    assert_eq!(ended.cached_tokens, 64);
    assert_eq!(engine.status().prefill_tokens - before, 100 - 64);
    check(&second, &ended);
    // A branch that leaves behind the first prompt starts from that prompt's snapshot.
    let branch = [&text[..56], &prompt(30, 4)].concat();
    let third = request(3, "s", &branch, 20);
    let ended = Client::submit(&engine, third.clone()).end().await.unwrap();
    assert_eq!(ended.cached_tokens, 48);
    check(&third, &ended);
    settle(&engine).await;
}

#[tokio::test]
async fn a_group_computes_its_common_prompt_once() {
    let policy = shaped_like("qwen3_5_moe", 4);
    let engine = engine(&policy, small());
    let common = prompt(100, 2);
    let submit = |i: u64| Client::submit(&engine, request(i, &format!("s{i}"), &common, 10));
    let clients: Vec<Client> = (0..8).map(submit).collect();
    let mut cached = 0;
    for (i, client) in clients.into_iter().enumerate() {
        let ended = client.end().await.unwrap();
        cached += ended.cached_tokens;
        let params = request(i as u64, "", &common, 10).sampling;
        let want = naive(&policy, &common, &params, 0, 10);
        assert_eq!(ended.ids(), want.iter().map(|w| w.0).collect::<Vec<_>>());
    }
    assert_eq!(cached, 7 * 96);
    assert_eq!(engine.status().prefill_tokens, 100 + 7 * 4);
}

#[tokio::test]
async fn new_weights_start_from_empty_states() {
    use crate::base::{WeightTarget, WeightUpdate};
    let (old, new) = (shaped_like("qwen3_next", 5), shaped_like("qwen3_next", 6));
    let engine = engine(
        &old,
        NativeEngineConfig {
            max_model_len: 4096,
            kv_cache_tokens: 4096,
            ..small()
        },
    );
    let r = request(1, "s", &prompt(40, 3), 4000);
    let mut client = Client::submit(&engine, r.clone());
    client.at_least(5).await;
    let update = WeightUpdate::new(PolicyVersion(7), new.export());
    engine.update_weights(Arc::new(update)).await.unwrap();
    let of_new = |client: &Client| {
        client
            .tokens
            .iter()
            .filter(|t| t.version == PolicyVersion(7))
            .count()
    };
    while of_new(&client) < 20 {
        client.at_least(client.tokens.len() + 1).await;
    }
    engine.abort(RequestId(1));
    let ended = client.end().await.unwrap();
    let switch = ended
        .tokens
        .iter()
        .position(|t| t.version == PolicyVersion(7))
        .unwrap();
    let text = [&r.prompt[..], &ended.ids()[..switch]].concat();
    let want = naive(&new, &text, &r.sampling, switch as u64, 20);
    for (got, (id, logprob)) in ended.tokens[switch..].iter().zip(want) {
        assert_eq!(got.id, id);
        assert!((got.logprob - logprob).abs() < 1e-5);
    }
}

/// Rows of a sparse layer in the trainer's routing of a text, `[T][S·k]`.
fn trainer_routing(policy: &Policy, text: &[u32]) -> Vec<Vec<u16>> {
    let ids: Vec<i64> = text.iter().map(|t| i64::from(*t)).collect();
    let layout = PackedLayout::single(ids.len(), Device::Cpu);
    layout.start_recording();
    let _ = no_grad(|| policy.forward_hidden(&Tensor::from_slice(&ids), &layout));
    let mut rows = vec![Vec::new(); ids.len()];
    for layer in layout.recorded() {
        let experts = Vec::<Vec<i64>>::try_from(layer.experts).unwrap();
        for (row, experts) in rows.iter_mut().zip(experts) {
            row.extend(experts.iter().map(|e| *e as u16));
        }
    }
    rows
}

#[tokio::test]
async fn experts_are_those_of_the_trainer_also_for_reused_prefixes() {
    for folder in ["qwen3_moe_mixed", "qwen3_next", "qwen3_5_moe"] {
        let policy = shaped_like(folder, 7);
        let engine = engine(&policy, small());
        let mut text = prompt(70, 3);
        for (turn, from) in [(0, 0u32), (1, 0), (2, 90)] {
            let mut r = request(turn, "s", &text, 20);
            r.routing_from = Some(from);
            let ended = Client::submit(&engine, r).end().await.unwrap();
            assert_eq!(ended.cached_tokens > 0, turn > 0);
            text.extend(ended.ids());
            let routing = ended.routing.unwrap();
            let want = trainer_routing(&policy, &text[..text.len() - 1]);
            assert_eq!((routing.first, routing.width as usize), (from, want[0].len()));
            // Where two experts are nearly equal, rounding decides their order.
            let sorted = |row: &[u16]| {
                let mut layers: Vec<Vec<u16>> = row.chunks(3).map(<[u16]>::to_vec).collect();
                layers.iter_mut().for_each(|l| l.sort_unstable());
                layers
            };
            let got: Vec<_> = routing.experts.chunks(want[0].len()).map(sorted).collect();
            let want: Vec<_> = want[from as usize..].iter().map(|row| sorted(row)).collect();
            assert_eq!(got, want, "{folder}, turn {turn}");
            text.extend(prompt(15, 5 + turn as u32));
        }
    }
    // Nobody asked, and there are none.
    let policy = shaped_like("llama", 7);
    let mut r = request(1, "s", &prompt(20, 3), 5);
    r.routing_from = Some(0);
    let ended = Client::submit(&engine(&policy, small()), r).end().await.unwrap();
    assert_eq!(ended.routing, None);
}
