//! What a model writes, taken apart while it arrives: reasoning, text and tool calls.
//!
//! A [`ToolCallFormat`] reads one call at the start of a text. [`ReplyParser`] cuts a reply into
//! [`Piece`]s: text that certainly belongs to no call is released at once, a call when it is complete.
//!
//! * **A call that cannot be read comes back as text**, from its opening to the end of its markup, and is
//!   counted. Calls before and after it are still calls.
//! * **White space between calls and after the last one belongs to the markup** and is dropped; other text
//!   after a call is text.
//! * **Reasoning** is what stands between `<think>` and `</think>` at the start of a reply (the prompt may
//!   have opened it already), without the white space around it; a call in it is a thought. Where `</think>`
//!   never comes, the first opening of a call ends the thoughts, since a model that calls a tool has ended
//!   them; that call is held back until the end of the reply.
//!
//! | Name | Markup |
//! |---|---|
//! | `hermes` | `<tool_call>`, a JSON object with `name` and `arguments`, `</tool_call>` |
//! | `qwen3_coder` | `<tool_call>`, `<function=NAME>`, any number of `<parameter=KEY>` VALUE `</parameter>`, `</function>`, `</tool_call>` |

mod hermes;
mod qwen3_coder;
mod reply;
#[cfg(test)]
mod tests;

pub use hermes::Hermes;
pub use qwen3_coder::Qwen3Coder;
pub use reply::{Piece, ReplyParser, Thinking};

use super::chat_template::ChatTemplate;
use serde_json::{json, Value};
use std::sync::Arc;

/// One call, as OpenAI names its parts.
#[derive(Clone, Debug, PartialEq)]
pub struct ToolCall {
    /// Name of the function.
    pub name: String,
    /// Arguments as JSON text of an object.
    pub arguments: String,
}

/// What stands at the start of a text that begins with an opening mark.
#[derive(Debug, PartialEq)]
pub enum Step {
    /// It is not complete yet.
    More,
    /// A call.
    Call {
        /// Bytes of its markup.
        len: usize,
        /// The call.
        call: ToolCall,
    },
    /// Markup that is no call.
    Malformed {
        /// Bytes of it.
        len: usize,
    },
}

/// The markup of one model family.
pub trait ToolCallFormat: Send + Sync {
    /// Value of `TOOL_CALL_PARSER`.
    fn name(&self) -> &'static str;
    /// The texts that open a call; nothing before them belongs to one.
    fn openings(&self) -> &'static [&'static str];
    /// The texts that may complete a call: without one of them it is not looked at.
    fn closings(&self) -> &'static [&'static str];
    /// Values need the tools' schemas.
    fn needs_schema(&self) -> bool {
        false
    }
    /// Reads what stands at the start of `text`, which begins with an opening mark. `last` tells that no
    /// text follows; the answer is then not [`Step::More`]. `tools` is the request's list (OpenAI form),
    /// for formats whose values need the schema.
    fn next(&self, text: &str, last: bool, tools: &[Value]) -> Step;
}

/// `TOOL_CALL_PARSER` has a value that this version does not know, or `auto` finds none.
#[derive(Debug, thiserror::Error, PartialEq)]
pub enum UnknownFormat {
    /// No such parser.
    #[error("TOOL_CALL_PARSER is `{given}`; known: auto, hermes, qwen3_coder")]
    Name {
        /// What was given.
        given: String,
    },
    /// The template cannot render a call.
    #[error("TOOL_CALL_PARSER=auto: the chat template cannot render a tool call: {problem}")]
    Template {
        /// Its words.
        problem: String,
    },
    /// The template's markup is not known.
    #[error("TOOL_CALL_PARSER=auto: the chat template writes a tool call as {markup:?}, which no parser reads; name one of hermes, qwen3_coder")]
    Markup {
        /// What it writes.
        markup: String,
    },
}

/// The format that `TOOL_CALL_PARSER` names; `auto` takes the one whose markup `template` writes.
pub fn format_by_name(name: &str, template: &ChatTemplate) -> Result<Arc<dyn ToolCallFormat>, UnknownFormat> {
    match name {
        "hermes" => Ok(Arc::new(Hermes)),
        "qwen3_coder" => Ok(Arc::new(Qwen3Coder)),
        "auto" => detect(template),
        other => Err(UnknownFormat::Name {
            given: other.to_owned(),
        }),
    }
}

/// Renders a call and tries every parser on it.
fn detect(template: &ChatTemplate) -> Result<Arc<dyn ToolCallFormat>, UnknownFormat> {
    let messages = [
        json!({"role": "user", "content": "-"}),
        json!({"role": "assistant", "content": "", "tool_calls": [{"id": "call_1", "type": "function",
               "function": {"name": "probe_name", "arguments": {"key": "probe_value"}}}]}),
    ];
    let tools = [
        json!({"type": "function", "function": {"name": "probe_name", "description": "-",
        "parameters": {"type": "object", "properties": {"key": {"type": "string"}}}}}),
    ];
    // Without the tools in the prompt, whose text shows an example of the markup.
    let text = template
        .render(&messages, None, false)
        .map_err(|error| UnknownFormat::Template {
            problem: error.to_string(),
        })?;
    let formats: [Arc<dyn ToolCallFormat>; 2] = [Arc::new(Hermes), Arc::new(Qwen3Coder)];
    for format in formats {
        let mut parser = ReplyParser::new(Some(format.clone()), tools.to_vec(), Thinking::None);
        let mut pieces = parser.push(&text);
        pieces.extend(parser.finish());
        let read = pieces.iter().any(|piece| match piece {
            Piece::Call(call) => call.name == "probe_name" && call.arguments.contains("probe_value"),
            _ => false,
        });
        if read {
            return Ok(format);
        }
    }
    let at = text.find("probe_name").unwrap_or(0);
    let from = text[..at]
        .char_indices()
        .rev()
        .take(40)
        .last()
        .map_or(0, |(i, _)| i);
    Err(UnknownFormat::Markup {
        markup: text[from..].chars().take(120).collect(),
    })
}

/// The first place of one of `marks` from byte `from` on, with the mark.
fn find_any<'m>(text: &str, from: usize, marks: &[&'m str]) -> Option<(usize, &'m str)> {
    let found = marks
        .iter()
        .filter_map(|mark| Some((from + text.get(from..)?.find(mark)?, *mark)));
    found.min_by_key(|(at, mark)| (*at, std::cmp::Reverse(mark.len())))
}

/// Length of the longest end of `text` that is a proper beginning of one of `marks`.
fn partial_suffix(text: &str, marks: &[&str]) -> usize {
    let longest = |mark: &&str| {
        (1..mark.len().min(text.len() + 1))
            .rev()
            .find(|n| text.as_bytes().ends_with(&mark.as_bytes()[..*n]))
            .unwrap_or(0)
    };
    marks.iter().map(longest).max().unwrap_or(0)
}
