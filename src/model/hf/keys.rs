//! Typed access to the keys of one JSON file.

use super::ModelError;
use serde_json::{Map, Value};
use std::path::{Path, PathBuf};

/// No size of a network comes near; products of three of them fit into 64 bits no more than this allows.
const MAX_SIZE: u64 = 1 << 30;

/// An object of a file; `path` is for messages.
pub(super) struct Keys<'a> {
    pub map: &'a Map<String, Value>,
    pub path: &'a Path,
}

impl<'a> Keys<'a> {
    pub(super) fn bad(&self, key: &str, problem: impl Into<String>) -> ModelError {
        ModelError::Config {
            path: PathBuf::from(self.path),
            key: key.to_string(),
            problem: problem.into(),
        }
    }

    /// Absent and null are the same.
    pub(super) fn get(&self, key: &str) -> Option<&'a Value> {
        self.map.get(key).filter(|v| !v.is_null())
    }

    fn required(&self, key: &str) -> Result<&'a Value, ModelError> {
        self.get(key).ok_or_else(|| self.bad(key, "is missing"))
    }

    pub(super) fn object(&self, key: &str) -> Result<Option<Keys<'a>>, ModelError> {
        let Some(value) = self.get(key) else {
            return Ok(None);
        };
        match value.as_object() {
            Some(map) => Ok(Some(Keys { map, path: self.path })),
            None => Err(self.bad(key, format!("{value} is not an object"))),
        }
    }

    pub(super) fn text(&self, key: &str) -> Result<&'a str, ModelError> {
        let value = self.required(key)?;
        value
            .as_str()
            .ok_or_else(|| self.bad(key, format!("{value} is not a string")))
    }

    pub(super) fn size(&self, key: &str) -> Result<usize, ModelError> {
        let value = self.required(key)?;
        match value.as_u64() {
            Some(n) if n > MAX_SIZE => Err(self.bad(key, format!("{n} is larger than any model's"))),
            Some(n) if n > 0 => Ok(n as usize),
            _ => Err(self.bad(key, format!("{value} is not a positive integer"))),
        }
    }

    pub(super) fn size_or(&self, key: &str, default: usize) -> Result<usize, ModelError> {
        match self.get(key) {
            Some(_) => self.size(key),
            None => Ok(default),
        }
    }

    pub(super) fn number(&self, key: &str) -> Result<f64, ModelError> {
        let value = self.required(key)?;
        value
            .as_f64()
            .filter(|n| n.is_finite() && *n > 0.0)
            .ok_or_else(|| self.bad(key, format!("{value} is not a positive number")))
    }

    pub(super) fn number_or(&self, key: &str, default: f64) -> Result<f64, ModelError> {
        match self.get(key) {
            Some(_) => self.number(key),
            None => Ok(default),
        }
    }

    pub(super) fn flag_or(&self, key: &str, default: bool) -> Result<bool, ModelError> {
        match self.get(key) {
            None => Ok(default),
            Some(value) => value
                .as_bool()
                .ok_or_else(|| self.bad(key, format!("{value} is neither true nor false"))),
        }
    }

    /// A list of non-negative integers; empty when absent.
    pub(super) fn indices(&self, key: &str) -> Result<Vec<usize>, ModelError> {
        let bad = |v: &Value| self.bad(key, format!("{v} is not a list of layer numbers"));
        match self.get(key) {
            None => Ok(Vec::new()),
            Some(Value::Array(list)) => list
                .iter()
                .map(|v| v.as_u64().map(|n| n as usize).ok_or_else(|| bad(v)))
                .collect(),
            Some(value) => Err(bad(value)),
        }
    }

    /// A list of strings; None when absent.
    pub(super) fn texts(&self, key: &str) -> Result<Option<Vec<&'a str>>, ModelError> {
        let bad = |v: &Value| self.bad(key, format!("{v} is not a list of strings"));
        match self.get(key) {
            None => Ok(None),
            Some(Value::Array(list)) => list
                .iter()
                .map(|v| v.as_str().ok_or_else(|| bad(v)))
                .collect::<Result<_, _>>()
                .map(Some),
            Some(value) => Err(bad(value)),
        }
    }

    /// One token id or a list of them; empty when absent.
    pub(super) fn token_ids(&self, key: &str) -> Result<Vec<u32>, ModelError> {
        let one = |v: &Value| {
            v.as_u64()
                .and_then(|n| u32::try_from(n).ok())
                .ok_or_else(|| self.bad(key, format!("{v} is not a token id")))
        };
        match self.get(key) {
            None => Ok(Vec::new()),
            Some(Value::Array(list)) => list.iter().map(one).collect(),
            Some(value) => Ok(vec![one(value)?]),
        }
    }
}
