// An engine double whose output is known: token i of a generation is the last prompt token plus i + 1.
// Also included by the MPI tests, which see the crate from outside.

use super::base::{
    Engine, EngineError, EngineEvent, EngineStatus, FinishReason, GenerateRequest, PolicyVersion, RequestId,
    RoutedExperts, SampledToken, SessionId, WeightAck, WeightError, WeightTarget, WeightUpdate,
};
use std::{
    collections::{HashMap, HashSet},
    sync::{Arc, Mutex},
    time::Duration,
};
use tokio::sync::mpsc::UnboundedSender;

#[derive(Default)]
pub struct Double {
    pub state: Arc<Mutex<DoubleState>>,
}

#[derive(Default)]
pub struct DoubleState {
    pub status: EngineStatus,
    pub aborted: HashSet<RequestId>,
    /// Tokens in the cache, by session.
    pub cache: HashMap<SessionId, Vec<u32>>,
    pub ended: Vec<SessionId>,
    pub requests: Vec<GenerateRequest>,
    pub update: Option<Arc<WeightUpdate>>,
    /// Answered instead of the next update.
    pub refusal: Option<WeightError>,
}

impl Engine for Double {
    /// Generates on a thread, a token a millisecond; a prompt that ends in 0 fails after two tokens.
    fn submit(&self, request: GenerateRequest, events: UnboundedSender<EngineEvent>) {
        let state = self.state.clone();
        {
            let mut state = state.lock().unwrap();
            state.status.running += 1;
            state.requests.push(request.clone());
        }
        std::thread::spawn(move || {
            let last = *request.prompt.last().unwrap();
            let mut tokens = request.prompt.to_vec();
            let mut reason = FinishReason::Length;
            let mut failed = false;
            for i in 0..request.max_new_tokens {
                std::thread::sleep(Duration::from_millis(1));
                let version = {
                    let mut state = state.lock().unwrap();
                    if state.aborted.contains(&request.id) || events.is_closed() {
                        reason = FinishReason::Abort;
                        break;
                    }
                    state.status.generated_tokens += 1;
                    state.status.version
                };
                if last == 0 && i == 2 {
                    failed = true;
                    break;
                }
                let id = last + i + 1;
                tokens.push(id);
                let token = SampledToken {
                    id,
                    logprob: -0.1 * (i + 1) as f32,
                    version,
                };
                let _ = events.send(EngineEvent::Tokens(vec![token]));
                if request.stop_token_ids.contains(&id) {
                    reason = FinishReason::Stop;
                    break;
                }
            }
            let mut state = state.lock().unwrap();
            state.status.running -= 1;
            state.cache.insert(request.session.clone(), tokens);
            drop(state);
            let _ = events.send(match failed {
                true => EngineEvent::Failed(EngineError::Internal("a fault".to_owned())),
                false => EngineEvent::Finished {
                    reason,
                    cached_tokens: 7,
                    interruptions: 1,
                    routing: request.routing_from.map(|first| RoutedExperts {
                        first,
                        width: 2,
                        experts: vec![3, 1, 2, 300],
                    }),
                },
            });
        });
    }

    fn abort(&self, id: RequestId) {
        self.state.lock().unwrap().aborted.insert(id);
    }

    fn status(&self) -> EngineStatus {
        self.state.lock().unwrap().status
    }

    fn resident_prefix(&self, session: &SessionId, prompt: &[u32]) -> usize {
        let state = self.state.lock().unwrap();
        let Some(cached) = state.cache.get(session) else {
            return 0;
        };
        cached.iter().zip(prompt).take_while(|(a, b)| a == b).count()
    }

    fn end_session(&self, session: &SessionId) {
        self.state.lock().unwrap().ended.push(session.clone());
    }
}

#[async_trait::async_trait]
impl WeightTarget for Double {
    async fn update_weights(&self, update: Arc<WeightUpdate>) -> Result<WeightAck, WeightError> {
        let mut state = self.state.lock().unwrap();
        if let Some(refusal) = state.refusal.take() {
            return Err(refusal);
        }
        state.status.version = PolicyVersion(update.version.0);
        let checksum = WeightUpdate::checksum_of(&update.tensors);
        let version = update.version;
        state.update = Some(update);
        Ok(WeightAck { version, checksum })
    }
}
