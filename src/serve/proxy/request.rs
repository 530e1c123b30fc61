//! One request: from its bytes to a turn, and to the response.

use super::{
    body::{self, Nothing},
    capture::Asked,
    error::ApiError,
    live::{Finished, Subscription},
    protocol::{Ask, Extras, Protocol, Reply},
    session::{Session, Started},
    stream, Shared,
};
use axum::{
    body::{Body, Bytes},
    http::{header, HeaderValue},
    response::Response,
};
use serde_json::{json, Value};
use std::sync::{atomic::Ordering, Arc};

/// New bytes of a body up to which it is handled on the runtime's threads; more may take long to encode.
const INLINE_NEW_BYTES: usize = 128 << 10;

/// Where a reply comes from.
pub enum Source {
    /// A running turn.
    Live(Subscription),
    /// The record.
    Done(Arc<Finished>),
}

/// Serves one request. `sub_agent`: the agent says that a sub-agent asks; a number for which one.
pub async fn serve(
    protocol: Protocol,
    shared: Arc<Shared>,
    session: Arc<Session>,
    body: Bytes,
    sub_agent: Option<u64>,
) -> Result<Response, ApiError> {
    session.check_open()?;
    let seen = session.seen_bytes.fetch_max(body.len(), Ordering::Relaxed);
    let heavy = body.len().saturating_sub(seen) > INLINE_NEW_BYTES;
    let (owner, proxy) = (session.clone(), shared.clone());
    let begun = session.with_state(heavy, move |state| -> Result<(Started, Extras), ApiError> {
        let ask = protocol.read(&body, &mut state.tree.known())?;
        let Ask {
            items,
            tools,
            spec,
            extras,
        } = ask;
        let asked = Asked {
            items: &items,
            tools,
            options: 0,
            sub_agent,
            limit: 0,
        };
        match owner.begin(state, &proxy, spec, asked) {
            Ok(started) => Ok((started, extras)),
            // A value that was skipped may not be JSON: say where it is in the body.
            Err(ApiError::BadRequest(text)) => Err(body::locate(&body, &text)),
            Err(error) => Err(error),
        }
    });
    let (started, extras) = begun.await??;
    let (source, prompt, prompt_tokens) = match started {
        Started::Running(subscription) => {
            let prompt = subscription.live.prompt.clone();
            let length = prompt.len();
            (Source::Live(subscription), Some(prompt), length)
        }
        Started::Answered { finished, prompt } => {
            let length = finished.prompt_tokens;
            (Source::Done(finished), prompt, length)
        }
        Started::Notice(text) => (Source::Done(Arc::new(Finished::notice(text))), None, 0),
    };
    let reply = Reply {
        id: super::random_hex(12),
        created: std::time::SystemTime::now()
            .duration_since(std::time::UNIX_EPOCH)
            .map_or(0, |d| d.as_secs()),
        shared,
        prompt: prompt.filter(|_| extras.token_ids),
        prompt_tokens,
        extras,
    };
    if extras.stream {
        return Ok(stream::response(protocol.encoder(reply), source));
    }
    let finished = match source {
        Source::Done(finished) => finished,
        Source::Live(subscription) => subscription.end().await?,
    };
    Ok(json_response(&protocol.whole(&reply, &finished)))
}

/// Counts the tokens of a prompt as it would be sent, without a turn.
pub async fn count_tokens(
    shared: Arc<Shared>,
    session: Arc<Session>,
    body: Bytes,
) -> Result<Response, ApiError> {
    session.check_open()?;
    let counted = tokio::task::spawn_blocking(move || -> Result<usize, ApiError> {
        let ask = Protocol::Messages.read(&body, &mut Nothing)?;
        let mut messages = Vec::new();
        for item in &ask.items {
            messages.extend(item.messages().map_err(|e| locate(&body, e.into()))?);
        }
        let tools = ask.tools.map(|tools| shared.renderer.tools(tools)).transpose()?;
        let tokens = shared
            .renderer
            .full(&messages, tools.as_deref(), usize::MAX)
            .map_err(super::capture::CaptureError::from)?;
        Ok(tokens.len())
    });
    let tokens = counted
        .await
        .map_err(|error| ApiError::Engine(format!("counting failed: {error}")))??;
    Ok(json_response(&json!({"input_tokens": tokens})))
}

fn locate(body: &[u8], error: ApiError) -> ApiError {
    match error {
        ApiError::BadRequest(text) => body::locate(body, &text),
        other => other,
    }
}

/// A JSON body with status 200.
pub fn json_response(value: &Value) -> Response {
    let mut response = Response::new(Body::from(value.to_string()));
    let json = HeaderValue::from_static("application/json");
    response.headers_mut().insert(header::CONTENT_TYPE, json);
    response
}
