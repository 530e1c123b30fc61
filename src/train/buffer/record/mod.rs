//! One record of a shard: how a trial's end becomes bytes and back.
//!
//! Everything is little-endian; records start at multiples of 8 bytes.
//!
//! ```text
//! header, 48 bytes
//!   0  u32 mark            RECORD_MARK
//!   4  u32 body_len        bytes of the body, without padding
//!   8  u64 group
//!  16  u64 durable_before  shard length known to be on disk when this record was written
//!  24  u32 sample
//!  28  u32 attempt
//!  32  u32 start_version   weight version when the group's first trial was admitted
//!  36  u32 kind            1 finished, 2 dropped
//!  40  u32 body_crc        CRC-32 of the body
//!  44  u32 header_crc      CRC-32 of bytes 0..44
//! body, sections one after the other, each padded to 8 bytes
//!   u32 section, u32 sequence, u64 length, bytes
//! padding to 8 bytes
//! ```
//!
//! Sections of a finished trial: `META` (text, reward, timing, one line per sequence), then per
//! sequence `IDS` (u32), `LOGPROBS` (f32), `VERSIONS` (runs of u32 count, u32 version), `MASK` (one
//! bit a token, low bit first) and, where it was recorded, `ROUTING` (u32 experts of a layer, u32 sparse
//! layers, u32 experts of a token in a layer, u32 runs, by run u32 first token and u32 tokens; then the rows of all
//! runs, an expert one byte up to 256 experts a layer and else a u16). A reader that meets a section it does not
//! know refuses the record. A dropped trial has `META` alone.
//!
//! Rows of routing are not copied when a record is read: the sequence refers to the mapped shard.

mod bytes;
mod codes;

use crate::base::{
    DropReason, GroupId, Purpose, RoutingRun, RoutingShape, RoutingStore, SequenceRouting, TokenSequence,
    Trajectory, TrialEnd, TrialKey, TrialOutcome, TrialTiming,
};
use bytes::{padded, Decoder, Encoder};
use codes::{drop_code, drop_reason, stop_code, stop_reason};
use std::{collections::BTreeMap, sync::Arc};

pub(super) const RECORD_MARK: u32 = 0x4352_4c2e; // ".LRC"
pub(super) const HEADER_BYTES: usize = 48;
/// A body never reaches this: token counts are u32 and a trial has few sequences.
pub(super) const BODY_BYTES_MAX: usize = u32::MAX as usize - 64;

const KIND_FINISHED: u32 = 1;
const KIND_DROPPED: u32 = 2;

const META: u32 = 1;
const IDS: u32 = 2;
const LOGPROBS: u32 = 3;
const VERSIONS: u32 = 4;
const MASK: u32 = 5;
const ROUTING: u32 = 16;

/// What a record's header says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct RecordHeader {
    pub body_len: u32,
    pub group: u64,
    pub durable_before: u64,
    pub sample: u32,
    pub attempt: u32,
    pub start_version: u32,
    pub kind: u32,
    pub body_crc: u32,
}

impl RecordHeader {
    /// The header in `bytes`, or `None` when its mark or checksum is wrong.
    pub fn parse(bytes: &[u8]) -> Option<Self> {
        let bytes: &[u8; HEADER_BYTES] = bytes.get(..HEADER_BYTES)?.try_into().ok()?;
        let word = |at: usize| u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
        let long = |at: usize| u64::from(word(at)) | u64::from(word(at + 4)) << 32;
        if word(0) != RECORD_MARK || word(44) != crc32fast::hash(&bytes[..44]) {
            return None;
        }
        Some(Self {
            body_len: word(4),
            group: long(8),
            durable_before: long(16),
            sample: word(24),
            attempt: word(28),
            start_version: word(32),
            kind: word(36),
            body_crc: word(40),
        })
    }

    fn write(&self, out: &mut [u8]) {
        out[0..4].copy_from_slice(&RECORD_MARK.to_le_bytes());
        out[4..8].copy_from_slice(&self.body_len.to_le_bytes());
        out[8..16].copy_from_slice(&self.group.to_le_bytes());
        out[16..24].copy_from_slice(&self.durable_before.to_le_bytes());
        for (at, word) in [
            (24, self.sample),
            (28, self.attempt),
            (32, self.start_version),
            (36, self.kind),
            (40, self.body_crc),
        ] {
            out[at..at + 4].copy_from_slice(&word.to_le_bytes());
        }
        let crc = crc32fast::hash(&out[..44]);
        out[44..48].copy_from_slice(&crc.to_le_bytes());
    }

    /// Bytes from this record's start to the next one's.
    pub fn record_bytes(&self) -> u64 {
        HEADER_BYTES as u64 + padded(self.body_len as usize) as u64
    }

    pub fn key(&self) -> TrialKey {
        TrialKey {
            purpose: Purpose::Train,
            group: GroupId(self.group),
            sample: self.sample,
        }
    }

    pub fn is_finished(&self) -> bool {
        self.kind == KIND_FINISHED
    }
}

/// Sets the field that only the writer knows, once the record's place in the shard is decided.
pub(super) fn set_durable_before(record: &mut [u8], durable_before: u64) {
    record[16..24].copy_from_slice(&durable_before.to_le_bytes());
    let crc = crc32fast::hash(&record[..44]);
    record[44..48].copy_from_slice(&crc.to_le_bytes());
}

/// The whole record with padding. The text of an error names what cannot be stored.
pub(super) fn encode(end: &TrialEnd, start_version: u32) -> Result<Vec<u8>, String> {
    let mut out = Encoder(vec![0; HEADER_BYTES]);
    let (kind, attempt) = match end {
        TrialEnd::Finished(trajectory) => {
            encode_finished(&mut out, trajectory)?;
            (KIND_FINISHED, trajectory.attempt)
        }
        TrialEnd::Dropped {
            attempt,
            task,
            reason,
            detail,
            ..
        } => {
            out.section(META, 0, |out| {
                out.text(task)?;
                out.text(detail)?;
                out.u32(drop_code(*reason));
                Ok(())
            })?;
            (KIND_DROPPED, *attempt)
        }
    };
    let mut bytes = out.0;
    let body_len = bytes.len() - HEADER_BYTES;
    if body_len > BODY_BYTES_MAX {
        return Err(format!(
            "the trial has {body_len} bytes and a record holds {BODY_BYTES_MAX}"
        ));
    }
    let key = end.key();
    let header = RecordHeader {
        body_len: body_len as u32,
        group: key.group.0,
        durable_before: 0,
        sample: key.sample,
        attempt,
        start_version,
        kind,
        body_crc: crc32fast::hash(&bytes[HEADER_BYTES..]),
    };
    header.write(&mut bytes[..HEADER_BYTES]);
    bytes.resize(padded(bytes.len()), 0);
    Ok(bytes)
}

/// About the bytes of a sequence.
fn record_bytes(sequence: &TokenSequence) -> usize {
    let routing = sequence.routing.as_ref();
    let rows = routing.map_or(0, |r| r.recorded() * r.shape.row_bytes() + 8 * r.runs.len());
    sequence.len() * 9 + rows + 256
}

fn encode_finished(out: &mut Encoder, t: &Trajectory) -> Result<(), String> {
    for (i, sequence) in t.sequences.iter().enumerate() {
        sequence
            .check()
            .map_err(|problem| format!("sequence {i}: {problem}"))?;
        if sequence.len() > u32::MAX as usize {
            return Err(format!("sequence {i} has {} tokens", sequence.len()));
        }
    }
    out.0
        .reserve(t.sequences.iter().map(record_bytes).sum::<usize>() + 512);
    out.section(META, 0, |out| {
        out.text(&t.task)?;
        out.text(&t.session)?;
        out.u32(stop_code(t.outcome.stop));
        out.f64(t.outcome.reward);
        out.u32(t.outcome.rewards.len() as u32);
        for (name, value) in &t.outcome.rewards {
            out.text(name)?;
            out.f64(*value);
        }
        out.u32(t.turns);
        out.u32(t.malformed_tool_calls);
        let TrialTiming {
            env_setup,
            agent_setup,
            agent_execute,
            verifier,
            total,
            model_inference,
        } = t.timing;
        for secs in [
            env_setup,
            agent_setup,
            agent_execute,
            verifier,
            total,
            model_inference,
        ] {
            out.f64(secs);
        }
        out.u32(t.sequences.len() as u32);
        for sequence in &t.sequences {
            out.u32(sequence.len() as u32);
            out.u32(sequence.prompt_len);
            out.u32(sequence.weight.to_bits());
        }
        Ok(())
    })?;
    for (i, sequence) in t.sequences.iter().enumerate() {
        let i = i as u32;
        out.section(IDS, i, |out| {
            out.words(sequence.token_ids.iter().copied());
            Ok(())
        })?;
        out.section(LOGPROBS, i, |out| {
            out.words(sequence.logprobs.iter().map(|p| p.to_bits()));
            Ok(())
        })?;
        out.section(VERSIONS, i, |out| {
            for run in sequence.versions.chunk_by(|a, b| a == b) {
                out.u32(run.len() as u32);
                out.u32(run[0]);
            }
            Ok(())
        })?;
        out.section(MASK, i, |out| {
            out.0.extend(sequence.loss_mask.chunks(8).map(|bits| {
                bits.iter()
                    .enumerate()
                    .fold(0u8, |byte, (i, bit)| byte | u8::from(*bit) << i)
            }));
            Ok(())
        })?;
        if let Some(routing) = &sequence.routing {
            out.section(ROUTING, i, |out| {
                out.u32(routing.shape.num_experts);
                out.u32(routing.shape.layers);
                out.u32(routing.shape.top_k);
                out.u32(routing.runs.len() as u32);
                for run in &routing.runs {
                    out.u32(run.first);
                    out.u32(run.tokens);
                }
                let copied = routing.copy_to(&mut out.0);
                copied.map_err(|e| format!("the experts of sequence {i} cannot be read: {e}"))
            })?;
        }
    }
    Ok(())
}

/// Where the body lies that a record is read from, for what is not copied out of it.
#[derive(Clone)]
pub(super) struct BodyStore {
    pub store: Arc<dyn RoutingStore>,
    /// Place of the body's first byte.
    pub at: u64,
}

/// The trial end in `body`, which belongs to `header` and whose checksum is right. Rows of routing refer to
/// `store`.
pub(super) fn decode(header: &RecordHeader, body: &[u8], store: &BodyStore) -> Result<TrialEnd, String> {
    let mut rest = Decoder(body);
    let (mut meta, section, _) = rest.section()?;
    if section != META {
        return Err(format!(
            "the body starts with section {section} instead of {META}"
        ));
    }
    match header.kind {
        KIND_FINISHED => {
            let place = |rest: &Decoder| store.at + (body.len() - rest.0.len()) as u64;
            decode_finished(header, &mut meta, &mut rest, &store.store, &place).map(TrialEnd::Finished)
        }
        KIND_DROPPED => {
            let (task, detail) = (meta.text()?, meta.text()?);
            Ok(TrialEnd::Dropped {
                key: header.key(),
                attempt: header.attempt,
                task,
                reason: drop_reason(meta.u32()?)?,
                detail,
            })
        }
        other => Err(format!("record kind {other} is unknown to this program")),
    }
}

/// The reason in the body of a dropped trial.
pub(super) fn decode_drop_reason(header: &RecordHeader, body: &[u8]) -> Result<DropReason, String> {
    let nothing = BodyStore {
        store: Arc::new(Vec::new()),
        at: 0,
    };
    match decode(header, body, &nothing)? {
        TrialEnd::Dropped { reason, .. } => Ok(reason),
        TrialEnd::Finished(_) => Err("the record is a finished trial".to_owned()),
    }
}

fn decode_finished(
    header: &RecordHeader,
    meta: &mut Decoder,
    rest: &mut Decoder,
    store: &Arc<dyn RoutingStore>,
    place: &dyn Fn(&Decoder) -> u64,
) -> Result<Trajectory, String> {
    let (task, session) = (meta.text()?, meta.text()?);
    let stop = stop_reason(meta.u32()?)?;
    let reward = meta.f64()?;
    let mut rewards = BTreeMap::new();
    for _ in 0..meta.u32()? {
        let name = meta.text()?;
        rewards.insert(name, meta.f64()?);
    }
    let (turns, malformed_tool_calls) = (meta.u32()?, meta.u32()?);
    let timing = TrialTiming {
        env_setup: meta.f64()?,
        agent_setup: meta.f64()?,
        agent_execute: meta.f64()?,
        verifier: meta.f64()?,
        total: meta.f64()?,
        model_inference: meta.f64()?,
    };
    let count = meta.u32()? as usize;
    let mut sequences = Vec::with_capacity(count.min(1024));
    let mut lengths = Vec::with_capacity(count.min(1024));
    for _ in 0..count {
        lengths.push(meta.u32()? as usize);
        sequences.push(TokenSequence {
            prompt_len: meta.u32()?,
            weight: f32::from_bits(meta.u32()?),
            ..TokenSequence::default()
        });
    }
    while !rest.0.is_empty() {
        let (mut payload, section, index) = rest.section()?;
        let end = place(rest);
        let (Some(sequence), Some(&len)) = (sequences.get_mut(index as usize), lengths.get(index as usize))
        else {
            return Err(format!("section {section} names sequence {index} of {count}"));
        };
        match section {
            IDS => sequence.token_ids = payload.words().collect(),
            LOGPROBS => sequence.logprobs = payload.words().map(f32::from_bits).collect(),
            VERSIONS => {
                let mut runs = payload.words();
                while let (Some(count), Some(version)) = (runs.next(), runs.next()) {
                    let filled = sequence.versions.len() + count as usize;
                    if filled > len {
                        return Err(format!("versions of sequence {index} exceed its {len} tokens"));
                    }
                    sequence.versions.resize(filled, version);
                }
            }
            MASK => {
                sequence.loss_mask.reserve(len + 8);
                for byte in payload.0 {
                    let bits: [bool; 8] = std::array::from_fn(|i| byte >> i & 1 == 1);
                    sequence.loss_mask.extend_from_slice(&bits);
                }
                sequence.loss_mask.truncate(len);
            }
            ROUTING => {
                // The payload ends where the next section begins, but for the padding.
                let begin = end - padded(payload.0.len()) as u64;
                let routing = routing(&mut payload, store, begin);
                sequence.routing = Some(routing.map_err(|problem| format!("sequence {index}: {problem}"))?);
            }
            other => {
                return Err(format!(
                    "section {other} is unknown: the shard was written by a newer program"
                ))
            }
        }
    }
    for (i, (sequence, len)) in sequences.iter().zip(&lengths).enumerate() {
        if sequence.len() != *len {
            return Err(format!(
                "sequence {i} has {} ids instead of {len}",
                sequence.len()
            ));
        }
        sequence
            .check()
            .map_err(|problem| format!("sequence {i}: {problem}"))?;
    }
    Ok(Trajectory {
        key: header.key(),
        attempt: header.attempt,
        task,
        session,
        outcome: TrialOutcome {
            reward,
            rewards,
            stop,
        },
        sequences,
        turns,
        malformed_tool_calls,
        timing,
    })
}

/// Rows of routing whose section's payload begins at byte `begin` of `store`.
fn routing(
    payload: &mut Decoder,
    store: &Arc<dyn RoutingStore>,
    begin: u64,
) -> Result<SequenceRouting, String> {
    let whole = payload.0.len();
    let shape = RoutingShape {
        num_experts: payload.u32()?,
        layers: payload.u32()?,
        top_k: payload.u32()?,
    }
    .check()?;
    let mut runs = Vec::new();
    for _ in 0..payload.u32()? {
        let (first, tokens) = (payload.u32()?, payload.u32()?);
        runs.push(RoutingRun {
            first,
            tokens,
            store: store.clone(),
            at: 0,
        });
    }
    let mut at = begin + (whole - payload.0.len()) as u64;
    let mut rows = 0;
    for run in &mut runs {
        run.at = at;
        let bytes = u64::from(run.tokens) * shape.row_bytes() as u64;
        at += bytes;
        rows += bytes;
    }
    if rows != payload.0.len() as u64 {
        return Err(format!(
            "its rows of routing have {} bytes instead of {rows}",
            payload.0.len()
        ));
    }
    Ok(SequenceRouting { shape, runs })
}
