//! From a prompt to sampled tokens: balancer, session scheduler and engines behind one call.
//!
//! [`Router::generate`] picks a replica, waits for admission, submits, and hands tokens on as they
//! come. A replica that is lost in the middle is dropped, and the generation goes on at another one
//! with the tokens it has as part of its prompt. Dropping the future cancels the generation: the engine
//! is told to abort, and balancer and scheduler forget the turn.
//!
//! Both decision cores live under one lock that is never held across a wait.

use crate::{
    base::{
        Engine, EngineError, EngineEvent, EngineStatus, FinishReason, GenerateRequest, ReplicaId, RequestId,
        RoutedExperts, SampledToken, SessionId,
    },
    serve::{
        balancer::{BalancePolicy, Balancer},
        session_scheduler::{
            AdmitReason, Ask, ReplicaView, SchedulerConfig, SessionScheduler, Ticket, Verdict, WaitReason,
        },
    },
};
use std::{
    collections::BTreeMap,
    sync::{
        atomic::{AtomicU64, Ordering},
        Arc, Mutex, MutexGuard, PoisonError,
    },
    time::{Duration, Instant},
};
use tokio::sync::{mpsc::unbounded_channel, oneshot, Notify};

/// Settings of a [`Router`].
#[derive(Clone, Debug)]
pub struct RouterConfig {
    /// How sessions are spread over replicas.
    pub policy: BalancePolicy,
    /// Admission.
    pub scheduler: SchedulerConfig,
    /// How often a waiting turn looks again on its own (`HARBOR_SESSION_SCHEDULER_WAIT_POLL_SEC`); ends
    /// of turns wake it at once.
    pub wait_poll: Duration,
    /// How long a turn waits for a replica when none is up.
    pub replica_wait: Duration,
}

impl Default for RouterConfig {
    fn default() -> Self {
        Self {
            policy: BalancePolicy::default(),
            scheduler: SchedulerConfig::default(),
            wait_poll: Duration::from_secs(1),
            replica_wait: Duration::from_secs(120),
        }
    }
}

/// A generation that produced no reply.
#[derive(Clone, Debug, thiserror::Error)]
pub enum RouteError {
    /// No replica came up in time.
    #[error("no engine replica is up; waited {} s for one", .0.as_secs())]
    NoReplica(Duration),
    /// The session scheduler's deadline passed.
    #[error("the turn waited {} s for admission: the KV cache of replica {replica} stayed above the high watermark", waited.as_secs())]
    NotAdmitted {
        /// Where it waited.
        replica: ReplicaId,
        /// For how long.
        waited: Duration,
    },
    /// The engine failed.
    #[error(transparent)]
    Engine(#[from] EngineError),
}

/// The end of a generation; its tokens went to the callback.
#[derive(Clone, Debug)]
pub struct Generated {
    /// Why it ended.
    pub reason: FinishReason,
    /// Prompt tokens that came from the cache.
    pub cached_tokens: u32,
    /// How often weights changed in the middle.
    pub interruptions: u32,
    /// Time spent waiting for admission.
    pub admission_wait: Duration,
    /// Experts of the tokens that [`GenerateRequest::routing_from`] names. After a move to another replica they
    /// are those of the replica that went on, which computed all tokens again.
    pub routing: Option<RoutedExperts>,
}

/// Counters since start, for `/metrics`.
#[derive(Clone, Debug, Default)]
pub struct RouterStats {
    /// Admitted turns by reason.
    pub admitted: BTreeMap<AdmitReason, u64>,
    /// Turns that had to wait, by the first reason.
    pub waited: BTreeMap<WaitReason, u64>,
    /// Turns refused at the deadline.
    pub refused: u64,
    /// Turns that wait now.
    pub waiting: usize,
    /// Generations that moved to another replica.
    pub moved: u64,
    /// Load by replica.
    pub replicas: BTreeMap<ReplicaId, (EngineStatus, u64)>,
}

struct Replica {
    engine: Arc<dyn Engine>,
    /// Tells turns of an earlier replica with the same id from those of this one.
    incarnation: u64,
}

struct Core {
    balancer: Balancer,
    scheduler: SessionScheduler,
    replicas: BTreeMap<ReplicaId, Replica>,
    incarnations: u64,
    waiters: BTreeMap<Ticket, oneshot::Sender<Verdict>>,
    stats: RouterStats,
}

/// See the module documentation.
pub struct Router {
    config: RouterConfig,
    core: Mutex<Core>,
    next_request: AtomicU64,
    joined: Notify,
}

impl Router {
    /// A router without replicas.
    pub fn new(config: RouterConfig) -> Self {
        Self {
            core: Mutex::new(Core {
                balancer: Balancer::new(config.policy),
                scheduler: SessionScheduler::new(config.scheduler.clone()),
                replicas: BTreeMap::new(),
                incarnations: 0,
                waiters: BTreeMap::new(),
                stats: RouterStats::default(),
            }),
            config,
            next_request: AtomicU64::new(1),
            joined: Notify::new(),
        }
    }

    /// A replica is ready to serve.
    pub fn join(&self, id: ReplicaId, engine: Arc<dyn Engine>) {
        let mut core = self.lock();
        core.incarnations += 1;
        let incarnation = core.incarnations;
        if core
            .replicas
            .insert(id, Replica { engine, incarnation })
            .is_some()
        {
            core.forget(id);
        }
        core.balancer.on_join(id);
        drop(core);
        self.joined.notify_waiters();
    }

    /// A replica takes no new turns; running ones end there.
    pub fn drain(&self, id: ReplicaId) {
        let mut core = self.lock();
        core.balancer.on_drain(id);
        core.release_waiters(id);
    }

    /// A replica is gone; its running turns go on elsewhere.
    pub fn lose(&self, id: ReplicaId) {
        let mut core = self.lock();
        core.replicas.remove(&id);
        core.forget(id);
    }

    /// The session is over; its cached prefixes may go first.
    pub fn end_session(&self, session: &SessionId) {
        let mut core = self.lock();
        core.balancer.on_session_end(session);
        core.scheduler.on_session_end(session);
        for replica in core.replicas.values() {
            replica.engine.end_session(session);
        }
        let ids: Vec<_> = core.replicas.keys().copied().collect();
        for id in ids {
            core.reconsider(id);
        }
    }

    /// No replica is there.
    pub fn is_empty(&self) -> bool {
        self.lock().replicas.is_empty()
    }

    /// Turns that run on a replica.
    pub fn in_flight(&self, id: ReplicaId) -> u32 {
        self.lock().balancer.in_flight(id)
    }

    /// Counters and load.
    pub fn stats(&self) -> RouterStats {
        let core = self.lock();
        let mut stats = core.stats.clone();
        stats.waiting = core.scheduler.waiting();
        for (id, replica) in &core.replicas {
            let owned = core.scheduler.owned_tokens(*id);
            stats.replicas.insert(*id, (replica.engine.status(), owned));
        }
        stats
    }

    /// Generates. The request's id is replaced by one of the router's. Tokens go to `on_tokens` in order.
    pub async fn generate(
        &self,
        mut request: GenerateRequest,
        mut on_tokens: impl FnMut(Vec<SampledToken>) + Send,
    ) -> Result<Generated, RouteError> {
        let mut admission_wait = Duration::ZERO;
        let mut interruptions = 0;
        let mut first_cached = None;
        loop {
            let started = Instant::now();
            let turn = self.admit(&request).await?;
            admission_wait += started.elapsed();
            request.id = turn.id;
            let (sender, mut events) = unbounded_channel();
            turn.engine.submit(request.clone(), sender);
            let mut tokens: Vec<SampledToken> = Vec::new();
            let lost = loop {
                match events.recv().await {
                    Some(EngineEvent::Tokens(more)) => {
                        tokens.extend(&more);
                        on_tokens(more);
                    }
                    Some(EngineEvent::Finished {
                        reason,
                        cached_tokens,
                        interruptions: more,
                        routing,
                    }) => {
                        turn.end(request.prompt.len() + tokens.len());
                        return Ok(Generated {
                            reason,
                            cached_tokens: first_cached.unwrap_or(cached_tokens),
                            interruptions: interruptions + more,
                            admission_wait,
                            routing,
                        });
                    }
                    Some(EngineEvent::Failed(EngineError::ReplicaLost(problem))) => break problem,
                    Some(EngineEvent::Failed(error)) => {
                        turn.end(request.prompt.len());
                        return Err(error.into());
                    }
                    None => break "it dropped the request".to_owned(),
                }
            };
            let replica = turn.replica;
            let incarnation = turn.incarnation;
            turn.end(0);
            self.lose_incarnation(replica, incarnation);
            tracing::warn!(%replica, session = %request.session, kept_tokens = tokens.len(), problem = %lost, "engine replica lost; the turn moves");
            self.lock().stats.moved += 1;
            first_cached.get_or_insert(0);
            if !tokens.is_empty() {
                interruptions += 1;
                request.max_new_tokens = request.max_new_tokens.saturating_sub(tokens.len() as u32);
                if request.max_new_tokens == 0 {
                    return Ok(Generated {
                        reason: FinishReason::Length,
                        cached_tokens: 0,
                        interruptions,
                        admission_wait,
                        routing: None,
                    });
                }
                let mut prompt = request.prompt.to_vec();
                prompt.extend(tokens.iter().map(|t| t.id));
                request.prompt = prompt.into();
                // The random stream must not repeat the draws of the tokens that exist.
                request.sampling.seed = super::mix_seed(request.sampling.seed, tokens.len() as u64, 0);
            }
        }
    }

    /// Waits for a replica and for admission to it.
    async fn admit(&self, request: &GenerateRequest) -> Result<Turn<'_>, RouteError> {
        let started = Instant::now();
        loop {
            let joined = self.joined.notified();
            tokio::pin!(joined);
            joined.as_mut().enable();
            let Some((mut turn, verdict)) = self.ask(request) else {
                let left = self.config.replica_wait.saturating_sub(started.elapsed());
                if left.is_zero() || tokio::time::timeout(left, joined).await.is_err() {
                    return Err(RouteError::NoReplica(self.config.replica_wait));
                }
                continue;
            };
            let mut verdict = verdict;
            while let Some(receiver) = turn.waiting.as_mut() {
                match tokio::time::timeout(self.config.wait_poll, receiver).await {
                    Ok(Ok(decided)) => {
                        turn.waiting = None;
                        verdict = decided;
                    }
                    // The sender is dropped when the replica drains or is lost: ask for another one.
                    Ok(Err(_)) => break,
                    Err(_) => self.lock().reconsider(turn.replica),
                }
            }
            if turn.waiting.is_some() {
                continue;
            }
            match verdict {
                Verdict::Admit(_) => return Ok(turn),
                Verdict::Refuse | Verdict::Wait(_) => {
                    return Err(RouteError::NotAdmitted {
                        replica: turn.replica,
                        waited: started.elapsed(),
                    })
                }
            }
        }
    }

    /// One round of both cores. `None` without a replica.
    fn ask(&self, request: &GenerateRequest) -> Option<(Turn<'_>, Verdict)> {
        let mut guard = self.lock();
        let core = &mut *guard;
        let replica = core.balancer.pick(&request.session, &request.prompt)?;
        let entry = core.replicas.get(&replica)?;
        let (engine, incarnation) = (entry.engine.clone(), entry.incarnation);
        let status = engine.status();
        let resident = if core.scheduler.asks_for_residency(&request.session, replica) {
            engine.resident_prefix(&request.session, &request.prompt) as u64
        } else {
            0
        };
        let ask = Ask {
            session: request.session.clone(),
            replica,
            prompt_tokens: request.prompt.len() as u64,
            resident_tokens: resident,
        };
        let (ticket, verdict) = core.scheduler.on_ask(Instant::now(), ask, view(&status));
        let mut waiting = None;
        match verdict {
            Verdict::Wait(reason) => {
                *core.stats.waited.entry(reason).or_default() += 1;
                let (sender, receiver) = oneshot::channel();
                core.waiters.insert(ticket, sender);
                waiting = Some(receiver);
            }
            decided => core.count(decided),
        }
        drop(guard);
        let turn = Turn {
            router: self,
            id: RequestId(self.next_request.fetch_add(1, Ordering::Relaxed)),
            replica,
            incarnation,
            engine,
            ticket,
            waiting,
            tokens: request.prompt.len(),
            ended: false,
        };
        Some((turn, verdict))
    }

    fn lose_incarnation(&self, id: ReplicaId, incarnation: u64) {
        let mut core = self.lock();
        if core
            .replicas
            .get(&id)
            .is_some_and(|r| r.incarnation == incarnation)
        {
            core.replicas.remove(&id);
            core.forget(id);
        }
    }

    fn lock(&self) -> MutexGuard<'_, Core> {
        self.core.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn view(status: &EngineStatus) -> ReplicaView {
    ReplicaView {
        kv_tokens_active: status.kv_tokens_active,
        kv_tokens_total: status.kv_tokens_total,
    }
}

impl Core {
    fn count(&mut self, verdict: Verdict) {
        match verdict {
            Verdict::Admit(reason) => *self.stats.admitted.entry(reason).or_default() += 1,
            Verdict::Refuse => self.stats.refused += 1,
            Verdict::Wait(_) => {}
        }
    }

    fn reconsider(&mut self, id: ReplicaId) {
        if self.scheduler.waiting() == 0 {
            return;
        }
        let Some(replica) = self.replicas.get(&id) else {
            return;
        };
        let status = replica.engine.status();
        for (ticket, verdict) in self.scheduler.reconsider(Instant::now(), id, view(&status)) {
            self.count(verdict);
            if let Some(sender) = self.waiters.remove(&ticket) {
                // A waiter that is gone ends its turn in `Turn::drop`, which tells the scheduler.
                let _ = sender.send(verdict);
            }
        }
    }

    /// Drops the waiters of a replica, which makes them ask again.
    fn release_waiters(&mut self, id: ReplicaId) {
        for ticket in self.scheduler.on_replica_gone(id) {
            self.waiters.remove(&ticket);
        }
    }

    fn forget(&mut self, id: ReplicaId) {
        self.balancer.on_loss(id);
        self.release_waiters(id);
    }
}

/// A turn that asks or runs. Dropping it cancels it.
struct Turn<'r> {
    router: &'r Router,
    id: RequestId,
    replica: ReplicaId,
    incarnation: u64,
    engine: Arc<dyn Engine>,
    ticket: Ticket,
    waiting: Option<oneshot::Receiver<Verdict>>,
    tokens: usize,
    ended: bool,
}

impl Turn<'_> {
    fn end(mut self, tokens: usize) {
        self.tokens = tokens;
        self.ended = true;
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        if !self.ended {
            self.engine.abort(self.id);
        }
        let mut core = self.router.lock();
        core.waiters.remove(&self.ticket);
        core.scheduler
            .on_turn_end(Instant::now(), self.ticket, self.tokens as u64);
        if core
            .replicas
            .get(&self.replica)
            .is_some_and(|r| r.incarnation == self.incarnation)
        {
            core.balancer.on_turn_end(self.replica);
        }
        core.reconsider(self.replica);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        base::SamplingParams,
        serve::engine::scripted::{ScriptedEngine, ScriptedReply},
    };

    fn request(session: &str, prompt: usize) -> GenerateRequest {
        GenerateRequest {
            id: RequestId(0),
            session: session.into(),
            prompt: (0..prompt as u32).collect(),
            sampling: SamplingParams::default(),
            stop_token_ids: vec![9],
            max_new_tokens: 10,
            routing_from: None,
        }
    }

    fn ids(tokens: &Mutex<Vec<SampledToken>>) -> Vec<u32> {
        tokens.lock().unwrap().iter().map(|t| t.id).collect()
    }

    #[tokio::test]
    async fn a_lost_replica_hands_its_turn_over_with_the_tokens_it_has() {
        let router = Router::new(RouterConfig::default());
        let lost = ScriptedReply {
            tokens: vec![5, 6, 7],
            failure: Some((2, EngineError::ReplicaLost("node down".into()))),
            ..ScriptedReply::default()
        };
        router.join(ReplicaId(0), Arc::new(ScriptedEngine::replies(vec![lost])));
        let second = Arc::new(ScriptedEngine::replies(vec![vec![8, 9].into()]).recording());
        router.join(ReplicaId(1), second.clone());
        let tokens = Mutex::new(Vec::new());
        let end = router
            .generate(request("a", 3), |more| tokens.lock().unwrap().extend(more))
            .await
            .unwrap();
        assert_eq!((end.reason, end.interruptions), (FinishReason::Stop, 1));
        assert_eq!(ids(&tokens), [5, 6, 8, 9]);
        let seen = &second.requests()[0];
        assert_eq!((&seen.prompt[..], seen.max_new_tokens), (&[0, 1, 2, 5, 6][..], 8));
        assert_ne!(seen.sampling.seed, request("a", 3).sampling.seed);
        assert_eq!(
            router.stats().replicas.keys().copied().collect::<Vec<_>>(),
            [ReplicaId(1)]
        );
        assert_eq!(router.in_flight(ReplicaId(1)), 0);
    }

    #[tokio::test]
    async fn cancelling_aborts_the_engine_and_wakes_who_waits() {
        let slow = ScriptedReply {
            tokens: vec![5, 9],
            token_delay: Duration::from_secs(3600),
            ..ScriptedReply::default()
        };
        let engine = Arc::new(ScriptedEngine::new(
            100,
            Box::new(move |request, _| {
                if request.session.as_str() == "slow" {
                    slow.clone()
                } else {
                    vec![9].into()
                }
            }),
        ));
        let router = Arc::new(Router::new(RouterConfig::default()));
        router.join(ReplicaId(0), engine.clone());
        let spawn = |session: &'static str| {
            let router = router.clone();
            tokio::spawn(async move { router.generate(request(session, 80), |_| {}).await })
        };
        let slow = spawn("slow");
        while engine.status().running == 0 {
            tokio::task::yield_now().await;
        }
        let waiting = spawn("waits");
        while router.stats().waiting == 0 {
            tokio::task::yield_now().await;
        }
        slow.abort();
        let end = waiting.await.unwrap().unwrap();
        assert_eq!(end.reason, FinishReason::Stop);
        while engine.status().running > 0 {
            tokio::task::yield_now().await;
        }
        assert_eq!(router.in_flight(ReplicaId(0)), 0);
    }

    /// An engine of 100 tokens in which a turn of "slow" never ends.
    fn small_engine() -> Arc<ScriptedEngine> {
        let slow = ScriptedReply {
            tokens: vec![5, 9],
            token_delay: Duration::from_secs(3600),
            ..ScriptedReply::default()
        };
        let script = move |request: &GenerateRequest, _| {
            if request.session.as_str() == "slow" {
                slow.clone()
            } else {
                vec![9].into()
            }
        };
        Arc::new(ScriptedEngine::new(100, Box::new(script)))
    }

    async fn until(what: &str, mut done: impl FnMut() -> bool) {
        let end = Instant::now() + Duration::from_secs(20);
        while !done() {
            assert!(Instant::now() < end, "waited 20 s until {what}");
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }

    #[tokio::test]
    async fn waits_are_counted_by_their_reason_and_end_with_one() {
        let router = Arc::new(Router::new(RouterConfig {
            scheduler: SchedulerConfig {
                deadline: Duration::from_millis(300),
                ..SchedulerConfig::default()
            },
            wait_poll: Duration::from_millis(20),
            ..RouterConfig::default()
        }));
        router.join(ReplicaId(0), small_engine());
        let spawn = |session: &'static str, prompt: usize| {
            let router = router.clone();
            tokio::spawn(async move { router.generate(request(session, prompt), |_| {}).await })
        };
        let slow = spawn("slow", 80);
        until("it runs", || router.in_flight(ReplicaId(0)) == 1).await;
        let big = spawn("big", 50);
        until("it waits", || router.stats().waiting == 1).await;
        let small = spawn("small", 2);
        until("both wait", || router.stats().waiting == 2).await;
        let waited = router.stats().waited;
        assert_eq!(
            waited.into_iter().collect::<Vec<_>>(),
            [(WaitReason::AboveWatermark, 1), (WaitReason::BehindOlder, 1)]
        );
        let error = big.await.unwrap().unwrap_err();
        assert!(
            matches!(
                error,
                RouteError::NotAdmitted {
                    replica: ReplicaId(0),
                    ..
                }
            ),
            "{error}"
        );
        // The small one was behind it alone.
        assert_eq!(small.await.unwrap().unwrap().reason, FinishReason::Stop);
        let stats = router.stats();
        assert_eq!((stats.refused, stats.waiting), (1, 0));
        assert_eq!(stats.admitted[&AdmitReason::BelowWatermark], 1);
        slow.abort();
        until("nothing runs", || router.in_flight(ReplicaId(0)) == 0).await;
    }

    #[tokio::test]
    async fn a_waiting_turn_is_asked_for_anew_when_its_replica_drains_or_is_lost() {
        for lost in [false, true] {
            let router = Arc::new(Router::new(RouterConfig::default()));
            router.join(ReplicaId(0), small_engine());
            let spawn = |session: &'static str| {
                let router = router.clone();
                tokio::spawn(async move { router.generate(request(session, 80), |_| {}).await })
            };
            let slow = spawn("slow");
            until("it runs", || router.in_flight(ReplicaId(0)) == 1).await;
            let waiting = spawn("waits");
            until("it waits", || router.stats().waiting == 1).await;
            router.join(ReplicaId(1), small_engine());
            if lost {
                router.lose(ReplicaId(0));
            } else {
                router.drain(ReplicaId(0));
            }
            assert_eq!(waiting.await.unwrap().unwrap().reason, FinishReason::Stop);
            assert_eq!(router.stats().waiting, 0);
            // What ran there goes on there as long as it lives.
            assert_eq!(router.in_flight(ReplicaId(0)), u32::from(!lost));
            slow.abort();
            until("nothing runs", || router.in_flight(ReplicaId(0)) == 0).await;
        }
    }

    #[tokio::test]
    async fn a_turn_waits_for_a_replica_and_then_says_so() {
        let router = Arc::new(Router::new(RouterConfig {
            replica_wait: Duration::from_millis(50),
            ..RouterConfig::default()
        }));
        let error = router.generate(request("a", 3), |_| {}).await.unwrap_err();
        assert!(matches!(error, RouteError::NoReplica(_)), "{error}");
        let late = {
            let router = router.clone();
            tokio::spawn(async move { router.generate(request("a", 3), |_| {}).await })
        };
        tokio::task::yield_now().await;
        router.join(
            ReplicaId(4),
            Arc::new(ScriptedEngine::replies(vec![vec![9].into()])),
        );
        assert!(late.await.unwrap().is_ok());
    }
}
