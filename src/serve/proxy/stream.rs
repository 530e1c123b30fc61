//! A reply as server-sent events: headers and the protocol's first event at once, then what becomes
//! certain of the reply, in pieces. In silence something is sent every [`PING`], so that no middle box
//! takes a silent stream for dead. The body lives as long as the client reads.

use super::{
    error::ApiError,
    live::{End, Finished, Part},
    protocol::{Delta, Encoder},
    request::Source,
};
use axum::{
    body::{Body, Bytes},
    http::{header, HeaderValue},
    response::Response,
};
use std::{convert::Infallible, time::Duration};

const PING: Duration = Duration::from_secs(10);

/// The response.
pub fn response(encoder: Box<dyn Encoder>, source: Source) -> Response {
    let streamer = Streamer {
        encoder,
        source: Some(source),
        begun: false,
        part: 0,
        bytes: 0,
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
        HeaderValue::from_static("text/event-stream; charset=utf-8"),
    );
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    response
}

struct Streamer {
    encoder: Box<dyn Encoder>,
    /// `None` after the last event.
    source: Option<Source>,
    begun: bool,
    /// Parts before this one were sent whole.
    part: usize,
    /// Bytes of this part that were sent.
    bytes: usize,
    /// Tokens reported.
    tokens: usize,
}

impl Streamer {
    async fn next(&mut self) -> Option<Bytes> {
        let mut source = self.source.take()?;
        let mut out = Vec::new();
        if !self.begun {
            self.begun = true;
            self.encoder.begin(&mut out);
            // A reply that is there already goes out in one piece.
            if let Source::Done(finished) = &source {
                self.last(&mut out, finished);
            } else {
                self.source = Some(source);
            }
            return Some(out.into());
        }
        loop {
            let Source::Live(subscription) = &mut source else {
                return None;
            };
            let live = subscription.live.clone();
            let end = {
                let progress = live.progress();
                if progress.end.is_none() {
                    let parts = self.new_parts(&progress.parts);
                    let whole: Vec<Part> = parts.iter().map(|(i, _)| progress.parts[*i].clone()).collect();
                    let tokens = progress.tokens[self.tokens..].to_vec();
                    drop(progress);
                    self.tokens += tokens.len();
                    let deltas: Vec<Delta<'_>> = parts
                        .into_iter()
                        .zip(&whole)
                        .map(|((index, part), whole)| Delta { index, part, whole })
                        .collect();
                    self.encoder.update(&mut out, &deltas, &tokens);
                    None
                } else {
                    progress.end.clone()
                }
            };
            match end {
                None if !out.is_empty() => {
                    self.source = Some(source);
                    return Some(out.into());
                }
                Some(End::Reply(finished)) => {
                    self.last(&mut out, &finished);
                    return Some(out.into());
                }
                Some(End::Failed(error)) => {
                    self.encoder.error(&mut out, &error);
                    return Some(out.into());
                }
                None => match tokio::time::timeout(PING, subscription.receiver.changed()).await {
                    Ok(Ok(())) => {}
                    Ok(Err(_)) => {
                        let error = ApiError::Engine("the turn was given up".into());
                        self.encoder.error(&mut out, &error);
                        return Some(out.into());
                    }
                    Err(_) => {
                        let ping = Bytes::from_static(self.encoder.ping());
                        self.source = Some(source);
                        return Some(ping);
                    }
                },
            }
        }
    }

    /// What was not sent yet, with the number of its part.
    fn new_parts(&mut self, parts: &[Part]) -> Vec<(usize, Part)> {
        let mut out = Vec::new();
        while let Some(part) = parts.get(self.part) {
            let rest = |text: &str, from: usize| Some(text[from..].to_owned()).filter(|t| !t.is_empty());
            let new = match part {
                Part::Reasoning(text) => rest(text, self.bytes).map(Part::Reasoning),
                Part::Text(text) => rest(text, self.bytes).map(Part::Text),
                Part::Call(..) if self.bytes == 0 => Some(part.clone()),
                Part::Call(..) => None,
            };
            if let Some(new) = new {
                out.push((self.part, new));
            }
            // The last part may still grow.
            if self.part + 1 == parts.len() {
                self.bytes = match part {
                    Part::Reasoning(text) | Part::Text(text) => text.len(),
                    Part::Call(..) => 1,
                };
                break;
            }
            self.part += 1;
            self.bytes = 0;
        }
        out
    }

    /// Everything that is left, and the end.
    fn last(&mut self, out: &mut Vec<u8>, finished: &Finished) {
        let parts = self.new_parts(&finished.parts);
        let deltas: Vec<Delta<'_>> = parts
            .into_iter()
            .map(|(index, part)| Delta {
                index,
                part,
                whole: &finished.parts[index],
            })
            .collect();
        let tokens = &finished.tokens[self.tokens.min(finished.tokens.len())..];
        self.encoder.update(out, &deltas, tokens);
        self.encoder.end(out, finished);
    }
}
