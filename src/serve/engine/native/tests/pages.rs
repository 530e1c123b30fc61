//! Random histories of the page pool against a model that knows only token lists.

use super::super::pages::{NodeId, PageId, PagePool, PAGE_TOKENS};
use crate::base::SessionId;
use proptest::prelude::*;
use std::collections::HashMap;

#[derive(Clone, Debug)]
enum Op {
    /// A sequence whose pages are filled with these values (a page per value) and registered.
    Start(Vec<u8>),
    /// The n-th of the living sequences ends.
    End(usize),
    EndSession(u8),
    Clear,
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        6 => prop::collection::vec(0u8..3, 1..6).prop_map(Op::Start),
        5 => (0usize..8).prop_map(Op::End),
        1 => (0u8..3).prop_map(Op::EndSession),
        1 => Just(Op::Clear),
    ]
}

fn tokens(values: &[u8]) -> Vec<u32> {
    values.iter().flat_map(|v| [u32::from(*v); PAGE_TOKENS]).collect()
}

fn session(n: usize) -> SessionId {
    SessionId::from(format!("s{n}").as_str())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn pages_are_never_lost_and_never_hold_another_text(ops in prop::collection::vec(op(), 1..60)) {
        let mut pool = PagePool::new(12);
        let mut content: HashMap<PageId, Vec<u8>> = HashMap::new();
        let mut living: Vec<(Vec<PageId>, usize)> = Vec::new();
        for (n, op) in ops.into_iter().enumerate() {
            match op {
                Op::Start(values) => {
                    let mut pages = Vec::new();
                    let mut node = NodeId::ROOT;
                    for (page, next) in pool.find_prefix(&tokens(&values)) {
                        pool.hold(page);
                        // The page was written for exactly this prefix.
                        prop_assert_eq!(&content[&page], &values[..pages.len() + 1].to_vec());
                        pages.push(page);
                        node = next;
                    }
                    while pages.len() < values.len() {
                        let could = pool.available() > 0;
                        let Some(page) = pool.allocate() else {
                            prop_assert!(!could);
                            break;
                        };
                        prop_assert!(could);
                        let i = pages.len();
                        content.insert(page, values[..=i].to_vec());
                        let (kept, next) = pool.register(page, node, &tokens(&values[i..=i]));
                        prop_assert_eq!(kept, page);
                        pages.push(page);
                        node = next;
                    }
                    living.push((pages, n % 3));
                }
                Op::End(i) => {
                    if !living.is_empty() {
                        let (pages, owner) = living.remove(i % living.len());
                        pool.release(&pages, &session(owner));
                    }
                }
                Op::EndSession(n) => pool.end_session(&session(n as usize)),
                Op::Clear => {
                    pool.clear_cache();
                    prop_assert!(pool.find_prefix(&tokens(&[0, 1, 2])).is_empty());
                }
            }
            pool.sanity_check(living.iter().map(|(pages, _)| pages.as_slice()));
        }
    }
}

fn fill(pool: &mut PagePool, values: &[u8], name: &str) {
    let mut node = NodeId::ROOT;
    let mut pages = Vec::new();
    for v in values {
        let page = pool.allocate().unwrap();
        let (page, next) = pool.register(page, node, &tokens(&[*v]));
        pages.push(page);
        node = next;
    }
    pool.release(&pages, &SessionId::from(name));
}

#[test]
fn eviction_takes_ended_sessions_first_and_the_end_of_a_prefix_before_its_start() {
    let mut pool = PagePool::new(6);
    fill(&mut pool, &[1, 1, 1], "a");
    fill(&mut pool, &[2, 2, 2], "b");
    let resident = |pool: &PagePool, v: u8| pool.find_prefix(&tokens(&[v; 3])).len();
    pool.end_session(&SessionId::from("b"));
    pool.allocate().unwrap();
    assert_eq!((resident(&pool, 1), resident(&pool, 2)), (3, 2));
    pool.allocate().unwrap();
    pool.allocate().unwrap();
    assert_eq!((resident(&pool, 1), resident(&pool, 2)), (3, 0));
    pool.allocate().unwrap();
    assert_eq!(resident(&pool, 1), 2);
}

#[test]
fn two_sequences_that_computed_the_same_page_share_it_afterwards() {
    let mut pool = PagePool::new(4);
    let (a, b) = (pool.allocate().unwrap(), pool.allocate().unwrap());
    let (kept_a, node_a) = pool.register(a, NodeId::ROOT, &tokens(&[1]));
    let (kept_b, node_b) = pool.register(b, NodeId::ROOT, &tokens(&[1]));
    assert_eq!((kept_a, kept_b, node_a), (a, a, node_b));
    pool.sanity_check([[a].as_slice(), [a].as_slice()].into_iter());
    assert_eq!(pool.held(), 1);
}
