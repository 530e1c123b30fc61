//! The two formats of a reward file.

use serde_json::Value;
use std::collections::BTreeMap;

/// A reward that cannot be used; the text found is shown, shortened.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RewardError {
    /// Neither file exists.
    #[error("it wrote neither /logs/verifier/reward.json nor /logs/verifier/reward.txt")]
    Missing,
    /// The file holds nothing.
    #[error("the reward file is empty")]
    Empty,
    /// Something else than a file lies there.
    #[error("{0} is not a regular file")]
    NotAFile(String),
    /// The file is much longer than any reward.
    #[error("{0} is longer than 32 KiB")]
    TooLong(String),
    /// The text is no number, or the JSON no flat map of numbers.
    #[error("the reward `{found}` is not {wanted}")]
    NotNumeric {
        /// What was read.
        found: String,
        /// What it should have been.
        wanted: &'static str,
    },
    /// NaN or infinite.
    #[error("the reward `{0}` is not finite")]
    NotFinite(String),
}

fn shown(text: &str) -> String {
    let text = text.trim();
    let mut short: String = text.chars().take(120).collect();
    if short.len() < text.len() {
        short.push('…');
    }
    short
}

/// Reads `reward.txt`: one finite number, as `{"reward": x}`.
pub fn parse_text(text: &str) -> Result<BTreeMap<String, f64>, RewardError> {
    if text.is_empty() {
        return Err(RewardError::Empty);
    }
    let reward: f64 = text.trim().parse().map_err(|_| RewardError::NotNumeric {
        found: shown(text),
        wanted: "a number",
    })?;
    if !reward.is_finite() {
        return Err(RewardError::NotFinite(shown(text)));
    }
    Ok(BTreeMap::from([("reward".to_owned(), reward)]))
}

/// Reads `reward.json`: a flat map of finite numbers (`true` and `false` are 1 and 0), not empty.
pub fn parse_json(text: &str) -> Result<BTreeMap<String, f64>, RewardError> {
    const WANTED: &str = "a flat JSON map of names to finite numbers";
    if text.is_empty() {
        return Err(RewardError::Empty);
    }
    let not_numeric = |found: &str| RewardError::NotNumeric {
        found: shown(found),
        wanted: WANTED,
    };
    let Ok(Value::Object(map)) = serde_json::from_str(text) else {
        return Err(not_numeric(text));
    };
    if map.is_empty() {
        return Err(not_numeric(text));
    }
    map.into_iter()
        .map(|(name, value)| {
            let number = match &value {
                Value::Number(n) => n.as_f64(),
                Value::Bool(b) => Some(f64::from(u8::from(*b))),
                _ => None,
            };
            let number = number.ok_or_else(|| not_numeric(&format!("{name}: {value}")))?;
            if number.is_finite() {
                Ok((name, number))
            } else {
                Err(RewardError::NotFinite(format!("{name}: {value}")))
            }
        })
        .collect()
}
