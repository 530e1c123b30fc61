//! Chat completions over plain HTTP, with bounded retries, streamed or not.

use super::{log, Exit, Options};
use serde_json::{json, Map, Value};
use std::io::{BufRead, BufReader, Read};
use std::thread;
use std::time::Duration;

/// Attempts of one request, the first included.
const ATTEMPTS: u32 = 7;
const FIRST_BACKOFF: Duration = Duration::from_millis(250);
const MAX_BACKOFF: Duration = Duration::from_secs(8);
/// A reply larger than this is not a chat completion.
const MAX_REPLY_BYTES: u64 = 64 << 20;

/// A request that found no usable answer.
#[derive(Debug)]
pub struct ClientError {
    /// Exit status of the agent.
    pub exit: Exit,
    /// What happened.
    pub problem: String,
}

/// One answered request.
#[derive(Debug, PartialEq)]
pub struct Reply {
    /// The assistant message, as received; put together from its pieces when it was streamed.
    pub message: Value,
    /// Why generation ended.
    pub finish_reason: Value,
    /// Token counts, where the server tells them.
    pub usage: Value,
}

/// Talks to one endpoint.
pub struct Client {
    http: ureq::Agent,
    url: String,
    api_key: Option<String>,
}

enum Failure {
    /// May work later.
    Passing(String),
    /// Will never work.
    Final(ClientError),
}

impl Client {
    /// A client for `OPENAI_BASE_URL`.
    pub fn new(options: &Options) -> Self {
        let http = ureq::Agent::config_builder()
            .http_status_as_error(false)
            .timeout_global(Some(options.request_timeout))
            .build()
            .new_agent();
        Self {
            http,
            url: format!("{}/chat/completions", options.base_url.trim_end_matches('/')),
            api_key: options.api_key.clone(),
        }
    }

    /// Sends a request until it is answered: connection failures, 408, 429 and 5xx are tried again.
    pub fn complete(&self, body: &Value) -> Result<Reply, ClientError> {
        let text = body.to_string();
        let mut backoff = FIRST_BACKOFF;
        let mut attempt = 1;
        loop {
            let problem = match self.attempt(&text) {
                Ok(reply) => return Ok(reply),
                Err(Failure::Final(error)) => return Err(error),
                Err(Failure::Passing(problem)) => problem,
            };
            if attempt == ATTEMPTS {
                return Err(ClientError {
                    exit: Exit::NoAnswer,
                    problem: format!("{ATTEMPTS} attempts: {problem}"),
                });
            }
            log(json!({"event": "retry", "attempt": attempt, "problem": problem}));
            thread::sleep(backoff);
            backoff = (backoff * 2).min(MAX_BACKOFF);
            attempt += 1;
        }
    }

    fn attempt(&self, body: &str) -> Result<Reply, Failure> {
        let mut request = self
            .http
            .post(&self.url)
            .header("content-type", "application/json");
        if let Some(key) = &self.api_key {
            request = request.header("authorization", format!("Bearer {key}"));
        }
        let mut response = request
            .send(body)
            .map_err(|e| Failure::Passing(format!("{}: {e}", self.url)))?;
        let status = response.status().as_u16();
        let streamed = response
            .headers()
            .get("content-type")
            .and_then(|v| v.to_str().ok())
            .is_some_and(|v| v.starts_with("text/event-stream"));
        let reader = response.body_mut().with_config().limit(MAX_REPLY_BYTES).reader();
        if status == 200 && streamed {
            return read_stream(BufReader::new(reader));
        }
        let mut text = Vec::new();
        let mut reader = reader;
        reader
            .read_to_end(&mut text)
            .map_err(|e| Failure::Passing(format!("reading the reply: {e}")))?;
        let text = String::from_utf8_lossy(&text);
        match status {
            200 => read_whole(&text).map_err(Failure::Final),
            408 | 429 | 500..=599 => Err(Failure::Passing(format!("HTTP {status}: {}", short(&text)))),
            _ => Err(Failure::Final(ClientError {
                exit: Exit::Refused,
                problem: format!("HTTP {status}: {}", short(&text)),
            })),
        }
    }
}

fn bad_reply(problem: impl Into<String>) -> ClientError {
    ClientError {
        exit: Exit::BadReply,
        problem: problem.into(),
    }
}

fn short(text: &str) -> String {
    text.trim().chars().take(500).collect()
}

fn read_whole(text: &str) -> Result<Reply, ClientError> {
    let value: Value = serde_json::from_str(text)
        .map_err(|e| bad_reply(format!("reply is not JSON ({e}): {}", short(text))))?;
    let choice = &value["choices"][0];
    if !choice["message"].is_object() {
        return Err(bad_reply(format!("no choices[0].message in: {}", short(text))));
    }
    Ok(Reply {
        message: choice["message"].clone(),
        finish_reason: choice["finish_reason"].clone(),
        usage: value["usage"].clone(),
    })
}

/// Server-sent events: `data: {chunk}` lines up to `data: [DONE]`.
fn read_stream(reader: impl BufRead) -> Result<Reply, Failure> {
    let mut assembled = Assembled::default();
    for line in reader.lines() {
        let line = line.map_err(|e| Failure::Passing(format!("stream broke off: {e}")))?;
        let Some(data) = line.strip_prefix("data:") else {
            continue; // comments (keep-alive), event names, blank lines
        };
        let data = data.trim();
        if data == "[DONE]" {
            return assembled.finish().map_err(Failure::Final);
        }
        let chunk: Value = serde_json::from_str(data)
            .map_err(|e| Failure::Final(bad_reply(format!("chunk is not JSON ({e}): {}", short(data)))))?;
        if let Some(error) = chunk.get("error") {
            return Err(Failure::Passing(format!(
                "error in the stream: {}",
                short(&error.to_string())
            )));
        }
        assembled.add(&chunk);
    }
    Err(Failure::Passing("the stream ended without [DONE]".into()))
}

/// The message that the pieces of a stream make up.
#[derive(Default)]
struct Assembled {
    message: Map<String, Value>,
    calls: Vec<Value>,
    finish_reason: Value,
    usage: Value,
}

impl Assembled {
    fn add(&mut self, chunk: &Value) {
        if chunk["usage"].is_object() {
            self.usage = chunk["usage"].clone();
        }
        let choice = &chunk["choices"][0];
        if !choice["finish_reason"].is_null() {
            self.finish_reason = choice["finish_reason"].clone();
        }
        let Some(delta) = choice["delta"].as_object() else {
            return;
        };
        for (key, piece) in delta {
            match (key.as_str(), piece) {
                ("tool_calls", Value::Array(pieces)) => pieces.iter().for_each(|p| self.add_call(p)),
                ("role", _) => {
                    self.message.insert(key.clone(), piece.clone());
                }
                _ => append(&mut self.message, key, piece),
            }
        }
    }

    fn add_call(&mut self, piece: &Value) {
        let index = piece["index"].as_u64().unwrap_or(self.calls.len() as u64) as usize;
        // Calls come in order; a gap would be a fault of the server, and is closed.
        let index = index.min(self.calls.len());
        if index == self.calls.len() {
            self.calls
                .push(json!({"id": null, "type": "function", "function": {"name": "", "arguments": ""}}));
        }
        let call = &mut self.calls[index];
        if piece["id"].is_string() {
            call["id"] = piece["id"].clone();
        }
        if let (Some(function), Some(pieces)) =
            (call["function"].as_object_mut(), piece["function"].as_object())
        {
            pieces
                .iter()
                .for_each(|(key, piece)| append(function, key, piece));
        }
    }

    fn finish(mut self) -> Result<Reply, ClientError> {
        if self.message.is_empty() && self.calls.is_empty() {
            return Err(bad_reply("an empty stream"));
        }
        self.message.entry("role").or_insert_with(|| json!("assistant"));
        self.message.entry("content").or_insert(Value::Null);
        if !self.calls.is_empty() {
            self.message.insert("tool_calls".into(), Value::Array(self.calls));
        }
        Ok(Reply {
            message: Value::Object(self.message),
            finish_reason: self.finish_reason,
            usage: self.usage,
        })
    }
}

/// Joins text to text; anything else replaces what was there, and null never does.
fn append(object: &mut Map<String, Value>, key: &str, piece: &Value) {
    match (object.get_mut(key), piece) {
        (Some(Value::String(text)), Value::String(piece)) => text.push_str(piece),
        (Some(_), Value::Null) => {}
        (_, piece) => {
            object.insert(key.to_string(), piece.clone());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stream(lines: &[&str]) -> Result<Reply, Failure> {
        read_stream(lines.join("\n\n").as_bytes())
    }

    #[test]
    fn a_streamed_reply_equals_the_whole_one() {
        let whole = read_whole(
            r#"{"choices":[{"message":{"role":"assistant","content":"Let me look.","tool_calls":[
                {"id":"a","type":"function","function":{"name":"bash","arguments":"{\"command\":\"ls\"}"}},
                {"id":"b","type":"function","function":{"name":"bash","arguments":"{}"}}]},
                "finish_reason":"tool_calls"}],"usage":{"total_tokens":9}}"#,
        )
        .unwrap();
        let streamed = stream(&[
            ": keep-alive",
            r#"data: {"choices":[{"delta":{"role":"assistant","content":""}}]}"#,
            r#"data: {"choices":[{"delta":{"content":"Let me"}}]}"#,
            r#"data: {"choices":[{"delta":{"content":" look."}}]}"#,
            r#"data: {"choices":[{"delta":{"tool_calls":[{"index":0,"id":"a","type":"function","function":{"name":"bash","arguments":""}}]}}]}"#,
            r#"data: {"choices":[{"delta":{"tool_calls":[{"index":0,"function":{"arguments":"{\"command\":"}}]}}]}"#,
            r#"data: {"choices":[{"delta":{"tool_calls":[{"index":0,"function":{"arguments":"\"ls\"}"}},{"index":1,"id":"b","function":{"name":"bash","arguments":"{}"}}]}}]}"#,
            r#"data: {"choices":[{"delta":{},"finish_reason":"tool_calls"}]}"#,
            r#"data: {"choices":[],"usage":{"total_tokens":9}}"#,
            "data: [DONE]",
        ]);
        assert!(matches!(streamed, Ok(reply) if reply == whole));
    }

    #[test]
    fn a_torn_stream_is_tried_again_and_garbage_is_final() {
        let torn = stream(&[r#"data: {"choices":[{"delta":{"content":"a"}}]}"#]);
        assert!(matches!(torn, Err(Failure::Passing(_))));
        assert!(matches!(stream(&["data: {"]), Err(Failure::Final(_))));
        assert!(read_whole("<html>").is_err());
        assert!(read_whole(r#"{"choices":[]}"#).is_err());
    }
}
