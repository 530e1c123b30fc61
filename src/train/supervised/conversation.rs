//! Transcripts as token streams, built as a trial's session is: the prompt is rendered by the chat
//! template, the assistant's turns are the tokens that it would have sampled (its text and the stop
//! token), and the text between two turns is what the template puts there.

use super::{
    transcripts::{tool_call_message, tool_message, Transcript, FAREWELL},
    InitError,
};
use crate::model::{chat_template::ChatTemplate, tokenizer::Tokenizer};
use serde_json::{json, Value};

/// The system prompt of the mini agent.
const SYSTEM: &str = include_str!("../../../agent/prompt/system.txt");
/// The tools of the mini agent.
const TOOLS: &str = include_str!("../../../agent/prompt/tools.json");

const ASSISTANT: &str = "<|im_start|>assistant\n";
const STOP: &str = "<|im_end|>";

/// What a tool result may end with when a command fails.
pub(super) const ENDINGS: [&str; 3] = ["[no output]", "[exit 1]", "[exit 127]"];

/// Renders transcripts with the messages and tools of the mini agent.
pub struct Conversation<'t> {
    template: &'t ChatTemplate,
    tools: Vec<Value>,
}

impl<'t> Conversation<'t> {
    /// A renderer with this template.
    pub fn new(template: &'t ChatTemplate) -> Result<Self, InitError> {
        let tools = serde_json::from_str(TOOLS).map_err(InitError::Tools)?;
        Ok(Self { template, tools })
    }

    /// The whole conversation as text.
    pub fn render(&self, transcript: &Transcript) -> Result<String, InitError> {
        let mut messages = vec![
            json!({"role": "system", "content": SYSTEM.trim_end()}),
            json!({"role": "user", "content": transcript.instruction}),
        ];
        for step in &transcript.steps {
            messages.push(tool_call_message(&step.command));
            messages.push(tool_message(step));
        }
        messages.push(json!({"role": "assistant", "content": FAREWELL}));
        Ok(self.template.render(&messages, Some(&self.tools), false)?)
    }
}

/// Token ids and, for each, whether the assistant sampled it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TokenStream {
    /// Vocabulary ids.
    pub ids: Vec<u32>,
    /// True where the loss is taken.
    pub sampled: Vec<bool>,
}

impl TokenStream {
    fn extend(&mut self, ids: Vec<u32>, sampled: bool) {
        self.sampled.resize(self.sampled.len() + ids.len(), sampled);
        self.ids.extend(ids);
    }
}

/// Encodes a rendered conversation. Without `with_head` the system block, which is the same in all
/// conversations, is left out.
pub fn encode(tokenizer: &Tokenizer, text: &str, with_head: bool) -> Result<TokenStream, InitError> {
    let start = if with_head {
        0
    } else {
        text.find("<|im_start|>user").unwrap_or(0)
    };
    // The template ends the last turn with a line break, which nobody samples and nobody is asked for.
    let text = text[start..].trim_end_matches('\n');
    let mut stream = TokenStream::default();
    let mut rest = text;
    while let Some(at) = rest.find(ASSISTANT) {
        let (context, turn) = rest.split_at(at + ASSISTANT.len());
        stream.extend(tokenizer.encode_rendered(context)?, false);
        let end = turn.find(STOP).map_or(turn.len(), |at| at + STOP.len());
        let (turn, after) = turn.split_at(end);
        stream.extend(tokenizer.encode_rendered(turn)?, true);
        rest = after;
    }
    stream.extend(tokenizer.encode_rendered(rest)?, false);
    Ok(stream)
}
