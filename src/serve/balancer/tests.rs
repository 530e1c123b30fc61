//! Which replica a session gets, under any order of events.

use super::*;
use proptest::prelude::*;

fn session(n: u32) -> SessionId {
    SessionId::from(format!("s{n}").as_str())
}

#[test]
fn sessions_stick_and_new_ones_go_to_the_emptiest_replica() {
    let mut b = Balancer::new(BalancePolicy::StickyLeastLoaded);
    assert_eq!(b.pick(&session(0), &[]), None);
    b.on_join(ReplicaId(0));
    b.on_join(ReplicaId(1));
    let first: Vec<_> = (0..4).map(|n| b.pick(&session(n), &[]).unwrap().0).collect();
    assert_eq!(first, [0, 1, 0, 1]);
    let again: Vec<_> = (0..4).map(|n| b.pick(&session(n), &[]).unwrap().0).collect();
    assert_eq!(again, first);
    b.on_session_end(&session(0));
    assert_eq!(b.pick(&session(9), &[]).unwrap().0, 0);
    b.on_drain(ReplicaId(0));
    assert!((0..4).all(|n| b.pick(&session(n), &[]).unwrap().0 == 1));
    b.on_loss(ReplicaId(1));
    assert_eq!(b.pick(&session(2), &[]), None);
    b.on_join(ReplicaId(0));
    assert_eq!(b.pick(&session(2), &[]).unwrap().0, 0);
    b.sanity_check();
}

#[test]
fn equal_beginnings_meet_on_one_replica_until_it_has_more_than_its_share() {
    let mut b = Balancer::new(BalancePolicy::PrefixAware);
    (0..4).for_each(|n| b.on_join(ReplicaId(n)));
    let prompt = |kind: u32| vec![kind; BLOCK_TOKENS * 3];
    let a = b.pick(&session(0), &prompt(1)).unwrap();
    let other = b.pick(&session(1), &prompt(2)).unwrap();
    assert_ne!(a, other);
    for n in 2..5 {
        assert_eq!(b.pick(&session(n), &prompt(1)), Some(a));
    }
    // `a` now has LOAD_SLACK sessions, two replicas have none.
    assert_ne!(b.pick(&session(5), &prompt(1)), Some(a));
    b.sanity_check();
}

#[test]
fn round_robin_takes_turns() {
    let mut b = Balancer::new(BalancePolicy::RoundRobin);
    (0..3).for_each(|n| b.on_join(ReplicaId(n)));
    let got: Vec<_> = (0..5).map(|_| b.pick(&session(0), &[]).unwrap().0).collect();
    assert_eq!(got, [0, 1, 2, 0, 1]);
}

#[derive(Clone, Debug)]
enum Step {
    Join(u32),
    Drain(u32),
    Loss(u32),
    Pick(u32, u32),
    End,
    SessionEnd(u32),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        2 => (0u32..5).prop_map(Step::Join),
        1 => (0u32..5).prop_map(Step::Drain),
        1 => (0u32..5).prop_map(Step::Loss),
        8 => (0u32..12, 0u32..3).prop_map(|(s, p)| Step::Pick(s, p)),
        4 => Just(Step::End),
        2 => (0u32..12).prop_map(Step::SessionEnd),
    ];
    prop::collection::vec(step, 0..80)
}

proptest! {
    #[test]
    fn invariants_hold_under_any_order_of_events(steps in steps(), policy in 0..3) {
        let policy = [BalancePolicy::StickyLeastLoaded, BalancePolicy::PrefixAware, BalancePolicy::RoundRobin][policy as usize];
        let mut b = Balancer::new(policy);
        let mut up = std::collections::BTreeSet::new();
        let mut running = Vec::new();
        for step in steps {
            match step {
                Step::Join(r) => { b.on_join(ReplicaId(r)); up.insert(r); }
                Step::Drain(r) => { b.on_drain(ReplicaId(r)); up.remove(&r); }
                Step::Loss(r) => {
                    b.on_loss(ReplicaId(r));
                    up.remove(&r);
                    running.retain(|x: &ReplicaId| x.0 != r);
                }
                Step::Pick(s, p) => {
                    let got = b.pick(&session(s), &vec![p; BLOCK_TOKENS * 2]);
                    prop_assert_eq!(got.is_some(), !up.is_empty());
                    if let Some(id) = got {
                        prop_assert!(up.contains(&id.0), "picked {} of {:?}", id, up);
                        if policy != BalancePolicy::RoundRobin {
                            prop_assert_eq!(b.pick(&session(s), &[]), Some(id));
                            b.on_turn_end(id);
                        }
                        running.push(id);
                    }
                }
                Step::End => if let Some(id) = running.pop() { b.on_turn_end(id); },
                Step::SessionEnd(s) => b.on_session_end(&session(s)),
            }
            b.sanity_check();
            for id in 0..5 {
                let want = running.iter().filter(|r| r.0 == id).count();
                prop_assert_eq!(b.in_flight(ReplicaId(id)) as usize, want);
            }
        }
    }
}

proptest! {
    /// A session moves when its replica drains or is lost, and at no other time, whatever the others do.
    #[test]
    fn a_session_stays_while_its_replica_is_up(steps in steps(), prefix_aware in any::<bool>()) {
        let policy = if prefix_aware { BalancePolicy::PrefixAware } else { BalancePolicy::StickyLeastLoaded };
        let mut b = Balancer::new(policy);
        let mut homes = std::collections::BTreeMap::new();
        for step in steps {
            match step {
                Step::Join(r) => b.on_join(ReplicaId(r)),
                Step::Drain(r) => {
                    b.on_drain(ReplicaId(r));
                    homes.retain(|_, home| *home != ReplicaId(r));
                }
                Step::Loss(r) => {
                    b.on_loss(ReplicaId(r));
                    homes.retain(|_, home| *home != ReplicaId(r));
                }
                Step::Pick(s, p) => if let Some(id) = b.pick(&session(s), &vec![p; BLOCK_TOKENS * 2]) {
                    prop_assert_eq!(*homes.entry(s).or_insert(id), id);
                },
                Step::End => {}
                Step::SessionEnd(s) => {
                    b.on_session_end(&session(s));
                    homes.remove(&s);
                }
            }
            b.sanity_check();
        }
    }

    /// New sessions go where the fewest are: with the sessions' own number as the only load, no replica has two
    /// more than another one.
    #[test]
    fn sessions_are_spread_evenly(replicas in 1u32..9, sessions in 0u32..60) {
        let mut b = Balancer::new(BalancePolicy::StickyLeastLoaded);
        (0..replicas).for_each(|id| b.on_join(ReplicaId(id)));
        let mut counts = vec![0u32; replicas as usize];
        for n in 0..sessions {
            counts[b.pick(&session(n), &[]).unwrap().0 as usize] += 1;
        }
        prop_assert!(counts.iter().max().unwrap() - counts.iter().min().unwrap() <= 1, "{counts:?}");
    }
}
