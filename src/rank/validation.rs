//! Validation trials: every row of `VAL_FILES`, `VAL_N` samples each, at one policy version.
//!
//! [`Validation`] is plan and sink of one such round. Ended trials are appended to
//! `validation/step_NNNN.jsonl`, one line each, so that a round that was killed goes on where it was.
//! A dropped trial (infrastructure) leaves the score and is counted; it is never a zero.

use crate::base::{
    order::trial_seed, DropReason, GroupId, Purpose, SinkError, Submitted, TrialAssignment, TrialEnd,
    TrialKey, TrialPlan, TrialPlanStep, TrialSink,
};
use serde::{Deserialize, Serialize};
use std::{
    collections::{BTreeMap, HashSet, VecDeque},
    fs::{File, OpenOptions},
    io::Write,
    path::{Path, PathBuf},
    sync::{Mutex, MutexGuard},
};
use tokio::sync::Notify;

/// One line of a round's file.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ValidationRow {
    /// Trial key as text.
    pub trial: String,
    /// Task name.
    pub task: String,
    /// Reward, or nothing for a dropped trial.
    pub reward: Option<f64>,
    /// Why it was dropped.
    pub dropped: Option<DropReason>,
    /// Answered model calls.
    pub turns: u32,
}

/// Result of a round.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ValidationScore {
    /// Mean over tasks of the mean reward of their samples; nothing when no trial has a verdict.
    pub mean_reward: Option<f64>,
    /// Tasks with at least one verdict.
    pub tasks: usize,
    /// Trials with a verdict.
    pub trials: usize,
    /// Trials without one.
    pub dropped: usize,
    /// Mean reward by task.
    pub by_task: BTreeMap<String, f64>,
}

struct State {
    waiting: VecDeque<TrialAssignment>,
    open: HashSet<TrialKey>,
    rows: BTreeMap<TrialKey, ValidationRow>,
    file: File,
}

/// One round; see the module head.
pub struct Validation {
    state: Mutex<State>,
    changed: Notify,
    path: PathBuf,
    max_attempts: u32,
}

impl Validation {
    /// Opens the round of `step` in `dir`. Trials that are already in its file are not run again.
    pub fn open(
        dir: &Path,
        step: u32,
        n_rows: usize,
        val_n: u32,
        seed: u64,
        max_attempts: u32,
    ) -> std::io::Result<Self> {
        std::fs::create_dir_all(dir)?;
        let path = dir.join(format!("step_{step:04}.jsonl"));
        let mut rows = BTreeMap::new();
        let mut whole = 0;
        if let Ok(text) = std::fs::read_to_string(&path) {
            for line in text.split_inclusive('\n') {
                // A line without its newline, or one that does not parse, is the torn end of a kill.
                let Ok(row) = serde_json::from_str::<ValidationRow>(line) else {
                    break;
                };
                let Ok(key) = row.trial.parse::<TrialKey>() else {
                    break;
                };
                if !line.ends_with('\n') {
                    break;
                }
                whole += line.len() as u64;
                rows.insert(key, row);
            }
        }
        let file = OpenOptions::new().create(true).append(true).open(&path)?;
        file.set_len(whole)?;
        let mut waiting = VecDeque::new();
        for row in 0..n_rows as u32 {
            for sample in 0..val_n {
                let key = TrialKey {
                    purpose: Purpose::Val { step },
                    group: GroupId(row.into()),
                    sample,
                };
                if !rows.contains_key(&key) {
                    let seed = trial_seed(seed, &key, 0);
                    waiting.push_back(TrialAssignment {
                        key,
                        attempt: 0,
                        row,
                        seed,
                    });
                }
            }
        }
        let open = waiting.iter().map(|a| a.key).collect();
        Ok(Self {
            state: Mutex::new(State {
                waiting,
                open,
                rows,
                file,
            }),
            changed: Notify::new(),
            path,
            max_attempts,
        })
    }

    /// Trials that have not ended.
    pub fn remaining(&self) -> usize {
        self.lock().open.len()
    }

    /// The score of the trials that ended.
    pub fn score(&self) -> ValidationScore {
        let state = self.lock();
        let mut tasks: BTreeMap<String, Vec<f64>> = BTreeMap::new();
        let mut dropped = 0;
        for row in state.rows.values() {
            match row.reward {
                Some(reward) => tasks.entry(row.task.clone()).or_default().push(reward),
                None => dropped += 1,
            }
        }
        let by_task: BTreeMap<_, _> = tasks
            .iter()
            .map(|(task, r)| (task.clone(), r.iter().sum::<f64>() / r.len() as f64))
            .collect();
        ValidationScore {
            mean_reward: (!by_task.is_empty()).then(|| by_task.values().sum::<f64>() / by_task.len() as f64),
            tasks: by_task.len(),
            trials: tasks.values().map(Vec::len).sum(),
            dropped,
            by_task,
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}

#[async_trait::async_trait]
impl TrialPlan for Validation {
    fn next(&self) -> TrialPlanStep {
        let mut state = self.lock();
        match state.waiting.pop_front() {
            Some(assignment) => TrialPlanStep::Run(assignment),
            None if state.open.is_empty() => TrialPlanStep::Finished,
            None => TrialPlanStep::Wait,
        }
    }

    fn retry(&self, failed: &TrialAssignment) -> Option<TrialAssignment> {
        let attempt = failed.attempt + 1;
        (attempt < self.max_attempts && self.is_wanted(&failed.key)).then(|| {
            // The same seed would draw the same tokens; a retry after a fault should not.
            TrialAssignment {
                attempt,
                seed: trial_seed(failed.seed, &failed.key, attempt),
                ..*failed
            }
        })
    }

    fn is_wanted(&self, key: &TrialKey) -> bool {
        self.lock().open.contains(key)
    }

    async fn changed(&self) {
        self.changed.notified().await;
    }
}

impl TrialSink for Validation {
    fn submit(&self, end: TrialEnd) -> Result<Submitted, SinkError> {
        let key = end.key();
        let row = match end {
            TrialEnd::Finished(t) => ValidationRow {
                trial: key.to_string(),
                task: t.task,
                reward: Some(t.outcome.reward),
                dropped: None,
                turns: t.turns,
            },
            TrialEnd::Dropped { task, reason, .. } => ValidationRow {
                trial: key.to_string(),
                task,
                reward: None,
                dropped: Some(reason),
                turns: 0,
            },
        };
        let mut state = self.lock();
        if !state.open.contains(&key) {
            return Ok(Submitted::Duplicate);
        }
        let fail = |source: std::io::Error| SinkError {
            key,
            problem: format!("cannot append to {}: {source}", self.path.display()),
            source: Some(source),
        };
        let mut line = serde_json::to_vec(&row).map_err(|e| fail(e.into()))?;
        line.push(b'\n');
        let whole = state.file.metadata().map_err(fail)?.len();
        if let Err(error) = state.file.write_all(&line).and_then(|()| state.file.sync_data()) {
            // Half a line must not stay in front of the next one.
            let _ = state.file.set_len(whole);
            return Err(fail(error));
        }
        state.open.remove(&key);
        state.rows.insert(key, row);
        drop(state);
        self.changed.notify_waiters();
        self.changed.notify_one();
        Ok(Submitted::Stored)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::{StopReason, Trajectory, TrialOutcome, TrialTiming};

    fn finished(key: TrialKey, reward: f64) -> TrialEnd {
        TrialEnd::Finished(Trajectory {
            key,
            attempt: 0,
            task: format!("t{}", key.group),
            session: "s".into(),
            outcome: TrialOutcome {
                reward,
                rewards: BTreeMap::new(),
                stop: StopReason::AgentCompleted,
            },
            sequences: vec![],
            turns: 1,
            malformed_tool_calls: 0,
            timing: TrialTiming::default(),
        })
    }

    #[test]
    fn a_round_goes_on_after_a_kill_with_a_torn_line() {
        let dir = tempfile::tempdir().unwrap();
        let round = Validation::open(dir.path(), 3, 2, 2, 7, 2).unwrap();
        let TrialPlanStep::Run(first) = round.next() else {
            panic!()
        };
        assert_eq!(round.submit(finished(first.key, 1.0)).unwrap(), Submitted::Stored);
        assert_eq!(
            round.submit(finished(first.key, 0.0)).unwrap(),
            Submitted::Duplicate
        );
        drop(round);
        let path = dir.path().join("step_0003.jsonl");
        let mut text = std::fs::read_to_string(&path).unwrap();
        text.push_str("{\"trial\":\"val0003-g0000");
        std::fs::write(&path, text).unwrap();

        let round = Validation::open(dir.path(), 3, 2, 2, 7, 2).unwrap();
        assert_eq!(round.remaining(), 3);
        let mut seen = HashSet::from([first.key]);
        while let TrialPlanStep::Run(a) = round.next() {
            assert!(seen.insert(a.key));
            let end = if a.key.group.0 == 0 {
                finished(a.key, 1.0)
            } else {
                TrialEnd::Dropped {
                    key: a.key,
                    attempt: 1,
                    task: "t1".into(),
                    reason: DropReason::EngineFailed,
                    detail: String::new(),
                }
            };
            round.submit(end).unwrap();
        }
        assert_eq!(round.next(), TrialPlanStep::Finished);
        let score = round.score();
        assert_eq!(
            (score.mean_reward, score.trials, score.dropped, score.tasks),
            (Some(1.0), 2, 2, 1)
        );
    }

    #[test]
    fn a_round_without_a_verdict_has_no_score() {
        let dir = tempfile::tempdir().unwrap();
        let round = Validation::open(dir.path(), 0, 1, 1, 7, 1).unwrap();
        let TrialPlanStep::Run(a) = round.next() else {
            panic!()
        };
        let (task, detail) = ("t".to_owned(), String::new());
        round
            .submit(TrialEnd::Dropped {
                key: a.key,
                attempt: 0,
                task,
                reason: DropReason::EnvSetupFailed,
                detail,
            })
            .unwrap();
        assert_eq!((round.score().mean_reward, round.score().dropped), (None, 1));
    }

    #[test]
    fn attempts_end_and_each_draws_other_tokens() {
        let dir = tempfile::tempdir().unwrap();
        let round = Validation::open(dir.path(), 0, 1, 1, 7, 2).unwrap();
        let TrialPlanStep::Run(first) = round.next() else {
            panic!()
        };
        let second = round.retry(&first).unwrap();
        assert_ne!(first.seed, second.seed);
        assert_eq!(round.retry(&second), None);
    }
}
