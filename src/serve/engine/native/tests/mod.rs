//! The reference for the engine is a loop without a cache: [`Policy`] over the whole text, one token at a
//! time.

mod blocks;
mod engine;
mod families;
mod pages;
mod replay;
mod sampler;
mod scheduler;

use super::{sampler as draw, NativeEngine, NativeEngineConfig};
use crate::{
    base::{
        Engine, EngineError, EngineEvent, FinishReason, GenerateRequest, PolicyVersion, RequestId,
        RoutedExperts, SampledToken, SamplingParams, SessionId,
    },
    model::{
        hf::ModelConfig,
        net::{PackedLayout, Policy},
    },
};
use std::{sync::Arc, time::Duration};
use tch::{no_grad, Device, Kind, Tensor};
use tokio::sync::mpsc::{unbounded_channel, UnboundedReceiver};

const VOCAB: usize = 97;

fn policy(seed: i64) -> Policy {
    // Waiting OpenMP threads spin, and tests run beside each other.
    tch::set_num_threads(1);
    let mut config = ModelConfig::qwen3(VOCAB, 32, 48, 3, 4, 2, 8);
    config.initializer_range = 0.3;
    Policy::random(config, seed, Device::Cpu)
}

fn small() -> NativeEngineConfig {
    NativeEngineConfig {
        max_num_seqs: 8,
        max_num_batched_tokens: 40,
        max_model_len: 256,
        kv_cache_tokens: 2048,
        num_threads: 2,
        version: PolicyVersion(0),
        ..NativeEngineConfig::default()
    }
}

fn prompt(n: usize, seed: u32) -> Vec<u32> {
    (0..n as u32)
        .map(|i| (i * i * 3 + i * 5 + seed * 17) % VOCAB as u32)
        .collect()
}

fn request(id: u64, session: &str, prompt: &[u32], max_new_tokens: u32) -> GenerateRequest {
    GenerateRequest {
        id: RequestId(id),
        session: SessionId::from(session),
        prompt: prompt.into(),
        sampling: SamplingParams {
            seed: id * 7 + 1,
            ..SamplingParams::default()
        },
        stop_token_ids: vec![],
        max_new_tokens,
        routing_from: None,
    }
}

/// What the engine should sample: tokens behind `text` from the `first`-th draw of the request on.
fn naive(
    policy: &Policy,
    text: &[u32],
    params: &SamplingParams,
    first: u64,
    count: usize,
) -> Vec<(u32, f32)> {
    let mut text: Vec<i64> = text.iter().map(|t| i64::from(*t)).collect();
    let mut out = Vec::new();
    for n in 0..count as u64 {
        let rows = logprobs(policy, &text, draw::divisor(params));
        let row = Vec::<f32>::try_from(rows.get(-1)).unwrap();
        let drawn = draw::draw(&row, params, draw::uniform(params.seed, first + n)).unwrap();
        out.push((drawn.id, drawn.logprob));
        text.push(i64::from(drawn.id));
    }
    out
}

/// `[T,V]` log-probabilities as the trainer computes them.
fn logprobs(policy: &Policy, text: &[i64], divisor: f32) -> Tensor {
    no_grad(|| {
        let layout = PackedLayout::single(text.len(), Device::Cpu);
        let hidden = policy.forward_hidden(&Tensor::from_slice(text), &layout);
        let logits = policy.logits(&hidden) / f64::from(divisor);
        logits.log_softmax(-1, Kind::Float)
    })
}

/// How a generation ended, with its tokens.
#[derive(Debug)]
struct Ended {
    tokens: Vec<SampledToken>,
    reason: FinishReason,
    cached_tokens: u32,
    interruptions: u32,
    routing: Option<RoutedExperts>,
}

impl Ended {
    fn ids(&self) -> Vec<u32> {
        self.tokens.iter().map(|t| t.id).collect()
    }
}

struct Client {
    events: UnboundedReceiver<EngineEvent>,
    tokens: Vec<SampledToken>,
}

impl Client {
    fn submit(engine: &NativeEngine, request: GenerateRequest) -> Self {
        let (sender, events) = unbounded_channel();
        engine.submit(request, sender);
        Self {
            events,
            tokens: Vec::new(),
        }
    }

    async fn next(&mut self) -> Option<EngineEvent> {
        tokio::time::timeout(Duration::from_secs(120), self.events.recv())
            .await
            .expect("the engine sent nothing for two minutes")
    }

    /// Until `n` tokens have arrived in all.
    async fn at_least(&mut self, n: usize) {
        while self.tokens.len() < n {
            match self.next().await {
                Some(EngineEvent::Tokens(tokens)) => self.tokens.extend(tokens),
                other => panic!("{other:?} after {} tokens", self.tokens.len()),
            }
        }
    }

    async fn end(mut self) -> Result<Ended, EngineError> {
        loop {
            match self.next().await.expect("the channel closed without an end") {
                EngineEvent::Tokens(tokens) => {
                    assert!(!tokens.is_empty());
                    self.tokens.extend(tokens);
                }
                EngineEvent::Finished {
                    reason,
                    cached_tokens,
                    interruptions,
                    routing,
                } => {
                    assert!(self.events.recv().await.is_none(), "an event after the end");
                    return Ok(Ended {
                        tokens: self.tokens,
                        reason,
                        cached_tokens,
                        interruptions,
                        routing,
                    });
                }
                EngineEvent::Failed(error) => return Err(error),
            }
        }
    }
}

fn engine(policy: &Policy, config: NativeEngineConfig) -> Arc<NativeEngine> {
    NativeEngine::from_policy(config, policy).unwrap()
}

/// Waits until nothing runs; the status is published after a step.
async fn settle(engine: &NativeEngine) {
    for _ in 0..12_000 {
        let status = engine.status();
        if status.running + status.waiting == 0 && status.kv_tokens_active == 0 {
            return;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    panic!(
        "the engine is still busy after two minutes: {:?}",
        engine.status()
    );
}
