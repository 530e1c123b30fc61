//! Rotary position embeddings: which frequency each pair of a head turns with.
//!
//! Pair i of the first `dim` numbers of a head turns by `position · f_i` with `f_i = theta^(-2i/dim)`
//! (Su et al., 2021, "RoFormer"). Numbers behind `dim` are not turned.
//!
//! Contexts longer than those of the first training change the frequencies ([`RopeScaling`]). Only changes
//! that are the same for every text are supported: a key stays in a cache as it was turned. The kinds
//! `dynamic` and `longrope` depend on the length of the text and are refused.
//!
//! Multi-axis frequencies (`mrope_section` of the 3.5 family) give every axis the position of the token
//! where a sequence holds text alone, which is the plain rule; the sections are read and ignored.

use super::{keys::Keys, ModelError};
use serde_json::{json, Value};
use std::f64::consts::TAU;

/// Frequencies of a checkpoint.
#[derive(Clone, Debug, PartialEq)]
pub struct Rope {
    /// Base of the frequencies.
    pub theta: f64,
    /// Numbers of a head that turn, even.
    pub dim: usize,
    /// Change of the frequencies for contexts longer than those of the first training.
    pub scaling: Option<RopeScaling>,
}

/// `rope_type` of a checkpoint, where it is not `default`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum RopeScaling {
    /// `linear`: every frequency is divided by the factor (Chen et al., 2023, "Extending Context Window of
    /// Large Language Models via Position Interpolation").
    Linear {
        /// Stretching of all wavelengths.
        factor: f64,
    },
    /// `llama3`.
    Llama3(Llama3Scaling),
    /// `yarn`.
    Yarn(YarnScaling),
}

/// `rope_type = llama3` of Llama 3.1 and later: wavelengths above `original / low_freq_factor` are
/// stretched by `factor`, those below `original / high_freq_factor` are kept, and those between are
/// interpolated by how often they fit into the original context.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Llama3Scaling {
    /// Stretching of the long wavelengths.
    pub factor: f64,
    /// Turns within the original context below which a wavelength counts as long.
    pub low_freq_factor: f64,
    /// Turns within the original context above which a wavelength counts as short.
    pub high_freq_factor: f64,
    /// Context of the first training, in tokens.
    pub original: f64,
}

/// `rope_type = yarn` (Peng et al., 2023, "YaRN: Efficient Context Window Extension of Large Language
/// Models", section 3): pairs that turn more than `beta_fast` times within the original context keep their
/// frequency, those that turn less than `beta_slow` times are stretched by `factor`, and the share of the
/// stretched one rises linearly with the number of the pair between; queries and keys grow by
/// `attention_factor`, which their products have squared.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct YarnScaling {
    /// Stretching of the long wavelengths.
    pub factor: f64,
    /// Turns within the original context above which a pair is kept.
    pub beta_fast: f64,
    /// Turns within the original context below which a pair is stretched.
    pub beta_slow: f64,
    /// What cosines and sines are multiplied by.
    pub attention_factor: f64,
    /// Whether the ends of the ramp are rounded outwards to whole pairs.
    pub truncate: bool,
    /// Context of the first training, in tokens.
    pub original: f64,
}

impl Rope {
    /// `dim / 2` frequencies in radians a token.
    pub fn frequencies(&self) -> Vec<f64> {
        self.scaled(|i| self.theta.powf(-2.0 * i as f64 / self.dim as f64))
    }

    /// The frequencies of f32 programs, which round the exponent before they raise `theta` to it: where `dim`
    /// is not a power of 2, that moves them by up to 1e-6 of themselves.
    pub fn frequencies_f32(&self) -> Vec<f32> {
        let plain = |i: usize| {
            let exponent = (2 * i) as f32 / self.dim as f32;
            f64::from(1.0 / (self.theta as f32).powf(exponent))
        };
        self.scaled(plain).into_iter().map(|f| f as f32).collect()
    }

    fn scaled(&self, plain: impl Fn(usize) -> f64) -> Vec<f64> {
        let pairs = 0..self.dim / 2;
        match self.scaling {
            None => pairs.map(plain).collect(),
            Some(RopeScaling::Linear { factor }) => pairs.map(|i| plain(i) / factor).collect(),
            Some(RopeScaling::Llama3(scaling)) => pairs.map(|i| scaling.apply(plain(i))).collect(),
            Some(RopeScaling::Yarn(scaling)) => {
                let ramp = scaling.ramp(self.theta, self.dim);
                let mix = |i: usize| (1.0 - ramp(i)) * plain(i) + ramp(i) * plain(i) / scaling.factor;
                pairs.map(mix).collect()
            }
        }
    }

    /// What the cosines and sines of all angles are multiplied by.
    pub fn attention_factor(&self) -> f64 {
        match self.scaling {
            Some(RopeScaling::Yarn(scaling)) => scaling.attention_factor,
            _ => 1.0,
        }
    }

    /// Tokens of the longest context: `max_position_embeddings`, which checkpoints leave as it was before
    /// the frequencies were stretched by `linear` and `yarn`, but not by `llama3`.
    pub fn context_tokens(&self, max_position_embeddings: usize) -> usize {
        match self.scaling {
            None | Some(RopeScaling::Llama3(_)) => max_position_embeddings,
            Some(RopeScaling::Linear { factor }) => (max_position_embeddings as f64 * factor) as usize,
            Some(RopeScaling::Yarn(s)) => max_position_embeddings.max((s.original * s.factor) as usize),
        }
    }

    /// New files keep everything in `rope_parameters`; older ones have `rope_theta` and
    /// `partial_rotary_factor` beside `rope_scaling`. `default_partial` is None for families that turn
    /// whole heads.
    pub(super) fn read(
        keys: &Keys<'_>,
        head_dim: usize,
        default_partial: Option<f64>,
    ) -> Result<Self, ModelError> {
        let mut found: Option<(&str, Self)> = None;
        for key in ["rope_parameters", "rope_scaling"] {
            let Some(inner) = keys.object(key)?.filter(|inner| !inner.map.is_empty()) else {
                continue;
            };
            let rope = Self::read_from(keys, Some((key, &inner)), head_dim, default_partial)?;
            match &found {
                Some((other, before)) if *before != rope => {
                    let problem = format!("it contradicts `{other}`; keep one of the two");
                    return Err(keys.bad(key, problem));
                }
                _ => found = Some((key, rope)),
            }
        }
        match found {
            Some((_, rope)) => Ok(rope),
            None => Self::read_from(keys, None, head_dim, default_partial),
        }
    }

    fn read_from(
        keys: &Keys<'_>,
        inner: Option<(&str, &Keys<'_>)>,
        head_dim: usize,
        default_partial: Option<f64>,
    ) -> Result<Self, ModelError> {
        let mut theta = keys.number_or("rope_theta", 10_000.0)?;
        let mut partial = keys.number_or("partial_rotary_factor", default_partial.unwrap_or(1.0))?;
        let mut scaling = None;
        if let Some((key, inner)) = inner {
            theta = inner.number_or("rope_theta", theta)?;
            partial = inner.number_or("partial_rotary_factor", partial)?;
            scaling = RopeScaling::read(keys, key, inner)?;
        }
        if default_partial.is_none() && partial != 1.0 {
            return Err(keys.bad(
                "partial_rotary_factor",
                format!(
                    "{partial}: this family turns whole heads; other programs ignore the key or stop at it"
                ),
            ));
        }
        let dim = (head_dim as f64 * partial) as usize;
        if partial > 1.0 || dim == 0 || !dim.is_multiple_of(2) {
            return Err(keys.bad(
                "partial_rotary_factor",
                format!("{partial} of head_dim = {head_dim} gives {dim} rotating numbers; they must be an even number of at least 2"),
            ));
        }
        if theta < 1.0 {
            return Err(keys.bad(
                "rope_theta",
                format!("{theta}: frequencies must not grow from pair to pair; at least 1"),
            ));
        }
        Ok(Self { theta, dim, scaling })
    }
}

/// Why a kind that this program knows by name is refused.
fn why_not(kind: &str) -> &'static str {
    match kind {
        "dynamic" => {
            ": its frequencies depend on the length of the text, so that keys in a cache would have been turned \
             by others; up to max_position_embeddings tokens it changes nothing, and `default` may stand there"
        }
        "longrope" | "su" => {
            ": it has other frequencies for long texts than for short ones, so that keys in a cache would have \
             been turned by others"
        }
        _ => "",
    }
}

impl RopeScaling {
    /// From the object `inner` under `key`.
    fn read(keys: &Keys<'_>, key: &str, inner: &Keys<'_>) -> Result<Option<Self>, ModelError> {
        if inner.get("full_attention").is_some() {
            return Err(keys.bad(key, "frequencies by kind of layer are not supported"));
        }
        let kind = match inner.get("rope_type").or_else(|| inner.get("type")) {
            None => return Ok(None),
            Some(kind) => kind.as_str().unwrap_or("(not a string)"),
        };
        Ok(match kind {
            "default" => None,
            "linear" => Some(Self::Linear {
                factor: inner.number("factor")?,
            }),
            "llama3" => Some(Self::Llama3(Llama3Scaling::read(keys, inner)?)),
            "yarn" => Some(Self::Yarn(YarnScaling::read(keys, inner)?)),
            other => {
                return Err(keys.bad(
                    key,
                    format!(
                        "rope type `{other}` is not supported{} (supported: default, linear, llama3, yarn)",
                        why_not(other)
                    ),
                ))
            }
        })
    }

    /// As it stands in `rope_scaling`.
    pub(super) fn to_value(self) -> Value {
        match self {
            Self::Linear { factor } => json!({"rope_type": "linear", "factor": factor}),
            Self::Llama3(s) => json!({"rope_type": "llama3", "factor": s.factor,
                "low_freq_factor": s.low_freq_factor, "high_freq_factor": s.high_freq_factor,
                "original_max_position_embeddings": s.original as u64}),
            Self::Yarn(s) => json!({"rope_type": "yarn", "factor": s.factor, "beta_fast": s.beta_fast,
                "beta_slow": s.beta_slow, "attention_factor": s.attention_factor, "truncate": s.truncate,
                "original_max_position_embeddings": s.original as u64}),
        }
    }
}

/// Context of the first training: beside the other sizes, or in the object, or what the checkpoint has now.
fn original(keys: &Keys<'_>, inner: &Keys<'_>) -> Result<f64, ModelError> {
    const KEY: &str = "original_max_position_embeddings";
    for keys in [keys, inner] {
        if keys.get(KEY).is_some() {
            return keys.number(KEY);
        }
    }
    keys.number("max_position_embeddings")
}

impl Llama3Scaling {
    fn read(keys: &Keys<'_>, inner: &Keys<'_>) -> Result<Self, ModelError> {
        Ok(Self {
            factor: inner.number("factor")?,
            low_freq_factor: inner.number("low_freq_factor")?,
            high_freq_factor: inner.number("high_freq_factor")?,
            original: original(keys, inner)?,
        })
    }

    fn apply(self, frequency: f64) -> f64 {
        let turns = self.original * frequency / TAU;
        let long = frequency / self.factor;
        if turns < self.low_freq_factor {
            long
        } else if turns > self.high_freq_factor {
            frequency
        } else {
            let share = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor);
            (1.0 - share) * long + share * frequency
        }
    }
}

impl YarnScaling {
    /// Keys that are left out, or 0, have the paper's values. A `factor` of null is the ratio of the
    /// contexts. The attention factor is `0.1·ln(factor) + 1` ("YaRN", equation 22); with `mscale` and
    /// `mscale_all_dim` (DeepSeek-V2) it is the ratio of `0.1·m·ln(factor) + 1` for the two.
    fn read(keys: &Keys<'_>, inner: &Keys<'_>) -> Result<Self, ModelError> {
        let original = original(keys, inner)?;
        let factor = match inner.map.get("factor") {
            Some(Value::Null) => keys.number("max_position_embeddings")? / original,
            _ => inner.number("factor")?,
        };
        let some = |key: &str| match inner.get(key).and_then(Value::as_f64) {
            Some(0.0) => Ok(None),
            _ => inner.get(key).is_some().then(|| inner.number(key)).transpose(),
        };
        let growth = |m: f64| match factor > 1.0 {
            true => 0.1 * m * factor.ln() + 1.0,
            false => 1.0,
        };
        let attention_factor = match (
            inner.get("attention_factor"),
            some("mscale")?,
            some("mscale_all_dim")?,
        ) {
            (Some(_), _, _) => inner.number("attention_factor")?,
            (None, Some(one), Some(all)) => growth(one) / growth(all),
            _ => growth(1.0),
        };
        Ok(Self {
            factor,
            beta_fast: some("beta_fast")?.unwrap_or(32.0),
            beta_slow: some("beta_slow")?.unwrap_or(1.0),
            attention_factor,
            truncate: match inner.map.get("truncate") {
                Some(Value::Null) => false,
                _ => inner.flag_or("truncate", true)?,
            },
            original,
        })
    }

    /// Share of the stretched frequency by number of the pair, 0 to 1.
    fn ramp(self, theta: f64, dim: usize) -> impl Fn(usize) -> f64 {
        // The pair, as a fraction, that turns so often within the original context.
        let pair = |turns: f64| dim as f64 * (self.original / (turns * TAU)).ln() / (2.0 * theta.ln());
        let (mut low, mut high) = (pair(self.beta_fast), pair(self.beta_slow));
        if self.truncate {
            (low, high) = (low.floor(), high.ceil());
        }
        let (low, mut high) = (low.max(0.0), high.min(dim as f64 - 1.0));
        if low == high {
            // A step instead of a ramp.
            high += 0.001;
        }
        move |i| ((i as f64 - low) / (high - low)).clamp(0.0, 1.0)
    }
}
