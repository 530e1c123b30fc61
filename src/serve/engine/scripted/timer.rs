//! Waits that are exact to a fraction of a millisecond.
//!
//! The runtime's timer counts in whole milliseconds and rounds up, which is as much as a proxy may add to a
//! turn: a load test would measure the timer. One thread sleeps until the next wake-up is due instead.

use std::{
    cmp::Reverse,
    collections::BinaryHeap,
    sync::{Condvar, Mutex, MutexGuard, OnceLock, PoisonError},
    time::{Duration, Instant},
};
use tokio::sync::oneshot;

struct Entry {
    at: Instant,
    number: u64,
    done: oneshot::Sender<()>,
}

impl PartialEq for Entry {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other).is_eq()
    }
}

impl Eq for Entry {}

impl PartialOrd for Entry {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Entry {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        (self.at, self.number).cmp(&(other.at, other.number))
    }
}

#[derive(Default)]
struct Waits {
    heap: BinaryHeap<Reverse<Entry>>,
    number: u64,
}

#[derive(Default)]
struct Timer {
    waits: Mutex<Waits>,
    earlier: Condvar,
}

impl Timer {
    /// The timer of the process; its thread is started with the first wait.
    fn get() -> &'static Self {
        static TIMER: OnceLock<Timer> = OnceLock::new();
        static THREAD: OnceLock<()> = OnceLock::new();
        let timer = TIMER.get_or_init(Self::default);
        THREAD.get_or_init(|| {
            let thread = std::thread::Builder::new().name("scripted-timer".into());
            thread
                .spawn(|| timer.run())
                .expect("a thread for the scripted engine's delays");
        });
        timer
    }

    fn lock(&self) -> MutexGuard<'_, Waits> {
        self.waits.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn run(&self) {
        let mut waits = self.lock();
        loop {
            let now = Instant::now();
            while waits.heap.peek().is_some_and(|next| next.0.at <= now) {
                if let Some(Reverse(entry)) = waits.heap.pop() {
                    // Who waited may have gone.
                    let _ = entry.done.send(());
                }
            }
            let pause = waits.heap.peek().map_or(Duration::from_secs(3600), |next| {
                next.0.at.saturating_duration_since(now)
            });
            let woken = self.earlier.wait_timeout(waits, pause);
            waits = woken.unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

/// Waits. Dropping the future is enough to forget it.
pub(super) async fn sleep(time: Duration) {
    let (done, waited) = oneshot::channel();
    let at = Instant::now() + time;
    let timer = Timer::get();
    {
        let mut waits = timer.lock();
        waits.number += 1;
        let number = waits.number;
        let first = waits.heap.peek().is_none_or(|next| at < next.0.at);
        waits.heap.push(Reverse(Entry { at, number, done }));
        if first {
            timer.earlier.notify_one();
        }
    }
    // The thread never ends while an entry waits.
    let _ = waited.await;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn waits_end_in_order_and_never_early() {
        let begin = Instant::now();
        let wait = |ms: u64| async move {
            sleep(Duration::from_millis(ms)).await;
            (ms, begin.elapsed())
        };
        let gone = tokio::time::timeout(Duration::from_millis(5), sleep(Duration::from_secs(3600))).await;
        assert!(gone.is_err());
        let ends = futures::future::join_all([30, 10, 20, 10].map(wait)).await;
        for (ms, took) in ends {
            assert!(took >= Duration::from_millis(ms), "{ms} ms took {took:?}");
            assert!(took < Duration::from_secs(20), "{ms} ms took {took:?}");
        }
    }
}
