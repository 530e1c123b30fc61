//! Models: configuration, checkpoint folders, tokenizer, chat template, tool-call formats, architectures.

pub mod bpe;
pub mod chat_template;
pub mod hf;
#[cfg(feature = "torch")]
pub mod net;
pub mod tokenizer;
pub mod tool_calls;
