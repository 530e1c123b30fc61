//! One form for messages that mean the same.

use serde_json::{Map, Value};

/// A message that cannot be rendered.
#[derive(Debug, thiserror::Error, PartialEq)]
pub enum MessageError {
    /// It is not an object with a `role`.
    #[error("a message must be an object with a `role` of type string")]
    NoRole,
    /// Its content has an unusable type.
    #[error("`content` of a `{role}` message must be a string, null or a list of parts")]
    Content {
        /// Role of the message.
        role: String,
    },
    /// A part is not text.
    #[error("content of type `{kind}` is not supported: this model takes text only")]
    Part {
        /// Its `type`.
        kind: String,
    },
    /// Its role is none of the API's.
    #[error("`role` of a message is `{role}`; it must be one of {known}")]
    Role {
        /// Its role.
        role: String,
        /// What it may be.
        known: String,
    },
    /// Its calls are not a list.
    #[error("`tool_calls` of a message must be a list")]
    ToolCalls,
    /// A tool call has no function name.
    #[error("a tool call of an assistant message must have `function.name`")]
    ToolCall,
}

/// Content as a string and tool-call arguments as a mapping (text that is not a JSON object stays text).
/// Everything else is kept as it is. A message without `content` gets an empty one.
pub fn normalize(message: &Value) -> Result<Value, MessageError> {
    let object = message.as_object().ok_or(MessageError::NoRole)?;
    let role = object
        .get("role")
        .and_then(Value::as_str)
        .ok_or(MessageError::NoRole)?;
    let mut out = Map::with_capacity(object.len() + 1);
    for (key, value) in object {
        match key.as_str() {
            "content" => {
                out.insert(key.clone(), Value::String(content_text(role, value)?));
            }
            "tool_calls" => match value {
                Value::Array(calls) if !calls.is_empty() => {
                    let calls = calls.iter().map(tool_call).collect::<Result<_, _>>()?;
                    out.insert(key.clone(), Value::Array(calls));
                }
                Value::Array(_) | Value::Null => {}
                _ => return Err(MessageError::ToolCalls),
            },
            _ => {
                out.insert(key.clone(), value.clone());
            }
        }
    }
    out.entry("content")
        .or_insert_with(|| Value::String(String::new()));
    Ok(Value::Object(out))
}

/// The text of a `content` field.
pub(super) fn content_text(role: &str, content: &Value) -> Result<String, MessageError> {
    match content {
        Value::Null => Ok(String::new()),
        Value::String(text) => Ok(text.clone()),
        Value::Array(parts) => {
            let mut text = String::new();
            for part in parts {
                match (part.as_str(), part["text"].as_str()) {
                    (Some(part), _) => text.push_str(part),
                    (None, Some(part)) => text.push_str(part),
                    _ => {
                        return Err(MessageError::Part {
                            kind: part["type"].as_str().unwrap_or("unknown").to_owned(),
                        })
                    }
                }
            }
            Ok(text)
        }
        _ => Err(MessageError::Content {
            role: role.to_owned(),
        }),
    }
}

fn tool_call(call: &Value) -> Result<Value, MessageError> {
    let mut call = call.clone();
    let function = call.get_mut("function").and_then(Value::as_object_mut);
    let function = function
        .filter(|f| f.get("name").is_some_and(Value::is_string))
        .ok_or(MessageError::ToolCall)?;
    let arguments = match function.get("arguments") {
        None | Some(Value::Null) => Value::Object(Map::new()),
        Some(Value::String(text)) if text.trim().is_empty() => Value::Object(Map::new()),
        Some(Value::String(text)) => match serde_json::from_str::<Value>(text) {
            Ok(value @ Value::Object(_)) => value,
            _ => Value::String(text.clone()),
        },
        Some(other) => other.clone(),
    };
    function.insert("arguments".to_owned(), arguments);
    Ok(call)
}
