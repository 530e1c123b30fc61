//! An engine behind HTTP: a vLLM server, or another one whose `/v1/completions` takes and returns token ids.
//!
//! A generation is one streamed request with the prompt as ids and `return_token_ids`; each event must
//! carry as many ids as log-probs. A backend that leaves the ids out cannot be captured, and the first
//! reply says so. Dropping the connection cancels the generation, as vLLM does when its client goes away.
//!
//! * vLLM reports log-probs before the temperature unless it was started with
//!   `--logprobs-mode processed_logprobs`: start it so if TEMPERATURE is not 1.
//! * A prompt that fills the backend's `max_model_len`, or that it refuses as too long, is
//!   [`EngineError::ContextOverflow`]: agents start to compact at it.
//! * Only plain HTTP: the backend stands on the same machine or network.
//! * The weights are the backend's own: the version of every token is 0, and updates are refused.

mod events;
#[cfg(test)]
mod tests;

use crate::base::{
    Engine, EngineError, EngineEvent, EngineStatus, FinishReason, GenerateRequest, PolicyVersion, RequestId,
    SampledToken, SessionId, WeightAck, WeightError, WeightTarget, WeightUpdate,
};
use bytes::Bytes;
use events::Events;
use http_body_util::{BodyExt, Full};
use hyper::{header, Method, Request, Response};
use hyper_util::rt::TokioIo;
use serde_json::{json, Value};
use std::{
    collections::HashMap,
    sync::{
        atomic::{AtomicU64, Ordering},
        Arc, Mutex, MutexGuard, PoisonError,
    },
    time::Duration,
};
use tokio::{
    net::TcpStream,
    sync::{mpsc::UnboundedSender, Notify},
    time::timeout,
};

/// For a connection, and for the answer to small requests.
const CONNECT_DEADLINE: Duration = Duration::from_secs(10);
/// Longest silence of a generation: its prompt waits in the backend's queue and is computed.
const SILENCE_DEADLINE: Duration = Duration::from_secs(600);

/// A backend that cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum BackendError {
    /// The URL.
    #[error("`{0}` is not a URL of the form http://HOST:PORT; https is not served")]
    Url(String),
    /// It does not answer as it should.
    #[error("the backend at {url} {problem}")]
    Backend {
        /// Address.
        url: String,
        /// What is wrong.
        problem: String,
    },
}

/// Where the backend listens.
#[derive(Clone, Debug)]
struct Address {
    /// `host:port`.
    authority: String,
    /// Path before `/v1`.
    prefix: String,
}

impl Address {
    fn parse(url: &str) -> Result<Self, BackendError> {
        let wrong = || BackendError::Url(url.to_owned());
        let rest = url.strip_prefix("http://").ok_or_else(wrong)?;
        let (authority, path) = rest.split_once('/').unwrap_or((rest, ""));
        if authority.is_empty() || authority.contains('@') {
            return Err(wrong());
        }
        let path = path.trim_end_matches('/');
        let path = path.strip_suffix("v1").unwrap_or(path).trim_end_matches('/');
        Ok(Self {
            authority: if authority.contains(':') {
                authority.to_owned()
            } else {
                format!("{authority}:80")
            },
            prefix: if path.is_empty() {
                String::new()
            } else {
                format!("/{path}")
            },
        })
    }

    /// Sends a request; the error completes the sentence `the backend …`.
    async fn send(
        &self,
        method: Method,
        path: &str,
        body: Option<&Value>,
    ) -> Result<Response<hyper::body::Incoming>, String> {
        let connect = timeout(CONNECT_DEADLINE, TcpStream::connect(&self.authority));
        let stream = connect
            .await
            .map_err(|_| {
                format!(
                    "does not accept a connection within {} s",
                    CONNECT_DEADLINE.as_secs()
                )
            })?
            .map_err(|error| format!("cannot be reached: {error}"))?;
        // Small writes are not to wait for acknowledgements; without it the engine only is slower.
        let _ = stream.set_nodelay(true);
        let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream))
            .await
            .map_err(|error| format!("does not speak HTTP: {error}"))?;
        // Ends when the response is read or dropped.
        tokio::spawn(connection);
        let body = body.map_or(Bytes::new(), |body| body.to_string().into());
        let request = Request::builder()
            .method(method)
            .uri(format!("{}{path}", self.prefix))
            .header(header::HOST, &self.authority)
            .header(header::CONTENT_TYPE, "application/json")
            .body(Full::new(body))
            .map_err(|error| error.to_string())?;
        sender
            .send_request(request)
            .await
            .map_err(|error| format!("broke the connection: {error}"))
    }
}

struct Shared {
    address: Address,
    model: String,
    /// Tokens of prompt and reply, if the backend tells.
    max_model_len: Option<u32>,
    generated: AtomicU64,
    prefilled: AtomicU64,
    running: Mutex<HashMap<RequestId, (Arc<Notify>, u64)>>,
}

impl Shared {
    fn running(&self) -> MutexGuard<'_, HashMap<RequestId, (Arc<Notify>, u64)>> {
        self.running.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// See the module documentation.
pub struct VllmEngine {
    shared: Arc<Shared>,
}

impl VllmEngine {
    /// Asks the backend for the model that it serves.
    pub async fn connect(url: &str) -> Result<Self, BackendError> {
        let address = Address::parse(url)?;
        let failed = |problem: String| BackendError::Backend {
            url: url.to_owned(),
            problem,
        };
        let ask = async {
            let response = address.send(Method::GET, "/v1/models", None).await?;
            let status = response.status();
            let body = response.into_body().collect().await.map_err(|e| e.to_string())?;
            if !status.is_success() {
                return Err(format!("answers /v1/models with status {status}"));
            }
            let list: Value = serde_json::from_slice(&body.to_bytes())
                .map_err(|error| format!("answers /v1/models with something else than JSON: {error}"))?;
            let model = &list["data"][0];
            let id = model["id"].as_str();
            let id = id.ok_or_else(|| "serves no model: the list of /v1/models is empty".to_owned())?;
            let max_model_len = model["max_model_len"]
                .as_u64()
                .and_then(|n| u32::try_from(n).ok());
            Ok((id.to_owned(), max_model_len))
        };
        let (model, max_model_len) = timeout(CONNECT_DEADLINE * 2, ask)
            .await
            .map_err(|_| failed("does not answer /v1/models in time".into()))?
            .map_err(failed)?;
        Ok(Self {
            shared: Arc::new(Shared {
                address,
                model,
                max_model_len,
                generated: AtomicU64::new(0),
                prefilled: AtomicU64::new(0),
                running: Mutex::default(),
            }),
        })
    }

    /// The backend's name of its model.
    pub fn model(&self) -> &str {
        &self.shared.model
    }
}

impl Shared {
    fn body(&self, request: &GenerateRequest) -> Value {
        let sampling = &request.sampling;
        let room = self
            .max_model_len
            .map_or(u32::MAX, |most| most.saturating_sub(request.prompt.len() as u32));
        json!({
            "model": self.model, "prompt": request.prompt[..], "stream": true, "return_token_ids": true,
            "logprobs": 0, "max_tokens": request.max_new_tokens.min(room), "temperature": sampling.temperature,
            "top_p": sampling.top_p, "top_k": if sampling.top_k == 0 { -1 } else { i64::from(sampling.top_k) },
            // The backend takes a signed number.
            "seed": sampling.seed >> 1, "stop_token_ids": request.stop_token_ids,
            "skip_special_tokens": false, "spaces_between_special_tokens": false,
        })
    }

    /// Sends events until the end; the error ends the generation.
    async fn generate(
        &self,
        request: &GenerateRequest,
        events: &UnboundedSender<EngineEvent>,
    ) -> Result<FinishReason, EngineError> {
        let lost = |problem: String| EngineError::ReplicaLost(format!("the backend {problem}"));
        let prompt_tokens = request.prompt.len() as u32;
        let overflow = |max_model_len| EngineError::ContextOverflow {
            prompt_tokens,
            max_model_len,
        };
        if let Some(most) = self.max_model_len.filter(|most| prompt_tokens >= *most) {
            return Err(overflow(most));
        }
        let body = self.body(request);
        let response = self.address.send(Method::POST, "/v1/completions", Some(&body));
        let response = timeout(SILENCE_DEADLINE, response)
            .await
            .map_err(|_| lost(format!("was silent for {} s", SILENCE_DEADLINE.as_secs())))?
            .map_err(lost)?;
        let status = response.status();
        let mut body = response.into_body();
        if !status.is_success() {
            let text = body.collect().await.map(|b| b.to_bytes()).unwrap_or_default();
            let text = String::from_utf8_lossy(&text);
            let text: String = text.chars().take(500).collect();
            return Err(
                if status.as_u16() == 400 && text.contains("maximum context length") {
                    overflow(self.max_model_len.unwrap_or(prompt_tokens))
                } else if status.as_u16() >= 502 {
                    lost(format!("answers with status {status}: {text}"))
                } else {
                    EngineError::Internal(format!("the backend answers with status {status}: {text}"))
                },
            );
        }
        let mut stream = Events::default();
        let mut reason = None;
        loop {
            let frame = timeout(SILENCE_DEADLINE, body.frame())
                .await
                .map_err(|_| lost(format!("was silent for {} s", SILENCE_DEADLINE.as_secs())))?;
            let bytes = match frame {
                None => break,
                Some(Ok(frame)) => frame.into_data().unwrap_or_default(),
                Some(Err(error)) => return Err(lost(format!("broke off: {error}"))),
            };
            for data in stream.push(&bytes) {
                let chunk = events::chunk(&data).map_err(EngineError::Internal)?;
                let Some(chunk) = chunk else {
                    continue;
                };
                if !chunk.tokens.is_empty() {
                    self.generated
                        .fetch_add(chunk.tokens.len() as u64, Ordering::Relaxed);
                    let token = |(id, logprob): &(u32, f32)| SampledToken {
                        id: *id,
                        logprob: *logprob,
                        version: PolicyVersion(0),
                    };
                    let tokens = chunk.tokens.iter().map(token).collect();
                    // A receiver that is gone has cancelled the generation; `submit` sees it.
                    let _ = events.send(EngineEvent::Tokens(tokens));
                }
                reason = reason.or(chunk.reason);
            }
        }
        reason.ok_or_else(|| lost("ended the stream without a finish reason".into()))
    }
}

impl Engine for VllmEngine {
    fn submit(&self, request: GenerateRequest, events: UnboundedSender<EngineEvent>) {
        let shared = self.shared.clone();
        let abort = Arc::new(Notify::new());
        let prompt = request.prompt.len() as u64;
        shared.running().insert(request.id, (abort.clone(), prompt));
        shared.prefilled.fetch_add(prompt, Ordering::Relaxed);
        tokio::spawn(async move {
            let end = tokio::select! {
                end = shared.generate(&request, &events) => end,
                () = abort.notified() => Ok(FinishReason::Abort),
                () = events.closed() => Ok(FinishReason::Abort),
            };
            shared.running().remove(&request.id);
            let _ = events.send(match end {
                Ok(reason) => EngineEvent::Finished {
                    reason,
                    cached_tokens: 0,
                    interruptions: 0,
                    routing: None,
                },
                Err(error) => EngineEvent::Failed(error),
            });
        });
    }

    fn abort(&self, id: RequestId) {
        if let Some((abort, _)) = self.shared.running().get(&id) {
            abort.notify_one();
        }
    }

    /// The backend schedules by itself: its capacity is reported as unknown.
    fn status(&self) -> EngineStatus {
        let running = self.shared.running();
        let active = running.values().map(|(_, tokens)| tokens).sum();
        EngineStatus {
            running: running.len() as u32,
            kv_tokens_used: active,
            kv_tokens_active: active,
            generated_tokens: self.shared.generated.load(Ordering::Relaxed),
            prefill_tokens: self.shared.prefilled.load(Ordering::Relaxed),
            ..EngineStatus::default()
        }
    }

    fn resident_prefix(&self, _: &SessionId, _: &[u32]) -> usize {
        0
    }

    fn end_session(&self, _: &SessionId) {}
}

#[async_trait::async_trait]
impl WeightTarget for VllmEngine {
    async fn update_weights(&self, _: Arc<WeightUpdate>) -> Result<WeightAck, WeightError> {
        Err(WeightError::ReplicaLost(
            "weights of a backend behind HTTP are not updated".into(),
        ))
    }
}
