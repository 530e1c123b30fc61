//! Head and engine rank as two threads. `tests/cpu/mpi.rs` repeats the main path between processes.

use super::{wire, EngineServer, RemoteConfig, RemoteEngine, RemoteError, ServerEnd};
use crate::base::{
    self, DType, Engine, EngineError, EngineEvent, FinishReason, GenerateRequest, PolicyVersion, RequestId,
    RoutedExperts, SampledToken, SamplingParams, SessionId, WeightError, WeightTarget, WeightTensor,
    WeightUpdate,
};
use crate::comm::{inprocess, Tag};
use bytes::Bytes;
use std::{sync::Arc, thread::JoinHandle, time::Duration};
use tokio::{runtime::Runtime, sync::mpsc::unbounded_channel};

#[path = "double.rs"]
mod double;
use double::Double;

fn config() -> RemoteConfig {
    RemoteConfig {
        hello_timeout: Duration::from_secs(20),
        heartbeat_timeout: Duration::from_secs(20),
        status_interval: Duration::from_millis(5),
        weights_timeout: Duration::from_secs(20),
        bucket_bytes: 1000,
        ..RemoteConfig::default()
    }
}

struct Pair {
    head: Arc<RemoteEngine>,
    double: Arc<Double>,
    server: JoinHandle<Result<ServerEnd, RemoteError>>,
    runtime: Runtime,
}

fn pair() -> Pair {
    let mut world = inprocess::world(2);
    let (engine_rank, head_rank) = (world.remove(1), world.remove(0));
    let runtime = Runtime::new().expect("a runtime");
    let double = Arc::new(Double::default());
    let server = EngineServer::new(engine_rank, 0, double.clone(), runtime.handle().clone(), config())
        .expect("the inbox is free");
    let server = std::thread::spawn(move || server.run());
    let head = RemoteEngine::connect(head_rank, 1, config()).expect("same program");
    Pair {
        head,
        double,
        server,
        runtime,
    }
}

fn request(id: u64, prompt: &[u32], max_new_tokens: u32) -> GenerateRequest {
    GenerateRequest {
        id: RequestId(id),
        session: SessionId::from(format!("session-{id}").as_str()),
        prompt: prompt.into(),
        sampling: SamplingParams {
            temperature: 0.7,
            top_p: 0.95,
            top_k: 20,
            seed: u64::MAX - id,
        },
        stop_token_ids: vec![5, 90],
        max_new_tokens,
        routing_from: Some(9),
    }
}

/// All events of a generation: its tokens, then its end.
fn collect(engine: &dyn Engine, request: GenerateRequest) -> (Vec<SampledToken>, EngineEvent) {
    let (sender, mut events) = unbounded_channel();
    engine.submit(request, sender);
    let mut tokens = Vec::new();
    loop {
        match events.blocking_recv().expect("every generation ends") {
            EngineEvent::Tokens(more) => tokens.extend(more),
            end => return (tokens, end),
        }
    }
}

/// Waits for something that another thread does.
fn until(what: &str, mut is_true: impl FnMut() -> bool) {
    for _ in 0..4000 {
        if is_true() {
            return;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    panic!("{what} did not happen in 20 s");
}

fn update(version: u32) -> WeightUpdate {
    let tensor = |name: &str, shape: Vec<usize>| {
        let elements: usize = shape.iter().product();
        WeightTensor {
            name: name.to_owned(),
            dtype: DType::F32,
            data: (0..elements as u32 * 4)
                .map(|i| (i * 31 + version) as u8)
                .collect::<Vec<u8>>()
                .into(),
            shape,
        }
    };
    // Larger than a bucket, empty, smaller than a bucket, and a whole number of buckets.
    let tensors = vec![
        tensor("embed", vec![33, 17]),
        tensor("empty", vec![0, 4]),
        tensor("norm", vec![5]),
        tensor("head", vec![250]),
    ];
    WeightUpdate::new(PolicyVersion(version), tensors)
}

#[test]
fn a_generation_arrives_as_it_was_sampled() {
    let pair = pair();
    let asked = request(3, &[4, 70], 9);
    let (tokens, end) = collect(&*pair.head, asked.clone());
    assert_eq!(
        tokens.iter().map(|t| t.id).collect::<Vec<_>>(),
        (71..80).collect::<Vec<u32>>()
    );
    assert!(tokens
        .iter()
        .zip(1..)
        .all(|(t, i)| t.logprob.to_bits() == (-0.1 * i as f32).to_bits()));
    let EngineEvent::Finished {
        reason,
        cached_tokens,
        interruptions,
        routing,
    } = end
    else {
        panic!("{end:?}")
    };
    assert_eq!(
        (reason, cached_tokens, interruptions),
        (FinishReason::Length, 7, 1)
    );
    let want = RoutedExperts {
        first: 9,
        width: 2,
        experts: vec![3, 1, 2, 300],
    };
    assert_eq!(routing, Some(want));
    let seen = &pair.double.state.lock().unwrap().requests[0];
    assert_eq!(
        (seen.id, &seen.session, &seen.prompt),
        (asked.id, &asked.session, &asked.prompt)
    );
    assert_eq!(
        (seen.sampling, &seen.stop_token_ids),
        (asked.sampling, &asked.stop_token_ids)
    );
}

#[test]
fn many_generations_at_once_keep_their_tokens_apart() {
    let pair = pair();
    let threads: Vec<_> = (0..24u32)
        .map(|i| {
            let head = pair.head.clone();
            std::thread::spawn(move || collect(&*head, request(u64::from(i), &[i * 1000 + 100], 30)).0)
        })
        .collect();
    for (i, thread) in (0..24u32).zip(threads) {
        let ids: Vec<u32> = thread.join().expect("it ends").iter().map(|t| t.id).collect();
        assert_eq!(ids, (1..=30).map(|k| i * 1000 + 100 + k).collect::<Vec<_>>());
    }
    until("the status counts all tokens", || {
        pair.head.status().generated_tokens == 24 * 30
    });
}

#[test]
fn stops_failures_and_aborts_are_told_apart() {
    let pair = pair();
    let (tokens, end) = collect(&*pair.head, request(1, &[3], 9));
    assert_eq!(tokens.len(), 2);
    assert!(matches!(
        end,
        EngineEvent::Finished {
            reason: FinishReason::Stop,
            ..
        }
    ));
    let (tokens, end) = collect(&*pair.head, request(2, &[0], 9));
    assert_eq!(tokens.len(), 2);
    assert!(matches!(end, EngineEvent::Failed(EngineError::Internal(text)) if text == "a fault"));

    let (sender, mut events) = unbounded_channel();
    pair.head.submit(request(3, &[100], 1_000_000), sender);
    assert!(matches!(events.blocking_recv(), Some(EngineEvent::Tokens(_))));
    pair.head.abort(RequestId(3));
    pair.head.abort(RequestId(4));
    let end = std::iter::from_fn(|| events.blocking_recv()).last();
    assert!(matches!(
        end,
        Some(EngineEvent::Finished {
            reason: FinishReason::Abort,
            ..
        })
    ));
}

#[test]
fn a_closed_receiver_aborts_the_generation_over_there() {
    let pair = pair();
    let (sender, events) = unbounded_channel();
    pair.head.submit(request(8, &[100], 1_000_000), sender);
    drop(events);
    until("the abort", || {
        pair.double.state.lock().unwrap().aborted.contains(&RequestId(8))
    });
}

#[test]
fn submits_count_before_the_status_knows_them() {
    let pair = pair();
    let receivers: Vec<_> = (0..5)
        .map(|i| {
            let (sender, events) = unbounded_channel();
            pair.head.submit(request(i, &[100], 1_000_000), sender);
            let status = pair.head.status();
            assert!(
                u64::from(status.running + status.waiting) > i,
                "{status:?} after {} submits",
                i + 1
            );
            events
        })
        .collect();
    until("the status is complete", || {
        let status = pair.head.status();
        (status.running, status.waiting) == (5, 0)
    });
    drop(receivers);
}

#[test]
fn the_resident_prefix_follows_the_cache() {
    let pair = pair();
    let session = request(1, &[], 1).session;
    collect(&*pair.head, request(1, &[50, 60, 70], 2));
    let history = [50, 60, 70, 71, 72, 1, 2];
    assert_eq!(pair.head.resident_prefix(&session, &history), 5);
    assert_eq!(pair.head.resident_prefix(&session, &[50, 61, 70]), 1);
    // The engine evicts a part of it.
    pair.double
        .state
        .lock()
        .unwrap()
        .cache
        .insert(session.clone(), vec![50, 60]);
    until("the report", || {
        pair.head.resident_prefix(&session, &history) == 2
    });
    pair.head.end_session(&session);
    assert_eq!(pair.head.resident_prefix(&session, &history), 0);
    until("the end", || {
        pair.double.state.lock().unwrap().ended == [session.clone()]
    });
}

#[test]
fn weights_arrive_whole_and_with_their_version() {
    let pair = pair();
    for version in [1, 2] {
        let sent = Arc::new(update(version));
        let ack = pair
            .runtime
            .block_on(pair.head.update_weights(sent.clone()))
            .expect("taken");
        assert_eq!((ack.version, ack.checksum), (sent.version, sent.checksum));
        let seen = pair.double.state.lock().unwrap().update.clone().expect("there");
        for (seen, sent) in seen.tensors.iter().zip(&sent.tensors) {
            assert_eq!(
                (&seen.name, &seen.shape, &seen.data),
                (&sent.name, &sent.shape, &sent.data)
            );
        }
        assert_eq!(pair.head.status().version, PolicyVersion(version));
        let (tokens, _) = collect(&*pair.head, request(u64::from(version), &[100], 1));
        assert_eq!(tokens[0].version, PolicyVersion(version));
    }
}

#[test]
fn a_refused_update_leaves_the_replica_usable() {
    let pair = pair();
    let mut wrong = update(1);
    wrong.checksum ^= 1;
    let error = pair
        .runtime
        .block_on(pair.head.update_weights(Arc::new(wrong)))
        .expect_err("refused");
    assert!(matches!(error, WeightError::Checksum { .. }));
    let refusal = WeightError::Tensor {
        name: "norm".to_owned(),
        problem: "unknown".to_owned(),
    };
    pair.double.state.lock().unwrap().refusal = Some(refusal);
    let error = pair
        .runtime
        .block_on(pair.head.update_weights(Arc::new(update(1))))
        .expect_err("refused");
    assert_eq!(error.to_string(), "tensor `norm`: unknown");
    pair.runtime
        .block_on(pair.head.update_weights(Arc::new(update(1))))
        .expect("taken");
}

#[test]
fn an_update_without_tensors_is_answered() {
    let pair = pair();
    let empty = Arc::new(WeightUpdate::new(PolicyVersion(4), Vec::new()));
    let ack = pair
        .runtime
        .block_on(pair.head.update_weights(empty))
        .expect("taken");
    assert_eq!(ack.version, PolicyVersion(4));
}

#[test]
fn stopping_ends_the_server_and_all_requests() {
    let pair = pair();
    let (sender, mut events) = unbounded_channel();
    pair.head.submit(request(1, &[100], 1_000_000), sender);
    pair.head.stop();
    let end = std::iter::from_fn(|| events.blocking_recv()).last();
    assert!(matches!(
        end,
        Some(EngineEvent::Failed(EngineError::ReplicaLost(_)))
    ));
    assert_eq!(
        pair.server.join().expect("no panic").expect("stopped"),
        ServerEnd::Stopped
    );
    assert!(pair.double.state.lock().unwrap().aborted.contains(&RequestId(1)));
    let (_, end) = collect(&*pair.head, request(2, &[100], 3));
    assert!(matches!(end, EngineEvent::Failed(EngineError::ReplicaLost(_))));
}

/// A rank that answers the handshake and then hangs.
#[test]
fn a_silent_replica_is_lost_with_all_it_had() {
    let world = inprocess::world(2);
    let config = RemoteConfig {
        heartbeat_timeout: Duration::from_millis(300),
        ..config()
    };
    let hello = wire::Reply::Hello(wire::Hello {
        protocol: wire::PROTOCOL,
        program: config.program.clone(),
    });
    let hello = wire::encode(&hello, &[]).expect("a message");
    world[1].send(0, Tag::ENGINE_REPLY, hello).expect("sent");
    let head = RemoteEngine::connect(world[0].clone(), 1, config).expect("it said hello");
    let (_, end) = collect(&*head, request(1, &[1], 1));
    let EngineEvent::Failed(EngineError::ReplicaLost(why)) = end else {
        panic!("{end:?}")
    };
    assert!(why.contains("rank 1 has been silent"), "{why}");
    let runtime = Runtime::new().expect("a runtime");
    let error = runtime
        .block_on(head.update_weights(Arc::new(update(1))))
        .expect_err("lost");
    assert!(matches!(error, WeightError::ReplicaLost(_)));
}

#[test]
fn a_lost_head_ends_the_server() {
    let world = inprocess::world(2);
    let runtime = Runtime::new().expect("a runtime");
    let config = RemoteConfig {
        heartbeat_timeout: Duration::from_millis(200),
        ..config()
    };
    let hello = wire::Request::Hello(wire::Hello {
        protocol: wire::PROTOCOL,
        program: config.program.clone(),
    });
    let hello = wire::encode(&hello, &[]).expect("a message");
    world[0].send(1, Tag::ENGINE_REQUEST, hello).expect("sent");
    let engine = Arc::new(Double::default());
    let server =
        EngineServer::new(world[1].clone(), 0, engine, runtime.handle().clone(), config).expect("free");
    assert!(matches!(server.run(), Err(RemoteError::Silent { peer: 0, .. })));
}

#[test]
fn another_version_is_refused_on_both_sides() {
    let world = inprocess::world(2);
    let runtime = Runtime::new().expect("a runtime");
    let other = RemoteConfig {
        program: "legorl 9.9.9".to_owned(),
        ..config()
    };
    let engine = Arc::new(Double::default());
    let server =
        EngineServer::new(world[1].clone(), 0, engine, runtime.handle().clone(), other).expect("free");
    let server = std::thread::spawn(move || server.run());
    let Err(error) = RemoteEngine::connect(world[0].clone(), 1, config()) else {
        panic!("it is refused")
    };
    let text = error.to_string();
    assert!(
        text.contains("rank 1 runs `legorl 9.9.9, engine protocol 2`"),
        "{text}"
    );
    assert!(matches!(
        server.join().expect("no panic"),
        Err(RemoteError::Version { peer: 0, .. })
    ));
}

#[test]
fn a_rank_that_never_speaks_is_named() {
    let world = inprocess::world(3);
    let config = RemoteConfig {
        hello_timeout: Duration::from_millis(50),
        ..config()
    };
    let Err(error) = RemoteEngine::connect(world[0].clone(), 2, config) else {
        panic!("nobody is there")
    };
    assert!(matches!(error, RemoteError::NoHello { peer: 2, .. }));
}

#[test]
fn unreadable_messages_lose_the_replica_and_panic_nowhere() {
    let world = inprocess::world(2);
    let hello = wire::Reply::Hello(wire::Hello {
        protocol: wire::PROTOCOL,
        program: config().program,
    });
    let hello = wire::encode(&hello, &[]).expect("a message");
    world[1].send(0, Tag::ENGINE_REPLY, hello).expect("sent");
    let head = RemoteEngine::connect(world[0].clone(), 1, config()).expect("it said hello");
    world[1]
        .send(0, Tag::ENGINE_REPLY, Bytes::from_static(b"\xff\xff\xff\x7fjunk"))
        .expect("sent");
    until("the loss", || head.lost().is_some());
    assert!(head.lost().is_some_and(|why| why.contains("cannot be read")));
}
