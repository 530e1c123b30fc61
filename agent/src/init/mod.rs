//! The first process of a sandbox (pid 1 of its pid namespace).
//!
//! Standard input is a stream socket to the host, on which the host asks for commands and files
//! ([`legorl_agent::protocol`]). One thread a job:
//!
//! | Thread | Waits for | Ends when |
//! |---|---|---|
//! | control (main) | frames of the host | the host's end closes: then this process exits |
//! | reaper | any child of this process | never |
//! | exec, one a command | output, end or time limit of the command | the output has ended |
//! | download, one each | the socket to take its bytes | all is sent |
//! | forwarder, two a connection | bytes between loopback and the proxy's socket | either side closes |
//! | watchdog | the next tick | never |
//!
//! Invariant: when this process ends, for whatever reason, the kernel kills every other process of the
//! sandbox. Processes of the sandbox can neither kill it (it is pid 1) nor read or trace it (it is not
//! dumpable and they lack CAP_SYS_PTRACE).

mod exec;
mod forward;
mod overlay;
mod reaper;
mod transfer;
mod watchdog;

use legorl_agent::protocol::{self, Kind, Reply, Request, Setup};
use std::fs::File;
use std::io::{self, BufReader};
use std::os::fd::{FromRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::process::ExitCode;
use std::sync::{Arc, Mutex, PoisonError};

/// The host's socket, shared by all threads; a frame is written whole.
#[derive(Clone)]
pub struct Host(Arc<Mutex<UnixStream>>);

impl Host {
    /// Sends a reply. An error means that the host is gone; the control thread sees that as well.
    fn reply(&self, id: u32, reply: &Reply) -> io::Result<()> {
        self.send(&protocol::encode_message(id, reply)?)
    }

    /// Sends output or file content.
    fn raw(&self, id: u32, bytes: &[u8]) -> io::Result<()> {
        self.send(&protocol::encode_raw(id, bytes))
    }

    fn send(&self, frame: &[u8]) -> io::Result<()> {
        let mut socket = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        protocol::write_frame(&mut *socket, frame)
    }

    /// Says why, then ends the sandbox.
    fn end_sandbox(&self, reason: String) -> ! {
        // Whether or not the host still listens, the sandbox ends here.
        let _ = self.reply(0, &Reply::Ending { reason });
        std::process::exit(1)
    }
}

/// Runs until the host closes its end.
pub fn main() -> ExitCode {
    match serve() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("legorl-agent init: {error}");
            ExitCode::FAILURE
        }
    }
}

fn serve() -> io::Result<()> {
    protect_this_process()?;
    let socket = take_control_socket()?;
    let host = Host(Arc::new(Mutex::new(socket.try_clone()?)));
    let mut frames = BufReader::with_capacity(protocol::CHUNK, socket);

    let setup = match protocol::read_frame(&mut frames)? {
        Some((Kind::Message, _, payload)) => match protocol::decode_message(&payload)? {
            Request::Setup(setup) => setup,
            other => return Err(io::Error::other(format!("expected setup, got {other:?}"))),
        },
        _ => return Err(io::Error::other("expected setup")),
    };
    if setup.overlay {
        overlay::enter(&setup.carried, &setup.mounts)?;
    }
    let commands = Arc::new(reaper::Commands::default());
    start_services(&setup, &host, &commands)?;
    host.reply(0, &Reply::Ready)?;

    let mut uploads = transfer::Uploads::default();
    while let Some((kind, id, payload)) = protocol::read_frame(&mut frames)? {
        if kind == Kind::Raw {
            uploads.bytes(&host, id, &payload)?;
            continue;
        }
        match protocol::decode_message(&payload)? {
            Request::Setup(_) => return Err(io::Error::other("a second setup")),
            Request::Exec {
                argv,
                env,
                cwd,
                timeout_ms,
                forward_bytes,
            } => exec::start(
                exec::Command {
                    id,
                    argv,
                    env,
                    cwd,
                    timeout_ms,
                    forward_bytes,
                },
                &setup,
                &host,
                &commands,
            )?,
            Request::Kill => commands.kill(id),
            Request::Download { path } => {
                exec::make_room(&setup, &commands);
                transfer::download(id, path, &host)?;
            }
            upload => uploads.message(&host, id, upload)?,
        }
    }
    Ok(())
}

fn start_services(setup: &Setup, host: &Host, commands: &Arc<reaper::Commands>) -> io::Result<()> {
    reaper::start(commands.clone());
    if setup.forward_proxy {
        forward::start()?;
    }
    watchdog::start(setup.clone(), host.clone(), commands.clone());
    Ok(())
}

/// Nobody in the sandbox may read this process (its socket leads out), and it dies with the host.
fn protect_this_process() -> io::Result<()> {
    // SAFETY: prctl with integer arguments only.
    let failed = unsafe {
        libc::prctl(libc::PR_SET_DUMPABLE, 0, 0, 0, 0) != 0
            || libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL, 0, 0, 0) != 0
    };
    if failed {
        return Err(io::Error::last_os_error());
    }
    let mut limit = libc::rlimit {
        rlim_cur: 0,
        rlim_max: 0,
    };
    // SAFETY: `limit` is a valid rlimit for both calls.
    unsafe {
        if libc::getrlimit(libc::RLIMIT_NOFILE, &mut limit) == 0 {
            limit.rlim_cur = limit.rlim_max;
            // A refusal leaves the soft limit, which is enough for an ordinary agent.
            libc::setrlimit(libc::RLIMIT_NOFILE, &limit);
        }
    }
    Ok(())
}

/// Moves the socket from standard input to a descriptor that commands do not inherit.
fn take_control_socket() -> io::Result<UnixStream> {
    // SAFETY: fcntl on descriptor 0; the result is checked, and then owned by nobody else.
    let socket = unsafe {
        let fd = libc::fcntl(0, libc::F_DUPFD_CLOEXEC, 10);
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        OwnedFd::from_raw_fd(fd)
    };
    let null = File::open("/dev/null")?;
    // SAFETY: both descriptors are open; 0 now refers to /dev/null.
    if unsafe { libc::dup2(std::os::fd::AsRawFd::as_raw_fd(&null), 0) } < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(UnixStream::from(socket))
}
