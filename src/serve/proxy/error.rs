//! Failures as an agent sees them: the one place where they get an HTTP status and a protocol's error
//! shape.
//!
//! | Failure | OpenAI | Anthropic |
//! |---|---|---|
//! | bad request, context overflow | 400 `invalid_request_error` | 400 `invalid_request_error` |
//! | wrong secret | 401 `authentication_error` | 401 `authentication_error` |
//! | session over | 403 `permission_error` | 403 `permission_error` |
//! | no such session or route | 404 | 404 `not_found_error` |
//! | body too large | 413 | 413 `request_too_large` |
//! | draining | 429 `rate_limit_error` | 529 `overloaded_error` |
//! | no engine free | 503 `server_error` | 529 `overloaded_error` |
//! | engine failure | 500 `server_error` | 500 `api_error` |
//!
//! 429, 503 and 529 carry `retry-after`.

use super::{
    capture::{CaptureError, RenderError},
    protocol::Protocol,
    router::RouteError,
};
use crate::{base::EngineError, model::chat_template::TemplateError};
use axum::{
    body::Body,
    http::{header, HeaderValue, StatusCode},
    response::Response,
};
use serde_json::{json, Value};

/// A refused or failed request.
#[derive(Clone, Debug, thiserror::Error)]
pub enum ApiError {
    /// The body is not a request of this API.
    #[error("{0}")]
    BadRequest(String),
    /// The conversation does not fit. The text has the two phrases by which agents recognise it and
    /// start to compact.
    #[error(
        "prompt is too long: {prompt_tokens} tokens > {limit} maximum. This model's maximum context length is \
         {limit} tokens; shorten the messages"
    )]
    ContextOverflow {
        /// Tokens of the prompt, or a lower bound.
        prompt_tokens: usize,
        /// Tokens that fit.
        limit: usize,
    },
    /// The body has more bytes than the proxy takes.
    #[error("the request body has more than {limit} bytes (MAX_REQUEST_BODY_MB)")]
    BodyTooLarge {
        /// Limit in bytes.
        limit: usize,
    },
    /// The secret is missing or not the session's.
    #[error("wrong or missing secret for session `{0}`")]
    WrongSecret(String),
    /// The secret of an admin request is missing or wrong.
    #[error("wrong or missing admin secret: send the value of LEGORL_ADMIN_SECRET as bearer token")]
    WrongAdminSecret,
    /// No such session, or it is closed.
    #[error("session `{0}` is not open")]
    UnknownSession(String),
    /// No such route.
    #[error("no such route: {0}")]
    NotFound(String),
    /// The session may not ask any more.
    #[error("{0}")]
    Ended(String),
    /// The proxy is shutting down.
    #[error("the proxy is draining; retry later")]
    Draining,
    /// No engine can take the turn now.
    #[error("{0}")]
    Unavailable(String),
    /// The engine failed.
    #[error("{0}")]
    Engine(String),
}

impl ApiError {
    /// HTTP status.
    pub fn status(&self, protocol: Protocol) -> StatusCode {
        let overloaded = || StatusCode::from_u16(529).unwrap_or(StatusCode::SERVICE_UNAVAILABLE);
        match self {
            Self::BadRequest(_) | Self::ContextOverflow { .. } => StatusCode::BAD_REQUEST,
            Self::BodyTooLarge { .. } => StatusCode::PAYLOAD_TOO_LARGE,
            Self::WrongSecret(_) | Self::WrongAdminSecret => StatusCode::UNAUTHORIZED,
            Self::UnknownSession(_) | Self::NotFound(_) => StatusCode::NOT_FOUND,
            // Agents retry 5xx and 429; a session that is over must not be retried.
            Self::Ended(_) => StatusCode::FORBIDDEN,
            Self::Draining | Self::Unavailable(_) if protocol == Protocol::Messages => overloaded(),
            Self::Draining => StatusCode::TOO_MANY_REQUESTS,
            Self::Unavailable(_) => StatusCode::SERVICE_UNAVAILABLE,
            Self::Engine(_) => StatusCode::INTERNAL_SERVER_ERROR,
        }
    }

    /// The protocol's error object.
    pub fn body(&self, protocol: Protocol) -> Value {
        match protocol {
            Protocol::Messages => self.anthropic(),
            Protocol::Chat | Protocol::Responses => self.openai(),
        }
    }

    fn openai(&self) -> Value {
        let (kind, code) = match self {
            Self::BadRequest(_) => ("invalid_request_error", Value::Null),
            Self::ContextOverflow { .. } => ("invalid_request_error", json!("context_length_exceeded")),
            Self::BodyTooLarge { .. } => ("invalid_request_error", json!("request_too_large")),
            Self::WrongSecret(_) | Self::WrongAdminSecret => {
                ("authentication_error", json!("invalid_api_key"))
            }
            Self::UnknownSession(_) => ("invalid_request_error", json!("session_not_open")),
            Self::NotFound(_) => ("invalid_request_error", json!("not_found")),
            Self::Ended(_) => ("permission_error", json!("session_ended")),
            Self::Draining => ("rate_limit_error", json!("draining")),
            Self::Unavailable(_) => ("server_error", json!("unavailable")),
            Self::Engine(_) => ("server_error", json!("engine_failure")),
        };
        json!({"error": {"message": self.to_string(), "type": kind, "param": null, "code": code}})
    }

    fn anthropic(&self) -> Value {
        let kind = match self {
            Self::BadRequest(_) | Self::ContextOverflow { .. } => "invalid_request_error",
            Self::BodyTooLarge { .. } => "request_too_large",
            Self::WrongSecret(_) | Self::WrongAdminSecret => "authentication_error",
            Self::UnknownSession(_) | Self::NotFound(_) => "not_found_error",
            Self::Ended(_) => "permission_error",
            Self::Draining | Self::Unavailable(_) => "overloaded_error",
            Self::Engine(_) => "api_error",
        };
        json!({"type": "error", "error": {"type": kind, "message": self.to_string()}, "request_id": null})
    }

    /// The response.
    pub fn response(&self, protocol: Protocol) -> Response {
        let mut response = Response::new(Body::from(self.body(protocol).to_string()));
        *response.status_mut() = self.status(protocol);
        let headers = response.headers_mut();
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
        if matches!(self, Self::Draining | Self::Unavailable(_)) {
            headers.insert(header::RETRY_AFTER, HeaderValue::from_static("5"));
        }
        response
    }
}

impl From<CaptureError> for ApiError {
    fn from(error: CaptureError) -> Self {
        match error {
            CaptureError::Render(RenderError::TooLong { at_least, limit }) => Self::ContextOverflow {
                prompt_tokens: at_least,
                limit,
            },
            CaptureError::Message(_) | CaptureError::Json(_) => Self::BadRequest(error.to_string()),
            CaptureError::Render(RenderError::Template(
                TemplateError::Raised(_) | TemplateError::Message(_),
            )) => Self::BadRequest(error.to_string()),
            CaptureError::Render(_) => Self::Engine(error.to_string()),
        }
    }
}

impl From<RouteError> for ApiError {
    fn from(error: RouteError) -> Self {
        match error {
            RouteError::Engine(EngineError::ContextOverflow {
                prompt_tokens,
                max_model_len,
            }) => Self::ContextOverflow {
                prompt_tokens: prompt_tokens as usize,
                limit: max_model_len as usize,
            },
            RouteError::NoReplica(_) | RouteError::NotAdmitted { .. } => Self::Unavailable(error.to_string()),
            RouteError::Engine(_) => Self::Engine(error.to_string()),
        }
    }
}
