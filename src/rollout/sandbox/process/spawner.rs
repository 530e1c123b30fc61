//! Starts processes from a thread that lives as long as this process.
//!
//! The kernel delivers a parent-death signal when the *thread* that forked ends. Threads of an async
//! runtime end when they idle, which would kill healthy sandboxes.

use std::io;
use std::process::{Child, Command};
use std::sync::mpsc;
use std::sync::OnceLock;
use std::thread;
use tokio::sync::oneshot;

type Job = Box<dyn FnOnce() + Send>;

/// Starts `command`. `wrap` runs on the spawner thread right after the start, so that the child has an
/// owner even when the caller no longer waits.
pub async fn spawn<T: Send + 'static>(
    mut command: Command,
    wrap: impl FnOnce(io::Result<Child>) -> T + Send + 'static,
) -> io::Result<T> {
    static QUEUE: OnceLock<mpsc::Sender<Job>> = OnceLock::new();
    let queue = QUEUE.get_or_init(|| {
        let (queue, jobs) = mpsc::channel::<Job>();
        thread::Builder::new()
            .name("sandbox-spawner".into())
            .spawn(move || jobs.into_iter().for_each(|job| job()))
            // Without a thread there is no receiver, and `send` below reports it.
            .ok();
        queue
    });
    let (done, started) = oneshot::channel();
    let job = Box::new(move || {
        // Dropped, and with it the child, when nobody waits any more.
        drop(done.send(wrap(command.spawn())));
    });
    let gone = || io::Error::other("the spawner thread is not running");
    queue.send(job).map_err(|_| gone())?;
    started.await.map_err(|_| gone())
}
