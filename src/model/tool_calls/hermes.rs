//! Hermes format (Qwen2.5, Qwen3): `<tool_call>`, a JSON object with `name` and `arguments`,
//! `</tool_call>`. The closing tag may be missing before the next call and at the end of the reply.
//!
//! The end of the JSON is found by reading it, so a string may hold `</tool_call>`.

use super::{find_any, Step, ToolCall, ToolCallFormat};
use serde_json::{Deserializer, Value};

const OPEN: &str = "<tool_call>";
const CLOSE: &str = "</tool_call>";

/// See the module documentation.
pub struct Hermes;

impl ToolCallFormat for Hermes {
    fn name(&self) -> &'static str {
        "hermes"
    }

    fn openings(&self) -> &'static [&'static str] {
        &[OPEN]
    }

    fn closings(&self) -> &'static [&'static str] {
        &[CLOSE]
    }

    fn next(&self, text: &str, last: bool, _tools: &[Value]) -> Step {
        // The markup of something that is no call ends with the first closing tag after `from`.
        let malformed = |from: usize| match find_any(text, from, &[CLOSE]) {
            Some((at, _)) => Step::Malformed {
                len: at + CLOSE.len(),
            },
            None if last => Step::Malformed { len: text.len() },
            None => Step::More,
        };
        let body = &text[OPEN.len()..];
        let mut values = Deserializer::from_str(body).into_iter::<Value>();
        let value = match values.next() {
            Some(Ok(value)) => value,
            Some(Err(error)) if error.is_eof() && !last => return Step::More,
            None if !last => return Step::More,
            _ => return malformed(0),
        };
        let end = OPEN.len() + values.byte_offset();
        let rest = text[end..].trim_start();
        let start_of_rest = text.len() - rest.len();
        let len = if rest.starts_with(CLOSE) {
            start_of_rest + CLOSE.len()
        } else if rest.starts_with(OPEN) {
            start_of_rest
        } else if rest.is_empty() && last {
            text.len()
        } else if !last && (CLOSE.starts_with(rest) || OPEN.starts_with(rest)) {
            return Step::More;
        } else {
            return malformed(end);
        };
        match call(value) {
            Some(call) => Step::Call { len, call },
            None => Step::Malformed { len },
        }
    }
}

/// Arguments must be an object; models also write one as JSON text, which is taken as it is. `null` stands for
/// none, unless another member may hold them; without `arguments` it is no call, as for vLLM.
fn call(mut value: Value) -> Option<ToolCall> {
    let name = value["name"].as_str().filter(|name| !name.is_empty())?.to_owned();
    let members = value.as_object().map_or(0, serde_json::Map::len);
    let arguments = match value.get_mut("arguments").map(Value::take)? {
        Value::Null if members == 2 => "{}".to_owned(),
        Value::Object(map) => Value::Object(map).to_string(),
        Value::String(text) => match serde_json::from_str::<Value>(&text) {
            Ok(Value::Object(_)) => text,
            _ => return None,
        },
        _ => return None,
    };
    Some(ToolCall { name, arguments })
}
