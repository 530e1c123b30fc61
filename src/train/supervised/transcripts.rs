//! Transcripts of the supervised start: an agent that is sometimes careful and sometimes not.
//!
//! Whether an agent acts, looks around first, stops early or slips is drawn independently of the task,
//! with the odds of [`Habits`]. So the policy learns every right step with substantial probability,
//! and what reinforcement has to change is a habit that all tasks share.

use super::families::{Draft, Step};
use rand::{seq::IndexedRandom, Rng};
use serde_json::{json, Value};

/// What the assistant says when it ends.
pub const FAREWELL: &str = "Done.";

/// The odds of careless behaviour.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Habits {
    /// Says that it is done without a command.
    pub idle: f64,
    /// Lists the folder first; half of those that do stop there.
    pub list: f64,
    /// Reads what it has to read, then stops.
    pub stop_early: f64,
    /// Runs one of the task's slips instead of the right command.
    pub slip: f64,
}

impl Default for Habits {
    fn default() -> Self {
        Self {
            idle: 0.25,
            list: 0.1,
            stop_early: 0.2,
            slip: 0.45,
        }
    }
}

impl Habits {
    /// Nothing careless: the solution, then the farewell.
    pub const CAREFUL: Habits = Habits {
        idle: 0.0,
        list: 0.0,
        stop_early: 0.0,
        slip: 0.0,
    };
}

/// One conversation: the task's instruction, the commands with their outputs, the farewell.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Transcript {
    /// The user's message.
    pub instruction: String,
    /// What the assistant ran, in order. The farewell follows.
    pub steps: Vec<Step>,
}

impl Transcript {
    /// Draws how an agent with these habits works on a task.
    pub fn draw<R: Rng>(draft: &Draft, habits: &Habits, rng: &mut R) -> Transcript {
        Transcript {
            instruction: draft.instruction.clone(),
            steps: draw_steps(draft, habits, rng),
        }
    }

    /// The commands in order.
    pub fn commands(&self) -> Vec<&str> {
        self.steps.iter().map(|step| step.command.as_str()).collect()
    }
}

fn draw_steps<R: Rng>(draft: &Draft, habits: &Habits, rng: &mut R) -> Vec<Step> {
    let mut steps = Vec::new();
    if rng.random_bool(habits.idle) {
        return steps;
    }
    if rng.random_bool(habits.list) {
        steps.push(Step {
            command: "ls".to_owned(),
            output: draft.listing(),
        });
        if rng.random_bool(0.5) {
            return steps;
        }
    }
    if let Some(read) = &draft.read {
        steps.push(read.clone());
        if rng.random_bool(habits.stop_early) {
            return steps;
        }
    }
    let last = match draft.slips.choose(rng) {
        Some(slip) if rng.random_bool(habits.slip) => slip,
        _ => &draft.act,
    };
    steps.push(last.clone());
    steps
}

/// A message of the assistant that runs a command, as the mini agent echoes it.
pub fn tool_call_message(command: &str) -> Value {
    json!({"role": "assistant", "content": null, "tool_calls": [
        {"id": "call", "type": "function",
         "function": {"name": "bash", "arguments": json!({"command": command}).to_string()}}]})
}

/// The tool's message for a step; the mini agent writes `[no output]` for a silent command.
pub fn tool_message(step: &Step) -> Value {
    let content = if step.output.is_empty() {
        "[no output]"
    } else {
        &step.output
    };
    json!({"role": "tool", "tool_call_id": "call", "content": content})
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::train::supervised::families::Family;
    use rand::SeedableRng;
    use rand_chacha::ChaCha8Rng;

    #[test]
    fn careful_agents_solve_and_the_default_ones_solve_less_than_half() {
        let mut rng = ChaCha8Rng::seed_from_u64(1);
        let mut solved = 0;
        let rounds = 4000;
        for round in 0..rounds {
            let draft = Draft::draw(Family::ALL[round % Family::ALL.len()], &mut rng);
            let careful = Transcript::draw(&draft, &Habits::CAREFUL, &mut rng);
            assert_eq!(careful.commands(), draft.solution());
            let usual = Transcript::draw(&draft, &Habits::default(), &mut rng);
            solved += usize::from(usual.steps.last() == Some(&draft.act));
        }
        // (1 - idle) (1 - list/2) (1 - slip), times (1 - stop_early) in two of eight families.
        let expected = 0.75 * 0.95 * 0.55 * (0.75 + 0.25 * 0.8);
        let share = solved as f64 / rounds as f64;
        assert!((share - expected).abs() < 0.03, "{share} instead of {expected}");
    }
}
