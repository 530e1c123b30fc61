//! Settings of the trainer, resolved.

use super::{AdamWConfig, TrainError};
use crate::base::RoutingShape;
use crate::train::algorithm::{
    AdvantageEstimator, ImportanceWeights, KlReward, LrSchedule, Objective, Rejection, TrajectoryFilter,
    ValueClip,
};

/// How gradients are computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BackwardMode {
    /// Block by block with recomputation (gradient checkpointing).
    BlockLoop,
    /// Block by block with the graph of every block kept from the forward pass: a quarter less work, and
    /// the activations of all blocks in memory (gradient checkpointing off).
    BlockGraphs,
    /// One autograd graph over the whole network: the oracle that the block loop is compared with.
    WholeGraph,
}

/// Settings of the critic.
#[derive(Clone, Debug, PartialEq)]
pub struct CriticConfig {
    /// Learning rate by step; its peak is `CRITIC_LR`.
    pub lr: LrSchedule,
    /// Bound of the change of a prediction (`CLIPRANGE_VALUE`).
    pub clip: ValueClip,
    /// Steps at the start in which only the critic learns (`CRITIC_WARMUP`).
    pub warmup_steps: u32,
}

impl Default for CriticConfig {
    fn default() -> Self {
        Self {
            lr: LrSchedule::constant(1e-5),
            clip: ValueClip(0.5),
            warmup_steps: 0,
        }
    }
}

/// Everything that a step depends on besides weights and data.
#[derive(Clone, Debug, PartialEq)]
pub struct TrainerConfig {
    /// Losses and their coefficients.
    pub objective: Objective,
    /// How rewards become advantages (`ADV_ESTIMATOR`).
    pub estimator: AdvantageEstimator,
    /// Settings of the critic; read when the estimator needs one.
    pub critic: CriticConfig,
    /// Penalty in the reward for leaving the reference policy; `None` needs no reference.
    pub kl_reward: Option<KlReward>,
    /// Which trials with a verdict are trained on.
    pub filter: TrajectoryFilter,
    /// Sampling temperature of the rollouts: logits are divided by it before the log-softmax. 0 means
    /// that the rollouts were greedy, whose log-probabilities are those at temperature 1.
    pub temperature: f64,
    /// Groups of one optimizer update (`TRAIN_MINI_BSZ`).
    pub mini_batch_groups: usize,
    /// Passes over a batch (`PPO_EPOCHS`).
    pub ppo_epochs: usize,
    /// Token budget of a micro-batch (`ACTOR_PPO_MAX_TOKEN_LEN_PER_GPU`). A longer sequence goes alone.
    pub max_token_len_per_gpu: usize,
    /// Sampled tokens whose logits exist at the same time.
    pub head_chunk_tokens: usize,
    /// Take the engine's log-probabilities as the denominator of the ratio.
    pub bypass_old_logprobs: bool,
    /// Weights of the policy loss that correct for the sampling policy; `None` trusts the ratio alone.
    pub importance: Option<ImportanceWeights>,
    /// Which tokens are too far from the sampling policy; `None` keeps all.
    pub rejection: Option<Rejection>,
    /// Take the experts of every token from the rollout (`ENABLE_R3`); `None` lets the router choose.
    pub replay: Option<RoutingShape>,
    /// Optimizer.
    pub optimizer: AdamWConfig,
    /// Learning rate by step.
    pub lr: LrSchedule,
    /// Global gradient norm is cut to this (`GRAD_CLIP`); infinity leaves it.
    pub max_grad_norm: f64,
    /// Longest response in tokens (`MAX_RESP`), for `response_length/clip_ratio`.
    pub max_response_len: usize,
    /// CPU threads of libtorch on the calling thread.
    pub num_threads: i32,
    /// How gradients are computed.
    pub backward: BackwardMode,
}

impl TrainerConfig {
    /// Refuses values that no step can work with.
    pub fn check(&self) -> Result<(), TrainError> {
        let wrong = |variable, value: String, problem| {
            Err(TrainError::Config {
                variable,
                value,
                problem,
            })
        };
        for (variable, value) in [
            ("TRAIN_MINI_BSZ", self.mini_batch_groups),
            ("PPO_EPOCHS", self.ppo_epochs),
            ("ACTOR_PPO_MAX_TOKEN_LEN_PER_GPU", self.max_token_len_per_gpu),
            ("HEAD_CHUNK_TOKENS", self.head_chunk_tokens),
        ] {
            if value == 0 {
                return wrong(variable, value.to_string(), "must be at least 1");
            }
        }
        if self.num_threads < 1 {
            return wrong(
                "TORCH_NUM_THREADS",
                self.num_threads.to_string(),
                "must be at least 1",
            );
        }
        if !(self.temperature >= 0.0 && self.temperature.is_finite()) {
            return wrong(
                "ROLLOUT_TEMPERATURE",
                self.temperature.to_string(),
                "must be 0 or a positive number",
            );
        }
        if self.max_grad_norm.is_nan() || self.max_grad_norm <= 0.0 {
            return wrong("GRAD_CLIP", self.max_grad_norm.to_string(), "must be above 0");
        }
        for (variable, peak) in [("ACTOR_LR", self.lr.peak), ("CRITIC_LR", self.critic.lr.peak)] {
            if !(peak >= 0.0 && peak.is_finite()) {
                return wrong(variable, peak.to_string(), "must be a number of at least 0");
            }
        }
        if self.bypass_old_logprobs && self.importance.is_some() {
            return wrong(
                "ROLLOUT_IS",
                "set".into(),
                "must be null with ROLLOUT_CORRECTION_BYPASS=True, whose ratio is already against the policy that sampled",
            );
        }
        Ok(())
    }

    /// True when a step asks the reference policy.
    pub fn needs_reference(&self) -> bool {
        self.objective.kl.is_some() || self.kl_reward.is_some()
    }

    /// Divisor of the logits.
    pub(super) fn logit_divisor(&self) -> f64 {
        if self.temperature == 0.0 {
            1.0
        } else {
            self.temperature
        }
    }
}
