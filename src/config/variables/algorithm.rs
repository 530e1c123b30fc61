//! Variables of the step: batch, advantages, losses, optimizer.

use super::{between, integer, number, row, whole, DefaultValue::*, Kind::*, Tier::*, Variable};
use crate::config::settings::values::{AdvEstimator, KlLossType, LossAggMode, LrScheduler, PolicyLossMode};

const BATCH: &str = "Batch";
const ALGORITHM: &str = "Algorithm";
const OPTIMIZER: &str = "Optimizer";

#[rustfmt::skip]
pub(super) const VARIABLES: &[Variable] = &[
    row(BATCH, "TRAIN_BSZ", whole(1, 65_536), Value("64"), "prompts", Essential,
        "Prompts of a step; each is one group of N_RESP trials."),
    row(BATCH, "TRAIN_MINI_BSZ", whole(1, 65_536), Derived("TRAIN_BSZ"), "prompts", Common,
        "Prompts of one optimizer update; it divides TRAIN_BSZ."),
    row(BATCH, "N_RESP", whole(1, 4096), Value("8"), "trials", Essential,
        "Trials of a prompt, compared with each other."),
    row(BATCH, "PPO_EPOCHS", whole(1, 1000), Value("1"), "passes", Advanced,
        "Passes over the batch of a step."),
    row(BATCH, "ACTOR_PPO_MAX_TOKEN_LEN_PER_GPU", integer(1), Derived("(MAX_PROMPT + MAX_RESP) / SP_SIZE"), "tokens", Common,
        "Tokens that are packed into one micro-batch; a longer sequence goes alone."),
    row(BATCH, "ENABLE_GRADIENT_CHECKPOINTING", Bool, Value("True"), "", Common,
        "Keep only the input of each block and compute the block again in the backward pass. False keeps each block's graph: faster, for more memory."),

    row(ALGORITHM, "ADV_ESTIMATOR", Choice(AdvEstimator::NAMES), Value("grpo"), "", Common,
        "How rewards become advantages. `grpo` compares the trials of a prompt."),
    row(ALGORITHM, "NORM_ADV_BY_STD_IN_GRPO", Bool, Value("True"), "", Common,
        "Divide a group's advantages by the standard deviation of its rewards."),
    row(ALGORITHM, "POLICY_LOSS_MODE", Choice(PolicyLossMode::NAMES), Value("gspo"), "", Common,
        "`vanilla`: clipped ratio per token. `gspo`: one length-normalised ratio per sequence."),
    row(ALGORITHM, "CLIP_LOW", between(0.0, 1.0), Value("3e-4"), "", Common,
        "The ratio is cut below 1 - CLIP_LOW. Token ratios need about 0.2, sequence ratios about 3e-4."),
    row(ALGORITHM, "CLIP_HIGH", between(0.0, 100.0), Value("4e-4"), "", Common,
        "The ratio is cut above 1 + CLIP_HIGH."),
    row(ALGORITHM, "CLIP_RATIO_C", between(1.0, 1e6), Value("3.0"), "", Advanced,
        "Second bound of the ratio where the advantage is negative (dual clip)."),
    row(ALGORITHM, "LOSS_AGG_MODE", Choice(LossAggMode::NAMES), Value("seq-mean-token-mean"), "", Common,
        "How token losses become one number."),
    row(ALGORITHM, "ROLLOUT_CORRECTION_BYPASS", Bool, Value("False"), "", Common,
        "Take the log-probabilities of the moment of sampling as the denominator of the ratio, instead of those of the policy before the update. Under async the clip then bounds the distance from the policy that sampled."),
    row(ALGORITHM, "ROLLOUT_IS_THRESHOLD", number(0.0), Value("2.0"), "", Advanced,
        "Largest weight of ROLLOUT_IS."),
    row(ALGORITHM, "USE_KL_IN_REWARD", Bool, Value("False"), "", Advanced,
        "Subtract the divergence from the reward instead of adding it to the loss.").only(&["False"]),
    row(ALGORITHM, "TRAJ_FILTER_FILTER_OVERLONG", Bool, Value("False"), "", Advanced,
        "Leave trials that reached the end of the window out of the loss.").only(&["False"]),
    row(ALGORITHM, "ENTROPY_COEFF", between(-10.0, 10.0), Value("0.0"), "", Common,
        "Weight of the entropy bonus."),
    row(ALGORITHM, "USE_KL_LOSS", Bool, Value("True"), "", Common,
        "Add the divergence from the starting policy to the loss."),
    row(ALGORITHM, "KL_LOSS_COEF", between(0.0, 1e3), Value("0.001"), "", Common,
        "Weight of that divergence."),
    row(ALGORITHM, "KL_LOSS_TYPE", Choice(KlLossType::NAMES), Value("low_var_kl"), "", Advanced,
        "Estimator of that divergence."),

    row(OPTIMIZER, "ACTOR_LR", between(0.0, 1.0), Value("1e-6"), "", Essential,
        "Learning rate of AdamW."),
    row(OPTIMIZER, "LR_SCHEDULER", Choice(LrScheduler::NAMES), Value("constant"), "", Common,
        "Course of the learning rate after the warm-up."),
    row(OPTIMIZER, "LR_WARMUP_STEPS", integer(0), Value("0"), "steps", Common,
        "Steps in which the learning rate rises from zero."),
    row(OPTIMIZER, "WEIGHT_DECAY", between(0.0, 10.0), Value("0.01"), "", Common,
        "Decoupled weight decay; norms have none."),
    row(OPTIMIZER, "ADAM_BETA1", between(0.0, 0.999999), Value("0.9"), "", Advanced,
        "Decay of the first moment."),
    row(OPTIMIZER, "ADAM_BETA2", between(0.0, 0.9999999), Value("0.999"), "", Advanced,
        "Decay of the second moment."),
    row(OPTIMIZER, "GRAD_CLIP", number(1e-9), Value("1.0"), "", Common,
        "Largest global norm of the gradient."),
];
