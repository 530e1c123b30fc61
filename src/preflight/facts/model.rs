//! The starting policy: sizes, weights, tokenizer, chat template.

use crate::{
    config::values::ToolCallParser,
    model::{
        chat_template::ChatTemplate,
        hf::{Checkpoint, ModelConfig},
        tokenizer::Tokenizer,
        tool_calls::format_by_name,
    },
    plan::shape::ModelShape,
};
use serde_json::{json, Value};
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
    for tensor in config.tensor_table() {
        checkpoint
            .get(&tensor.name, &tensor.shape)
            .map_err(|error| error.to_string())?;
    }
    Ok(())
}

/// Renders one tool call with the folder's own template and sees which parser reads it back.
fn markup(dir: &Path) -> Result<Option<ToolCallParser>, String> {
    let template = ChatTemplate::from_dir(dir).map_err(|error| error.to_string())?;
    let tools = [
        json!({"type": "function", "function": {"name": "probe", "description": "d", "parameters":
        {"type": "object", "properties": {"key": {"type": "string"}}, "required": ["key"]}}}),
    ];
    let messages = [
        json!({"role": "user", "content": "q"}),
        json!({"role": "assistant", "content": "", "tool_calls": [{"id": "call_0", "type": "function",
            "function": {"name": "probe", "arguments": "{\"key\": \"value\"}"}}]}),
    ];
    let render = |messages: &[Value], generate: bool| {
        template
            .render(messages, Some(&tools), generate)
            .map_err(|error| error.to_string())
    };
    let prompt = render(&messages[..1], true)?;
    let whole = render(&messages, false)?;
    // Some templates put more than the prompt before a finished turn; the markup comes last anyway.
    let turn = whole.strip_prefix(&prompt).unwrap_or_else(|| {
        let shared = prompt
            .bytes()
            .zip(whole.bytes())
            .take_while(|(a, b)| a == b)
            .count();
        whole.get(shared..).unwrap_or(&whole)
    });
    if turn.contains("<function=") && turn.contains("<parameter=") {
        return Ok(Some(ToolCallParser::Qwen3Coder));
    }
    let hermes = format_by_name(ToolCallParser::Hermes.name()).map_err(|error| error.to_string())?;
    // The turn's own end mark follows the last call.
    let end = turn
        .rfind("</tool_call>")
        .map_or(turn.len(), |at| at + "</tool_call>".len());
    let calls = hermes.parse(&turn[..end], Some(&tools)).calls;
    Ok((calls.len() == 1 && calls[0].name == "probe").then_some(ToolCallParser::Hermes))
}
