//! Starts processes from a thread that lives as long as they do.
//!
//! The kernel delivers a parent-death signal when the *thread* that forked ends. Threads of an async
//! runtime end when they idle, which would kill healthy sandboxes. This thread ends when the last
//! [`Spawner`] is dropped, and every sandbox holds one.

use std::io;
use std::process::{Child, Command};
use std::sync::mpsc;
use std::thread;
use tokio::sync::oneshot;

type Job = Box<dyn FnOnce() + Send>;

/// The thread; clones share it.
#[derive(Clone, Debug)]
pub struct Spawner {
    queue: mpsc::Sender<Job>,
}

impl Spawner {
    /// Starts the thread.
    pub fn new() -> io::Result<Self> {
        let (queue, jobs) = mpsc::channel::<Job>();
        thread::Builder::new()
            .name("sandbox-spawner".into())
            .spawn(move || jobs.into_iter().for_each(|job| job()))?;
        Ok(Self { queue })
    }

    /// Starts `command`. `wrap` runs on the thread right after the start, so that the child has an owner
    /// even when the caller no longer waits.
    pub async fn spawn<T: Send + 'static>(
        &self,
        mut command: Command,
        wrap: impl FnOnce(io::Result<Child>) -> T + Send + 'static,
    ) -> io::Result<T> {
        let (done, started) = oneshot::channel();
        let job = Box::new(move || {
            // Dropped, and with it the child, when nobody waits any more.
            drop(done.send(wrap(command.spawn())));
        });
        let gone = || io::Error::other("the spawner thread is not running");
        self.queue.send(job).map_err(|_| gone())?;
        started.await.map_err(|_| gone())
    }
}
