//! The network of blocks on the host, for an attention family: what a GPU runs, tested without one.

use super::{naive, policy, prompt};
use crate::{
    base::SamplingParams,
    model::net::ComputeType,
    serve::engine::native::{
        blocks::BlockNetwork, forward::SequenceWork, pages::PageId, sampler as draw, workers::Network,
    },
};
use tch::Device;

fn network(policy: &crate::model::net::Policy) -> BlockNetwork {
    let place = (Device::Cpu, ComputeType::F32);
    BlockNetwork::new(&policy.config, &policy.export(), place, (32, 0)).unwrap()
}

fn work(start: usize, tokens: &[u32], pages: &[u32], sample: Option<(SamplingParams, f64)>) -> SequenceWork {
    SequenceWork {
        start,
        tokens: tokens.to_vec(),
        pages: pages.iter().map(|p| PageId(*p)).collect(),
        state: None,
        sample,
    }
}

/// Two sequences with pages out of order: one prompt in two chunks beside one that decodes.
#[test]
fn steps_give_what_the_whole_text_gives() {
    let policy = policy(5);
    let network = network(&policy);
    let greedy = SamplingParams {
        temperature: 0.0,
        ..SamplingParams::default()
    };
    let warm = SamplingParams {
        temperature: 0.7,
        seed: 3,
        ..SamplingParams::default()
    };
    let cut = SamplingParams {
        top_k: 5,
        top_p: 0.8,
        seed: 8,
        ..SamplingParams::default()
    };
    let (long, short) = (prompt(37, 1), prompt(9, 2));
    let (long_pages, short_pages) = ([7, 2, 30, 11], [5, 0, 1]);
    for params in [greedy, warm, cut] {
        let uniform = |n| Some((params, draw::uniform(params.seed, n)));
        let first = [
            work(0, &long[..20], &long_pages, None),
            work(0, &short, &short_pages, uniform(0)),
        ];
        let mut short_ids = vec![network.step(&first)[0].unwrap()];
        let second = [
            work(9, &[short_ids[0].id], &short_pages, uniform(1)),
            work(20, &long[20..], &long_pages, uniform(0)),
        ];
        let draws = network.step(&second);
        short_ids.push(draws[0].unwrap());
        let mut long_ids = vec![draws[1].unwrap()];
        for n in 1..12u64 {
            let at = n as usize;
            let both = [
                work(36 + at, &[long_ids[at - 1].id], &long_pages, uniform(n)),
                work(9 + at, &[short_ids[at].id], &short_pages, uniform(n + 1)),
            ];
            let draws = network.step(&both);
            long_ids.push(draws[0].unwrap());
            short_ids.push(draws[1].unwrap());
        }
        for (text, got) in [(&long, &long_ids), (&short, &short_ids)] {
            let want = naive(&policy, text, &params, 0, got.len());
            for (got, (id, logprob)) in got.iter().zip(want) {
                assert_eq!(got.id, id, "{params:?}");
                assert!((got.logprob - logprob).abs() < 1e-5, "{params:?}");
            }
        }
    }
}

#[test]
fn new_weights_are_used_and_wrong_ones_leave_the_old() {
    let (old, new) = (policy(5), policy(6));
    let network = network(&old);
    let greedy = SamplingParams {
        temperature: 0.0,
        ..SamplingParams::default()
    };
    let text = prompt(9, 2);
    let step =
        |network: &BlockNetwork| network.step(&[work(0, &text, &[1], Some((greedy, 0.0)))])[0].unwrap();
    let mut short = new.export();
    short.pop();
    assert!(network.set_weights(&short).is_err());
    let want = |p| naive(p, &text, &greedy, 0, 1)[0].1;
    assert!((step(&network).logprob - want(&old)).abs() < 1e-5);
    network.set_weights(&new.export()).unwrap();
    assert!((step(&network).logprob - want(&new)).abs() < 1e-5);
    assert!((want(&old) - want(&new)).abs() > 1e-3);
}
