//! Replies from a file: one JSON value a line, or one JSON list.
//!
//! | Value | Reply |
//! |---|---|
//! | `"text"` | the text, then the end-of-turn token |
//! | `{"text": "…"}` | the same |
//! | `{"text": "…", "end": false}` | the text alone: the reply ends at the limit on tokens |
//! | `{"token_ids": [1, 2]}` | these tokens |
//!
//! `delay_ms` is the time before the first token, `token_delay_ms` before each further one. In a text the
//! markup of the chat template (`<tool_call>`, `<think>`) becomes its tokens.

use super::ScriptedReply;
use crate::base::files;
use crate::model::tokenizer::{Tokenizer, TokenizerError};
use serde::Deserialize;
use std::{
    path::{Path, PathBuf},
    time::Duration,
};

/// A file of replies that cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ReplyFileError {
    /// It cannot be read.
    #[error("cannot read `{path}`: {source}")]
    Read {
        /// The file.
        path: PathBuf,
        /// Cause.
        #[source]
        source: std::io::Error,
    },
    /// An entry is wrong.
    #[error("`{path}`, reply {number}: {problem}")]
    Entry {
        /// The file.
        path: PathBuf,
        /// Counted from 1.
        number: usize,
        /// What is wrong with it.
        problem: String,
    },
    /// There is nothing in it.
    #[error("`{0}` has no reply")]
    Empty(PathBuf),
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Entry {
    Text(String),
    Reply(Reply),
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Reply {
    text: Option<String>,
    token_ids: Option<Vec<u32>>,
    end: Option<bool>,
    #[serde(default)]
    delay_ms: f64,
    #[serde(default)]
    token_delay_ms: f64,
}

/// Reads a file of replies. `end` is the token that ends a turn.
pub fn read_replies(
    path: &Path,
    tokenizer: &Tokenizer,
    end: u32,
) -> Result<Vec<ScriptedReply>, ReplyFileError> {
    let text = files::read_text(path).map_err(|source| ReplyFileError::Read {
        path: path.to_owned(),
        source,
    })?;
    let wrong = |number: usize, problem: String| ReplyFileError::Entry {
        path: path.to_owned(),
        number: number + 1,
        problem,
    };
    let entries: Vec<serde_json::Value> = if text.trim_start().starts_with('[') {
        serde_json::from_str(&text).map_err(|error| wrong(0, error.to_string()))?
    } else {
        let lines = text.lines().filter(|line| !line.trim().is_empty());
        let parse = |(n, line): (usize, &str)| {
            serde_json::from_str(line).map_err(|error| wrong(n, error.to_string()))
        };
        lines.enumerate().map(parse).collect::<Result<_, _>>()?
    };
    if entries.is_empty() {
        return Err(ReplyFileError::Empty(path.to_owned()));
    }
    let reply = |(number, value): (usize, serde_json::Value)| {
        let entry: Entry = serde_json::from_value(value).map_err(|_| {
            wrong(
                number,
                "must be a text, {\"text\": …} or {\"token_ids\": […]} with optional end, delay_ms, token_delay_ms"
                    .into(),
            )
        })?;
        make(entry, tokenizer, end).map_err(|problem| wrong(number, problem))
    };
    entries.into_iter().enumerate().map(reply).collect()
}

fn make(entry: Entry, tokenizer: &Tokenizer, end: u32) -> Result<ScriptedReply, String> {
    let reply = match entry {
        Entry::Text(text) => Reply {
            text: Some(text),
            token_ids: None,
            end: None,
            delay_ms: 0.0,
            token_delay_ms: 0.0,
        },
        Entry::Reply(reply) => reply,
    };
    let delay =
        |name: &str, ms: f64| Duration::try_from_secs_f64(ms / 1e3).map_err(|_| format!("`{name}` is {ms}"));
    let tokens = match (reply.text, reply.token_ids) {
        (Some(text), None) => {
            let ids = tokenizer.encode_rendered(&text);
            let mut ids = ids.map_err(|error: TokenizerError| error.to_string())?;
            if reply.end != Some(false) && ids.last() != Some(&end) {
                ids.push(end);
            }
            ids
        }
        (None, Some(ids)) => {
            if let Some(id) = ids.iter().find(|id| **id as usize >= tokenizer.vocab_size()) {
                return Err(format!(
                    "token {id} is not in the vocabulary of {} tokens",
                    tokenizer.vocab_size()
                ));
            }
            ids
        }
        _ => return Err("needs either `text` or `token_ids`".into()),
    };
    Ok(ScriptedReply {
        tokens,
        first_delay: delay("delay_ms", reply.delay_ms)?,
        token_delay: delay("token_delay_ms", reply.token_delay_ms)?,
        ..ScriptedReply::default()
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::tokenizer::testing;

    #[test]
    fn replies_are_texts_or_tokens_and_errors_name_their_number() {
        let dir = tempfile::tempdir().unwrap();
        testing::write_folder(dir.path());
        let tokenizer = Tokenizer::from_dir(dir.path()).unwrap();
        let end = tokenizer.token_to_id("<|im_end|>").unwrap();
        let path = dir.path().join("replies.jsonl");
        let read = |text: &str| {
            std::fs::write(&path, text).unwrap();
            read_replies(&path, &tokenizer, end).map_err(|error| error.to_string())
        };
        let hello = tokenizer.encode_text("hello").unwrap();
        let ended = [hello.clone(), vec![end]].concat();
        let replies = read(
            "\"hello\"\n\n{\"text\": \"hello\", \"end\": false, \"delay_ms\": 5}\n{\"token_ids\": [1, 2]}\n",
        )
        .unwrap();
        let tokens: Vec<_> = replies.iter().map(|r| r.tokens.clone()).collect();
        assert_eq!(tokens, [ended.clone(), hello, vec![1, 2]]);
        assert_eq!(replies[1].first_delay, Duration::from_millis(5));
        assert_eq!(read("[\"hello<|im_end|>\"]").unwrap()[0].tokens, ended);
        for (text, word) in [
            ("\"a\"\n{\"texts\": 1}", "reply 2"),
            ("{\"token_ids\": [99999]}", "99999"),
            ("{}", "either"),
            ("{\"text\": \"a\", \"delay_ms\": -1}", "delay_ms"),
            ("\"a\"\noops", "reply 2"),
            ("", "no reply"),
        ] {
            let error = read(text).err().unwrap();
            assert!(error.contains(word) && error.contains("replies.jsonl"), "{error}");
        }
    }
}
