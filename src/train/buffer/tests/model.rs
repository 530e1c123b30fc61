//! Random runs with restarts, against a model that knows what must be true.
//!
//! The model remembers across restarts which trials were acknowledged, what each step was first given,
//! and what the checkpoints saw. A restart leaves garbage behind the files, as an interrupted write does.

use super::super::Delivery;
use super::*;
use crate::base::{PolicyVersion, Submitted, TrialSink};
use proptest::prelude::*;
use std::{
    collections::{BTreeMap, BTreeSet},
    fs::OpenOptions,
    io::Write,
};

#[derive(Clone, Debug)]
enum Action {
    /// Hand out up to so many trials.
    Start(usize),
    /// End the n-th running trial with a verdict.
    Finish(usize),
    /// The n-th running trial has no verdict.
    Drop(usize),
    /// The n-th running attempt failed.
    Retry(usize),
    /// Ask for the next batch, without patience.
    Batch,
    /// The step that was delivered is done.
    Step,
    /// Save a checkpoint, and delete what the one before it does not need.
    Checkpoint,
    /// `kill -9`, and the same command again; garbage of so many bytes lies behind shard and log.
    Restart(usize, usize),
}

fn action() -> impl Strategy<Value = Action> {
    prop_oneof![
        6 => (1usize..6).prop_map(Action::Start),
        9 => (0usize..64).prop_map(Action::Finish),
        1 => (0usize..64).prop_map(Action::Drop),
        1 => (0usize..64).prop_map(Action::Retry),
        4 => Just(Action::Batch),
        4 => Just(Action::Step),
        2 => Just(Action::Checkpoint),
        1 => (0usize..60, 0usize..60).prop_map(|(shard, log)| Action::Restart(shard, log)),
    ]
}

struct Model {
    config: BufferConfig,
    buffer: Option<Arc<Buffer>>,
    /// Handed out in this life and not ended.
    running: Vec<TrialAssignment>,
    /// Acknowledged as stored; the version of a finished trial's tokens.
    stored: BTreeMap<TrialKey, Option<u32>>,
    /// What each step was first given.
    batches: BTreeMap<u32, String>,
    /// Trials that a batch went without.
    cut: BTreeSet<TrialKey>,
    checkpoint: Option<BufferManifest>,
    version: u32,
    delivered: u32,
}

impl Model {
    fn new(config: BufferConfig) -> Self {
        Self {
            buffer: Some(open(&config, None)),
            config,
            running: Vec::new(),
            stored: BTreeMap::new(),
            batches: BTreeMap::new(),
            cut: BTreeSet::new(),
            checkpoint: None,
            version: 0,
            delivered: 0,
        }
    }

    fn buffer(&self) -> &Arc<Buffer> {
        self.buffer.as_ref().expect("it is open")
    }

    fn take_running(&mut self, n: usize) -> Option<TrialAssignment> {
        (!self.running.is_empty()).then(|| self.running.remove(n % self.running.len()))
    }

    fn start(&mut self) -> bool {
        let TrialPlanStep::Run(trial) = self.buffer().next() else {
            return false;
        };
        let key = trial.key;
        assert!(!self.stored.contains_key(&key), "{key} was stored and runs again");
        assert!(!self.cut.contains(&key), "{key} was cut off and runs again");
        assert!(self.running.iter().all(|t| t.key != key), "{key} runs twice");
        self.running.push(trial);
        true
    }

    fn end(&mut self, trial: TrialAssignment, is_finished: bool) {
        let key = trial.key;
        let end = if is_finished {
            finished(key, self.version)
        } else {
            dropped(key)
        };
        let wanted = self.buffer().is_wanted(&key);
        let answer = self.buffer().submit(end.clone()).expect("the disk is well");
        if wanted {
            assert_eq!(answer, Submitted::Stored);
            self.stored.insert(key, is_finished.then_some(self.version));
        } else {
            assert_ne!(answer, Submitted::Stored, "{key} was cut off");
        }
        assert_ne!(
            self.buffer().submit(end).expect("the disk is well"),
            Submitted::Stored
        );
    }

    fn batch(&mut self) -> bool {
        let step = self.delivered + 1;
        if step > self.config.total_steps {
            return false;
        }
        let Ok(batch) = self.buffer().next_batch(step, Instant::now()) else {
            assert!(!self.batches.contains_key(&step), "step {step} was given before");
            return false;
        };
        self.delivered = step;
        assert_eq!(batch.step, step);
        assert_eq!(batch.groups.len(), self.config.train_bsz as usize);
        for group in &batch.groups {
            let lag = step - 1 - group.start_version.0;
            assert!(lag <= self.config.lag_max(), "lag {lag} in step {step}");
            assert_eq!(
                group.trajectories.len() + group.dropped.len(),
                self.config.n_resp as usize
            );
            for read in &group.trajectories {
                let version = self.stored[&read.key].expect("only verdicts are trained on");
                assert!(version >= group.start_version.0);
                assert_eq!(*read, trajectory(read.key, version, 40));
            }
            for (key, reason) in &group.dropped {
                match reason {
                    DropReason::Stale => assert!(self.cut.insert(*key) || self.batches.contains_key(&step)),
                    _ => assert_eq!(self.stored[key], None),
                }
            }
        }
        let text = format!("{batch:?}");
        let first = self.batches.entry(step).or_insert_with(|| text.clone());
        assert_eq!(
            *first, text,
            "step {step} differs from what it was before the restart"
        );
        true
    }

    fn step(&mut self) -> bool {
        if self.version == self.delivered {
            return false;
        }
        self.version += 1;
        self.buffer()
            .step_done(PolicyVersion(self.version))
            .expect("in order");
        true
    }

    fn checkpoint(&mut self) {
        let manifest = self.buffer().manifest();
        assert_eq!(manifest.step, self.version);
        if let Some(before) = self.checkpoint.replace(manifest) {
            self.buffer().retain(&before).expect("the disk is well");
        }
    }

    fn restart(&mut self, shard_garbage: usize, log_garbage: usize) {
        self.buffer = None;
        let shards = super::super::shard::list(&self.config.dir).expect("a list");
        let shard = shards
            .last()
            .map(|n| super::super::shard::path(&self.config.dir, *n));
        let log = self.config.dir.join("deliveries.log");
        for (path, bytes) in [(shard, shard_garbage), (Some(log), log_garbage)] {
            let Some(path) = path else { continue };
            let mut file = OpenOptions::new().append(true).open(path).expect("it is there");
            file.write_all(&vec![b'.'; bytes]).expect("room");
        }
        self.buffer = Some(open(&self.config, self.checkpoint.as_ref()));
        self.running.clear();
        self.version = self.checkpoint.as_ref().map_or(0, |c| c.step);
        self.delivered = self.version;
        for key in self.stored.keys() {
            assert!(
                !self.buffer().is_wanted(key),
                "{key} was stored and is wanted again"
            );
        }
    }

    fn apply(&mut self, action: &Action) {
        match action {
            Action::Start(n) => {
                let started = (0..*n).take_while(|_| self.start()).count();
                assert!(started <= *n);
            }
            Action::Finish(n) | Action::Drop(n) => {
                if let Some(trial) = self.take_running(*n) {
                    self.end(trial, matches!(action, Action::Finish(_)));
                }
            }
            Action::Retry(n) => {
                if let Some(trial) = self.take_running(*n) {
                    match self.buffer().retry(&trial) {
                        Some(again) => self.running.push(again),
                        None => self.end(trial, false),
                    }
                }
            }
            Action::Batch => {
                self.batch();
            }
            Action::Step => {
                self.step();
            }
            Action::Checkpoint => self.checkpoint(),
            Action::Restart(shard, log) => self.restart(*shard, *log),
        }
    }

    /// Brings the run to its end, and looks at the whole history.
    fn finish(mut self) {
        let total = u64::from(self.config.total_steps);
        while self.version < self.config.total_steps {
            let mut progress = false;
            while self.start() {
                progress = true;
            }
            while let Some(trial) = self.take_running(0) {
                self.end(trial, true);
                progress = true;
            }
            progress |= self.batch();
            progress |= self.step();
            assert!(
                progress,
                "nothing can happen any more: {:?}",
                self.buffer().status()
            );
        }
        assert_eq!(self.buffer().next(), TrialPlanStep::Finished);
        let history: Vec<Delivery> = super::super::read_history(&self.config.dir).expect("readable");
        assert_eq!(history.len() as u64, total);
        let groups: BTreeSet<u64> = history.iter().flat_map(|d| &d.groups).map(|g| g.id).collect();
        let expected = total * u64::from(self.config.train_bsz);
        assert_eq!(groups, (0..expected).collect(), "every group is trained once");
        let mut trials = BTreeSet::new();
        for key in history.iter().flat_map(Delivery::trials) {
            assert!(trials.insert(key), "{key} is in two steps");
        }
        let verdicts: BTreeSet<TrialKey> = self
            .stored
            .iter()
            .filter(|(_, v)| v.is_some())
            .map(|(key, _)| *key)
            .collect();
        assert_eq!(
            trials, verdicts,
            "every trial with a verdict is trained on, and nothing else"
        );
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn random_runs_keep_their_promises(
        n_resp in 1u32..4,
        train_bsz in 1u32..4,
        staleness in prop_oneof![Just(0.0), Just(1.0), Just(1.5), Just(2.0)],
        total_steps in 1u32..7,
        roll_bytes in prop_oneof![Just(1u64), Just(2000), Just(1 << 20)],
        actions in prop::collection::vec(action(), 0..120),
    ) {
        let dir = quick_dir();
        let mut model = Model::new(BufferConfig {
            n_resp, train_bsz, staleness, total_steps, roll_bytes, ..config(dir.path())
        });
        for action in &actions {
            model.apply(action);
        }
        model.finish();
    }
}
