//! Scripted replies end, carry versions and can be aborted.

use super::*;
use crate::base::SamplingParams;
use tokio::sync::mpsc::unbounded_channel;

fn request(id: u64) -> GenerateRequest {
    GenerateRequest {
        id: RequestId(id),
        session: "s".into(),
        prompt: vec![1, 2, 3].into(),
        sampling: SamplingParams::default(),
        stop_token_ids: vec![9],
        max_new_tokens: 4,
        routing_from: None,
    }
}

async fn run(engine: &ScriptedEngine, id: u64) -> (Vec<SampledToken>, EngineEvent) {
    let (tx, mut rx) = unbounded_channel();
    engine.submit(request(id), tx);
    let mut tokens = Vec::new();
    loop {
        match rx.recv().await.expect("a last event") {
            EngineEvent::Tokens(more) => tokens.extend(more),
            end => return (tokens, end),
        }
    }
}

#[tokio::test]
async fn replies_end_by_stop_length_failure_and_carry_versions() {
    let engine = ScriptedEngine::replies(vec![
        vec![5, 9, 6].into(),
        vec![5; 10].into(),
        ScriptedReply {
            tokens: vec![5, 5],
            failure: Some((1, EngineError::ReplicaLost("gone".into()))),
            ..ScriptedReply::default()
        },
        ScriptedReply {
            tokens: vec![5, 6, 9],
            new_version: Some((1, PolicyVersion(3))),
            ..ScriptedReply::default()
        },
    ]);
    let (tokens, end) = run(&engine, 0).await;
    assert_eq!(tokens.iter().map(|t| t.id).collect::<Vec<_>>(), [5, 9]);
    assert!(matches!(
        end,
        EngineEvent::Finished {
            reason: FinishReason::Stop,
            cached_tokens: 0,
            ..
        }
    ));
    let (tokens, end) = run(&engine, 1).await;
    assert_eq!(tokens.len(), 4);
    assert!(matches!(
        end,
        EngineEvent::Finished {
            reason: FinishReason::Length,
            cached_tokens: 3,
            ..
        }
    ));
    let (tokens, end) = run(&engine, 2).await;
    assert_eq!(tokens.len(), 1);
    assert!(matches!(end, EngineEvent::Failed(EngineError::ReplicaLost(_))));
    let (tokens, end) = run(&engine, 3).await;
    assert_eq!(tokens.iter().map(|t| t.version.0).collect::<Vec<_>>(), [0, 3, 3]);
    assert!(matches!(end, EngineEvent::Finished { interruptions: 1, .. }));
    let (_, end) = run(&engine, 4).await;
    assert!(matches!(end, EngineEvent::Failed(EngineError::Internal(_))));
}

#[tokio::test]
async fn abort_ends_a_slow_reply() {
    let engine = ScriptedEngine::replies(vec![ScriptedReply {
        tokens: vec![5, 5, 9],
        token_delay: Duration::from_secs(3600),
        ..ScriptedReply::default()
    }]);
    let (tx, mut rx) = unbounded_channel();
    engine.submit(request(7), tx);
    assert!(matches!(rx.recv().await, Some(EngineEvent::Tokens(t)) if t.len() == 1));
    assert_eq!(engine.status().running, 1);
    engine.abort(RequestId(7));
    assert!(matches!(
        rx.recv().await,
        Some(EngineEvent::Finished {
            reason: FinishReason::Abort,
            ..
        })
    ));
    assert_eq!(engine.status().running, 0);
}
