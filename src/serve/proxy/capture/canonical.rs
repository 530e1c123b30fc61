//! When are two messages the same message?
//!
//! Agents repeat the conversation with every request and change its form on the way: content flips
//! between a string and a list of text parts, cache marks move, arguments are printed again with other
//! spacing, null becomes an empty string. [`Canonical`] keeps what a template could render and nothing
//! else. An assistant's content is compared without its white space, and its reasoning not at all, since agents
//! trim the one and drop the other; what the model said is restored from tokens.
//!
//! Claude Code repeats a call not as it was made but as it carried it out: it adds the defaults of the tool's
//! schema, takes white space from the ends of lines, unescapes `\\;`, and leaves out a `cd` to the folder that it
//! is in. A call that comes back under its own id with no more than these changes is the same call
//! ([`tidied`]); with any other it is not.

use crate::model::chat_template::{normalize, MessageError};
use serde_json::Value;

/// A message without its form.
#[derive(Clone, Debug, PartialEq)]
pub struct Canonical {
    role: String,
    content: String,
    name: Option<String>,
    tool_call_id: Option<String>,
    calls: Vec<Call>,
}

#[derive(Clone, Debug, PartialEq)]
struct Call {
    id: Option<String>,
    name: String,
    arguments: Value,
}

impl Canonical {
    /// Reads a message in OpenAI form.
    pub fn of(message: &Value) -> Result<Self, MessageError> {
        let message = normalize(message)?;
        let text = |key: &str| message[key].as_str().filter(|t| !t.is_empty()).map(str::to_owned);
        let role = text("role").unwrap_or_default();
        let content = message["content"].as_str().unwrap_or_default();
        let assistant = role == "assistant";
        let calls = message["tool_calls"].as_array().into_iter().flatten();
        Ok(Self {
            content: if assistant {
                content.split_whitespace().collect()
            } else {
                content.to_owned()
            },
            name: text("name").filter(|_| role != "tool"),
            tool_call_id: text("tool_call_id"),
            calls: calls
                .map(|call| Call {
                    id: call["id"].as_str().filter(|t| !t.is_empty()).map(str::to_owned),
                    name: call["function"]["name"].as_str().unwrap_or_default().to_owned(),
                    arguments: call["function"]["arguments"].clone(),
                })
                .collect(),
            role,
        })
    }

    /// Its text; an assistant's has no white space.
    pub fn content(&self) -> &str {
        &self.content
    }

    /// The same message; ids of tool calls count where both have one.
    pub fn same(&self, other: &Self) -> bool {
        let ids_agree = |a: &Option<String>, b: &Option<String>| match (a, b) {
            (Some(a), Some(b)) => a == b,
            _ => true,
        };
        self.role == other.role
            && self.content == other.content
            && self.name == other.name
            && self.tool_call_id == other.tool_call_id
            && self.calls.len() == other.calls.len()
            && self
                .calls
                .iter()
                .zip(&other.calls)
                .all(|(a, b)| ids_agree(&a.id, &b.id) && a.name == b.name && a.same_arguments(b))
    }
}

impl Call {
    fn same_arguments(&self, other: &Self) -> bool {
        self.arguments == other.arguments
            || (self.id.is_some() && self.id == other.id && tidied(&self.arguments, &other.arguments))
    }
}

/// The arguments differ at most by what an agent does to them when it carries a call out; see the module.
fn tidied(a: &Value, b: &Value) -> bool {
    match (a, b) {
        (Value::Object(a), Value::Object(b)) => {
            let both = |key: &String| match (a.get(key), b.get(key)) {
                (Some(a), Some(b)) => tidied(a, b),
                (Some(one), None) | (None, Some(one)) => is_empty(one),
                (None, None) => true,
            };
            a.keys().chain(b.keys()).all(both)
        }
        (Value::Array(a), Value::Array(b)) => {
            a.len() == b.len() && a.iter().zip(b).all(|(a, b)| tidied(a, b))
        }
        (Value::String(a), Value::String(b)) => a == b || tidy(a) == tidy(b),
        // A value that the schema wants in another type.
        (Value::String(text), other) | (other, Value::String(text)) => match other {
            Value::Number(_) | Value::Bool(_) => {
                let printed = other.to_string();
                printed == *text
            }
            _ => false,
        },
        _ => a == b,
    }
}

/// What a schema's default usually is.
fn is_empty(value: &Value) -> bool {
    match value {
        Value::Null | Value::Bool(false) => true,
        Value::String(text) => text.is_empty(),
        Value::Array(items) => items.is_empty(),
        Value::Object(members) => members.is_empty(),
        Value::Bool(true) | Value::Number(_) => false,
    }
}

fn tidy(text: &str) -> String {
    let moved = text
        .trim_start()
        .strip_prefix("cd ")
        .and_then(|rest| rest.split_once(" && "));
    let text = match moved {
        Some((folder, command)) if !folder.contains(|c: char| c.is_whitespace() || ";|&".contains(c)) => {
            command
        }
        _ => text,
    };
    let lines: Vec<&str> = text.split('\n').map(str::trim_end).collect();
    lines.join("\n").trim().replace(r"\\;", r"\;")
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn same(a: Value, b: Value) -> bool {
        Canonical::of(&a).unwrap().same(&Canonical::of(&b).unwrap())
    }

    #[test]
    fn changes_of_form_are_the_same_and_changes_of_meaning_are_not() {
        let text = |t: &str| json!({"role": "user", "content": t});
        let parts = json!({"role": "user", "content": [
            {"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}, {"type": "text", "text": "b"}]});
        assert!(same(text("ab"), parts));
        assert!(!same(text("ab"), text("ab ")), "white space of a user counts");
        let call = |content: Value, id: &str, name: &str, arguments: Value| {
            json!({"role": "assistant", "content": content,
                   "tool_calls": [{"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}]})
        };
        let base = || call(Value::Null, "c1", "run", json!("{\"a\":1,\"b\":2}"));
        assert!(same(
            base(),
            call(json!("\n"), "c1", "run", json!("{ \"a\": 1, \"b\": 2 }"))
        ));
        assert!(same(
            base(),
            call(json!([]), "c1", "run", json!({"b": 2, "a": 1}))
        ));
        assert!(!same(
            base(),
            call(Value::Null, "c2", "run", json!("{\"a\":1,\"b\":2}"))
        ));
        assert!(!same(
            base(),
            call(Value::Null, "c1", "ran", json!("{\"a\":1,\"b\":2}"))
        ));
        assert!(!same(
            base(),
            call(Value::Null, "c1", "run", json!("{\"a\":1,\"b\":3}"))
        ));
        assert!(!same(
            base(),
            call(json!("x"), "c1", "run", json!("{\"a\":1,\"b\":2}"))
        ));
        assert!(!same(base(), json!({"role": "assistant", "content": null})));
        let tidied =
            |a: Value, b: Value| same(call(json!(""), "c1", "run", a), call(json!(""), "c1", "run", b));
        assert!(tidied(
            json!({"command": "cd /app && ls -la"}),
            json!({"command": "ls -la"})
        ));
        assert!(tidied(
            json!({"command": r"find . -exec echo {} \\;"}),
            json!({"command": r"find . -exec echo {} \;"})
        ));
        assert!(tidied(
            json!({"old": "a  ", "new": "b \n\n  c\t\n", "line": "5"}),
            json!({"replace_all": false, "old": "a", "new": "b\n\n  c\n", "line": 5})
        ));
        for (a, b) in [
            (json!({"command": "cd /app && ls"}), json!({"command": "ls -a"})),
            (json!({"command": "cd /a; ls"}), json!({"command": "ls"})),
            (json!({"command": "a && b"}), json!({"command": "b"})),
            (json!({"new": "a\n  b"}), json!({"new": "a\nb"})),
            (json!({"a": 1}), json!({"a": 1, "all": true})),
            (json!({"a": 1}), json!({"a": 2})),
        ] {
            assert!(!tidied(a.clone(), b.clone()), "{a} {b}");
        }
        let tool = |id: &str| json!({"role": "tool", "tool_call_id": id, "content": "x"});
        assert!(!same(tool("1"), tool("2")));
    }
}
