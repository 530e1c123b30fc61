//! Drives one turn: from its prompt to its place in the record.
//!
//! The task ends in exactly one of four ways, and each leaves the record consistent: a reply is
//! committed; the engine fails and the turn is removed; the last waiting client leaves and the turn is
//! removed (counted as aborted); the session is closed and the turn is removed.

use super::{
    capture::{NodeId, ToolList},
    error::ApiError,
    live::{self, End, Ending, Finished, Live},
    router::{Generated, RouteError},
    routing::{RoutingFile, TurnRows},
    session::{Closed, Session, State},
    Shared,
};
use crate::{
    base::{FinishReason, GenerateRequest, RequestId, RoutedExperts, SampledToken},
    model::{
        tokenizer::DecodeStream,
        tool_calls::{Piece, ReplyParser, Thinking, ToolCallFormat},
    },
};
use std::{
    hash::{DefaultHasher, Hash, Hasher},
    sync::{
        atomic::{AtomicBool, Ordering},
        Arc,
    },
    time::Instant,
};
use tokio::sync::Notify;

/// What a request asks of its turn.
#[derive(Clone, Debug, Default)]
pub struct TurnSpec {
    /// Most tokens to sample, if the request says so.
    pub max_tokens: Option<u32>,
    /// Texts that end the reply; they are not part of it.
    pub stop: Vec<String>,
    /// Tool calls are taken out of the text.
    pub parse_tools: bool,
    /// The request asks for the prompt's token ids.
    pub echo_prompt: bool,
    /// The tools, for parsers that need them ([`ToolCallFormat::needs_schema`]).
    pub schema: Option<Arc<ToolList>>,
    /// What ids of tool calls begin with.
    pub call_prefix: &'static str,
}

impl TurnSpec {
    /// A number for what shapes the reply beside the messages.
    pub fn options(&self) -> u64 {
        let mut hasher = DefaultHasher::new();
        (self.max_tokens, &self.stop, self.parse_tools).hash(&mut hasher);
        hasher.finish()
    }
}

/// A turn to drive.
pub struct Job {
    /// The proxy.
    pub shared: Arc<Shared>,
    /// Whose turn.
    pub session: Arc<Session>,
    /// Its shared state.
    pub live: Arc<Live>,
    /// Its place in the tree.
    pub node: NodeId,
    /// First token whose experts the engine is to report, if they are recorded.
    pub routing_from: Option<u32>,
    /// Where they go.
    pub routing_file: Option<Arc<RoutingFile>>,
    /// Seed of its random stream.
    pub seed: u64,
    /// What the request asked for.
    pub request: TurnSpec,
}

enum Outcome {
    Generated(Result<Generated, RouteError>),
    StopText,
    Deadline,
    Abandoned,
    Closed(Closed),
}

/// Counts a turn while it runs.
struct Running<'s>(&'s Shared);

impl<'s> Running<'s> {
    fn new(shared: &'s Shared) -> Self {
        shared.running_turns.fetch_add(1, Ordering::Relaxed);
        Self(shared)
    }
}

impl Drop for Running<'_> {
    fn drop(&mut self) {
        self.0.running_turns.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Runs the turn to its end.
pub async fn drive(job: Job) {
    let started = Instant::now();
    let shared = job.shared.clone();
    let _running = Running::new(&shared);
    let limits = &job.session.spec.limits;
    let room = limits.max_total_tokens - job.live.prompt.len() as u32;
    let wanted = job.request.max_tokens.unwrap_or(u32::MAX);
    let generate = GenerateRequest {
        id: RequestId(0),
        session: job.session.id.clone(),
        prompt: job.live.prompt.clone(),
        sampling: crate::base::SamplingParams {
            seed: job.seed,
            ..job.session.spec.sampling
        },
        stop_token_ids: job.shared.renderer.tokenizer().stop_ids().to_vec(),
        max_new_tokens: wanted.min(limits.max_tokens_per_turn).min(room).max(1),
        routing_from: job.routing_from,
    };
    let format = job.request.parse_tools.then(|| job.shared.format.clone());
    let (stop_hit, stop_seen) = (Notify::new(), AtomicBool::new(false));
    let mut text = ReplyText::new(&job, format.clone());
    let outcome = {
        let on_tokens = |tokens: Vec<SampledToken>| {
            if stop_seen.load(Ordering::Relaxed) {
                return;
            }
            let (tokens, stopped) = text.push(&job, tokens);
            let mut progress = job.live.progress();
            progress.tokens.extend(tokens);
            for piece in text.take_pieces() {
                live::add(&mut progress.parts, piece, |number| job.call_id(number));
            }
            drop(progress);
            job.live.changed.send_replace(());
            if stopped {
                stop_seen.store(true, Ordering::Relaxed);
                stop_hit.notify_one();
            }
        };
        let generation = job.shared.router.generate(generate, on_tokens);
        tokio::pin!(generation);
        let mut closed = job.session.closed.subscribe();
        let deadline = tokio::time::sleep_until(limits.deadline.into());
        tokio::pin!(deadline);
        loop {
            let over = *closed.borrow_and_update();
            if let Some(reason) = over {
                break Outcome::Closed(reason);
            }
            tokio::select! {
                biased;
                result = &mut generation => break if stop_seen.load(Ordering::Relaxed) {
                    Outcome::StopText
                } else {
                    Outcome::Generated(result)
                },
                () = stop_hit.notified() => break Outcome::StopText,
                _ = closed.changed() => {}
                () = &mut deadline => break Outcome::Deadline,
                () = job.live.changed.closed() => {
                    if job.leave_if_abandoned(started).await {
                        break Outcome::Abandoned;
                    }
                }
            }
        }
    };
    let end = match outcome {
        Outcome::Abandoned => return,
        Outcome::Closed(Closed::ByTrial) => Err(ApiError::UnknownSession(job.session.id.to_string())),
        Outcome::Closed(Closed::Cancelled) => Err(ApiError::Ended(format!(
            "session `{}` was cancelled",
            job.session.id
        ))),
        Outcome::Generated(Err(error)) => {
            tracing::warn!(session = %job.session.id, turn = job.node, %error, "turn failed");
            Err(error.into())
        }
        Outcome::Generated(Ok(Generated {
            reason: FinishReason::Abort,
            ..
        })) => Err(ApiError::Engine("the engine ended the generation".into())),
        Outcome::Generated(Ok(generated)) => {
            let reply = text.finish(&job, generated.reason);
            match job
                .store_rows(generated.routing.as_ref(), reply.tokens.len())
                .await
            {
                Ok(rows) => Ok((Some(generated), ReplyEnd { rows, ..reply })),
                Err(problem) => {
                    tracing::warn!(session = %job.session.id, turn = job.node, problem, "turn failed");
                    Err(ApiError::Engine(problem))
                }
            }
        }
        Outcome::StopText => Ok((None, text.finish(&job, FinishReason::Stop))),
        // What was sampled in time is a reply that was cut off.
        Outcome::Deadline if !text.tokens.is_empty() => Ok((None, text.finish(&job, FinishReason::Length))),
        Outcome::Deadline => Err(ApiError::Ended(format!(
            "the time limit of session `{}` passed before the first token",
            job.session.id
        ))),
    };
    job.settle(end, started).await;
}

impl Job {
    /// The id of the turn's n-th call; the same in every retry of the turn.
    fn call_id(&self, number: usize) -> String {
        let unique = super::mix_seed(self.seed, self.node as u64, number as u64);
        format!("{}{unique:016x}", self.request.call_prefix)
    }

    /// Writes the rows of a finished generation to the session's file. `None` where nothing was asked for, or
    /// the engine's model has no experts.
    async fn store_rows(
        &self,
        routing: Option<&RoutedExperts>,
        sampled: usize,
    ) -> Result<Option<TurnRows>, String> {
        let (Some(first), Some(file), Some(routing)) = (self.routing_from, &self.routing_file, routing)
        else {
            return Ok(None);
        };
        // The last sampled token was never computed.
        let end = (self.live.prompt.len() + sampled).saturating_sub(1) as u32;
        let shape = file.shape();
        let bytes = shape.encode(routing.rows(first, end, shape)?)?;
        let tokens = end.saturating_sub(first);
        let writer = file.clone();
        let at = tokio::task::spawn_blocking(move || writer.append(&bytes))
            .await
            .map_err(|error| error.to_string())?
            .map_err(|error| {
                let path = file.path().display();
                format!("the experts of a turn cannot be written to `{path}`: {error}")
            })?;
        Ok(Some(TurnRows { first, tokens, at }))
    }

    /// True if nobody waits any more; the turn is then removed. A client that joins meanwhile keeps it.
    async fn leave_if_abandoned(&self, started: Instant) -> bool {
        let (live, node) = (self.live.clone(), self.node);
        let left = self.session.with_state(false, move |state| {
            if live.changed.receiver_count() > 0 {
                return false;
            }
            state.live.remove(&node);
            state.tree.remove(node);
            state.captured.aborted += 1;
            state.captured.model_inference_secs += started.elapsed().as_secs_f64();
            true
        });
        left.await.unwrap_or(true)
    }

    async fn settle(&self, end: Result<(Option<Generated>, ReplyEnd), ApiError>, started: Instant) {
        let (live, node, shared) = (self.live.clone(), self.node, self.shared.clone());
        let (prompt_tokens, id) = (self.live.prompt.len(), self.session.id.clone());
        let with_tools = self.request.parse_tools;
        let settled = self.session.with_state(false, move |state: &mut State| {
            if state.live.remove(&node).is_none() {
                return; // the session was handed over
            }
            let captured = &mut state.captured;
            captured.model_inference_secs += started.elapsed().as_secs_f64();
            match end {
                Ok((generated, reply)) => {
                    captured.turns += 1;
                    // An agent that summed up and went on was not stopped by its context.
                    captured.context_overflow = false;
                    captured.prompt_tokens += prompt_tokens as u64;
                    captured.completion_tokens += reply.tokens.len() as u64;
                    captured.malformed_tool_calls += u32::from(reply.malformed);
                    captured.length_finishes += u32::from(reply.ending == Ending::Length);
                    if let Some(generated) = &generated {
                        captured.admission_wait_secs += generated.admission_wait.as_secs_f64();
                    }
                    // A request without tools cannot be answered with a call.
                    if with_tools {
                        let silent = reply.ending != Ending::ToolCalls && !reply.has_calls;
                        state.turns_without_tool = if silent { state.turns_without_tool + 1 } else { 0 };
                    }
                    let finished = Arc::new(Finished {
                        parts: std::mem::take(&mut live.progress().parts),
                        ending: reply.ending,
                        tokens: reply.tokens.into(),
                        prompt_tokens,
                        cached_tokens: generated.map_or(0, |g| g.cached_tokens),
                        reasoning_tokens: reply.reasoning_tokens,
                    });
                    let message = finished.message();
                    if let Some(rows) = reply.rows {
                        state.tree.set_rows(node, rows);
                    }
                    state
                        .tree
                        .commit(&shared.renderer, node, finished.tokens.clone(), message);
                    state.finished.insert(node, finished.clone());
                    shared.counters.on_turn(&finished, started.elapsed());
                    live.finish(End::Reply(finished));
                }
                Err(error) => {
                    state.tree.remove(node);
                    match &error {
                        ApiError::Engine(problem) | ApiError::Unavailable(problem) => {
                            captured.engine_failure.get_or_insert_with(|| problem.clone());
                        }
                        ApiError::ContextOverflow { .. } => captured.context_overflow = true,
                        _ => {}
                    }
                    live.finish(End::Failed(error));
                }
            }
        });
        if settled.await.is_err() {
            self.live.finish(End::Failed(ApiError::Engine(format!(
                "session `{id}` lost its record"
            ))));
        }
    }
}

/// The reply's text as it grows: decoding, stop texts, reasoning, tool calls.
struct ReplyText {
    decode: DecodeStream,
    parser: ReplyParser,
    stop: Vec<String>,
    /// The stop text that was met.
    stopped: Option<String>,
    /// Decoded text that may still begin a stop text.
    held: String,
    pieces: Vec<Piece>,
    tokens: Vec<SampledToken>,
    /// Reasoning is told apart, so its tokens are counted.
    thinks: bool,
    reasoning_tokens: usize,
}

struct ReplyEnd {
    ending: Ending,
    has_calls: bool,
    malformed: bool,
    tokens: Vec<SampledToken>,
    reasoning_tokens: usize,
    rows: Option<TurnRows>,
}

impl ReplyText {
    fn new(job: &Job, format: Option<Arc<dyn ToolCallFormat>>) -> Self {
        let thinking = job.shared.renderer.thinking(&job.live.prompt);
        Self {
            decode: DecodeStream::new(),
            parser: ReplyParser::new(
                format,
                job.request
                    .schema
                    .as_ref()
                    .map_or(Vec::new(), |tools| tools.list.clone()),
                thinking,
            ),
            stop: job.request.stop.clone(),
            stopped: None,
            held: String::new(),
            pieces: Vec::new(),
            tokens: Vec::new(),
            thinks: thinking != Thinking::None,
            reasoning_tokens: 0,
        }
    }

    /// Takes tokens up to the one that completes a stop text; tells whether there was one.
    fn push(&mut self, job: &Job, mut tokens: Vec<SampledToken>) -> (Vec<SampledToken>, bool) {
        let tokenizer = job.shared.renderer.tokenizer();
        if self.stop.is_empty() && !self.thinks {
            let text = self.decode.push(tokenizer, tokens.iter().map(|t| t.id));
            self.parse(&text);
        } else {
            let mut taken = 0;
            while taken < tokens.len() && self.stopped.is_none() {
                let text = self.decode.push(tokenizer, [tokens[taken].id]);
                taken += 1;
                self.held.push_str(&text);
                self.release();
                if self.parser.in_reasoning() {
                    self.reasoning_tokens = self.tokens.len() + taken;
                }
            }
            tokens.truncate(taken);
        }
        self.tokens.extend(&tokens);
        (tokens, self.stopped.is_some())
    }

    /// Hands text on up to a stop text, or up to where one may have begun.
    fn release(&mut self) {
        let hits = self
            .stop
            .iter()
            .filter_map(|stop| Some((self.held.find(stop)?, stop)));
        let free = match hits.min_by_key(|(at, _)| *at) {
            Some((at, stop)) => {
                self.stopped = Some(stop.clone());
                at
            }
            None => self.held.len() - self.stop_prefix(),
        };
        let text: String = self.held.drain(..free).collect();
        self.parse(&text);
        if self.stopped.is_some() {
            self.held.clear();
        }
    }

    /// Bytes at the end of `held` that may begin a stop text.
    fn stop_prefix(&self) -> usize {
        let ends = self.stop.iter().flat_map(|stop| {
            let starts = stop.char_indices().map(|(at, _)| at).filter(|at| *at > 0);
            starts.filter(|at| self.held.ends_with(&stop[..*at]))
        });
        ends.max().unwrap_or(0)
    }

    fn parse(&mut self, text: &str) {
        let pieces = self.parser.push(text);
        self.pieces.extend(pieces);
    }

    fn take_pieces(&mut self) -> Vec<Piece> {
        std::mem::take(&mut self.pieces)
    }

    /// The end of the reply; its last parts go to the turn's progress.
    fn finish(mut self, job: &Job, reason: FinishReason) -> ReplyEnd {
        if self.stopped.is_none() {
            let rest = self.decode.finish();
            self.held.push_str(&rest);
            self.release();
            let rest = std::mem::take(&mut self.held);
            self.parse(&rest);
        }
        let pieces = self.parser.finish();
        self.pieces.extend(pieces);
        let mut progress = job.live.progress();
        for piece in self.take_pieces() {
            live::add(&mut progress.parts, piece, |number| job.call_id(number));
        }
        let has_calls = progress.parts.iter().any(|p| matches!(p, live::Part::Call(..)));
        let length = reason == FinishReason::Length;
        ReplyEnd {
            ending: match (length, has_calls, self.stopped) {
                (true, _, _) => Ending::Length,
                (false, true, _) => Ending::ToolCalls,
                (false, false, Some(stop)) => Ending::StopText(stop),
                (false, false, None) => Ending::Stop,
            },
            has_calls,
            // A call that was cut off is not one that the model wrote wrongly.
            malformed: self.parser.malformed() > 0 && !length,
            tokens: self.tokens,
            reasoning_tokens: self.reasoning_tokens,
            rows: None,
        }
    }
}
