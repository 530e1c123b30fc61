//! The native engine on the GPU: what it samples, and with which log-probabilities.

use super::{fixture, gpu, ids, FAMILIES};
use legorl::{
    base::{Engine, EngineEvent, GenerateRequest, RequestId, SampledToken, SamplingParams, SessionId},
    model::net::{ComputeType, Device, PackedLayout, Policy},
    serve::engine::native::{NativeEngine, NativeEngineConfig},
};
use tch::{no_grad, Kind, Tensor};
use tokio::sync::mpsc::unbounded_channel;

/// Replies to five prompts of different lengths, which the engine computes together, in small chunks.
fn replies(name: &str, device: Device, compute: ComputeType, temperature: f32) -> Vec<Vec<SampledToken>> {
    let config = NativeEngineConfig {
        max_num_batched_tokens: 48,
        max_model_len: 200,
        kv_cache_tokens: 4096,
        device,
        compute,
        ..NativeEngineConfig::default()
    };
    let engine = NativeEngine::start(config, &fixture(name)).unwrap();
    let mut inboxes = Vec::new();
    for (i, length) in [5usize, 17, 32, 61, 100].into_iter().enumerate() {
        let (sender, inbox) = unbounded_channel();
        let request = GenerateRequest {
            id: RequestId(i as u64),
            session: SessionId::from(i.to_string().as_str()),
            prompt: ids(length, i).iter().map(|id| *id as u32).collect(),
            sampling: SamplingParams {
                temperature,
                seed: i as u64,
                ..SamplingParams::default()
            },
            stop_token_ids: Vec::new(),
            max_new_tokens: 40,
            routing_from: None,
        };
        engine.submit(request, sender);
        inboxes.push(inbox);
    }
    let collect = |mut inbox: tokio::sync::mpsc::UnboundedReceiver<EngineEvent>| {
        let mut reply = Vec::new();
        loop {
            match inbox.blocking_recv() {
                Some(EngineEvent::Tokens(tokens)) => reply.extend(tokens),
                Some(EngineEvent::Finished { .. }) => return reply,
                other => panic!("{other:?}"),
            }
        }
    };
    inboxes.into_iter().map(collect).collect()
}

#[test]
fn f32_samples_what_the_host_samples() {
    let Some(device) = gpu() else { return };
    for name in FAMILIES {
        for temperature in [0.0, 1.0] {
            let host = replies(name, Device::Cpu, ComputeType::F32, temperature);
            let there = replies(name, device, ComputeType::F32, temperature);
            for (host, there) in host.iter().zip(&there) {
                let ids = |r: &[SampledToken]| r.iter().map(|t| t.id).collect::<Vec<_>>();
                assert_eq!(ids(host), ids(there), "{name}, temperature {temperature}");
                for (host, there) in host.iter().zip(there) {
                    assert!(
                        (host.logprob - there.logprob).abs() < 1e-4,
                        "{name}: {host:?} {there:?}"
                    );
                }
            }
        }
    }
}

/// The engine's log-probabilities against the trainer's of the same tokens, both in bf16.
#[test]
fn bf16_reports_the_trainers_log_probabilities() {
    let Some(device) = gpu() else { return };
    for name in FAMILIES {
        let policy = Policy::load(&fixture(name), device)
            .unwrap()
            .with_compute_type(ComputeType::Bf16);
        let (mut sum, mut count, mut worst) = (0.0, 0usize, 0.0f64);
        for (i, reply) in replies(name, device, ComputeType::Bf16, 1.0).iter().enumerate() {
            let mut text = ids([5, 17, 32, 61, 100][i], i);
            let prompt = text.len();
            text.extend(reply.iter().map(|t| i64::from(t.id)));
            let layout = PackedLayout::single(text.len(), device);
            let rows = no_grad(|| {
                let hidden = policy.forward_hidden(&Tensor::from_slice(&text).to_device(device), &layout);
                policy.logits(&hidden).log_softmax(-1, Kind::Float)
            });
            for (n, token) in reply.iter().enumerate() {
                let row = (prompt + n - 1) as i64;
                let want = rows.double_value(&[row, i64::from(token.id)]);
                let gap = (want - f64::from(token.logprob)).abs();
                sum += gap;
                worst = worst.max(gap);
                count += 1;
            }
        }
        let mean = sum / count as f64;
        println!("{name:20} engine and trainer in bf16: mean difference {mean:.4}, largest {worst:.4}");
        assert!(mean < 0.05, "{name}: {mean}");
    }
}
