//! The starting policy: sizes, weights, tokenizer, chat template.

use crate::{
    config::values::ToolCallParser,
    model::{
        chat_template::ChatTemplate,
        hf::{Checkpoint, ModelConfig},
        tokenizer::Tokenizer,
        tool_calls::{format_by_name, UnknownFormat},
    },
    plan::shape::ModelShape,
};
use std::path::Path;

/// Facts about a policy folder.
#[derive(Clone, Debug)]
pub struct ModelFacts {
    /// Sizes from config.json, of any family.
    pub shape: ModelShape,
    /// This version computes the network; otherwise why not.
    pub network: Result<(), String>,
    /// Weights and their tensors are complete; `None` where the network is not known.
    pub weights: Option<Result<(), String>>,
    /// Ids of the tokenizer; the file was read to its end.
    pub tokenizer: Result<usize, String>,
    /// Tool-call markup that its chat template writes; `None` for one that no parser here knows.
    pub markup: Result<Option<ToolCallParser>, String>,
}

/// Reads a policy folder.
pub fn probe(dir: &Path) -> Result<ModelFacts, String> {
    if !dir.is_dir() {
        return Err(format!("{} is not a folder", dir.display()));
    }
    let shape = ModelShape::from_dir(dir)?;
    let config = ModelConfig::from_dir(dir).map_err(|error| error.to_string());
    let weights = config.as_ref().ok().map(|config| weights(dir, config));
    Ok(ModelFacts {
        shape,
        network: config.map(|_| ()),
        weights,
        tokenizer: Tokenizer::from_dir(dir)
            .map(|tokenizer| tokenizer.vocab_size())
            .map_err(|error| error.to_string()),
        markup: markup(dir),
    })
}

/// Every tensor of the architecture is there with its shape.
fn weights(dir: &Path, config: &ModelConfig) -> Result<(), String> {
    let checkpoint = Checkpoint::open(dir).map_err(|error| error.to_string())?;
    checkpoint.check(config).map_err(|error| error.to_string())
}

/// The parser that reads what the folder's own template writes.
fn markup(dir: &Path) -> Result<Option<ToolCallParser>, String> {
    let template = ChatTemplate::from_dir(dir).map_err(|error| error.to_string())?;
    match format_by_name(ToolCallParser::Auto.name(), &template) {
        Ok(format) => Ok(ToolCallParser::from_name(format.name())),
        Err(UnknownFormat::Template { problem }) => Err(problem),
        Err(_) => Ok(None),
    }
}
