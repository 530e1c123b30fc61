//! Tool calls in a model's text: the formats, and parsing while tokens still arrive.
//!
//! A [`ToolCallFormat`] takes a whole reply apart. [`StreamParser`] gives the same result piece by
//! piece: text that certainly belongs to no call is released at once; from the first opening mark on
//! everything is held back until the reply ends, because one malformed call makes the whole rest plain
//! text ([`ParsedReply::malformed`]) and what was sent cannot be taken back.

mod hermes;
mod stream;
#[cfg(test)]
mod tests;

pub use hermes::Hermes;
pub use stream::StreamParser;

use serde_json::Value;
use std::sync::Arc;

/// One call, as OpenAI names its parts.
#[derive(Clone, Debug, PartialEq)]
pub struct ToolCall {
    /// Name of the function.
    pub name: String,
    /// Arguments as JSON text of an object.
    pub arguments: String,
}

/// A reply taken apart.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ParsedReply {
    /// Text before the first call; the whole text if there is none or one is malformed.
    pub content: String,
    /// Calls in order.
    pub calls: Vec<ToolCall>,
    /// There was call markup that could not be read.
    pub malformed: bool,
}

/// The markup of one model family.
pub trait ToolCallFormat: Send + Sync {
    /// Value of `TOOL_CALL_PARSER`.
    fn name(&self) -> &'static str;
    /// The text that opens a call; nothing before it belongs to one.
    fn opening(&self) -> &'static str;
    /// Takes a reply apart. `tools` is the request's list (OpenAI form), for formats whose values need
    /// the schema.
    fn parse(&self, text: &str, tools: Option<&[Value]>) -> ParsedReply;
}

/// `TOOL_CALL_PARSER` has a value that this version does not know.
#[derive(Debug, thiserror::Error, PartialEq)]
#[error("TOOL_CALL_PARSER is `{given}`; known: {known}")]
pub struct UnknownFormat {
    /// What was given.
    pub given: String,
    /// What exists.
    pub known: &'static str,
}

/// The format that `TOOL_CALL_PARSER` names.
pub fn format_by_name(name: &str) -> Result<Arc<dyn ToolCallFormat>, UnknownFormat> {
    match name {
        "hermes" => Ok(Arc::new(Hermes)),
        other => Err(UnknownFormat {
            given: other.to_owned(),
            known: "hermes",
        }),
    }
}
