//! A request body, taken apart without parsing what was seen before.
//!
//! An agent sends its whole conversation with every turn. [`take_apart`] finds the bytes of each message
//! and of the tools; the capture compares these bytes with those it knows and parses only new ones. Where
//! a message begins with bytes that are known ([`Known`]), its length is known too; others are skipped by
//! counting brackets and skipping strings. The remaining fields are few and are parsed by the protocol.
//! What is skipped without looking inside is checked when it is parsed; [`locate`] then tells line and
//! column in the whole body.

use super::{capture::parse_json, error::ApiError};
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};
use std::ops::RangeInclusive;

/// Tells how long known messages are.
pub trait Known {
    /// Bytes of the message at the start of `rest`, if it is the next one that is known.
    fn length(&mut self, rest: &[u8]) -> Option<usize>;
}

impl Known for super::capture::KnownMessages<'_> {
    fn length(&mut self, rest: &[u8]) -> Option<usize> {
        self.length(rest)
    }
}

/// Nothing is known.
pub struct Nothing;

impl Known for Nothing {
    fn length(&mut self, _: &[u8]) -> Option<usize> {
        None
    }
}

/// Names of the fields that are not parsed.
#[derive(Clone, Copy)]
pub struct Names {
    /// The list of messages.
    pub list: &'static str,
    /// What stands before the messages, if the API has such a field.
    pub head: Option<&'static str>,
}

/// An element of the list.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Element<'b> {
    /// Its bytes; several elements with their commas where these were known as one.
    pub raw: &'b [u8],
    /// [`Known`] told its length.
    pub known: bool,
}

/// The list of messages.
#[derive(Debug)]
pub enum List<'b> {
    /// A list.
    Elements(Vec<Element<'b>>),
    /// Another value.
    Value(&'b [u8]),
}

/// The parts of a body.
#[derive(Debug)]
pub struct Body<'b> {
    /// Messages; `None` if the field is missing.
    pub list: Option<List<'b>>,
    /// The field before the messages, if it is there and not null.
    pub head: Option<&'b [u8]>,
    /// Bytes of the tool list, if it is there, not null and not empty.
    pub tools: Option<&'b [u8]>,
    /// Everything else, as a JSON object.
    rest: Vec<u8>,
}

impl Body<'_> {
    /// The remaining fields. Unknown ones are ignored; a repeated key counts once, the last time. A whole
    /// number may be written with a point (`1.0`), and those that shape the sampling must be in their range
    /// although the session's count.
    pub fn fields<T: DeserializeOwned>(&self) -> Result<T, ApiError> {
        let bad = |text: String| Err(ApiError::BadRequest(text));
        let mut fields: Map<String, Value> = parse_json(&self.rest)
            .map_err(|error| ApiError::BadRequest(format!("a field is not valid JSON: {error}")))?;
        for value in fields.values_mut().filter(|value| value.is_f64()) {
            let whole = value.as_f64().filter(|x| x.fract() == 0.0 && x.abs() < 1e15);
            if let Some(whole) = whole {
                *value = Value::from(whole as i64);
            }
        }
        for (name, range) in SAMPLING {
            let value = fields.get(name).unwrap_or(&Value::Null);
            if !(value.is_null() || value.as_f64().is_some_and(|x| range.contains(&x))) {
                let to = if range.end().is_finite() {
                    format!(" to {}", range.end())
                } else {
                    " on".into()
                };
                return bad(format!(
                    "`{name}` is {value}; it must be a number from {}{to}",
                    range.start()
                ));
            }
        }
        let whole = Value::Object(fields);
        T::deserialize(&whole).or_else(|error| {
            let members = whole.as_object().into_iter().flatten();
            for (name, value) in members {
                let mut alone = Map::new();
                alone.insert(name.clone(), value.clone());
                if let Err(error) = T::deserialize(&Value::Object(alone)) {
                    return bad(format!("`{name}` has a wrong type: {error}"));
                }
            }
            bad(format!("a field has a wrong type: {error}"))
        })
    }
}

/// What the APIs know of numbers that shape the sampling. Upper ends differ between them.
const SAMPLING: [(&str, RangeInclusive<f64>); 3] = [
    ("temperature", 0.0..=f64::INFINITY),
    ("top_p", 0.0..=1.0),
    ("top_k", -1.0..=f64::INFINITY),
];

/// Takes a body apart; see the module documentation.
pub fn take_apart<'b>(body: &'b [u8], names: Names, known: &mut dyn Known) -> Result<Body<'b>, ApiError> {
    scan(body, names, known).ok_or_else(|| locate(body, "the body is not a JSON object"))
}

/// Why a body is not JSON, with line and column; `otherwise` if it is.
pub fn locate(body: &[u8], otherwise: &str) -> ApiError {
    match parse_json::<Value>(body) {
        Err(error) => ApiError::BadRequest(format!(
            "the request body is not valid JSON: {error} (body of {} bytes)",
            body.len()
        )),
        Ok(_) => ApiError::BadRequest(otherwise.to_owned()),
    }
}

/// `None` where the text is not JSON.
fn scan<'b>(body: &'b [u8], names: Names, known: &mut dyn Known) -> Option<Body<'b>> {
    let mut at = Cursor { body, at: 0 };
    let mut out = Body {
        list: None,
        head: None,
        tools: None,
        rest: vec![b'{'],
    };
    at.expect(b'{')?;
    if !at.take(b'}') {
        loop {
            let key = at.value()?;
            let name: String = serde_json::from_slice(key).ok()?;
            at.expect(b':')?;
            // A repeated key replaces the earlier one, as in Python.
            if name == names.list {
                out.list = Some(if at.peek()? == b'[' {
                    List::Elements(at.elements(known)?)
                } else {
                    List::Value(at.value()?)
                });
            } else if Some(name.as_str()) == names.head {
                out.head = Some(at.value()?).filter(|raw| *raw != b"null");
            } else if name == "tools" {
                let value = at.value()?;
                let empty = value == b"null"
                    || value
                        .strip_prefix(b"[")
                        .is_some_and(|rest| rest.trim_ascii_start() == b"]");
                out.tools = (!empty).then_some(value);
            } else {
                let value = at.value()?;
                if out.rest.len() > 1 {
                    out.rest.push(b',');
                }
                out.rest.extend_from_slice(key);
                out.rest.push(b':');
                out.rest.extend_from_slice(value);
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
    out.rest.push(b'}');
    Some(out)
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
    fn elements(&mut self, known: &mut dyn Known) -> Option<Vec<Element<'b>>> {
        let mut out = Vec::new();
        self.expect(b'[')?;
        if self.take(b']') {
            return Some(out);
        }
        loop {
            self.space();
            let rest = &self.body[self.at..];
            out.push(match known.length(rest) {
                Some(length) => {
                    self.at += length;
                    Element {
                        raw: &rest[..length],
                        known: true,
                    }
                }
                None => Element {
                    raw: self.value()?,
                    known: false,
                },
            });
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
            let skip = memchr::memchr2(b'"', b'\\', self.body.get(self.at..)?)?;
            self.at += skip;
            if self.body[self.at] == b'"' {
                self.at += 1;
                return Some(());
            }
            self.at += 2;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use serde_json::json;

    const CHAT: Names = Names {
        list: "messages",
        head: Some("system"),
    };

    fn elements<'b>(body: &Body<'b>) -> Vec<&'b [u8]> {
        match &body.list {
            Some(List::Elements(list)) => list.iter().map(|e| e.raw).collect(),
            _ => Vec::new(),
        }
    }

    #[test]
    fn errors_name_line_and_column() {
        let message = |body: &str| {
            take_apart(body.as_bytes(), CHAT, &mut Nothing)
                .unwrap_err()
                .to_string()
        };
        assert!(message("{\"messages\": [],\n  oops}").contains("line 2 column 3"));
        assert!(message("").contains("line 1 column 0"));
        assert!(message("[1]").contains("JSON object"));
        assert!(message("{\"messages\": [{}]} x").contains("trailing"));
        assert!(message("{\"messages\": [{\"a\": \"unfinished").contains("EOF"));
        assert!(message("{\"messages\": [\"\\").contains("EOF"));
    }

    #[test]
    fn repeated_and_unknown_keys_are_taken_as_python_takes_them() {
        let body = br#"{"messages": [1], "n": 5, "n": 1, "x": {"y": [1, "]"]}, "messages": [2, {"a": "\"}"}], "tools": [ ], "system": null}"#;
        let s = take_apart(body, CHAT, &mut Nothing).unwrap();
        assert_eq!(elements(&s), [b"2".as_slice(), br#"{"a": "\"}"}"#]);
        assert_eq!(
            s.fields::<Value>().unwrap(),
            json!({"n": 1, "x": {"y": [1, "]"]}})
        );
        assert_eq!((s.head, s.tools), (None, None));
    }

    #[test]
    fn fields_of_a_wrong_type_or_range_are_refused_by_name() {
        #[derive(Debug, Default, PartialEq, serde::Deserialize)]
        #[serde(default)]
        struct Fields {
            n: Option<u32>,
            stop: Option<Vec<String>>,
        }
        let read = |body: &str| {
            let body = format!("{{\"messages\": [], {body}}}");
            let parts = take_apart(body.as_bytes(), CHAT, &mut Nothing).unwrap();
            parts.fields::<Fields>().map_err(|error| error.to_string())
        };
        for (name, value) in [
            ("temperature", "-1"),
            ("temperature", "\"hot\""),
            ("temperature", "true"),
            ("top_p", "1.5"),
            ("top_k", "[]"),
            ("n", "1.5"),
            ("n", "-1.0"),
            ("stop", "[1]"),
        ] {
            let error = read(&format!("\"a\": 1, \"{name}\": {value}")).unwrap_err();
            assert!(error.contains(&format!("`{name}`")), "{error}");
        }
        let body =
            r#""n": 1.0, "temperature": 0.0, "top_p": 1.0, "top_k": -1, "beta": {"x": [1]}, "stop": null"#;
        let (n, stop) = (Some(1), None);
        assert_eq!(read(body).unwrap(), Fields { n, stop });
        assert!(read(r#""temperature": null, "top_p": 0.95, "temperature": 2"#).is_ok());
    }

    /// Knows the texts of a list, in order.
    struct Sequence(Vec<Vec<u8>>);

    impl Known for Sequence {
        fn length(&mut self, rest: &[u8]) -> Option<usize> {
            let next = self.0.first()?;
            let length = rest.starts_with(next).then_some(next.len());
            self.0.remove(0);
            length
        }
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

    fn message() -> impl Strategy<Value = Value> {
        (value(), value()).prop_map(|(role, content)| json!({"role": role, "content": content}))
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(crate::serve::proxy::fuzz_cases(1000)))]
        #[test]
        fn splits_what_serde_splits(
            messages in prop::collection::vec(message(), 1..6), tools in value(), other in value(),
            pretty in any::<bool>(), known in 0usize..6, wrong in any::<bool>(),
        ) {
            let body = json!({"a": other, "messages": messages, "tools": tools, "b": 1});
            let text = if pretty { serde_json::to_string_pretty(&body).unwrap() } else { body.to_string() };
            let mut sequence: Vec<Vec<u8>> = messages.iter().take(known).map(|m| m.to_string().into_bytes()).collect();
            if wrong { sequence.insert(sequence.len() / 2, b"{\"other\":1}".to_vec()); }
            let s = take_apart(text.as_bytes(), CHAT, &mut Sequence(sequence)).unwrap();
            let got: Vec<Value> = elements(&s).iter().map(|m| serde_json::from_slice(m).unwrap()).collect();
            prop_assert_eq!(got, messages);
            let got: Value = s.tools.map_or(Value::Null, |t| serde_json::from_slice(t).unwrap());
            prop_assert_eq!(got, if tools == json!([]) { Value::Null } else { tools });
        }

        #[test]
        fn damaged_bodies_never_panic(messages in prop::collection::vec(message(), 1..3), cut in any::<prop::sample::Index>(), byte in any::<u8>()) {
            let mut body = json!({"messages": messages, "n": 1}).to_string().into_bytes();
            let at = cut.index(body.len());
            let _ = take_apart(&body[..at], CHAT, &mut Nothing);
            body[at] = byte;
            if let Ok(s) = take_apart(&body, CHAT, &mut Nothing) {
                for m in elements(&s) { let _ = serde_json::from_slice::<Value>(m); }
            }
        }

        #[test]
        fn any_bytes_never_panic(body in prop::collection::vec(any::<u8>(), 0..60)) {
            let _ = take_apart(&body, CHAT, &mut Nothing);
        }
    }
}
