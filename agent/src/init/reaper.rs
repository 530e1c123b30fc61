//! Takes every ended child of pid 1, and knows which of them are commands of the host.
//!
//! Invariant: a command is started and entered in the table under one lock, and the reaper takes that
//! lock before it collects a child, so no end is ever missed or taken by the wrong side.

use std::collections::HashMap;
use std::io::{self, PipeWriter, Write};
use std::process::Command;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;

/// A command that runs.
struct Running {
    id: u32,
    /// One byte is written when it has ended.
    ended: PipeWriter,
    status: Option<i32>,
    flags: Flags,
}

/// What the watchdog did while a command ran.
#[derive(Clone, Copy, Debug, Default)]
pub struct Flags {
    /// A process was killed for memory.
    pub oom_killed: bool,
    /// All processes were killed for their number.
    pub pids_limit_hit: bool,
}

/// The running commands by process id.
#[derive(Default)]
pub struct Commands {
    running: Mutex<HashMap<i32, Running>>,
    started: Condvar,
}

impl Commands {
    /// Starts a command; a byte on `ended` announces its end.
    pub fn spawn(&self, id: u32, command: &mut Command, ended: &PipeWriter) -> io::Result<i32> {
        let mut running = self.lock();
        let ended = ended.try_clone()?;
        let pid = command.spawn()?.id() as i32;
        running.insert(
            pid,
            Running {
                id,
                ended,
                status: None,
                flags: Flags::default(),
            },
        );
        self.started.notify_one();
        Ok(pid)
    }

    /// Wait status and flags of an ended command; it leaves the table.
    pub fn take(&self, pid: i32) -> Option<(i32, Flags)> {
        let mut running = self.lock();
        let status = running.get(&pid)?.status?;
        running.remove(&pid).map(|r| (status, r.flags))
    }

    /// Kills the command of this id, if it still runs.
    pub fn kill(&self, id: u32) {
        let pid =
            (self.lock().iter()).find_map(|(pid, r)| (r.id == id && r.status.is_none()).then_some(*pid));
        if let Some(pid) = pid {
            super::exec::kill_tree(pid);
        }
    }

    /// Process ids of the running commands.
    pub fn pids(&self) -> Vec<i32> {
        self.lock().keys().copied().collect()
    }

    /// Marks every running command.
    pub fn mark(&self, set: impl Fn(&mut Flags)) {
        self.lock().values_mut().for_each(|r| set(&mut r.flags));
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<i32, Running>> {
        self.running.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn collect(&self, pid: i32) {
        let mut running = self.lock();
        let mut status = 0;
        // SAFETY: `status` is a valid pointer for the call.
        let collected = unsafe { libc::waitpid(pid, &mut status, libc::WNOHANG) };
        if collected != pid {
            return; // `Command::spawn` collected it: its program could not be started.
        }
        if let Some(command) = running.get_mut(&pid) {
            command.status = Some(status);
            // The reader exists until it has taken the status.
            let _ = command.ended.write_all(&[1]);
        }
    }
}

/// Starts the reaper thread.
pub fn start(commands: Arc<Commands>) {
    thread::spawn(move || loop {
        // SAFETY: waitid writes the zeroed siginfo; WNOWAIT leaves the child to be collected.
        let pid = unsafe {
            let mut info: libc::siginfo_t = std::mem::zeroed();
            match libc::waitid(libc::P_ALL, 0, &mut info, libc::WEXITED | libc::WNOWAIT) {
                0 => info.si_pid(),
                _ => 0,
            }
        };
        if pid > 0 {
            commands.collect(pid);
            continue;
        }
        // No child at all. Only a command of the host can bring one.
        let running = commands.lock();
        if running.values().all(|r| r.status.is_some()) {
            drop(commands.started.wait(running));
        }
    });
}
