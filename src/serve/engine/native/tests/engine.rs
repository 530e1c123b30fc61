//! The whole engine against the loop without a cache.

use super::*;
use crate::base::{WeightError, WeightTarget, WeightUpdate};

/// Parameters of every kind.
fn sampling_kinds() -> Vec<SamplingParams> {
    let base = SamplingParams::default();
    let with = |temperature, top_p, top_k, seed| SamplingParams {
        temperature,
        top_p,
        top_k,
        seed,
    };
    vec![
        base,
        with(0.0, 1.0, 0, 3),
        with(0.7, 1.0, 0, 4),
        with(1.0, 0.8, 0, 5),
        with(1.3, 1.0, 7, 6),
        with(0.9, 0.9, 20, u64::MAX),
    ]
}

async fn mixed_batch_equals_naive(config: NativeEngineConfig) {
    batch_equals_naive(&policy(1), config, 1e-5).await;
}

/// `limit` bounds the difference of log-probabilities.
pub(super) async fn batch_equals_naive(policy: &Policy, config: NativeEngineConfig, limit: f32) {
    let engine = engine(policy, config);
    let lengths = [1usize, 15, 16, 17, 90, 120, 33, 64, 2, 48, 100, 5];
    let kinds = sampling_kinds();
    let requests: Vec<GenerateRequest> = lengths
        .iter()
        .enumerate()
        .map(|(i, n)| GenerateRequest {
            sampling: kinds[i % kinds.len()],
            ..request(i as u64, &format!("s{i}"), &prompt(*n, i as u32), 20 + i as u32)
        })
        .collect();
    let clients: Vec<Client> = requests
        .iter()
        .map(|r| Client::submit(&engine, r.clone()))
        .collect();
    let mut largest = 0.0f32;
    for (client, r) in clients.into_iter().zip(&requests) {
        let ended = client.end().await.unwrap();
        assert_eq!((ended.reason, ended.interruptions), (FinishReason::Length, 0));
        let want = naive(policy, &r.prompt, &r.sampling, 0, r.max_new_tokens as usize);
        assert_eq!(
            ended.ids(),
            want.iter().map(|w| w.0).collect::<Vec<_>>(),
            "request {}",
            r.id
        );
        for (got, (_, logprob)) in ended.tokens.iter().zip(want) {
            largest = largest.max((got.logprob - logprob).abs());
        }
    }
    println!("log-probabilities differ by {largest:.1e}");
    assert!(largest < limit, "{largest}");
    settle(&engine).await;
}

#[tokio::test]
async fn tokens_are_those_of_the_loop_without_a_cache() {
    mixed_batch_equals_naive(small()).await;
}

#[tokio::test]
async fn tokens_do_not_depend_on_threads_or_chunks() {
    let one_thread = NativeEngineConfig {
        num_threads: 1,
        max_num_batched_tokens: 1000,
        ..small()
    };
    mixed_batch_equals_naive(one_thread).await;
}

#[tokio::test]
async fn a_cache_that_is_too_small_for_the_batch_changes_nothing() {
    let tight = NativeEngineConfig {
        kv_cache_tokens: 256,
        ..small()
    };
    mixed_batch_equals_naive(tight).await;
}

#[tokio::test]
async fn logprobs_are_those_of_a_full_recompute() {
    let policy = policy(2);
    let engine = engine(&policy, small());
    let (mut engine_side, mut trainer_side) = (Vec::new(), Vec::new());
    for i in 0..6 {
        let mut r = request(i, "s", &prompt(30 + i as usize * 9, i as u32), 60);
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
        for (n, token) in ended.tokens.iter().enumerate() {
            engine_side.push(f64::from(token.logprob));
            trainer_side.push(f64::from(rows[r.prompt.len() + n - 1][token.id as usize]));
        }
    }
    let largest = engine_side
        .iter()
        .zip(&trainer_side)
        .map(|(a, b)| (a - b).abs())
        .fold(0.0, f64::max);
    assert!(largest < 1e-5, "{largest}");
    let probabilities = |side: &[f64]| side.iter().map(|l| l.exp()).collect::<Vec<_>>();
    let (engine_side, trainer_side) = (probabilities(&engine_side), probabilities(&trainer_side));
    assert!(pearson(&engine_side, &trainer_side) > 0.9999);
    // The control: shifted by one token, the two do not belong together.
    assert!(pearson(&engine_side[1..], &trainer_side[..trainer_side.len() - 1]) < 0.9);
}

pub(super) fn pearson(a: &[f64], b: &[f64]) -> f64 {
    let mean = |x: &[f64]| x.iter().sum::<f64>() / x.len() as f64;
    let (ma, mb) = (mean(a), mean(b));
    let sum = |f: &dyn Fn(f64, f64) -> f64| a.iter().zip(b).map(|(x, y)| f(x - ma, y - mb)).sum::<f64>();
    sum(&|x, y| x * y) / (sum(&|x, _| x * x) * sum(&|_, y| y * y)).sqrt()
}

#[tokio::test]
async fn the_next_turn_of_a_session_computes_only_what_is_new() {
    let policy = policy(3);
    let engine = engine(&policy, small());
    let first = request(1, "s", &prompt(50, 1), 30);
    let ended = Client::submit(&engine, first.clone()).end().await.unwrap();
    assert_eq!(ended.cached_tokens, 0);
    let mut text = first.prompt.to_vec();
    text.extend(ended.ids());
    // 79 of the 80 tokens were computed: the last one was sampled and never fed back.
    assert_eq!(engine.resident_prefix(&first.session, &text), 64);
    text.extend(prompt(20, 9));
    let before = engine.status().prefill_tokens;
    let second = request(2, "s", &text, 25);
    let ended = Client::submit(&engine, second.clone()).end().await.unwrap();
    assert_eq!(ended.cached_tokens, 64);
    assert_eq!(engine.status().prefill_tokens - before, 100 - 64);
    let want = naive(&policy, &text, &second.sampling, 0, 25);
    assert_eq!(ended.ids(), want.iter().map(|w| w.0).collect::<Vec<_>>());

    // A branch that leaves in the middle reuses what it shares.
    let branch = [&text[..40], &prompt(30, 4)].concat();
    let ended = Client::submit(&engine, request(3, "s", &branch, 5))
        .end()
        .await
        .unwrap();
    assert_eq!(ended.cached_tokens, 32);
    // The same prompt again: all of it is there, and its last token is computed for the logits.
    let third = request(4, "s", &branch[..64], 5);
    let ended = Client::submit(&engine, third.clone()).end().await.unwrap();
    assert_eq!(ended.cached_tokens, 48);
    let want = naive(&policy, &third.prompt, &third.sampling, 0, 5);
    assert_eq!(ended.ids(), want.iter().map(|w| w.0).collect::<Vec<_>>());
}

#[tokio::test]
async fn a_group_computes_its_common_prompt_once() {
    let policy = policy(4);
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
    // 96 tokens are whole pages before the last token; seven sequences take them from the first.
    assert_eq!(cached, 7 * 96);
    assert_eq!(engine.status().prefill_tokens, 100 + 7 * 4);
}

#[tokio::test]
async fn new_weights_interrupt_and_the_generation_goes_on_with_its_tokens() {
    let (old, new) = (policy(5), policy(6));
    let engine = engine(
        &old,
        NativeEngineConfig {
            max_model_len: 8192,
            kv_cache_tokens: 8192,
            ..small()
        },
    );
    let r = request(1, "s", &prompt(40, 3), 8000);
    let mut client = Client::submit(&engine, r.clone());
    client.at_least(5).await;
    let update = Arc::new(WeightUpdate::new(PolicyVersion(7), new.export()));
    let ack = engine.update_weights(update.clone()).await.unwrap();
    assert_eq!((ack.version, ack.checksum), (PolicyVersion(7), update.checksum));
    assert_eq!(engine.status().version, PolicyVersion(7));
    // What was sampled before the swap is still on its way.
    while client
        .tokens
        .iter()
        .filter(|t| t.version == PolicyVersion(7))
        .count()
        < 60
    {
        client.at_least(client.tokens.len() + 1).await;
    }
    engine.abort(RequestId(1));
    let ended = client.end().await.unwrap();
    assert_eq!((ended.reason, ended.interruptions), (FinishReason::Abort, 1));

    let switch = ended
        .tokens
        .iter()
        .position(|t| t.version == PolicyVersion(7))
        .unwrap();
    assert!(
        switch >= 5
            && ended.tokens[..switch]
                .iter()
                .all(|t| t.version == PolicyVersion(0))
    );
    assert!(ended.tokens[switch..]
        .iter()
        .all(|t| t.version == PolicyVersion(7)));
    let text = |n: usize| [&r.prompt[..], &ended.ids()[..n]].concat();
    let checked = 20.min(switch);
    let want_old = naive(
        &old,
        &text(switch - checked),
        &r.sampling,
        (switch - checked) as u64,
        checked,
    );
    let want_new = naive(&new, &text(switch), &r.sampling, switch as u64, 20);
    let got: Vec<_> = ended.tokens[switch - checked..switch + 20].iter().collect();
    for (got, (id, logprob)) in got.iter().zip(want_old.iter().chain(&want_new)) {
        assert_eq!(got.id, *id);
        // On a busy machine thousands of tokens come before the swap, and rounding grows with the text.
        assert!((got.logprob - logprob).abs() < 1e-4, "{} {logprob}", got.logprob);
    }
}

#[tokio::test]
async fn new_weights_drop_what_older_ones_computed() {
    let (old, new) = (policy(5), policy(6));
    let engine = engine(&old, small());
    let r = request(1, "s", &prompt(60, 3), 10);
    Client::submit(&engine, r.clone()).end().await.unwrap();
    assert_eq!(engine.resident_prefix(&r.session, &r.prompt), 48);
    let update = WeightUpdate::new(PolicyVersion(1), new.export());
    engine.update_weights(Arc::new(update)).await.unwrap();
    assert_eq!(engine.resident_prefix(&r.session, &r.prompt), 0);
    let ended = Client::submit(&engine, r.clone()).end().await.unwrap();
    assert_eq!(ended.cached_tokens, 0);
    let want = naive(&new, &r.prompt, &r.sampling, 0, 10);
    assert_eq!(ended.ids(), want.iter().map(|w| w.0).collect::<Vec<_>>());
}

#[tokio::test]
async fn a_refused_update_leaves_the_old_weights_in_use() {
    let (old, new) = (policy(5), policy(6));
    let engine = engine(&old, small());
    let mut damaged = WeightUpdate::new(PolicyVersion(1), new.export());
    damaged.checksum ^= 1;
    let error = engine.update_weights(Arc::new(damaged)).await.unwrap_err();
    assert!(matches!(error, WeightError::Checksum { .. }), "{error}");
    let mut tensors = new.export();
    tensors.pop();
    let short = WeightUpdate::new(PolicyVersion(1), tensors);
    let error = engine
        .update_weights(Arc::new(short))
        .await
        .unwrap_err()
        .to_string();
    assert!(error.contains("model.norm.weight"), "{error}");
    assert_eq!(engine.status().version, PolicyVersion(0));
    let r = request(1, "s", &prompt(20, 3), 10);
    let ended = Client::submit(&engine, r.clone()).end().await.unwrap();
    let want = naive(&old, &r.prompt, &r.sampling, 0, 10);
    assert_eq!(ended.ids(), want.iter().map(|w| w.0).collect::<Vec<_>>());
    assert!(ended.tokens.iter().all(|t| t.version == PolicyVersion(0)));
}

#[tokio::test]
async fn abort_and_a_closed_receiver_free_the_pages() {
    let policy = policy(7);
    let engine = engine(
        &policy,
        NativeEngineConfig {
            max_num_seqs: 1,
            max_model_len: 2048,
            ..small()
        },
    );
    let mut running = Client::submit(&engine, request(1, "a", &prompt(20, 1), 2000));
    let waiting = Client::submit(&engine, request(2, "b", &prompt(20, 2), 2000));
    running.at_least(3).await;
    assert!(engine.status().kv_tokens_active > 0);
    engine.abort(RequestId(2));
    let ended = waiting.end().await.unwrap();
    assert_eq!((ended.reason, ended.tokens.len()), (FinishReason::Abort, 0));
    engine.abort(RequestId(99));
    drop(running);
    settle(&engine).await;
    // The engine still serves.
    let ended = Client::submit(&engine, request(3, "c", &prompt(20, 3), 4))
        .end()
        .await
        .unwrap();
    assert_eq!(ended.tokens.len(), 4);
}

#[tokio::test]
async fn stop_tokens_and_the_context_length_end_a_generation() {
    let policy = policy(8);
    let engine = engine(&policy, small());
    let mut r = request(1, "s", &prompt(30, 1), 100);
    let free = Client::submit(&engine, r.clone()).end().await.unwrap().ids();
    let stop = free[10];
    r.stop_token_ids = vec![stop, VOCAB as u32 + 5];
    let ended = Client::submit(&engine, r).end().await.unwrap();
    let first = free.iter().position(|id| *id == stop).unwrap();
    assert_eq!(
        (ended.reason, ended.ids()),
        (FinishReason::Stop, free[..=first].to_vec())
    );

    let ended = Client::submit(&engine, request(2, "s", &prompt(250, 1), 100))
        .end()
        .await
        .unwrap();
    assert_eq!((ended.reason, ended.tokens.len()), (FinishReason::Length, 6));
    let error = Client::submit(&engine, request(3, "s", &prompt(256, 1), 1))
        .end()
        .await
        .unwrap_err();
    assert!(matches!(
        error,
        EngineError::ContextOverflow {
            prompt_tokens: 256,
            max_model_len: 256
        }
    ));
}

#[tokio::test]
async fn a_request_that_cannot_run_fails_by_name_and_harms_nobody() {
    let policy = policy(9);
    let engine = engine(&policy, small());
    let good = request(1, "s", &prompt(30, 1), 5);
    let failure = |r: GenerateRequest| {
        let client = Client::submit(&engine, r);
        async move { client.end().await.unwrap_err().to_string() }
    };
    let mut bad = good.clone();
    bad.prompt = Arc::from([]);
    assert!(failure(bad).await.contains("empty"));
    let mut bad = good.clone();
    bad.prompt = Arc::from([3, VOCAB as u32]);
    assert!(failure(bad).await.contains("token 97"));
    let mut bad = good.clone();
    bad.max_new_tokens = 0;
    assert!(failure(bad).await.contains("max_new_tokens"));
    let mut bad = good.clone();
    bad.sampling.temperature = f32::NAN;
    assert!(failure(bad).await.contains("temperature"));
    let mut bad = good.clone();
    bad.sampling.top_p = 0.0;
    assert!(failure(bad).await.contains("top_p"));
    assert_eq!(Client::submit(&engine, good).end().await.unwrap().tokens.len(), 5);
}

#[tokio::test]
async fn weights_that_overflow_fail_the_request_instead_of_inventing_tokens() {
    let policy = policy(10);
    no_grad(|| {
        let (_, mut norm) = policy
            .parameters()
            .into_iter()
            .find(|(n, _)| n == "model.norm.weight")
            .unwrap();
        let _ = norm.fill_(f64::NAN);
    });
    let engine = engine(&policy, small());
    let error = Client::submit(&engine, request(1, "s", &prompt(30, 1), 5))
        .end()
        .await
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("not finite") && error.contains("version 0"),
        "{error}"
    );
    settle(&engine).await;
}

#[tokio::test]
async fn dropping_the_engine_ends_its_requests() {
    let policy = policy(11);
    let engine = engine(
        &policy,
        NativeEngineConfig {
            max_model_len: 2048,
            ..small()
        },
    );
    let mut client = Client::submit(&engine, request(1, "s", &prompt(30, 1), 2000));
    client.at_least(1).await;
    drop(engine);
    assert!(matches!(client.end().await, Err(EngineError::ReplicaLost(_))));
}

#[test]
fn sizes_that_cannot_work_are_refused() {
    let policy = policy(12);
    let message = |config| {
        NativeEngine::from_policy(config, &policy)
            .err()
            .unwrap()
            .to_string()
    };
    assert!(message(NativeEngineConfig {
        kv_cache_tokens: 100,
        ..small()
    })
    .contains("raise kv_cache_tokens"));
    assert!(message(NativeEngineConfig {
        max_num_seqs: 0,
        ..small()
    })
    .contains("max_num_seqs"));
    // Larger than any machine's memory: told before anything is reserved.
    let huge = message(NativeEngineConfig {
        kv_cache_tokens: 1 << 40,
        ..small()
    });
    assert!(huge.contains("KV cache of 1099511627776 tokens") && huge.contains("MAX_PROMPT + MAX_RESP"));
}
