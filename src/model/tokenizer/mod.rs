//! Text to token ids and back, for byte-level BPE tokenizers in Hugging Face's `tokenizer.json`.
//!
//! Three things differ from calling the `tokenizers` library directly:
//!
//! 1. **Control tokens come from the template alone.** A prompt is one rendered string in which
//!    `<|im_end|>` written by the template must become the control token, and the same characters in a
//!    tool's output must not, or any file that an agent reads could end its own turn. Before
//!    rendering, [`Tokenizer::shield`] marks every special token that occurs in outside text; after
//!    rendering, [`Tokenizer::encode_rendered`] turns unmarked ones into ids, removes the marks, and
//!    encodes what was marked as plain text. Without marks the ids are those of `tokenizers`.
//!    Added tokens that are not special (`<tool_call>`, `<think>`) are markup of the conversation, not
//!    control, and stay tokens wherever they occur, as in transformers.
//! 2. **Decoding is by bytes.** Each id stands for bytes, so text can be streamed without decoding
//!    anything twice: [`DecodeStream`] holds back at most an unfinished UTF-8 sequence.
//! 3. **Stop ids** are the union of what `config.json`, `generation_config.json` and
//!    `tokenizer_config.json` call end-of-sequence; checkpoints disagree between the three.
//!
//! The mark is U+FDD0 U+FDD1 after the first character of the token; U+FDD0 of outside text is doubled,
//! so every text survives. Both are Unicode noncharacters.
//!
//! Texts are encoded by [`fast`] where the tokenizer's settings allow it, and by the library otherwise; the
//! ids are the same.
//!
//! Not supported, and refused by name when loading: tokenizers that are not byte-level
//! (SentencePiece), since a piece of text then encodes differently at the start of a string.

mod bytes;
pub mod fast;
mod stream;
#[cfg(test)]
pub(crate) mod testing;
#[cfg(test)]
mod tests;

pub use stream::DecodeStream;

use aho_corasick::{AhoCorasick, MatchKind};
use fast::{FastBpe, NumberHasher};
use serde_json::Value;
use std::{
    borrow::Cow,
    collections::{BTreeSet, HashMap},
    hash::BuildHasherDefault,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
};
use tokenizers::{NormalizedString, Normalizer};

const MARK: char = '\u{fdd0}';
const SHIELD: char = '\u{fdd1}';

/// A tokenizer folder that cannot be used, or a text that cannot be encoded.
#[derive(Debug, thiserror::Error)]
pub enum TokenizerError {
    /// A file is missing or unreadable.
    #[error("cannot read `{path}`: {source}")]
    Read {
        /// The file.
        path: PathBuf,
        /// Cause.
        #[source]
        source: std::io::Error,
    },
    /// A file is not what its name says.
    #[error("`{path}`: {problem}")]
    Invalid {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        problem: String,
    },
    /// The library refused a text.
    #[error("the tokenizer refused a text of {bytes} bytes: {problem}")]
    Encode {
        /// Length of the text.
        bytes: usize,
        /// The library's words.
        problem: String,
    },
}

/// A special token and the whitespace rules of its `tokenizer.json` entry.
struct Special {
    id: u32,
    lstrip: bool,
    rstrip: bool,
}

/// Stretches that many conversations share, such as system prompts with tools.
#[derive(Default)]
struct Segments {
    ids: HashMap<Box<str>, Arc<[u32]>, BuildHasherDefault<NumberHasher>>,
    bytes: usize,
}

/// Shorter stretches are not worth remembering.
const MIN_SEGMENT_BYTES: usize = 1024;
/// Text and ids of remembered stretches; then the memory starts anew.
const MAX_SEGMENT_BYTES: usize = 64 << 20;

/// See the module documentation.
pub struct Tokenizer {
    inner: tokenizers::Tokenizer,
    /// `None` for tokenizers with settings that it does not support.
    fast: Option<FastBpe>,
    /// Ids of long stretches between special tokens, by their text.
    segments: Mutex<Segments>,
    /// Finds special tokens; pattern i is `specials[i]`. `None` without special tokens.
    finder: Option<AhoCorasick>,
    specials: Vec<Special>,
    special_ids: BTreeSet<u32>,
    token_bytes: Vec<Box<[u8]>>,
    stop_ids: Vec<u32>,
    named: HashMap<String, String>,
}

impl Tokenizer {
    /// Reads `tokenizer.json`, and the stop ids of the other three files where they exist.
    pub fn from_dir(dir: &Path) -> Result<Self, TokenizerError> {
        let path = dir.join("tokenizer.json");
        let data = crate::base::files::read(&path).map_err(|source| TokenizerError::Read {
            path: path.clone(),
            source,
        })?;
        let invalid = |problem: String| TokenizerError::Invalid {
            path: path.clone(),
            problem,
        };
        let mut inner =
            tokenizers::Tokenizer::from_bytes(&data).map_err(|error| invalid(error.to_string()))?;
        let fast = match FastBpe::load(&data) {
            Ok(fast) => Some(fast),
            Err(reason) => {
                tracing::info!(path = %path.display(), %reason, "the tokenizer library encodes; it is slower");
                None
            }
        };
        drop(data);
        inner.set_encode_special_tokens(true);
        let mut added: Vec<(u32, tokenizers::AddedToken)> =
            inner.get_added_tokens_decoder().into_iter().collect();
        added.sort_by_key(|(id, _)| *id);
        if let Some((_, token)) = added.iter().find(|(_, t)| t.special && t.single_word) {
            return Err(invalid(format!(
                "the special token `{}` is `single_word`, which is not supported",
                token.content
            )));
        }
        let token_bytes = bytes::table(&inner, &added).map_err(invalid)?;
        let (mut patterns, mut specials, mut special_ids) = (Vec::new(), Vec::new(), BTreeSet::new());
        for (id, token) in added.iter().filter(|(_, token)| token.special) {
            patterns.push(token.content.clone());
            specials.push(Special {
                id: *id,
                lstrip: token.lstrip,
                rstrip: token.rstrip,
            });
            special_ids.insert(*id);
        }
        let finder = if patterns.is_empty() {
            None
        } else {
            // `tokenizers` also takes the leftmost, longest match.
            Some(
                AhoCorasick::builder()
                    .match_kind(MatchKind::LeftmostLongest)
                    .build(&patterns)
                    .map_err(|error| invalid(format!("special tokens: {error}")))?,
            )
        };
        let mut this = Self {
            inner,
            fast,
            segments: Mutex::default(),
            finder,
            specials,
            special_ids,
            token_bytes,
            stop_ids: Vec::new(),
            named: HashMap::new(),
        };
        this.read_stop_ids(dir)?;
        Ok(this)
    }

    fn read_stop_ids(&mut self, dir: &Path) -> Result<(), TokenizerError> {
        let mut ids = BTreeSet::new();
        for name in ["config.json", "generation_config.json"] {
            let path = dir.join(name);
            let Some(value) = read_json(&path)? else {
                continue;
            };
            for owner in [&value, &value["text_config"]] {
                let named = match &owner["eos_token_id"] {
                    Value::Null => &[],
                    Value::Array(list) => list.as_slice(),
                    one => std::slice::from_ref(one),
                };
                for id in named {
                    let known = id.as_u64().filter(|id| (*id as usize) < self.token_bytes.len());
                    let known = known.ok_or_else(|| TokenizerError::Invalid {
                        path: path.clone(),
                        problem: format!(
                            "eos_token_id {id} is no id of tokenizer.json, which has {}; the files are of different \
                             checkpoints",
                            self.token_bytes.len()
                        ),
                    })?;
                    ids.insert(known as u32);
                }
            }
        }
        let path = dir.join("tokenizer_config.json");
        if let Some(value) = read_json(&path)? {
            for (key, value) in value.as_object().into_iter().flatten() {
                let text = value.as_str().or_else(|| value["content"].as_str());
                if let (true, Some(text)) = (key.ends_with("_token"), text) {
                    self.named.insert(key.clone(), text.to_owned());
                }
            }
            if let Some(eos) = self.named.get("eos_token") {
                let id = self.token_to_id(eos).ok_or_else(|| TokenizerError::Invalid {
                    path: path.clone(),
                    problem: format!("eos_token `{eos}` is not a token of tokenizer.json"),
                })?;
                ids.insert(id);
            }
        }
        self.stop_ids = ids.into_iter().collect();
        Ok(())
    }

    /// Highest id plus one. A model may have more rows than this (padding).
    pub fn vocab_size(&self) -> usize {
        self.token_bytes.len()
    }

    /// Ids that end a turn, ascending.
    pub fn stop_ids(&self) -> &[u32] {
        &self.stop_ids
    }

    /// Texts that `tokenizer_config.json` gives by name (`bos_token`, `eos_token`, …), for templates.
    pub fn named_tokens(&self) -> &HashMap<String, String> {
        &self.named
    }

    /// The id of a token by its text.
    pub fn token_to_id(&self, token: &str) -> Option<u32> {
        self.inner.token_to_id(token)
    }

    /// True for control tokens, which [`Tokenizer::decode`] leaves out.
    pub fn is_special(&self, id: u32) -> bool {
        self.special_ids.contains(&id)
    }

    /// The bytes that an id stands for; empty for ids beyond the vocabulary.
    pub fn token_bytes(&self, id: u32) -> &[u8] {
        self.token_bytes.get(id as usize).map_or(&[], |bytes| bytes)
    }

    /// Bytes of the longest token: `text.len() / max_token_bytes()` is a lower bound on its tokens.
    pub fn max_token_bytes(&self) -> usize {
        self.token_bytes.iter().map(|b| b.len()).max().unwrap_or(1).max(1)
    }

    /// Encodes a rendered template: unmarked special tokens become ids, marked ones plain text.
    pub fn encode_rendered(&self, text: &str) -> Result<Vec<u32>, TokenizerError> {
        self.encode_stretches(text, false)
    }

    /// The same; long stretches between special tokens are remembered, so that what many texts share is
    /// encoded once.
    pub fn encode_shared(&self, text: &str) -> Result<Vec<u32>, TokenizerError> {
        self.encode_stretches(text, true)
    }

    fn encode_stretches(&self, text: &str, shared: bool) -> Result<Vec<u32>, TokenizerError> {
        let mut ids = Vec::with_capacity(text.len() / 3 + 8);
        let encode = |text: &str, ids: &mut Vec<u32>| {
            if shared && text.len() >= MIN_SEGMENT_BYTES {
                self.encode_segment(text, ids)
            } else {
                self.encode_plain(text, ids)
            }
        };
        let Some(finder) = &self.finder else {
            encode(text, &mut ids)?;
            return Ok(ids);
        };
        let mut start = 0;
        for found in finder.find_iter(text) {
            let special = &self.specials[found.pattern().as_usize()];
            if found.start() < start {
                continue; // swallowed by the whitespace rule of the token before
            }
            let before = &text[start..found.start()];
            encode(if special.lstrip { before.trim_end() } else { before }, &mut ids)?;
            ids.push(special.id);
            start = found.end();
            if special.rstrip {
                start = text.len() - text[start..].trim_start().len();
            }
        }
        encode(&text[start..], &mut ids)?;
        Ok(ids)
    }

    fn encode_segment(&self, text: &str, ids: &mut Vec<u32>) -> Result<(), TokenizerError> {
        let lock = || self.segments.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = lock().ids.get(text).cloned() {
            ids.extend_from_slice(&known);
            return Ok(());
        }
        let from = ids.len();
        self.encode_plain(text, ids)?;
        let size = text.len() + (ids.len() - from) * 4;
        let mut segments = lock();
        if segments.bytes + size > MAX_SEGMENT_BYTES {
            *segments = Segments::default();
        }
        if size <= MAX_SEGMENT_BYTES && segments.ids.insert(text.into(), ids[from..].into()).is_none() {
            segments.bytes += size;
        }
        Ok(())
    }

    /// The text as the tokenizer's normaliser writes it; `None` if it fails.
    fn normalized(&self, text: &str) -> Option<String> {
        let mut normal = NormalizedString::from(text);
        match self.inner.get_normalizer() {
            Some(normalizer) => normalizer.normalize(&mut normal).ok()?,
            None => return Some(text.to_owned()),
        }
        Some(normal.get().to_owned())
    }

    /// Encodes text from outside: nothing in it becomes a control token.
    pub fn encode_text(&self, text: &str) -> Result<Vec<u32>, TokenizerError> {
        self.encode_rendered(&self.shield(text))
    }

    fn encode_plain(&self, text: &str, ids: &mut Vec<u32>) -> Result<(), TokenizerError> {
        if text.is_empty() {
            return Ok(());
        }
        let text = unshield(text);
        if let Some(fast) = &self.fast {
            let from = ids.len();
            if fast.encode(&text, &|text| self.normalized(text), ids).is_some() {
                return Ok(());
            }
            ids.truncate(from);
        }
        let encoding =
            self.inner
                .encode_fast(text.as_ref(), false)
                .map_err(|error| TokenizerError::Encode {
                    bytes: text.len(),
                    problem: error.to_string(),
                })?;
        ids.extend_from_slice(encoding.get_ids());
        Ok(())
    }

    /// Marks the special tokens of a text from outside, so that [`Tokenizer::encode_rendered`] takes
    /// them as plain text.
    pub fn shield<'t>(&self, text: &'t str) -> Cow<'t, str> {
        let special = self.finder.as_ref().is_some_and(|finder| finder.is_match(text));
        if !special && !text.contains(MARK) {
            return Cow::Borrowed(text);
        }
        let doubled = text.replace(MARK, "\u{fdd0}\u{fdd0}");
        let Some(finder) = &self.finder else {
            return Cow::Owned(doubled);
        };
        let mut out = doubled;
        // A mark inside one token can leave another, shorter one visible: repeat until none is.
        while finder.is_match(&out) {
            let mut next = String::with_capacity(out.len() + 32);
            let mut start = 0;
            for found in finder.find_iter(&out) {
                let first = out[found.start()..].chars().next().map_or(1, char::len_utf8);
                let cut = found.start() + first;
                next.push_str(&out[start..cut]);
                next.extend([MARK, SHIELD]);
                start = cut;
            }
            next.push_str(&out[start..]);
            out = next;
        }
        Cow::Owned(out)
    }

    /// [`Tokenizer::shield`] for every string and key of a JSON value.
    pub fn shield_json(&self, value: &Value) -> Value {
        match value {
            Value::String(text) => Value::String(self.shield(text).into_owned()),
            Value::Array(list) => Value::Array(list.iter().map(|v| self.shield_json(v)).collect()),
            Value::Object(map) => Value::Object(
                map.iter()
                    .map(|(k, v)| (self.shield(k).into_owned(), self.shield_json(v)))
                    .collect(),
            ),
            other => other.clone(),
        }
    }

    /// Text of ids without control tokens. Bytes that are not UTF-8 become U+FFFD.
    pub fn decode(&self, ids: &[u32]) -> String {
        self.decode_bytes(ids.iter().filter(|id| !self.is_special(**id)))
    }

    /// Text of ids, control tokens included.
    pub fn decode_with_special(&self, ids: &[u32]) -> String {
        self.decode_bytes(ids.iter())
    }

    fn decode_bytes<'i>(&self, ids: impl Iterator<Item = &'i u32>) -> String {
        let mut out = Vec::new();
        for id in ids {
            out.extend_from_slice(self.token_bytes(*id));
        }
        match String::from_utf8(out) {
            Ok(text) => text,
            Err(error) => String::from_utf8_lossy(error.as_bytes()).into_owned(),
        }
    }
}

/// Removes the marks of [`Tokenizer::shield`].
pub fn unshield(text: &str) -> Cow<'_, str> {
    if !text.contains(MARK) {
        return Cow::Borrowed(text);
    }
    let mut out = String::with_capacity(text.len());
    let mut chars = text.chars().peekable();
    while let Some(c) = chars.next() {
        match (c, chars.peek()) {
            (MARK, Some(&SHIELD)) => {
                chars.next();
            }
            (MARK, Some(&MARK)) => {
                chars.next();
                out.push(MARK);
            }
            _ => out.push(c),
        }
    }
    Cow::Owned(out)
}

/// `None` if the file does not exist.
fn read_json(path: &Path) -> Result<Option<Value>, TokenizerError> {
    let data = match crate::base::files::read(path) {
        Ok(data) => data,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(source) => {
            return Err(TokenizerError::Read {
                path: path.to_owned(),
                source,
            })
        }
    };
    serde_json::from_slice(&data)
        .map(Some)
        .map_err(|error| TokenizerError::Invalid {
            path: path.to_owned(),
            problem: format!("not JSON: {error}"),
        })
}
