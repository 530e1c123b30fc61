//! Hermes format (Qwen2.5, Qwen3): `<tool_call>`, a JSON object with `name` and `arguments`,
//! `</tool_call>`; any number of them, text before the first. A closing tag may be missing at the end.

use super::{ParsedReply, ToolCall, ToolCallFormat};
use serde::Deserialize;
use serde_json::Value;

const OPEN: &str = "<tool_call>";
const CLOSE: &str = "</tool_call>";

/// See the module documentation.
pub struct Hermes;

impl ToolCallFormat for Hermes {
    fn name(&self) -> &'static str {
        "hermes"
    }

    fn opening(&self) -> &'static str {
        OPEN
    }

    fn parse(&self, text: &str, _tools: Option<&[Value]>) -> ParsedReply {
        let Some(first) = text.find(OPEN) else {
            return ParsedReply {
                content: text.to_owned(),
                ..ParsedReply::default()
            };
        };
        let plain = || ParsedReply {
            content: text.to_owned(),
            calls: Vec::new(),
            malformed: true,
        };
        let mut calls = Vec::new();
        let mut rest = &text[first..];
        while let Some(at) = rest.find(OPEN) {
            let body = &rest[at + OPEN.len()..];
            let (body, after) = match body.find(CLOSE) {
                Some(end) => (&body[..end], &body[end + CLOSE.len()..]),
                None => (body, ""),
            };
            let Some(call) = call(body.trim()) else {
                return plain();
            };
            calls.push(call);
            rest = after;
        }
        ParsedReply {
            content: text[..first].to_owned(),
            calls,
            malformed: false,
        }
    }
}

#[derive(Deserialize)]
struct Body {
    name: String,
    #[serde(default)]
    arguments: Option<Value>,
}

/// Arguments must be an object; models also write one as JSON text, which is taken as it is.
fn call(body: &str) -> Option<ToolCall> {
    let parsed: Body = serde_json::from_str(body).ok()?;
    if parsed.name.is_empty() {
        return None;
    }
    let arguments = match parsed.arguments {
        None | Some(Value::Null) => "{}".to_owned(),
        Some(Value::Object(map)) => Value::Object(map).to_string(),
        Some(Value::String(text)) => match serde_json::from_str::<Value>(&text) {
            Ok(Value::Object(_)) => text,
            _ => return None,
        },
        Some(_) => return None,
    };
    Some(ToolCall {
        name: parsed.name,
        arguments,
    })
}
