//! The control plane's own threads: workers that drive sandboxes, pushes of weights, the stop signal.
//!
//! Invariant: nothing here waits for the trainer. The trainer's thread may wait for something here, with
//! a deadline, through [`Control::wait`].

use super::signals::StopFlag;
use anyhow::Context;
use std::{future::Future, time::Duration};
use tokio::{
    runtime::{Builder, Runtime},
    sync::watch,
};

/// How often the flag that signal handlers set is looked at.
const STOP_POLL: Duration = Duration::from_millis(50);

/// A runtime and the stop signal as a channel.
pub struct Control {
    runtime: Runtime,
    stopping: watch::Sender<bool>,
}

impl Control {
    /// Starts the threads. When `stop` is set, or [`Control::stop_trials`] is called, trials are asked to end.
    pub fn start(stop: StopFlag) -> anyhow::Result<Self> {
        let runtime = Builder::new_multi_thread()
            .worker_threads(2)
            .thread_name("control")
            .enable_all()
            .build()
            .context("cannot start the control threads")?;
        let stopping = watch::Sender::new(false);
        let sender = stopping.clone();
        runtime.spawn(async move {
            while !stop.is_set() {
                tokio::time::sleep(STOP_POLL).await;
            }
            sender.send_replace(true);
        });
        Ok(Self { runtime, stopping })
    }

    /// Turns true when trials are to end.
    pub fn stopping(&self) -> watch::Receiver<bool> {
        self.stopping.subscribe()
    }

    /// Asks all trials to end: the run is over.
    pub fn stop_trials(&self) {
        self.stopping.send_replace(true);
    }

    /// Runs something in the background.
    pub fn spawn<F>(&self, future: F) -> tokio::task::JoinHandle<F::Output>
    where
        F: Future + Send + 'static,
        F::Output: Send + 'static,
    {
        self.runtime.spawn(future)
    }

    /// Waits for something, at most `limit`; `what` is named when it does not come.
    pub fn wait<F: Future>(&self, what: &str, limit: Duration, future: F) -> anyhow::Result<F::Output> {
        self.runtime.block_on(async {
            tokio::time::timeout(limit, future)
                .await
                .with_context(|| format!("{what} did not end within {} s", limit.as_secs()))
        })
    }
}
