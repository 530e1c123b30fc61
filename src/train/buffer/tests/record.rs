//! Records: what goes in comes out, bit by bit, and damage is seen.

use super::super::record::{decode, encode, set_durable_before, BodyStore, RecordHeader, HEADER_BYTES};
use super::{dropped, finished, key, trajectory};
use crate::base::{
    RoutingRun, RoutingShape, RoutingStore, SequenceRouting, StopReason, TokenSequence, TrialEnd,
};
use proptest::prelude::*;
use std::sync::Arc;

fn round_trip(end: &TrialEnd) -> TrialEnd {
    let bytes = encode(end, 7).expect("it can be stored");
    assert_eq!(bytes.len() % 8, 0);
    let header = RecordHeader::parse(&bytes).expect("the header is whole");
    assert_eq!(header.record_bytes(), bytes.len() as u64);
    assert_eq!(header.start_version, 7);
    assert_eq!(header.key(), end.key());
    let body = &bytes[HEADER_BYTES..HEADER_BYTES + header.body_len as usize];
    assert_eq!(crc32fast::hash(body), header.body_crc);
    let place = BodyStore {
        store: Arc::new(bytes.clone()),
        at: HEADER_BYTES as u64,
    };
    decode(&header, body, &place).expect("the body is readable")
}

/// Rows for about half of `tokens`, in two runs with a gap before and between them.
fn routing(tokens: u32, salt: u16, num_experts: u32) -> SequenceRouting {
    let shape = RoutingShape {
        num_experts,
        layers: 3,
        top_k: 2,
    };
    let experts: Vec<u16> = (0..tokens * shape.width())
        .map(|i| ((i * 31 + u32::from(salt)) % num_experts) as u16)
        .collect();
    let store: Arc<dyn RoutingStore> = Arc::new(shape.encode(&experts).unwrap());
    let run = |first: u32, tokens: u32| RoutingRun {
        first,
        tokens,
        store: store.clone(),
        at: u64::from(first) * shape.row_bytes() as u64,
    };
    let runs = vec![run(tokens / 8, tokens / 4), run(tokens / 2, tokens / 3)];
    SequenceRouting { shape, runs }
}

fn sequences() -> impl Strategy<Value = Vec<TokenSequence>> {
    let token = (any::<u32>(), any::<bool>(), -30f32..0.0, 0u32..4);
    let routed = prop::option::of((any::<u16>(), prop_oneof![Just(7u32), Just(256), Just(300)]));
    let sequence =
        (prop::collection::vec(token, 0..200), 0f32..1.0, routed).prop_map(|(tokens, weight, routed)| {
            let mask: Vec<bool> = tokens.iter().map(|t| t.1).collect();
            TokenSequence {
                token_ids: tokens.iter().map(|t| t.0).collect(),
                logprobs: tokens.iter().map(|t| if t.1 { t.2 } else { 0.0 }).collect(),
                versions: tokens.iter().map(|t| if t.1 { t.3 } else { 0 }).collect(),
                prompt_len: mask.iter().position(|m| *m).unwrap_or(mask.len()) as u32,
                routing: routed.map(|(salt, experts)| routing(tokens.len() as u32, salt, experts)),
                loss_mask: mask,
                weight,
            }
        });
    prop::collection::vec(sequence, 0..4)
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn a_finished_trial_comes_back_as_it_was(
        sequences in sequences(),
        reward in any::<f64>().prop_filter("finite", |r| r.is_finite()),
        text in ".{0,20}",
        stop in prop_oneof![
            Just(StopReason::AgentCompleted), Just(StopReason::MaxTurnsReached), Just(StopReason::Timeout),
            Just(StopReason::Overlong), Just(StopReason::AgentCrash),
        ],
    ) {
        let mut t = trajectory(key(123_456_789, 3), 2, 5);
        t.sequences = sequences;
        t.outcome.reward = reward;
        t.outcome.rewards.insert(text.clone(), reward);
        t.outcome.stop = stop;
        t.task = text;
        let end = TrialEnd::Finished(t);
        prop_assert_eq!(round_trip(&end), end);
    }

    #[test]
    fn any_damaged_byte_is_seen(at in 0usize..400, bit in 0u8..8) {
        let bytes = encode(&finished(key(5, 1), 3), 3).expect("it can be stored");
        let mut damaged = bytes.clone();
        damaged[at % bytes.len()] ^= 1 << bit;
        let whole = RecordHeader::parse(&damaged).is_some_and(|header| {
            crc32fast::hash(&damaged[HEADER_BYTES..HEADER_BYTES + header.body_len as usize]) == header.body_crc
        });
        prop_assert!(!whole);
    }

    #[test]
    fn random_bodies_are_errors_and_no_panics(body in prop::collection::vec(any::<u8>(), 0..300), kind in 0u32..4) {
        let header = RecordHeader { body_len: body.len() as u32, group: 1, durable_before: 0, sample: 0,
            attempt: 0, start_version: 0, kind, body_crc: 0 };
        // A random body that happens to be a trial would be a wonder.
        let nothing = BodyStore { store: Arc::new(Vec::new()), at: 0 };
        prop_assert!(decode(&header, &body, &nothing).is_err());
    }
}

#[test]
fn a_dropped_trial_comes_back_as_it_was() {
    assert_eq!(round_trip(&dropped(key(3, 1))), dropped(key(3, 1)));
}

/// The layout that the head of `record` states, field by field.
#[test]
fn header_has_the_documented_layout() {
    let mut bytes = encode(&finished(key(0x0102_0304, 9), 3), 0x0a0b).expect("it can be stored");
    set_durable_before(&mut bytes, 0x77);
    let u32_at = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().expect("four bytes"));
    let u64_at = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes"));
    assert_eq!(&bytes[..4], b".LRC");
    assert_eq!(u32_at(4) as usize, bytes.len() - 48);
    assert_eq!(u64_at(8), 0x0102_0304);
    assert_eq!(u64_at(16), 0x77);
    assert_eq!(
        [u32_at(24), u32_at(28), u32_at(32), u32_at(36)],
        [9, 0, 0x0a0b, 1]
    );
    assert_eq!(u32_at(40), crc32fast::hash(&bytes[48..]));
    assert_eq!(u32_at(44), crc32fast::hash(&bytes[..44]));
    // The first section is META and starts with the task's name.
    assert_eq!(u32_at(48), 1);
    assert_eq!(u32_at(64) as usize, "task-16909060".len());
}

#[test]
fn invalid_sequences_are_refused_with_their_number() {
    let mut t = trajectory(key(0, 0), 0, 10);
    t.sequences.push(t.sequences[0].clone());
    t.sequences[1].logprobs.pop();
    let error = encode(&TrialEnd::Finished(t), 0).expect_err("lengths differ");
    assert!(error.starts_with("sequence 1: lengths differ"), "{error}");
}
