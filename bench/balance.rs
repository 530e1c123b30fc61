//! Balancing and admission: what they are worth, and what a decision costs.
//!
//! ```text
//! cargo bench -p legorl-front --bench balance
//! ```
//!
//! **Simulation.** 8 replicas with 400,000 KV tokens each, prefill of 20,000 tokens/s (one prompt after the
//! other), decoding of 40 tokens/s for each of up to 64 sequences. 400 sessions of 40 turns share a prefix
//! of 6,000 tokens; a turn adds 300 tokens and a reply of 200; a tool takes 5 s (median; log-normal, σ 0.8).
//! A replica keeps what fits of the sessions it has served and forgets the one that was used longest ago;
//! running sequences are never forgotten. Sessions arrive as a Poisson process at 90% of the capacity of the
//! best policy, which is its throughput when all sessions are there from the start. Decisions are those of
//! the product's own [`Balancer`] and [`SessionScheduler`].
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
    collections::{BinaryHeap, HashMap, VecDeque},
    time::{Duration, Instant},
};

const REPLICAS: usize = 8;
const KV_TOKENS: u64 = 400_000;
const PREFILL_PER_SEC: f64 = 20_000.0;
const DECODE_PER_SEC: f64 = 40.0;
const MAX_RUNNING: usize = 64;
const SESSIONS: usize = 400;
const TURNS: usize = 40;
const SHARED: u64 = 6_000;
const NEW: u64 = 300;
const REPLY: u64 = 200;

#[derive(Clone, Copy, Debug, PartialEq)]
enum What {
    /// A session's next turn.
    Turn(usize),
    /// A turn's reply is complete.
    End(usize),
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
}

impl Replica {
    fn active(&self) -> u64 {
        self.running.values().sum()
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
    times: Vec<f64>,
    prefilled: u64,
}

/// Tokens of a session's prompt beyond the shared prefix.
fn prompt(turn: usize) -> u64 {
    turn as u64 * (NEW + REPLY) + NEW
}

impl Simulation {
    fn new(policy: BalancePolicy, scheduler: bool, seed: u64) -> Self {
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
            random: ChaCha8Rng::seed_from_u64(seed),
            epoch: Instant::now(),
            now: 0.0,
            ids: (0..SESSIONS)
                .map(|n| SessionId::from(format!("s{n}").as_str()))
                .collect(),
            done: vec![0; SESSIONS],
            asked_at: vec![0.0; SESSIONS],
            ticket: vec![None; SESSIONS],
            waiting: HashMap::new(),
            times: Vec::new(),
            prefilled: 0,
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

    /// Sessions a second; all at once without a rate. Returns turns a second and sorted turn times.
    fn run(mut self, rate: Option<f64>) -> (f64, Vec<f64>, f64) {
        let mut time = 0.0;
        for session in 0..SESSIONS {
            if let Some(rate) = rate {
                time -= self.random.random_range(f64::EPSILON..1.0).ln() / rate;
            }
            self.at(time, What::Turn(session));
        }
        self.at(1.0, What::Poll);
        while let Some(At(time, _, what)) = self.events.pop() {
            self.now = time;
            match what {
                What::Turn(session) => self.ask(session),
                What::End(session) => self.end(session),
                What::Poll => {
                    (0..REPLICAS).for_each(|replica| self.reconsider(replica));
                    if self.done.iter().any(|done| *done < TURNS) {
                        self.at(self.now + 1.0, What::Poll);
                    }
                }
            }
        }
        let turns = (SESSIONS * TURNS) as f64;
        assert_eq!(self.times.len(), SESSIONS * TURNS, "every turn was served");
        self.times.sort_by(f64::total_cmp);
        let per_turn = self.prefilled as f64 / turns;
        // The last poll is not work.
        let end = self.asked_at.iter().copied().fold(0.0, f64::max);
        (turns / end, self.times, per_turn)
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
            r.prefill_free = r.prefill_free.max(self.now) + compute as f64 / PREFILL_PER_SEC;
            let end = r.prefill_free + REPLY as f64 / DECODE_PER_SEC;
            self.at(end, What::End(session));
        }
    }

    fn end(&mut self, session: usize) {
        let (ticket, replica) = self.ticket[session].take().expect("a running turn");
        let tokens = prompt(self.done[session]) + REPLY;
        self.times.push(self.now - self.asked_at[session]);
        self.asked_at[session] = self.now;
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

fn main() {
    let policies = [
        ("round robin", BalancePolicy::RoundRobin, false),
        ("prefix-aware", BalancePolicy::PrefixAware, false),
        ("sticky, least loaded", BalancePolicy::StickyLeastLoaded, false),
        ("round robin + scheduler", BalancePolicy::RoundRobin, true),
        ("prefix-aware + scheduler", BalancePolicy::PrefixAware, true),
        (
            "sticky, least loaded + scheduler",
            BalancePolicy::StickyLeastLoaded,
            true,
        ),
    ];
    let mut best: f64 = 0.0;
    println!("all sessions from the start:");
    for (name, policy, scheduler) in policies {
        let (throughput, _, per_turn) = Simulation::new(policy, scheduler, 1).run(None);
        println!("  {name:<34} {throughput:>6.2} turns/s   {per_turn:>6.0} tokens computed a turn");
        best = best.max(throughput);
    }
    let rate = 0.9 * best / TURNS as f64;
    println!("arrivals at 90% of {best:.2} turns/s ({rate:.3} sessions/s):");
    let mut baseline = 0.0;
    for (name, policy, scheduler) in policies {
        let (throughput, times, per_turn) = Simulation::new(policy, scheduler, 2).run(Some(rate));
        if baseline == 0.0 {
            baseline = throughput;
        }
        let at = |share: f64| times[((times.len() - 1) as f64 * share) as usize];
        println!(
            "  {name:<34} {throughput:>6.2} turns/s ({:.2}x)   turn p50 {:>6.1} s  p99 {:>7.1} s   {per_turn:>6.0} tokens computed a turn",
            throughput / baseline,
            at(0.5),
            at(0.99)
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
