//! Routes, authentication and bodies.
//!
//! A session is named in the path: `/sess/{id}~{secret}/v1/…`, or `/sess/{id}/v1/…` with the secret as
//! bearer token or `x-api-key`. A wrong secret is 401; an id that is unknown or closed is 404 and leaves
//! no state. Secrets are compared in constant time. `HEAD` is answered on every path, since agents ask in
//! this way whether somebody is there.

use super::{
    admin,
    error::ApiError,
    protocol::Protocol,
    request::{self, json_response},
    session::Session,
    Shared,
};
use axum::{
    body::{Body, Bytes, HttpBody},
    extract::{DefaultBodyLimit, Path, Request, State},
    http::{header, HeaderMap, Method, StatusCode},
    response::{IntoResponse, Response},
    routing::{delete, get, post},
    Json, Router,
};
use futures::StreamExt;
use serde_json::{json, Value};
use std::{
    future::Future,
    hash::{DefaultHasher, Hash, Hasher},
    sync::{atomic::Ordering, Arc},
};

/// Headers by which agents mark requests of sub-agents, and those that say which one asks: Claude Code,
/// OpenCode.
const SUB_AGENT_HEADERS: [(&str, &str); 3] = [
    ("x-claude-code-agent-id", "x-claude-code-agent-id"),
    ("x-claude-code-parent-agent-id", "x-claude-code-agent-id"),
    ("x-parent-session-id", "x-session-id"),
];

/// All routes.
pub fn routes(shared: Arc<Shared>) -> Router {
    Router::new()
        .route("/health", get(health))
        .route("/metrics", get(metrics))
        .route("/admin/sessions", post(admin::open))
        .route("/admin/sessions/{id}", delete(admin::close))
        .layer(DefaultBodyLimit::max(1 << 20))
        .route("/sess/{session}/v1/chat/completions", post(chat_completions))
        .route("/sess/{session}/v1/responses", post(responses))
        .route("/sess/{session}/v1/messages", post(messages))
        .route("/sess/{session}/v1/messages/count_tokens", post(count_tokens))
        .route("/sess/{session}/v1/models", get(models))
        .route("/sess/{session}/v1/models/{*model}", get(one_model))
        .fallback(not_found)
        .method_not_allowed_fallback(not_found)
        .with_state(shared)
}

async fn health(State(shared): State<Arc<Shared>>) -> Response {
    let draining = shared.is_draining();
    let status = if draining {
        StatusCode::SERVICE_UNAVAILABLE
    } else {
        StatusCode::OK
    };
    let body =
        json!({"status": if draining { "draining" } else { "ok" }, "sessions": shared.open_sessions()});
    (status, Json(body)).into_response()
}

async fn metrics(State(shared): State<Arc<Shared>>) -> Response {
    let text = shared
        .counters
        .render(shared.open_sessions(), &shared.router.stats());
    ([(header::CONTENT_TYPE, "text/plain; version=0.0.4")], text).into_response()
}

/// The served model in both APIs' forms.
fn model(shared: &Shared, session: &Session) -> Value {
    json!({"id": shared.model, "object": "model", "created": 0, "owned_by": "legorl",
           "max_model_len": session.spec.limits.max_total_tokens,
           "type": "model", "display_name": shared.model, "created_at": "1970-01-01T00:00:00Z"})
}

async fn models(
    State(shared): State<Arc<Shared>>,
    Path(segment): Path<String>,
    headers: HeaderMap,
) -> Response {
    match authorize(&shared, &segment, &headers) {
        Ok(session) => json_response(&json!({"object": "list", "data": [model(&shared, &session)],
            "has_more": false, "first_id": shared.model, "last_id": shared.model})),
        Err(error) => error.response(protocol_of(&headers)),
    }
}

async fn one_model(
    State(shared): State<Arc<Shared>>,
    Path((segment, name)): Path<(String, String)>,
    headers: HeaderMap,
) -> Response {
    let found = authorize(&shared, &segment, &headers).and_then(|session| {
        if name == shared.model {
            Ok(json_response(&model(&shared, &session)))
        } else {
            Err(ApiError::NotFound(format!(
                "model `{name}`; this proxy serves `{}`",
                shared.model
            )))
        }
    });
    found.unwrap_or_else(|error| error.response(protocol_of(&headers)))
}

/// The protocol of a client that the path does not tell.
fn protocol_of(headers: &HeaderMap) -> Protocol {
    if headers.contains_key("anthropic-version") {
        Protocol::Messages
    } else {
        Protocol::Chat
    }
}

async fn chat_completions(
    State(shared): State<Arc<Shared>>,
    Path(segment): Path<String>,
    request: Request,
) -> Response {
    generate(Protocol::Chat, shared, segment, request).await
}

async fn responses(
    State(shared): State<Arc<Shared>>,
    Path(segment): Path<String>,
    request: Request,
) -> Response {
    generate(Protocol::Responses, shared, segment, request).await
}

async fn messages(
    State(shared): State<Arc<Shared>>,
    Path(segment): Path<String>,
    request: Request,
) -> Response {
    generate(Protocol::Messages, shared, segment, request).await
}

async fn generate(protocol: Protocol, shared: Arc<Shared>, segment: String, request: Request) -> Response {
    let sub_agent = sub_agent(request.headers());
    answer(protocol, shared, segment, request, |shared, session, body| {
        request::serve(protocol, shared, session, body, sub_agent)
    })
    .await
}

/// A number for the sub-agent that asks, if one does.
fn sub_agent(headers: &HeaderMap) -> Option<u64> {
    let (_, id) = SUB_AGENT_HEADERS
        .iter()
        .find(|(mark, _)| headers.contains_key(*mark))?;
    let mut hasher = DefaultHasher::new();
    headers.get(*id).map(|value| value.as_bytes()).hash(&mut hasher);
    Some(hasher.finish())
}

async fn count_tokens(
    State(shared): State<Arc<Shared>>,
    Path(segment): Path<String>,
    request: Request,
) -> Response {
    answer(
        Protocol::Messages,
        shared,
        segment,
        request,
        request::count_tokens,
    )
    .await
}

/// Authentication, the body, and the protocol's form of an error around `work`.
async fn answer<F: Future<Output = Result<Response, ApiError>>>(
    protocol: Protocol,
    shared: Arc<Shared>,
    segment: String,
    request: Request,
    work: impl FnOnce(Arc<Shared>, Arc<Session>, Bytes) -> F,
) -> Response {
    shared.counters.requests.fetch_add(1, Ordering::Relaxed);
    let session = authorize(&shared, &segment, request.headers());
    let answered = match &session {
        Err(error) => Err(error.clone()),
        Ok(session) => {
            session.requests.fetch_add(1, Ordering::Relaxed);
            let (shared, session) = (shared.clone(), session.clone());
            async {
                if shared.is_draining() {
                    return Err(ApiError::Draining);
                }
                let body = read_body(request.into_body(), shared.max_body_bytes).await?;
                work(shared, session, body).await
            }
            .await
        }
    };
    answered.unwrap_or_else(|error| {
        shared.counters.errors.fetch_add(1, Ordering::Relaxed);
        if let Ok(session) = &session {
            session.refused.fetch_add(1, Ordering::Relaxed);
        }
        tracing::debug!(%error, status = %error.status(protocol), "request refused");
        error.response(protocol)
    })
}

async fn not_found(request: Request) -> Response {
    if request.method() == Method::HEAD {
        return StatusCode::OK.into_response();
    }
    let path = redact(request.uri().path());
    let protocol = protocol_of(request.headers());
    ApiError::NotFound(format!("{} {path}", request.method())).response(protocol)
}

/// A path without the secret in it.
fn redact(path: &str) -> String {
    let mut parts: Vec<&str> = path.split('/').collect();
    if let ["", "sess", segment, ..] = parts[..] {
        parts[2] = segment.rsplit_once('~').map_or(segment, |(id, _)| id);
    }
    parts.join("/")
}

fn authorize(shared: &Shared, segment: &str, headers: &HeaderMap) -> Result<Arc<Session>, ApiError> {
    let header_secret = || {
        let bearer = headers.get(header::AUTHORIZATION).and_then(|v| v.to_str().ok());
        let bearer = bearer.and_then(|v| v.strip_prefix("Bearer ").or_else(|| v.strip_prefix("bearer ")));
        bearer.or_else(|| headers.get("x-api-key").and_then(|v| v.to_str().ok()))
    };
    let (id, secret) = match segment.rsplit_once('~') {
        Some((id, secret)) => (id, Some(secret)),
        None => (segment, header_secret()),
    };
    let session = shared
        .session(id)
        .ok_or_else(|| ApiError::UnknownSession(id.to_owned()))?;
    if secret.is_some_and(|given| same_secret(given, &session.secret)) {
        Ok(session)
    } else {
        Err(ApiError::WrongSecret(session.id.to_string()))
    }
}

/// Takes the same time wherever the first difference is.
pub fn same_secret(a: &str, b: &str) -> bool {
    let difference = a.bytes().zip(b.bytes()).fold(0, |all, (a, b)| all | (a ^ b));
    a.len() == b.len() && difference == 0
}

/// Reads a body up to the limit. What is beyond is read and thrown away up to four times the limit, so
/// that the client has sent its request and reads the answer.
async fn read_body(body: Body, limit: usize) -> Result<Bytes, ApiError> {
    // The announced length, so that pieces are joined without moving what is there.
    let announced = usize::try_from(body.size_hint().lower()).unwrap_or(usize::MAX);
    let mut stream = body.into_data_stream();
    let mut first = Bytes::new();
    let mut joined: Vec<u8> = Vec::new();
    let mut length = 0usize;
    while let Some(piece) = stream.next().await {
        let piece = piece.map_err(|error| ApiError::BadRequest(format!("the body broke off: {error}")))?;
        length += piece.len();
        if length > limit {
            joined = Vec::new();
            first = Bytes::new();
            if length > limit.saturating_mul(4) {
                break;
            }
        } else if first.is_empty() && joined.is_empty() {
            first = piece;
        } else {
            if joined.is_empty() {
                joined.reserve_exact(announced.min(limit).max(first.len() + piece.len()));
            }
            joined.extend_from_slice(&std::mem::take(&mut first));
            joined.extend_from_slice(&piece);
        }
    }
    if length > limit {
        return Err(ApiError::BodyTooLarge { limit });
    }
    Ok(if joined.is_empty() { first } else { joined.into() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn secrets_are_compared_whole_and_never_logged() {
        assert!(same_secret("abc", "abc"));
        assert!(!same_secret("abc", "abd") && !same_secret("ab", "abc") && !same_secret("", "abc"));
        assert_eq!(redact("/sess/a.b~secret/v1/x"), "/sess/a.b/v1/x");
    }

    #[tokio::test]
    async fn bodies_are_joined_and_limited() {
        let body = || {
            Body::from_stream(futures::stream::iter([
                Ok::<_, std::io::Error>("ab"),
                Ok("cd"),
                Ok("e"),
            ]))
        };
        assert_eq!(read_body(body(), 5).await.unwrap(), "abcde");
        assert!(matches!(
            read_body(body(), 4).await,
            Err(ApiError::BodyTooLarge { limit: 4 })
        ));
    }
}
