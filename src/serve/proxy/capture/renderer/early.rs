//! What certainly has more tokens than fit is refused before it is parsed, rendered or encoded to its end.
//!
//! A count here is a lower bound: what fits is never refused.

use super::{Item, RenderError, Renderer};
use serde_json::Value;

/// Longer texts are counted in pieces first, so that megabytes of tool output are refused early.
const PRECOUNT_BYTES: usize = 4 << 20;
/// More than the tokens that one cut can add.
const PRECOUNT_SLACK: usize = 64;
/// More bytes of new messages or of tools are counted before they become values or text.
const COUNTED_BYTES: usize = 1 << 20;
/// Texts from this length on are counted one by one; of shorter ones each is at least one token.
const COUNTED_TEXT_BYTES: usize = 1024;
/// A normaliser may write a character that is not ASCII with so many times fewer bytes.
const COMPOSED: usize = 3;

impl Renderer {
    /// Refuses tools whose texts alone certainly have more than `limit` tokens, before they are parsed.
    pub fn refuse_long_tools(&self, tools: Item<'_>, limit: usize) -> Result<(), RenderError> {
        if tools.raw.len() <= COUNTED_BYTES {
            return Ok(());
        }
        let at_least = text_bytes(tools.raw) / self.tokenizer.max_token_bytes();
        if at_least > limit {
            return Err(RenderError::TooLong { at_least, limit });
        }
        Ok(())
    }

    /// Counts the tokens of messages that are to be rendered, if there are many bytes of them.
    pub fn counter(&self, new: &[Item<'_>], limit: usize) -> Counter<'_> {
        let bytes: usize = new.iter().map(|item| item.raw.len()).sum();
        Counter {
            renderer: self,
            active: bytes > COUNTED_BYTES,
            limit,
            counted: 0,
        }
    }

    /// Refuses a long text that certainly has more than `limit` tokens.
    pub(super) fn precount(&self, text: &str, limit: usize) -> Result<(), RenderError> {
        if text.len() > PRECOUNT_BYTES {
            self.count_pieces(text, 0, limit)?;
        }
        Ok(())
    }

    /// `counted` and the tokens that a text has at least; an error as soon as these are more than `limit`.
    fn count_pieces(&self, text: &str, counted: usize, limit: usize) -> Result<usize, RenderError> {
        let (mut at_least, mut rest) = (counted, text);
        while !rest.is_empty() {
            let mut cut = rest.len().min(PRECOUNT_BYTES / 4);
            while !rest.is_char_boundary(cut) {
                cut -= 1;
            }
            let (piece, after) = rest.split_at(cut);
            // Cutting in mid-word costs a few tokens a piece; they are taken off generously.
            let tokens = self.tokenizer.encode_rendered(piece)?.len();
            at_least += tokens.saturating_sub(PRECOUNT_SLACK);
            rest = after;
            if at_least > limit {
                return Err(RenderError::TooLong { at_least, limit });
            }
        }
        Ok(at_least)
    }
}

/// Counts what messages have at least, before they are rendered: an assistant's may be left out by a template
/// (reasoning), and white space around a text too.
pub struct Counter<'r> {
    renderer: &'r Renderer,
    active: bool,
    limit: usize,
    counted: usize,
}

impl Counter<'_> {
    /// The next messages; an error as soon as all together certainly have more than the limit.
    pub fn add(&mut self, messages: &[Value]) -> Result<(), RenderError> {
        if !self.active {
            return Ok(());
        }
        for message in messages.iter().filter(|m| m["role"] != "assistant") {
            let parts = message["content"].as_array().map_or(&[][..], |parts| parts);
            let texts = parts.iter().map(|part| &part["text"]);
            let texts = texts.chain([&message["content"]]).filter_map(Value::as_str);
            let mut empty = true;
            for text in texts.map(str::trim).filter(|text| !text.is_empty()) {
                empty = false;
                if text.len() >= COUNTED_TEXT_BYTES {
                    let text = self.renderer.tokenizer.shield(text);
                    self.counted = self.renderer.count_pieces(&text, self.counted, self.limit)?;
                }
            }
            self.counted += usize::from(!empty);
            if self.counted > self.limit {
                return Err(RenderError::TooLong {
                    at_least: self.counted,
                    limit: self.limit,
                });
            }
        }
        Ok(())
    }
}

/// Bytes that the strings of a JSON text have at least as a tokenizer takes them; white space may be trimmed.
fn text_bytes(raw: &[u8]) -> usize {
    let (mut ascii, mut other, mut at, mut inside) = (0, 0, 0, false);
    while let Some(byte) = raw.get(at) {
        at += match (inside, byte) {
            (_, b'"') => {
                inside = !inside;
                1
            }
            (true, b'\\') => {
                let unit = raw.get(at + 1) == Some(&b'u');
                // A unit may be half of a character, and be composed with others.
                other += usize::from(unit);
                ascii += usize::from(matches!(raw.get(at + 1), Some(b'"' | b'\\' | b'/')));
                if unit {
                    6
                } else {
                    2
                }
            }
            (true, byte) => {
                ascii += usize::from(byte.is_ascii_graphic());
                other += usize::from(!byte.is_ascii());
                1
            }
            (false, _) => 1,
        };
    }
    ascii + other / COMPOSED
}
