//! Messages to tokens: whole conversations, and what comes after a sampled reply.
//!
//! A sampled reply is never rendered. What follows it in the prompt of the next turn is found by
//! rendering a **short stand-in** for the conversation: one user message and an assistant message with
//! a marker for content and the calls of the real reply, once followed by the new messages. In that
//! text everything after the assistant's end-of-turn token is the suffix, so its cost depends on the new
//! messages alone. The suffix starts right after a control token (or with it, when the reply did not
//! end in it), so encoding it apart gives the same ids as encoding the whole.
//!
//! Some templates refuse a system message after the first one; for these it is rendered as a user's.
//!
//! This is sound if a template renders new messages the same way whatever stands before the last
//! assistant turn. [`Renderer::new`] finds the end-of-turn token and checks that property on probe
//! conversations; a template that fails is refused with the reason.
//!
//! [`early`] refuses what cannot fit before it is rendered or encoded; [`tool_lists`] remembers tool lists.

mod early;
mod tool_lists;

pub use tool_lists::ToolList;

use super::{CaptureError, Item};
use crate::model::{
    chat_template::{ChatTemplate, TemplateError, Tools},
    tokenizer::{Tokenizer, TokenizerError},
    tool_calls::Thinking,
};
use serde_json::{json, Map, Value};
use std::sync::Arc;
use tool_lists::ToolLists;

/// Stands for the content of a sampled reply.
const MARKER: &str = "reply-8c1f4e";

/// A conversation that cannot become tokens.
#[derive(Debug, thiserror::Error)]
pub enum RenderError {
    /// The template failed or refused.
    #[error(transparent)]
    Template(#[from] TemplateError),
    /// The tokenizer failed.
    #[error(transparent)]
    Tokenizer(#[from] TokenizerError),
    /// The text is certainly longer than the window, so it is not encoded to the end.
    #[error("the messages have more than {at_least} tokens, and {limit} fit")]
    TooLong {
        /// Tokens counted so far.
        at_least: usize,
        /// Tokens that fit.
        limit: usize,
    },
    /// The template cannot be used for conversations that grow.
    #[error("the chat template cannot be extended turn by turn: {0}")]
    NotExtensible(String),
}

/// See the module documentation.
pub struct Renderer {
    template: ChatTemplate,
    tokenizer: Tokenizer,
    variables: Map<String, Value>,
    end_of_turn: u32,
    end_text: String,
    /// A system message in mid-history is rendered as one.
    system_anywhere: bool,
    /// Ids of `<think>` and `</think>`, if the template knows them.
    think: Option<[u32; 2]>,
    tools: ToolLists,
}

/// The end of a prompt in which `<think>` may stand.
const PROMPT_TAIL_TOKENS: usize = 8;

impl Renderer {
    /// Checks a template with its tokenizer. `variables` are given to every rendering
    /// (`chat_template_kwargs`).
    pub fn new(
        template: ChatTemplate,
        tokenizer: Tokenizer,
        variables: Map<String, Value>,
    ) -> Result<Self, RenderError> {
        let mut this = Self {
            template,
            tokenizer,
            variables,
            end_of_turn: 0,
            end_text: String::new(),
            system_anywhere: true,
            think: None,
            tools: ToolLists::default(),
        };
        if this.template.source().contains("<think>") {
            let id = |token| this.tokenizer.token_to_id(token);
            this.think = id("<think>")
                .zip(id("</think>"))
                .map(|(open, close)| [open, close]);
        }
        let ended = this.text(&stand_in(&json!({})), None, false)?;
        let tail = ended
            .split_once(MARKER)
            .map(|(_, tail)| tail)
            .ok_or_else(|| RenderError::NotExtensible("it leaves out an assistant's content".into()))?;
        let ids = this.tokenizer.encode_rendered(tail)?;
        let end = ids.iter().find(|id| this.tokenizer.is_special(**id)).copied();
        let end = end
            .filter(|id| this.tokenizer.stop_ids().contains(id))
            .ok_or_else(|| {
                RenderError::NotExtensible(format!(
                    "it ends an assistant's turn with {tail:?}, which holds none of the stop tokens {:?}",
                    this.tokenizer.stop_ids()
                ))
            })?;
        this.end_of_turn = end;
        this.end_text = this.tokenizer.decode_with_special(&[end]);
        this.probe()?;
        let mut mid_history = stand_in(&json!({}));
        mid_history.push(json!({"role": "system", "content": "-"}));
        this.system_anywhere = this.text(&mid_history, None, true).is_ok();
        Ok(this)
    }

    /// Where a reply to this prompt may hold reasoning.
    pub fn thinking(&self, prompt: &[u32]) -> Thinking {
        let Some(think) = self.think else {
            return Thinking::None;
        };
        // After the last control token, where the template speaks; before it others do.
        let tail = prompt.iter().rev().take(PROMPT_TAIL_TOKENS);
        let mut spoken = tail.take_while(|id| !self.tokenizer.is_special(**id));
        match spoken.find(|id| think.contains(id)) {
            Some(id) if *id == think[0] => Thinking::Open,
            _ => Thinking::Possible,
        }
    }

    /// The template.
    pub fn template(&self) -> &ChatTemplate {
        &self.template
    }

    /// Suffixes must be what the template writes at the end of longer conversations.
    fn probe(&self) -> Result<(), RenderError> {
        let calls = json!([
            {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": {"a": "b"}}},
            {"id": "call_2", "type": "function", "function": {"name": "f", "arguments": {}}}
        ]);
        let tools = [
            json!({"type": "function", "function": {"name": "f", "description": "d",
            "parameters": {"type": "object", "properties": {"a": {"type": "string"}}}}}),
        ];
        let user = json!({"role": "user", "content": "next"});
        let result = |id: &str| json!({"role": "tool", "tool_call_id": id, "content": "out"});
        let plain = json!({"role": "assistant", "content": "done"});
        let calling = json!({"role": "assistant", "content": "look", "tool_calls": calls});
        for (reply, new) in [
            (&plain, vec![user.clone()]),
            (&calling, vec![result("call_1"), result("call_2")]),
        ] {
            let suffix = match self.suffix_text(reply, true, &new) {
                // A template may refuse roles that it does not know; requests with them are refused too.
                Err(RenderError::Template(TemplateError::Raised(_))) => continue,
                other => other?,
            };
            for with_tools in [false, true] {
                let mut messages = vec![
                    json!({"role": "system", "content": "rules"}),
                    json!({"role": "user", "content": "begin"}),
                    plain.clone(),
                    json!({"role": "user", "content": "more"}),
                ];
                messages.push(reply.clone());
                messages.extend(new.clone());
                let full = match self.text(&messages, with_tools.then_some(&tools[..]), true) {
                    Err(RenderError::Template(TemplateError::Raised(_))) => continue,
                    other => other?,
                };
                if !full.ends_with(&suffix) {
                    return Err(RenderError::NotExtensible(format!(
                        "after a long conversation new messages are not rendered as {suffix:?}"
                    )));
                }
            }
        }
        Ok(())
    }

    /// The tokenizer.
    pub fn tokenizer(&self) -> &Tokenizer {
        &self.tokenizer
    }

    /// The token by which the template ends an assistant's turn.
    pub fn end_of_turn(&self) -> u32 {
        self.end_of_turn
    }

    /// Reads a tool list; one that is remembered is not read again.
    pub fn tools(&self, item: Item<'_>) -> Result<Arc<ToolList>, CaptureError> {
        if let Some(known) = self.tools.find(item) {
            return Ok(known);
        }
        let list = item.tools()?;
        let shielded: Vec<Value> = list.iter().map(|t| self.tokenizer.shield_json(t)).collect();
        let rendered = Tools::new(&shielded);
        Ok(Arc::new(ToolList { list, rendered }))
    }

    /// Remembers the tool list of a prompt that fits, so that a refused request leaves nothing.
    pub fn remember_tools(&self, item: Item<'_>, list: Arc<ToolList>) {
        self.tools.remember(item, list);
    }

    /// Number and source bytes of the remembered tool lists.
    #[cfg(test)]
    pub fn remembered_tools(&self) -> (usize, usize) {
        self.tools.usage()
    }

    /// Tokens of a whole conversation up to where the assistant begins. Texts that certainly have more
    /// than `limit` tokens are refused before they are encoded to the end.
    pub fn full(
        &self,
        messages: &[Value],
        tools: Option<&ToolList>,
        limit: usize,
    ) -> Result<Vec<u32>, RenderError> {
        let none = Tools::new(&[]);
        let text = self.text_with(messages, tools.map_or(&none, |tools| &tools.rendered), true)?;
        self.precount(&text, limit)?;
        Ok(self.tokenizer.encode_shared(&text)?)
    }

    /// Tokens from the end of a sampled reply to where the assistant begins again. `reply` is the reply as
    /// a message; `ended` tells that it was sampled up to and including [`Renderer::end_of_turn`].
    pub fn suffix(
        &self,
        reply: &Value,
        ended: bool,
        new: &[Value],
        limit: usize,
    ) -> Result<Vec<u32>, RenderError> {
        let text = self.suffix_text(reply, ended, new)?;
        self.precount(&text, limit)?;
        Ok(self.tokenizer.encode_rendered(&text)?)
    }

    fn suffix_text(&self, reply: &Value, ended: bool, new: &[Value]) -> Result<String, RenderError> {
        let mut messages = stand_in(reply);
        messages.extend_from_slice(new);
        let text = self.text(&messages, None, true)?;
        let after_marker = text.find(MARKER).map(|at| at + MARKER.len()).ok_or_else(|| {
            RenderError::NotExtensible("it leaves out an earlier assistant's content".into())
        })?;
        let end = text[after_marker..]
            .find(&self.end_text)
            .map(|at| at + after_marker)
            .ok_or_else(|| RenderError::NotExtensible(format!("no {} after a reply", self.end_text)))?;
        let start = if ended { end + self.end_text.len() } else { end };
        Ok(text[start..].to_owned())
    }

    fn text(
        &self,
        messages: &[Value],
        tools: Option<&[Value]>,
        generation_prompt: bool,
    ) -> Result<String, RenderError> {
        let tools: Vec<Value> = tools
            .unwrap_or_default()
            .iter()
            .map(|t| self.tokenizer.shield_json(t))
            .collect();
        self.text_with(messages, &Tools::new(&tools), generation_prompt)
    }

    fn text_with(
        &self,
        messages: &[Value],
        tools: &Tools,
        generation_prompt: bool,
    ) -> Result<String, RenderError> {
        let mut messages: Vec<Value> = messages.iter().map(|m| self.tokenizer.shield_json(m)).collect();
        if !self.system_anywhere {
            for message in messages.iter_mut().skip(1).filter(|m| m["role"] == "system") {
                message["role"] = json!("user");
            }
        }
        Ok(self
            .template
            .render_tools(&messages, tools, generation_prompt, &self.variables)?)
    }
}

/// A user's message and an assistant's with the marker and the calls of `reply`, without their arguments.
fn stand_in(reply: &Value) -> Vec<Value> {
    let mut assistant = json!({"role": "assistant", "content": MARKER});
    if let Some(calls) = reply["tool_calls"].as_array().filter(|calls| !calls.is_empty()) {
        let calls = calls.iter().map(|call| {
            json!({"id": call["id"], "type": "function",
                   "function": {"name": call["function"]["name"], "arguments": {}}})
        });
        assistant["tool_calls"] = calls.collect();
    }
    vec![json!({"role": "user", "content": "-"}), assistant]
}
