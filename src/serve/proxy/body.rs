//! A chat request body, taken apart without parsing what was seen before.
//!
//! An agent sends its whole conversation with every turn. [`split`] finds the bytes of each message and
//! of the tools by counting brackets and skipping strings; the capture compares these bytes with those it
//! knows and parses only new ones. All other fields are parsed here. What `split` lets pass without
//! looking inside is checked when it is parsed; [`locate`] then tells line and column in the whole body.

use super::error::ApiError;
use serde::Deserialize;
use serde_json::Value;

/// The parts of a chat request.
#[derive(Debug)]
pub struct Split<'b> {
    /// Bytes of each message.
    pub messages: Vec<&'b [u8]>,
    /// Bytes of the tool list, if it is there and not null.
    pub tools: Option<&'b [u8]>,
    /// Everything else.
    pub fields: Fields,
}

/// Fields that the proxy reads; others are accepted and ignored.
#[derive(Debug, Default, Deserialize, PartialEq)]
#[serde(default)]
pub struct Fields {
    /// Number of replies; only 1 is served.
    pub n: Option<u32>,
    /// Server-sent events.
    pub stream: Option<bool>,
    /// Options of the stream.
    pub stream_options: Option<StreamOptions>,
    /// Older name of `max_completion_tokens`.
    pub max_tokens: Option<i64>,
    /// Most tokens to sample.
    pub max_completion_tokens: Option<i64>,
    /// Texts that end the reply.
    pub stop: Option<Stop>,
    /// Report log-probs of sampled tokens.
    pub logprobs: Option<bool>,
    /// Report token ids of prompt and reply.
    pub return_token_ids: Option<bool>,
    /// `"none"`: the reply is text even if it looks like a tool call.
    pub tool_choice: Option<Value>,
}

/// `stream_options`.
#[derive(Debug, Default, Deserialize, PartialEq)]
#[serde(default)]
pub struct StreamOptions {
    /// A last chunk with token counts.
    pub include_usage: Option<bool>,
}

/// `stop`: one text or several.
#[derive(Debug, Deserialize, PartialEq)]
#[serde(untagged)]
pub enum Stop {
    /// One.
    One(String),
    /// Several.
    Many(Vec<String>),
}

impl Stop {
    /// The texts that are not empty.
    pub fn texts(self) -> Vec<String> {
        let texts = match self {
            Self::One(text) => vec![text],
            Self::Many(texts) => texts,
        };
        texts.into_iter().filter(|t| !t.is_empty()).collect()
    }
}

/// Takes a body apart; see the module documentation.
pub fn split(body: &[u8]) -> Result<Split<'_>, ApiError> {
    scan(body).unwrap_or_else(|| Err(locate(body, "the body is not a JSON object")))
}

/// Why a body is not JSON, with line and column; `otherwise` if it is.
pub fn locate(body: &[u8], otherwise: &str) -> ApiError {
    match serde_json::from_slice::<Value>(body) {
        Err(error) => ApiError::BadRequest(format!(
            "the request body is not valid JSON: {error} (body of {} bytes)",
            body.len()
        )),
        Ok(_) => ApiError::BadRequest(otherwise.to_owned()),
    }
}

/// `None` where the text is not JSON.
fn scan(body: &[u8]) -> Option<Result<Split<'_>, ApiError>> {
    let mut at = Cursor { body, at: 0 };
    let (mut messages, mut tools, mut others) = (None, None, vec![b'{']);
    at.expect(b'{')?;
    if !at.take(b'}') {
        loop {
            let key = at.value()?;
            let name: String = serde_json::from_slice(key).ok()?;
            at.expect(b':')?;
            match name.as_str() {
                "messages" if at.peek()? == b'[' => {
                    // A repeated key replaces the earlier one, as in Python.
                    messages = Some(at.elements()?);
                }
                "tools" => {
                    let value = at.value()?;
                    tools = (value != b"null").then_some(value);
                }
                _ => {
                    let value = at.value()?;
                    if others.len() > 1 {
                        others.push(b',');
                    }
                    others.extend_from_slice(key);
                    others.push(b':');
                    others.extend_from_slice(value);
                }
            }
            if at.take(b'}') {
                break;
            }
            at.expect(b',')?;
        }
    }
    at.space();
    if at.at != body.len() {
        return None;
    }
    others.push(b'}');
    // Through `Value`, so that a repeated key is no error.
    let fields: Value = serde_json::from_slice(&others).ok()?;
    Some(match (serde_json::from_value(fields), messages) {
        (Err(error), _) => Err(ApiError::BadRequest(format!("a field has a wrong type: {error}"))),
        (_, None) => Err(ApiError::BadRequest("`messages` must be a list".into())),
        (_, Some(list)) if list.is_empty() => Err(ApiError::BadRequest("`messages` is empty".into())),
        (Ok(fields), Some(messages)) => Ok(Split {
            messages,
            tools,
            fields,
        }),
    })
}

struct Cursor<'b> {
    body: &'b [u8],
    at: usize,
}

impl<'b> Cursor<'b> {
    fn space(&mut self) {
        while matches!(self.body.get(self.at), Some(b' ' | b'\t' | b'\n' | b'\r')) {
            self.at += 1;
        }
    }

    fn peek(&mut self) -> Option<u8> {
        self.space();
        self.body.get(self.at).copied()
    }

    fn take(&mut self, byte: u8) -> bool {
        let found = self.peek() == Some(byte);
        self.at += usize::from(found);
        found
    }

    fn expect(&mut self, byte: u8) -> Option<()> {
        self.take(byte).then_some(())
    }

    /// The values of a list.
    fn elements(&mut self) -> Option<Vec<&'b [u8]>> {
        let mut out = Vec::new();
        self.expect(b'[')?;
        if self.take(b']') {
            return Some(out);
        }
        loop {
            out.push(self.value()?);
            if self.take(b']') {
                return Some(out);
            }
            self.expect(b',')?;
        }
    }

    /// The bytes of one value: strings are skipped, brackets counted.
    fn value(&mut self) -> Option<&'b [u8]> {
        self.space();
        let start = self.at;
        let mut depth = 0usize;
        loop {
            match self.body.get(self.at)? {
                b'"' => self.string()?,
                b'{' | b'[' => {
                    depth += 1;
                    self.at += 1;
                }
                b'}' | b']' => {
                    depth = depth.checked_sub(1)?;
                    self.at += 1;
                }
                _ if depth == 0 => {
                    let rest = &self.body[self.at..];
                    let end = rest
                        .iter()
                        .position(|b| b",]}: \t\n\r\"{[".contains(b))
                        .unwrap_or(rest.len());
                    self.at += end;
                    return (self.at > start).then(|| &self.body[start..self.at]);
                }
                _ => self.at += 1,
            }
            if depth == 0 {
                return Some(&self.body[start..self.at]);
            }
        }
    }

    fn string(&mut self) -> Option<()> {
        self.at += 1;
        loop {
            match self.body.get(self.at)? {
                b'"' => {
                    self.at += 1;
                    return Some(());
                }
                b'\\' => self.at += 2,
                _ => self.at += 1,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use serde_json::json;

    #[test]
    fn errors_name_line_and_column_or_the_field() {
        let message = |body: &str| split(body.as_bytes()).unwrap_err().to_string();
        assert!(message("{\"messages\": [],\n  oops}").contains("line 2 column 3"));
        assert!(message("").contains("line 1 column 0"));
        assert!(message("[1]").contains("JSON object"));
        assert!(message("{\"messages\": 3}").contains("`messages` must be a list"));
        assert!(message("{}").contains("`messages`"));
        assert!(message("{\"messages\": [{}], \"n\": \"x\"}").contains("wrong type"));
        assert!(message("{\"messages\": [{}]} x").contains("trailing"));
        assert!(message("{\"messages\": [{\"a\": \"unfinished").contains("EOF"));
    }

    #[test]
    fn repeated_and_unknown_keys_are_taken_as_python_takes_them() {
        let body = br#"{"messages": [1], "n": 5, "n": 1, "x": {"y": [1, "]"]}, "messages": [2, {"a": "\"}"}], "tools": null}"#;
        let s = split(body).unwrap();
        assert_eq!(s.messages, [b"2".as_slice(), br#"{"a": "\"}"}"#]);
        assert_eq!((s.fields.n, s.tools), (Some(1), None));
    }

    fn value() -> impl Strategy<Value = Value> {
        let leaf = prop_oneof![
            Just(Value::Null),
            any::<bool>().prop_map(Value::from),
            any::<i32>().prop_map(Value::from),
            "[\\PC\"\\\\\n{}\\[\\],:]{0,8}".prop_map(Value::from),
        ];
        leaf.prop_recursive(3, 20, 4, |inner| {
            prop_oneof![
                prop::collection::vec(inner.clone(), 0..4).prop_map(Value::Array),
                prop::collection::vec(("[a-c\"\\\\]{0,3}", inner), 0..4)
                    .prop_map(|m| Value::Object(m.into_iter().collect())),
            ]
        })
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(1000))]
        #[test]
        fn splits_what_serde_splits(messages in prop::collection::vec(value(), 1..5), tools in value(), other in value(), pretty in any::<bool>()) {
            let body = json!({"a": other, "messages": messages, "tools": tools, "b": 1});
            let text = if pretty { serde_json::to_string_pretty(&body).unwrap() } else { body.to_string() };
            let s = split(text.as_bytes()).unwrap();
            let got: Vec<Value> = s.messages.iter().map(|m| serde_json::from_slice(m).unwrap()).collect();
            prop_assert_eq!(got, messages);
            let got: Value = s.tools.map_or(Value::Null, |t| serde_json::from_slice(t).unwrap());
            prop_assert_eq!(got, tools);
        }

        #[test]
        fn damaged_bodies_never_panic(messages in prop::collection::vec(value(), 1..3), cut in any::<prop::sample::Index>(), byte in any::<u8>()) {
            let mut body = json!({"messages": messages, "n": 1}).to_string().into_bytes();
            let at = cut.index(body.len());
            let _ = split(&body[..at]);
            body[at] = byte;
            if let Ok(s) = split(&body) {
                for m in s.messages { let _ = serde_json::from_slice::<Value>(m); }
            }
        }

        #[test]
        fn any_bytes_never_panic(body in prop::collection::vec(any::<u8>(), 0..60)) {
            let _ = split(&body);
        }
    }
}
