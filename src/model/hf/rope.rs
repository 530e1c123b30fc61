//! Rotary position embeddings: which frequency each pair of a head turns with.
//!
//! Pair i of the first `dim` numbers of a head turns by `position · f_i` with `f_i = theta^(-2i/dim)`
//! (Su et al., 2021, "RoFormer"). Numbers behind `dim` are not turned.
//!
//! Multi-axis frequencies (`mrope_section` of the 3.5 family) give every axis the position of the token
//! where a sequence holds text alone, which is the plain rule; the sections are read and ignored.

use super::{keys::Keys, ModelError};

/// Frequencies of a checkpoint.
#[derive(Clone, Debug, PartialEq)]
pub struct Rope {
    /// Base of the frequencies.
    pub theta: f64,
    /// Numbers of a head that turn, even.
    pub dim: usize,
    /// Change of the frequencies for contexts longer than those of the first training.
    pub scaling: Option<LongContext>,
}

/// `rope_type = llama3` of Llama 3.1 and later: wavelengths above `original / low_freq_factor` are
/// stretched by `factor`, those below `original / high_freq_factor` are kept, and those between are
/// interpolated by how often they fit into the original context.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LongContext {
    /// Stretching of the long wavelengths.
    pub factor: f64,
    /// Turns within the original context below which a wavelength counts as long.
    pub low_freq_factor: f64,
    /// Turns within the original context above which a wavelength counts as short.
    pub high_freq_factor: f64,
    /// Context of the first training, in tokens.
    pub original: f64,
}

impl Rope {
    /// `dim / 2` frequencies in radians a token.
    pub fn frequencies(&self) -> Vec<f64> {
        (0..self.dim / 2)
            .map(|i| {
                let plain = self.theta.powf(-2.0 * i as f64 / self.dim as f64);
                self.scaling.map_or(plain, |scaling| scaling.apply(plain))
            })
            .collect()
    }

    /// New files keep everything in `rope_parameters`; older ones have `rope_theta` and
    /// `partial_rotary_factor` beside `rope_scaling`.
    pub(super) fn read(keys: &Keys<'_>, head_dim: usize, default_partial: f64) -> Result<Self, ModelError> {
        let mut theta = keys.number_or("rope_theta", 10_000.0)?;
        let mut partial = keys.number_or("partial_rotary_factor", default_partial)?;
        let mut scaling = None;
        for key in ["rope_parameters", "rope_scaling"] {
            let Some(inner) = keys.object(key)? else { continue };
            theta = inner.number_or("rope_theta", theta)?;
            partial = inner.number_or("partial_rotary_factor", partial)?;
            for name in ["rope_type", "type"] {
                match inner.get(name).map(|v| v.as_str().unwrap_or("(not a string)")) {
                    None | Some("default") => {}
                    Some("llama3") => scaling = Some(LongContext::read(&inner)?),
                    Some(other) => {
                        return Err(keys.bad(
                            key,
                            format!("rope type `{other}` is not supported (supported: default, llama3)"),
                        ))
                    }
                }
            }
        }
        let dim = (head_dim as f64 * partial) as usize;
        if partial > 1.0 || dim == 0 || !dim.is_multiple_of(2) {
            return Err(keys.bad(
                "partial_rotary_factor",
                format!("{partial} of head_dim = {head_dim} gives {dim} rotating numbers; they must be an even number of at least 2"),
            ));
        }
        Ok(Self { theta, dim, scaling })
    }
}

impl LongContext {
    fn read(keys: &Keys<'_>) -> Result<Self, ModelError> {
        Ok(Self {
            factor: keys.number("factor")?,
            low_freq_factor: keys.number("low_freq_factor")?,
            high_freq_factor: keys.number("high_freq_factor")?,
            original: keys.number("original_max_position_embeddings")?,
        })
    }

    fn apply(self, frequency: f64) -> f64 {
        let turns = self.original * frequency / std::f64::consts::TAU;
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
