//! XML format (Qwen3-Coder, Qwen3.5, Qwen3.6): `<function=NAME>` with `<parameter=KEY>` values, inside
//! `<tool_call>`, which may be missing.
//!
//! A value is text: one line break at each end belongs to the markup. It ends at `</parameter>`, or, where
//! that is missing, at the next `<parameter=` or `</function>`. What it becomes in JSON is said by the
//! tool's schema: the first of null, integer, number, boolean, object, array, string that the schema allows
//! and the text can be read as; text that fits nothing stays a string. A call without `</function>` was
//! cut off and is malformed.

use super::{find_any, Step, ToolCall, ToolCallFormat};
use serde_json::{Map, Value};

const OPEN: &str = "<tool_call>";
const CLOSE: &str = "</tool_call>";
const FUNCTION: &str = "<function=";
const END_FUNCTION: &str = "</function>";
const PARAMETER: &str = "<parameter=";
const END_PARAMETER: &str = "</parameter>";

/// See the module documentation.
pub struct Qwen3Coder;

impl ToolCallFormat for Qwen3Coder {
    fn name(&self) -> &'static str {
        "qwen3_coder"
    }

    fn openings(&self) -> &'static [&'static str] {
        &[OPEN, FUNCTION]
    }

    fn closings(&self) -> &'static [&'static str] {
        &[END_FUNCTION, CLOSE]
    }

    fn needs_schema(&self) -> bool {
        true
    }

    fn next(&self, text: &str, last: bool, tools: &[Value]) -> Step {
        let wrapped = text.starts_with(OPEN);
        match read(text, wrapped, last, tools) {
            Read::Call(len, call) => Step::Call { len, call },
            Read::More if !last => Step::More,
            _ => {
                let close = if wrapped { CLOSE } else { END_FUNCTION };
                match find_any(text, 0, &[close]) {
                    Some((at, _)) => Step::Malformed {
                        len: at + close.len(),
                    },
                    None if last => Step::Malformed { len: text.len() },
                    None => Step::More,
                }
            }
        }
    }
}

enum Read {
    More,
    Bad,
    Call(usize, ToolCall),
}

struct Cursor<'t> {
    text: &'t str,
    at: usize,
}

impl<'t> Cursor<'t> {
    fn space(&mut self) {
        self.at = self.text.len() - self.rest().trim_start().len();
    }

    fn rest(&self) -> &'t str {
        &self.text[self.at..]
    }

    fn take(&mut self, mark: &str) -> bool {
        let found = self.rest().starts_with(mark);
        self.at += if found { mark.len() } else { 0 };
        found
    }

    /// The text cannot tell yet whether `mark` comes.
    fn may_become(&self, mark: &str) -> bool {
        self.rest().len() < mark.len() && mark.starts_with(self.rest())
    }

    /// A name up to `>`; `None` while it is not complete, an empty one if it cannot be a name.
    fn name(&mut self) -> Option<&'t str> {
        let end = self.rest().find(['>', '\n', '<'])?;
        let name = &self.rest()[..end];
        let whole = self.rest()[end..].starts_with('>');
        self.at += end + 1;
        Some(if whole { name.trim() } else { "" })
    }
}

fn read(text: &str, wrapped: bool, last: bool, tools: &[Value]) -> Read {
    let mut at = Cursor { text, at: 0 };
    if wrapped {
        at.take(OPEN);
        at.space();
    }
    if !at.take(FUNCTION) {
        return if at.may_become(FUNCTION) {
            Read::More
        } else {
            Read::Bad
        };
    }
    let name = match at.name() {
        None => return Read::More,
        Some("") => return Read::Bad,
        Some(name) => name,
    };
    let schema = schema_of(tools, name);
    let mut arguments = Map::new();
    loop {
        at.space();
        if at.take(END_FUNCTION) {
            break;
        }
        if !at.take(PARAMETER) {
            let open = at.may_become(END_FUNCTION) || at.may_become(PARAMETER);
            return if open { Read::More } else { Read::Bad };
        }
        let key = match at.name() {
            None => return Read::More,
            Some("") => return Read::Bad,
            Some(key) => key,
        };
        let marks = [END_PARAMETER, PARAMETER, END_FUNCTION];
        let Some((end, mark)) = find_any(text, at.at, &marks) else {
            return Read::More;
        };
        let value = &text[at.at..end];
        let value = value.strip_prefix('\n').unwrap_or(value);
        let value = value.strip_suffix('\n').unwrap_or(value);
        arguments.insert(key.to_owned(), coerce(value, &schema[key]));
        at.at = if mark == END_PARAMETER {
            end + mark.len()
        } else {
            end
        };
    }
    let end = at.at;
    at.space();
    let len = if at.take(CLOSE) {
        at.at
    } else if at.may_become(CLOSE) && !last {
        return Read::More;
    } else {
        end
    };
    let call = ToolCall {
        name: name.to_owned(),
        arguments: Value::Object(arguments).to_string(),
    };
    Read::Call(len, call)
}

/// The `properties` of a tool's parameters; null for an unknown one.
fn schema_of<'s>(tools: &'s [Value], name: &str) -> &'s Value {
    let tool = tools.iter().find(|tool| tool["function"]["name"] == name);
    tool.map_or(&Value::Null, |tool| &tool["function"]["parameters"]["properties"])
}

/// The types that a schema allows.
fn types<'s>(schema: &'s Value, out: &mut Vec<&'s str>) {
    match &schema["type"] {
        Value::String(name) => out.push(name),
        Value::Array(names) => out.extend(names.iter().filter_map(Value::as_str)),
        _ => {}
    }
    for key in ["anyOf", "oneOf", "allOf"] {
        for option in schema[key].as_array().into_iter().flatten() {
            types(option, out);
        }
    }
}

/// A parameter's text as JSON; see the module documentation.
fn coerce(text: &str, schema: &Value) -> Value {
    let mut allowed = Vec::new();
    types(schema, &mut allowed);
    let word = text.trim();
    let parsed = || serde_json::from_str::<Value>(word).ok();
    let order = ["null", "integer", "number", "boolean", "object", "array"];
    for name in order.iter().filter(|name| allowed.contains(name)) {
        let value = match *name {
            "null" => word.eq_ignore_ascii_case("null").then_some(Value::Null),
            "integer" => parsed().filter(|v| v.is_i64() || v.is_u64()),
            "number" => parsed().filter(Value::is_number),
            "boolean" if word.eq_ignore_ascii_case("true") => Some(Value::Bool(true)),
            "boolean" if word.eq_ignore_ascii_case("false") => Some(Value::Bool(false)),
            "object" => parsed().filter(Value::is_object),
            "array" => parsed().filter(Value::is_array),
            _ => None,
        };
        if let Some(value) = value {
            return value;
        }
    }
    Value::String(text.to_owned())
}
