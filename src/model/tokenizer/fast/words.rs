//! The word patterns of chat tokenizers, matched by hand.
//!
//! ```text
//! (?i:'s|'t|'re|'ve|'m|'ll|'d) | [^\r\n\p{L}\p{N}]?X+ | \p{N} | ?[^\s X \p{N}]+[\r\n]* | \s*[\r\n]+ | \s+(?!\S) | \s+
//! ```
//!
//! `X` is `\p{L}`, or `[\p{L}\p{M}]` for Qwen3.5 and later; numbers are single (Qwen) or up to three digits
//! (Llama 3). The alternatives are tried in this order at each place, as the regex does; one of them always
//! matches, so words cover the text.

use super::classes::{Classes, LETTER, MARK, NUMBER, SPACE};
use crate::model::bpe::QWEN2_PATTERN;
use serde_json::Value;

/// Qwen3.5: marks belong to words.
const QWEN35_PATTERN: &str = concat!(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*",
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
);
/// Llama 3, and Qwen2's with up to three digits.
const LLAMA3_PATTERN: &str = concat!(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*",
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
);

/// A word pattern.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Pattern {
    /// Classes of `X`.
    word: u8,
    /// Digits of a number.
    digits: usize,
}

impl Pattern {
    /// The pattern of a `pre_tokenizer`, if it is one of these followed by the byte-level alphabet.
    pub fn of(pre_tokenizer: &Option<Value>) -> Result<Self, String> {
        let steps = pre_tokenizer
            .as_ref()
            .map_or(&Value::Null, |p| &p["pretokenizers"]);
        let [split, bytes] = steps.as_array().map_or(&[][..], Vec::as_slice) else {
            return Err("a pre-tokenizer that is not a pattern and the byte-level alphabet".into());
        };
        let plain = bytes["type"] == "ByteLevel"
            && bytes["add_prefix_space"] == false
            && bytes["use_regex"] == false
            && split["type"] == "Split"
            && split["behavior"] == "Isolated"
            && split["invert"] != true;
        if !plain {
            return Err("options of the pre-tokenizer".into());
        }
        match split["pattern"]["Regex"].as_str().unwrap_or_default() {
            QWEN2_PATTERN => Ok(Self {
                word: LETTER,
                digits: 1,
            }),
            QWEN35_PATTERN => Ok(Self {
                word: LETTER | MARK,
                digits: 1,
            }),
            LLAMA3_PATTERN => Ok(Self {
                word: LETTER,
                digits: 3,
            }),
            other => Err(format!("the word pattern `{other}`")),
        }
    }

    /// The end of the word that begins at byte `start`, which is not the end of the text.
    pub fn next(&self, classes: &Classes, text: &str, start: usize) -> usize {
        let rest = &text[start..];
        let mut chars = rest.chars();
        let Some(first) = chars.next() else {
            return start;
        };
        let class = classes.of(first);
        let after = start + first.len_utf8();
        if first == '\'' {
            if let Some(length) = contraction(chars.as_str()) {
                return after + length;
            }
        }
        let second = chars.next();
        let second_class = second.map_or(0, |c| classes.of(c));
        let newline = first == '\r' || first == '\n';
        if !newline && class & (LETTER | NUMBER) == 0 && second_class & self.word != 0 {
            return self.run(classes, text, after, |class, _| class & self.word != 0);
        }
        if class & self.word != 0 {
            return self.run(classes, text, after, |class, _| class & self.word != 0);
        }
        if class & NUMBER != 0 {
            let mut left = self.digits - 1;
            return self.run(classes, text, after, |class, _| {
                let more = class & NUMBER != 0 && left > 0;
                left = left.saturating_sub(1);
                more
            });
        }
        let sign = |class: u8| class & (SPACE | NUMBER | self.word) == 0;
        if sign(class) || (first == ' ' && second.is_some() && sign(second_class)) {
            let end = self.run(classes, text, after, |class, _| sign(class));
            return self.run(classes, text, end, |_, c| c == '\r' || c == '\n');
        }
        // White space: up to its last line break, or all but the character before a word.
        let (mut end, mut last, mut line_break) = (start, start, None);
        for c in rest.chars() {
            if classes.of(c) & SPACE == 0 {
                break;
            }
            last = end;
            end += c.len_utf8();
            if c == '\r' || c == '\n' {
                line_break = Some(end);
            }
        }
        match line_break {
            Some(end) => end,
            None if end == text.len() || last == start => end,
            None => last,
        }
    }

    #[inline]
    fn run(
        &self,
        classes: &Classes,
        text: &str,
        from: usize,
        mut more: impl FnMut(u8, char) -> bool,
    ) -> usize {
        let mut end = from;
        for c in text[from..].chars() {
            if !more(classes.of(c), c) {
                break;
            }
            end += c.len_utf8();
        }
        end
    }
}

/// Bytes after an apostrophe that make a contraction. Without regard to case, as Unicode folds it: U+017F
/// is an s.
fn contraction(rest: &str) -> Option<usize> {
    let mut chars = rest.chars();
    let first = chars.next()?;
    match first {
        's' | 'S' | '\u{17f}' | 't' | 'T' | 'm' | 'M' | 'd' | 'D' => Some(first.len_utf8()),
        _ => {
            let pair = [first.to_ascii_lowercase(), chars.next()?.to_ascii_lowercase()];
            matches!(pair, ['r', 'e'] | ['v', 'e'] | ['l', 'l']).then_some(2)
        }
    }
}
