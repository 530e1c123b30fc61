//! Opening a buffer: what is on disk, what the checkpoint knows, and how the two are joined.

use super::{
    deliveries::{DeliveryLog, Logged},
    mmap::{map_file, Location},
    record::{self, RecordHeader, HEADER_BYTES},
    schedule::{self, Group, GroupSet, Schedule, Slot},
    shard::{self, Damage, Scan},
    state::ShardUse,
    BufferConfig, BufferError, BufferManifest, Delivery,
};
use crate::base::{order, GroupId, TrialKey};
use std::{
    collections::{BTreeMap, HashMap},
    fs::{File, OpenOptions, TryLockError},
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

/// Everything that [`super::Buffer::open`] starts from.
pub(super) struct Recovered {
    pub lock: File,
    pub log: DeliveryLog,
    pub schedule: Schedule,
    pub locations: HashMap<TrialKey, Location>,
    pub shards: BTreeMap<u32, ShardUse>,
    pub deliveries: BTreeMap<u32, Delivery>,
    pub log_ends: BTreeMap<u32, u64>,
    /// Last shard and the end of its last whole record.
    pub last_shard: Option<(u32, u64)>,
}

/// Reads the folder and joins it with the checkpoint.
pub(super) fn recover(
    config: &BufferConfig,
    resume: Option<&BufferManifest>,
) -> Result<Recovered, BufferError> {
    std::fs::create_dir_all(&config.dir).map_err(BufferError::io(&config.dir, "create"))?;
    let lock = lock_dir(&config.dir)?;
    if let Some(manifest) = resume {
        manifest.check(&config.dir, config)?;
    }
    let version = resume.map_or(0, |manifest| manifest.step);
    let trained = resume.map(BufferManifest::trained).unwrap_or_default();
    let (log, logged) = DeliveryLog::open(&config.dir, config)?;
    shard::sync_dir(&config.dir).map_err(BufferError::io(&config.dir, "sync"))?;
    check_history(log.path(), &logged, resume, &trained)?;

    let mut found = read_shards(config, &trained)?;
    let decided = logged
        .last()
        .map_or(0, |logged| logged.delivery.step)
        .max(version);
    let mut log_ends = BTreeMap::new();
    let mut open_deliveries = BTreeMap::new();
    for Logged { delivery, end } in logged {
        if delivery.step >= version {
            log_ends.insert(delivery.step, end);
        }
        if delivery.step > version {
            replay(config, &mut found.groups, &delivery)?;
            open_deliveries.insert(delivery.step, delivery);
        }
    }
    let schedule = Schedule::new(config.clone(), version, decided, trained, found.groups);
    if let Some((group, start_version)) = schedule.first_misfit() {
        return Err(BufferError::Bound {
            group,
            start_version,
            staleness: config.staleness,
        });
    }
    Ok(Recovered {
        lock,
        log,
        schedule,
        locations: found.locations,
        shards: found.shards,
        deliveries: open_deliveries,
        log_ends,
        last_shard: found.last_shard,
    })
}

/// How long to wait for the folder. A process that was killed a moment ago may not be gone yet, and a
/// child that it had just forked holds the lock until it has become another program.
const LOCK_TIMEOUT: Duration = Duration::from_secs(5);

fn lock_dir(dir: &Path) -> Result<File, BufferError> {
    let path = dir.join("lock");
    let file = OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(false)
        .open(&path)
        .map_err(BufferError::io(&path, "open"))?;
    let since = Instant::now();
    loop {
        match file.try_lock() {
            Ok(()) => return Ok(file),
            Err(TryLockError::WouldBlock) if since.elapsed() < LOCK_TIMEOUT => {
                std::thread::sleep(Duration::from_millis(20));
            }
            Err(TryLockError::WouldBlock) => return Err(BufferError::Locked { path }),
            Err(TryLockError::Error(source)) => return Err(BufferError::io(&path, "lock")(source)),
        }
    }
}

/// The log must reach the checkpoint, and the groups that it delivered up to there must be those that
/// the checkpoint was trained on.
fn check_history(
    path: &Path,
    logged: &[Logged],
    resume: Option<&BufferManifest>,
    trained: &GroupSet,
) -> Result<(), BufferError> {
    let Some(manifest) = resume.filter(|manifest| manifest.step > 0) else {
        return Ok(());
    };
    let error = |problem: String| BufferError::History {
        path: path.to_owned(),
        step: manifest.step,
        problem,
    };
    let last = logged.last().map_or(0, |logged| logged.delivery.step);
    if last < manifest.step {
        return Err(error(format!(
            "it ends with step {last}; was the buffer's folder replaced after the checkpoint?"
        )));
    }
    let mut delivered = GroupSet::default();
    for logged in logged.iter().filter(|l| l.delivery.step <= manifest.step) {
        for group in &logged.delivery.groups {
            delivered.insert(group.id);
        }
        if logged.delivery.step == manifest.step && logged.end != manifest.deliveries_bytes {
            return Err(error(format!(
                "step {} ends at byte {} instead of {}",
                manifest.step, logged.end, manifest.deliveries_bytes
            )));
        }
    }
    if delivered != *trained {
        return Err(error(
            "it delivered other groups than the checkpoint was trained on".to_owned(),
        ));
    }
    Ok(())
}

#[derive(Default)]
struct Found {
    groups: BTreeMap<u64, Group>,
    locations: HashMap<TrialKey, Location>,
    shards: BTreeMap<u32, ShardUse>,
    last_shard: Option<(u32, u64)>,
}

fn read_shards(config: &BufferConfig, trained: &GroupSet) -> Result<Found, BufferError> {
    let numbers = shard::list(&config.dir)?;
    let mut found = Found::default();
    for number in &numbers {
        let is_last = Some(number) == numbers.last();
        let scan = shard::scan(&config.dir, *number, is_last, |header| {
            !trained.contains(header.group)
        })?;
        let path = shard::path(&config.dir, *number);
        report_torn(&path, &scan);
        for damage in &scan.damage {
            match damage.header {
                Some(header) if trained.contains(header.group) => {
                    tracing::warn!(file = %path.display(), offset = damage.offset, trial = %header.key(),
                        "a damaged record of a trial that is already trained: ignored");
                }
                _ => return Err(corrupt(&config.dir, path, damage)),
            }
        }
        let mut shard_use = ShardUse {
            bytes: scan.end,
            ..ShardUse::default()
        };
        for (header, location) in &scan.records {
            shard_use.groups.insert(header.group);
            if !trained.contains(header.group) {
                found.add(config, &path, header, *location)?;
            }
        }
        found.shards.insert(*number, shard_use);
        if is_last {
            found.last_shard = Some((*number, scan.end));
        }
    }
    Ok(found)
}

impl Found {
    fn add(
        &mut self,
        config: &BufferConfig,
        path: &Path,
        header: &RecordHeader,
        location: Location,
    ) -> Result<(), BufferError> {
        let format = |problem: String| BufferError::Format {
            path: path.to_owned(),
            problem: format!("record at byte {}: {problem}", location.offset),
        };
        if header.sample >= config.n_resp {
            return Err(format(format!(
                "{} has a sample beyond N_RESP={}",
                header.key(),
                config.n_resp
            )));
        }
        let slot = if header.is_finished() {
            Slot::Finished
        } else {
            let map = map_file(path)?;
            let start = location.offset as usize + HEADER_BYTES;
            let body = &map[start..start + header.body_len as usize];
            Slot::Dropped(record::decode_drop_reason(header, body).map_err(format)?)
        };
        let group = self.groups.entry(header.group).or_insert_with(|| Group {
            start_version: header.start_version,
            row: order::row_of(GroupId(header.group), config.n_rows, config.seed),
            slots: vec![Slot::Pending; config.n_resp as usize],
            delivered: None,
        });
        group.start_version = group.start_version.min(header.start_version);
        group.slots[header.sample as usize] = slot;
        self.locations.insert(header.key(), location);
        Ok(())
    }
}

/// Puts a delivery that the checkpoint has not seen back in place: its groups as they were delivered.
fn replay(
    config: &BufferConfig,
    groups: &mut BTreeMap<u64, Group>,
    delivery: &Delivery,
) -> Result<(), BufferError> {
    for entry in &delivery.groups {
        let group = groups.entry(entry.id).or_insert_with(|| Group {
            start_version: entry.start,
            row: order::row_of(GroupId(entry.id), config.n_rows, config.seed),
            slots: vec![Slot::Pending; config.n_resp as usize],
            delivered: None,
        });
        group.start_version = entry.start;
        group.delivered = Some(delivery.step);
        for sample in &entry.finished {
            // The record must be there: it was durable before the delivery was.
            if group.slots.get(*sample as usize) != Some(&Slot::Finished) {
                return Err(BufferError::MissingTrial {
                    step: delivery.step,
                    trial: schedule::key(entry.id, *sample as usize).to_string(),
                    dir: config.dir.clone(),
                });
            }
        }
        for (sample, reason) in &entry.dropped {
            if let Some(slot) = group.slots.get_mut(*sample as usize) {
                *slot = Slot::Dropped(*reason);
            }
        }
        for sample in &entry.cut {
            if let Some(slot) = group.slots.get_mut(*sample as usize) {
                *slot = Slot::Cut;
            }
        }
    }
    Ok(())
}

fn report_torn(path: &Path, scan: &Scan) {
    if scan.torn_bytes > 0 {
        let trial = scan
            .torn
            .map_or("unknown".to_owned(), |header| header.key().to_string());
        tracing::warn!(file = %path.display(), at = scan.end, bytes = scan.torn_bytes, trial,
            "cut the torn tail of a shard; its trials were never acknowledged and run again");
    }
}

fn corrupt(dir: &Path, path: PathBuf, damage: &Damage) -> BufferError {
    BufferError::Corrupt {
        path,
        dir: dir.to_owned(),
        offset: damage.offset,
        trial: damage
            .header
            .map_or("a trial whose name is damaged too".to_owned(), |header| {
                header.key().to_string()
            }),
        problem: damage.problem.clone(),
    }
}

/// What [`salvage`] did.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SalvageReport {
    /// Damaged shards, as they were renamed.
    pub set_aside: Vec<PathBuf>,
    /// Records that were kept.
    pub kept: u64,
    /// Trials whose record is damaged, with file and byte; they run again.
    pub lost: Vec<String>,
}

/// Rewrites every damaged shard of the buffer in `dir` with its readable records, and keeps the damaged
/// file beside it as `shard-000001.lrb.damaged`. Trials whose record is lost run again, unless a batch
/// that a checkpoint has not seen yet contains them: then opening says so, and the run can only go on
/// from a later checkpoint.
pub fn salvage(dir: &Path) -> Result<SalvageReport, BufferError> {
    let _lock = lock_dir(dir)?;
    let numbers = shard::list(dir)?;
    let mut report = SalvageReport::default();
    for number in &numbers {
        let scan = shard::scan(dir, *number, Some(number) == numbers.last(), |_| true)?;
        if scan.damage.is_empty() {
            continue;
        }
        let path = shard::path(dir, *number);
        for damage in &scan.damage {
            let trial = damage
                .header
                .map_or("a trial whose name is damaged too".to_owned(), |h| {
                    h.key().to_string()
                });
            report.lost.push(format!(
                "`{}` byte {}: {trial}, {}",
                path.display(),
                damage.offset,
                damage.problem
            ));
        }
        report.kept += scan.records.len() as u64;
        report.set_aside.push(shard::rewrite(dir, *number, &scan)?);
    }
    Ok(report)
}
