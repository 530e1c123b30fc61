//! Runs one command of the host: output to the host up to a cap, then counted; the tail kept.

use super::reaper::{Commands, Flags};
use super::Host;
use crate::poll::wait_readable;
use legorl_agent::protocol::{Reply, Setup, CHUNK, TAIL_BYTES};
use std::io::{self, PipeReader, Read};
use std::os::fd::AsFd;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::Path;
use std::process::{ExitStatus, Stdio};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

/// What to run.
pub struct Command {
    /// Request id.
    pub id: u32,
    /// Program and arguments.
    pub argv: Vec<String>,
    /// Environment.
    pub env: Vec<(String, String)>,
    /// Working directory.
    pub cwd: String,
    /// Time limit.
    pub timeout_ms: Option<u64>,
    /// Bytes of output to send on.
    pub forward_bytes: u64,
}

/// Starts the command and a thread that follows it.
pub fn start(command: Command, setup: &Setup, host: &Host, commands: &Arc<Commands>) -> io::Result<()> {
    let id = command.id;
    make_room(setup, commands);
    let (setup, own_host, commands) = (setup.clone(), host.clone(), commands.clone());
    let follow = move || {
        if let Err(problem) = run(command, &setup, &own_host, &commands) {
            // The host is gone when it cannot be answered; the control thread ends the sandbox then.
            let _ = own_host.reply(id, &Reply::Failed { problem });
        }
    };
    match thread::Builder::new().spawn(follow) {
        Ok(_) => Ok(()),
        Err(e) => host.reply(
            id,
            &Reply::Failed {
                problem: format!("no thread: {e}"),
            },
        ),
    }
}

/// An agent that left the sandbox full of processes must not keep the verifier from running: background
/// processes are killed when they use more than three quarters of the limit, or when no thread can be made.
pub fn make_room(setup: &Setup, commands: &Commands) {
    let crowded = setup.pids_limit.is_some_and(|limit| {
        let others = processes().into_iter().filter(|p| p.pid != 1);
        others.map(|p| p.threads).sum::<u32>() > limit - limit / 4
    });
    if crowded {
        kill_background(commands);
    }
    for _ in 0..20 {
        if let Ok(thread) = thread::Builder::new().spawn(|| ()) {
            thread.join().ok();
            return;
        }
        kill_background(commands);
    }
}

/// Kills every process that belongs to no running command, and marks the running ones.
fn kill_background(commands: &Commands) {
    commands.mark(|f| f.pids_limit_hit = true);
    let running = commands.pids();
    let processes = processes();
    let family = family(&processes, &running);
    for p in processes
        .iter()
        .filter(|p| p.pid != 1 && !family.contains(&p.pid))
    {
        // SAFETY: kill with integer arguments.
        unsafe { libc::kill(p.pid, libc::SIGKILL) };
    }
    thread::sleep(Duration::from_millis(10));
}

fn run(command: Command, setup: &Setup, host: &Host, commands: &Commands) -> Result<(), String> {
    let deadline = command
        .timeout_ms
        .map(|ms| Instant::now() + Duration::from_millis(ms));
    let (mut output, pid, ended) = spawn(&command, setup, commands)?;
    let failed = |e: io::Error| format!("following `{}`: {e}", command.argv[0]);

    let mut tail = Tail::new(command.forward_bytes);
    let mut open = true;
    let mut timed_out = false;
    loop {
        let wait_until = if timed_out { None } else { deadline };
        let [readable, dead] =
            wait_readable([open.then(|| output.as_fd()), Some(ended.as_fd())], wait_until).map_err(failed)?;
        if readable {
            open = tail.read(&mut output, host, command.id).map_err(failed)?;
        }
        if dead {
            break;
        }
        // Checked after every wake-up, since a command that never stops writing never idles.
        if !timed_out && deadline.is_some_and(|at| Instant::now() >= at) {
            timed_out = true;
            kill_tree(pid);
        }
    }
    // What was written before the end is in the pipe; what a background process writes later is not
    // part of the command's output.
    let mut budget = 1 << 20;
    while open && budget > 0 {
        let now = Some(Instant::now());
        if !wait_readable([Some(output.as_fd())], now).map_err(failed)?[0] {
            break;
        }
        let before = tail.total;
        open = tail.read(&mut output, host, command.id).map_err(failed)?;
        budget -= (tail.total - before) as i64;
    }
    let (status, flags) = commands
        .take(pid)
        .ok_or_else(|| format!("the end of process {pid} was lost"))?;
    let exit = exit_reply(status, timed_out, flags, &tail);
    host.reply(command.id, &exit)
        .map_err(|e| format!("answering: {e}"))?;
    if open {
        // Keeps the pipe of background processes open, so that they are not killed by SIGPIPE.
        io::copy(&mut output, &mut io::sink()).ok();
    }
    Ok(())
}

fn spawn(
    command: &Command,
    setup: &Setup,
    commands: &Commands,
) -> Result<(PipeReader, i32, PipeReader), String> {
    let program = command.argv.first().ok_or("an empty command")?;
    if !Path::new(&command.cwd).is_dir() {
        return Err(format!("working directory `{}` does not exist", command.cwd));
    }
    let pipes = || -> io::Result<_> {
        let (output, out) = io::pipe()?;
        let err = out.try_clone()?;
        let (ended, end) = io::pipe()?;
        Ok((output, out, err, ended, end))
    };
    let (output, out, err, ended, end) = pipes().map_err(|e| format!("pipe: {e}"))?;

    let mut child = std::process::Command::new(program);
    child
        .args(&command.argv[1..])
        .env_clear()
        .envs(command.env.iter().map(|(k, v)| (k, v)))
        .current_dir(&command.cwd)
        .stdin(Stdio::null())
        .stdout(out)
        .stderr(err);
    let limits = [
        (libc::RLIMIT_NPROC, setup.rlimit_nproc.map(u64::from)),
        (libc::RLIMIT_CPU, setup.rlimit_cpu_secs),
        (libc::RLIMIT_FSIZE, setup.rlimit_fsize_bytes),
        (libc::RLIMIT_CORE, Some(0)),
    ];
    // SAFETY: the closure only makes system calls on values that it owns; it neither allocates nor locks.
    unsafe {
        child.pre_exec(move || {
            prepare_child(&limits);
            Ok(())
        });
    }
    let mut pid = commands.spawn(command.id, &mut child, &end);
    for _ in 0..20 {
        match &pid {
            Err(e) if e.raw_os_error() == Some(libc::EAGAIN) => kill_background(commands),
            _ => break,
        }
        pid = commands.spawn(command.id, &mut child, &end);
    }
    let pid = pid.map_err(|e| format!("cannot start `{program}`: {e}"))?;
    Ok((output, pid, ended))
}

/// Between fork and exec: own session, limits, and first in line when memory runs out.
fn prepare_child(limits: &[(libc::__rlimit_resource_t, Option<u64>)]) {
    // SAFETY: system calls with integer arguments and static or local memory only.
    unsafe {
        libc::setsid();
        for (resource, value) in limits {
            if let Some(value) = *value {
                let mut limit = libc::rlimit {
                    rlim_cur: value,
                    rlim_max: value,
                };
                // The hard limit of the host may be lower already.
                if libc::setrlimit(*resource, &limit) != 0 && libc::getrlimit(*resource, &mut limit) == 0 {
                    limit.rlim_cur = limit.rlim_max;
                    libc::setrlimit(*resource, &limit);
                }
            }
        }
        let fd = libc::open(
            c"/proc/self/oom_score_adj".as_ptr(),
            libc::O_WRONLY | libc::O_CLOEXEC,
        );
        if fd >= 0 {
            libc::write(fd, c"500".as_ptr().cast(), 3);
            libc::close(fd);
        }
    }
}

fn exit_reply(status: i32, timed_out: bool, flags: Flags, tail: &Tail) -> Reply {
    let status = ExitStatus::from_raw(status);
    Reply::Exit {
        code: status.code(),
        signal: status.signal(),
        timed_out,
        oom_killed: flags.oom_killed,
        pids_limit_hit: flags.pids_limit_hit,
        tail: String::from_utf8_lossy(tail.last()).into_owned(),
        output_bytes: tail.total,
    }
}

/// Forwards the first bytes and keeps the last.
struct Tail {
    forward: u64,
    kept: Vec<u8>,
    total: u64,
    chunk: Vec<u8>,
}

impl Tail {
    fn new(forward: u64) -> Self {
        Self {
            forward,
            kept: Vec::new(),
            total: 0,
            chunk: vec![0; CHUNK],
        }
    }

    /// Takes what can be read at once; false at the end of the stream.
    fn read(&mut self, from: &mut PipeReader, host: &Host, id: u32) -> io::Result<bool> {
        let n = from.read(&mut self.chunk)?;
        let bytes = &self.chunk[..n];
        let send = self.forward.min(n as u64) as usize;
        if send > 0 {
            host.raw(id, &bytes[..send])?;
            self.forward -= send as u64;
        }
        self.total += n as u64;
        self.kept.extend_from_slice(bytes);
        if self.kept.len() > 2 * TAIL_BYTES {
            self.kept.drain(..self.kept.len() - TAIL_BYTES);
        }
        Ok(n > 0)
    }

    fn last(&self) -> &[u8] {
        &self.kept[self.kept.len().saturating_sub(TAIL_BYTES)..]
    }
}

/// Kills a command with all its descendants, its session and its process group. Repeats until none is
/// left, since a process may fork while the list is read.
pub fn kill_tree(root: i32) {
    let mut known = vec![root];
    for _ in 0..50 {
        let processes = processes();
        // What was seen once stays in the family, even when its parent is gone.
        known = family(&processes, &known);
        let alive: Vec<i32> = processes
            .iter()
            .filter(|p| known.contains(&p.pid) && p.state != b'Z')
            .map(|p| p.pid)
            .collect();
        if alive.is_empty() {
            return;
        }
        for pid in alive {
            // SAFETY: kill with integer arguments.
            unsafe { libc::kill(pid, libc::SIGKILL) };
        }
        thread::sleep(Duration::from_millis(2));
    }
}

/// The roots, their sessions and groups, and all descendants.
fn family(processes: &[Process], roots: &[i32]) -> Vec<i32> {
    let mut family = roots.to_vec();
    loop {
        let before = family.len();
        for p in processes.iter().filter(|p| p.pid != 1) {
            let related = [p.parent, p.session, p.group]
                .iter()
                .any(|id| family.contains(id));
            if related && !family.contains(&p.pid) {
                family.push(p.pid);
            }
        }
        if family.len() == before {
            return family;
        }
    }
}

/// A line of `/proc/<pid>/stat`.
pub struct Process {
    /// Process id.
    pub pid: i32,
    /// State letter.
    pub state: u8,
    /// Parent.
    pub parent: i32,
    /// Process group.
    pub group: i32,
    /// Session.
    pub session: i32,
    /// Threads.
    pub threads: u32,
}

/// All processes of the sandbox.
pub fn processes() -> Vec<Process> {
    let Ok(entries) = std::fs::read_dir("/proc") else {
        return Vec::new();
    };
    entries
        .flatten()
        .filter_map(|e| e.file_name().to_str()?.parse::<i32>().ok())
        .filter_map(|pid| parse_stat(pid, &std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?))
        .collect()
}

/// The name in parentheses may hold anything, so fields are counted from its last `)`.
fn parse_stat(pid: i32, stat: &str) -> Option<Process> {
    let fields: Vec<&str> = stat[stat.rfind(')')? + 1..].split_whitespace().collect();
    Some(Process {
        pid,
        state: *fields.first()?.as_bytes().first()?,
        parent: fields.get(1)?.parse().ok()?,
        group: fields.get(2)?.parse().ok()?,
        session: fields.get(3)?.parse().ok()?,
        threads: fields.get(17)?.parse().ok()?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_name_with_parentheses_does_not_shift_the_fields() {
        let stat = "77 (a) b (c) S 5 6 7 0 -1 4194560 1 2 3 4 5 6 7 8 20 0 9 0 100";
        let p = parse_stat(77, stat).unwrap();
        assert_eq!(
            (p.state, p.parent, p.group, p.session, p.threads),
            (b'S', 5, 6, 7, 9)
        );
    }

    #[test]
    fn this_process_is_listed() {
        let me = std::process::id() as i32;
        let mine = processes().into_iter().find(|p| p.pid == me).unwrap();
        assert!(mine.threads >= 1 && mine.state == b'R' || mine.state == b'S');
    }
}
