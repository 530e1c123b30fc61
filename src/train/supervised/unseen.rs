//! Keeps the demo's tasks out of the supervised start: no transcript may have the instruction of a task
//! or run the commands of its solution.

use super::{families::Draft, transcripts::Transcript, InitError};
use crate::base::files;
use std::{collections::BTreeSet, path::PathBuf};

/// Instructions and solutions that transcripts must not repeat.
#[derive(Debug, Default)]
pub struct Unseen {
    instructions: BTreeSet<String>,
    solutions: BTreeSet<Vec<String>>,
}

impl Unseen {
    /// Reads `instruction.md` and `solution/solve.sh` of task folders.
    pub fn from_folders(folders: &[PathBuf]) -> Result<Self, InitError> {
        let mut unseen = Self::default();
        for folder in folders {
            let read = |name: &str| {
                let path = folder.join(name);
                files::read_text(&path).map_err(InitError::io(&path))
            };
            unseen.add(&read("instruction.md")?, &read("solution/solve.sh")?);
        }
        Ok(unseen)
    }

    /// Adds one task: the text of its instruction and of its solution script.
    pub fn add(&mut self, instruction: &str, solution: &str) {
        self.instructions.insert(instruction.trim().to_owned());
        let set_up =
            |line: &&str| line.is_empty() || line.starts_with(['#']) || ["set -e", "cd /app"].contains(line);
        let commands = solution.lines().map(str::trim).filter(|line| !set_up(line));
        self.solutions.insert(commands.map(str::to_owned).collect());
    }

    /// Number of tasks.
    pub fn len(&self) -> usize {
        self.instructions.len()
    }

    /// True without tasks.
    pub fn is_empty(&self) -> bool {
        self.instructions.is_empty()
    }

    /// True when a draft may be used: it is no task of the demo.
    pub fn admits(&self, draft: &Draft) -> bool {
        let solution: Vec<String> = draft.solution().into_iter().map(str::to_owned).collect();
        !self.instructions.contains(&draft.instruction) && !self.solutions.contains(&solution)
    }

    /// Fails when a transcript repeats a task. Called for every transcript that is trained on, so that
    /// the promise does not rest on how drafts are drawn.
    pub fn check(&self, transcript: &Transcript) -> Result<(), InitError> {
        let commands: Vec<String> = transcript.steps.iter().map(|s| s.command.clone()).collect();
        if self.instructions.contains(&transcript.instruction) || self.solutions.contains(&commands) {
            return Err(InitError::Repeats {
                instruction: transcript.instruction.clone(),
                commands: commands.join("; "),
            });
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::train::supervised::{families::Family, task_folder::demo_tasks, transcripts::Habits};
    use rand::SeedableRng;
    use rand_chacha::ChaCha8Rng;
    use std::path::Path;

    fn committed() -> Unseen {
        let tasks = Path::new(env!("CARGO_MANIFEST_DIR")).join("jobs/demo/tasks");
        let folders: Vec<PathBuf> = demo_tasks().iter().map(|(name, _)| tasks.join(name)).collect();
        Unseen::from_folders(&folders).expect("tasks")
    }

    #[test]
    fn a_transcript_of_a_task_is_refused() {
        let unseen = committed();
        let mut rng = ChaCha8Rng::seed_from_u64(0);
        for (name, draft) in demo_tasks() {
            assert!(!unseen.admits(&draft), "{name}");
            let mut transcript = Transcript::draw(&draft, &Habits::CAREFUL, &mut rng);
            assert!(unseen.check(&transcript).is_err(), "{name}: by instruction");
            transcript.instruction.push_str(" Please.");
            assert!(unseen.check(&transcript).is_err(), "{name}: by commands");
        }
    }

    #[test]
    fn drafts_that_are_admitted_pass() {
        let unseen = committed();
        let mut rng = ChaCha8Rng::seed_from_u64(0);
        let mut admitted = 0;
        for round in 0..2000 {
            let draft = Draft::draw(Family::ALL[round % 8], &mut rng);
            if unseen.admits(&draft) {
                admitted += 1;
                let transcript = Transcript::draw(&draft, &Habits::default(), &mut rng);
                unseen.check(&transcript).expect("admitted");
            }
        }
        assert!(admitted > 1800, "{admitted}");
    }
}
