//! Starts bubblewrap with the namespaces, and waits until the first process takes requests.

use super::channel::{Channel, Event};
use super::instance::{self, Folder, Instance};
use super::limits::{Group, Limits};
use super::root::Root;
use super::running::{Body, ProcessSandbox};
use crate::rollout::sandbox::{SandboxError, SandboxSpec};
use legorl_agent::protocol::{Reply, Request, HELPER_PATH, PROXY_SOCKET_PATH};
use std::ffi::OsString;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Memory of `/dev/shm`, as Docker gives it.
const SHM_BYTES: u64 = 64 << 20;
/// What root may do inside: ownership and permissions of its files, and signals.
const CAPABILITIES: [&str; 7] = [
    "CAP_CHOWN",
    "CAP_DAC_OVERRIDE",
    "CAP_FOWNER",
    "CAP_FSETID",
    "CAP_KILL",
    "CAP_SETGID",
    "CAP_SETUID",
];
/// Only for the first process, to mount the overlay; it gives them up before any command runs.
const OVERLAY_CAPABILITIES: [&str; 2] = ["CAP_SYS_ADMIN", "CAP_SETPCAP"];
/// Settings of the whole machine. A sandbox of root is root to the kernel's permission check of these
/// files, which asks for no capability.
const KERNEL_SETTINGS: &str = "/proc/sys";
const KERNEL_COMMANDS: &str = "/proc/sysrq-trigger";

const FIX_INSTALL: &str = "install the package `bubblewrap` (Debian, Ubuntu, Fedora, RHEL: same name)";
const FIX_USERNS: &str = "allow user namespaces: sysctl user.max_user_namespaces above 0, \
     kernel.unprivileged_userns_clone=1 where it exists, kernel.apparmor_restrict_unprivileged_userns=0 or an \
     AppArmor profile for bwrap on Ubuntu; in a container, start it with permission to make namespaces";

const FIX_OVERLAY: &str =
    "use Linux 5.11 or newer, and a state folder on a local disk (ext4, xfs), not on a \
     network file system or inside a container's own layers";
/// What is unavailable when the first process cannot mount its overlay.
pub const OVERLAY: &str = "overlayfs in user namespaces";
/// How the first process names that step.
const OVERLAY_STEP: &str = "mount an overlay";

/// Path of `bwrap`.
pub fn find() -> Result<PathBuf, SandboxError> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path)
        .map(|dir| dir.join("bwrap"))
        .find(|p| p.is_file())
        .ok_or_else(|| SandboxError::Unavailable {
            what: "bubblewrap".into(),
            detail: "there is no `bwrap` in PATH".into(),
            fix: FIX_INSTALL.into(),
        })
}

/// Its name and version.
pub fn version() -> Result<String, SandboxError> {
    let path = find()?;
    let output = Command::new(&path)
        .arg("--version")
        .output()
        .map_err(|e| SandboxError::io("run", &path, e))?;
    Ok(String::from_utf8_lossy(&output.stdout).trim().to_string())
}

/// Everything that is needed to start one sandbox.
pub struct Launch {
    command: Command,
    socket: UnixStream,
    spec: SandboxSpec,
    folder: Folder,
    limits: Limits,
}

impl Launch {
    /// Prepares the command line and the control socket.
    pub fn new(
        bwrap: PathBuf,
        helper: PathBuf,
        spec: SandboxSpec,
        folder: Folder,
        root: Root,
        mut limits: Limits,
    ) -> Result<Self, SandboxError> {
        let io = |action: &'static str, e| SandboxError::io(action, folder.path(), e);
        let (socket, inner) = UnixStream::pair().map_err(|e| io("make the control socket of", e))?;
        let (log, _) = instance::open_log(&folder)?;
        let log_too = log.try_clone().map_err(|e| io("open the log of", e))?;
        limits.setup.forward_proxy = spec.proxy_socket.is_some();
        limits.setup.overlay = root.overlay;
        limits.setup.carried = root.carried.clone();
        if root.overlay && spec.proxy_socket.is_some() {
            let socket = PROXY_SOCKET_PATH.trim_start_matches('/');
            limits.setup.carried.push(socket.to_string());
        }
        if root.overlay {
            limits.setup.mounts = root.mounts.clone();
        }

        let mut command = Command::new(bwrap);
        command
            .args(arguments(&spec, &root, &helper)?)
            .env_clear()
            .stdin(Stdio::from(OwnedFd::from(inner)))
            .stdout(log)
            .stderr(log_too)
            // Ctrl-C at a terminal reaches its whole process group; it asks the run to end in order, not
            // the sandboxes to die.
            .process_group(0);
        confine(&mut command, limits.group.as_ref(), limits.cpu_set.as_deref())?;
        Ok(Self {
            command,
            socket,
            spec,
            folder,
            limits,
        })
    }

    /// Starts it.
    pub async fn start(
        self,
        instance: Arc<Instance>,
        timeout: Duration,
    ) -> Result<ProcessSandbox, SandboxError> {
        let Self {
            command,
            socket,
            spec,
            folder,
            limits,
        } = self;
        let path = folder.path().to_path_buf();
        let io = |action: &'static str| {
            let path = path.clone();
            move |e| SandboxError::io(action, path, e)
        };
        let control = socket.try_clone().map_err(io("open the control socket of"))?;
        let Limits { setup, group, .. } = limits;
        // The body is made where the child is born, so that a caller that goes away leaves no child.
        let keep = instance.clone();
        let body = instance
            .spawner()
            .spawn(command, move |child| {
                child.map(|child| Body::new(child, control, folder, group, keep))
            })
            .await
            .and_then(|child| child)
            .map_err(io("start bwrap for"))?;

        let channel = Arc::new(Channel::new(socket).map_err(io("use the control socket of"))?);
        let sandbox = ProcessSandbox::new(&spec, body, channel.clone());
        let mut boot = channel.open_boot();
        let begin = Instant::now();
        let ready = async {
            boot.send(&Request::Setup(setup)).await.ok()??;
            boot.next().await
        };
        match tokio::time::timeout(timeout, ready).await {
            Ok(Some(Event::Reply(Reply::Ready))) => Ok(sandbox),
            Ok(_) => Err(sandbox.boot_failure().await),
            Err(_) => Err(SandboxError::Timeout {
                name: spec.name,
                what: "bubblewrap and the first process to come up".into(),
                waited: begin.elapsed(),
            }),
        }
    }
}

/// The error for what bubblewrap wrote before it gave up.
pub fn explain(name: &str, log: &str) -> SandboxError {
    let log = log.trim();
    if log.contains(OVERLAY_STEP) {
        return SandboxError::Unavailable {
            what: OVERLAY.into(),
            detail: log.into(),
            fix: FIX_OVERLAY.into(),
        };
    }
    let forbidden = [
        "namespace",
        "uid map",
        "gid map",
        "Operation not permitted",
        "Permission denied",
    ];
    if forbidden.iter().any(|word| log.contains(word)) {
        return SandboxError::Unavailable {
            what: "user namespaces".into(),
            detail: log.into(),
            fix: FIX_USERNS.into(),
        };
    }
    SandboxError::Ended {
        name: name.into(),
        during: "starting".into(),
        reason: if log.is_empty() {
            "bubblewrap ended without a word".into()
        } else {
            log.into()
        },
    }
}

fn arguments(spec: &SandboxSpec, root: &Root, helper: &Path) -> Result<Vec<OsString>, SandboxError> {
    let mut args = Args::default();
    args.add([
        "--unshare-user",
        "--unshare-pid",
        "--unshare-net",
        "--unshare-ipc",
        "--unshare-uts",
    ]);
    args.add(["--unshare-cgroup-try", "--disable-userns"]);
    args.add(["--uid", "0", "--gid", "0", "--hostname", "sandbox"]);
    args.add(["--die-with-parent", "--as-pid-1", "--new-session", "--clearenv"]);
    args.add(["--cap-drop", "ALL"]);
    let more: &[&str] = if root.overlay { &OVERLAY_CAPABILITIES } else { &[] };
    CAPABILITIES
        .iter()
        .chain(more)
        .for_each(|cap| args.add(["--cap-add", cap]));

    let kind = |writable: bool| if writable { "--bind" } else { "--ro-bind" };
    args.bind(kind(!root.read_only), &root.base, "/");
    for (source, target, writable) in &root.binds {
        args.bind(kind(*writable), source, target);
    }
    args.add(["--proc", "/proc"]);
    args.add(["--ro-bind", KERNEL_SETTINGS, KERNEL_SETTINGS]);
    if Path::new(KERNEL_COMMANDS).exists() {
        args.add(["--ro-bind", "/dev/null", KERNEL_COMMANDS]);
    }
    let shm = spec.memory_mb.map_or(SHM_BYTES, |mb| SHM_BYTES.min(mb << 19));
    args.add(["--dev", "/dev", "--perms", "1777", "--size", &shm.to_string()]);
    args.add(["--tmpfs", "/dev/shm", "--remount-ro", "/dev"]);
    args.bind("--ro-bind", helper, HELPER_PATH);
    if let Some(socket) = &spec.proxy_socket {
        let real = socket
            .canonicalize()
            .map_err(|e| SandboxError::io("find the proxy's socket", socket, e))?;
        args.bind("--bind", &real, PROXY_SOCKET_PATH);
    }
    args.add(["--chdir", "/", "--", HELPER_PATH, "init"]);
    Ok(args.0)
}

#[derive(Default)]
struct Args(Vec<OsString>);

impl Args {
    fn add<const N: usize>(&mut self, words: [&str; N]) {
        self.0.extend(words.map(OsString::from));
    }

    fn bind(&mut self, option: &str, source: &Path, target: &str) {
        self.0.extend([option.into(), source.into(), target.into()]);
    }
}

/// Between fork and exec: enters the control groups and the processor set.
fn confine(command: &mut Command, group: Option<&Group>, cpus: Option<&[usize]>) -> Result<(), SandboxError> {
    let doors = group.map(Group::doors).transpose()?.unwrap_or_default();
    let cpu_set = cpus.map(|cpus| {
        // SAFETY: an all-zero cpu_set_t is the empty set; indices come from such a set.
        unsafe {
            let mut set: libc::cpu_set_t = std::mem::zeroed();
            cpus.iter().for_each(|&cpu| libc::CPU_SET(cpu, &mut set));
            set
        }
    });
    // SAFETY: the closure only makes system calls on descriptors and memory that it owns.
    unsafe {
        command.pre_exec(move || {
            for door in &doors {
                if libc::write(door.as_raw_fd(), c"0".as_ptr().cast(), 1) != 1 {
                    return Err(io::Error::last_os_error());
                }
            }
            if let Some(set) = &cpu_set {
                if libc::sched_setaffinity(0, std::mem::size_of_val(set), set) != 0 {
                    return Err(io::Error::last_os_error());
                }
            }
            Ok(())
        });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn forbidden_namespaces_are_told_apart_from_other_failures() {
        let text = explain("s", "bwrap: No permissions to create new namespace\n").to_string();
        assert!(text.contains("max_user_namespaces"), "{text}");
        let text = explain("s", "bwrap: Can't find source path /x: No such file or directory").to_string();
        assert!(text.contains("/x") && !text.contains("sysctl"), "{text}");
    }
}
