//! A reply as server-sent events.
//!
//! Order of events: headers and a chunk with the role at once; content as it becomes certain; tool
//! calls, each whole, at the end; a chunk with the finish reason; the usage, if asked for; `[DONE]`. In
//! silence a comment is sent every [`PING`]. A failure after the headers is an event with OpenAI's error
//! object, and no `[DONE]`.

use super::{
    chat::{usage, Reply, Source},
    error::ApiError,
    live::{tool_call, End, Finished},
};
use axum::{
    body::{Body, Bytes},
    http::{header, HeaderValue},
    response::Response,
};
use serde_json::{json, Value};
use std::{convert::Infallible, sync::Arc, time::Duration};

/// So that no middle box takes a silent stream for dead.
const PING: Duration = Duration::from_secs(15);

/// The response; its body lives as long as the client reads.
pub fn response(reply: Reply, source: Source) -> Response {
    let streamer = Streamer {
        reply,
        source: Some(source),
        begun: false,
        shown: 0,
        tokens: 0,
    };
    let events = futures::stream::unfold(streamer, |mut streamer| async {
        let bytes = streamer.next().await?;
        Some((Ok::<_, Infallible>(bytes), streamer))
    });
    let mut response = Response::new(Body::from_stream(events));
    let headers = response.headers_mut();
    headers.insert(
        header::CONTENT_TYPE,
        HeaderValue::from_static("text/event-stream"),
    );
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    response
}

struct Streamer {
    reply: Reply,
    /// `None` after the last event.
    source: Option<Source>,
    begun: bool,
    /// Bytes of content sent.
    shown: usize,
    /// Tokens reported.
    tokens: usize,
}

/// One event. JSON text has no line breaks, so it is always one `data` line.
pub fn event(out: &mut Vec<u8>, value: &Value) {
    out.extend_from_slice(b"data: ");
    out.extend_from_slice(value.to_string().as_bytes());
    out.extend_from_slice(b"\n\n");
}

impl Streamer {
    async fn next(&mut self) -> Option<Bytes> {
        let mut source = self.source.take()?;
        let mut out = Vec::new();
        if !self.begun {
            self.begun = true;
            let mut chunk = self.chunk(json!({"role": "assistant", "content": ""}), Value::Null);
            if let Some(prompt) = &self.reply.prompt {
                chunk["prompt_token_ids"] = json!(prompt[..]);
            }
            event(&mut out, &chunk);
            self.source = Some(source);
            return Some(out.into());
        }
        loop {
            let end = match &mut source {
                Source::Done(finished) => Some(End::Reply(finished.clone())),
                Source::Live(subscription) => {
                    let live = subscription.live.clone();
                    let progress = live.progress();
                    let end = progress.end.clone();
                    if end.is_none()
                        && (progress.content.len() > self.shown || self.reports(progress.tokens.len()))
                    {
                        let content = progress.content[self.shown..].to_owned();
                        let tokens = progress.tokens[self.tokens..].to_vec();
                        drop(progress);
                        self.shown += content.len();
                        self.tokens += tokens.len();
                        let mut chunk = self.chunk(json!({"content": content}), Value::Null);
                        self.reply.add_tokens(&mut chunk["choices"][0], &tokens);
                        event(&mut out, &chunk);
                        self.source = Some(source);
                        return Some(out.into());
                    }
                    end
                }
            };
            match (end, &mut source) {
                (Some(End::Reply(finished)), _) => {
                    self.last(&mut out, &finished);
                    return Some(out.into());
                }
                (Some(End::Failed(error)), _) => {
                    event(&mut out, &error.body());
                    return Some(out.into());
                }
                (None, Source::Live(subscription)) => {
                    match tokio::time::timeout(PING, subscription.receiver.changed()).await {
                        Ok(Ok(())) => {}
                        Ok(Err(_)) => {
                            event(&mut out, &ApiError::Engine("the turn was given up".into()).body());
                            return Some(out.into());
                        }
                        Err(_) => {
                            self.source = Some(source);
                            return Some(Bytes::from_static(b": waiting\n\n"));
                        }
                    }
                }
                (None, Source::Done(_)) => return None,
            }
        }
    }

    /// True if tokens themselves are asked for and there are new ones.
    fn reports(&self, tokens: usize) -> bool {
        (self.reply.extras.logprobs || self.reply.extras.token_ids) && tokens > self.tokens
    }

    /// Everything that is left, and the end.
    fn last(&mut self, out: &mut Vec<u8>, finished: &Arc<Finished>) {
        let content = &finished.content[self.shown.min(finished.content.len())..];
        let tokens = &finished.tokens[self.tokens.min(finished.tokens.len())..];
        let report = self.reports(finished.tokens.len());
        if !content.is_empty() || report {
            let mut chunk = self.chunk(json!({"content": content}), Value::Null);
            self.reply.add_tokens(&mut chunk["choices"][0], tokens);
            event(out, &chunk);
        }
        for (index, (id, call)) in finished.calls.iter().enumerate() {
            let mut call = tool_call(id, call);
            call["index"] = json!(index);
            event(out, &self.chunk(json!({"tool_calls": [call]}), Value::Null));
        }
        event(out, &self.chunk(json!({}), json!(finished.finish_reason)));
        if self.reply.extras.usage {
            let mut chunk = self.chunk(json!({}), Value::Null);
            chunk["choices"] = json!([]);
            chunk["usage"] = usage(finished);
            event(out, &chunk);
        }
        out.extend_from_slice(b"data: [DONE]\n\n");
    }

    fn chunk(&self, delta: Value, finish_reason: Value) -> Value {
        json!({
            "id": self.reply.id, "object": "chat.completion.chunk", "created": self.reply.created,
            "model": self.reply.shared.model,
            "choices": [{"index": 0, "delta": delta, "finish_reason": finish_reason, "logprobs": null}],
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// Whatever a reply says, an event is one `data` line and an empty one.
        #[test]
        fn an_event_never_breaks_its_frame(text in any::<String>(), control in "[\r\n\u{2028}\u{0}\u{85}:dat ]{0,12}") {
            let value = json!({"content": format!("{text}{control}")});
            let mut out = Vec::new();
            event(&mut out, &value);
            let out = String::from_utf8(out).unwrap();
            let line = out.strip_prefix("data: ").unwrap().strip_suffix("\n\n").unwrap();
            prop_assert!(!line.contains(['\n', '\r']));
            prop_assert_eq!(serde_json::from_str::<Value>(line).unwrap(), value);
        }
    }
}
