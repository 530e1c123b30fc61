//! Records the bytes between agents and the proxy, and reads replies out of them as an agent would.

use serde_json::Value;
use std::{
    io::{Read, Write},
    net::Shutdown,
    os::unix::net::{UnixListener, UnixStream},
    path::{Path, PathBuf},
    sync::{Arc, Mutex},
};

/// One connection: bytes of the agent, bytes of the proxy.
type Connection = (Arc<Mutex<Vec<u8>>>, Arc<Mutex<Vec<u8>>>);

/// A unix socket that passes every byte on to another one and keeps a copy.
#[derive(Clone)]
pub struct Recorder {
    /// The socket for agents.
    pub socket: PathBuf,
    connections: Arc<Mutex<Vec<Connection>>>,
}

/// A request and its answer.
#[derive(Clone, Debug)]
pub struct Exchange {
    /// Method.
    pub method: String,
    /// Path after the session, with the query.
    pub path: String,
    /// Names (lower case) and values.
    pub headers: Vec<(String, String)>,
    /// Body.
    pub body: Vec<u8>,
    /// Status; 0 when the answer never came.
    pub status: u16,
    /// The answer's body, as far as it came.
    pub answer: String,
}

impl Exchange {
    /// The request's body.
    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or_default()
    }

    /// A header's value.
    pub fn header(&self, name: &str) -> Option<&str> {
        let found = self.headers.iter().find(|(known, _)| known == name);
        found.map(|(_, value)| value.as_str())
    }

    /// True for a request for a reply.
    pub fn generates(&self) -> bool {
        let path = self.path.split('?').next().unwrap_or_default();
        ["/v1/messages", "/v1/chat/completions", "/v1/responses"].contains(&path)
    }
}

/// A reply as the agent received it.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Received {
    /// Reasoning.
    pub think: String,
    /// Text.
    pub text: String,
    /// Calls: tool, arguments.
    pub calls: Vec<(String, Value)>,
    /// `stop_reason` or `finish_reason`.
    pub reason: String,
}

impl Recorder {
    /// Listens on `socket` and connects to `to`.
    pub fn start(socket: PathBuf, to: &Path) -> Self {
        let listener = UnixListener::bind(&socket).unwrap();
        let connections = Arc::new(Mutex::new(Vec::new()));
        let (kept, to) = (connections.clone(), to.to_path_buf());
        std::thread::spawn(move || {
            for client in listener.incoming() {
                let (Ok(client), Ok(server)) = (client, UnixStream::connect(&to)) else {
                    continue;
                };
                let pair: Connection = Default::default();
                kept.lock().unwrap().push(pair.clone());
                copy(&client, &server, pair.0);
                copy(&server, &client, pair.1);
            }
        });
        Self { socket, connections }
    }

    /// Every request so far, in the order of connections, and in order within one.
    pub fn exchanges(&self) -> Vec<Exchange> {
        let connections = self.connections.lock().unwrap();
        let read =
            |(asked, answered): &Connection| exchanges(&asked.lock().unwrap(), &answered.lock().unwrap());
        connections.iter().flat_map(read).collect()
    }
}

fn copy(from: &UnixStream, to: &UnixStream, kept: Arc<Mutex<Vec<u8>>>) {
    let (mut from, mut to) = (from.try_clone().unwrap(), to.try_clone().unwrap());
    std::thread::spawn(move || {
        let mut buffer = vec![0; 64 << 10];
        while let Ok(count @ 1..) = from.read(&mut buffer) {
            kept.lock().unwrap().extend(&buffer[..count]);
            if to.write_all(&buffer[..count]).is_err() {
                break;
            }
        }
        // Either end may have gone away first.
        let _ = to.shutdown(Shutdown::Write);
        let _ = from.shutdown(Shutdown::Read);
    });
}

/// First line, headers, body.
type Message = (String, Vec<(String, String)>, Vec<u8>);

/// Splits one HTTP/1.1 message off: first line, headers, body. `None` when it is not complete, unless the
/// stream ended and `cut` takes what is there.
fn message<'b>(bytes: &mut &'b [u8], cut: bool) -> Option<Message> {
    let end = bytes.windows(4).position(|w| w == b"\r\n\r\n")?;
    let head = String::from_utf8_lossy(&bytes[..end]).into_owned();
    let mut rest: &'b [u8] = &bytes[end + 4..];
    let mut lines = head.lines();
    let first = lines.next()?.to_owned();
    let headers: Vec<(String, String)> = lines
        .filter_map(|line| line.split_once(':'))
        .map(|(name, value)| (name.to_lowercase(), value.trim().to_owned()))
        .collect();
    let header = |name: &str| {
        headers
            .iter()
            .find(|(known, _)| known == name)
            .map(|h| h.1.clone())
    };
    let mut body = Vec::new();
    if header("transfer-encoding").is_some_and(|v| v.contains("chunked")) {
        loop {
            let Some(line) = rest.windows(2).position(|w| w == b"\r\n") else {
                return cut.then_some((first, headers, body));
            };
            let size = usize::from_str_radix(String::from_utf8_lossy(&rest[..line]).trim(), 16).unwrap();
            if rest.len() < line + 2 + size + 2 {
                return cut.then_some((first, headers, body));
            }
            body.extend(&rest[line + 2..line + 2 + size]);
            rest = &rest[line + 2 + size + 2..];
            if size == 0 {
                break;
            }
        }
    } else {
        let length = header("content-length").map_or(0, |v| v.parse().unwrap());
        if rest.len() < length {
            return cut.then_some((first, headers, rest.to_vec()));
        }
        body.extend(&rest[..length]);
        rest = &rest[length..];
    }
    *bytes = rest;
    Some((first, headers, body))
}

fn exchanges(mut asked: &[u8], mut answered: &[u8]) -> Vec<Exchange> {
    let mut found = Vec::new();
    while let Some((first, headers, body)) = message(&mut asked, false) {
        let mut words = first.split(' ');
        let method = words.next().unwrap_or_default().to_owned();
        let path = words.next().unwrap_or_default();
        let path = path.find("/v1/").map_or(path, |at| &path[at..]).to_owned();
        let (answer, status) = if method == "HEAD" {
            (None, 200)
        } else {
            let answer = message(&mut answered, true);
            let status = answer
                .as_ref()
                .and_then(|(first, _, _)| first.split(' ').nth(1)?.parse().ok());
            (answer, status.unwrap_or(0))
        };
        found.push(Exchange {
            method,
            path,
            headers,
            body,
            status,
            answer: answer.map_or_else(String::new, |(_, _, body)| {
                String::from_utf8_lossy(&body).into_owned()
            }),
        });
    }
    found
}

/// The events of a stream of server-sent events.
fn events(text: &str) -> Vec<Value> {
    text.lines()
        .filter_map(|line| line.strip_prefix("data:"))
        .filter_map(|data| serde_json::from_str(data.trim()).ok())
        .collect()
}

/// Reads the reply of an answer with status 200, streamed or whole.
pub fn received(exchange: &Exchange) -> Received {
    let streamed = exchange.json()["stream"] == true;
    if exchange.path.starts_with("/v1/messages") {
        messages(&exchange.answer, streamed)
    } else {
        chat(&exchange.answer, streamed)
    }
}

fn messages(text: &str, streamed: bool) -> Received {
    let mut out = Received::default();
    let mut add = |block: &Value, json: &str| match block["type"].as_str().unwrap_or_default() {
        "thinking" => out.think += block["thinking"].as_str().unwrap(),
        "text" => out.text += block["text"].as_str().unwrap(),
        "tool_use" => {
            let input = if json.is_empty() {
                block["input"].clone()
            } else {
                serde_json::from_str(json).unwrap()
            };
            out.calls.push((block["name"].as_str().unwrap().into(), input));
        }
        other => panic!("an unknown block `{other}`"),
    };
    if !streamed {
        let whole: Value = serde_json::from_str(text).unwrap();
        for block in whole["content"].as_array().unwrap() {
            add(block, "");
        }
        out.reason = whole["stop_reason"].as_str().unwrap_or_default().into();
        return out;
    }
    let mut reason = String::new();
    let mut open: Option<(Value, String)> = None;
    for event in events(text) {
        match event["type"].as_str().unwrap_or_default() {
            "content_block_start" => open = Some((event["content_block"].clone(), String::new())),
            "content_block_delta" => {
                let (block, json) = open.as_mut().expect("a block is open");
                let delta = &event["delta"];
                for field in ["text", "thinking"] {
                    if let Some(more) = delta[field].as_str() {
                        let text = block[field].as_str().unwrap().to_owned() + more;
                        block[field] = text.into();
                    }
                }
                *json += delta["partial_json"].as_str().unwrap_or_default();
            }
            "content_block_stop" => {
                let (block, json) = open.take().expect("a block is open");
                add(&block, &json);
            }
            "message_delta" => reason = event["delta"]["stop_reason"].as_str().unwrap_or_default().into(),
            _ => {}
        }
    }
    out.reason = reason;
    out
}

fn chat(text: &str, streamed: bool) -> Received {
    let mut out = Received::default();
    let mut calls: Vec<(String, String)> = Vec::new();
    let choices: Vec<Value> = if streamed {
        events(text)
            .iter()
            .map(|event| event["choices"][0].clone())
            .collect()
    } else {
        let whole: Value = serde_json::from_str(text).unwrap();
        vec![whole["choices"][0].clone()]
    };
    for choice in choices {
        let part = if streamed {
            &choice["delta"]
        } else {
            &choice["message"]
        };
        out.think += part["reasoning_content"].as_str().unwrap_or_default();
        out.text += part["content"].as_str().unwrap_or_default();
        for (at, call) in part["tool_calls"].as_array().into_iter().flatten().enumerate() {
            let index = call["index"].as_u64().map_or(at, |n| n as usize);
            if calls.len() <= index {
                calls.resize(index + 1, Default::default());
            }
            calls[index].0 += call["function"]["name"].as_str().unwrap_or_default();
            calls[index].1 += call["function"]["arguments"].as_str().unwrap_or_default();
        }
        if let Some(reason) = choice["finish_reason"].as_str() {
            out.reason = reason.into();
        }
    }
    let read = |(name, arguments): (String, String)| {
        let value = serde_json::from_str(&arguments).unwrap_or_else(|e| panic!("{name}: `{arguments}`: {e}"));
        (name, value)
    };
    out.calls = calls.into_iter().map(read).collect();
    out
}
