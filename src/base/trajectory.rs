//! The unit of training data.

use super::{SequenceRouting, StopReason, TrialKey};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// One trainable token sequence: a branch of a session from its first prompt token to its last
/// sampled token. All vectors have the same length T.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct TokenSequence {
    /// Prompt, sampled turns and environment turns in order.
    pub token_ids: Vec<u32>,
    /// True where the policy sampled the token and the loss counts it.
    pub loss_mask: Vec<bool>,
    /// Log-probability when it was sampled; 0.0 where the mask is false.
    pub logprobs: Vec<f32>,
    /// Weight version that sampled it; 0 where the mask is false.
    pub versions: Vec<u32>,
    /// Tokens before the first sampled one.
    pub prompt_len: u32,
    /// Share of the trial; the weights of a trial's sequences sum to 1.
    pub weight: f32,
    /// Which experts computed the tokens, where that was recorded (`ENABLE_R3`). Rows are large and lie in
    /// files: they are never part of a serialised sequence.
    #[serde(skip)]
    pub routing: Option<SequenceRouting>,
}

impl TokenSequence {
    /// Number of tokens.
    pub fn len(&self) -> usize {
        self.token_ids.len()
    }

    /// True without tokens.
    pub fn is_empty(&self) -> bool {
        self.token_ids.is_empty()
    }

    /// Number of sampled tokens.
    pub fn sampled(&self) -> usize {
        self.loss_mask.iter().filter(|m| **m).count()
    }

    /// Checks the invariants of the type; the text names the first one that fails.
    pub fn check(&self) -> Result<(), String> {
        let t = self.token_ids.len();
        if self.loss_mask.len() != t || self.logprobs.len() != t || self.versions.len() != t {
            return Err(format!(
                "lengths differ: {t} ids, {} mask, {} log-probs, {} versions",
                self.loss_mask.len(),
                self.logprobs.len(),
                self.versions.len()
            ));
        }
        let first = self.loss_mask.iter().position(|m| *m).unwrap_or(t);
        if self.prompt_len as usize != first {
            return Err(format!(
                "prompt_len is {} and the first sampled token is at {first}",
                self.prompt_len
            ));
        }
        if let Some(i) =
            (0..t).find(|&i| self.loss_mask[i] && !(self.logprobs[i].is_finite() && self.logprobs[i] <= 1e-3))
        {
            return Err(format!("log-prob at {i} is {}", self.logprobs[i]));
        }
        self.routing.as_ref().map_or(Ok(()), |routing| routing.check(t))
    }
}

/// Seconds by phase of a trial, named as in Harbor's results.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct TrialTiming {
    /// Sandbox start.
    pub env_setup: f64,
    /// Agent installation inside the sandbox.
    pub agent_setup: f64,
    /// Agent from start to end.
    pub agent_execute: f64,
    /// Verifier.
    pub verifier: f64,
    /// Whole trial.
    pub total: f64,
    /// Model calls inside `agent_execute`.
    pub model_inference: f64,
}

/// How a trial that produced a reward ended.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TrialOutcome {
    /// Scalar that training uses: `rewards["reward"]`, or the mean of all entries without that key.
    pub reward: f64,
    /// The verifier's numbers.
    pub rewards: BTreeMap<String, f64>,
    /// Why the agent stopped.
    pub stop: StopReason,
}

/// A finished trial with its tokens.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Trajectory {
    /// Which trial.
    pub key: TrialKey,
    /// Attempt that finished, from 0.
    pub attempt: u32,
    /// Task name from `task.toml`, or the folder name.
    pub task: String,
    /// Session id, which is also the name of the trial folder.
    pub session: String,
    /// Reward and stop reason.
    pub outcome: TrialOutcome,
    /// Trainable sequences; may be empty (an agent that never called the model).
    pub sequences: Vec<TokenSequence>,
    /// Answered model calls.
    pub turns: u32,
    /// Replies whose tool call could not be parsed.
    pub malformed_tool_calls: u32,
    /// Phase durations.
    pub timing: TrialTiming,
}
