//! A batch as bytes, for the other ranks of the trainer: bit for bit what the buffer gave.
//!
//! ```text
//! u32 step, u32 groups
//! per group: u64 id, u32 start_version, u32 trials; per trial: a record of a shard (see `record`)
//! ```
//!
//! Everything is little-endian.

use super::record::{self, BodyStore, RecordHeader, HEADER_BYTES};
use crate::{
    base::{GroupId, PolicyVersion, TrialEnd},
    train::batch::{TrainBatch, TrainGroup},
};
use std::sync::Arc;

impl TrainBatch {
    /// The batch as bytes. The text of an error says what cannot be stored.
    pub fn to_bytes(&self) -> Result<Vec<u8>, String> {
        let mut out = Vec::new();
        out.extend(self.step.to_le_bytes());
        out.extend((self.groups.len() as u32).to_le_bytes());
        for group in &self.groups {
            let trials = group.trajectories.len() + group.dropped.len();
            out.extend(group.id.0.to_le_bytes());
            out.extend(group.start_version.0.to_le_bytes());
            out.extend((trials as u32).to_le_bytes());
            let finished = group.trajectories.iter().cloned().map(TrialEnd::Finished);
            // Why and where it failed is in the journal; the trainer counts reasons.
            let dropped = group.dropped.iter().map(|(key, reason)| TrialEnd::Dropped {
                key: *key,
                attempt: 0,
                task: String::new(),
                reason: *reason,
                detail: String::new(),
            });
            for end in finished.chain(dropped) {
                out.extend(record::encode(&end, group.start_version.0)?);
            }
        }
        Ok(out)
    }

    /// Reads [`TrainBatch::to_bytes`].
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, String> {
        let mut rest = Reader(bytes);
        let step = rest.u32()?;
        let groups = (0..rest.u32()?).map(|_| rest.group()).collect::<Result<_, _>>()?;
        match rest.0.len() {
            0 => Ok(Self { step, groups }),
            more => Err(format!("{more} bytes follow the last group of a batch")),
        }
    }
}

struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn take(&mut self, count: usize) -> Result<&'a [u8], String> {
        let (head, tail) = self
            .0
            .split_at_checked(count)
            .ok_or("the bytes of a batch end too early")?;
        self.0 = tail;
        Ok(head)
    }

    fn u32(&mut self) -> Result<u32, String> {
        let bytes = self.take(4)?;
        Ok(u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]))
    }

    fn group(&mut self) -> Result<TrainGroup, String> {
        let id = u64::from(self.u32()?) | u64::from(self.u32()?) << 32;
        let start_version = PolicyVersion(self.u32()?);
        let (mut trajectories, mut dropped) = (Vec::new(), Vec::new());
        for _ in 0..self.u32()? {
            let header = RecordHeader::parse(self.0).ok_or("a trial of a batch has a damaged header")?;
            let record = self.take(header.record_bytes() as usize)?;
            let body = &record[HEADER_BYTES..HEADER_BYTES + header.body_len as usize];
            if crc32fast::hash(body) != header.body_crc {
                return Err("a trial of a batch has another checksum than its bytes".into());
            }
            // Rows of routing stay in these bytes.
            let place = BodyStore {
                store: Arc::new(body.to_vec()),
                at: 0,
            };
            match record::decode(&header, body, &place)? {
                TrialEnd::Finished(trajectory) => trajectories.push(trajectory),
                TrialEnd::Dropped { key, reason, .. } => dropped.push((key, reason)),
            }
        }
        Ok(TrainGroup {
            id: GroupId(id),
            start_version,
            trajectories,
            dropped,
        })
    }
}
