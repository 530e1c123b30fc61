//! Routes, authentication and bodies.
//!
//! A session is named in the path: `/sess/{id}.{secret}/v1/…`, or `/sess/{id}/v1/…` with the secret as
//! bearer token or `x-api-key`. A wrong secret is 401; an id that is unknown or closed is 404 and leaves
//! no state. Secrets are compared in constant time.

use super::{chat, error::ApiError, session::Session, Shared};
use axum::{
    body::{Body, Bytes},
    extract::{Path, Request, State},
    http::{header, HeaderMap, StatusCode},
    response::{IntoResponse, Response},
    routing::{get, post},
    Json, Router,
};
use futures::StreamExt;
use serde_json::{json, Value};
use std::sync::{atomic::Ordering, Arc};

/// All routes.
pub fn routes(shared: Arc<Shared>) -> Router {
    Router::new()
        .route("/health", get(health))
        .route("/metrics", get(metrics))
        .route("/sess/{session}/v1/chat/completions", post(chat_completions))
        .route("/sess/{session}/v1/models", get(models))
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

async fn models(
    State(shared): State<Arc<Shared>>,
    Path(segment): Path<String>,
    headers: HeaderMap,
) -> Result<Json<Value>, ApiError> {
    let session = authorize(&shared, &segment, &headers)?;
    let model = json!({"id": shared.model, "object": "model", "created": 0, "owned_by": "legorl",
                       "max_model_len": session.spec.limits.max_total_tokens});
    Ok(Json(json!({"object": "list", "data": [model]})))
}

async fn chat_completions(
    State(shared): State<Arc<Shared>>,
    Path(segment): Path<String>,
    request: Request,
) -> Response {
    shared.counters.requests.fetch_add(1, Ordering::Relaxed);
    let answer = async {
        let session = authorize(&shared, &segment, request.headers())?;
        if shared.is_draining() {
            return Err(ApiError::Draining);
        }
        let body = read_body(request.into_body(), shared.max_body_bytes).await?;
        chat::completions(shared.clone(), session, body).await
    };
    answer.await.unwrap_or_else(|error: ApiError| {
        shared.counters.errors.fetch_add(1, Ordering::Relaxed);
        tracing::debug!(%error, status = %error.status(), "chat request refused");
        error.into_response()
    })
}

async fn not_found(request: Request) -> ApiError {
    ApiError::NotFound(format!("{} {}", request.method(), redact(request.uri().path())))
}

/// A path without the secret in it.
fn redact(path: &str) -> String {
    let mut parts: Vec<&str> = path.split('/').collect();
    if let ["", "sess", segment, ..] = parts[..] {
        parts[2] = segment.rsplit_once('.').map_or(segment, |(id, _)| id);
    }
    parts.join("/")
}

fn authorize(shared: &Shared, segment: &str, headers: &HeaderMap) -> Result<Arc<Session>, ApiError> {
    let header_secret = || {
        let bearer = headers.get(header::AUTHORIZATION).and_then(|v| v.to_str().ok());
        let bearer = bearer.and_then(|v| v.strip_prefix("Bearer ").or_else(|| v.strip_prefix("bearer ")));
        bearer.or_else(|| headers.get("x-api-key").and_then(|v| v.to_str().ok()))
    };
    // Ids may have dots of their own, so the whole segment is tried as an id first.
    let (session, secret) = match shared.session(segment) {
        Some(session) => (session, header_secret()),
        None => {
            let (id, secret) = segment.rsplit_once('.').unwrap_or((segment, ""));
            let session = shared
                .session(id)
                .ok_or_else(|| ApiError::UnknownSession(id.to_owned()))?;
            (session, Some(secret))
        }
    };
    if secret.is_some_and(|given| same_secret(given, &session.secret)) {
        Ok(session)
    } else {
        Err(ApiError::WrongSecret(session.id.to_string()))
    }
}

/// Takes the same time wherever the first difference is.
fn same_secret(a: &str, b: &str) -> bool {
    let difference = a.bytes().zip(b.bytes()).fold(0, |all, (a, b)| all | (a ^ b));
    a.len() == b.len() && difference == 0
}

/// Reads a body up to the limit. What is beyond is read and thrown away up to four times the limit, so
/// that the client has sent its request and reads the answer.
async fn read_body(body: Body, limit: usize) -> Result<Bytes, ApiError> {
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
        assert_eq!(redact("/sess/a.b.secret/v1/x"), "/sess/a.b/v1/x");
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
