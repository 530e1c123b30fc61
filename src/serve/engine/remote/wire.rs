//! Messages between the head and an engine's rank.
//!
//! ```text
//! u32 length of the head, little-endian
//! head: one JSON object
//! the rest: raw little-endian data that belongs to it (prompt, sampled tokens, weights)
//! ```
//! [`PROTOCOL`] is part of the first message of both sides and changes with every change here.

use crate::base::{
    DType, EngineError, EngineStatus, FinishReason, PolicyVersion, RequestId, RoutedExperts, SampledToken,
    SamplingParams, SessionId, WeightAck, WeightError,
};
use bytes::{BufMut, Bytes, BytesMut};
use serde::{de::DeserializeOwned, Deserialize, Serialize};

/// Version of this format.
pub(super) const PROTOCOL: u32 = 2;

/// First word of a side.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Hello {
    pub protocol: u32,
    pub program: String,
}

impl Hello {
    pub fn describe(&self) -> String {
        format!("{}, engine protocol {}", self.program, self.protocol)
    }
}

/// Shape of a tensor whose bytes follow in buckets.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct TensorShape {
    pub name: String,
    pub dtype: DType,
    pub shape: Vec<usize>,
    pub bytes: usize,
}

/// From the head to the engine's rank.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub(super) enum Request {
    Hello(Hello),
    /// Raw: the prompt, u32 each.
    Submit {
        id: RequestId,
        session: SessionId,
        sampling: SamplingParams,
        stop_token_ids: Vec<u32>,
        max_new_tokens: u32,
        routing_from: Option<u32>,
    },
    Abort {
        id: RequestId,
    },
    EndSession {
        session: SessionId,
    },
    WeightsBegin {
        version: PolicyVersion,
        checksum: u32,
        tensors: Vec<TensorShape>,
    },
    /// Raw: the next bytes of the update.
    WeightsBucket {
        version: PolicyVersion,
        index: u32,
        crc: u32,
    },
    Ping,
    Stop,
}

/// From the engine's rank to the head.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub(super) enum Reply {
    Hello(Hello),
    /// Raw: 12 bytes a token: id, bits of the log-prob, version.
    Tokens {
        id: RequestId,
    },
    /// Raw: the experts, u16 each.
    Finished {
        id: RequestId,
        reason: FinishReason,
        cached_tokens: u32,
        interruptions: u32,
        /// Position of the first token whose experts follow, and experts a token.
        routing: Option<(u32, u32)>,
    },
    Failed {
        id: RequestId,
        error: EngineError,
    },
    Status {
        status: EngineStatus,
        /// Submits that the status knows of; absent when that was not looked up.
        received: Option<u64>,
    },
    /// How many of the tokens that a session had after its last generation are in the cache.
    Resident {
        sessions: Vec<(SessionId, usize)>,
    },
    BucketTaken {
        version: PolicyVersion,
    },
    Weights {
        version: PolicyVersion,
        result: Result<WeightAck, WeightError>,
    },
}

/// One message.
pub(super) fn encode(head: &impl Serialize, raw: &[u8]) -> Result<Bytes, String> {
    let head = serde_json::to_vec(head).map_err(|e| e.to_string())?;
    let mut message = BytesMut::with_capacity(4 + head.len() + raw.len());
    message.put_u32_le(head.len() as u32);
    message.put_slice(&head);
    message.put_slice(raw);
    Ok(message.freeze())
}

/// Head and raw part of a message.
pub(super) fn decode<H: DeserializeOwned>(message: &Bytes) -> Result<(H, Bytes), String> {
    let len = message
        .first_chunk::<4>()
        .map(|len| u32::from_le_bytes(*len) as usize)
        .ok_or("it is shorter than four bytes")?;
    let head = message.get(4..4 + len).ok_or("its head is not whole")?;
    let head = serde_json::from_slice(head).map_err(|e| e.to_string())?;
    Ok((head, message.slice(4 + len..)))
}

pub(super) fn put_u32s(values: &[u32]) -> Vec<u8> {
    values.iter().flat_map(|v| v.to_le_bytes()).collect()
}

pub(super) fn take_u32s(raw: &[u8]) -> Result<Vec<u32>, String> {
    if !raw.len().is_multiple_of(4) {
        return Err(format!("{} bytes are no whole number of tokens", raw.len()));
    }
    Ok(raw
        .chunks_exact(4)
        .map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]]))
        .collect())
}

/// Position and width for the head of a message, and the raw part.
pub(super) fn put_routing(routing: Option<&RoutedExperts>) -> (Option<(u32, u32)>, Vec<u8>) {
    let Some(routing) = routing else {
        return (None, Vec::new());
    };
    let raw = routing.experts.iter().flat_map(|e| e.to_le_bytes()).collect();
    (Some((routing.first, routing.width)), raw)
}

pub(super) fn take_routing(head: Option<(u32, u32)>, raw: &[u8]) -> Result<Option<RoutedExperts>, String> {
    let Some((first, width)) = head else {
        return Ok(None);
    };
    if !raw.len().is_multiple_of(2 * width.max(1) as usize) {
        return Err(format!(
            "{} bytes are no whole number of tokens with {width} experts",
            raw.len()
        ));
    }
    let experts = raw
        .chunks_exact(2)
        .map(|b| u16::from_le_bytes([b[0], b[1]]))
        .collect();
    Ok(Some(RoutedExperts {
        first,
        width,
        experts,
    }))
}

pub(super) fn put_tokens(tokens: &[SampledToken]) -> Vec<u8> {
    let words: Vec<u32> = tokens
        .iter()
        .flat_map(|t| [t.id, t.logprob.to_bits(), t.version.0])
        .collect();
    put_u32s(&words)
}

pub(super) fn take_tokens(raw: &[u8]) -> Result<Vec<SampledToken>, String> {
    if !raw.len().is_multiple_of(12) || raw.is_empty() {
        return Err(format!(
            "{} bytes are no whole number of sampled tokens",
            raw.len()
        ));
    }
    Ok(take_u32s(raw)?
        .chunks_exact(3)
        .map(|t| SampledToken {
            id: t[0],
            logprob: f32::from_bits(t[1]),
            version: PolicyVersion(t[2]),
        })
        .collect())
}
