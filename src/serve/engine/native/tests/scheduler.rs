//! Random histories of the scheduler with made-up draws, and a check of every table after every step.

use super::{
    super::{
        pages::{PagePool, PAGE_TOKENS},
        sampler::Draw,
        scheduler::{Limits, Scheduler},
        sequence::Sequence,
        states::SLOTS_A_SEAT,
    },
    *,
};
use proptest::prelude::*;

#[derive(Clone, Debug)]
enum Op {
    Request {
        family: u32,
        length: usize,
        max_new: u32,
    },
    Abort(u64),
    Hangup(usize),
    NewWeights,
    Steps(usize),
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        5 => (0u32..3, 1usize..110, 1u32..40)
            .prop_map(|(family, length, max_new)| Op::Request { family, length, max_new }),
        1 => (0u64..20).prop_map(Op::Abort),
        1 => (0usize..20).prop_map(Op::Hangup),
        1 => Just(Op::NewWeights),
        6 => (1usize..8).prop_map(Op::Steps),
    ]
}

struct World {
    scheduler: Scheduler,
    pool: PagePool,
    limits: Limits,
    clients: Vec<(u32, Option<UnboundedReceiver<EngineEvent>>)>,
}

impl World {
    fn new(limits: Limits, num_pages: usize) -> Self {
        Self {
            scheduler: Scheduler::new(limits),
            pool: PagePool::new(num_pages),
            limits,
            clients: Vec::new(),
        }
    }

    /// For a model with a delta net.
    fn with_states(mut self) -> Self {
        self.pool = self.pool.with_states(self.limits.max_num_seqs * SLOTS_A_SEAT);
        self
    }

    fn submit(&mut self, text: &[u32], max_new: u32) {
        let (sender, receiver) = unbounded_channel();
        let id = self.clients.len() as u64;
        let r = request(id, &format!("s{}", id % 4), text, max_new);
        self.scheduler.on_request(Sequence::new(r, sender));
        self.clients.push((max_new, Some(receiver)));
    }

    /// Plans and "computes" a step; gives the number of prompt tokens in it.
    fn step(&mut self) -> usize {
        let plan = self.scheduler.plan(&mut self.pool);
        self.scheduler.sanity_check(&self.pool);
        let decodes = |i: usize| self.scheduler.running()[i].decodes();
        let decoding = plan.iter().filter(|w| decodes(w.index)).count();
        let total: usize = plan.iter().map(|w| w.count).sum();
        assert!(total <= self.limits.max_num_batched_tokens.max(decoding + 1));
        for work in &plan {
            let sequence = &self.scheduler.running()[work.index];
            assert_eq!(work.start, sequence.computed);
            assert!(work.start + work.count <= sequence.pages.len() * PAGE_TOKENS);
        }
        let waiting_rows = self.scheduler.running().iter().filter(|s| s.decodes()).count();
        assert_eq!(decoding, waiting_rows, "a decoding sequence was left out");
        let draw = |i: usize| Draw {
            id: (i % 5) as u32,
            logprob: -1.0,
        };
        let draws: Vec<_> = plan
            .iter()
            .filter(|w| w.samples)
            .map(|w| Some(draw(w.start)))
            .collect();
        self.scheduler
            .on_step(&plan, &draws, PolicyVersion(0), &mut self.pool);
        self.scheduler.sanity_check(&self.pool);
        total - decoding
    }

    /// Runs everything to its end and checks that every client was answered exactly once.
    fn finish(mut self) -> Result<(), TestCaseError> {
        let mut steps = 0;
        while !self.scheduler.is_idle() {
            self.step();
            steps += 1;
            prop_assert!(steps < 20_000, "no end in sight");
        }
        prop_assert_eq!(self.pool.held(), 0);
        for (max_new, receiver) in &mut self.clients {
            let Some(receiver) = receiver else { continue };
            let mut tokens = 0;
            let mut ends = 0;
            while let Ok(event) = receiver.try_recv() {
                prop_assert_eq!(ends, 0, "an event after the end");
                match event {
                    EngineEvent::Tokens(t) => tokens += t.len(),
                    EngineEvent::Finished { .. } => ends += 1,
                    EngineEvent::Failed(e) => return Err(TestCaseError::fail(e.to_string())),
                }
            }
            prop_assert_eq!(ends, 1);
            prop_assert!(tokens <= *max_new as usize);
        }
        Ok(())
    }
}

fn limits() -> Limits {
    Limits {
        max_num_seqs: 5,
        max_num_batched_tokens: 40,
        max_model_len: 150,
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn every_request_ends_once_and_every_page_comes_back(ops in prop::collection::vec(op(), 1..50), states: bool) {
        let mut world = World::new(limits(), 14);
        if states {
            world = world.with_states();
        }
        for op in ops {
            match op {
                Op::Request { family, length, max_new } => world.submit(&prompt(length, family), max_new),
                Op::Abort(id) => world.scheduler.on_abort(RequestId(id), &mut world.pool),
                Op::Hangup(i) => {
                    if let Some(client) = world.clients.get_mut(i) {
                        client.1 = None;
                    }
                }
                Op::NewWeights => world.scheduler.on_new_weights(&mut world.pool),
                Op::Steps(n) => {
                    for _ in 0..n {
                        world.step();
                    }
                }
            }
            world.scheduler.sanity_check(&world.pool);
        }
        world.finish()?;
    }
}

#[test]
fn a_long_prompt_comes_in_chunks_while_others_decode() {
    let mut world = World::new(
        Limits {
            max_model_len: 1200,
            ..limits()
        },
        100,
    );
    world.submit(&prompt(10, 1), 100);
    world.step();
    world.submit(&prompt(1000, 2), 1);
    let mut steps = 0;
    while world.scheduler.running().len() < 2 || world.scheduler.running()[1].missing() > 1 {
        let before = world.scheduler.generated_tokens;
        let prompt_tokens = world.step();
        assert!(prompt_tokens <= 39);
        assert!(
            world.scheduler.generated_tokens > before,
            "the decoding sequence waited"
        );
        steps += 1;
        if world.scheduler.running().len() < 2 {
            break;
        }
    }
    // 32 tokens a step: what is left of the budget, in whole pages.
    assert_eq!(steps, 1000usize.div_ceil(32));
}
