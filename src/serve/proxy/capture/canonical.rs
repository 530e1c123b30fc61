//! When are two messages the same message?
//!
//! Agents repeat the conversation with every request and change its form on the way: content flips
//! between a string and a list of text parts, cache marks move, arguments are printed again with other
//! spacing, null becomes an empty string. [`Canonical`] keeps what a template could render and nothing
//! else. An assistant's content is compared without its white space, and its reasoning not at all, since agents
//! trim the one and drop the other; what the model said is restored from tokens.

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
                .all(|(a, b)| ids_agree(&a.id, &b.id) && a.name == b.name && a.arguments == b.arguments)
    }
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
        let tool = |id: &str| json!({"role": "tool", "tool_call_id": id, "content": "x"});
        assert!(!same(tool("1"), tool("2")));
    }
}
