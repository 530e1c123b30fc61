//! This machine: sandbox, ports, limits, shared memory, GPUs.

use super::{
    folders::{space, Space},
    program::{ask, Refusal, DEADLINE},
};
use crate::rollout::sandbox::process::helper;
use std::{
    fs,
    net::{IpAddr, TcpListener, UdpSocket},
    path::Path,
};

/// A limit of this process; `u64::MAX` is none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limit {
    /// What holds now.
    pub soft: u64,
    /// What it may be raised to.
    pub hard: u64,
}

/// `/dev/shm`.
pub type SharedMemory = Space;

/// A GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GpuFacts {
    /// Number on this machine.
    pub index: u32,
    /// Product name.
    pub name: String,
    /// Driver version.
    pub driver: String,
    /// Memory, bytes.
    pub memory_bytes: u64,
    /// Memory in use, bytes.
    pub used_bytes: u64,
    /// Processes that hold memory.
    pub processes: Vec<GpuProcess>,
}

/// A process on a GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GpuProcess {
    /// Process number; of another container when it is not in `/proc`.
    pub pid: u32,
    /// User that owns it, where `/proc` shows it.
    pub owner: Option<String>,
    /// Its program.
    pub name: String,
    /// Memory that it holds, bytes.
    pub used_bytes: u64,
}

/// The limit of one resource.
pub fn limit(resource: libc::__rlimit_resource_t) -> Limit {
    let mut limit = libc::rlimit {
        rlim_cur: 0,
        rlim_max: 0,
    };
    // SAFETY: `limit` is a valid rlimit that the call fills.
    let failed = unsafe { libc::getrlimit(resource, &mut limit) } != 0;
    if failed {
        Limit { soft: 0, hard: 0 }
    } else {
        Limit {
            soft: limit.rlim_cur,
            hard: limit.rlim_max,
        }
    }
}

/// `/dev/shm`, where it is mounted.
pub fn shared_memory() -> Option<SharedMemory> {
    Path::new("/dev/shm")
        .is_dir()
        .then(|| space(Path::new("/dev/shm")))?
}

/// Ports that the kernel hands out by itself.
pub fn ephemeral_ports() -> Option<(u16, u16)> {
    let text = fs::read_to_string("/proc/sys/net/ipv4/ip_local_port_range").ok()?;
    let mut ports = text.split_whitespace().map(str::parse);
    match (ports.next(), ports.next()) {
        (Some(Ok(first)), Some(Ok(last))) => Some((first, last)),
        _ => None,
    }
}

/// The address that others see: the one that the kernel would send from. Nothing is sent.
pub fn address() -> Option<IpAddr> {
    let socket = UdpSocket::bind("0.0.0.0:0").ok()?;
    // A documentation address: it only selects the default route.
    socket.connect("192.0.2.1:9").ok()?;
    let address = socket.local_addr().ok()?.ip();
    (!address.is_loopback() && !address.is_unspecified()).then_some(address)
}

/// Binds a port for a moment: nothing else tells whether the proxy can have it.
pub fn port(host: &str, port: u16) -> Result<(), String> {
    TcpListener::bind((host, port))
        .map(|_| ())
        .map_err(|error| format!("{host}:{port}: {error}"))
}

/// GPUs of this machine and who is on them, from nvidia-smi; empty where it is not installed.
pub fn gpus() -> Vec<GpuFacts> {
    let query = |what: &str| ask("nvidia-smi", &[what, "--format=csv,noheader,nounits"], DEADLINE);
    let Ok(devices) = query("--query-gpu=index,uuid,name,driver_version,memory.total,memory.used") else {
        return Vec::new();
    };
    let processes = query("--query-compute-apps=gpu_uuid,pid,process_name,used_memory").unwrap_or_default();
    parse_gpus(&devices, &processes, owner)
}

fn parse_gpus(devices: &str, processes: &str, owner: impl Fn(u32) -> Option<String>) -> Vec<GpuFacts> {
    let fields = |line: &str| line.split(',').map(|f| f.trim().to_owned()).collect::<Vec<_>>();
    let mib = |text: &str| text.parse::<u64>().unwrap_or(0) << 20;
    devices
        .lines()
        .map(fields)
        .filter(|f| f.len() == 6)
        .map(|f| GpuFacts {
            index: f[0].parse().unwrap_or(0),
            name: f[2].clone(),
            driver: f[3].clone(),
            memory_bytes: mib(&f[4]),
            used_bytes: mib(&f[5]),
            processes: processes
                .lines()
                .map(fields)
                .filter(|p| p.len() == 4 && p[0] == f[1])
                .filter_map(|p| {
                    let pid = p[1].parse().ok()?;
                    Some(GpuProcess {
                        pid,
                        owner: owner(pid),
                        name: p[2].clone(),
                        used_bytes: mib(&p[3]),
                    })
                })
                .collect(),
        })
        .collect()
}

/// Name of the user that owns a process.
pub fn owner(pid: u32) -> Option<String> {
    use std::os::unix::fs::MetadataExt;
    let uid = fs::metadata(format!("/proc/{pid}")).ok()?.uid();
    let users = fs::read_to_string("/etc/passwd").unwrap_or_default();
    let name = users.lines().find_map(|line| {
        let mut fields = line.split(':');
        let name = fields.next()?;
        (fields.nth(1)?.parse() == Ok(uid)).then(|| name.to_owned())
    });
    Some(name.unwrap_or_else(|| format!("uid {uid}")))
}

/// Finds what a process sandbox needs, and starts the smallest one with the same namespaces.
pub fn process_sandbox(rootfs: Option<&Path>) -> Result<String, String> {
    if let Some(rootfs) = rootfs.filter(|path| !path.is_dir()) {
        return Err(format!("SANDBOX_ROOTFS={} is not a folder", rootfs.display()));
    }
    helper::find().map_err(|error| error.to_string())?;
    let run = |arguments: &[&str]| {
        ask("bwrap", arguments, DEADLINE).map_err(|refusal| match refusal {
            Refusal::Missing => "the program `bwrap` is not installed (package bubblewrap)".to_owned(),
            Refusal::Failed(problem) => explain_bwrap(&problem),
        })
    };
    run(&[
        "--unshare-all",
        "--die-with-parent",
        "--ro-bind",
        "/",
        "/",
        "--proc",
        "/proc",
        "/bin/true",
    ])?;
    run(&["--version"])
}

fn explain_bwrap(problem: &str) -> String {
    let forbidden = |file: &str| fs::read_to_string(file).is_ok_and(|text| text.trim() == "0");
    if forbidden("/proc/sys/user/max_user_namespaces") {
        return format!("{problem}; user namespaces are forbidden (user.max_user_namespaces is 0)");
    }
    if forbidden("/proc/sys/kernel/unprivileged_userns_clone") {
        return format!("{problem}; user namespaces are forbidden (kernel.unprivileged_userns_clone is 0)");
    }
    problem.to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gpus_and_their_processes_are_matched_by_uuid() {
        let devices =
            "0, GPU-a, NVIDIA H200, 580.159.04, 143771, 527\n1, GPU-b, NVIDIA H200, 580.159.04, 143771, 0";
        let processes = "GPU-a, 430, /usr/bin/python3, 518\nGPU-c, 1, x, 2\n";
        let gpus = parse_gpus(devices, processes, |pid| (pid == 430).then(|| "ann".into()));
        assert_eq!((gpus.len(), gpus[0].memory_bytes >> 20), (2, 143_771));
        let process = &gpus[0].processes[0];
        assert_eq!((process.pid, process.owner.as_deref()), (430, Some("ann")));
        assert_eq!(process.used_bytes, 518 << 20);
        assert!(gpus[1].processes.is_empty());
        assert!(parse_gpus("No devices were found", "", |_| None).is_empty());
    }

    #[test]
    fn this_machine_answers() {
        let (first, last) = ephemeral_ports().unwrap();
        assert!(first < last);
        let files = limit(libc::RLIMIT_NOFILE);
        assert!(files.soft > 0 && files.soft <= files.hard);
        assert!(owner(std::process::id()).is_some());
        let taken = TcpListener::bind("127.0.0.1:0").unwrap();
        assert!(port("127.0.0.1", taken.local_addr().unwrap().port()).is_err());
    }
}
