//! What the buffer knows at a moment, behind one lock; no method touches a file.

use super::{
    deliveries::{DeliveredGroup, Delivery},
    mmap::Location,
    schedule::{Schedule, Slot},
    BufferConfig, BufferError, Lag,
};
use crate::base::{Submitted, TrialEnd, TrialKey};
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};

/// What one shard holds, for retention.
#[derive(Debug, Default)]
pub(super) struct ShardUse {
    pub groups: BTreeSet<u64>,
    pub bytes: u64,
}

#[derive(Debug)]
pub(super) struct State {
    pub schedule: Schedule,
    /// Records of trials that are not yet trained.
    pub locations: HashMap<TrialKey, Location>,
    pub shards: BTreeMap<u32, ShardUse>,
    /// Trials whose record is on its way to the disk.
    pub storing: HashSet<TrialKey>,
    /// Decided deliveries of steps that are not yet done.
    pub deliveries: BTreeMap<u32, Delivery>,
    /// Last step whose delivery is durable.
    pub durable_step: u32,
    /// Bytes of the delivery log after each step from `version` on.
    pub log_ends: BTreeMap<u32, u64>,
    pub closed: Option<String>,
    pub counts: Counts,
}

#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Counts {
    pub last_lag: Lag,
    pub cut: u64,
    pub dropped: u64,
    pub thin: u64,
    pub empty: u64,
}

impl State {
    /// Decides the delivery of `step` and counts what it takes.
    pub fn decide(&mut self, step: u32, groups: &[u64]) {
        let mut delivery = Delivery {
            step,
            groups: Vec::with_capacity(groups.len()),
        };
        self.schedule.deliver(groups);
        for id in groups {
            let group = &self.schedule.groups[id];
            let mut entry = DeliveredGroup {
                id: *id,
                start: group.start_version,
                finished: Vec::new(),
                dropped: Vec::new(),
                cut: Vec::new(),
            };
            for (sample, slot) in group.slots.iter().enumerate() {
                let sample = sample as u32;
                match slot {
                    Slot::Finished => entry.finished.push(sample),
                    Slot::Dropped(reason) => entry.dropped.push((sample, *reason)),
                    Slot::Cut | Slot::Pending | Slot::Running(_) => entry.cut.push(sample),
                }
            }
            self.counts.cut += entry.cut.len() as u64;
            self.counts.thin += u64::from(entry.finished.len() < 2);
            self.counts.empty += u64::from(entry.finished.is_empty());
            delivery.groups.push(entry);
        }
        self.deliveries.insert(step, delivery);
    }

    /// A durable delivery with the places of its trials.
    pub fn delivery_with_locations(
        &mut self,
        step: u32,
        config: &BufferConfig,
    ) -> Result<(Delivery, HashMap<TrialKey, Location>), BufferError> {
        let delivery = self.deliveries[&step].clone();
        let lags = delivery.groups.iter().map(|group| step - 1 - group.start);
        self.counts.last_lag = Lag {
            min: lags.clone().min().unwrap_or(0),
            mean: lags.clone().map(f64::from).sum::<f64>() / delivery.groups.len().max(1) as f64,
            max: lags.max().unwrap_or(0),
        };
        let mut locations = HashMap::new();
        for key in delivery.trials() {
            let location = self
                .locations
                .get(&key)
                .ok_or_else(|| BufferError::MissingTrial {
                    step,
                    trial: key.to_string(),
                    dir: config.dir.clone(),
                })?;
            locations.insert(key, *location);
        }
        Ok((delivery, locations))
    }

    /// A record is durable.
    pub fn record(&mut self, end: &TrialEnd, location: Location) -> Submitted {
        let key = end.key();
        let shard = self.shards.entry(location.shard).or_default();
        shard.groups.insert(key.group.0);
        shard.bytes = shard.bytes.max(location.offset + location.len);
        let slot = match end {
            TrialEnd::Finished(_) => Slot::Finished,
            TrialEnd::Dropped { reason, .. } => Slot::Dropped(*reason),
        };
        let answer = self.schedule.record_end(&key, slot);
        if answer == Submitted::Stored {
            self.locations.insert(key, location);
            self.counts.dropped += u64::from(slot != Slot::Finished);
        }
        answer
    }
}
