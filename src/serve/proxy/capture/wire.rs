//! Messages as agents write them, in the forms of three APIs, and what they are in OpenAI's chat form,
//! which is what templates take.
//!
//! An [`Item`] is one message of the wire as raw bytes. It becomes no, one or several chat messages:
//!
//! | Form | Item | Chat messages |
//! |---|---|---|
//! | [`Form::Chat`] | a message | itself; `developer` is `system` |
//! | [`Form::AnthropicSystem`] | the `system` field | one system message, without billing headers, which change with every request |
//! | [`Form::Anthropic`] | a message | text, `tool_result` blocks (each a tool message) in their order; an assistant's blocks as one message |
//! | [`Form::Instructions`] | the `instructions` field | one system message |
//! | [`Form::Responses`] | an input item, or neighbouring items of the assistant | one message |
//!
//! Text blocks of one message are joined with a line break between them. Images in a message are refused
//! by name; in a tool's result they become a note, since an agent would send them again with every request.

use super::CaptureError;
use crate::model::chat_template::MessageError;
use serde_json::{json, Map, Value};

/// How an item is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// A message of chat completions.
    Chat,
    /// `system` of the messages API.
    AnthropicSystem,
    /// A message of the messages API.
    Anthropic,
    /// `instructions` of the responses API.
    Instructions,
    /// Input of the responses API: a text, an item, or several items with commas between them.
    Responses,
}

impl Form {
    /// It stands outside the list of messages.
    pub fn is_head(self) -> bool {
        matches!(self, Self::AnthropicSystem | Self::Instructions)
    }
}

/// One message of the wire.
#[derive(Clone, Copy, Debug)]
pub struct Item<'b> {
    /// How it is written.
    pub form: Form,
    /// Its bytes.
    pub raw: &'b [u8],
}

/// Claude Code's first system block, which differs in every request.
const BILLING_HEADER: &str = "x-anthropic-billing-header";
/// What Claude Code writes for an empty text, which its API does not take.
const NO_CONTENT: &str = "(no content)";

impl Item<'_> {
    /// The item as chat messages.
    pub fn messages(&self) -> Result<Vec<Value>, CaptureError> {
        let value = || -> Result<Value, CaptureError> { super::parse(self.raw) };
        match self.form {
            Form::Chat => chat(value()?).map(|message| vec![message]),
            Form::AnthropicSystem | Form::Instructions => system(&value()?),
            Form::Anthropic => anthropic(&value()?),
            Form::Responses => {
                let list = [b"[", self.raw, b"]"].concat();
                match super::parse(&list)? {
                    Value::Array(items) => responses(&items),
                    _ => Ok(Vec::new()),
                }
            }
        }
    }

    /// A tool list as chat completions write it. Tools that the server would run itself (no schema) are
    /// left out: the policy cannot call them.
    pub fn tools(&self) -> Result<Vec<Value>, CaptureError> {
        let list = match super::parse(self.raw)? {
            Value::Null => return Ok(Vec::new()),
            Value::Array(list) => list,
            _ => return Err(CaptureError::Json("`tools` must be a list".into())),
        };
        for (index, tool) in list.iter().enumerate() {
            if let Some((field, kind)) = self.tool_fault(tool) {
                return Err(CaptureError::Json(format!(
                    "`tools[{index}]{field}` must be {kind}"
                )));
            }
        }
        Ok(match self.form {
            Form::Anthropic => list
                .iter()
                .filter(|tool| tool["input_schema"].is_object())
                .map(|tool| function(tool, &tool["input_schema"]))
                .collect(),
            Form::Responses => list
                .iter()
                .filter(|tool| tool["type"] == "function")
                .map(|tool| function(tool, &tool["parameters"]))
                .collect(),
            _ => list,
        })
    }
}

impl Item<'_> {
    /// The field of a tool that is wrong, and what it must be. Of tools that a server would run itself only the
    /// type is known.
    fn tool_fault(&self, tool: &Value) -> Option<(&'static str, &'static str)> {
        if !tool.is_object() {
            return Some(("", "an object"));
        }
        let named = |tool: &Value| tool["name"].as_str().is_some_and(|name| !name.is_empty());
        let kind = tool["type"].as_str();
        if kind.is_none() && !tool["type"].is_null() {
            return Some((".type", "a string"));
        }
        let name = "a string that is not empty";
        match (self.form, kind) {
            (Form::Anthropic, None | Some("custom")) if !named(tool) => Some((".name", name)),
            (Form::Anthropic, None | Some("custom")) if !tool["input_schema"].is_object() => {
                Some((".input_schema", "an object"))
            }
            (Form::Responses, Some("function")) if !named(tool) => Some((".name", name)),
            (Form::Responses, None) => Some((".type", "a string")),
            (Form::Chat, None | Some("function")) if !named(&tool["function"]) => {
                Some((".function.name", name))
            }
            _ => None,
        }
    }
}

/// Refuses a message whose role the API does not have: a template would leave it out.
fn check_role(role: &Value, known: &[&str]) -> Result<(), MessageError> {
    match role.as_str() {
        None => Err(MessageError::NoRole),
        Some(role) if known.contains(&role) => Ok(()),
        Some(role) => Err(MessageError::Role {
            role: role.to_owned(),
            known: known.join(", "),
        }),
    }
}

fn function(tool: &Value, parameters: &Value) -> Value {
    let mut function = Map::new();
    function.insert("name".into(), tool["name"].clone());
    if tool["description"].is_string() {
        function.insert("description".into(), tool["description"].clone());
    }
    function.insert("parameters".into(), parameters.clone());
    json!({"type": "function", "function": function})
}

fn chat(mut message: Value) -> Result<Value, CaptureError> {
    check_role(
        &message["role"],
        &["system", "developer", "user", "assistant", "tool"],
    )?;
    if message["role"] == "developer" {
        message["role"] = json!("system");
    }
    Ok(message)
}

fn system(value: &Value) -> Result<Vec<Value>, CaptureError> {
    let text = match value {
        Value::Array(blocks) => {
            let blocks: Vec<Value> = blocks
                .iter()
                .filter(|b| !b["text"].as_str().is_some_and(|t| t.starts_with(BILLING_HEADER)))
                .cloned()
                .collect();
            text_of("system", &Value::Array(blocks))?
        }
        other => text_of("system", other)?,
    };
    Ok(if text.is_empty() {
        Vec::new()
    } else {
        vec![json!({"role": "system", "content": text})]
    })
}

/// Text of a string or of text blocks.
fn text_of(role: &str, content: &Value) -> Result<String, CaptureError> {
    match content {
        Value::Null => Ok(String::new()),
        Value::String(text) => Ok(text.clone()),
        Value::Array(blocks) => {
            let mut out = String::new();
            for block in blocks {
                join(&mut out, text_block(block)?);
            }
            Ok(out)
        }
        _ => Err(MessageError::Content {
            role: role.to_owned(),
        }
        .into()),
    }
}

fn text_block(block: &Value) -> Result<&str, MessageError> {
    let text = block.as_str().or_else(|| block["text"].as_str());
    text.or_else(|| block["refusal"].as_str())
        .ok_or_else(|| MessageError::Part {
            kind: block["type"].as_str().unwrap_or("unknown").to_owned(),
        })
}

fn join(out: &mut String, text: &str) {
    if !(out.is_empty() || text.is_empty() || out.ends_with('\n')) {
        out.push('\n');
    }
    out.push_str(text);
}

/// A tool's output; what is no text becomes a note.
fn tool_output(content: &Value) -> String {
    match content {
        Value::String(text) => text.clone(),
        Value::Array(blocks) => {
            let mut out = String::new();
            for block in blocks {
                match text_block(block) {
                    Ok(text) => join(&mut out, text),
                    Err(_) => {
                        let kind = block["type"].as_str().unwrap_or("unknown");
                        let name = block["tool_name"]
                            .as_str()
                            .map_or(String::new(), |n| format!(": {n}"));
                        join(&mut out, &format!("[{kind}{name}]"));
                    }
                }
            }
            out
        }
        Value::Null => String::new(),
        other => other.to_string(),
    }
}

fn anthropic(message: &Value) -> Result<Vec<Value>, CaptureError> {
    check_role(&message["role"], &["system", "user", "assistant"])?;
    let role = message["role"].as_str().ok_or(MessageError::NoRole)?;
    let content = &message["content"];
    let blocks = match content {
        Value::Array(blocks) => blocks,
        other => {
            let text = text_of(role, other)?;
            let text = if role == "assistant" && text == NO_CONTENT {
                String::new()
            } else {
                text
            };
            return Ok(vec![json!({"role": role, "content": text})]);
        }
    };
    if role == "assistant" {
        return assistant(blocks).map(|message| vec![message]);
    }
    let mut out = Vec::new();
    let mut text = String::new();
    let flush = |text: &mut String, out: &mut Vec<Value>| {
        if !text.is_empty() {
            out.push(json!({"role": role, "content": std::mem::take(text)}));
        }
    };
    for block in blocks {
        if block["type"] == "tool_result" {
            flush(&mut text, &mut out);
            out.push(json!({"role": "tool", "tool_call_id": block["tool_use_id"],
                            "content": tool_output(&block["content"])}));
        } else {
            join(&mut text, text_block(block)?);
        }
    }
    if out.is_empty() || !text.is_empty() {
        out.push(json!({"role": role, "content": text}));
    }
    Ok(out)
}

fn assistant(blocks: &[Value]) -> Result<Value, CaptureError> {
    let mut message = Assistant::default();
    for block in blocks {
        match block["type"].as_str().unwrap_or("text") {
            "thinking" => join(
                &mut message.reasoning,
                block["thinking"].as_str().unwrap_or_default(),
            ),
            "redacted_thinking" => {}
            "tool_use" => message.call(&block["id"], &block["name"], block["input"].clone()),
            _ => {
                let text = text_block(block)?;
                if text != NO_CONTENT {
                    join(&mut message.text, text);
                }
            }
        }
    }
    Ok(message.into_value())
}

#[derive(Default)]
struct Assistant {
    text: String,
    reasoning: String,
    calls: Vec<Value>,
}

impl Assistant {
    fn call(&mut self, id: &Value, name: &Value, arguments: Value) {
        self.calls
            .push(json!({"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}));
    }

    fn into_value(self) -> Value {
        let mut message = json!({"role": "assistant", "content": self.text});
        if !self.reasoning.is_empty() {
            message["reasoning_content"] = json!(self.reasoning);
        }
        if !self.calls.is_empty() {
            message["tool_calls"] = Value::Array(self.calls);
        }
        message
    }
}

/// True for input items that are a part of a reply.
pub fn is_reply_item(raw: &[u8]) -> bool {
    #[derive(serde::Deserialize)]
    struct Head {
        #[serde(rename = "type")]
        kind: Option<String>,
        role: Option<String>,
    }
    match super::parse_json::<Head>(raw) {
        Ok(head) => match head.kind.as_deref() {
            Some("function_call" | "reasoning") => true,
            Some("message") | None => head.role.as_deref() == Some("assistant"),
            _ => false,
        },
        Err(_) => false,
    }
}

fn responses(items: &[Value]) -> Result<Vec<Value>, CaptureError> {
    let mut out = Vec::new();
    let mut reply: Option<Assistant> = None;
    for item in items {
        if let Some(text) = item.as_str() {
            out.push(json!({"role": "user", "content": text}));
            continue;
        }
        let kind = item["type"].as_str().unwrap_or("message");
        let of_reply = matches!(kind, "function_call" | "reasoning") || item["role"] == "assistant";
        if !of_reply {
            out.extend(reply.take().map(Assistant::into_value));
        }
        match kind {
            "message" if of_reply => {
                let text = text_of("assistant", &item["content"])?;
                join(&mut reply.get_or_insert_default().text, &text);
            }
            "message" => {
                let role = item["role"].as_str().ok_or(MessageError::NoRole)?;
                let content = text_of(role, &item["content"])?;
                chat(json!({"role": role, "content": content})).map(|message| out.push(message))?;
            }
            "function_call" => {
                let arguments = item["arguments"].clone();
                reply
                    .get_or_insert_default()
                    .call(&item["call_id"], &item["name"], arguments);
            }
            "reasoning" => {
                let reply = reply.get_or_insert_default();
                for part in item["summary"].as_array().into_iter().flatten() {
                    join(&mut reply.reasoning, part["text"].as_str().unwrap_or_default());
                }
            }
            "function_call_output" => out.push(json!({"role": "tool", "tool_call_id": item["call_id"],
                                                      "content": tool_output(&item["output"])})),
            other => {
                return Err(MessageError::Part {
                    kind: other.to_owned(),
                }
                .into())
            }
        }
    }
    out.extend(reply.map(Assistant::into_value));
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn messages(form: Form, value: Value) -> Vec<Value> {
        let raw = value.to_string();
        Item {
            form,
            raw: raw.as_bytes(),
        }
        .messages()
        .unwrap()
    }

    #[test]
    fn blocks_become_chat_messages_in_their_order() {
        let user = json!({"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "a"}, {"type": "image", "source": {}}], "is_error": false},
            {"type": "tool_result", "tool_use_id": "t2", "content": "b"},
            {"type": "text", "text": "go", "cache_control": {"type": "ephemeral"}}, {"type": "text", "text": "on"}]});
        assert_eq!(
            messages(Form::Anthropic, user),
            [
                json!({"role": "tool", "tool_call_id": "t1", "content": "a\n[image]"}),
                json!({"role": "tool", "tool_call_id": "t2", "content": "b"}),
                json!({"role": "user", "content": "go\non"}),
            ]
        );
        let reply = json!({"role": "assistant", "content": [
            {"type": "thinking", "thinking": "hm", "signature": "x"}, {"type": "text", "text": "I look."},
            {"type": "tool_use", "id": "t1", "name": "Bash", "input": {"command": "ls"}}]});
        assert_eq!(
            messages(Form::Anthropic, reply),
            [
                json!({"role": "assistant", "content": "I look.", "reasoning_content": "hm", "tool_calls":
                [{"id": "t1", "type": "function", "function": {"name": "Bash", "arguments": {"command": "ls"}}}]})
            ]
        );
        let image = json!({"role": "user", "content": [{"type": "image", "source": {}}]}).to_string();
        let image = Item {
            form: Form::Anthropic,
            raw: image.as_bytes(),
        };
        assert!(image.messages().unwrap_err().to_string().contains("`image`"));
        let system = json!([{"type": "text", "text": "x-anthropic-billing-header: cch=1"}, {"type": "text", "text": "rules"}]);
        assert_eq!(
            messages(Form::AnthropicSystem, system),
            [json!({"role": "system", "content": "rules"})]
        );
    }

    #[test]
    fn items_of_a_reply_become_one_message() {
        let items = r#"{"type":"reasoning","summary":[{"type":"summary_text","text":"hm"}]},
            {"type":"message","role":"assistant","content":[{"type":"output_text","text":"I look."}]},
            {"type":"function_call","call_id":"c1","name":"run","arguments":"{}"}"#;
        let item = Item {
            form: Form::Responses,
            raw: items.as_bytes(),
        };
        assert_eq!(
            item.messages().unwrap(),
            [
                json!({"role": "assistant", "content": "I look.", "reasoning_content": "hm", "tool_calls":
                [{"id": "c1", "type": "function", "function": {"name": "run", "arguments": "{}"}}]})
            ]
        );
        assert!(is_reply_item(br#"{"type":"function_call","call_id":"c1"}"#));
        assert!(is_reply_item(br#"{"role":"assistant","content":"x"}"#));
        assert!(!is_reply_item(
            br#"{"type":"function_call_output","call_id":"c1"}"#
        ));
        assert_eq!(
            messages(Form::Responses, json!("hi")),
            [json!({"role": "user", "content": "hi"})]
        );
    }

    #[test]
    fn tools_become_functions() {
        let tools = json!([{"name": "Bash", "description": "d", "input_schema": {"type": "object"}, "defer_loading": true},
                           {"type": "web_search_20250305", "name": "web_search"}])
        .to_string();
        let item = Item {
            form: Form::Anthropic,
            raw: tools.as_bytes(),
        };
        assert_eq!(
            item.tools().unwrap(),
            [
                json!({"type": "function", "function": {"name": "Bash", "description": "d", "parameters": {"type": "object"}}})
            ]
        );
    }

    #[test]
    fn tools_and_roles_that_mean_nothing_are_refused_by_field() {
        let tools = |form, list: Value| {
            let raw = list.to_string();
            let raw = raw.as_bytes();
            Item { form, raw }.tools().map_err(|error| error.to_string())
        };
        for form in [Form::Chat, Form::Anthropic, Form::Responses] {
            assert_eq!(
                tools(form, json!([5])).unwrap_err(),
                "`tools[0]` must be an object"
            );
            assert!(tools(form, json!("a")).unwrap_err().contains("`tools`"));
            assert!(tools(form, json!([{}])).unwrap_err().contains("`tools[0]."));
            assert!(tools(form, json!([{"type": 5}]))
                .unwrap_err()
                .contains("`tools[0].type`"));
        }
        let no_schema = json!([{"name": "a", "input_schema": {}}, {"name": "b"}]);
        let error = tools(Form::Anthropic, no_schema).unwrap_err();
        assert!(error.contains("`tools[1].input_schema`"), "{error}");
        for (form, server) in [
            (
                Form::Anthropic,
                json!({"type": "mcp_toolset", "mcp_server_name": "x"}),
            ),
            (Form::Responses, json!({"type": "web_search"})),
            (Form::Responses, json!({"type": "custom", "name": "apply_patch"})),
            (Form::Chat, json!({"type": "custom", "custom": {"name": "x"}})),
            (Form::Chat, json!({"function": {"name": "x"}, "strict": true})),
        ] {
            assert!(tools(form, json!([server])).is_ok(), "{server}");
        }
        let refused = |form, value: Value| {
            let raw = value.to_string();
            let raw = raw.as_bytes();
            Item { form, raw }.messages().unwrap_err().to_string()
        };
        for form in [Form::Chat, Form::Anthropic, Form::Responses] {
            let error = refused(form, json!({"role": "xx", "content": "a"}));
            assert!(error.contains("`role`") && error.contains("`xx`"), "{error}");
        }
    }
}
