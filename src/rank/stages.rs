//! From [`Settings`] to the resolved structs of the stages. One function a stage, nothing else: a stage
//! never sees `Settings`, and what a variable means for it can be read here in one line.

use super::{run_lock::host_name, serving};
use crate::{
    base::RoutingShape,
    config::settings::{
        values::{
            AdvEstimator, KlControl, KlLossType, LossAggMode, LrScheduler, PolicyLossMode,
            RejectionCriterion, RolloutIs,
        },
        Settings,
    },
    model::hf::ModelConfig,
    rollout::trial::{PurposeConfig, TrialRunnerConfig},
    serve::{
        engine::remote::RemoteConfig,
        proxy::{routing::RoutingCapture, ProxyConfig},
    },
    train::{
        algorithm::{
            correction::{Criterion, Distance, Extent, ImportanceLevel, WeightBounds},
            gspo::Gspo,
            ppo_clip::PpoClip,
            AdaptiveKl, AdvantageEstimator, Aggregation, ImportanceWeights, KlEstimator, KlLoss, KlReward,
            LrKind, LrSchedule, Objective, PolicyLoss, Rejection, TrajectoryFilter, ValueClip,
        },
        buffer::BufferConfig,
        trainer::{AdamWConfig, BackwardMode, CriticConfig, TrainerConfig},
    },
};
use anyhow::Context;
use std::{path::PathBuf, time::Duration};

/// Sampled tokens whose logits exist at the same time: 2,048 rows of a 150k vocabulary are 1.2 GB in f32.
const HEAD_CHUNK_TOKENS: usize = 2048;
/// A shard is closed at this size, so that old ones can be deleted.
const SHARD_BYTES: u64 = 256 << 20;
/// Trials wait this long for room in HARBOR_TRIALS_DIR; less than what [`trial_deadline`] allows beside the agent.
const ROOM_DEADLINE: Duration = Duration::from_secs(600);
/// Installing the agent copies one file.
const AGENT_SETUP_TIMEOUT: Duration = Duration::from_secs(60);

/// The objective that `POLICY_LOSS_MODE`, `LOSS_AGG_MODE` and `USE_KL_LOSS` describe.
pub fn objective(settings: &Settings) -> Objective {
    let a = &settings.algorithm;
    Objective {
        policy_loss: match a.policy_loss_mode {
            PolicyLossMode::Vanilla => PolicyLoss::Ppo(PpoClip {
                low: a.clip_low,
                high: a.clip_high,
                dual: a.clip_ratio_c,
            }),
            PolicyLossMode::Gspo => PolicyLoss::Gspo(Gspo {
                low: a.clip_low,
                high: a.clip_high,
            }),
        },
        aggregation: match a.loss_agg_mode {
            LossAggMode::TokenMean => Aggregation::TokenMean,
            LossAggMode::SeqMeanTokenMean => Aggregation::SeqMeanTokenMean,
            LossAggMode::SeqMeanTokenSum => Aggregation::SeqMeanTokenSum,
        },
        kl: a.use_kl_loss.then_some(KlLoss {
            estimator: kl_estimator(a.kl_loss_type),
            coefficient: a.kl_loss_coef,
        }),
        entropy_coefficient: a.entropy_coeff,
    }
}

fn kl_estimator(name: KlLossType) -> KlEstimator {
    match name {
        KlLossType::LowVarKl | KlLossType::K3 => KlEstimator::K3,
        KlLossType::Kl | KlLossType::K1 => KlEstimator::K1,
        KlLossType::Mse | KlLossType::K2 => KlEstimator::K2,
        KlLossType::Abs => KlEstimator::Abs,
    }
}

/// How `ADV_ESTIMATOR` turns rewards into advantages.
pub fn estimator(settings: &Settings) -> AdvantageEstimator {
    let a = &settings.algorithm;
    match a.adv_estimator {
        AdvEstimator::Grpo => AdvantageEstimator::Grpo {
            divide_by_std: a.norm_adv_by_std,
        },
        AdvEstimator::Rloo => AdvantageEstimator::Rloo,
        AdvEstimator::ReinforcePlusPlus => AdvantageEstimator::ReinforcePlusPlus { gamma: a.gamma },
        AdvEstimator::ReinforcePlusPlusBaseline => AdvantageEstimator::ReinforcePlusPlusBaseline,
        AdvEstimator::Gae => AdvantageEstimator::Gae {
            gamma: a.gamma,
            lambda: a.lambda,
        },
    }
}

/// Penalty in the reward, when `USE_KL_IN_REWARD` is on.
fn kl_reward(settings: &Settings) -> Option<KlReward> {
    let penalty = settings.algorithm.kl_reward.as_ref()?;
    Some(KlReward {
        estimator: kl_estimator(penalty.estimator),
        coefficient: penalty.coefficient,
        adaptive: (penalty.control == KlControl::Adaptive).then_some(AdaptiveKl {
            target: penalty.target,
            horizon: penalty.horizon,
        }),
    })
}

/// Weights of the policy loss, when `ROLLOUT_IS` is set.
fn importance(settings: &Settings) -> Option<ImportanceWeights> {
    let importance = settings.algorithm.importance.as_ref()?;
    let upper = importance.upper;
    Some(ImportanceWeights {
        level: match importance.level {
            RolloutIs::Token => ImportanceLevel::Token,
            RolloutIs::Sequence => ImportanceLevel::Sequence,
        },
        bounds: match importance.lower {
            None => WeightBounds::Truncate { upper },
            Some(lower) => WeightBounds::Mask { lower, upper },
        },
        normalize: importance.normalize,
    })
}

/// Rejection from the policy loss, when `ROLLOUT_RS` is set.
fn rejection(settings: &Settings) -> Option<Rejection> {
    use RejectionCriterion as C;
    let criterion = |s: &crate::config::settings::RejectionSettings| {
        let (extent, distance) = match s.criterion {
            C::TokenK1 => (Extent::Token, Distance::K1),
            C::TokenK2 => (Extent::Token, Distance::K2),
            C::TokenK3 => (Extent::Token, Distance::K3),
            C::SeqSumK1 => (Extent::SequenceSum, Distance::K1),
            C::SeqSumK2 => (Extent::SequenceSum, Distance::K2),
            C::SeqSumK3 => (Extent::SequenceSum, Distance::K3),
            C::SeqMeanK1 => (Extent::SequenceMean, Distance::K1),
            C::SeqMeanK2 => (Extent::SequenceMean, Distance::K2),
            C::SeqMeanK3 => (Extent::SequenceMean, Distance::K3),
            C::SeqMaxK2 => (Extent::SequenceMax, Distance::K2),
            C::SeqMaxK3 => (Extent::SequenceMax, Distance::K3),
        };
        // Bounds of ratios are bounds of their logarithm.
        let (lower, upper) = match s.lower {
            Some(lower) => (lower.ln(), s.upper.ln()),
            None => (f64::NEG_INFINITY, s.upper),
        };
        Criterion {
            name: s.criterion.name(),
            extent,
            distance,
            lower,
            upper,
        }
    };
    let criteria: Vec<_> = settings.algorithm.rejection.iter().map(criterion).collect();
    (!criteria.is_empty()).then_some(Rejection { criteria })
}

/// What routing replay records and trains with: on for a mixture of experts unless `ENABLE_R3` says otherwise.
pub fn replay(settings: &Settings, model: &ModelConfig) -> anyhow::Result<Option<RoutingShape>> {
    let Some(experts) = model.experts.filter(|_| settings.plan.enable_r3 != Some(false)) else {
        return Ok(None);
    };
    let shape = RoutingShape {
        num_experts: experts.num_experts as u32,
        layers: model.num_sparse_layers() as u32,
        top_k: experts.top_k as u32,
    };
    if shape.layers == 0 {
        return Ok(None);
    }
    let checked = shape.check().map_err(anyhow::Error::msg);
    checked.context("ENABLE_R3: set False to train without").map(Some)
}

/// The trainer.
pub fn trainer(
    settings: &Settings,
    total_steps: u32,
    threads: i32,
    replay: Option<RoutingShape>,
) -> TrainerConfig {
    let optim = &settings.optim;
    let critic = &settings.algorithm.critic;
    let schedule = |peak| LrSchedule {
        kind: match optim.scheduler {
            LrScheduler::Constant => LrKind::Constant,
            LrScheduler::Cosine => LrKind::Cosine,
            LrScheduler::Linear => LrKind::Linear,
        },
        peak,
        warmup_steps: u64::from(optim.warmup_steps),
        total_steps: Some(u64::from(total_steps)),
        min_ratio: optim.min_ratio,
    };
    TrainerConfig {
        objective: objective(settings),
        estimator: estimator(settings),
        critic: CriticConfig {
            lr: schedule(critic.lr),
            clip: ValueClip(critic.clip),
            warmup_steps: critic.warmup_steps,
        },
        kl_reward: kl_reward(settings),
        filter: TrajectoryFilter::new(settings.algorithm.filter.iter().copied()),
        temperature: f64::from(settings.sampling.temperature),
        mini_batch_groups: settings.batch.train_mini_bsz as usize,
        ppo_epochs: settings.batch.ppo_epochs as usize,
        max_token_len_per_gpu: settings.batch.max_token_len_per_gpu as usize,
        head_chunk_tokens: HEAD_CHUNK_TOKENS,
        bypass_old_logprobs: settings.algorithm.rollout_correction_bypass,
        importance: importance(settings),
        rejection: rejection(settings),
        replay,
        optimizer: AdamWConfig {
            beta1: optim.beta1,
            beta2: optim.beta2,
            weight_decay: optim.weight_decay,
            ..AdamWConfig::default()
        },
        lr: schedule(optim.lr),
        max_grad_norm: optim.grad_clip,
        max_response_len: settings.data.max_response_tokens as usize,
        num_threads: threads,
        backward: if settings.batch.gradient_checkpointing {
            BackwardMode::BlockLoop
        } else {
            BackwardMode::BlockGraphs
        },
    }
}

/// The buffer.
pub fn buffer(settings: &Settings, n_rows: u32, total_steps: u32) -> BufferConfig {
    BufferConfig {
        dir: settings.paths.run.join("buffer"),
        n_resp: settings.batch.n_resp,
        train_bsz: settings.batch.train_bsz,
        staleness: settings.rollout.staleness,
        total_steps,
        n_rows,
        seed: settings.run.seed,
        max_attempts: settings.max_attempts(),
        roll_bytes: SHARD_BYTES,
    }
}

/// Trials.
pub fn trials(settings: &Settings, owner: &str) -> TrialRunnerConfig {
    let agent = &settings.agent;
    TrialRunnerConfig {
        trials_dir: settings.paths.trials.clone(),
        run: format!("{}/{}", settings.run.project_name, settings.run.exp_name),
        owner: owner.to_owned(),
        train: PurposeConfig {
            sampling: settings.sampling.params(),
            agent_timeout_max: agent.max_timeout,
        },
        val: PurposeConfig {
            sampling: settings.validation.sampling.params(),
            agent_timeout_max: settings.validation.agent_max_timeout,
        },
        max_turns: agent.max_iterations,
        max_total_tokens: settings.data.max_prompt_tokens + settings.data.max_response_tokens,
        max_tokens_per_turn: settings.engine.max_tokens_per_turn,
        max_consecutive_no_tool: agent.max_consecutive_no_tool,
        agent_timeout_multiplier: agent.timeout_multiplier,
        verifier_timeout_multiplier: agent.verifier_timeout_multiplier,
        agent_setup_timeout: AGENT_SETUP_TIMEOUT,
        override_cpus: settings.sandbox.override_cpus,
        override_memory_mb: settings.sandbox.override_memory_mb,
        pids_limit: Some(settings.sandbox.pids_limit),
        room_deadline: ROOM_DEADLINE,
    }
}

/// The proxy of a run. Rows of routing lie beside the shards that they end up in.
pub fn proxy(settings: &Settings, replay: Option<RoutingShape>) -> anyhow::Result<ProxyConfig> {
    let socket = node_folder(settings)?.join("proxy.sock");
    Ok(ProxyConfig {
        routing: replay.map(|shape| RoutingCapture {
            dir: settings.paths.run.join("routing"),
            shape,
        }),
        ..serving::proxy(settings, serving::address(settings)?, socket)
    })
}

/// Eight hexadecimal digits that stand for the run folder.
fn run_tag(settings: &Settings) -> String {
    format!(
        "{:08x}",
        crc32fast::hash(settings.paths.run.as_os_str().as_encoded_bytes())
    )
}

/// Owner of leases and sandboxes: this run on this node, the same in every attempt.
pub fn owner(settings: &Settings) -> String {
    format!("{}-{}", host_name(), run_tag(settings))
}

/// This run's folder on the node's own disk, for the proxy's socket and the files of sandboxes. Its path is
/// short enough for a unix socket (107 bytes) and the same in every attempt.
pub fn node_folder(settings: &Settings) -> anyhow::Result<PathBuf> {
    use std::os::unix::fs::PermissionsExt;
    // SAFETY: geteuid has no preconditions.
    let user = unsafe { libc::geteuid() };
    let folder = std::env::temp_dir().join(format!("legorl-{user}-{}", run_tag(settings)));
    std::fs::create_dir_all(&folder)
        .and_then(|()| std::fs::set_permissions(&folder, std::fs::Permissions::from_mode(0o700)))
        .with_context(|| format!("cannot make {}; TMPDIR moves it", folder.display()))?;
    Ok(folder)
}

/// Replicas on other ranks.
pub fn remote() -> RemoteConfig {
    RemoteConfig::default()
}

/// Longest time in which a trial ends, all attempts included: what a wait for a batch may take.
pub fn trial_deadline(settings: &Settings) -> Duration {
    let build_and_verify = Duration::from_secs(1800);
    (settings.agent.max_timeout + build_and_verify) * settings.max_attempts()
}

/// What a run must not change between attempts, as `KEY=VALUE` lines; a checkpoint of another one is refused.
pub fn fingerprint(settings: &Settings, model: &crate::model::hf::ModelConfig) -> String {
    format!(
        "TRAIN_BSZ={}\nN_RESP={}\nSEED={}\nTRAIN_FILES={}\nconfig.json={:08x}",
        settings.batch.train_bsz,
        settings.batch.n_resp,
        settings.run.seed,
        settings.data.train_files.display(),
        crc32fast::hash(model.to_value().to_string().as_bytes())
    )
}

#[cfg(test)]
mod tests;
