//! Opening and closing sessions over HTTP, for a proxy that stands alone (`legorl-rank serve`).
//!
//! | Request | Answer |
//! |---|---|
//! | `POST /admin/sessions` | 201 `{id, base_url, secret}`; the base URL has the secret in it |
//! | `DELETE /admin/sessions/{id}` | 200 `{branches: [{token_ids, mask, logprobs, versions, kind, trainable, weight, parent, messages}], requests, refused, …}` |
//!
//! Both need the admin secret as bearer token. The body of `POST` may be empty or name what differs from
//! the configuration: `name`, `seed`, `temperature`, `top_p`, `top_k`, `max_turns`, `max_total_tokens`,
//! `max_tokens_per_turn`, `max_seconds`. An unknown field is an error.

use super::{error::ApiError, http::same_secret, protocol::Protocol, request::json_response, Proxy, Shared};
use crate::base::{
    CapturedSession, GroupId, Purpose, SamplingParams, SessionError, SessionId, SessionLimits, SessionSpec,
    TrialKey,
};
use axum::{
    body::Bytes,
    extract::{Path, State},
    http::{header, HeaderMap, StatusCode},
    response::Response,
};
use serde::Deserialize;
use serde_json::{json, Value};
use std::{
    sync::{atomic::Ordering, Arc},
    time::{Duration, Instant},
};

/// What sessions opened over HTTP are made of.
#[derive(Clone, Debug)]
pub struct AdminConfig {
    /// Bearer token of the admin requests (`LEGORL_ADMIN_SECRET`).
    pub secret: String,
    /// Sampling of a session.
    pub sampling: SamplingParams,
    /// Answered calls of a session.
    pub max_turns: u32,
    /// Prompt plus response tokens of a branch.
    pub max_total_tokens: u32,
    /// Sampled tokens of a turn.
    pub max_tokens_per_turn: u32,
    /// Time from open to the last answered request.
    pub max_time: Duration,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct Wanted {
    name: Option<String>,
    seed: Option<u64>,
    temperature: Option<f32>,
    top_p: Option<f32>,
    top_k: Option<u32>,
    max_turns: Option<u32>,
    max_total_tokens: Option<u32>,
    max_tokens_per_turn: Option<u32>,
    max_seconds: Option<f64>,
}

fn allowed<'s>(shared: &'s Shared, headers: &HeaderMap) -> Result<&'s AdminConfig, ApiError> {
    let admin = shared
        .admin
        .as_ref()
        .ok_or_else(|| ApiError::NotFound("/admin: this proxy has no admin secret".into()))?;
    let given = headers.get(header::AUTHORIZATION).and_then(|v| v.to_str().ok());
    let given = given.and_then(|v| v.strip_prefix("Bearer ").or_else(|| v.strip_prefix("bearer ")));
    if given.is_some_and(|given| same_secret(given, &admin.secret)) {
        Ok(admin)
    } else {
        Err(ApiError::WrongAdminSecret)
    }
}

/// `POST /admin/sessions`.
pub async fn open(State(shared): State<Arc<Shared>>, headers: HeaderMap, body: Bytes) -> Response {
    let opened = || {
        let admin = allowed(&shared, &headers)?;
        let wanted: Wanted = match body.trim_ascii() {
            [] => Wanted::default(),
            // Serde would read a list as the fields in their order.
            body if body.first() != Some(&b'{') => {
                return Err(ApiError::BadRequest(
                    "the body of the request must be a JSON object".into(),
                ))
            }
            body => serde_json::from_slice(body)
                .map_err(|error| ApiError::BadRequest(format!("the body of the request: {error}")))?,
        };
        if shared.is_draining() {
            return Err(ApiError::Draining);
        }
        let number = shared.opened.fetch_add(1, Ordering::Relaxed);
        let name = wanted
            .name
            .unwrap_or_else(|| format!("session-{number:06}-{}", super::random_hex(4)));
        if name.is_empty()
            || name.contains(['/', '~', '?', '#', '%'])
            || name.chars().any(char::is_whitespace)
        {
            return Err(ApiError::BadRequest(format!(
                "`name` is {name:?}; it becomes a part of a URL and must hold none of / ~ ? # % and no white space"
            )));
        }
        let seconds = wanted.max_seconds.unwrap_or(admin.max_time.as_secs_f64());
        let time = Duration::try_from_secs_f64(seconds)
            .ok()
            .filter(|time| Instant::now().checked_add(*time).is_some())
            .ok_or_else(|| ApiError::BadRequest(format!("`max_seconds` is {seconds}; it must be a time")))?;
        let sampling = SamplingParams {
            temperature: wanted.temperature.unwrap_or(admin.sampling.temperature),
            top_p: wanted.top_p.unwrap_or(admin.sampling.top_p),
            top_k: wanted.top_k.unwrap_or(admin.sampling.top_k),
            seed: wanted.seed.unwrap_or(admin.sampling.seed.wrapping_add(number)),
        };
        sampling.check().map_err(ApiError::BadRequest)?;
        for (name, value) in [
            ("max_turns", wanted.max_turns),
            ("max_total_tokens", wanted.max_total_tokens),
            ("max_tokens_per_turn", wanted.max_tokens_per_turn),
        ] {
            if value == Some(0) {
                return Err(ApiError::BadRequest(format!(
                    "`{name}` is 0; it must be at least 1"
                )));
            }
        }
        let spec = SessionSpec {
            key: TrialKey {
                purpose: Purpose::Train,
                group: GroupId(number),
                sample: 0,
            },
            attempt: 0,
            name,
            sampling,
            limits: SessionLimits {
                max_turns: wanted.max_turns.unwrap_or(admin.max_turns),
                max_total_tokens: wanted.max_total_tokens.unwrap_or(admin.max_total_tokens),
                max_tokens_per_turn: wanted.max_tokens_per_turn.unwrap_or(admin.max_tokens_per_turn),
                max_consecutive_no_tool: 0,
                deadline: Instant::now() + time,
            },
        };
        let session = Proxy::open_in(&shared, spec).map_err(|error| match error {
            SessionError::Closed(text) => ApiError::BadRequest(text),
            error => ApiError::Engine(error.to_string()),
        })?;
        let host = headers.get(header::HOST).and_then(|v| v.to_str().ok());
        let host = host.map_or_else(
            || shared.tcp.map_or("localhost".into(), |a| a.to_string()),
            str::to_owned,
        );
        Ok(json!({"id": session.id.as_str(), "secret": session.secret,
                  "base_url": format!("http://{host}{}", session.path())}))
    };
    match opened() {
        Ok(answer) => {
            let mut response = json_response(&answer);
            *response.status_mut() = StatusCode::CREATED;
            response
        }
        Err(error) => error.response(Protocol::Chat),
    }
}

/// `DELETE /admin/sessions/{id}`.
pub async fn close(
    State(shared): State<Arc<Shared>>,
    Path(id): Path<String>,
    headers: HeaderMap,
) -> Response {
    if let Err(error) = allowed(&shared, &headers) {
        return error.response(Protocol::Chat);
    }
    match Proxy::close_in(&shared, &SessionId::from(id.as_str())).await {
        Ok(captured) => json_response(&record(&captured)),
        Err(SessionError::Unknown(id)) => ApiError::UnknownSession(id.to_string()).response(Protocol::Chat),
        Err(error) => ApiError::Engine(error.to_string()).response(Protocol::Chat),
    }
}

/// What a closed session hands over.
fn record(captured: &CapturedSession) -> Value {
    let branches = captured.branches.iter().map(|branch| {
        let tokens = &branch.tokens;
        let mask: Vec<u8> = tokens.loss_mask.iter().map(|m| u8::from(*m)).collect();
        json!({"token_ids": tokens.token_ids, "mask": mask, "logprobs": tokens.logprobs,
               "versions": tokens.versions, "kind": branch.kind, "trainable": branch.trainable,
               "weight": tokens.weight, "parent": branch.parent, "turns": branch.turns,
               "messages": branch.messages})
    });
    json!({
        "branches": branches.collect::<Vec<_>>(), "requests": captured.requests, "refused": captured.refused,
        "turns": captured.turns, "aborted": captured.aborted,
        "malformed_tool_calls": captured.malformed_tool_calls, "length_finishes": captured.length_finishes,
        "context_overflow": captured.context_overflow, "turn_limit_hit": captured.turn_limit_hit,
        "token_limit_hit": captured.token_limit_hit, "engine_failure": captured.engine_failure,
        "prompt_tokens": captured.prompt_tokens, "completion_tokens": captured.completion_tokens,
    })
}
