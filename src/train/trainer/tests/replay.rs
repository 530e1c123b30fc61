//! Routing replay (R3) over the whole path: agents' requests over HTTP, proxy, native engine, trajectory, shard,
//! trainer.
//!
//! A witness between proxy and engine notes what the engine reports. What the trainer replays is compared
//! with its notes position by position, found by the tokens that lead there and not by any bookkeeping of ours.
//! The control gives the engine routers that are rounded to bf16, so that experts flip where two are nearly
//! equal, and compares log-probabilities with replay, without, and with rows that are shifted by one token.

use super::super::{
    replay,
    samples::{Sample, Samples},
};
use super::*;
use crate::{
    base::{
        DType, Engine, EngineEvent, EngineStatus, GenerateRequest, PolicyVersion, ReplicaId, RequestId,
        RoutedExperts, RoutingRun, RoutingShape, RoutingStore, SamplingParams, SequenceRouting,
        SessionEndpoint, SessionHost, SessionId, SessionLimits, SessionSpec, TrialEnd, TrialPlan,
        TrialPlanStep, TrialSink, WeightAck, WeightError, WeightTarget, WeightTensor, WeightUpdate,
    },
    model::{
        net::PackedLayout,
        tokenizer::{testing, Tokenizer},
    },
    serve::{
        engine::native::{NativeEngine, NativeEngineConfig},
        proxy::{
            router::{Router, RouterConfig},
            routing::RoutingCapture,
            Proxy, ProxyConfig,
        },
    },
    train::{
        buffer::{Buffer, BufferConfig},
        trainer::Trainer,
    },
};
use serde_json::{json, Value};
use std::{
    collections::HashMap,
    path::PathBuf,
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};
use tokio::sync::mpsc::{unbounded_channel, UnboundedSender};

const SHAPE: RoutingShape = RoutingShape {
    num_experts: 16,
    layers: 4,
    top_k: 2,
};

/// A mixture whose experts carry much of the residual stream.
fn mixture(vocab_size: usize) -> Policy {
    tch::set_num_threads(1);
    let config = json!({"model_type": "qwen3_moe", "vocab_size": vocab_size, "hidden_size": 32,
        "num_hidden_layers": SHAPE.layers, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "intermediate_size": 48, "moe_intermediate_size": 24, "num_experts": SHAPE.num_experts,
        "num_experts_per_tok": SHAPE.top_k, "norm_topk_prob": true, "initializer_range": 0.2});
    let Value::Object(map) = config else {
        unreachable!()
    };
    let config = ModelConfig::from_value(map, std::path::Path::new("config.json")).unwrap();
    let policy = Policy::random(config, 3, Device::Cpu);
    no_grad(|| {
        for (name, mut t) in policy.parameters() {
            if name.ends_with("experts.down_proj") {
                let _ = t.g_mul_scalar_(3.0);
            }
        }
    });
    policy
}

/// The weights with every router rounded to bf16.
fn with_rounded_routers(policy: &Policy) -> Vec<WeightTensor> {
    let round = |t: WeightTensor| {
        if !t.name.ends_with("mlp.gate.weight") {
            return t;
        }
        let floats = t.data.chunks_exact(4);
        let floats = floats.map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]));
        let data: Vec<u8> = floats
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

/// Experts by the tokens that lead to them, the last of which they computed.
type Notes = HashMap<Vec<u32>, Vec<u16>>;

/// Stands between proxy and engine.
struct Witness {
    engine: Arc<NativeEngine>,
    notes: Arc<Mutex<Notes>>,
}

impl Engine for Witness {
    fn submit(&self, request: GenerateRequest, events: UnboundedSender<EngineEvent>) {
        let (sender, mut receiver) = unbounded_channel();
        let (notes, mut text) = (self.notes.clone(), request.prompt.to_vec());
        self.engine.submit(request, sender);
        tokio::spawn(async move {
            loop {
                let event = tokio::select! {
                    event = receiver.recv() => event,
                    () = events.closed() => None,
                };
                let Some(event) = event else { return };
                match &event {
                    EngineEvent::Tokens(tokens) => text.extend(tokens.iter().map(|t| t.id)),
                    EngineEvent::Finished {
                        routing: Some(routing),
                        ..
                    } => note(&mut notes.lock().unwrap(), &text, routing),
                    _ => {}
                }
                if events.send(event).is_err() {
                    return;
                }
            }
        });
    }

    fn abort(&self, id: RequestId) {
        self.engine.abort(id);
    }

    fn status(&self) -> EngineStatus {
        self.engine.status()
    }

    fn resident_prefix(&self, session: &SessionId, prompt: &[u32]) -> usize {
        self.engine.resident_prefix(session, prompt)
    }

    fn end_session(&self, session: &SessionId) {
        self.engine.end_session(session);
    }
}

#[async_trait::async_trait]
impl WeightTarget for Witness {
    async fn update_weights(&self, update: Arc<WeightUpdate>) -> Result<WeightAck, WeightError> {
        self.engine.update_weights(update).await
    }
}

fn note(notes: &mut Notes, text: &[u32], routing: &RoutedExperts) {
    for (n, row) in routing.experts.chunks(routing.width as usize).enumerate() {
        let end = routing.first as usize + n + 1;
        // The experts that computed a token first are the ones that count.
        notes.entry(text[..end].to_vec()).or_insert_with(|| row.to_vec());
    }
}

struct Setup {
    proxy: Arc<Proxy>,
    engine: Arc<NativeEngine>,
    notes: Arc<Mutex<Notes>>,
    policy: Policy,
    buffer: Arc<Buffer>,
    runtime: tokio::runtime::Runtime,
    rows_dir: PathBuf,
    opened: std::cell::Cell<u32>,
    _dir: tempfile::TempDir,
}

impl Setup {
    /// `trials` make a batch of groups of one.
    fn new(trials: u32, rounded: bool) -> Self {
        let dir = tempfile::tempdir().unwrap();
        testing::write_folder(dir.path());
        let policy = mixture(Tokenizer::from_dir(dir.path()).unwrap().vocab_size());
        let config = NativeEngineConfig {
            max_num_seqs: 8,
            max_num_batched_tokens: 64,
            max_model_len: 2048,
            kv_cache_tokens: 16_384,
            num_threads: 2,
            version: PolicyVersion(0),
            device: crate::model::net::Device::Cpu,
            compute: crate::model::net::ComputeType::F32,
        };
        let weights = if rounded {
            with_rounded_routers(&policy)
        } else {
            policy.export()
        };
        let engine = NativeEngine::from_weights(config, policy.config.clone(), &weights).unwrap();
        let notes = Arc::new(Mutex::new(Notes::new()));
        let router = Arc::new(Router::new(RouterConfig::default()));
        let witness = Witness {
            engine: engine.clone(),
            notes: notes.clone(),
        };
        router.join(ReplicaId(0), Arc::new(witness));
        let rows_dir = dir.path().join("routing");
        let mut config = ProxyConfig::new(dir.path().join("p.sock"), "policy".into(), dir.path().to_owned());
        config.tcp = Some(([127, 0, 0, 1], 0).into());
        config.routing = Some(RoutingCapture {
            dir: rows_dir.clone(),
            shape: SHAPE,
        });
        let buffer = BufferConfig {
            dir: dir.path().join("buffer"),
            n_resp: 1,
            train_bsz: trials,
            staleness: 4.0,
            total_steps: 1,
            n_rows: trials,
            seed: 1,
            max_attempts: 1,
            roll_bytes: 1 << 20,
        };
        Self {
            proxy: Proxy::start(config, router).unwrap(),
            engine,
            notes,
            policy,
            buffer: Buffer::open(buffer, None).unwrap(),
            runtime: tokio::runtime::Runtime::new().unwrap(),
            rows_dir,
            opened: std::cell::Cell::new(0),
            _dir: dir,
        }
    }

    fn open(&self, max_tokens_per_turn: u32) -> SessionEndpoint {
        let number = self.opened.replace(self.opened.get() + 1);
        let spec = SessionSpec {
            key: TrialKey {
                purpose: Purpose::Train,
                group: GroupId(number.into()),
                sample: 0,
            },
            attempt: 0,
            name: format!("task__{number}"),
            sampling: SamplingParams {
                seed: 100 + u64::from(number),
                ..SamplingParams::default()
            },
            limits: SessionLimits {
                max_turns: 20,
                max_total_tokens: 2000,
                max_tokens_per_turn,
                max_consecutive_no_tool: 0,
                deadline: Instant::now() + Duration::from_secs(600),
            },
        };
        self.proxy.open(spec).unwrap()
    }

    /// A turn; the reply as the message that an agent repeats.
    fn chat(&self, session: &SessionEndpoint, messages: &[Value], stop: &[&str]) -> Value {
        let url = format!(
            "http://{}{}/v1/chat/completions",
            self.proxy.tcp().unwrap(),
            session.path
        );
        let body = json!({"model": "policy", "messages": messages, "stop": stop}).to_string();
        let mut response = ureq::post(url)
            .header("content-type", "application/json")
            .send(body.as_bytes())
            .unwrap();
        let reply: Value = serde_json::from_str(&response.body_mut().read_to_string().unwrap()).unwrap();
        reply["choices"][0]["message"].clone()
    }

    /// Ends a session and stores its trial.
    fn store(&self, session: &SessionEndpoint) {
        let captured = self.runtime.block_on(self.proxy.close(&session.session)).unwrap();
        assert!(captured.engine_failure.is_none(), "{:?}", captured.engine_failure);
        let TrialPlanStep::Run(assignment) = self.buffer.next() else {
            panic!("the buffer hands out a trial");
        };
        let mut trial = trajectory(assignment.key.group.0, 0, 0.0, captured.sequences);
        trial.outcome.reward = (assignment.key.group.0 % 2) as f64;
        self.buffer.submit(TrialEnd::Finished(trial)).unwrap();
    }

    fn batch(&self) -> TrainBatch {
        let batch = self
            .buffer
            .next_batch(1, Instant::now() + Duration::from_secs(20));
        batch.unwrap()
    }

    fn row_files(&self) -> Vec<u64> {
        let entries = std::fs::read_dir(&self.rows_dir).unwrap();
        entries.map(|e| e.unwrap().metadata().unwrap().len()).collect()
    }
}

fn user(text: &str) -> Value {
    json!({"role": "user", "content": text})
}

fn with_replay(replay: Option<RoutingShape>) -> TrainerConfig {
    TrainerConfig {
        replay,
        max_token_len_per_gpu: 600,
        lr: LrSchedule::constant(0.0),
        ..config()
    }
}

/// What the engine reported for every token of a text but the last.
fn noted(notes: &Notes, ids: &[u32]) -> Vec<i16> {
    let rows = (1..ids.len()).flat_map(|end| &notes[&ids[..end]]);
    rows.map(|e| *e as i16).collect()
}

#[test]
fn the_experts_of_the_engine_reach_the_trainer_position_by_position() {
    let s = Setup::new(4, false);

    // A growing conversation, whose earlier turns come from the engine's cache, and a branch of it that
    // rewrites its second question.
    let first = s.open(40);
    let mut messages = vec![user("hello world")];
    for question in ["more", "and more", "once more"] {
        let reply = s.chat(&first, &messages, &[]);
        messages.extend([reply, user(question)]);
    }
    let mut rewritten = messages[..2].to_vec();
    rewritten.push(user("something else"));
    s.chat(&first, &rewritten, &[]);
    let bytes: u64 = s.row_files().iter().sum();
    assert!(bytes > 100 * u64::from(SHAPE.width()), "{bytes} bytes of rows");
    s.store(&first);
    assert_eq!(s.row_files().len(), 0, "the shard has them");

    // A reply that a stop text cuts off leaves its rows to the next turn.
    let second = s.open(60);
    let mut messages = vec![user("hello")];
    let letters = ["a", "e", "i", "o", "t", "n", "s", "r", " "];
    let reply = s.chat(&second, &messages, &letters);
    assert_eq!(s.row_files().len(), 0, "it was cut off");
    messages.extend([reply, user("go on")]);
    s.chat(&second, &messages, &[]);
    s.store(&second);

    // Two branches of one turn at once.
    let third = s.open(50);
    let mut messages = vec![user("hello")];
    messages.push(s.chat(&third, &messages, &[]));
    std::thread::scope(|scope| {
        for question in ["more", "less"] {
            let url = format!("http://{}{}", s.proxy.tcp().unwrap(), third.path);
            let messages = [&messages[..], &[user(question)]].concat();
            scope.spawn(move || {
                let body = json!({"model": "policy", "messages": messages}).to_string();
                let sent = ureq::post(format!("{url}/v1/chat/completions")).send(body.as_bytes());
                assert_eq!(sent.unwrap().status(), 200);
            });
        }
    });
    s.store(&third);

    // New weights in the middle of a reply.
    let fourth = s.open(1200);
    let url = format!(
        "http://{}{}/v1/chat/completions",
        s.proxy.tcp().unwrap(),
        fourth.path
    );
    let body = json!({"model": "policy", "messages": [user("hello")]}).to_string();
    let before = s.engine.status().generated_tokens;
    let asking = std::thread::spawn(move || ureq::post(url).send(body.as_bytes()).unwrap().status());
    let begin = Instant::now();
    while s.engine.status().generated_tokens < before + 3 {
        assert!(begin.elapsed() < Duration::from_secs(60) && !asking.is_finished());
        std::thread::yield_now();
    }
    let wild = mixture(s.policy.config.vocab_size);
    no_grad(|| {
        for (name, mut t) in wild.parameters() {
            if name.ends_with("mlp.gate.weight") {
                let _ = t.g_mul_scalar_(-1.0);
            }
        }
    });
    let update = WeightUpdate::new(PolicyVersion(1), wild.export());
    s.runtime
        .block_on(s.engine.update_weights(Arc::new(update)))
        .unwrap();
    assert_eq!(asking.join().unwrap(), 200);
    s.store(&fourth);

    let batch = s.batch();
    let notes = s.notes.lock().unwrap();
    let sequences: Vec<&TokenSequence> = batch
        .groups
        .iter()
        .flat_map(|g| g.trajectories.iter().flat_map(|t| &t.sequences))
        .collect();
    assert_eq!(sequences.len(), 2 + 1 + 2 + 1);
    let mut versions: Vec<u32> = sequences.iter().flat_map(|s| s.versions.clone()).collect();
    versions.sort_unstable();
    versions.dedup();
    assert_eq!(versions, [0, 1], "one reply was interrupted");

    // In the shard, position by position.
    let width = SHAPE.width() as usize;
    for sequence in &sequences {
        let tokens = sequence.len();
        let rows = sequence.routing.as_ref().unwrap().dense(tokens).unwrap();
        assert_eq!(rows[..(tokens - 1) * width], noted(&notes, &sequence.token_ids));
        assert_eq!(rows[(tokens - 1) * width..], vec![-1; width]);
    }

    // In the network's packed row.
    let samples = Samples::prepare(&batch, &with_replay(Some(SHAPE)), s.policy.config.vocab_size).unwrap();
    let all: Vec<usize> = (0..samples.sequences.len()).collect();
    assert_eq!(replay::coverage(&samples).0, replay::coverage(&samples).1);
    let row_tokens: usize = samples.sequences.iter().map(|s| s.ids.len()).sum();
    let experts = replay::experts(&samples, &all, row_tokens as i64, Device::Cpu).unwrap();
    let lengths: Vec<usize> = samples.sequences.iter().map(|s| s.ids.len()).collect();
    let ids: Vec<i64> = samples.sequences.iter().flat_map(|s| s.ids.clone()).collect();
    let layout = PackedLayout::new(&lengths, Device::Cpu).with_replay(experts);
    layout.start_recording();
    let _ = no_grad(|| s.policy.forward_hidden(&Tensor::from_slice(&ids), &layout));
    let used: Vec<Vec<Vec<i64>>> = layout
        .recorded()
        .iter()
        .map(|layer| Vec::<Vec<i64>>::try_from(&layer.experts).unwrap())
        .collect();
    let mut place = 0;
    for sequence in &sequences {
        let want = noted(&notes, &sequence.token_ids);
        for (t, row) in want.chunks(width).enumerate() {
            let got = used
                .iter()
                .flat_map(|layer| layer[place + t].iter().map(|e| *e as i16));
            assert_eq!(got.collect::<Vec<_>>(), row, "token {t}");
        }
        place += sequence.len();
    }

    // Tokens of version 0 and their prefixes: log-probabilities are the engine's.
    let mut trainer = Trainer::new(with_replay(Some(SHAPE)), s.policy, None).unwrap();
    let mut samples = samples;
    trainer.recompute_logprobs(&mut samples).unwrap();
    let gap = |s: &Sample| {
        let pairs = s
            .rollout_logprobs
            .iter()
            .zip(s.training_logprobs.as_ref().unwrap());
        let own = pairs.zip(&s.versions).filter(|(_, version)| **version == 0);
        own.map(|((a, b), _)| (a - b).abs()).fold(0.0, f64::max)
    };
    let largest = samples.sequences.iter().map(gap).fold(0.0, f64::max);
    println!("engine and trainer differ by {largest:.1e} in log-probability at most");
    // The weights are ten times those of a new network, and so is what f32 rounds.
    assert!(largest < 2e-5, "{largest}");

    let metrics = trainer.step(&batch).unwrap();
    assert_eq!(metrics.get("training/r3_coverage"), Some(1.0));
    assert_eq!(metrics.get("training/r3_free_tokens"), Some(0.0));
}

/// The rows of a sequence, each given to the next token.
fn shifted(sequence: &TokenSequence) -> SequenceRouting {
    let routing = sequence.routing.as_ref().unwrap();
    let mut bytes = Vec::new();
    routing.copy_to(&mut bytes).unwrap();
    let store: Arc<dyn RoutingStore> = Arc::new(bytes);
    SequenceRouting {
        shape: routing.shape,
        runs: vec![RoutingRun {
            first: 1,
            tokens: routing.recorded() as u32,
            store,
            at: 0,
        }],
    }
}

#[test]
fn replay_over_the_whole_path_restores_the_correlation_that_routing_noise_costs() {
    const TRIALS: u32 = 24;
    let s = Setup::new(TRIALS, true);
    for i in 0..TRIALS {
        let session = s.open(80);
        let mut messages = vec![user(&format!("hello {i}"))];
        for question in ["more", "again"] {
            let reply = s.chat(&session, &messages, &[]);
            messages.extend([reply, user(question)]);
        }
        s.chat(&session, &messages, &[]);
        s.store(&session);
    }
    let batch = s.batch();
    let mut late = batch.clone();
    for sequence in late
        .groups
        .iter_mut()
        .flat_map(|g| g.trajectories.iter_mut().flat_map(|t| &mut t.sequences))
    {
        sequence.routing = Some(shifted(sequence));
    }
    let correlation = |batch: &TrainBatch, replay| {
        let copy = Policy::random(s.policy.config.clone(), 0, Device::Cpu);
        copy.copy_from(&s.policy.export()).unwrap();
        let mut trainer = Trainer::new(with_replay(replay), copy, None).unwrap();
        let metrics = trainer.step(batch).unwrap();
        let r = metrics.get("training/rollout_actor_probs_pearson_corr").unwrap();
        (r, metrics)
    };
    let ((on, metrics), (off, without)) = (correlation(&batch, Some(SHAPE)), correlation(&batch, None));
    let (moved, _) = correlation(&late, Some(SHAPE));
    let tokens = metrics.get("training/rollout_actor_probs_tokens").unwrap();
    println!("{tokens} tokens: on {on:.5}, off {off:.5}, shifted {moved:.4}");
    assert_eq!(metrics.get("training/r3_coverage"), Some(1.0));
    assert_eq!(without.get("training/r3_coverage"), None);
    assert!(on >= 0.999, "on {on}");
    assert!(on - off >= 0.002, "on {on}, off {off}");
    assert!(moved <= 0.9, "shifted {moved}");
}

#[test]
fn rows_of_another_model_are_refused_and_missing_rows_are_counted() {
    let rng = ChaCha8Rng::seed_from_u64(5);
    let batch = |routing: Option<SequenceRouting>| {
        let mut s = sequence(&mut rng.clone());
        s.routing = routing;
        let trial = trajectory(0, 0, 1.0, vec![s]);
        TrainBatch {
            step: 1,
            groups: vec![TrainGroup {
                id: GroupId(0),
                start_version: PolicyVersion(0),
                trajectories: vec![trial],
                dropped: vec![],
            }],
        }
    };
    let tokens = sequence(&mut rng.clone()).len();
    let rows = |shape: RoutingShape, count: usize| {
        let store: Arc<dyn RoutingStore> = Arc::new(vec![1u8; count * shape.row_bytes()]);
        Some(SequenceRouting {
            shape,
            runs: vec![RoutingRun {
                first: 0,
                tokens: count as u32,
                store,
                at: 0,
            }],
        })
    };
    let mut trainer = Trainer::new(with_replay(Some(SHAPE)), mixture(VOCAB), None).unwrap();
    let other = RoutingShape { layers: 3, ..SHAPE };
    let error = trainer.step(&batch(rows(other, 1))).unwrap_err().to_string();
    assert!(error.contains("2 of 16 experts in 3 sparse layers"), "{error}");
    let metrics = trainer.step(&batch(rows(SHAPE, 2))).unwrap();
    assert_eq!(
        metrics.get("training/r3_coverage"),
        Some(2.0 / (tokens as f64 - 1.0))
    );
    assert_eq!(metrics.get("training/r3_free_tokens"), Some(tokens as f64 - 3.0));
}
