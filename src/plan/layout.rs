//! From settings to the parallel plans that [`super::memory`] is asked about.
//!
//! | MODEL_ENGINE | State | Head |
//! |---|---|---|
//! | `fsdp` | f32 sharded over the trainer ranks, reference policy beside it; computation in MODEL_DTYPE | rows of 2,048 |
//! | `veomni` | the same trainer; a gathered layer holds the experts of one of EP_SIZE ranks | rows of 2,048 |
//! | `megatron` | f32 sharded over the trainer ranks, bf16 computation (not launched by this version) | whole: its loss is not fused |
//!
//! `fsdp` and `veomni` generate with the native engine, which reserves ENGINE_KV_CACHE_TOKENS at its start. Ranks
//! that share a sequence (SP_SIZE) share its activations: a rank has ACTOR_PPO_MAX_TOKEN_LEN_PER_GPU tokens, or its
//! part of a sequence that is longer than theirs together.

use super::memory::{Backward, EnginePlan, TrainPlan};
use crate::config::{
    values::{AdvEstimator, ModelDtype, ModelEngine},
    Settings,
};

/// States of a delta net that the native engine reserves for a sequence: its own and two snapshots.
const NATIVE_STATES: u64 = 3;

/// Rows of logits that the native trainer holds at a time.
const HEAD_ROWS: u64 = 2048;

/// The trainer's plan.
pub fn train_plan(s: &Settings, gpu: bool) -> TrainPlan {
    // A sequence longer than the budget of a micro-batch goes alone, and its ranks share it.
    let share = s.window_tokens().div_ceil(u64::from(s.topology.sp_size.max(1)));
    let tokens = u64::from(s.batch.max_token_len_per_gpu).max(share);
    let kept_blocks = if s.batch.gradient_checkpointing {
        0
    } else {
        u64::MAX
    };
    let whole = TrainPlan {
        shards: u64::from(s.train_ranks().max(1)),
        expert_shards: 1,
        weight_bytes: 4,
        gradient_bytes: 4,
        moment_bytes: 8,
        master_bytes: 0,
        reference_bytes: 0,
        critic_bytes: if s.algorithm.adv_estimator == AdvEstimator::Gae {
            4 + 4 + 8
        } else {
            0
        },
        compute_bytes: 2,
        tokens,
        kept_blocks,
        backward: Backward::Autograd,
        head_rows: u64::MAX,
        gpu,
    };
    match s.run.model_engine {
        ModelEngine::Fsdp | ModelEngine::Veomni => TrainPlan {
            expert_shards: u64::from(s.plan.ep_size.max(1)),
            reference_bytes: if s.algorithm.use_kl_loss || s.algorithm.kl_reward.is_some() {
                4
            } else {
                0
            },
            compute_bytes: compute_bytes(s, gpu),
            head_rows: HEAD_ROWS,
            ..whole
        },
        ModelEngine::Megatron => whole,
    }
}

/// Bytes of a number that is computed with.
fn compute_bytes(s: &Settings, gpu: bool) -> u64 {
    match (s.model.dtype, gpu) {
        (Some(ModelDtype::F32), _) | (None, false) => 4,
        (Some(ModelDtype::Bf16), _) | (None, true) => 2,
    }
}

/// An engine replica's plan. The engine of this version reserves its whole cache at the start; one that
/// takes what is left must at least hold one sequence.
pub fn engine_plan(s: &Settings, gpu: bool) -> EnginePlan {
    let (number_bytes, cache_tokens, sequences, states) = match s.run.model_engine {
        ModelEngine::Fsdp | ModelEngine::Veomni => (
            if gpu { compute_bytes(s, gpu) } else { 4 },
            s.engine.kv_cache_tokens,
            u64::from(s.engine.max_num_seqs),
            NATIVE_STATES,
        ),
        ModelEngine::Megatron => (2, s.window_tokens(), 1, 1),
    };
    EnginePlan {
        tensor_parallel: u64::from(s.plan.gen_tp),
        number_bytes,
        cache_tokens,
        sequences,
        states,
        gpu,
    }
}
