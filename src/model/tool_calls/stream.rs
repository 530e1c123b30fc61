//! Parsing while text arrives.

use super::{ParsedReply, ToolCallFormat};
use serde_json::Value;

/// Releases text that certainly precedes every tool call; see the module documentation above.
///
/// The texts returned by [`StreamParser::push`] and the content returned by [`StreamParser::finish`],
/// joined, are the content of [`ToolCallFormat::parse`] of the whole text.
#[derive(Debug, Default)]
pub struct StreamParser {
    /// Everything so far.
    text: String,
    /// Bytes of `text` that were released.
    released: usize,
    /// An opening mark was seen.
    in_calls: bool,
}

impl StreamParser {
    /// A parser at the start of a reply.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds text; returns what may be shown now. Without `format` (a request without tools) all of it.
    pub fn push(&mut self, format: Option<&dyn ToolCallFormat>, piece: &str) -> String {
        self.text.push_str(piece);
        if self.in_calls {
            return String::new();
        }
        let rest = &self.text[self.released..];
        let end = match format {
            None => rest.len(),
            Some(format) => match rest.find(format.opening()) {
                Some(at) => {
                    self.in_calls = true;
                    at
                }
                None => rest.len() - partial_suffix(rest, format.opening()),
            },
        };
        let out = rest[..end].to_owned();
        self.released += end;
        out
    }

    /// The end: content not released yet, and the calls.
    pub fn finish(&mut self, format: Option<&dyn ToolCallFormat>, tools: Option<&[Value]>) -> ParsedReply {
        let mut reply = match format {
            Some(format) => format.parse(&self.text, tools),
            None => ParsedReply {
                content: self.text.clone(),
                ..ParsedReply::default()
            },
        };
        reply.content.drain(..self.released.min(reply.content.len()));
        reply
    }
}

/// Length of the longest end of `text` that is a proper beginning of `mark`.
pub(super) fn partial_suffix(text: &str, mark: &str) -> usize {
    (1..mark.len().min(text.len() + 1))
        .rev()
        .find(|n| text.as_bytes().ends_with(&mark.as_bytes()[..*n]))
        .unwrap_or(0)
}
