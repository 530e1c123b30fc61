//! Workers run, repeat, cancel and hand in trials.

use super::super::lease::tests::{key, Plan};
use super::super::lease::LeaseConfig;
use super::*;
use crate::base::{StopReason, TrialOutcome, TrialPlan, TrialTiming};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Mutex;
use std::{fs, path::Path};

/// What the scripted runner does with an attempt.
#[derive(Clone, Copy)]
enum Script {
    Finish,
    FailFirst,
    FailAlways,
    /// Runs until it is cancelled.
    Hang,
    /// Never looks at the cancel signal and never ends.
    Deaf,
    Panic,
}

/// Stands in for sandboxes and agents, to produce what real ones do rarely.
struct Runner {
    scripts: BTreeMap<u64, Script>,
    started: Mutex<Vec<TrialAssignment>>,
    num_running: Mutex<(usize, usize)>,
}

impl Runner {
    fn new(scripts: &[(u64, Script)]) -> Arc<Self> {
        Arc::new(Self {
            scripts: scripts.iter().copied().collect(),
            started: Mutex::default(),
            num_running: Mutex::default(),
        })
    }

    fn attempts_of(&self, n: u64) -> Vec<u32> {
        let started = self.started.lock().unwrap();
        started
            .iter()
            .filter(|a| a.key == key(n))
            .map(|a| a.attempt)
            .collect()
    }
}

#[async_trait::async_trait]
impl AttemptRunner for Runner {
    async fn run(
        &self,
        assignment: &TrialAssignment,
        task: &TaskSpec,
        mut cancel: watch::Receiver<bool>,
    ) -> AttemptEnd {
        self.started.lock().unwrap().push(*assignment);
        {
            let mut running = self.num_running.lock().unwrap();
            running.0 += 1;
            running.1 = running.1.max(running.0);
        }
        task::yield_now().await;
        let script = self
            .scripts
            .get(&assignment.key.group.0)
            .copied()
            .unwrap_or(Script::Finish);
        let failed = AttemptEnd::Failed(AttemptFailure {
            assignment: *assignment,
            task: task.name.clone(),
            reason: DropReason::EngineFailed,
            detail: "scripted".to_owned(),
        });
        let end = match script {
            Script::FailFirst if assignment.attempt == 0 => failed,
            Script::FailAlways => failed,
            Script::Hang => {
                let _ = cancel.wait_for(|stop| *stop).await;
                AttemptEnd::Unwanted
            }
            Script::Deaf if assignment.attempt == 0 => std::future::pending().await,
            Script::Panic if assignment.attempt == 0 => {
                self.num_running.lock().unwrap().0 -= 1;
                panic!("scripted panic")
            }
            _ => AttemptEnd::Finished(Box::new(trajectory(assignment, &task.name))),
        };
        self.num_running.lock().unwrap().0 -= 1;
        end
    }
}

fn trajectory(assignment: &TrialAssignment, task: &str) -> Trajectory {
    Trajectory {
        key: assignment.key,
        attempt: assignment.attempt,
        task: task.to_owned(),
        session: "s".to_owned(),
        outcome: TrialOutcome {
            reward: 1.0,
            rewards: BTreeMap::from([("reward".to_owned(), 1.0)]),
            stop: StopReason::AgentCompleted,
        },
        sequences: Vec::new(),
        turns: 1,
        malformed_tool_calls: 0,
        timing: TrialTiming::default(),
    }
}

/// Stores ends in the plan, as the buffer does; the first `num_failures` submissions meet a full disk.
struct Sink {
    plan: Arc<Plan>,
    ends: Mutex<Vec<(TrialEnd, Submitted)>>,
    num_failures: Mutex<u32>,
}

impl TrialSink for Sink {
    fn submit(&self, end: TrialEnd) -> Result<Submitted, SinkError> {
        let mut failures = self.num_failures.lock().unwrap();
        if *failures > 0 {
            *failures -= 1;
            return Err(SinkError {
                key: end.key(),
                problem: "shard-000001.lrb".to_owned(),
                source: Some(std::io::ErrorKind::StorageFull.into()),
            });
        }
        let submitted = self.plan.submit(end.key());
        self.ends.lock().unwrap().push((end, submitted));
        Ok(submitted)
    }
}

struct Setup {
    plan: Arc<Plan>,
    sink: Arc<Sink>,
    runner: Arc<Runner>,
    leases: Arc<LeaseTable>,
    events: Arc<Mutex<Vec<String>>>,
    stop: watch::Sender<bool>,
    tasks: tempfile::TempDir,
}

impl Setup {
    fn new(plan: Arc<Plan>, scripts: &[(u64, Script)], time_to_live: Duration) -> Self {
        let sink = Arc::new(Sink {
            plan: Arc::clone(&plan),
            ends: Mutex::default(),
            num_failures: Mutex::default(),
        });
        let tasks = tempfile::tempdir().unwrap();
        write_task(&tasks.path().join("tasks/one"));
        super::super::task::build_index(
            &tasks.path().join("tasks"),
            &tasks.path().join("train.parquet"),
            None,
            0,
        )
        .unwrap();
        Self {
            leases: Arc::new(LeaseTable::new(
                Arc::clone(&plan) as Arc<dyn TrialPlan>,
                LeaseConfig {
                    time_to_live,
                    retry_delay: Duration::from_millis(1),
                },
            )),
            plan,
            sink,
            runner: Runner::new(scripts),
            events: Arc::default(),
            stop: watch::channel(false).0,
            tasks,
        }
    }

    /// Runs the workers; a scenario that hangs fails instead of blocking the suite.
    async fn run(&self, n_concurrent: usize) -> WorkersEnd {
        let events = Arc::clone(&self.events);
        let on_event: OnEvent = Arc::new(move |event| {
            let text = match event {
                WorkerEvent::Started { assignment, task } => format!("started {} {task}", assignment.key),
                WorkerEvent::Finished {
                    trajectory,
                    submitted,
                } => {
                    format!("finished {} {submitted:?}", trajectory.key)
                }
                WorkerEvent::Dropped { end, submitted } => format!("dropped {} {submitted:?}", end.key()),
                WorkerEvent::Retried { next, .. } => format!("retried {} as {}", next.key, next.attempt),
                WorkerEvent::Cancelled { assignment, reason } => {
                    format!("cancelled {} {reason:?}", assignment.key)
                }
                WorkerEvent::SinkFailed { error, .. } => format!("sink failed {}", error.key),
                WorkerEvent::Panicked { .. } => "panicked".to_owned(),
            };
            events.lock().unwrap().push(text);
        });
        let config = WorkersConfig {
            submit_pause: Duration::from_millis(1),
            ..WorkersConfig::new(n_concurrent, "test")
        };
        let workers = run_workers(
            config,
            Arc::clone(&self.leases),
            Arc::clone(&self.runner) as Arc<dyn AttemptRunner>,
            TaskIndexes {
                train: Arc::new(TaskIndex::open(&self.tasks.path().join("train.parquet")).unwrap()),
                val: None,
            },
            Arc::clone(&self.sink) as Arc<dyn TrialSink>,
            self.stop.subscribe(),
            on_event,
        );
        tokio::time::timeout(Duration::from_secs(60), workers)
            .await
            .expect("the workers came to an end")
    }

    fn ends(&self) -> BTreeMap<TrialKey, (TrialEnd, Submitted)> {
        let ends = self.sink.ends.lock().unwrap();
        ends.iter()
            .filter(|(_, submitted)| *submitted != Submitted::Duplicate)
            .map(|(end, submitted)| (end.key(), (end.clone(), *submitted)))
            .collect()
    }

    fn events(&self) -> BTreeSet<String> {
        self.events.lock().unwrap().iter().cloned().collect()
    }

    async fn until(&self, event: &str) {
        for _ in 0..6000 {
            if self.events().contains(event) {
                return;
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        panic!("no event `{event}` in {:?}", self.events());
    }
}

fn write_task(dir: &Path) {
    fs::create_dir_all(dir.join("environment")).unwrap();
    fs::create_dir_all(dir.join("tests")).unwrap();
    fs::write(dir.join("task.toml"), "schema_version = \"1.4\"\n").unwrap();
    fs::write(dir.join("instruction.md"), "Do it.\n").unwrap();
    fs::write(dir.join("tests/test.sh"), "echo 1 > /logs/verifier/reward.txt\n").unwrap();
}

const LONG: Duration = Duration::from_secs(300);

#[tokio::test]
async fn all_trials_end_and_no_more_than_asked_for_run_at_once() {
    let setup = Setup::new(Plan::new(40, 1), &[], LONG);
    assert_eq!(setup.run(3).await, WorkersEnd::Finished);
    assert_eq!(setup.ends().len(), 40);
    assert!(setup.runner.num_running.lock().unwrap().1 <= 3);
}

#[tokio::test]
async fn as_many_run_at_once_as_asked_for() {
    let hanging = [(0, Script::Hang), (1, Script::Hang), (2, Script::Hang)];
    let setup = Setup::new(Plan::new(4, 1), &hanging, LONG);
    let watch = async {
        for trial in 0..3 {
            setup.until(&format!("started {} one", key(trial))).await;
        }
        assert!(!setup.events().contains(&format!("started {} one", key(3))));
        for trial in 0..3 {
            setup.plan.cut(key(trial));
        }
    };
    let (end, ()) = tokio::join!(setup.run(3), watch);
    assert_eq!(end, WorkersEnd::Finished);
    assert_eq!(setup.ends().len(), 4);
}

#[tokio::test]
async fn failures_are_repeated_and_then_dropped() {
    let scripts = [
        (0, Script::FailFirst),
        (1, Script::FailAlways),
        (2, Script::Panic),
    ];
    let setup = Setup::new(Plan::new(3, 3), &scripts, LONG);
    assert_eq!(setup.run(2).await, WorkersEnd::Finished);
    let ends = setup.ends();
    assert!(matches!(&ends[&key(0)].0, TrialEnd::Finished(t) if t.attempt == 1));
    assert!(matches!(
        &ends[&key(1)].0,
        TrialEnd::Dropped { attempt: 2, reason: DropReason::EngineFailed, task, .. } if task == "one"
    ));
    assert!(matches!(&ends[&key(2)].0, TrialEnd::Finished(t) if t.attempt == 1));
    assert_eq!(setup.runner.attempts_of(1), [0, 1, 2]);
    assert!(setup.events().contains("panicked"));
}

#[tokio::test]
async fn a_full_disk_delays_an_end_and_loses_nothing() {
    let setup = Setup::new(Plan::new(2, 1), &[], LONG);
    *setup.sink.num_failures.lock().unwrap() = 5;
    assert_eq!(setup.run(1).await, WorkersEnd::Finished);
    assert_eq!(setup.ends().len(), 2);
    assert_eq!(setup.runner.attempts_of(0), [0], "not run again");
    assert!(setup.events().contains(&format!("sink failed {}", key(0))));
}

#[tokio::test]
async fn a_trial_that_is_cut_off_is_cancelled_and_dropped() {
    let setup = Setup::new(Plan::new(2, 3), &[(0, Script::Hang)], LONG);
    let cut = async {
        setup.until(&format!("started {} one", key(0))).await;
        setup.plan.cut(key(0));
    };
    let (end, ()) = tokio::join!(setup.run(1), cut);
    assert_eq!(end, WorkersEnd::Finished);
    let ends = setup.ends();
    assert!(matches!(
        &ends[&key(0)],
        (
            TrialEnd::Dropped {
                reason: DropReason::Stale,
                ..
            },
            Submitted::CutOff
        )
    ));
    assert!(matches!(&ends[&key(1)].0, TrialEnd::Finished(_)));
    assert_eq!(setup.runner.attempts_of(0), [0]);
}

#[tokio::test]
async fn a_stop_cancels_trials_and_gives_them_back() {
    let setup = Setup::new(Plan::new(2, 1), &[(0, Script::Hang), (1, Script::Hang)], LONG);
    let stop = async {
        setup.until(&format!("started {} one", key(1))).await;
        setup.stop.send_replace(true);
    };
    let (end, ()) = tokio::join!(setup.run(2), stop);
    assert_eq!(end, WorkersEnd::Stopped);
    assert!(setup.ends().is_empty());
    let status = setup.leases.status();
    assert_eq!((status.leased, status.waiting), (0, 2));
}

#[tokio::test]
async fn a_stop_ends_the_wait_for_a_full_disk() {
    let setup = Setup::new(Plan::new(1, 1), &[], LONG);
    *setup.sink.num_failures.lock().unwrap() = u32::MAX;
    let stop = async {
        setup.until(&format!("sink failed {}", key(0))).await;
        setup.stop.send_replace(true);
    };
    let (end, ()) = tokio::join!(setup.run(1), stop);
    assert_eq!(end, WorkersEnd::Stopped);
    assert_eq!(setup.leases.status().waiting, 1, "it runs again after a restart");
}

#[tokio::test]
async fn a_lease_that_is_taken_away_ends_the_attempt() {
    let setup = Setup::new(Plan::new(1, 2), &[(0, Script::Hang)], LONG);
    let take_away = async {
        setup.until(&format!("started {} one", key(0))).await;
        setup.leases.expire(Instant::now() + 2 * LONG);
        setup.until(&format!("cancelled {} LeaseLost", key(0))).await;
        setup.stop.send_replace(true);
    };
    let (end, ()) = tokio::join!(setup.run(1), take_away);
    assert_eq!(end, WorkersEnd::Stopped);
    assert_eq!(setup.runner.attempts_of(0).first(), Some(&0));
}

#[tokio::test]
async fn a_missing_task_folder_is_a_drop_that_names_it() {
    let setup = Setup::new(Plan::new(1, 1), &[], LONG);
    let index = TaskIndex::open(&setup.tasks.path().join("train.parquet")).unwrap();
    fs::remove_dir_all(setup.tasks.path().join("tasks/one")).unwrap();
    let error = index.load(0).unwrap_err().to_string();
    assert!(
        error.contains("train.parquet row 0") && error.contains("tasks/one"),
        "{error}"
    );
    assert!(TaskIndex::open(&setup.tasks.path().join("train.parquet"))
        .unwrap_err()
        .to_string()
        .contains("tasks/one"));
}

/// A worker whose process lives on and whose attempt hangs keeps its lease: time limits end attempts, not leases.
/// What ends a lease is a process that is gone, seen here as an owner that never reports.
#[tokio::test]
async fn trials_of_a_vanished_owner_are_run_by_others() {
    let setup = Setup::new(Plan::new(2, 2), &[(1, Script::Deaf)], Duration::from_millis(50));
    let Grant::Run(lost) = setup.leases.acquire("gone", Instant::now()) else {
        panic!("a fresh plan has trials");
    };
    let stop = async {
        setup.until(&format!("finished {} Stored", key(0))).await;
        setup.leases.heartbeat(lost.id, Instant::now())
    };
    tokio::select! {
        _ = setup.run(2) => panic!("the deaf trial never ends"),
        standing = stop => assert_eq!(standing, Standing::Lost),
    }
    assert_eq!(setup.runner.attempts_of(0), [1]);
    assert_eq!(
        setup.runner.attempts_of(1),
        [0],
        "its owner lives and keeps the lease"
    );
}
