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
//! ([`tidied`]); with any other it is not. Nothing may put in a `cd` or change its folder.
//!
//! Numbers are compared as JavaScript reads them (IEEE doubles): `5000.0` comes back as `5000`.

use crate::model::chat_template::{normalize, MessageError};
use serde_json::{Number, Value};

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

    /// `other` repeats this message; ids of tool calls count where both have one.
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
        alike(&self.arguments, &other.arguments)
            || (self.id.is_some() && self.id == other.id && tidied(&self.arguments, &other.arguments))
    }
}

/// The same value for JavaScript.
fn alike(a: &Value, b: &Value) -> bool {
    match (a, b) {
        (Value::Object(a), Value::Object(b)) => {
            a.len() == b.len() && a.iter().all(|(key, a)| b.get(key).is_some_and(|b| alike(a, b)))
        }
        (Value::Array(a), Value::Array(b)) => a.len() == b.len() && a.iter().zip(b).all(|(a, b)| alike(a, b)),
        (Value::Number(a), Value::Number(b)) => same_number(a, b),
        _ => a == b,
    }
}

/// The same double. One that was read from decimals may be wrong in its last bit.
fn same_number(a: &Number, b: &Number) -> bool {
    let (Some(x), Some(y)) = (a.as_f64(), b.as_f64()) else {
        return a == b;
    };
    let last_bit = (a.is_f64() || b.is_f64()) && (x - y).abs() <= f64::EPSILON * x.abs();
    x == y || last_bit
}

/// The arguments `b` differ from `a` at most by what an agent does when it carries a call out; see the module.
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
        (Value::String(a), Value::String(b)) => {
            let (made, echoed) = (tidy(a), tidy(b));
            made == echoed || without_folder(&made).is_some_and(|command| tidy(command) == echoed)
        }
        // A value that the schema wants in another type.
        (Value::String(text), other) | (other, Value::String(text)) => match other {
            Value::Number(_) | Value::Bool(_) => {
                serde_json::from_str(text).is_ok_and(|value: Value| alike(&value, other))
            }
            _ => false,
        },
        _ => alike(a, b),
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
    let lines: Vec<&str> = text.split('\n').map(str::trim_end).collect();
    lines.join("\n").trim().replace(r"\\;", r"\;")
}

/// A command without the `cd` that it begins with.
fn without_folder(text: &str) -> Option<&str> {
    let (folder, command) = text.strip_prefix("cd ")?.split_once(" && ")?;
    let plain = !folder.contains(|c: char| c.is_whitespace() || ";|&".contains(c));
    plain.then_some(command)
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
            (
                json!({"command": "cd /a && ls"}),
                json!({"command": "cd /b && ls"}),
            ),
            (json!({"command": "ls"}), json!({"command": "cd /b && ls"})),
            (
                json!({"command": "cd /a && cd /b && ls"}),
                json!({"command": "ls"}),
            ),
        ] {
            assert!(!tidied(a.clone(), b.clone()), "{a} {b}");
        }
        let tool = |id: &str| json!({"role": "tool", "tool_call_id": id, "content": "x"});
        assert!(!same(tool("1"), tool("2")));
    }

    #[test]
    fn numbers_are_what_javascript_makes_of_them() {
        let call = |id: Option<&str>, number: &str| {
            let arguments = format!("{{\"a\": [{{\"timeout\": {number}}}]}}");
            json!({"role": "assistant", "content": "",
                   "tool_calls": [{"id": id, "type": "function", "function": {"name": "run", "arguments": arguments}}]})
        };
        for id in [Some("c1"), None] {
            for (made, echoed) in [
                ("5000.0", "5000"),
                ("1e3", "1000"),
                ("-0", "0"),
                ("-0.0", "0"),
                ("12345678901234567890", "12345678901234567000"),
                ("9007199254740993", "9007199254740992"),
                ("1e22", "10000000000000000000000"),
                ("0.10", "0.1"),
                ("0.1000000000000000055511151231257827", "0.1"),
            ] {
                assert!(same(call(id, made), call(id, echoed)), "{made} {echoed}");
            }
            for (made, echoed) in [("5000.5", "5000"), ("1", "-1"), ("1", "\"x\""), ("1", "true")] {
                assert!(!same(call(id, made), call(id, echoed)), "{made} {echoed}");
            }
        }
        assert!(same(call(Some("c1"), "\"5.0\""), call(Some("c1"), "5")));
        assert!(!same(call(None, "\"5\""), call(None, "5")), "other types");
    }
}
