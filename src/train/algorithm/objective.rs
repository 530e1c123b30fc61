//! The training objective of one sequence and its derivatives.
//!
//! `J = agg(policy loss) + KL_LOSS_COEF · agg(KL to the reference) − ENTROPY_COEFF · agg(entropy)`
//!
//! `agg` is [`Aggregation`]; the policy loss of GSPO is a mean over sequences in every mode
//! ([`PolicyLoss::aggregation`]). Sequences meet only in its factors, which depend on lengths and weights and
//! are known before the first forward pass ([`ObjectiveScale`]). So the derivatives of one sequence need
//! nothing of the others, and a mini-batch may be cut into micro-batches at will.

use super::{
    entropy::entropy_bonus, gspo::Gspo, ppo_clip::PpoClip, Aggregation, KlEstimator, SequenceShape,
    UnknownAlgorithm,
};

/// Losses of a sequence's tokens before aggregation.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct TokenLosses {
    /// Loss by token.
    pub loss: Vec<f64>,
    /// Derivative of a token's loss by its own log-probability.
    pub derivative: Vec<f64>,
    /// Tokens where the clipped term is in force.
    pub clipped: usize,
    /// Tokens where the dual clip is in force.
    pub clipped_lower: usize,
    /// Sum over tokens of `log π_old − log π`, an estimate of KL(old ‖ new).
    pub kl_sum: f64,
}

impl TokenLosses {
    pub(super) fn with_capacity(tokens: usize) -> Self {
        Self {
            loss: Vec::with_capacity(tokens),
            derivative: Vec::with_capacity(tokens),
            ..Self::default()
        }
    }
}

/// Surrogate of the policy gradient (`POLICY_LOSS_MODE`).
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum PolicyLoss {
    /// `vanilla`, also called `ppo`.
    Ppo(PpoClip),
    /// `gspo`.
    Gspo(Gspo),
}

impl PolicyLoss {
    /// From `POLICY_LOSS_MODE`, `CLIP_LOW`, `CLIP_HIGH` and `CLIP_RATIO_C`.
    pub fn from_mode(mode: &str, low: f64, high: f64, dual: f64) -> Result<Self, UnknownAlgorithm> {
        match mode {
            "vanilla" | "ppo" => Ok(Self::Ppo(PpoClip { low, high, dual })),
            "gspo" => Ok(Self::Gspo(Gspo { low, high })),
            other => Err(UnknownAlgorithm {
                variable: "POLICY_LOSS_MODE",
                value: other.to_owned(),
                known: "vanilla (ppo), gspo",
            }),
        }
    }

    /// How its token losses are summed where `LOSS_AGG_MODE` is `mode`: that of GSPO is an objective of
    /// sequences (Zheng et al. 2025, equation 5), so a long one never counts for more. verl does the same.
    pub fn aggregation(&self, mode: Aggregation) -> Aggregation {
        match self {
            Self::Ppo(_) => mode,
            Self::Gspo(_) => Aggregation::SeqMeanTokenMean,
        }
    }

    fn token_losses(&self, terms: &SequenceTerms<'_>) -> TokenLosses {
        match self {
            Self::Ppo(clip) => clip.token_losses(terms.logprobs, terms.old_logprobs, terms.advantages),
            Self::Gspo(gspo) => gspo.token_losses(terms.logprobs, terms.old_logprobs, terms.advantages),
        }
    }
}

/// KL term in the loss.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct KlLoss {
    /// Estimator (`KL_LOSS_TYPE`).
    pub estimator: KlEstimator,
    /// Factor (`KL_LOSS_COEF`).
    pub coefficient: f64,
}

/// What is minimised.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Objective {
    /// Surrogate.
    pub policy_loss: PolicyLoss,
    /// How token losses are summed (`LOSS_AGG_MODE`).
    pub aggregation: Aggregation,
    /// KL to the reference policy; `None` needs no reference.
    pub kl: Option<KlLoss>,
    /// Factor of the entropy bonus (`ENTROPY_COEFF`).
    pub entropy_coefficient: f64,
}

/// The sampled tokens of one sequence. All slices have the same length.
#[derive(Clone, Copy, Debug)]
pub struct SequenceTerms<'a> {
    /// Log-probabilities under the policy that is being trained.
    pub logprobs: &'a [f64],
    /// Log-probabilities that the ratio is taken against.
    pub old_logprobs: &'a [f64],
    /// Log-probabilities under the reference policy; read when the objective has a KL term.
    pub reference_logprobs: Option<&'a [f64]>,
    /// Entropies in nats.
    pub entropies: &'a [f64],
    /// Advantages.
    pub advantages: &'a [f64],
    /// Factors of the policy loss that correct for another sampling policy; constants.
    pub importance_weights: Option<&'a [f64]>,
}

/// Derivatives of the objective.
#[derive(Clone, Debug, PartialEq)]
pub struct SequenceDerivatives {
    /// By each sampled token's log-probability.
    pub logprobs: Vec<f64>,
    /// By each sampled token's entropy.
    pub entropies: Vec<f64>,
}

impl SequenceDerivatives {
    /// True where the sequence cannot move any parameter.
    pub fn is_zero(&self) -> bool {
        self.logprobs.iter().chain(&self.entropies).all(|d| *d == 0.0)
    }

    /// For a sequence of which only the tokens with `keep` were evaluated: the others have none.
    pub fn scattered(self, keep: &[bool]) -> Self {
        let spread = |kept: Vec<f64>| {
            let mut kept = kept.into_iter();
            let of = |keep: &bool| if *keep { kept.next().unwrap_or(0.0) } else { 0.0 };
            keep.iter().map(of).collect()
        };
        Self {
            logprobs: spread(self.logprobs),
            entropies: spread(self.entropies),
        }
    }
}

/// Aggregation factors of the sequences of one mini-batch.
#[derive(Clone, Debug)]
pub struct ObjectiveScale {
    /// Of the policy loss.
    policy: Vec<f64>,
    /// Of everything else.
    factors: Vec<f64>,
}

impl ObjectiveScale {
    /// For the sequences of a whole mini-batch, in order.
    pub fn new(objective: &Objective, mini_batch: &[SequenceShape]) -> Self {
        let mode = objective.aggregation;
        Self {
            policy: objective.policy_loss.aggregation(mode).coefficients(mini_batch),
            factors: mode.coefficients(mini_batch),
        }
    }
}

/// Running sums over the sequences of a mini-batch.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct ObjectiveSums {
    /// Aggregated policy loss.
    pub pg_loss: f64,
    /// Aggregated KL to the reference, without its coefficient.
    pub kl_loss: f64,
    /// Aggregated entropy.
    pub entropy: f64,
    /// The objective.
    pub loss: f64,
    /// Sampled tokens.
    pub tokens: usize,
    /// Tokens where the clipped term is in force.
    pub clipped: usize,
    /// Tokens where the dual clip is in force.
    pub clipped_lower: usize,
    /// Sum over tokens of `log π_old − log π`.
    pub ppo_kl_sum: f64,
}

impl Objective {
    /// Adds sequence `index` of the mini-batch to `sums` and returns its derivatives.
    ///
    /// # Panics
    /// When the objective has a KL term and `terms` has no reference log-probabilities: the caller
    /// decides both.
    pub fn evaluate(
        &self,
        terms: &SequenceTerms<'_>,
        scale: &ObjectiveScale,
        index: usize,
        sums: &mut ObjectiveSums,
    ) -> SequenceDerivatives {
        let (factor, policy_factor) = (scale.factors[index], scale.policy[index]);
        let policy = self.policy_loss.token_losses(terms);
        let importance = |t: usize| terms.importance_weights.map_or(1.0, |w| w[t]);
        let mut pg_loss = 0.0;
        let mut logprobs = Vec::with_capacity(policy.loss.len());
        for (t, (loss, derivative)) in policy.loss.iter().zip(&policy.derivative).enumerate() {
            pg_loss += policy_factor * loss * importance(t);
            logprobs.push(policy_factor * derivative * importance(t));
        }
        let mut kl_loss = 0.0;
        let mut kl_term = 0.0;
        if let Some(kl) = self.kl {
            let reference = terms
                .reference_logprobs
                .expect("an objective with a KL term is evaluated with reference log-probabilities");
            for (t, (&logprob, &reference)) in terms.logprobs.iter().zip(reference).enumerate() {
                let (value, derivative) = kl.estimator.penalty(logprob, reference);
                kl_loss += factor * value;
                logprobs[t] += kl.coefficient * factor * derivative;
            }
            kl_term = kl.coefficient * kl_loss;
        }
        let (entropy_term, entropy) = entropy_bonus(terms.entropies, self.entropy_coefficient, factor);
        sums.pg_loss += pg_loss;
        sums.kl_loss += kl_loss;
        sums.entropy += factor * terms.entropies.iter().sum::<f64>();
        sums.loss += pg_loss + kl_term + entropy_term;
        sums.tokens += terms.logprobs.len();
        sums.clipped += policy.clipped;
        sums.clipped_lower += policy.clipped_lower;
        sums.ppo_kl_sum += policy.kl_sum;
        SequenceDerivatives {
            logprobs,
            entropies: vec![entropy; terms.entropies.len()],
        }
    }
}

#[cfg(test)]
mod tests;
