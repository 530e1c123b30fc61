//! Decoding while tokens still arrive.

use super::Tokenizer;

/// Turns ids into text piece by piece; the pieces joined are [`Tokenizer::decode`] of all ids.
#[derive(Debug, Default)]
pub struct DecodeStream {
    /// Start of a UTF-8 sequence that is not complete yet: at most three bytes.
    pending: Vec<u8>,
}

impl DecodeStream {
    /// A stream at its start.
    pub fn new() -> Self {
        Self::default()
    }

    /// Text that became certain with these ids; may be empty.
    pub fn push(&mut self, tokenizer: &Tokenizer, ids: impl IntoIterator<Item = u32>) -> String {
        for id in ids {
            if !tokenizer.is_special(id) {
                self.pending.extend_from_slice(tokenizer.token_bytes(id));
            }
        }
        let mut out = String::new();
        let mut rest = self.pending.as_slice();
        loop {
            match std::str::from_utf8(rest) {
                Ok(text) => {
                    out.push_str(text);
                    rest = &[];
                }
                Err(error) => {
                    let (valid, after) = rest.split_at(error.valid_up_to());
                    out.push_str(&String::from_utf8_lossy(valid));
                    match error.error_len() {
                        Some(bad) => {
                            out.push(char::REPLACEMENT_CHARACTER);
                            rest = &after[bad..];
                            continue;
                        }
                        None => rest = after,
                    }
                }
            }
            break;
        }
        self.pending = rest.to_vec();
        out
    }

    /// The end: an unfinished sequence becomes U+FFFD.
    pub fn finish(&mut self) -> String {
        let text = String::from_utf8_lossy(&self.pending).into_owned();
        self.pending.clear();
        text
    }
}
