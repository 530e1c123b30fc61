//! Settings of advantages, losses and corrections, and the texts among them that are lists.

use super::{resolve::Resolver, values::*};
use crate::base::StopReason;
use serde::{Deserialize, Serialize};

/// Advantages and losses.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct AlgorithmSettings {
    /// `ADV_ESTIMATOR`.
    pub adv_estimator: AdvEstimator,
    /// `NORM_ADV_BY_STD_IN_GRPO`.
    pub norm_adv_by_std: bool,
    /// `GAMMA`: discount by token.
    pub gamma: f64,
    /// `LAM`: λ of generalised advantage estimation.
    pub lambda: f64,
    /// `POLICY_LOSS_MODE`.
    pub policy_loss_mode: PolicyLossMode,
    /// `CLIP_LOW`: the ratio is cut below `1 - CLIP_LOW`.
    pub clip_low: f64,
    /// `CLIP_HIGH`: the ratio is cut above `1 + CLIP_HIGH`.
    pub clip_high: f64,
    /// `CLIP_RATIO_C`: dual clip for negative advantages.
    pub clip_ratio_c: f64,
    /// `LOSS_AGG_MODE`.
    pub loss_agg_mode: LossAggMode,
    /// `ENTROPY_COEFF`.
    pub entropy_coeff: f64,
    /// `USE_KL_LOSS`.
    pub use_kl_loss: bool,
    /// `KL_LOSS_COEF`.
    pub kl_loss_coef: f64,
    /// `KL_LOSS_TYPE`.
    pub kl_loss_type: KlLossType,
    /// `USE_KL_IN_REWARD`: the penalty in the reward; `None` without.
    pub kl_reward: Option<KlRewardSettings>,
    /// `ROLLOUT_CORRECTION_BYPASS`: the ratio is against the policy that sampled.
    pub rollout_correction_bypass: bool,
    /// `ROLLOUT_IS`: importance weights; `None` without.
    pub importance: Option<ImportanceSettings>,
    /// `ROLLOUT_RS`, `ROLLOUT_RS_THRESHOLD`: criteria for staying in the loss; empty keeps all.
    pub rejection: Vec<RejectionSettings>,
    /// `TRAJ_FILTER_ENABLE`, `TRAJ_FILTER_DROP_REASONS`: trials that ended so are not trained on.
    pub filter: Vec<StopReason>,
    /// Critic of `ADV_ESTIMATOR=gae`.
    pub critic: CriticSettings,
}

/// Penalty in the reward for leaving the starting policy.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct KlRewardSettings {
    /// `KL_PENALTY`.
    pub estimator: KlLossType,
    /// `KL_COEF`.
    pub coefficient: f64,
    /// `KL_CTRL_TYPE`.
    pub control: KlControl,
    /// `KL_TARGET`, nats per token.
    pub target: f64,
    /// `KL_HORIZON`, trials.
    pub horizon: f64,
}

/// Importance weights of the policy loss.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ImportanceSettings {
    /// `ROLLOUT_IS`.
    pub level: RolloutIs,
    /// First number of a `lower_upper` threshold: weights outside become 0; `None` truncates.
    pub lower: Option<f64>,
    /// Upper bound of `ROLLOUT_IS_THRESHOLD`.
    pub upper: f64,
    /// `ROLLOUT_IS_BATCH_NORMALIZE`.
    pub normalize: bool,
}

/// One criterion of rejection.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct RejectionSettings {
    /// What is measured.
    pub criterion: RejectionCriterion,
    /// Lower bound of the ratio; `None` for the criteria that have none (`k2`, `k3`).
    pub lower: Option<f64>,
    /// Upper bound: of the ratio for `k1`, of the distance otherwise.
    pub upper: f64,
}

/// The critic.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct CriticSettings {
    /// `CRITIC_LR`: peak of its learning rate.
    pub lr: f64,
    /// `CRITIC_WARMUP`: steps at the start in which only the critic learns.
    pub warmup_steps: u32,
    /// `CLIPRANGE_VALUE`.
    pub clip: f64,
}

/// Reads all of them.
pub(super) fn read(r: &mut Resolver<'_>) -> AlgorithmSettings {
    let bypass = r.bool("ROLLOUT_CORRECTION_BYPASS");
    AlgorithmSettings {
        adv_estimator: r.choice("ADV_ESTIMATOR", AdvEstimator::from_name, AdvEstimator::Grpo),
        norm_adv_by_std: r.bool("NORM_ADV_BY_STD_IN_GRPO"),
        gamma: r.f64("GAMMA"),
        lambda: r.f64("LAM"),
        policy_loss_mode: r.choice(
            "POLICY_LOSS_MODE",
            PolicyLossMode::from_name,
            PolicyLossMode::Gspo,
        ),
        clip_low: r.f64("CLIP_LOW"),
        clip_high: r.f64("CLIP_HIGH"),
        clip_ratio_c: r.f64("CLIP_RATIO_C"),
        loss_agg_mode: r.choice(
            "LOSS_AGG_MODE",
            LossAggMode::from_name,
            LossAggMode::SeqMeanTokenMean,
        ),
        entropy_coeff: r.f64("ENTROPY_COEFF"),
        use_kl_loss: r.bool("USE_KL_LOSS"),
        kl_loss_coef: r.f64("KL_LOSS_COEF"),
        kl_loss_type: r.choice("KL_LOSS_TYPE", KlLossType::from_name, KlLossType::LowVarKl),
        kl_reward: kl_reward(r),
        rollout_correction_bypass: bypass,
        importance: importance(r, bypass),
        rejection: rejection(r),
        filter: filter(r),
        critic: CriticSettings {
            lr: r.f64("CRITIC_LR"),
            warmup_steps: r.opt_u32("CRITIC_WARMUP").unwrap_or_default(),
            clip: r.f64("CLIPRANGE_VALUE"),
        },
    }
}

fn kl_reward(r: &mut Resolver<'_>) -> Option<KlRewardSettings> {
    let on = r.bool("USE_KL_IN_REWARD");
    let settings = KlRewardSettings {
        estimator: r.choice("KL_PENALTY", KlLossType::from_name, KlLossType::Kl),
        coefficient: r.f64("KL_COEF"),
        control: r.choice("KL_CTRL_TYPE", KlControl::from_name, KlControl::Fixed),
        target: r.f64("KL_TARGET"),
        horizon: r.f64("KL_HORIZON"),
    };
    on.then_some(settings)
}

fn importance(r: &mut Resolver<'_>, bypass: bool) -> Option<ImportanceSettings> {
    let level = r.text("ROLLOUT_IS");
    let threshold = r.text("ROLLOUT_IS_THRESHOLD");
    let normalize = r.bool("ROLLOUT_IS_BATCH_NORMALIZE");
    let level = RolloutIs::from_name(&level?)?;
    if bypass {
        r.problem(
            "ROLLOUT_IS",
            format!(
                "is `{level}` and must be null with ROLLOUT_CORRECTION_BYPASS=True: there the ratio of the loss is \
                 already against the policy that sampled"
            ),
        );
    }
    let bounds = bounds(&threshold.unwrap_or_default()).and_then(|found| match found {
        (None, upper) if upper < 1.0 => Err(format!(
            "cuts every weight at {upper}, also those of tokens that the trainer's own policy sampled, which is 1"
        )),
        found => Ok(found),
    });
    match bounds {
        Ok((lower, upper)) => Some(ImportanceSettings {
            level,
            lower,
            upper,
            normalize,
        }),
        Err(problem) => {
            r.problem("ROLLOUT_IS_THRESHOLD", problem);
            None
        }
    }
}

/// `upper` or `lower_upper`; the error completes the sentence `NAME …`.
fn bounds(text: &str) -> Result<(Option<f64>, f64), String> {
    let number = |text: &str| {
        let number = text.trim().parse::<f64>().ok();
        number.filter(|n| n.is_finite() && *n > 0.0)
    };
    let found = match text.split_once('_') {
        Some((lower, upper)) => number(lower).zip(number(upper)).map(|(l, u)| (Some(l), u)),
        None => number(text).map(|upper| (None, upper)),
    };
    match found {
        Some((Some(lower), upper)) if lower > upper => Err(format!(
            "has the lower bound {lower} above the upper bound {upper}"
        )),
        Some((Some(lower), upper)) if lower > 1.0 || upper < 1.0 => Err(format!(
            "must have 1 between its bounds, the ratio of a token that the trainer's own policy sampled, and is `{text}`"
        )),
        Some(found) => Ok(found),
        None => Err(format!(
            "must be a number above 0 (`2.0`), or two with `_` between them (`0.5_2.0`), and is `{text}`"
        )),
    }
}

/// Names or numbers between commas or blanks, in brackets or not.
fn list(text: &str) -> Vec<&str> {
    let is_separator = |c: char| c == ',' || c.is_whitespace() || c == '[' || c == ']';
    text.split(is_separator).filter(|part| !part.is_empty()).collect()
}

fn rejection(r: &mut Resolver<'_>) -> Vec<RejectionSettings> {
    let names = r.text("ROLLOUT_RS");
    let thresholds = r.text("ROLLOUT_RS_THRESHOLD");
    let Some(names) = names else {
        return Vec::new();
    };
    match criteria(&names, thresholds.as_deref()) {
        Ok(criteria) => criteria,
        Err((variable, problem)) => {
            r.problem(variable, problem);
            Vec::new()
        }
    }
}

/// The variable that is wrong and what is wrong with it.
type ListProblem = (&'static str, String);

fn criteria(names: &str, thresholds: Option<&str>) -> Result<Vec<RejectionSettings>, ListProblem> {
    let names = list(names);
    let thresholds = thresholds.map(list).unwrap_or_default();
    if thresholds.len() != 1 && thresholds.len() != names.len() {
        return Err((
            "ROLLOUT_RS_THRESHOLD",
            format!(
                "must have one threshold for all of ROLLOUT_RS or one for each of its {} criteria, and has {}",
                names.len(),
                thresholds.len()
            ),
        ));
    }
    let one = |(place, name): (usize, &&str)| {
        let criterion = RejectionCriterion::from_name(name).ok_or_else(|| {
            let known = RejectionCriterion::NAMES.join(", ");
            ("ROLLOUT_RS", format!("has `{name}`; it takes {known}"))
        })?;
        let text = thresholds[place.min(thresholds.len() - 1)];
        let (lower, upper) = bounds(text).map_err(|problem| ("ROLLOUT_RS_THRESHOLD", problem))?;
        let lower = match (criterion.has_lower_bound(), lower) {
            // Symmetric in the logarithm.
            (true, lower) => Some(lower.unwrap_or(1.0 / upper)),
            (false, None) => None,
            (false, Some(_)) => {
                let problem = format!("is `{text}` for {name}, which has an upper bound alone");
                return Err(("ROLLOUT_RS_THRESHOLD", problem));
            }
        };
        Ok(RejectionSettings {
            criterion,
            lower,
            upper,
        })
    };
    names.iter().enumerate().map(one).collect()
}

fn filter(r: &mut Resolver<'_>) -> Vec<StopReason> {
    let on = r.bool("TRAJ_FILTER_ENABLE");
    let overlong = r.bool("TRAJ_FILTER_FILTER_OVERLONG");
    let reasons = r.string("TRAJ_FILTER_DROP_REASONS");
    if !on {
        return Vec::new();
    }
    let mut filter = match drop_reasons(&reasons) {
        Ok(filter) => filter,
        Err(problem) => {
            r.problem("TRAJ_FILTER_DROP_REASONS", problem);
            Vec::new()
        }
    };
    if overlong && !filter.contains(&StopReason::Overlong) {
        filter.push(StopReason::Overlong);
    }
    filter
}

/// Reasons of trials without a verdict are good names that add nothing: such trials never are trained on.
fn drop_reasons(text: &str) -> Result<Vec<StopReason>, String> {
    const ALWAYS: [&str; 6] = [
        "env_setup_failed",
        "agent_setup_failed",
        "verifier_failed",
        "verifier_timeout",
        "engine_failed",
        "lease_lost",
    ];
    let mut reasons = Vec::new();
    for name in list(text) {
        let reason = match name {
            "timeout" => StopReason::Timeout,
            "overlong" => StopReason::Overlong,
            "max_turns" | "max_turns_reached" => StopReason::MaxTurnsReached,
            "agent_crash" => StopReason::AgentCrash,
            name if ALWAYS.contains(&name) => continue,
            _ => {
                return Err(format!(
                    "has `{name}`; it takes timeout, overlong, max_turns_reached, agent_crash, and the reasons that \
                     always apply: {}",
                    ALWAYS.join(", ")
                ))
            }
        };
        if !reasons.contains(&reason) {
            reasons.push(reason);
        }
    }
    Ok(reasons)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn thresholds_are_one_number_or_two() {
        assert_eq!(bounds("2.0"), Ok((None, 2.0)));
        assert_eq!(bounds("0.5_2"), Ok((Some(0.5), 2.0)));
        assert!(bounds("3_2").unwrap_err().contains("above"));
        for outside in ["1.5_2.0", "0.2_0.9"] {
            assert!(bounds(outside).unwrap_err().contains("1 between"), "{outside}");
        }
        for wrong in ["", "0", "-1", "x", "0.5_", "nan", "0_2", "inf"] {
            assert!(bounds(wrong).unwrap_err().contains("0.5_2.0"), "{wrong}");
        }
    }

    #[test]
    fn criteria_take_one_threshold_or_one_each() {
        let got = criteria("token_k1,seq_mean_k3", Some("0.4_2.0,0.1")).unwrap();
        let want = [
            (RejectionCriterion::TokenK1, Some(0.4), 2.0),
            (RejectionCriterion::SeqMeanK3, None, 0.1),
        ];
        for (got, want) in got.iter().zip(want) {
            assert_eq!((got.criterion, got.lower, got.upper), want);
        }
        assert_eq!(criteria("seq_sum_k1", Some("4")).unwrap()[0].lower, Some(0.25));
        assert_eq!(criteria("token_k2, token_k3", Some("1")).unwrap().len(), 2);
        let problem = |names, thresholds| criteria(names, thresholds).unwrap_err();
        assert_eq!(problem("token_k1", None).0, "ROLLOUT_RS_THRESHOLD");
        assert_eq!(
            problem("token_k1,token_k2", Some("1,2,3")).0,
            "ROLLOUT_RS_THRESHOLD"
        );
        assert_eq!(problem("token_k2", Some("0.1_2")).0, "ROLLOUT_RS_THRESHOLD");
        let (variable, text) = problem("sequence", Some("1"));
        assert!(variable == "ROLLOUT_RS" && text.contains("seq_mean_k1"), "{text}");
    }

    #[test]
    fn reasons_are_read_in_any_list_form() {
        let want = vec![StopReason::Timeout, StopReason::MaxTurnsReached];
        for text in [
            "timeout,max_turns",
            "[timeout, env_setup_failed, max_turns_reached]",
            "timeout max_turns",
        ] {
            assert_eq!(drop_reasons(text), Ok(want.clone()), "{text}");
        }
        assert!(drop_reasons("agent_completed")
            .unwrap_err()
            .contains("agent_crash"));
        assert_eq!(drop_reasons(""), Ok(Vec::new()));
    }
}
