//! May this session's turn go to its engine now? A synchronous decision core: time is an argument.
//!
//! An agent session comes back every few seconds with a longer prompt. If too many sessions share a
//! replica, each evicts the others' cached prefixes, and every turn is computed from its first token:
//! throughput collapses. So a session that was admitted **owns** its cached tokens on the replica while
//! a turn runs and for an idle grace after it, and a session that owns nothing waits until the owned
//! tokens leave room below the high watermark. Sessions grow; when owners together have more than the replica
//! holds, the youngest wait: the oldest end soonest, and nobody's cache is evicted in turn.
//!
//! What a session finds cached at its very first turn on a replica belongs to others (a shared system prompt): it
//! counts neither as its own tokens nor as a hit.
//!
//! A turn is admitted for the first of these reasons that holds ([`AdmitReason`]):
//!
//! 1. the scheduler is off;
//! 2. the session is an owner, and the tokens of all owners before it and its own fit into the replica;
//! 3. nothing runs on the replica and nobody older waits: there is always progress;
//! 4. the session was served here before, the cache still holds the hit threshold of its prompt, and the
//!    owned tokens and its own fit into the replica: admitting it costs little;
//! 5. usage plus what is new of the prompt stays below the high watermark, and nobody older waits for the replica;
//! 6. it is the oldest waiter and has waited for the age limit, and no other turn admitted by age runs
//!    on the replica: no session starves, however long the pressure lasts.
//!
//! Otherwise it waits, with a [`WaitReason`], until a turn ends, an owner's grace runs out or the age
//! limit passes; at the deadline it is refused. Usage is the larger of the owned tokens and what the
//! engine reports for running sequences.
//!
//! Invariants ([`SessionScheduler::sanity_check`]): a replica's owned tokens are the sum over its
//! owners, and its list of owners by age is complete; every waiter waits at exactly one replica; an owner either runs or has an expiry.

#[cfg(test)]
mod tests;

use crate::base::{ReplicaId, SessionId};
use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    time::{Duration, Instant},
};

/// Knobs (`HARBOR_SESSION_LEVEL_SCHEDULER` and `HARBOR_SESSION_SCHEDULER_*`).
#[derive(Clone, Debug)]
pub struct SchedulerConfig {
    /// Off: every turn is admitted at once.
    pub enabled: bool,
    /// Share of the KV cache up to which sessions without ownership are admitted.
    pub high_watermark: f64,
    /// Share of a prompt that must be cached for it to be admitted under pressure.
    pub hit_threshold: f64,
    /// How long a session keeps its ownership between two turns.
    pub idle_grace: Duration,
    /// Waiting time after which the oldest waiter is admitted under pressure.
    pub age_limit: Duration,
    /// Waiting time after which a turn is refused.
    pub deadline: Duration,
}

impl Default for SchedulerConfig {
    fn default() -> Self {
        Self {
            enabled: true,
            high_watermark: 0.85,
            hit_threshold: 0.80,
            idle_grace: Duration::from_secs(60),
            age_limit: Duration::from_secs(120),
            deadline: Duration::from_secs(1800),
        }
    }
}

/// One turn that asks or was admitted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Ticket(pub u64);

/// A turn that wants to go to its replica.
#[derive(Clone, Debug)]
pub struct Ask {
    /// Whose turn.
    pub session: SessionId,
    /// Where the balancer sends it.
    pub replica: ReplicaId,
    /// Length of its prompt.
    pub prompt_tokens: u64,
    /// Leading prompt tokens that the replica's cache holds.
    pub resident_tokens: u64,
}

/// What the replica reports at this moment.
#[derive(Clone, Copy, Debug, Default)]
pub struct ReplicaView {
    /// KV tokens of running sequences.
    pub kv_tokens_active: u64,
    /// KV capacity in tokens; 0 means unknown, and then nothing waits.
    pub kv_tokens_total: u64,
}

/// Why a turn was admitted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum AdmitReason {
    /// The scheduler is off or the replica does not report its capacity.
    Unscheduled,
    /// The session owns cached tokens.
    Owner,
    /// Nothing ran on the replica.
    IdleReplica,
    /// Most of the prompt is cached.
    PrefixHit,
    /// Below the high watermark.
    BelowWatermark,
    /// It was the oldest waiter for too long.
    Aged,
}

/// Why a turn waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum WaitReason {
    /// Usage plus its prompt would pass the high watermark.
    AboveWatermark,
    /// There is room, but an older turn waits for the same replica.
    BehindOlder,
    /// It is an owner, but older owners have grown to fill the replica.
    OwnersGrew,
}

/// The answer to an ask.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Go to the engine.
    Admit(AdmitReason),
    /// Stay in the queue; [`SessionScheduler::reconsider`] tells when that changes.
    Wait(WaitReason),
    /// The deadline passed.
    Refuse,
}

#[derive(Debug)]
struct Waiter {
    ask: Ask,
    since: Instant,
}

/// A session that was served.
#[derive(Debug)]
struct Known {
    replica: ReplicaId,
    /// Its first turn on the replica: owners of lower numbers are older.
    order: Ticket,
    /// Leading tokens that others had cached before it came.
    shared: u64,
    /// Tokens of its longest prompt and reply, without the shared ones.
    tokens: u64,
    running: u32,
    idle_since: Instant,
    /// It owns its tokens; else its grace ran out or it is behind older owners.
    owns: bool,
}

#[derive(Debug)]
struct Running {
    session: SessionId,
    replica: ReplicaId,
    aged: bool,
}

#[derive(Debug, Default)]
struct Replica {
    owned_tokens: u64,
    /// Owners by age, with their tokens.
    owners: BTreeMap<Ticket, u64>,
    running: u32,
    aged_running: u32,
    waiting: BTreeMap<Ticket, Waiter>,
    expiries: BTreeSet<(Instant, SessionId)>,
}

/// See the module documentation.
#[derive(Debug)]
pub struct SessionScheduler {
    config: SchedulerConfig,
    next_ticket: u64,
    replicas: HashMap<ReplicaId, Replica>,
    known: HashMap<SessionId, Known>,
    running: HashMap<Ticket, Running>,
    waiting_at: HashMap<Ticket, ReplicaId>,
}

impl SessionScheduler {
    /// A scheduler that knows no session.
    pub fn new(config: SchedulerConfig) -> Self {
        Self {
            config,
            next_ticket: 0,
            replicas: HashMap::new(),
            known: HashMap::new(),
            running: HashMap::new(),
            waiting_at: HashMap::new(),
        }
    }

    /// Does the answer to this session depend on what is cached of its prompt? The question costs an engine time.
    pub fn asks_for_residency(&self, session: &SessionId, replica: ReplicaId) -> bool {
        let owns = |known: &Known| known.owns && known.replica == replica;
        self.config.enabled && !self.known.get(session).is_some_and(owns)
    }

    /// A turn asks. A waiting one stays queued under the ticket; tickets are ordered by age.
    pub fn on_ask(&mut self, now: Instant, ask: Ask, view: ReplicaView) -> (Ticket, Verdict) {
        let ticket = Ticket(self.next_ticket);
        self.next_ticket += 1;
        self.expire(now, ask.replica);
        let verdict = self.judge(now, ticket, &ask, now, view);
        match verdict {
            Verdict::Admit(reason) => self.admit(ticket, &ask, reason, now),
            Verdict::Wait(reason) => {
                if reason == WaitReason::OwnersGrew {
                    self.disown(&ask.session);
                }
                self.waiting_at.insert(ticket, ask.replica);
                let replica = self.replicas.entry(ask.replica).or_default();
                replica.waiting.insert(ticket, Waiter { ask, since: now });
            }
            Verdict::Refuse => {}
        }
        (ticket, verdict)
    }

    /// Judges the waiters of a replica again, oldest first, and returns those that need not wait on.
    pub fn reconsider(
        &mut self,
        now: Instant,
        replica: ReplicaId,
        mut view: ReplicaView,
    ) -> Vec<(Ticket, Verdict)> {
        self.expire(now, replica);
        let mut out = Vec::new();
        let Some(state) = self.replicas.get_mut(&replica) else {
            return out;
        };
        let mut waiting = std::mem::take(&mut state.waiting);
        let mut kept = BTreeMap::new();
        while let Some((ticket, waiter)) = waiting.pop_first() {
            let verdict = self.judge_behind(now, &waiter.ask, waiter.since, view, kept.is_empty());
            match verdict {
                Verdict::Admit(reason) => {
                    self.admit(ticket, &waiter.ask, reason, now);
                    view.kv_tokens_active += waiter.ask.prompt_tokens;
                }
                Verdict::Wait(_) => {
                    kept.insert(ticket, waiter);
                    continue;
                }
                Verdict::Refuse => {}
            }
            self.waiting_at.remove(&ticket);
            out.push((ticket, verdict));
        }
        self.replicas.entry(replica).or_default().waiting = kept;
        out
    }

    /// A turn has ended, was cancelled while running, or gave up waiting. `tokens` are what its session
    /// now has in the cache: prompt and reply.
    pub fn on_turn_end(&mut self, now: Instant, ticket: Ticket, tokens: u64) {
        if let Some(replica) = self.waiting_at.remove(&ticket) {
            if let Some(state) = self.replicas.get_mut(&replica) {
                state.waiting.remove(&ticket);
            }
            return;
        }
        let Some(turn) = self.running.remove(&ticket) else {
            return;
        };
        let Some(replica) = self.replicas.get_mut(&turn.replica) else {
            return;
        };
        replica.running -= 1;
        replica.aged_running -= u32::from(turn.aged);
        let Some(known) = self.known.get_mut(&turn.session) else {
            return;
        };
        if known.replica == turn.replica && known.running > 0 {
            known.running -= 1;
            known.tokens = known.tokens.max(tokens.saturating_sub(known.shared));
            if known.running == 0 {
                known.idle_since = now;
            }
            if known.owns {
                let old = replica.owners.insert(known.order, known.tokens).unwrap_or(0);
                replica.owned_tokens += known.tokens - old;
                if known.running == 0 {
                    replica
                        .expiries
                        .insert((now + self.config.idle_grace, turn.session));
                }
            }
        }
    }

    /// The session is over: what it owned is free.
    pub fn on_session_end(&mut self, session: &SessionId) {
        self.disown(session);
        self.known.remove(session);
    }

    /// The replica is gone or drains. Its waiters are returned: they must ask for another one.
    pub fn on_replica_gone(&mut self, replica: ReplicaId) -> Vec<Ticket> {
        self.known.retain(|_, known| known.replica != replica);
        self.running.retain(|_, turn| turn.replica != replica);
        let state = self.replicas.remove(&replica).unwrap_or_default();
        for ticket in state.waiting.keys() {
            self.waiting_at.remove(ticket);
        }
        state.waiting.into_keys().collect()
    }

    /// Turns that wait, over all replicas.
    pub fn waiting(&self) -> usize {
        self.waiting_at.len()
    }

    /// KV tokens that sessions own on a replica.
    pub fn owned_tokens(&self, replica: ReplicaId) -> u64 {
        self.replicas.get(&replica).map_or(0, |r| r.owned_tokens)
    }

    fn judge(&self, now: Instant, ticket: Ticket, ask: &Ask, since: Instant, view: ReplicaView) -> Verdict {
        let first = self
            .replicas
            .get(&ask.replica)
            .and_then(|r| r.waiting.first_key_value())
            .is_none_or(|(oldest, _)| *oldest >= ticket);
        self.judge_behind(now, ask, since, view, first)
    }

    /// `oldest`: nobody older waits for the replica.
    fn judge_behind(
        &self,
        now: Instant,
        ask: &Ask,
        since: Instant,
        view: ReplicaView,
        oldest: bool,
    ) -> Verdict {
        use AdmitReason as A;
        if !self.config.enabled || view.kv_tokens_total == 0 {
            return Verdict::Admit(A::Unscheduled);
        }
        let known = self
            .known
            .get(&ask.session)
            .filter(|known| known.replica == ask.replica);
        let state = self.replicas.get(&ask.replica);
        let (owned, running, aged_running) =
            state.map_or((0, 0, 0), |r| (r.owned_tokens, r.running, r.aged_running));
        let mut reason = WaitReason::AboveWatermark;
        if let Some(known) = known.filter(|known| known.owns) {
            let need = known.tokens.max(ask.prompt_tokens.saturating_sub(known.shared));
            let fits = owned - known.tokens + need <= view.kv_tokens_total
                || state.is_some_and(|r| {
                    let older = r.owners.range(..known.order).map(|(_, tokens)| *tokens);
                    older.sum::<u64>() + need <= view.kv_tokens_total
                });
            // While one of its turns runs its cache is in use anyway.
            if fits || known.running > 0 {
                return Verdict::Admit(A::Owner);
            }
            reason = WaitReason::OwnersGrew;
        }
        let owned = owned - known.filter(|known| known.owns).map_or(0, |known| known.tokens);
        if running == 0 && oldest {
            return Verdict::Admit(A::IdleReplica);
        }
        let resident = ask.resident_tokens.min(ask.prompt_tokens);
        let shared = known.map_or(resident, |known| known.shared.min(ask.prompt_tokens));
        let own = ask.prompt_tokens - shared;
        if known.is_some_and(|known| !known.owns)
            && resident > 0
            && resident as f64 >= self.config.hit_threshold * ask.prompt_tokens as f64
            && owned + own <= view.kv_tokens_total
        {
            return Verdict::Admit(A::PrefixHit);
        }
        let usage = owned.max(view.kv_tokens_active) + own;
        let room = usage as f64 <= self.config.high_watermark * view.kv_tokens_total as f64;
        if room && oldest {
            return Verdict::Admit(A::BelowWatermark);
        }
        let waited = now.saturating_duration_since(since);
        if oldest && waited >= self.config.age_limit && aged_running == 0 {
            return Verdict::Admit(A::Aged);
        }
        if waited >= self.config.deadline {
            return Verdict::Refuse;
        }
        Verdict::Wait(if room { WaitReason::BehindOlder } else { reason })
    }

    fn admit(&mut self, ticket: Ticket, ask: &Ask, reason: AdmitReason, now: Instant) {
        let elsewhere = |known: &Known| known.replica != ask.replica;
        if self.known.get(&ask.session).is_some_and(elsewhere) {
            self.disown(&ask.session);
            self.known.remove(&ask.session);
        }
        let replica = self.replicas.entry(ask.replica).or_default();
        let known = self.known.entry(ask.session.clone()).or_insert(Known {
            replica: ask.replica,
            order: ticket,
            shared: ask.resident_tokens.min(ask.prompt_tokens),
            tokens: 0,
            running: 0,
            idle_since: now,
            owns: false,
        });
        if known.owns && known.running == 0 {
            replica
                .expiries
                .remove(&(known.idle_since + self.config.idle_grace, ask.session.clone()));
        }
        known.running += 1;
        known.owns = true;
        known.tokens = known.tokens.max(ask.prompt_tokens.saturating_sub(known.shared));
        let old = replica.owners.insert(known.order, known.tokens).unwrap_or(0);
        replica.owned_tokens += known.tokens - old;
        let aged = reason == AdmitReason::Aged;
        replica.running += 1;
        replica.aged_running += u32::from(aged);
        self.running.insert(
            ticket,
            Running {
                session: ask.session.clone(),
                replica: ask.replica,
                aged,
            },
        );
    }

    fn expire(&mut self, now: Instant, replica: ReplicaId) {
        while let Some(state) = self.replicas.get_mut(&replica) {
            match state.expiries.first() {
                Some((at, session)) if *at <= now => {
                    let session = session.clone();
                    self.disown(&session);
                }
                _ => return,
            }
        }
    }

    fn disown(&mut self, session: &SessionId) {
        let Some(known) = self.known.get_mut(session).filter(|known| known.owns) else {
            return;
        };
        known.owns = false;
        if let Some(replica) = self.replicas.get_mut(&known.replica) {
            replica.owned_tokens -= replica.owners.remove(&known.order).unwrap_or(0);
            replica
                .expiries
                .remove(&(known.idle_since + self.config.idle_grace, session.clone()));
        }
    }

    /// Panics if an invariant of the module documentation does not hold.
    pub fn sanity_check(&self) {
        for (id, replica) in &self.replicas {
            let owners = || self.known.values().filter(|k| k.replica == *id && k.owns);
            let owned: u64 = owners().map(|k| k.tokens).sum();
            assert_eq!(replica.owned_tokens, owned, "owned tokens of replica {id}");
            let listed: BTreeMap<Ticket, u64> = owners().map(|k| (k.order, k.tokens)).collect();
            assert_eq!(replica.owners, listed, "owners of replica {id}");
            let idle = owners().filter(|k| k.running == 0).count();
            assert_eq!(replica.expiries.len(), idle, "expiries of replica {id}");
            for (at, session) in &replica.expiries {
                let known = self.known.get(session);
                let idle =
                    |k: &Known| k.owns && k.running == 0 && k.idle_since + self.config.idle_grace == *at;
                assert!(known.is_some_and(idle), "expiry of {session} on replica {id}");
            }
            let running = || self.running.values().filter(|t| t.replica == *id);
            assert_eq!(
                replica.running as usize,
                running().count(),
                "running on replica {id}"
            );
            let aged = running().filter(|t| t.aged).count();
            assert_eq!(replica.aged_running as usize, aged, "aged on replica {id}");
            assert!(aged <= 1, "{aged} turns admitted by age run on replica {id}");
            for (ticket, waiter) in &replica.waiting {
                assert_eq!(self.waiting_at.get(ticket), Some(id), "{ticket:?}");
                assert_eq!(waiter.ask.replica, *id, "{ticket:?}");
            }
        }
        let waiting: usize = self.replicas.values().map(|r| r.waiting.len()).sum();
        assert_eq!(waiting, self.waiting_at.len(), "waiters");
        for known in self.known.values() {
            assert!(
                self.replicas.contains_key(&known.replica),
                "a session is known on a lost replica"
            );
        }
    }
}
