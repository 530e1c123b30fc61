//! Server-sent events of a completion.

use crate::base::FinishReason;
use serde::Deserialize;

/// Cuts a byte stream into the `data` of its events.
#[derive(Default)]
pub(super) struct Events {
    pending: Vec<u8>,
}

impl Events {
    /// The data of the events that are complete with these bytes.
    pub(super) fn push(&mut self, bytes: &[u8]) -> Vec<Vec<u8>> {
        self.pending.extend_from_slice(bytes);
        let mut out = Vec::new();
        let mut start = 0;
        while let Some(length) = self.pending[start..].iter().position(|b| *b == b'\n') {
            let line = &self.pending[start..start + length];
            start += length + 1;
            if let Some(data) = line.trim_ascii_end().strip_prefix(b"data:") {
                out.push(data.trim_ascii_start().to_vec());
            }
        }
        self.pending.drain(..start);
        out
    }
}

#[derive(Deserialize)]
struct Completion {
    #[serde(default)]
    choices: Vec<Choice>,
    error: Option<serde_json::Value>,
}

#[derive(Deserialize)]
struct Choice {
    token_ids: Option<Vec<u32>>,
    logprobs: Option<Logprobs>,
    finish_reason: Option<String>,
}

#[derive(Deserialize)]
struct Logprobs {
    #[serde(default)]
    token_logprobs: Vec<Option<f32>>,
}

/// What one event says.
#[derive(Debug, PartialEq)]
pub(super) struct Chunk {
    /// Ids and log-probs.
    pub(super) tokens: Vec<(u32, f32)>,
    /// The end.
    pub(super) reason: Option<FinishReason>,
}

/// Reads an event's data; `None` for events without tokens. The error says what the backend lacks.
pub(super) fn chunk(data: &[u8]) -> Result<Option<Chunk>, String> {
    if data == b"[DONE]" {
        return Ok(None);
    }
    let completion: Completion = serde_json::from_slice(data)
        .map_err(|error| format!("the backend sent an event that is no completion: {error}"))?;
    if let Some(error) = completion.error {
        return Err(format!("the backend failed: {error}"));
    }
    let Some(choice) = completion.choices.into_iter().next() else {
        return Ok(None);
    };
    let reason = match choice.finish_reason.as_deref() {
        None => None,
        Some("stop") => Some(FinishReason::Stop),
        Some("length") => Some(FinishReason::Length),
        Some("abort") => Some(FinishReason::Abort),
        Some(other) => return Err(format!("the backend ended the generation with `{other}`")),
    };
    let logprobs = choice.logprobs.map_or(Vec::new(), |l| l.token_logprobs);
    let ids =
        match choice.token_ids {
            Some(ids) => ids,
            // The last event may have no token.
            None if reason.is_some() && logprobs.is_empty() => Vec::new(),
            None => return Err(
                "the backend returns no `token_ids` (return_token_ids of vLLM 0.10.2 and later): without \
                 them the sampled tokens cannot be recorded"
                    .into(),
            ),
        };
    if ids.len() != logprobs.len() {
        return Err(format!(
            "the backend sent {} token ids with {} log-probs",
            ids.len(),
            logprobs.len()
        ));
    }
    let mut tokens = Vec::with_capacity(ids.len());
    for (id, logprob) in ids.into_iter().zip(logprobs) {
        let logprob = logprob.ok_or_else(|| format!("the backend sent no log-prob of token {id}"))?;
        tokens.push((id, logprob));
    }
    Ok(Some(Chunk { tokens, reason }))
}
