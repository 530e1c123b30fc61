//! Which trial starts next, and which groups make the next batch: decisions only, no files, no clock.
//!
//! The rules and the counting argument are in the head of [`super`]. Every method is a state change
//! that is decided at once, so that the property test can drive it through any order of events.

use super::BufferConfig;
use crate::base::{order, DropReason, GroupId, Purpose, Submitted, TrialAssignment, TrialKey, TrialPlanStep};
use std::collections::{BTreeMap, BTreeSet};

/// Where one sample of a group stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Slot {
    /// Not handed out in this process.
    Pending,
    /// Handed out; the number is the attempt.
    Running(u32),
    /// Stored with a verdict.
    Finished,
    /// Stored without one.
    Dropped(DropReason),
    /// Its group was delivered without it.
    Cut,
}

impl Slot {
    pub fn has_ended(self) -> bool {
        !matches!(self, Slot::Pending | Slot::Running(_))
    }
}

/// A group that was started and is not yet trained.
#[derive(Clone, Debug)]
pub(super) struct Group {
    /// Version when its first trial was admitted; no token is older.
    pub start_version: u32,
    /// Row of the task index.
    pub row: u32,
    /// One slot a sample.
    pub slots: Vec<Slot>,
    /// Step that it was delivered to.
    pub delivered: Option<u32>,
}

impl Group {
    fn unfinished(&self) -> usize {
        self.slots.iter().filter(|slot| !slot.has_ended()).count()
    }
}

/// Groups that were trained: all below a cursor, and some beyond it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct GroupSet {
    pub below: u64,
    pub beyond: BTreeSet<u64>,
}

impl GroupSet {
    pub fn contains(&self, group: u64) -> bool {
        group < self.below || self.beyond.contains(&group)
    }

    pub fn insert(&mut self, group: u64) {
        if group >= self.below {
            self.beyond.insert(group);
        }
        while self.beyond.remove(&self.below) {
            self.below += 1;
        }
    }

    /// Number of groups in it.
    pub fn len(&self) -> u64 {
        self.below + self.beyond.len() as u64
    }
}

/// May a submit store its trial?
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Admission {
    /// Yes; the record carries this start version.
    Store { start_version: u32 },
    /// Yes, but as a drop: its oldest token would pass the bound.
    TooOld { start_version: u32 },
    /// No: this is the answer.
    Answer(Submitted),
    /// No: the trial was never admitted.
    Unknown,
}

/// The state of all groups that are started and not trained.
#[derive(Debug)]
pub(super) struct Schedule {
    config: BufferConfig,
    total_groups: u64,
    /// Optimizer steps done.
    pub version: u32,
    /// Last step whose groups are decided; at least `version`.
    pub decided: u32,
    pub groups: BTreeMap<u64, Group>,
    pub trained: GroupSet,
    /// Groups below `next_group` that were never started: a restart may leave them.
    gaps: BTreeSet<u64>,
    next_group: u64,
}

impl Schedule {
    /// Takes up where `trained` and `groups` leave off.
    pub fn new(
        config: BufferConfig,
        version: u32,
        decided: u32,
        trained: GroupSet,
        groups: BTreeMap<u64, Group>,
    ) -> Self {
        let next_group = groups
            .last_key_value()
            .map_or(0, |(id, _)| id + 1)
            .max(trained.beyond.last().map_or(trained.below, |id| id + 1));
        let gaps = (trained.below..next_group)
            .filter(|id| !groups.contains_key(id) && !trained.contains(*id))
            .collect();
        Self {
            total_groups: u64::from(config.total_steps) * u64::from(config.train_bsz),
            config,
            version,
            decided,
            groups,
            trained,
            gaps,
            next_group,
        }
    }

    /// Whole versions that a group may lag behind.
    fn lag_max(&self) -> u32 {
        self.config.lag_max()
    }

    /// Last step that a group started at `start_version` may be delivered to.
    fn due(&self, start_version: u32) -> u32 {
        start_version + self.lag_max() + 1
    }

    fn undelivered(&self) -> impl Iterator<Item = (u64, &Group)> {
        self.groups
            .iter()
            .filter(|(_, group)| group.delivered.is_none())
            .map(|(id, group)| (*id, group))
    }

    /// True when every undelivered group, and one more due at `extra`, can be delivered by its due step
    /// with `train_bsz` groups a step from step `decided + 1` on.
    fn fits(&self, extra: Option<u32>) -> bool {
        let dues = self
            .undelivered()
            .map(|(_, g)| self.due(g.start_version))
            .chain(extra);
        earliest_due_first_fits(dues.collect(), self.decided, self.config.train_bsz)
    }

    /// A group whose bound cannot be met, if there is one: the run was resumed with a smaller bound.
    pub fn first_misfit(&self) -> Option<(u64, u32)> {
        if self.fits(None) {
            return None;
        }
        self.undelivered()
            .map(|(id, g)| (id, g.start_version))
            .min_by_key(|(id, start)| (*start, *id))
    }

    fn first_new_group(&self) -> Option<u64> {
        let id = self.gaps.first().copied().unwrap_or(self.next_group);
        (id < self.total_groups).then_some(id)
    }

    fn assignment(&self, group: u64, sample: usize, attempt: u32, row: u32) -> TrialAssignment {
        let key = key(group, sample);
        TrialAssignment {
            key,
            attempt,
            row,
            seed: order::trial_seed(self.config.seed, &key, attempt),
        }
    }

    /// Hands out the next trial: missing trials of started groups first, then a new group.
    pub fn next(&mut self) -> TrialPlanStep {
        let mut waiting = false;
        let mut found = None;
        for (id, group) in &mut self.groups {
            if group.delivered.is_some() {
                continue;
            }
            let Some(sample) = group.slots.iter().position(|slot| *slot == Slot::Pending) else {
                continue;
            };
            // After a restart the weights may be older than the group: its tokens would be too.
            if group.start_version > self.version {
                waiting = true;
                continue;
            }
            group.slots[sample] = Slot::Running(0);
            found = Some((*id, sample, group.row));
            break;
        }
        if let Some((id, sample, row)) = found {
            return TrialPlanStep::Run(self.assignment(id, sample, 0, row));
        }
        let Some(id) = self.first_new_group() else {
            return if waiting {
                TrialPlanStep::Wait
            } else {
                TrialPlanStep::Finished
            };
        };
        let room = self.outstanding() < self.config.outstanding_max();
        if !room || !self.fits(Some(self.due(self.version))) {
            return TrialPlanStep::Wait;
        }
        if !self.gaps.remove(&id) {
            self.next_group += 1;
        }
        let row = order::row_of(GroupId(id), self.config.n_rows, self.config.seed);
        let mut slots = vec![Slot::Pending; self.config.n_resp as usize];
        slots[0] = Slot::Running(0);
        self.groups.insert(
            id,
            Group {
                start_version: self.version,
                row,
                slots,
                delivered: None,
            },
        );
        TrialPlanStep::Run(self.assignment(id, 0, 0, row))
    }

    /// The next attempt of a trial whose attempt ended without a result.
    pub fn retry(&mut self, failed: &TrialAssignment) -> Option<TrialAssignment> {
        let max_attempts = self.config.max_attempts;
        let group = self.groups.get_mut(&failed.key.group.0)?;
        let row = group.row;
        let slot = group.slots.get_mut(failed.key.sample as usize)?;
        let attempt = match *slot {
            Slot::Running(attempt) => attempt.max(failed.attempt) + 1,
            Slot::Pending => failed.attempt + 1,
            _ => return None,
        };
        if attempt >= max_attempts {
            return None;
        }
        *slot = Slot::Running(attempt);
        Some(self.assignment(failed.key.group.0, failed.key.sample as usize, attempt, row))
    }

    /// The slot of a trial, or `None` when its group is not started or already trained.
    pub fn slot(&self, key: &TrialKey) -> Option<Slot> {
        let group = self.groups.get(&key.group.0)?;
        group.slots.get(key.sample as usize).copied()
    }

    /// True while the trial's result would be taken.
    pub fn is_wanted(&self, key: &TrialKey) -> bool {
        key.purpose == Purpose::Train && self.slot(key).is_some_and(|slot| !slot.has_ended())
    }

    /// Decides on a submit; `oldest` is the oldest weight version among the trial's sampled tokens.
    pub fn admit_end(&mut self, key: &TrialKey, oldest: Option<u32>) -> Admission {
        if key.purpose != Purpose::Train || key.sample >= self.config.n_resp {
            return Admission::Unknown;
        }
        if self.trained.contains(key.group.0) {
            // The slots are gone; a cut trial and a stored one are told apart by nobody any more.
            return Admission::Answer(Submitted::Duplicate);
        }
        let Some(group) = self.groups.get(&key.group.0) else {
            return Admission::Unknown;
        };
        let start_version = group.start_version;
        match group.slots[key.sample as usize] {
            Slot::Finished | Slot::Dropped(_) => return Admission::Answer(Submitted::Duplicate),
            Slot::Cut => return Admission::Answer(Submitted::CutOff),
            Slot::Pending | Slot::Running(_) => {}
        }
        let Some(oldest) = oldest.filter(|oldest| *oldest < start_version) else {
            return Admission::Store { start_version };
        };
        // The engine was behind when the group was admitted. The group is as old as its oldest token,
        // and that moves its due step forward: possible only while the order of delivery still fits.
        self.set_start(key.group.0, oldest);
        if self.fits(None) {
            return Admission::Store {
                start_version: oldest,
            };
        }
        self.set_start(key.group.0, start_version);
        Admission::TooOld { start_version }
    }

    fn set_start(&mut self, group: u64, start_version: u32) {
        if let Some(group) = self.groups.get_mut(&group) {
            group.start_version = start_version;
        }
    }

    /// The end of a trial is durable.
    pub fn record_end(&mut self, key: &TrialKey, end: Slot) -> Submitted {
        debug_assert!(end.has_ended());
        if self.trained.contains(key.group.0) {
            return Submitted::CutOff;
        }
        let slot = self
            .groups
            .get_mut(&key.group.0)
            .and_then(|group| group.slots.get_mut(key.sample as usize));
        match slot {
            Some(slot) if !slot.has_ended() => {
                *slot = end;
                Submitted::Stored
            }
            // The group was delivered while the record was on its way to the disk.
            _ => Submitted::CutOff,
        }
    }

    /// The groups of step `decided + 1`, in id order, or `None` while it cannot be decided.
    pub fn select(&self) -> Option<Vec<u64>> {
        let step = self.decided + 1;
        let bsz = self.config.train_bsz as usize;
        let mut ready = Vec::new();
        let mut running = Vec::new();
        for (id, group) in self.undelivered() {
            let due = self.due(group.start_version);
            match group.unfinished() {
                0 => ready.push((due, id)),
                unfinished => running.push((unfinished, due, id)),
            }
        }
        // A batch may go out as soon as so many groups are complete: then the bound, which may force
        // others into it, never makes the trainer wait longer than it would without a bound.
        if ready.len() < bsz {
            return None;
        }
        ready.sort_unstable();
        running.sort_unstable();
        let mut dues: Vec<u32> = ready.iter().map(|(due, _)| *due).collect();
        dues.extend(running.iter().map(|(_, due, _)| *due));
        dues.sort_unstable();

        // Of the groups due by `step + j`, all but `j * bsz` must go now (see the head of `super`).
        let mut chosen: BTreeMap<u64, u32> = BTreeMap::new();
        let mut limits = dues.clone();
        limits.dedup();
        for limit in limits {
            let later_places = (limit.saturating_sub(step)) as usize * bsz;
            let due_by = dues.iter().filter(|due| **due <= limit).count();
            let must = due_by.saturating_sub(later_places);
            let candidates = ready
                .iter()
                .map(|(due, id)| (*due, *id))
                .chain(running.iter().map(|(_, due, id)| (*due, *id)));
            for (due, id) in candidates.filter(|(due, _)| *due <= limit) {
                if chosen.values().filter(|due| **due <= limit).count() >= must {
                    break;
                }
                chosen.insert(id, due);
            }
        }
        for (due, id) in &ready {
            if chosen.len() >= bsz {
                break;
            }
            chosen.insert(*id, *due);
        }
        debug_assert_eq!(chosen.len(), bsz, "the groups due in step {step} fit into it");
        let cuts_any = running.iter().any(|(_, _, id)| chosen.contains_key(id));
        debug_assert!(self.lag_max() > 0 || !cuts_any);
        (chosen.len() == bsz).then(|| chosen.into_keys().collect())
    }

    /// Step `decided + 1` is made of `groups`; their unfinished trials are cut off.
    pub fn deliver(&mut self, groups: &[u64]) {
        self.decided += 1;
        for id in groups {
            if let Some(group) = self.groups.get_mut(id) {
                group.delivered = Some(self.decided);
                for slot in group.slots.iter_mut().filter(|slot| !slot.has_ended()) {
                    *slot = Slot::Cut;
                }
            }
        }
        debug_assert!(self.fits(None));
    }

    /// Step `version + 1` was trained; returns its groups.
    pub fn step_done(&mut self) -> Vec<u64> {
        self.version += 1;
        let done: Vec<u64> = self
            .groups
            .iter()
            .filter(|(_, group)| group.delivered == Some(self.version))
            .map(|(id, _)| *id)
            .collect();
        for id in &done {
            self.groups.remove(id);
            self.trained.insert(*id);
        }
        done
    }

    /// Groups that are started and not trained.
    pub fn outstanding(&self) -> usize {
        self.groups.len()
    }

    /// Undelivered groups whose trials have all ended.
    pub fn ready(&self) -> usize {
        self.undelivered()
            .filter(|(_, group)| group.unfinished() == 0)
            .count()
    }

    /// Trials that are handed out and have not ended.
    pub fn running(&self) -> usize {
        self.groups
            .values()
            .flat_map(|group| &group.slots)
            .filter(|slot| matches!(slot, Slot::Running(_)))
            .count()
    }

    /// What the next step waits for, for people: at most eight groups by name.
    pub fn missing(&self) -> String {
        let mut lines: Vec<String> = Vec::new();
        let waiting: Vec<(u64, &Group)> = self
            .undelivered()
            .filter(|(_, group)| group.unfinished() > 0)
            .collect();
        for (id, group) in waiting.iter().take(8) {
            let of = |want: fn(&Slot) -> bool| -> String {
                let samples: Vec<String> = group
                    .slots
                    .iter()
                    .enumerate()
                    .filter(|(_, slot)| want(slot))
                    .map(|(i, _)| i.to_string())
                    .collect();
                samples.join(",")
            };
            let mut parts = vec![format!("group {id}")];
            for (name, samples) in [
                ("runs samples", of(|slot| matches!(slot, Slot::Running(_)))),
                ("has not started samples", of(|slot| *slot == Slot::Pending)),
            ] {
                if !samples.is_empty() {
                    parts.push(format!("{name} {samples}"));
                }
            }
            lines.push(parts.join(" "));
        }
        if waiting.len() > 8 {
            lines.push(format!("{} more groups", waiting.len() - 8));
        }
        if lines.is_empty() {
            lines.push("no group is started: no runner asks for trials".to_owned());
        }
        lines.join("; ")
    }
}

/// True when groups with these due steps can all be delivered in time, `bsz` a step from
/// `decided + 1` on: sorted by due step, the i-th (from 0) leaves in step `decided + 1 + i / bsz`.
pub(super) fn earliest_due_first_fits(mut dues: Vec<u32>, decided: u32, bsz: u32) -> bool {
    dues.sort_unstable();
    dues.iter()
        .enumerate()
        .all(|(i, due)| u64::from(*due) > u64::from(decided) + i as u64 / u64::from(bsz))
}

pub(super) fn key(group: u64, sample: usize) -> TrialKey {
    TrialKey {
        purpose: Purpose::Train,
        group: GroupId(group),
        sample: sample as u32,
    }
}
