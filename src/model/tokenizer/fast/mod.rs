//! Byte-level BPE for chat tokenizers, written for speed and proven equal to `tokenizers`.
//!
//! Encoding is most of what a turn costs: the library builds a normalised copy with offsets, runs a
//! backtracking regex and allocates per word. Here a text is cut by a hand-written matcher of the word
//! patterns that are in use ([`words`]), and words are looked up in a cache before they are merged.
//!
//! ```text
//! text ── added tokens out ── NFC (only where it could change something) ── words ── cache ── merges
//! ```
//!
//! What is supported is checked when a tokenizer is loaded; any other setting leaves the tokenizer with
//! the library ([`FastBpe::load`] says why):
//!
//! * model BPE over bytes without dropout, unknown token, prefix or suffix;
//! * no normaliser or NFC; one known word pattern, then the byte-level alphabet;
//! * added tokens that are matched as they are (not normalised, no white-space rules).
//!
//! Equality is tested on random texts, special tokens and all of Unicode among them (`LEGORL_FUZZ_CASES`,
//! with Qwen3's tokenizer where `LEGORL_TEST_TOKENIZER` names its folder).

mod cache;
mod classes;
mod merge;
#[cfg(test)]
mod tests;
mod words;

use super::bytes::alphabet;
use aho_corasick::{AhoCorasick, MatchKind};
use cache::WordCache;
use classes::Classes;
use merge::Merges;
pub use merge::NumberHasher;
use serde::Deserialize;
use std::{
    collections::HashMap,
    sync::{Mutex, MutexGuard},
};
use words::Pattern;

/// Encodings that run at the same time and have a cache of their own.
const CACHES: usize = 4;
/// Longer words are merged each time: they hardly ever come back.
const MAX_CACHED_WORD_BYTES: usize = 48;

/// See the module documentation.
pub struct FastBpe {
    merges: Merges,
    pattern: Pattern,
    classes: &'static Classes,
    nfc: bool,
    /// Finds added tokens, special ones too: these are text here, but hide what they overlap.
    finder: Option<AhoCorasick>,
    /// Id of each pattern of `finder`; `None` for special ones.
    added: Vec<Option<u32>>,
    caches: [Mutex<WordCache>; CACHES],
}

#[derive(Deserialize)]
struct File {
    #[serde(default)]
    added_tokens: Vec<Added>,
    normalizer: Option<serde_json::Value>,
    pre_tokenizer: Option<serde_json::Value>,
    model: Model,
}

#[derive(Deserialize)]
struct Added {
    id: u32,
    content: String,
    #[serde(default)]
    single_word: bool,
    #[serde(default)]
    lstrip: bool,
    #[serde(default)]
    rstrip: bool,
    #[serde(default)]
    normalized: bool,
    #[serde(default)]
    special: bool,
}

#[derive(Deserialize)]
struct Model {
    #[serde(rename = "type", default)]
    kind: Option<String>,
    #[serde(default)]
    dropout: Option<f64>,
    #[serde(default)]
    unk_token: Option<String>,
    #[serde(default)]
    continuing_subword_prefix: Option<String>,
    #[serde(default)]
    end_of_word_suffix: Option<String>,
    #[serde(default)]
    byte_fallback: bool,
    #[serde(default)]
    ignore_merges: bool,
    vocab: HashMap<String, u32>,
    merges: Vec<Merge>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Merge {
    Pair(String, String),
    Text(String),
}

impl FastBpe {
    /// Reads tokenizer.json; the error says what is not supported.
    pub fn load(json: &[u8]) -> Result<Self, String> {
        let file: File = serde_json::from_slice(json).map_err(|error| error.to_string())?;
        let model = &file.model;
        if model.kind.as_deref().is_some_and(|kind| kind != "BPE") {
            return Err(format!("model {:?}", model.kind));
        }
        let text = |text: &Option<String>| text.as_ref().is_some_and(|t| !t.is_empty());
        if model.dropout.is_some_and(|p| p > 0.0)
            || text(&model.unk_token)
            || text(&model.continuing_subword_prefix)
            || text(&model.end_of_word_suffix)
            || model.byte_fallback
        {
            return Err("dropout, unknown token, prefix, suffix or byte fallback".into());
        }
        let nfc = match &file.normalizer {
            None | Some(serde_json::Value::Null) => false,
            Some(normalizer) if normalizer["type"] == "NFC" => true,
            Some(normalizer) => return Err(format!("normaliser {}", normalizer["type"])),
        };
        let pattern = Pattern::of(&file.pre_tokenizer)?;
        let (mut texts, mut added) = (Vec::new(), Vec::new());
        for token in &file.added_tokens {
            let rules = token.single_word || token.lstrip || token.rstrip;
            if token.normalized || (rules && !token.special) {
                return Err(format!("matching rules of the added token `{}`", token.content));
            }
            texts.push(token.content.as_str());
            added.push((!token.special).then_some(token.id));
        }
        let finder = AhoCorasick::builder()
            .match_kind(MatchKind::LeftmostLongest)
            .build(&texts)
            .map_err(|error| error.to_string())?;
        Ok(Self {
            merges: merges(model)?,
            pattern,
            classes: Classes::get(),
            nfc,
            finder: (!texts.is_empty()).then_some(finder),
            added,
            caches: Default::default(),
        })
    }

    /// Appends the ids of a text in which special tokens are plain text. `normalize` is the library's
    /// normaliser, called only for texts that it may change.
    pub fn encode(
        &self,
        text: &str,
        normalize: &dyn Fn(&str) -> Option<String>,
        ids: &mut Vec<u32>,
    ) -> Option<()> {
        let mut free = self.caches.iter().filter_map(|cache| cache.try_lock().ok());
        let mut cache = free.next();
        let mut start = 0;
        if let Some(finder) = &self.finder {
            for found in finder.find_iter(text) {
                if let Some(id) = self.added[found.pattern().as_usize()] {
                    self.segment(&text[start..found.start()], normalize, &mut cache, ids)?;
                    ids.push(id);
                    start = found.end();
                }
            }
        }
        self.segment(&text[start..], normalize, &mut cache, ids)
    }

    fn segment(
        &self,
        text: &str,
        normalize: &dyn Fn(&str) -> Option<String>,
        cache: &mut Option<MutexGuard<'_, WordCache>>,
        ids: &mut Vec<u32>,
    ) -> Option<()> {
        if self.nfc && !self.classes.is_stable(text) {
            let normal = normalize(text)?;
            self.words(&normal, cache, ids);
        } else {
            self.words(text, cache, ids);
        }
        Some(())
    }

    fn words(&self, text: &str, cache: &mut Option<MutexGuard<'_, WordCache>>, ids: &mut Vec<u32>) {
        let mut start = 0;
        while start < text.len() {
            let end = self.pattern.next(self.classes, text, start);
            let word = &text.as_bytes()[start..end];
            match cache {
                Some(cache) if word.len() <= MAX_CACHED_WORD_BYTES => {
                    if !cache.get(word, ids) {
                        let from = ids.len();
                        self.merges.encode(word, ids);
                        cache.put(word, &ids[from..]);
                    }
                }
                _ => self.merges.encode(word, ids),
            }
            start = end;
        }
    }
}

fn merges(model: &Model) -> Result<Merges, String> {
    let alphabet = alphabet();
    let mut byte_ids = [u32::MAX; 256];
    for (c, byte) in &alphabet {
        let id = model.vocab.get(c.to_string().as_str());
        byte_ids[usize::from(*byte)] = *id.ok_or_else(|| format!("byte {byte:#04x} is no token"))?;
    }
    let id = |token: &str| {
        let id = model.vocab.get(token).copied();
        id.ok_or_else(|| format!("a merge names the unknown token `{token}`"))
    };
    let mut pairs = Vec::with_capacity(model.merges.len());
    for merge in &model.merges {
        let (left, right) = match merge {
            Merge::Pair(left, right) => (left.as_str(), right.as_str()),
            Merge::Text(text) => text.split_once(' ').ok_or_else(|| format!("merge `{text}`"))?,
        };
        pairs.push((id(left)?, id(right)?, id(&format!("{left}{right}"))?));
    }
    let mut whole = HashMap::new();
    if model.ignore_merges {
        for (token, id) in &model.vocab {
            let bytes: Option<Box<[u8]>> = token.chars().map(|c| alphabet.get(&c).copied()).collect();
            whole.extend(bytes.map(|bytes| (bytes, *id)));
        }
    }
    Ok(Merges::new(byte_ids, &pairs, whole))
}
