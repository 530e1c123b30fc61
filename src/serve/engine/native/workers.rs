//! Threads that compute a step together.
//!
//! A step is split by sequence, not by matrix: each worker runs the whole network over its share with
//! libtorch held to one thread, so a step has one fork and one join instead of one for every product, and no
//! thread waits in a loop for work. Worker 0 is the engine's own thread.

use super::{forward::SequenceWork, sampler::Draw};
use std::{
    sync::mpsc::{channel, Receiver, Sender},
    thread::JoinHandle,
};

/// Rows of a step below which splitting costs more than it gains.
const MIN_ROWS_TO_SPLIT: usize = 4;

/// What computes shares of steps.
pub(super) trait Network: Sized + Send + 'static {
    /// Handles to the same memory for another thread.
    fn share(&self) -> Self;
    /// Computes a share, which is never empty, and draws a token for every sequence that samples, in order. None
    /// stands for logits that are not finite.
    fn step(&self, share: &[SequenceWork]) -> Vec<Option<Draw>>;
}

enum Job<N> {
    Step(Vec<SequenceWork>),
    Replace(N),
}

struct Remote<N> {
    jobs: Option<Sender<Job<N>>>,
    results: Receiver<Vec<Option<Draw>>>,
    handle: Option<JoinHandle<()>>,
}

/// All workers of an engine.
pub(super) struct Workers<N> {
    local: N,
    remote: Vec<Remote<N>>,
}

/// A worker ended by a panic, whose message is in the log.
#[derive(Debug, thiserror::Error)]
#[error("worker thread {0} of the engine died; the panic message is on standard error")]
pub(super) struct WorkerDied(usize);

impl<N: Network> Workers<N> {
    /// Starts `num_threads - 1` threads. Call it on the engine's thread.
    pub(super) fn start(local: N, num_threads: usize) -> std::io::Result<Self> {
        tch::set_num_threads(1);
        let mut remote = Vec::new();
        for i in 1..num_threads {
            let mut network = local.share();
            let (jobs, inbox) = channel();
            let (outbox, results) = channel();
            let run = move || {
                tch::set_num_threads(1);
                while let Ok(job) = inbox.recv() {
                    match job {
                        Job::Replace(new) => network = new,
                        Job::Step(share) => {
                            if outbox.send(network.step(&share)).is_err() {
                                break;
                            }
                        }
                    }
                }
            };
            let handle = std::thread::Builder::new()
                .name(format!("engine-worker-{i}"))
                .spawn(run)?;
            remote.push(Remote {
                jobs: Some(jobs),
                results,
                handle: Some(handle),
            });
        }
        Ok(Self { local, remote })
    }

    /// Uses another network from the next step on.
    pub(super) fn replace(&mut self, network: N) -> Result<(), WorkerDied> {
        for (i, remote) in self.remote.iter().enumerate() {
            remote.send(i, Job::Replace(network.share()))?;
        }
        self.local = network;
        Ok(())
    }

    /// The network of the engine's own thread.
    pub(super) fn local(&self) -> &N {
        &self.local
    }

    /// Computes a step; the draws come in the order of the sequences that sample.
    pub(super) fn step(&self, works: Vec<SequenceWork>) -> Result<Vec<Option<Draw>>, WorkerDied> {
        let rows: usize = works.iter().map(|w| w.tokens.len()).sum();
        if self.remote.is_empty() || works.len() < 2 || rows < MIN_ROWS_TO_SPLIT {
            return Ok(self.local.step(&works));
        }
        // A thread without a sequence is left alone.
        let num_shares = works.len().min(self.remote.len() + 1);
        let shares = split(&works.iter().map(cost).collect::<Vec<_>>(), num_shares);
        let mut slots: Vec<Option<SequenceWork>> = works.into_iter().map(Some).collect();
        // Place of each sequence's draw among all draws.
        let mut places: Vec<Option<usize>> = Vec::with_capacity(slots.len());
        let mut num_draws = 0;
        for work in slots.iter().flatten() {
            places.push(work.sample.map(|_| num_draws));
            num_draws += usize::from(work.sample.is_some());
        }
        let mut draws = vec![None; num_draws];
        let mut take = |share: &[usize]| share.iter().filter_map(|i| slots[*i].take()).collect::<Vec<_>>();
        let own = take(&shares[0]);
        for (i, share) in shares[1..].iter().enumerate() {
            self.remote[i].send(i, Job::Step(take(share)))?;
        }
        let mut results = vec![self.local.step(&own)];
        for (i, remote) in self.remote.iter().enumerate().take(num_shares - 1) {
            results.push(remote.results.recv().map_err(|_| WorkerDied(i + 1))?);
        }
        for (share, result) in shares.iter().zip(results) {
            let places = share.iter().filter_map(|i| places[*i]);
            for (place, draw) in places.zip(result) {
                draws[place] = draw;
            }
        }
        Ok(draws)
    }
}

impl<N> Remote<N> {
    fn send(&self, i: usize, job: Job<N>) -> Result<(), WorkerDied> {
        let sent = self.jobs.as_ref().map(|jobs| jobs.send(job));
        sent.and_then(Result::ok).ok_or(WorkerDied(i + 1))
    }
}

impl<N> Drop for Workers<N> {
    fn drop(&mut self) {
        for remote in &mut self.remote {
            drop(remote.jobs.take());
            if let Some(handle) = remote.handle.take() {
                // A panic in there was reported when it happened.
                let _ = handle.join();
            }
        }
    }
}

/// Relative time of a sequence's part: products by row, attention by row and key.
fn cost(work: &SequenceWork) -> usize {
    work.tokens.len() * (512 + work.start + work.tokens.len())
}

/// Puts the most expensive item where the least is so far. Items of a share stay in order. No share is empty where
/// there are as many items and every one costs something.
fn split(costs: &[usize], num_shares: usize) -> Vec<Vec<usize>> {
    let mut order: Vec<usize> = (0..costs.len()).collect();
    order.sort_by_key(|i| std::cmp::Reverse(costs[*i]));
    let mut shares = vec![(0usize, Vec::new()); num_shares];
    for i in order {
        if let Some((total, share)) = shares.iter_mut().min_by_key(|(total, _)| *total) {
            *total += costs[i];
            share.push(i);
        }
    }
    let sort = |(_, mut share): (usize, Vec<usize>)| {
        share.sort_unstable();
        share
    };
    shares.into_iter().map(sort).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{base::SamplingParams, serve::engine::native::pages::PageId};

    /// Draws the first token of each sequence again.
    struct Echo;

    impl Network for Echo {
        fn share(&self) -> Self {
            Self
        }

        fn step(&self, share: &[SequenceWork]) -> Vec<Option<Draw>> {
            assert!(!share.is_empty(), "a thread was given nothing");
            let sampling = share.iter().filter(|work| work.sample.is_some());
            let draw = |work: &SequenceWork| Draw {
                id: work.tokens[0],
                logprob: 0.0,
            };
            sampling.map(|work| Some(draw(work))).collect()
        }
    }

    #[test]
    fn no_thread_computes_an_empty_share_and_draws_keep_their_order() {
        let workers = Workers::start(Echo, 6).unwrap();
        for count in 1..10u32 {
            let work = |i| SequenceWork {
                start: 0,
                tokens: vec![i; 4],
                pages: vec![PageId(0)],
                state: None,
                sample: (i % 3 != 1).then(|| (SamplingParams::default(), 0.5)),
            };
            let draws = workers.step((0..count).map(work).collect()).unwrap();
            let ids: Vec<u32> = draws.into_iter().map(|draw| draw.unwrap().id).collect();
            assert_eq!(ids, (0..count).filter(|i| i % 3 != 1).collect::<Vec<_>>());
        }
    }

    #[test]
    fn split_gives_every_item_to_one_share_and_balances() {
        let costs = [900, 10, 10, 500, 450, 10, 10, 10];
        let shares = split(&costs, 2);
        let mut all: Vec<usize> = shares.concat();
        all.sort_unstable();
        assert_eq!(all, (0..costs.len()).collect::<Vec<_>>());
        let totals: Vec<usize> = shares.iter().map(|s| s.iter().map(|i| costs[*i]).sum()).collect();
        assert_eq!(totals.iter().sum::<usize>(), 1900);
        assert!(totals.iter().all(|t| (940..=960).contains(t)), "{totals:?}");
        assert!(shares.iter().all(|s| s.is_sorted()));
        assert_eq!(split(&[5], 3).concat(), [0]);
    }
}
