//! Who goes on, who waits and for how long, by hand and under any order of events.

use super::*;
use proptest::prelude::*;

const R: ReplicaId = ReplicaId(0);
const VIEW: ReplicaView = ReplicaView {
    kv_tokens_active: 0,
    kv_tokens_total: 1000,
};

fn ask(session: &str, prompt_tokens: u64, resident_tokens: u64) -> Ask {
    Ask {
        session: session.into(),
        replica: R,
        prompt_tokens,
        resident_tokens,
    }
}

fn secs(n: u64) -> Duration {
    Duration::from_secs(n)
}

#[test]
fn owners_go_on_and_cold_sessions_wait_above_the_watermark() {
    let mut s = SessionScheduler::new(SchedulerConfig::default());
    let t0 = Instant::now();
    let (a, v) = s.on_ask(t0, ask("a", 400, 0), VIEW);
    assert_eq!(v, Verdict::Admit(AdmitReason::IdleReplica));
    let (b, v) = s.on_ask(t0, ask("b", 400, 0), VIEW);
    assert_eq!(v, Verdict::Admit(AdmitReason::BelowWatermark));
    let (c, v) = s.on_ask(t0, ask("c", 200, 0), VIEW);
    assert_eq!(v, Verdict::Wait(WaitReason::AboveWatermark));
    let (_, v) = s.on_ask(t0, ask("d", 10, 0), VIEW);
    assert_eq!(
        v,
        Verdict::Wait(WaitReason::BehindOlder),
        "small, but `c` is older"
    );
    let (e, v) = s.on_ask(t0, ask("e", 100, 80), VIEW);
    assert_eq!(
        v,
        Verdict::Wait(WaitReason::BehindOlder),
        "what a new session finds cached is no hit"
    );
    s.on_turn_end(t0, a, 450);
    let (a2, v) = s.on_ask(t0 + secs(59), ask("a", 500, 0), VIEW);
    assert_eq!(v, Verdict::Admit(AdmitReason::Owner), "within the idle grace");
    assert!(s.reconsider(t0 + secs(59), R, VIEW).is_empty());
    s.sanity_check();
    // `b`'s session ends, `a` stays idle for longer than its grace: both waiters fit.
    s.on_turn_end(t0 + secs(59), a2, 500);
    s.on_turn_end(t0 + secs(59), b, 450);
    s.on_turn_end(t0 + secs(59), e, 120);
    s.on_session_end(&"b".into());
    let woken = s.reconsider(t0 + secs(119), R, VIEW);
    assert_eq!(
        woken.iter().map(|(_, v)| *v).collect::<Vec<_>>(),
        [
            Verdict::Admit(AdmitReason::IdleReplica),
            Verdict::Admit(AdmitReason::BelowWatermark)
        ]
    );
    assert_eq!(woken[0].0, c);
    s.sanity_check();
}

#[test]
fn a_session_that_comes_back_late_is_admitted_if_its_prefix_is_still_there() {
    let mut s = SessionScheduler::new(SchedulerConfig::default());
    let t0 = Instant::now();
    let (a, _) = s.on_ask(t0, ask("a", 100, 0), VIEW);
    s.on_turn_end(t0, a, 120);
    assert!(!s.asks_for_residency(&"a".into(), R) && s.asks_for_residency(&"a".into(), ReplicaId(1)));
    let later = t0 + secs(61);
    let (_, v) = s.on_ask(later, ask("b", 800, 0), VIEW);
    assert_eq!(v, Verdict::Admit(AdmitReason::IdleReplica));
    let (_, v) = s.on_ask(later, ask("c", 100, 100), VIEW);
    assert_eq!(
        v,
        Verdict::Admit(AdmitReason::BelowWatermark),
        "all of it is others'"
    );
    assert_eq!(
        s.owned_tokens(R),
        800,
        "the grace of `a` is over, and `c` has nothing of its own"
    );
    assert!(s.asks_for_residency(&"a".into(), R));
    let (cold, v) = s.on_ask(later, ask("a", 150, 119), VIEW);
    assert_eq!(
        v,
        Verdict::Wait(WaitReason::AboveWatermark),
        "less than the threshold"
    );
    s.on_turn_end(later, cold, 0);
    let (_, v) = s.on_ask(later, ask("a", 150, 120), VIEW);
    assert_eq!(v, Verdict::Admit(AdmitReason::PrefixHit));
    s.sanity_check();
}

#[test]
fn owners_that_outgrow_the_replica_wait_for_older_ones() {
    let mut s = SessionScheduler::new(SchedulerConfig::default());
    let t0 = Instant::now();
    let admit = |s: &mut SessionScheduler, name: &str, tokens: u64| {
        let (ticket, verdict) = s.on_ask(t0, ask(name, tokens, 0), VIEW);
        assert!(matches!(verdict, Verdict::Admit(_)), "{name}: {verdict:?}");
        ticket
    };
    let first: Vec<Ticket> = ["old", "middle", "young"].map(|n| admit(&mut s, n, 250)).into();
    first.iter().for_each(|t| s.on_turn_end(t0, *t, 260));
    // They grow: 400 each are more than 1,000.
    let old = admit(&mut s, "old", 400);
    let middle = admit(&mut s, "middle", 400);
    let (young, v) = s.on_ask(t0, ask("young", 400, 260), VIEW);
    assert_eq!(v, Verdict::Wait(WaitReason::OwnersGrew));
    assert_eq!(s.owned_tokens(R), 800, "what waits owns nothing");
    s.on_turn_end(t0, old, 410);
    s.on_turn_end(t0, middle, 410);
    let middle = admit(&mut s, "middle", 450);
    assert!(s.reconsider(t0, R, VIEW).is_empty());
    s.on_session_end(&"old".into());
    assert_eq!(
        s.reconsider(t0, R, VIEW),
        [(young, Verdict::Admit(AdmitReason::BelowWatermark))]
    );
    s.on_turn_end(t0, young, 430);
    // Age is kept: it is still the younger one of the two.
    s.on_turn_end(t0, middle, 470);
    admit(&mut s, "middle", 600);
    let (_, v) = s.on_ask(t0, ask("young", 450, 0), VIEW);
    assert_eq!(v, Verdict::Wait(WaitReason::OwnersGrew));
    s.sanity_check();
}

#[test]
fn the_oldest_waiter_is_admitted_by_age_one_at_a_time_and_refused_at_the_deadline() {
    let mut s = SessionScheduler::new(SchedulerConfig::default());
    let t0 = Instant::now();
    let (_, _) = s.on_ask(t0, ask("owner", 900, 0), VIEW);
    let (x, _) = s.on_ask(t0, ask("x", 900, 0), VIEW);
    let (y, _) = s.on_ask(t0, ask("y", 900, 0), VIEW);
    assert!(s.reconsider(t0 + secs(119), R, VIEW).is_empty());
    assert_eq!(
        s.reconsider(t0 + secs(120), R, VIEW),
        [(x, Verdict::Admit(AdmitReason::Aged))]
    );
    assert!(s.reconsider(t0 + secs(130), R, VIEW).is_empty(), "one at a time");
    assert_eq!(s.reconsider(t0 + secs(1800), R, VIEW), [(y, Verdict::Refuse)]);
    s.sanity_check();
}

#[test]
fn off_or_without_a_known_capacity_everything_is_admitted() {
    let config = SchedulerConfig {
        enabled: false,
        ..SchedulerConfig::default()
    };
    let t0 = Instant::now();
    let mut off = SessionScheduler::new(config);
    let mut unknown = SessionScheduler::new(SchedulerConfig::default());
    for n in 0..5 {
        let ask = ask(&n.to_string(), 900, 0);
        let (_, v) = off.on_ask(t0, ask.clone(), VIEW);
        assert_eq!(v, Verdict::Admit(AdmitReason::Unscheduled));
        let (_, v) = unknown.on_ask(t0, ask, ReplicaView::default());
        assert_eq!(v, Verdict::Admit(AdmitReason::Unscheduled));
    }
}

#[test]
fn a_lost_replica_gives_its_waiters_back() {
    let mut s = SessionScheduler::new(SchedulerConfig::default());
    let t0 = Instant::now();
    let (a, _) = s.on_ask(t0, ask("a", 900, 0), VIEW);
    let (b, _) = s.on_ask(t0, ask("b", 900, 0), VIEW);
    assert_eq!(s.on_replica_gone(R), [b]);
    s.on_turn_end(t0, a, 950);
    assert_eq!((s.waiting(), s.owned_tokens(R)), (0, 0));
    s.sanity_check();
}

#[derive(Clone, Debug)]
enum Step {
    Ask(u8, u8, u64, u64),
    End(u8, u64),
    Reconsider(u8),
    SessionEnd(u8),
    Gone(u8),
    Later(u64),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        8 => (0u8..8, 0u8..2, 0u64..600, 0u64..600).prop_map(|(s, r, p, h)| Step::Ask(s, r, p, h)),
        5 => (any::<u8>(), 0u64..700).prop_map(|(n, t)| Step::End(n, t)),
        4 => (0u8..2).prop_map(Step::Reconsider),
        1 => (0u8..8).prop_map(Step::SessionEnd),
        1 => (0u8..2).prop_map(Step::Gone),
        4 => (1u64..90).prop_map(Step::Later),
    ];
    prop::collection::vec(step, 0..120)
}

proptest! {
    #[test]
    fn invariants_hold_and_nobody_starves(steps in steps()) {
        let mut s = SessionScheduler::new(SchedulerConfig { deadline: secs(1_000_000), ..SchedulerConfig::default() });
        let mut now = Instant::now();
        let (mut running, mut waiting) = (Vec::new(), Vec::new());
        for step in steps {
            match step {
                Step::Ask(session, replica, prompt_tokens, resident_tokens) => {
                    let ask = Ask { session: session.to_string().as_str().into(), replica: ReplicaId(u32::from(replica)), prompt_tokens, resident_tokens };
                    let (ticket, verdict) = s.on_ask(now, ask, VIEW);
                    match verdict {
                        Verdict::Admit(_) => running.push((ticket, replica)),
                        Verdict::Wait(_) => waiting.push((ticket, replica)),
                        Verdict::Refuse => prop_assert!(false, "refused at once"),
                    }
                }
                Step::End(n, tokens) if !running.is_empty() => {
                    let (ticket, _) = running.remove(n as usize % running.len());
                    s.on_turn_end(now, ticket, tokens);
                }
                Step::End(..) => {}
                Step::Reconsider(r) => for (ticket, verdict) in s.reconsider(now, ReplicaId(u32::from(r)), VIEW) {
                    prop_assert!(matches!(verdict, Verdict::Admit(_)));
                    waiting.retain(|w| w.0 != ticket);
                    running.push((ticket, r));
                },
                Step::SessionEnd(n) => s.on_session_end(&n.to_string().as_str().into()),
                Step::Gone(r) => {
                    let back = s.on_replica_gone(ReplicaId(u32::from(r)));
                    let want: Vec<_> = waiting.iter().filter(|w| w.1 == r).map(|w| w.0).collect();
                    prop_assert_eq!(back, want);
                    waiting.retain(|w| w.1 != r);
                    running.retain(|w| w.1 != r);
                }
                Step::Later(n) => now += secs(n),
            }
            s.sanity_check();
            prop_assert_eq!(s.waiting(), waiting.len());
        }
        // Turns end one by one and time passes: everybody who waits gets in.
        for _ in 0..waiting.len() + running.len() {
            now += secs(121);
            for r in [0, 1] {
                for (ticket, _) in s.reconsider(now, ReplicaId(r), VIEW) {
                    waiting.retain(|w| w.0 != ticket);
                    running.push((ticket, r as u8));
                }
            }
            if let Some((ticket, _)) = running.pop() {
                s.on_turn_end(now, ticket, 0);
            }
            s.sanity_check();
        }
        prop_assert!(waiting.is_empty(), "{waiting:?} still wait");
    }
}

#[test]
fn each_replica_has_its_own_watermark() {
    let mut s = SessionScheduler::new(SchedulerConfig::default());
    let t0 = Instant::now();
    let at = |session: &str, replica: u32, tokens: u64| Ask {
        replica: ReplicaId(replica),
        ..ask(session, tokens, 0)
    };
    let _ = s.on_ask(t0, at("a", 0, 800), VIEW);
    assert_eq!(
        s.on_ask(t0, at("b", 0, 100), VIEW).1,
        Verdict::Wait(WaitReason::AboveWatermark)
    );
    // The other one is empty, and a waiter there does not count here.
    assert_eq!(
        s.on_ask(t0, at("c", 1, 100), VIEW).1,
        Verdict::Admit(AdmitReason::IdleReplica)
    );
    assert_eq!(
        s.on_ask(t0, at("d", 1, 700), VIEW).1,
        Verdict::Admit(AdmitReason::BelowWatermark)
    );
    assert_eq!(
        (s.owned_tokens(ReplicaId(0)), s.owned_tokens(ReplicaId(1))),
        (800, 800)
    );
    // What the engine reports counts where it is more than what sessions own.
    let busy = ReplicaView {
        kv_tokens_active: 840,
        ..VIEW
    };
    let (_, v) = s.on_ask(t0, at("e", 1, 20), busy);
    assert_eq!(v, Verdict::Wait(WaitReason::AboveWatermark));
    s.sanity_check();
}

/// Longest turn of the load below, in seconds.
const LONGEST: u64 = 50;

#[derive(Clone, Debug)]
struct Arrival {
    session: u8,
    prompt: u64,
    /// Of the turn, once it is admitted.
    secs: u64,
    /// Until the next arrival.
    gap: u64,
}

fn load() -> impl Strategy<Value = Vec<Arrival>> {
    let arrival = (0u8..30, 50u64..900, 1..=LONGEST, 0u64..20);
    let arrival = arrival.prop_map(|(session, prompt, secs, gap)| Arrival {
        session,
        prompt,
        secs,
        gap,
    });
    prop::collection::vec(arrival, 1..150)
}

/// Time goes on second by second; turns end when their time is over. Gives every waiter's end: how long it
/// waited, how many older ones it found, and the verdict.
fn simulate(config: SchedulerConfig, load: &[Arrival]) -> Vec<(u64, usize, Verdict)> {
    let mut s = SessionScheduler::new(config);
    let t0 = Instant::now();
    let mut arrivals = load.iter();
    let mut next_at = 0;
    let mut next = arrivals.next();
    let mut running: Vec<(u64, Ticket, u64)> = Vec::new();
    let mut waiting: BTreeMap<Ticket, (u64, usize, Arrival)> = BTreeMap::new();
    let mut ends = Vec::new();
    let mut now = 0;
    while next.is_some() || !waiting.is_empty() || !running.is_empty() {
        let instant = t0 + secs(now);
        for (_, ticket, tokens) in running.extract_if(.., |turn| turn.0 <= now) {
            s.on_turn_end(instant, ticket, tokens);
        }
        while let Some(arrival) = next.filter(|_| next_at <= now) {
            let name = format!("s{}", arrival.session);
            let (ticket, verdict) = s.on_ask(instant, ask(&name, arrival.prompt, 0), VIEW);
            match verdict {
                Verdict::Admit(_) => running.push((now + arrival.secs, ticket, arrival.prompt)),
                _ => {
                    waiting.insert(ticket, (now, waiting.len(), arrival.clone()));
                }
            }
            next = arrivals.next();
            next_at = now + arrival.gap;
        }
        for (ticket, verdict) in s.reconsider(instant, R, VIEW) {
            let (since, older, arrival) = waiting.remove(&ticket).expect("it waited");
            ends.push((now - since, older, verdict));
            if matches!(verdict, Verdict::Admit(_)) {
                running.push((now + arrival.secs, ticket, arrival.prompt));
            }
        }
        if now % 16 == 0 {
            s.sanity_check();
        }
        now += 1;
    }
    ends
}

proptest! {
    /// The queue is served by age: the oldest waits for the age limit and for one turn admitted by age before it.
    #[test]
    fn nobody_waits_longer_than_its_place_in_the_queue_allows(load in load()) {
        let config = SchedulerConfig { deadline: secs(1_000_000), ..SchedulerConfig::default() };
        let age = config.age_limit.as_secs();
        for (waited, older, verdict) in simulate(config, &load) {
            prop_assert!(matches!(verdict, Verdict::Admit(_)));
            prop_assert!(waited <= age + (older as u64 + 1) * (LONGEST + 1), "{waited} s behind {older}");
        }
    }

    #[test]
    fn nobody_waits_longer_than_the_deadline(load in load(), deadline in 5u64..200) {
        let config = SchedulerConfig { deadline: secs(deadline), ..SchedulerConfig::default() };
        for (waited, _, verdict) in simulate(config, &load) {
            prop_assert!(waited <= deadline, "{waited} s");
            prop_assert_eq!(verdict == Verdict::Refuse, verdict == Verdict::Refuse && waited == deadline);
        }
    }
}
