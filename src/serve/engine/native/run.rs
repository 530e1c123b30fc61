//! The engine's thread: commands in, steps, events out.

use super::{
    compute::{Compute, LoadedWeights},
    forward::SequenceWork,
    pages::{PagePool, PAGE_TOKENS},
    sampler,
    scheduler::{Scheduler, Work},
    sequence::Sequence,
    workers::WorkerDied,
};
use crate::base::{
    EngineError, EngineEvent, EngineStatus, GenerateRequest, PolicyVersion, RequestId, WeightAck, WeightError,
};
use std::{
    panic::{catch_unwind, AssertUnwindSafe},
    sync::{
        mpsc::{Receiver, TryRecvError},
        Mutex, MutexGuard, PoisonError,
    },
};
use tokio::sync::{mpsc::UnboundedSender, oneshot};

/// What callers ask of the thread.
pub(super) enum Command {
    Submit(GenerateRequest, UnboundedSender<EngineEvent>),
    Abort(RequestId),
    Update(Box<NewWeights>),
    Shutdown,
}

/// Weights that are verified and laid out, ready to be swapped in.
pub(super) struct NewWeights {
    pub version: PolicyVersion,
    pub checksum: u32,
    pub weights: LoadedWeights,
    pub done: oneshot::Sender<Result<WeightAck, WeightError>>,
}

/// What callers read without asking the thread.
pub(super) struct Shared {
    pool: Mutex<PagePool>,
    status: Mutex<EngineStatus>,
}

impl Shared {
    pub(super) fn new(pool: PagePool, version: PolicyVersion) -> Self {
        Self {
            pool: Mutex::new(pool),
            status: Mutex::new(EngineStatus {
                version,
                ..EngineStatus::default()
            }),
        }
    }

    /// Held for a plan or a look-up, never during a computation.
    pub(super) fn pool(&self) -> MutexGuard<'_, PagePool> {
        self.pool.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn status_mut(&self) -> MutexGuard<'_, EngineStatus> {
        self.status.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn status(&self) -> EngineStatus {
        let mut status = *self.status_mut();
        let pool = self.pool();
        let tokens = |pages: usize| (pages * PAGE_TOKENS) as u64;
        status.kv_tokens_total = tokens(pool.num_pages());
        status.kv_tokens_used = tokens(pool.num_pages() - pool.free());
        status.kv_tokens_active = tokens(pool.held());
        status
    }
}

/// Bounds of a single request.
#[derive(Clone, Copy)]
pub(super) struct RequestBounds {
    pub max_model_len: usize,
    pub vocab_size: usize,
}

/// State of the thread.
pub(super) struct Runner<'a> {
    pub shared: &'a Shared,
    pub commands: &'a Receiver<Command>,
    pub scheduler: Scheduler,
    pub compute: Compute,
    pub bounds: RequestBounds,
    pub version: PolicyVersion,
}

/// Whether the thread goes on.
enum Next {
    Step,
    Stop,
}

impl Runner<'_> {
    /// Runs until shutdown. After a fault every request, present and later, is answered with it.
    pub(super) fn run(mut self) {
        let ended = catch_unwind(AssertUnwindSafe(|| self.serve()));
        let fault = match ended {
            Ok(Ok(())) => {
                let lost = EngineError::ReplicaLost("the engine was shut down".into());
                self.scheduler.fail_all(&lost, &mut self.shared.pool());
                return;
            }
            Ok(Err(died)) => died.to_string(),
            Err(panic) => panic_text(panic.as_ref()),
        };
        tracing::error!(fault, "the native engine stopped");
        let lost = EngineError::ReplicaLost(fault.clone());
        self.scheduler.fail_all(&lost, &mut self.shared.pool());
        self.publish();
        while let Ok(command) = self.commands.recv() {
            match command {
                Command::Shutdown => break,
                Command::Abort(_) => {}
                // A caller that went away needs no answer.
                Command::Submit(_, events) => drop(events.send(EngineEvent::Failed(lost.clone()))),
                Command::Update(new) => drop(new.done.send(Err(WeightError::ReplicaLost(fault.clone())))),
            }
        }
    }

    fn serve(&mut self) -> Result<(), WorkerDied> {
        while let Next::Step = self.take_commands()? {
            self.step()?;
            self.publish();
        }
        Ok(())
    }

    /// Handles what has arrived; waits for something when there is nothing to compute.
    fn take_commands(&mut self) -> Result<Next, WorkerDied> {
        loop {
            let command = match self.commands.try_recv() {
                Ok(command) => command,
                Err(TryRecvError::Empty) if !self.scheduler.is_idle() => return Ok(Next::Step),
                Err(TryRecvError::Empty) => {
                    self.publish();
                    match self.commands.recv() {
                        Ok(command) => command,
                        Err(_) => return Ok(Next::Stop),
                    }
                }
                Err(TryRecvError::Disconnected) => return Ok(Next::Stop),
            };
            match command {
                Command::Submit(request, events) => self.submit(request, events),
                Command::Abort(id) => self.scheduler.on_abort(id, &mut self.shared.pool()),
                Command::Update(new) => self.update(*new)?,
                Command::Shutdown => return Ok(Next::Stop),
            }
        }
    }

    fn submit(&mut self, request: GenerateRequest, events: UnboundedSender<EngineEvent>) {
        match check_request(&request, self.bounds) {
            Ok(()) => self.scheduler.on_request(Sequence::new(request, events)),
            // A caller that went away needs no answer.
            Err(error) => drop(events.send(EngineEvent::Failed(error))),
        }
    }

    fn update(&mut self, new: NewWeights) -> Result<(), WorkerDied> {
        if let Err(error) = self.compute.set_weights(new.weights)? {
            // The trainer may have stopped waiting.
            let _ = new.done.send(Err(error));
            return Ok(());
        }
        self.version = new.version;
        self.scheduler.on_new_weights(&mut self.shared.pool());
        self.publish();
        let ack = WeightAck {
            version: new.version,
            checksum: new.checksum,
        };
        // The trainer may have stopped waiting; the weights are in use all the same.
        let _ = new.done.send(Ok(ack));
        Ok(())
    }

    fn step(&mut self) -> Result<(), WorkerDied> {
        let plan = self.scheduler.plan(&mut self.shared.pool());
        if plan.is_empty() {
            return Ok(());
        }
        let ops = self.shared.pool().take_state_ops();
        self.compute.move_states(&ops);
        let works = plan.iter().map(|work| self.sequence_work(work)).collect();
        let draws = self.compute.step(works)?;
        self.scheduler.record_routing(&plan, self.compute.routing());
        self.scheduler
            .on_step(&plan, &draws, self.version, &mut self.shared.pool());
        Ok(())
    }

    fn sequence_work(&self, work: &Work) -> SequenceWork {
        let sequence = &self.scheduler.running()[work.index];
        let params = sequence.request.sampling;
        SequenceWork {
            start: work.start,
            tokens: sequence.tokens[work.start..work.start + work.count].to_vec(),
            pages: sequence.pages.clone(),
            state: sequence.state,
            sample: work
                .samples
                .then(|| (params, sampler::uniform(params.seed, sequence.sampled() as u64))),
        }
    }

    fn publish(&self) {
        let mut status = self.shared.status_mut();
        status.running = self.scheduler.running().len() as u32;
        status.waiting = self.scheduler.num_waiting() as u32;
        status.version = self.version;
        status.generated_tokens = self.scheduler.generated_tokens;
        status.prefill_tokens = self.scheduler.prefill_tokens;
    }
}

fn check_request(request: &GenerateRequest, bounds: RequestBounds) -> Result<(), EngineError> {
    let internal = |problem: String| {
        Err(EngineError::Internal(format!(
            "request {}: {problem}",
            request.id
        )))
    };
    if request.prompt.len() >= bounds.max_model_len {
        return Err(EngineError::ContextOverflow {
            prompt_tokens: request.prompt.len() as u32,
            max_model_len: bounds.max_model_len as u32,
        });
    }
    if request.prompt.is_empty() {
        return internal("the prompt is empty".into());
    }
    if request.max_new_tokens == 0 {
        return internal("max_new_tokens is 0".into());
    }
    if let Some(id) = request
        .prompt
        .iter()
        .find(|id| **id as usize >= bounds.vocab_size)
    {
        return internal(format!(
            "token {id} is outside the vocabulary of {}",
            bounds.vocab_size
        ));
    }
    request.sampling.check().or_else(internal)
}

fn panic_text(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic
        .downcast_ref::<String>()
        .cloned()
        .or_else(|| panic.downcast_ref::<&str>().map(|s| (*s).to_string()));
    text.unwrap_or_else(|| "panic without a message".into())
}
