//! Validation trials: every row of `VAL_FILES`, `VAL_N` samples each, at one policy version.
//!
//! [`Validation`] is plan and sink of one such round. Ended trials are appended to
//! `validation/step_NNNN.jsonl`, one line each, so that a round that was killed goes on where it was.
//! A dropped trial (infrastructure) leaves the score and is counted; it is never a zero.
//!
//! A score is one of one policy sampled in one way. Lines of a round with other sampling stay in the file and are
//! passed over, and so are those of rows and samples that the round does not have. A run that goes on from step N
//! makes the weights of later steps anew: [`set_aside_after`] moves their rounds away.

use crate::base::{
    order::trial_seed, DropReason, GroupId, Purpose, SamplingParams, SinkError, Submitted, TrialAssignment,
    TrialEnd, TrialKey, TrialPlan, TrialPlanStep, TrialSink,
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
    /// How it was sampled; nothing in lines of earlier versions.
    #[serde(default)]
    pub sampling: Option<SamplingParams>,
}

/// What a round consists of.
#[derive(Clone, Debug)]
pub struct Round {
    /// Step of the weights.
    pub step: u32,
    /// Rows of `VAL_FILES`.
    pub n_rows: usize,
    /// Samples of a row.
    pub val_n: u32,
    /// How they are sampled.
    pub sampling: SamplingParams,
    /// Seed of the run.
    pub seed: u64,
    /// Attempts of a trial at most.
    pub max_attempts: u32,
}

/// Moves the rounds of steps after `step` to `step_NNNN.superseded.jsonl`: the weights that they scored are made anew.
///
/// # Errors
/// The folder cannot be read, or a file not moved.
pub fn set_aside_after(dir: &Path, step: u32) -> std::io::Result<()> {
    let entries = match std::fs::read_dir(dir) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(()),
        entries => entries?,
    };
    for entry in entries {
        let path = entry?.path();
        let name = path
            .file_name()
            .and_then(|name| name.to_str())
            .unwrap_or_default();
        let number = name.strip_prefix("step_").and_then(|n| n.strip_suffix(".jsonl"));
        if number
            .and_then(|n| n.parse::<u32>().ok())
            .is_some_and(|n| n > step)
        {
            std::fs::rename(&path, path.with_extension("superseded.jsonl"))?;
        }
    }
    Ok(())
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
    sampling: SamplingParams,
    max_attempts: u32,
}

impl Validation {
    /// Opens a round in `dir`. Trials that are already in its file are not run again.
    pub fn open(dir: &Path, round: &Round) -> std::io::Result<Self> {
        let step = round.step;
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
                let is_asked = key.group.0 < round.n_rows as u64 && key.sample < round.val_n;
                if is_asked && row.sampling == Some(round.sampling) {
                    rows.insert(key, row);
                }
            }
        }
        let file = OpenOptions::new().create(true).append(true).open(&path)?;
        file.set_len(whole)?;
        let mut waiting = VecDeque::new();
        for row in 0..round.n_rows as u32 {
            for sample in 0..round.val_n {
                let key = TrialKey {
                    purpose: Purpose::Val { step },
                    group: GroupId(row.into()),
                    sample,
                };
                if !rows.contains_key(&key) {
                    let seed = trial_seed(round.seed, &key, 0);
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
            sampling: round.sampling,
            max_attempts: round.max_attempts,
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
                sampling: Some(self.sampling),
            },
            TrialEnd::Dropped { task, reason, .. } => ValidationRow {
                trial: key.to_string(),
                task,
                reward: None,
                dropped: Some(reason),
                turns: 0,
                sampling: Some(self.sampling),
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

    fn like(step: u32, n_rows: usize, val_n: u32, max_attempts: u32) -> Round {
        Round {
            step,
            n_rows,
            val_n,
            sampling: SamplingParams::default(),
            seed: 7,
            max_attempts,
        }
    }

    /// Runs what is left, with this reward; how many trials that were.
    fn finish(round: &Validation, reward: f64) -> usize {
        let mut count = 0;
        while let TrialPlanStep::Run(a) = round.next() {
            round.submit(finished(a.key, reward)).unwrap();
            count += 1;
        }
        count
    }

    #[test]
    fn a_score_is_of_the_weights_and_the_sampling_that_the_run_has() {
        let dir = tempfile::tempdir().unwrap();
        let open = |round: &Round| Validation::open(dir.path(), round).unwrap();
        for step in [5, 6] {
            assert_eq!(finish(&open(&like(step, 3, 2, 1)), 0.25), 6);
        }
        // The run goes on from step 5: that round is the same weights', the later one is not.
        set_aside_after(dir.path(), 5).unwrap();
        assert!(dir.path().join("step_0006.superseded.jsonl").is_file());
        assert_eq!(open(&like(5, 3, 2, 1)).remaining(), 0);
        let again = open(&like(6, 3, 2, 1));
        assert_eq!(finish(&again, 0.75), 6);
        assert_eq!(again.score().mean_reward, Some(0.75));
        // Another temperature is another score, and fewer samples or rows are those alone.
        let mut hot = like(6, 3, 2, 1);
        hot.sampling.temperature = 1.5;
        assert_eq!(finish(&open(&hot), 0.5), 6);
        assert_eq!(open(&hot).score().mean_reward, Some(0.5));
        hot.val_n = 1;
        assert_eq!(open(&hot).score().trials, 3);
        hot.n_rows = 2;
        assert_eq!(open(&hot).score().trials, 2);
        // A folder that is not there has no rounds.
        set_aside_after(&dir.path().join("none"), 0).unwrap();
    }

    #[test]
    fn a_round_goes_on_after_a_kill_with_a_torn_line() {
        let dir = tempfile::tempdir().unwrap();
        let round = Validation::open(dir.path(), &like(3, 2, 2, 2)).unwrap();
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

        let round = Validation::open(dir.path(), &like(3, 2, 2, 2)).unwrap();
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
        let round = Validation::open(dir.path(), &like(0, 1, 1, 1)).unwrap();
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
        let round = Validation::open(dir.path(), &like(0, 1, 1, 2)).unwrap();
        let TrialPlanStep::Run(first) = round.next() else {
            panic!()
        };
        let second = round.retry(&first).unwrap();
        assert_ne!(first.seed, second.seed);
        assert_eq!(round.retry(&second), None);
    }
}
