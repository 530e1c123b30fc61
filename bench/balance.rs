//! Balancing and admission: what they are worth, and what a decision costs.
//!
//! ```text
//! cargo bench -p legorl-front --bench balance
//! ```
//!
//! **Simulation.** 8 replicas with 400,000 KV tokens each, prefill of 20,000 tokens/s (one prompt after the
//! other, in chunks of 2,048), decoding of 40 tokens/s for each of up to 64 sequences. While a prompt is computed,
//! every sequence gets one token a chunk. Sessions of 40 turns share a prefix of 6,000 tokens that every replica
//! holds; a turn adds 300 tokens and a reply of 200; a tool takes 5 s (median; log-normal, σ 0.8). A replica keeps
//! what fits of the sessions it has served and forgets the one that was used longest ago; running sequences are
//! never forgotten. Decisions are those of the product's own [`Balancer`] and [`SessionScheduler`].
//!
//! 1. *Saturated*: as many sessions as named are always there; whenever one ends another one begins. Turns/s over
//!    the middle half of 1,200 sessions. The best figure of the table is the capacity of the best policy.
//! 2. *Open loop*: 400 sessions arrive as a Poisson process at 90% of that capacity, whatever becomes of the
//!    earlier ones. Throughput in the second half of the arrivals, and over all until the last session is done.
//!
//! **Decisions.** 10,000 sessions on 256 replicas: time of pick, ask and end of a turn.

use legorl_front::{
    base::{ReplicaId, SessionId},
    serve::{
        balancer::{BalancePolicy, Balancer},
        session_scheduler::{Ask, ReplicaView, SchedulerConfig, SessionScheduler, Ticket, Verdict},
    },
};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use std::{
    collections::{BTreeMap, BinaryHeap, HashMap, VecDeque},
    time::{Duration, Instant},
};

const REPLICAS: usize = 8;
const KV_TOKENS: u64 = 400_000;
const PREFILL_PER_SEC: f64 = 20_000.0;
const DECODE_PER_SEC: f64 = 40.0;
const CHUNK: f64 = 2_048.0;
/// How fast sequences are decoded while a prompt is computed.
const SLOWED: f64 = PREFILL_PER_SEC / CHUNK / DECODE_PER_SEC;
const MAX_RUNNING: usize = 64;
const SESSIONS: usize = 400;
const SATURATED_SESSIONS: usize = 1_200;
/// Seconds of a session's life without waiting, to spread beginnings.
const LIFE_SECS: f64 = 480.0;
const TURNS: usize = 40;
const SHARED: u64 = 6_000;
const NEW: u64 = 300;
const REPLY: u64 = 200;

#[derive(Clone, Copy, Debug, PartialEq)]
enum What {
    /// A session's next turn.
    Turn(usize),
    /// The next reply of a replica is complete, unless the replica's plan has changed since.
    End(usize, u64),
    /// The scheduler looks again.
    Poll,
}

/// Events by time; the earliest first.
struct At(f64, u64, What);

impl PartialEq for At {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other).is_eq()
    }
}
impl Eq for At {}
impl PartialOrd for At {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}
impl Ord for At {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        other.0.total_cmp(&self.0).then(other.1.cmp(&self.1))
    }
}

#[derive(Default)]
struct Replica {
    /// Tokens beyond the shared prefix, and when they were last used.
    resident: HashMap<usize, (u64, f64)>,
    used: u64,
    running: HashMap<usize, u64>,
    queue: VecDeque<usize>,
    prefill_free: f64,
    /// Seconds of undisturbed decoding so far, and the time up to which they are counted.
    decoded: f64,
    decoded_at: f64,
    /// Running sequences by the `decoded` (in nanoseconds) at which they end.
    ends: BTreeMap<(u64, usize), f64>,
    /// Number of the plan that [`What::End`] belongs to.
    plan: u64,
}

impl Replica {
    fn active(&self) -> u64 {
        self.running.values().sum()
    }

    fn advance(&mut self, now: f64) {
        let passed = now - self.decoded_at;
        let slowed = (self.prefill_free - self.decoded_at).clamp(0.0, passed);
        self.decoded += slowed * SLOWED + (passed - slowed);
        self.decoded_at = now;
    }

    /// When `decoded` will be this much, if no other prompt comes.
    fn when(&self, decoded: f64) -> f64 {
        let slowed = (self.prefill_free - self.decoded_at).max(0.0);
        let missing = decoded - self.decoded;
        if missing <= slowed * SLOWED {
            self.decoded_at + missing / SLOWED
        } else {
            self.decoded_at + slowed + (missing - slowed * SLOWED)
        }
    }

    /// Makes room for a running sequence of `tokens`; false if running ones leave none.
    fn make_room(&mut self, session: usize, tokens: u64) -> bool {
        if SHARED + self.active() + tokens > KV_TOKENS {
            return false;
        }
        let own = self.resident.get(&session).map_or(0, |r| r.0);
        while SHARED + self.used - own + tokens > KV_TOKENS {
            let idle = self
                .resident
                .iter()
                .filter(|(id, _)| !self.running.contains_key(id) && **id != session);
            let Some(oldest) = idle.min_by(|a, b| a.1 .1.total_cmp(&b.1 .1)).map(|(id, _)| *id) else {
                return false;
            };
            self.used -= self.resident.remove(&oldest).map_or(0, |r| r.0);
        }
        true
    }
}

struct Simulation {
    balancer: Balancer,
    scheduler: SessionScheduler,
    replicas: Vec<Replica>,
    events: BinaryHeap<At>,
    number: u64,
    random: ChaCha8Rng,
    epoch: Instant,
    now: f64,
    ids: Vec<SessionId>,
    /// Turns done, by session.
    done: Vec<usize>,
    asked_at: Vec<f64>,
    ticket: Vec<Option<(Ticket, usize)>>,
    waiting: HashMap<Ticket, usize>,
    /// How long each turn took, and when it ended.
    times: Vec<f64>,
    ends: Vec<f64>,
    prefilled: u64,
    /// Begins when the next session ends.
    next: usize,
}

/// Tokens of a session's prompt beyond the shared prefix.
fn prompt(turn: usize) -> u64 {
    turn as u64 * (NEW + REPLY) + NEW
}

impl Simulation {
    fn new(policy: BalancePolicy, scheduler: bool, sessions: usize) -> Self {
        let mut balancer = Balancer::new(policy);
        (0..REPLICAS).for_each(|id| balancer.on_join(ReplicaId(id as u32)));
        Self {
            balancer,
            scheduler: SessionScheduler::new(SchedulerConfig {
                enabled: scheduler,
                ..SchedulerConfig::default()
            }),
            replicas: (0..REPLICAS).map(|_| Replica::default()).collect(),
            events: BinaryHeap::new(),
            number: 0,
            random: ChaCha8Rng::seed_from_u64(1),
            epoch: Instant::now(),
            now: 0.0,
            ids: (0..sessions)
                .map(|n| SessionId::from(format!("s{n}").as_str()))
                .collect(),
            done: vec![0; sessions],
            asked_at: vec![0.0; sessions],
            ticket: vec![None; sessions],
            waiting: HashMap::new(),
            times: Vec::new(),
            ends: Vec::new(),
            prefilled: 0,
            next: sessions,
        }
    }

    fn at(&mut self, time: f64, what: What) {
        self.number += 1;
        self.events.push(At(time, self.number, what));
    }

    fn instant(&self) -> Instant {
        self.epoch + Duration::from_secs_f64(self.now)
    }

    fn view(&self, replica: usize) -> ReplicaView {
        ReplicaView {
            kv_tokens_active: SHARED + self.replicas[replica].active(),
            kv_tokens_total: KV_TOKENS,
        }
    }

    /// As many sessions as `present` at every time; turns a second in the middle half.
    fn saturated(mut self, present: usize) -> f64 {
        for session in 0..present {
            self.at(LIFE_SECS * session as f64 / present as f64, What::Turn(session));
        }
        self.next = present;
        self.run();
        let (from, to) = (self.ends.len() / 4, self.ends.len() * 3 / 4);
        (to - from) as f64 / (self.ends[to] - self.ends[from])
    }

    /// Sessions arrive at a rate.
    fn open_loop(mut self, rate: f64) -> OpenLoop {
        let mut last = 0.0;
        for session in 0..self.done.len() {
            last -= self.random.random_range(f64::EPSILON..1.0).ln() / rate;
            self.at(last, What::Turn(session));
        }
        self.run();
        let before = |time: f64| self.ends.partition_point(|end| *end < time) as f64;
        let whole = self.ends.last().copied().unwrap_or_default();
        self.times.sort_by(f64::total_cmp);
        OpenLoop {
            steady: (before(last) - before(last / 2.0)) / (last / 2.0),
            whole: self.ends.len() as f64 / whole,
            computed: self.prefilled as f64 / self.ends.len() as f64,
            times: self.times,
        }
    }

    fn run(&mut self) {
        self.at(1.0, What::Poll);
        while let Some(At(time, _, what)) = self.events.pop() {
            self.now = time;
            match what {
                What::Turn(session) => self.ask(session),
                What::End(replica, plan) => self.on_end(replica, plan),
                What::Poll => {
                    (0..REPLICAS).for_each(|replica| self.reconsider(replica));
                    if self.done.iter().any(|done| *done < TURNS) {
                        self.at(self.now + 1.0, What::Poll);
                    }
                }
            }
        }
        assert_eq!(self.times.len(), self.done.len() * TURNS, "every turn was served");
    }

    fn ask(&mut self, session: usize) {
        self.asked_at[session] = self.now;
        // The prefix that all share stands at the beginning of every prompt.
        let shared: Vec<u32> = vec![7; 512];
        let id = self.ids[session].clone();
        let replica = self.balancer.pick(&id, &shared).map_or(0, |r| r.0 as usize);
        let resident = self.replicas[replica].resident.get(&session).map_or(0, |r| r.0);
        let ask = Ask {
            session: id,
            replica: ReplicaId(replica as u32),
            prompt_tokens: SHARED + prompt(self.done[session]),
            resident_tokens: resident + SHARED,
        };
        let (ticket, verdict) = self.scheduler.on_ask(self.instant(), ask, self.view(replica));
        self.ticket[session] = Some((ticket, replica));
        match verdict {
            Verdict::Admit(_) => self.submit(session, replica),
            Verdict::Wait(_) => {
                self.waiting.insert(ticket, session);
            }
            Verdict::Refuse => unreachable!("nothing is refused before its deadline"),
        }
    }

    fn reconsider(&mut self, replica: usize) {
        let id = ReplicaId(replica as u32);
        for (ticket, verdict) in self.scheduler.reconsider(self.instant(), id, self.view(replica)) {
            let session = self.waiting.remove(&ticket).expect("a waiter");
            assert!(matches!(verdict, Verdict::Admit(_)), "a turn was refused");
            self.submit(session, replica);
        }
    }

    fn submit(&mut self, session: usize, replica: usize) {
        self.replicas[replica].queue.push_back(session);
        self.start(replica);
    }

    /// Starts queued turns as long as there is room.
    fn start(&mut self, replica: usize) {
        while let Some(session) = self.replicas[replica].queue.front().copied() {
            let tokens = prompt(self.done[session]) + REPLY;
            let r = &mut self.replicas[replica];
            if r.running.len() >= MAX_RUNNING || !r.make_room(session, tokens) {
                return;
            }
            r.queue.pop_front();
            let hit = r.resident.get(&session).map_or(0, |held| held.0);
            let compute = prompt(self.done[session]).saturating_sub(hit);
            self.prefilled += compute;
            r.used = r.used - hit + tokens;
            r.resident.insert(session, (tokens, self.now));
            r.running.insert(session, tokens);
            r.advance(self.now);
            r.prefill_free = r.prefill_free.max(self.now) + compute as f64 / PREFILL_PER_SEC;
            let begins = r.decoded + (r.prefill_free - self.now) * SLOWED;
            let end = begins + REPLY as f64 / DECODE_PER_SEC;
            r.ends.insert(((end * 1e9) as u64, session), end);
            self.plan(replica);
        }
    }

    /// Looks forward to the next end of a replica.
    fn plan(&mut self, replica: usize) {
        let r = &mut self.replicas[replica];
        r.plan += 1;
        let plan = r.plan;
        if let Some(decoded) = r.ends.first_key_value().map(|(_, decoded)| *decoded) {
            let time = r.when(decoded);
            self.at(time, What::End(replica, plan));
        }
    }

    fn on_end(&mut self, replica: usize, plan: u64) {
        let now = self.now;
        let r = &mut self.replicas[replica];
        if r.plan != plan {
            return;
        }
        r.advance(now);
        let ((_, session), _) = r.ends.pop_first().expect("a running sequence");
        self.end(session);
        self.plan(replica);
    }

    fn end(&mut self, session: usize) {
        let (ticket, replica) = self.ticket[session].take().expect("a running turn");
        let tokens = prompt(self.done[session]) + REPLY;
        self.times.push(self.now - self.asked_at[session]);
        self.ends.push(self.now);
        self.done[session] += 1;
        let r = &mut self.replicas[replica];
        r.running.remove(&session);
        r.resident.insert(session, (tokens, self.now));
        self.balancer.on_turn_end(ReplicaId(replica as u32));
        self.scheduler
            .on_turn_end(self.instant(), ticket, tokens + SHARED);
        if self.done[session] < TURNS {
            let normal = (0..12).map(|_| self.random.random::<f64>()).sum::<f64>() - 6.0;
            let tool = 5.0 * (0.8 * normal).exp();
            self.at(self.now + tool, What::Turn(session));
        } else {
            if self.next < self.done.len() {
                self.at(self.now, What::Turn(self.next));
                self.next += 1;
            }
            let id = self.ids[session].clone();
            self.balancer.on_session_end(&id);
            self.scheduler.on_session_end(&id);
            for r in &mut self.replicas {
                r.used -= r.resident.remove(&session).map_or(0, |held| held.0);
            }
        }
        for replica in 0..REPLICAS {
            self.reconsider(replica);
            self.start(replica);
        }
    }
}

/// What an open loop gave.
struct OpenLoop {
    steady: f64,
    whole: f64,
    computed: f64,
    times: Vec<f64>,
}

fn main() {
    use BalancePolicy::{PrefixAware, RoundRobin, StickyLeastLoaded};
    const PRESENT: [usize; 6] = [200, 280, 320, 360, 400, 480];
    let policies = [
        ("round robin", RoundRobin, false),
        ("round robin + scheduler", RoundRobin, true),
        ("prefix-aware", PrefixAware, false),
        ("prefix-aware + scheduler", PrefixAware, true),
        ("sticky, least loaded", StickyLeastLoaded, false),
        ("sticky, least loaded + scheduler", StickyLeastLoaded, true),
    ];
    println!("saturated, turns/s by sessions that are there:");
    println!("  {:<34}{}", "", PRESENT.map(|n| format!("{n:>7}")).concat());
    let mut best: f64 = 0.0;
    for (name, policy, scheduler) in policies {
        let figures = PRESENT.map(|n| Simulation::new(policy, scheduler, SATURATED_SESSIONS).saturated(n));
        best = figures.iter().copied().fold(best, f64::max);
        println!("  {name:<34}{}", figures.map(|f| format!("{f:>7.1}")).concat());
    }
    let rate = 0.9 * best / TURNS as f64;
    println!("open loop, {SESSIONS} sessions at 90% of {best:.1} turns/s:");
    let mut baseline = None;
    for (name, policy, scheduler) in policies {
        let got = Simulation::new(policy, scheduler, SESSIONS).open_loop(rate);
        let (steady, whole) = *baseline.get_or_insert((got.steady, got.whole));
        let at = |share: f64| got.times[((got.times.len() - 1) as f64 * share) as usize];
        println!(
            "  {name:<34} {:>5.1} turns/s ({:.2}x), until all are done {:>5.1} ({:.2}x); turn p50 {:>5.1} s, p99 {:>6.1} s; {:>5.0} tokens computed a turn",
            got.steady,
            got.steady / steady,
            got.whole,
            got.whole / whole,
            at(0.5),
            at(0.99),
            got.computed
        );
    }
    decisions();
}

fn decisions() {
    const MANY: usize = 10_000;
    const FLEET: u32 = 256;
    let mut balancer = Balancer::new(BalancePolicy::StickyLeastLoaded);
    (0..FLEET).for_each(|id| balancer.on_join(ReplicaId(id)));
    let mut scheduler = SessionScheduler::new(SchedulerConfig::default());
    let ids: Vec<SessionId> = (0..MANY)
        .map(|n| SessionId::from(format!("s{n}").as_str()))
        .collect();
    let mut random = ChaCha8Rng::seed_from_u64(3);
    let view = ReplicaView {
        kv_tokens_active: 0,
        kv_tokens_total: 1 << 40,
    };
    let mut times = Vec::new();
    for round in 0..200_000 {
        let id = if round < MANY {
            &ids[round]
        } else {
            &ids[random.random_range(0..MANY)]
        };
        let start = Instant::now();
        let replica = balancer.pick(id, &[]).expect("a replica");
        let ask = Ask {
            session: id.clone(),
            replica,
            prompt_tokens: 30_000,
            resident_tokens: 29_000,
        };
        let (ticket, _) = scheduler.on_ask(start, ask, view);
        scheduler.on_turn_end(start, ticket, 30_200);
        balancer.on_turn_end(replica);
        times.push(start.elapsed().as_secs_f64() * 1e6);
    }
    let first: f64 = times[..MANY].iter().sum::<f64>() / MANY as f64;
    let later: f64 = times[MANY..].iter().sum::<f64>() / (times.len() - MANY) as f64;
    println!(
        "a decision with {MANY} sessions and {FLEET} replicas (pick, ask, end): first turn {first:.2} µs, later turns {later:.2} µs"
    );
}
