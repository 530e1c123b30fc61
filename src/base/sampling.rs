//! How tokens are drawn.

use serde::{Deserialize, Serialize};

/// Sampling parameters of one request. The recorded log-probability of a token is that of the
/// distribution after `temperature` and before `top_p` and `top_k` (which only cut the support), so
/// the trainer can recompute it from logits divided by the same temperature.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct SamplingParams {
    /// Divides the logits; 0 means greedy (log-probs are then those at temperature 1).
    pub temperature: f32,
    /// Nucleus: smallest set of tokens whose probability reaches this; 1.0 keeps all.
    pub top_p: f32,
    /// Keep the k most likely tokens; 0 keeps all (the configs write -1).
    pub top_k: u32,
    /// Seed of the request's own random stream: the same seed, prompt and weights give the same tokens,
    /// whatever else runs in the batch.
    pub seed: u64,
}

impl SamplingParams {
    /// Why these parameters cannot be sampled with.
    ///
    /// # Errors
    /// A text that names the parameter, its value and what it may be.
    pub fn check(&self) -> Result<(), String> {
        if !(self.temperature.is_finite() && self.temperature >= 0.0) {
            return Err(format!(
                "temperature is {}; it must be at least 0",
                self.temperature
            ));
        }
        if !(self.top_p > 0.0 && self.top_p <= 1.0) {
            return Err(format!(
                "top_p is {}; it must be above 0 and at most 1",
                self.top_p
            ));
        }
        Ok(())
    }
}

impl Default for SamplingParams {
    fn default() -> Self {
        Self {
            temperature: 1.0,
            top_p: 1.0,
            top_k: 0,
            seed: 0,
        }
    }
}
