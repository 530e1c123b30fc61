//! Trains a byte-level BPE tokenizer in the form of Qwen's: NFC, the Qwen2 word pattern, bytes as the
//! base alphabet, control tokens behind the learned vocabulary.
//!
//! A tokenizer of its own keeps the prompts of a small policy short: what the corpus repeats (tool
//! schema, markup, names) becomes one token a word.
//!
//! The result is a function of the corpus and the size alone. Every byte is in the alphabet, so any text
//! can be encoded.

#[cfg(test)]
mod tests;

use std::path::{Path, PathBuf};
use tokenizers::{
    models::bpe::{BpeTrainer, BPE},
    normalizers::unicode::NFC,
    pre_tokenizers::{
        byte_level::ByteLevel,
        sequence::Sequence,
        split::{Split, SplitPattern},
    },
    AddedToken, DecoderWrapper, NormalizerWrapper, PostProcessorWrapper, PreTokenizerWrapper,
    SplitDelimiterBehavior, Tokenizer, TokenizerImpl,
};

/// The word pattern of Qwen2 and Qwen3 (their `tokenizer.json`).
pub const QWEN2_PATTERN: &str = concat!(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*",
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
);

/// Added tokens of a chat vocabulary with their `special` flag as in Qwen3: control tokens are special,
/// the markup of tools and thinking is not.
pub const CHAT_TOKENS: [(&str, bool); 9] = [
    ("<|endoftext|>", true),
    ("<|im_start|>", true),
    ("<|im_end|>", true),
    ("<tool_call>", false),
    ("</tool_call>", false),
    ("<tool_response>", false),
    ("</tool_response>", false),
    ("<think>", false),
    ("</think>", false),
];

/// A tokenizer that cannot be trained or written.
#[derive(Debug, thiserror::Error)]
pub enum BpeError {
    /// The size leaves no room for the alphabet and the added tokens.
    #[error("a vocabulary of {vocab_size} cannot hold 256 bytes and {added} added tokens")]
    VocabularyTooSmall {
        /// What was asked for.
        vocab_size: usize,
        /// Number of added tokens.
        added: usize,
    },
    /// The library refused.
    #[error("the tokenizer cannot be trained: {0}")]
    Library(String),
    /// The file cannot be written.
    #[error("cannot write `{path}`: {source}")]
    Write {
        /// The file.
        path: PathBuf,
        /// Cause.
        #[source]
        source: std::io::Error,
    },
}

/// A trained tokenizer.
pub struct TrainedBpe {
    tokenizer: Tokenizer,
}

impl TrainedBpe {
    /// Learns merges from `corpus` until the vocabulary, [`CHAT_TOKENS`] included, has `vocab_size`
    /// entries or no pair is left to merge. Text of added tokens in the corpus is never merged.
    pub fn train<'t>(corpus: impl IntoIterator<Item = &'t str>, vocab_size: usize) -> Result<Self, BpeError> {
        let added = CHAT_TOKENS.len();
        if vocab_size < 256 + added {
            return Err(BpeError::VocabularyTooSmall { vocab_size, added });
        }
        let library = |error: tokenizers::Error| BpeError::Library(error.to_string());
        let pattern = Split::new(
            SplitPattern::Regex(QWEN2_PATTERN.to_owned()),
            SplitDelimiterBehavior::Isolated,
            false,
        )
        .map_err(library)?;
        let bytes = ByteLevel::new(false, false, false);
        let mut tokenizer: QwenLike = TokenizerImpl::new(BPE::default());
        tokenizer
            .with_normalizer(Some(NormalizerWrapper::NFC(NFC)))
            .with_pre_tokenizer(Some(Sequence::new(vec![pattern.into(), bytes.into()])))
            .with_post_processor(Some(bytes))
            .with_decoder(Some(bytes));
        let mut trainer = BpeTrainer::builder()
            .show_progress(false)
            .min_frequency(1)
            .vocab_size(vocab_size - added)
            .initial_alphabet(ByteLevel::alphabet().into_iter().collect())
            .build();
        let pieces: Vec<&str> = corpus.into_iter().flat_map(split_added).collect();
        tokenizer.train(&mut trainer, pieces.iter()).map_err(library)?;
        for (content, special) in CHAT_TOKENS {
            let token = AddedToken::from(content, special).normalized(false);
            if special {
                tokenizer.add_special_tokens(&[token]);
            } else {
                tokenizer.add_tokens(&[token]);
            }
        }
        Ok(Self {
            tokenizer: tokenizer.into(),
        })
    }

    /// Entries of the vocabulary, added tokens included.
    pub fn vocab_size(&self) -> usize {
        self.tokenizer.get_vocab_size(true)
    }

    /// The id of a token, under its spelling in `tokenizer.json`.
    pub fn token_to_id(&self, token: &str) -> Option<u32> {
        self.tokenizer.token_to_id(token)
    }

    /// Writes `tokenizer.json`.
    pub fn save(&self, path: &Path) -> Result<(), BpeError> {
        let text = self
            .tokenizer
            .to_string(true)
            .map_err(|error| BpeError::Library(error.to_string()))?;
        std::fs::write(path, text).map_err(|source| BpeError::Write {
            path: path.to_path_buf(),
            source,
        })
    }
}

type QwenLike =
    TokenizerImpl<BPE, NormalizerWrapper, PreTokenizerWrapper, PostProcessorWrapper, DecoderWrapper>;

/// The stretches of a text between added tokens.
fn split_added(text: &str) -> Vec<&str> {
    let mut pieces = vec![text];
    for (token, _) in CHAT_TOKENS {
        pieces = pieces.iter().flat_map(|piece| piece.split(token)).collect();
    }
    pieces.retain(|piece| !piece.is_empty());
    pieces
}
