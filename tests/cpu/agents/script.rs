//! What the policy says: replies with tool calls, in the policy's markup.

use serde_json::Value;

/// How a policy writes tool calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Markup {
    /// JSON inside `<tool_call>`.
    Hermes,
    /// XML parameters inside `<tool_call>`.
    Qwen3Coder,
}

impl Markup {
    /// Value of `TOOL_CALL_PARSER`.
    pub fn parser(self) -> &'static str {
        match self {
            Self::Hermes => "hermes",
            Self::Qwen3Coder => "qwen3_coder",
        }
    }
}

/// One reply.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Turn {
    /// Reasoning.
    pub think: String,
    /// Text before the calls.
    pub text: String,
    /// Calls: tool, arguments (an object).
    pub calls: Vec<(String, Value)>,
    /// Ids that are sent as they are, instead of all of the above.
    pub raw: Option<String>,
}

impl Turn {
    /// A reply without a call.
    pub fn says(text: &str) -> Self {
        Self {
            text: text.into(),
            ..Self::default()
        }
    }

    /// A reply with one call.
    pub fn calls(tool: &str, arguments: Value) -> Self {
        Self::default().and(tool, arguments)
    }

    /// One more call.
    pub fn and(mut self, tool: &str, arguments: Value) -> Self {
        self.calls.push((tool.into(), arguments));
        self
    }

    /// With reasoning before it.
    pub fn thinking(mut self, text: &str) -> Self {
        self.think = text.into();
        self
    }

    /// The reply as the policy writes it.
    pub fn render(&self, markup: Markup) -> String {
        if let Some(raw) = &self.raw {
            return raw.clone();
        }
        let mut out = String::new();
        if !self.think.is_empty() {
            out += &format!("<think>\n{}\n</think>\n\n", self.think);
        }
        out += &self.text;
        for (tool, arguments) in &self.calls {
            if !out.is_empty() && !out.ends_with('\n') {
                out.push('\n');
            }
            out += &match markup {
                Markup::Hermes => {
                    let call = serde_json::json!({"name": tool, "arguments": arguments});
                    format!("<tool_call>\n{call}\n</tool_call>")
                }
                Markup::Qwen3Coder => {
                    let mut text = format!("<tool_call>\n<function={tool}>\n");
                    for (name, value) in arguments.as_object().unwrap() {
                        let value = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
                        text += &format!("<parameter={name}>\n{value}\n</parameter>\n");
                    }
                    text + "</function>\n</tool_call>"
                }
            };
        }
        out + "<|im_end|>"
    }
}

/// What the script sees of a request: the prompt as text.
pub struct Asked<'a> {
    /// The decoded prompt, control tokens included.
    pub prompt: &'a str,
}

impl<'a> Asked<'a> {
    /// The messages: role and text.
    pub fn messages(&self) -> Vec<(&'a str, &'a str)> {
        let parts = self.prompt.split("<|im_start|>").skip(1);
        parts
            .map(|part| part.split_once('\n').unwrap_or((part, "")))
            .map(|(role, text)| (role, text.trim_end().trim_end_matches("<|im_end|>")))
            .collect()
    }

    /// Replies in the prompt.
    pub fn replies(&self) -> usize {
        self.messages()
            .iter()
            .filter(|(role, _)| *role == "assistant")
            .count()
            - 1
    }

    /// The first message of the user.
    pub fn first(&self) -> &'a str {
        let messages = self.messages();
        messages
            .iter()
            .find(|(role, _)| *role == "user")
            .map_or("", |m| m.1)
    }

    /// The last message before the reply.
    pub fn last(&self) -> &'a str {
        let messages = self.messages();
        messages[messages.len() - 2].1
    }
}
