//! The buffer of ended trials: it decides which trials start, keeps what they produced, and hands out
//! complete groups, each exactly once.
//!
//! # Files
//! In [`BufferConfig::dir`]: `shard-000001.lrb`, … (trial ends; layout in `shard` and `record`),
//! `deliveries.log` (which trials each step was trained on; layout in `deliveries`) and `lock`, held
//! with `flock` while the buffer is open. A submit returns after `fdatasync` of its record, a batch
//! after `fdatasync` of its line.
//!
//! # Exactly once
//! *Every admitted trial ends once: stored with a verdict, stored as dropped, or cut off by the delivery
//! of its group.* A stored trial is known after a restart and never runs again. A delivery is decided
//! once: its line is durable before the trainer sees the batch, and after a restart from the checkpoint
//! of step N the logged deliveries of steps beyond N are handed out again, same groups, same order, same
//! samples. So the weights that survive saw each trial in one step and no more.
//!
//! # Groups and order
//! Group g works on row [`crate::base::order::row_of`]`(g, n_rows, seed)`; its trials are samples `0..n_resp`. Step
//! s takes `train_bsz` groups, so a run has `total_steps * train_bsz` groups. New groups are admitted in
//! number order; missing trials of started groups come first. After a restart a missing trial waits
//! until the weights are at least as new as its group's start, since its tokens would be older.
//!
//! # Pacing and the staleness bound
//! Let `B = train_bsz`, `S` the integer part of `staleness`, `v` the version (steps done), `n` the last
//! step whose groups are decided (`v` or more, as a batch may be in training). A group is *outstanding*
//! from its first trial to `step_done` of its step. Its lag in step k is `k - 1 - start`, so a group
//! started at version `a` is *due* in step `a + S + 1`: there its lag is S.
//!
//! *Admission.* A group starts only if all undelivered groups with the new one *fit*: sorted by due step,
//! the i-th (from 0) has a due step of at least `n + 1 + i / B`. In words: delivering in order of age, B
//! a step, none would pass its bound, so never more than B reach it in the same step. In a run without a
//! restart the new group is the last to be due, and the rule says `undelivered + 1 <= (v + S + 1 - n) B`.
//! With the batch in training that is at most `(S + 1) B` outstanding groups, within the limit of
//! `B (1 + staleness)`, which is also enforced. A fractional part of `staleness` changes nothing: the
//! groups that it would admit could not be delivered within the bound. In sync mode (0) a step's trials
//! start only when the step before it is done.
//!
//! *Delivery.* Write `D(j)` for the undelivered groups due by step `n + 1 + j`. Whichever B groups step
//! `n + 1` takes, the rest fit again if it takes at least `D(j) - j B` of those for every j. Fitting
//! before gives `D(j) <= (j + 1) B`, so these demands, which are nested, never exceed B in total: a
//! batch of exactly B groups exists in every step, no group passes its bound, and nothing waits for a
//! group that may not start.
//!
//! *Cutting off.* Step `n + 1` is decided as soon as B groups, of any age, are complete. It takes the
//! groups that the demands name, complete ones first, then the oldest complete ones. A demanded group
//! that still runs is delivered with the samples it has, the rest are cut off: `is_wanted` turns false
//! and a later result is refused. Thus the bound never makes the trainer wait longer than a buffer
//! without a bound would: one slow trial costs itself, not the step. With `S = 0` every outstanding
//! group belongs to the next step, B complete groups are all of them, and nothing is ever cut off. The
//! same holds in the last step of a run, which waits for its trials within their own time limits.
//!
//! # Recovery
//! A torn tail (never acknowledged) is cut with a warning. A damaged record that was acknowledged is
//! [`BufferError::Corrupt`] with file, byte and trial; the records around it stay readable, and
//! [`salvage`] sets it aside. Damage in a trial that was already trained is only a warning.
//!
//! # Who deletes
//! [`Buffer::retain`] alone: shards whose every trial was trained before the oldest checkpoint that is
//! kept. The delivery log stays, as the history of the run.

mod batch_bytes;
mod deliveries;
mod error;
mod manifest;
mod mmap;
mod record;
mod recover;
mod schedule;
mod seams;
mod shard;
mod state;
#[cfg(test)]
mod tests;

pub use deliveries::{read_history, DeliveredGroup, Delivery};
pub use error::BufferError;
pub use manifest::BufferManifest;
pub use recover::{salvage, SalvageReport};

use crate::base::{DropReason, GroupId, PolicyVersion, TrialEnd, TrialKey};
use crate::train::batch::{TrainBatch, TrainGroup};
use deliveries::DeliveryLog;
use mmap::{Location, MappedShard, ShardReader};
use rayon::prelude::*;
use record::RecordHeader;
use shard::ShardWriter;
use state::{Counts, State};
use std::{
    collections::{BTreeMap, HashMap, HashSet},
    fs::File,
    path::PathBuf,
    sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError},
    time::Instant,
};

/// Settings of a buffer.
#[derive(Clone, Debug)]
pub struct BufferConfig {
    /// Folder of the shards and the delivery log; created if missing.
    pub dir: PathBuf,
    /// Samples of a group (`N_RESP`).
    pub n_resp: u32,
    /// Groups of a step (`TRAIN_BSZ`).
    pub train_bsz: u32,
    /// Versions that a delivered group may lag behind (`STALENESS`); 0 is sync. The integer part counts.
    pub staleness: f64,
    /// Steps of the run; may grow on resume.
    pub total_steps: u32,
    /// Rows of the task index.
    pub n_rows: u32,
    /// Seed of the run.
    pub seed: u64,
    /// Attempts of a trial before it is dropped; at least 1.
    pub max_attempts: u32,
    /// A shard that has reached this many bytes is closed.
    pub roll_bytes: u64,
}

impl BufferConfig {
    /// Whole versions of lag: the integer part of `staleness`.
    pub fn lag_max(&self) -> u32 {
        self.staleness as u32
    }

    /// Groups that may be outstanding: `train_bsz * (1 + staleness)`, rounded down.
    pub fn outstanding_max(&self) -> usize {
        (f64::from(self.train_bsz) * (1.0 + self.staleness)) as usize
    }

    /// Settings that give group numbers their meaning; a folder belongs to one set of them.
    fn identity(&self) -> [(&'static str, u64); 4] {
        [
            ("n_resp", u64::from(self.n_resp)),
            ("train_bsz", u64::from(self.train_bsz)),
            ("n_rows", u64::from(self.n_rows)),
            ("seed", self.seed),
        ]
    }

    fn check(&self) -> Result<(), BufferError> {
        for (name, value) in [
            ("N_RESP", self.n_resp),
            ("TRAIN_BSZ", self.train_bsz),
            ("total_steps", self.total_steps),
            ("n_rows", self.n_rows),
            ("max_attempts", self.max_attempts),
        ] {
            if value == 0 {
                return Err(BufferError::Setting {
                    name,
                    problem: "it must be at least 1".to_owned(),
                });
            }
        }
        if !(self.staleness.is_finite() && (0.0..=1024.0).contains(&self.staleness)) {
            return Err(BufferError::Setting {
                name: "STALENESS",
                problem: format!("{} is not between 0 and 1024", self.staleness),
            });
        }
        Ok(())
    }
}

/// Lag of the groups of a batch, in versions.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Lag {
    /// Smallest.
    pub min: u32,
    /// Mean over groups.
    pub mean: f64,
    /// Largest; never above the integer part of `STALENESS`.
    pub max: u32,
}

/// A snapshot for metrics.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct BufferStatus {
    /// Optimizer steps done.
    pub version: PolicyVersion,
    /// Groups that are started and not trained.
    pub outstanding_groups: usize,
    /// Complete groups that no step has taken.
    pub ready_groups: usize,
    /// Trials that are handed out and have not ended.
    pub running_trials: usize,
    /// Lag of the batch that was handed out last.
    pub last_lag: Lag,
    /// Trials cut off by a delivery, since the process started.
    pub cut_trials: u64,
    /// Trials stored as dropped, since the process started.
    pub dropped_trials: u64,
    /// Delivered groups with one finished sample or none, since the process started.
    pub thin_groups: u64,
    /// Delivered groups without any finished sample, since the process started.
    pub empty_groups: u64,
    /// Bytes of all shards.
    pub shard_bytes: u64,
}

/// The buffer. One per run, on rank 0; all methods may be called from any thread.
///
/// Locks, in the order in which they nest: `log`, then `state`. No file is touched under `state`, so
/// [`crate::base::TrialPlan`] never waits for a disk.
#[derive(Debug)]
pub struct Buffer {
    config: BufferConfig,
    state: Mutex<State>,
    log: Mutex<DeliveryLog>,
    writer: ShardWriter,
    reader: ShardReader,
    /// Wakes `next_batch` and submits of the same trial.
    changed_blocking: Condvar,
    /// Wakes `TrialPlan::changed`.
    changed: tokio::sync::Notify,
    /// Holds the folder; the lock ends with the process.
    _lock: File,
}

impl Buffer {
    /// Opens the buffer in `config.dir`. `resume` is the manifest of the checkpoint whose weights the run
    /// starts from; `None` means the starting weights (version 0), also when the folder holds trials of
    /// an earlier attempt that reached no checkpoint.
    pub fn open(config: BufferConfig, resume: Option<&BufferManifest>) -> Result<Arc<Self>, BufferError> {
        config.check()?;
        catch_file_size_signal()?;
        let recovered = recover::recover(&config, resume)?;
        Ok(Arc::new(Self {
            writer: ShardWriter::open(&config.dir, config.roll_bytes, recovered.last_shard)?,
            reader: ShardReader::new(&config.dir),
            state: Mutex::new(State {
                durable_step: recovered.schedule.decided,
                schedule: recovered.schedule,
                locations: recovered.locations,
                shards: recovered.shards,
                storing: HashSet::new(),
                deliveries: recovered.deliveries,
                log_ends: recovered.log_ends,
                closed: None,
                counts: Counts::default(),
            }),
            log: Mutex::new(recovered.log),
            changed_blocking: Condvar::new(),
            changed: tokio::sync::Notify::new(),
            _lock: recovered.lock,
            config,
        }))
    }

    /// The settings.
    pub fn config(&self) -> &BufferConfig {
        &self.config
    }

    /// The groups of `step`, waiting until `deadline` for them to be complete. Blocking; one thread at a
    /// time, the trainer's. The weights must
    /// have version `step - 1` when the batch is used; asking one step ahead is allowed, and a step that
    /// is not done may be asked for again. After a restart the steps that were delivered before it come
    /// first, as they were.
    ///
    /// # Errors
    /// [`BufferError::Deadline`] names the groups and samples that are missing; the call may be repeated.
    pub fn next_batch(&self, step: u32, deadline: Instant) -> Result<TrainBatch, BufferError> {
        let since = Instant::now();
        let mut log = lock(&self.log);
        let (delivery, locations) = loop {
            let mut state = self.state();
            let next = state.schedule.version + 1;
            if step < next || step > state.durable_step + 1 {
                return Err(BufferError::OutOfOrder {
                    asked: step,
                    next: state.durable_step + 1,
                });
            }
            if step <= state.durable_step {
                break state.delivery_with_locations(step, &self.config)?;
            }
            if step <= state.schedule.decided {
                // Decided, and not in the log: new, or its write failed before.
                let delivery = state.deliveries[&step].clone();
                drop(state);
                let end = log.append(&delivery)?;
                state = self.state();
                state.durable_step = step;
                state.log_ends.insert(step, end);
                continue;
            }
            if let Some(reason) = &state.closed {
                return Err(BufferError::Closed(reason.clone()));
            }
            if let Some(groups) = state.schedule.select() {
                state.decide(step, &groups);
                drop(state);
                self.changed.notify_waiters();
                continue;
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(BufferError::Deadline {
                    step,
                    ready: state.schedule.ready(),
                    wanted: self.config.train_bsz,
                    waited: since.elapsed(),
                    missing: state.schedule.missing(),
                });
            }
            drop(
                self.changed_blocking
                    .wait_timeout(state, left)
                    .unwrap_or_else(PoisonError::into_inner),
            );
        };
        drop(log);
        self.read_batch(&delivery, &locations)
    }

    /// The optimizer step that made `version` is done and the engines serve it: its groups are trained,
    /// and trials that start from now on belong to `version`. Call it in step order, after the engines
    /// took the weights.
    pub fn step_done(&self, version: PolicyVersion) -> Result<(), BufferError> {
        {
            let mut state = self.state();
            let next = state.schedule.version + 1;
            if version.0 != next || next > state.durable_step {
                return Err(BufferError::OutOfOrder {
                    asked: version.0,
                    next,
                });
            }
            let done: HashSet<u64> = state.schedule.step_done().into_iter().collect();
            state.locations.retain(|key, _| !done.contains(&key.group.0));
            state.deliveries.remove(&version.0);
            state.log_ends = state.log_ends.split_off(&version.0);
        }
        self.wake();
        Ok(())
    }

    /// What the checkpoint of the current version must keep. Take it between `step_done` of the step that
    /// is saved and the next one.
    pub fn manifest(&self) -> BufferManifest {
        let state = self.state();
        let version = state.schedule.version;
        BufferManifest {
            format: BufferManifest::FORMAT,
            step: version,
            trained_below: state.schedule.trained.below,
            trained_beyond: state.schedule.trained.beyond.iter().copied().collect(),
            deliveries_bytes: state.log_ends.get(&version).copied().unwrap_or(0),
            n_resp: self.config.n_resp,
            train_bsz: self.config.train_bsz,
            n_rows: self.config.n_rows,
            seed: self.config.seed,
        }
    }

    /// Which trials each step that is done was trained on, from the delivery log.
    pub fn history(&self) -> Result<BTreeMap<u32, Vec<TrialKey>>, BufferError> {
        let version = self.state().schedule.version;
        Ok(read_history(&self.config.dir)?
            .into_iter()
            .filter(|delivery| delivery.step <= version)
            .map(|delivery| (delivery.step, delivery.trials().collect()))
            .collect())
    }

    /// Deletes the shards that no checkpoint from `oldest` on needs; returns the bytes that were freed.
    pub fn retain(&self, oldest: &BufferManifest) -> Result<u64, BufferError> {
        let trained = oldest.trained();
        let active = self.writer.active_number();
        let unneeded: Vec<(u32, u64)> = self
            .state()
            .shards
            .iter()
            .filter(|(number, _)| active.is_some_and(|active| **number < active))
            .filter(|(_, shard)| shard.groups.iter().all(|group| trained.contains(*group)))
            .map(|(number, shard)| (*number, shard.bytes))
            .collect();
        let mut freed = 0;
        for (number, bytes) in unneeded {
            let path = shard::path(&self.config.dir, number);
            std::fs::remove_file(&path).map_err(BufferError::io(&path, "delete"))?;
            self.reader.forget(number);
            self.state().shards.remove(&number);
            freed += bytes;
        }
        if freed > 0 {
            shard::sync_dir(&self.config.dir).map_err(BufferError::io(&self.config.dir, "sync"))?;
        }
        Ok(freed)
    }

    /// Numbers for metrics.
    pub fn status(&self) -> BufferStatus {
        let state = self.state();
        BufferStatus {
            version: PolicyVersion(state.schedule.version),
            outstanding_groups: state.schedule.outstanding(),
            ready_groups: state.schedule.ready(),
            running_trials: state.schedule.running(),
            last_lag: state.counts.last_lag,
            cut_trials: state.counts.cut,
            dropped_trials: state.counts.dropped,
            thin_groups: state.counts.thin,
            empty_groups: state.counts.empty,
            shard_bytes: state.shards.values().map(|shard| shard.bytes).sum(),
        }
    }

    /// The run ends early: no trial starts any more, and a waiting `next_batch` returns
    /// [`BufferError::Closed`]. Submits are still stored.
    pub fn close(&self, reason: &str) {
        self.state().closed = Some(reason.to_owned());
        self.wake();
    }

    fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    fn wake(&self) {
        self.changed_blocking.notify_all();
        self.changed.notify_waiters();
    }

    fn read_batch(
        &self,
        delivery: &Delivery,
        locations: &HashMap<TrialKey, Location>,
    ) -> Result<TrainBatch, BufferError> {
        let groups: Result<Vec<TrainGroup>, BufferError> = delivery
            .groups
            .par_iter()
            .map(|group| {
                let read = |sample: &u32| self.read(locations[&schedule::key(group.id, *sample as usize)]);
                let stale = group.cut.iter().map(|sample| (*sample, DropReason::Stale));
                let mut dropped: Vec<(u32, DropReason)> =
                    group.dropped.iter().copied().chain(stale).collect();
                dropped.sort_unstable();
                Ok(TrainGroup {
                    id: GroupId(group.id),
                    start_version: PolicyVersion(group.start),
                    trajectories: group.finished.iter().map(read).collect::<Result<_, _>>()?,
                    dropped: dropped
                        .into_iter()
                        .map(|(sample, reason)| (schedule::key(group.id, sample as usize), reason))
                        .collect(),
                })
            })
            .collect();
        Ok(TrainBatch {
            step: delivery.step,
            groups: groups?,
        })
    }

    fn read(&self, location: Location) -> Result<crate::base::Trajectory, BufferError> {
        let map = self.reader.map(location.shard, location.offset + location.len)?;
        let bytes = &map[location.offset as usize..(location.offset + location.len) as usize];
        let corrupt = |trial: String, problem: String| BufferError::Corrupt {
            path: shard::path(&self.config.dir, location.shard),
            dir: self.config.dir.clone(),
            offset: location.offset,
            trial,
            problem,
        };
        let header = RecordHeader::parse(bytes)
            .ok_or_else(|| corrupt("an unknown trial".to_owned(), "the header is damaged".to_owned()))?;
        let body = &bytes[record::HEADER_BYTES..record::HEADER_BYTES + header.body_len as usize];
        let trial = header.key().to_string();
        if crc32fast::hash(body) != header.body_crc {
            return Err(corrupt(trial, "the checksum is wrong".to_owned()));
        }
        let place = record::BodyStore {
            at: location.offset + record::HEADER_BYTES as u64,
            store: Arc::new(MappedShard(map.clone())),
        };
        match record::decode(&header, body, &place) {
            Ok(TrialEnd::Finished(trajectory)) => Ok(trajectory),
            Ok(TrialEnd::Dropped { .. }) => Err(corrupt(trial, "it is a dropped trial".to_owned())),
            Err(problem) => Err(corrupt(trial, problem)),
        }
    }
}

/// Beyond `ulimit -f` the kernel sends SIGXFSZ, which ends the process; with a handler, the write fails
/// with EFBIG instead. Not SIG_IGN, which every sandbox and agent would inherit.
fn catch_file_size_signal() -> Result<(), BufferError> {
    static CAUGHT: OnceLock<Result<(), std::io::ErrorKind>> = OnceLock::new();
    CAUGHT
        .get_or_init(|| {
            signal_hook::flag::register(libc::SIGXFSZ, Arc::default())
                .map(|_| ())
                .map_err(|e| e.kind())
        })
        .map_err(|kind| BufferError::Setting {
            name: "SIGXFSZ",
            problem: format!("its handler cannot be set: {kind}"),
        })
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // The guarded values are changed in steps that leave them whole, also when a caller panics.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
