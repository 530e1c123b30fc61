//! Wall time always; memory and number of processes where no control group limits them.
//!
//! Memory is the sum of anonymous resident memory over all processes plus what lies in `/dev/shm`. Pages
//! that a forked child still shares with its parent count twice, so the sum errs to the safe side. When
//! it exceeds the limit, the largest process is killed, as the kernel would do. A sandbox can exceed the
//! limit by what its processors can touch within one tick.

use super::reaper::Commands;
use super::{exec, Host};
use legorl_agent::protocol::Setup;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

const TICK: Duration = Duration::from_millis(50);

/// Starts the watchdog thread.
pub fn start(setup: Setup, host: Host, commands: Arc<Commands>) {
    let end = Instant::now() + Duration::from_millis(setup.wall_limit_ms);
    thread::spawn(move || loop {
        let left = end.saturating_duration_since(Instant::now());
        if left.is_zero() {
            host.end_sandbox(format!(
                "its wall-time limit of {} s passed",
                setup.wall_limit_ms as f64 / 1e3
            ));
        }
        if setup.watch_memory_bytes.is_none() && setup.watch_pids.is_none() {
            thread::sleep(left);
            continue;
        }
        thread::sleep(TICK.min(left));
        check(&setup, &commands);
    });
}

fn check(setup: &Setup, commands: &Commands) {
    let processes = exec::processes();
    if let Some(limit) = setup.watch_pids {
        let count: u32 = processes.iter().filter(|p| p.pid != 1).map(|p| p.threads).sum();
        if count > limit {
            commands.mark(|f| f.pids_limit_hit = true);
            // One by one a fork bomb would win. From pid 1, -1 means all others of the namespace.
            // SAFETY: kill with integer arguments.
            unsafe { libc::kill(-1, libc::SIGKILL) };
            return;
        }
    }
    if let Some(limit) = setup.watch_memory_bytes {
        let resident: Vec<(u64, i32)> = processes
            .iter()
            .filter(|p| p.pid != 1)
            .filter_map(|p| Some((anonymous_bytes(p.pid)?, p.pid)))
            .collect();
        let sum: u64 = resident.iter().map(|(bytes, _)| bytes).sum::<u64>() + shm_bytes();
        if sum > limit {
            if let Some((_, largest)) = resident.iter().max() {
                commands.mark(|f| f.oom_killed = true);
                // SAFETY: kill with integer arguments.
                unsafe { libc::kill(*largest, libc::SIGKILL) };
            }
        }
    }
}

/// Resident memory that no file backs: resident minus shared pages.
fn anonymous_bytes(pid: i32) -> Option<u64> {
    let statm = std::fs::read_to_string(format!("/proc/{pid}/statm")).ok()?;
    let mut pages = statm.split_whitespace().skip(1).map(str::parse::<u64>);
    let (resident, shared) = (pages.next()?.ok()?, pages.next()?.ok()?);
    Some(resident.saturating_sub(shared) * page_bytes())
}

fn page_bytes() -> u64 {
    // SAFETY: sysconf with an integer argument.
    unsafe { libc::sysconf(libc::_SC_PAGESIZE) }.max(1) as u64
}

fn shm_bytes() -> u64 {
    // SAFETY: statvfs fills the zeroed struct; the path is a C string.
    unsafe {
        let mut stat: libc::statvfs = std::mem::zeroed();
        match libc::statvfs(c"/dev/shm".as_ptr(), &mut stat) {
            0 => (stat.f_blocks - stat.f_bfree) * stat.f_frsize,
            _ => 0,
        }
    }
}
