//! Settings become the configurations of trainer and algorithms.

use super::*;
use crate::config::{self, LoadRequest};

/// Settings of a sound run with overrides.
fn settings(set: &[&str]) -> Settings {
    let folder = tempfile::tempdir().unwrap();
    let config = folder.path().join("run.env");
    std::fs::write(
        &config,
        "PROJECT_NAME=p\nEXP_NAME=e\nMODEL_PATH=m\nTRAIN_FILES=t.parquet\nNGPUS_PER_NODE=1\nTRAIN_BSZ=8\n\
         MAX_PROMPT=256\nMAX_RESP=512\n",
    )
    .unwrap();
    let request = LoadRequest {
        set: set.iter().map(|s| (*s).to_owned()).collect(),
        ..LoadRequest::isolated(config, folder.path())
    };
    config::load(&request).unwrap().settings
}

fn config(set: &[&str]) -> TrainerConfig {
    trainer(&settings(set), 100, 1, None)
}

#[test]
fn every_estimator_gets_its_constants() {
    let constants = ["GAMMA=0.9", "LAM=0.8", "NORM_ADV_BY_STD_IN_GRPO=False"];
    let with = |name: &str| {
        let name = format!("ADV_ESTIMATOR={name}");
        config(&[constants[0], constants[1], constants[2], &name]).estimator
    };
    assert_eq!(with("grpo"), AdvantageEstimator::Grpo { divide_by_std: false });
    assert_eq!(with("rloo"), AdvantageEstimator::Rloo);
    let plus_plus = AdvantageEstimator::ReinforcePlusPlus { gamma: 0.9 };
    assert_eq!(with("reinforce_plus_plus"), plus_plus);
    let baseline = AdvantageEstimator::ReinforcePlusPlusBaseline;
    assert_eq!(with("reinforce_plus_plus_baseline"), baseline);
    let gae = AdvantageEstimator::Gae {
        gamma: 0.9,
        lambda: 0.8,
    };
    assert_eq!(with("gae"), gae);
}

#[test]
fn nothing_is_corrected_penalised_or_filtered_by_default() {
    let plain = config(&["USE_KL_LOSS=False"]);
    assert!(!plain.needs_reference());
    assert_eq!((plain.importance, plain.rejection), (None, None));
    assert_eq!(
        (plain.kl_reward, plain.filter),
        (None, TrajectoryFilter::default())
    );
    assert!(config(&["USE_KL_LOSS=True"]).needs_reference());
}

#[test]
fn corrections_and_penalties_carry_their_bounds() {
    let got = config(&[
        "USE_KL_LOSS=False",
        "USE_KL_IN_REWARD=True",
        "KL_COEF=0.02",
        "KL_PENALTY=mse",
        "KL_CTRL_TYPE=adaptive",
        "KL_TARGET=0.3",
        "KL_HORIZON=500",
        "ROLLOUT_IS=token",
        "ROLLOUT_IS_THRESHOLD=0.5_3",
        "ROLLOUT_RS=seq_mean_k1,token_k3",
        "ROLLOUT_RS_THRESHOLD=2,0.7",
    ]);
    assert!(got.needs_reference());
    let penalty = got.kl_reward.unwrap();
    assert_eq!((penalty.estimator, penalty.coefficient), (KlEstimator::K2, 0.02));
    let adaptive = penalty.adaptive.unwrap();
    assert_eq!((adaptive.target, adaptive.horizon), (0.3, 500.0));
    let importance = got.importance.unwrap();
    assert_eq!(importance.level, ImportanceLevel::Token);
    let (lower, upper) = (0.5, 3.0);
    assert_eq!(importance.bounds, WeightBounds::Mask { lower, upper });
    let criteria = got.rejection.unwrap().criteria;
    let first = (criteria[0].extent, criteria[0].distance, criteria[0].upper);
    assert_eq!(first, (Extent::SequenceMean, Distance::K1, 2f64.ln()));
    assert!((criteria[0].lower + 2f64.ln()).abs() < 1e-15);
    let second = (criteria[1].extent, criteria[1].distance, criteria[1].upper);
    assert_eq!(second, (Extent::Token, Distance::K3, 0.7));
    assert_eq!(criteria[1].lower, f64::NEG_INFINITY);

    let cut = config(&["ROLLOUT_IS=sequence", "ROLLOUT_IS_BATCH_NORMALIZE=True"]);
    let importance = cut.importance.unwrap();
    assert_eq!(importance.level, ImportanceLevel::Sequence);
    assert_eq!(importance.bounds, WeightBounds::Truncate { upper: 2.0 });
    assert!(importance.normalize);
}

#[test]
fn every_criterion_of_rejection_means_what_its_name_says() {
    use crate::config::settings::values::RejectionCriterion;
    for name in RejectionCriterion::NAMES {
        let set = [&format!("ROLLOUT_RS={name}")[..], "ROLLOUT_RS_THRESHOLD=0.5"];
        let criterion = config(&set).rejection.unwrap().criteria[0];
        let extent = match criterion.extent {
            Extent::Token => "token",
            Extent::SequenceSum => "seq_sum",
            Extent::SequenceMean => "seq_mean",
            Extent::SequenceMax => "seq_max",
        };
        let distance = format!("{:?}", criterion.distance).to_lowercase();
        assert_eq!(format!("{extent}_{distance}"), *name);
        assert_eq!(criterion.name, *name);
        assert_eq!(criterion.lower == f64::NEG_INFINITY, !name.ends_with("k1"));
    }
}

#[test]
fn filter_critic_and_schedule() {
    use crate::base::StopReason;
    let got = config(&[
        "TRAJ_FILTER_ENABLE=True",
        "TRAJ_FILTER_DROP_REASONS=agent_crash",
        "TRAJ_FILTER_FILTER_OVERLONG=True",
        "CRITIC_LR=0.002",
        "CRITIC_WARMUP=3",
        "CLIPRANGE_VALUE=0.4",
        "ACTOR_LR=0.001",
        "LR_SCHEDULER=linear",
        "LR_WARMUP_STEPS=4",
        "LR_MIN_RATIO=0.5",
    ]);
    let stops = [
        StopReason::AgentCompleted,
        StopReason::AgentCrash,
        StopReason::Overlong,
        StopReason::Timeout,
    ];
    let kept: Vec<bool> = stops.iter().map(|stop| got.filter.keeps(*stop)).collect();
    assert_eq!(kept, [true, false, false, true]);
    assert_eq!((got.critic.warmup_steps, got.critic.clip), (3, ValueClip(0.4)));
    for (schedule, peak) in [(got.lr, 0.001), (got.critic.lr, 0.002)] {
        assert!((schedule.rate(1) - peak / 4.0).abs() < 1e-15);
        assert!((schedule.rate(4) - peak).abs() < 1e-15);
        assert!((schedule.rate(10_000) - peak / 2.0).abs() < 1e-15);
    }
}
