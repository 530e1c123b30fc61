//! Limits on processors, memory and processes.
//!
//! | Limit | With control groups | Without |
//! |---|---|---|
//! | processors | quota of the group | a processor set of as many, rounded up, and `RLIMIT_CPU` |
//! | memory | limit of the group | watchdog inside on the summed resident memory |
//! | processes | limit of the group | watchdog inside, and `RLIMIT_NPROC` where it counts a sandbox alone |
//! | file size | `RLIMIT_FSIZE` | `RLIMIT_FSIZE` |
//! | wall time | watchdog inside | watchdog inside |
//!
//! Control groups are used when all three controllers can be limited below this process's own groups,
//! which a probe group proves; version 1 and version 2 with delegation.

use super::instance::Folder;
use crate::rollout::sandbox::{LimitsBy, SandboxError, SandboxSpec};
use legorl_agent::protocol::Setup;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// bubblewrap and the threads of the first process, which count as processes of the sandbox.
const OWN_PROCESSES: u32 = 24;
const CPU_PERIOD_US: u64 = 100_000;

/// Makes the limits of each sandbox.
pub struct Limiter {
    tag: String,
    kind: Kind,
    next_cpu: AtomicUsize,
}

enum Kind {
    Groups(Parents),
    Watchdog { because: String },
}

/// Folders below which groups are made.
#[derive(Clone, Debug, PartialEq)]
struct Parents {
    version: u8,
    memory: PathBuf,
    pids: PathBuf,
    cpu: PathBuf,
}

/// Limits of one sandbox, ready to be applied.
#[derive(Debug)]
pub struct Limits {
    /// For the first process; proxy and overlay are set by the caller.
    pub setup: Setup,
    /// Groups to enter before exec.
    pub group: Option<Group>,
    /// Processors to run on.
    pub cpu_set: Option<Vec<usize>>,
}

impl Limiter {
    /// Looks for usable control groups.
    pub fn detect(tag: &str) -> Self {
        let found = find_parents().and_then(|parents| {
            let why = |e: SandboxError| match &e {
                SandboxError::Io { source, .. } => format!("{e}: {source}"),
                other => other.to_string(),
            };
            let probe = Group::create(&parents, &format!("legorl-{tag}-probe")).map_err(why)?;
            let all = SandboxSpec {
                cpus: Some(1.0),
                memory_mb: Some(64),
                pids_limit: Some(64),
                ..SandboxSpec::new("probe")
            };
            probe.set(&all).map_err(why)?;
            Ok(parents)
        });
        let kind = match found {
            Ok(parents) => Kind::Groups(parents),
            Err(because) => Kind::Watchdog { because },
        };
        Self {
            tag: tag.into(),
            kind,
            next_cpu: AtomicUsize::new(0),
        }
    }

    /// A limiter that uses no control groups.
    #[cfg(test)]
    pub fn watchdog(tag: &str) -> Self {
        Self {
            tag: tag.into(),
            kind: Kind::Watchdog {
                because: "chosen by the test".into(),
            },
            next_cpu: AtomicUsize::new(0),
        }
    }

    /// What enforces the limits.
    pub fn report(&self) -> LimitsBy {
        match &self.kind {
            Kind::Watchdog { because } => LimitsBy::Watchdog {
                because: because.clone(),
            },
            Kind::Groups(p) => {
                let mut parents = vec![p.memory.clone(), p.pids.clone(), p.cpu.clone()];
                parents.dedup();
                LimitsBy::Cgroup {
                    version: p.version,
                    parents,
                }
            }
        }
    }

    /// Makes the limits of a sandbox.
    pub fn limit(&self, spec: &SandboxSpec, folder: &Folder) -> Result<Limits, SandboxError> {
        check(spec)?;
        let mut limits = Limits {
            setup: Setup {
                rlimit_fsize_bytes: spec.storage_mb.map(|mb| mb << 20),
                pids_limit: spec.pids_limit,
                wall_limit_ms: spec.wall_limit.as_millis() as u64,
                ..Setup::default()
            },
            group: None,
            cpu_set: None,
        };
        match &self.kind {
            Kind::Groups(parents)
                if spec.cpus.is_some() || spec.memory_mb.is_some() || spec.pids_limit.is_some() =>
            {
                let name = format!("legorl-{}-{}", self.tag, spec.name);
                let group = Group::create(parents, &name)?;
                for dir in group.dirs() {
                    folder.record("cgroup", &dir.to_string_lossy())?;
                }
                group.set(spec)?;
                limits.group = Some(group);
            }
            Kind::Groups(_) => {}
            Kind::Watchdog { .. } => {
                limits.setup.watch_memory_bytes = spec.memory_mb.map(|mb| mb << 20);
                limits.setup.watch_pids = spec.pids_limit;
                if nproc_counts_one_sandbox() {
                    limits.setup.rlimit_nproc = spec.pids_limit.map(|n| n + OWN_PROCESSES);
                }
                limits.setup.rlimit_cpu_secs = spec
                    .cpus
                    .map(|cpus| (cpus.max(1.0) * spec.wall_limit.as_secs_f64()).ceil() as u64);
                limits.cpu_set = spec.cpus.and_then(|cpus| self.pick_cpus(cpus.ceil() as usize));
            }
        }
        Ok(limits)
    }

    /// The next `count` processors of those that this process may use; `None` when that is all of them.
    fn pick_cpus(&self, count: usize) -> Option<Vec<usize>> {
        let allowed = allowed_cpus();
        if count >= allowed.len() {
            return None;
        }
        let first = self.next_cpu.fetch_add(count, Ordering::Relaxed);
        Some((0..count).map(|i| allowed[(first + i) % allowed.len()]).collect())
    }
}

fn check(spec: &SandboxSpec) -> Result<(), SandboxError> {
    let problem = match spec {
        SandboxSpec { cpus: Some(c), .. } if !(c.is_finite() && *c > 0.0) => format!("cpus is {c}"),
        SandboxSpec {
            memory_mb: Some(m), ..
        } if *m < 16 => {
            format!("memory_mb is {m}; 16 is the least that a shell can work with")
        }
        SandboxSpec {
            pids_limit: Some(0), ..
        } => "the process limit is 0".into(),
        SandboxSpec { wall_limit, .. } if wall_limit.is_zero() => "the wall-time limit is 0".into(),
        _ => return Ok(()),
    };
    Err(SandboxError::Spec {
        name: spec.name.clone(),
        problem,
    })
}

/// Since Linux 5.14 RLIMIT_NPROC counts per user namespace. The kernel never applies it to root.
fn nproc_counts_one_sandbox() -> bool {
    // SAFETY: geteuid cannot fail.
    let plain_user = unsafe { libc::geteuid() } != 0;
    plain_user && kernel_version().is_some_and(|v| v >= (5, 14))
}

fn kernel_version() -> Option<(u32, u32)> {
    let text = fs::read_to_string("/proc/sys/kernel/osrelease").ok()?;
    let mut numbers = text.split(|c: char| !c.is_ascii_digit()).map(str::parse::<u32>);
    Some((numbers.next()?.ok()?, numbers.next()?.ok()?))
}

fn allowed_cpus() -> Vec<usize> {
    // SAFETY: the zeroed set is filled by the kernel and read with the macro for it.
    unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        if libc::sched_getaffinity(0, std::mem::size_of_val(&set), &mut set) != 0 {
            return Vec::new();
        }
        (0..libc::CPU_SETSIZE as usize)
            .filter(|&i| libc::CPU_ISSET(i, &set))
            .collect()
    }
}

/// The control groups of one sandbox; removed when dropped.
#[derive(Debug)]
pub struct Group {
    version: u8,
    memory: PathBuf,
    pids: PathBuf,
    cpu: PathBuf,
}

impl Group {
    fn create(parents: &Parents, name: &str) -> Result<Self, SandboxError> {
        let group = Self {
            version: parents.version,
            memory: parents.memory.join(name),
            pids: parents.pids.join(name),
            cpu: parents.cpu.join(name),
        };
        for dir in group.dirs() {
            fs::create_dir(dir).map_err(|e| SandboxError::io("create the control group", dir, e))?;
        }
        Ok(group)
    }

    /// The folders, each once.
    fn dirs(&self) -> Vec<&Path> {
        let mut dirs = vec![self.memory.as_path(), &self.pids, &self.cpu];
        dirs.dedup();
        dirs
    }

    fn set(&self, spec: &SandboxSpec) -> Result<(), SandboxError> {
        let v2 = self.version == 2;
        if let Some(mb) = spec.memory_mb {
            let bytes = (mb << 20).to_string();
            write(
                &self
                    .memory
                    .join(if v2 { "memory.max" } else { "memory.limit_in_bytes" }),
                &bytes,
            )?;
            // Present only with swap accounting.
            let (swap, value) = match v2 {
                true => (self.memory.join("memory.swap.max"), "0".to_string()),
                false => (self.memory.join("memory.memsw.limit_in_bytes"), bytes),
            };
            if swap.exists() {
                write(&swap, &value)?;
            }
        }
        if let Some(count) = spec.pids_limit {
            write(&self.pids.join("pids.max"), &(count + OWN_PROCESSES).to_string())?;
        }
        if let Some(cpus) = spec.cpus {
            let quota = ((cpus * CPU_PERIOD_US as f64) as u64).max(1000);
            if v2 {
                write(&self.cpu.join("cpu.max"), &format!("{quota} {CPU_PERIOD_US}"))?;
            } else {
                write(&self.cpu.join("cpu.cfs_period_us"), &CPU_PERIOD_US.to_string())?;
                write(&self.cpu.join("cpu.cfs_quota_us"), &quota.to_string())?;
            }
        }
        Ok(())
    }

    /// Files to which a process of one thread writes `0` to enter. Version 1 has one for the calling thread
    /// alone, which spares a wait of some 20 ms for a lock over all processes of the machine.
    pub fn doors(&self) -> Result<Vec<File>, SandboxError> {
        self.dirs()
            .into_iter()
            .map(|dir| {
                let path = dir.join(if self.version == 2 {
                    "cgroup.procs"
                } else {
                    "tasks"
                });
                OpenOptions::new()
                    .write(true)
                    .open(&path)
                    .map_err(|e| SandboxError::io("open", path, e))
            })
            .collect()
    }

    /// Processes killed for memory so far.
    pub fn oom_kills(&self) -> u64 {
        let file = if self.version == 2 {
            "memory.events"
        } else {
            "memory.oom_control"
        };
        counter(&self.memory.join(file), "oom_kill")
    }

    /// Forks refused so far.
    pub fn refused_forks(&self) -> u64 {
        counter(&self.pids.join("pids.events"), "max")
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        for dir in self.dirs() {
            remove_group(dir);
        }
    }
}

fn counter(file: &Path, key: &str) -> u64 {
    let text = fs::read_to_string(file).unwrap_or_default();
    let value = text.lines().find_map(|l| l.strip_prefix(key)?.strip_prefix(' '));
    value.and_then(|v| v.trim().parse().ok()).unwrap_or(0)
}

/// Kills what is left in a group and removes it; a group that is gone is fine.
pub fn remove_group(dir: &Path) {
    let deadline = Instant::now() + Duration::from_secs(5);
    loop {
        match fs::remove_dir(dir) {
            Ok(()) => return,
            Err(e) if e.kind() == io::ErrorKind::NotFound => return,
            Err(e) if Instant::now() >= deadline => {
                tracing::warn!(group = %dir.display(), error = %e, "control group not removed");
                return;
            }
            // Busy for a moment after its last process has ended.
            Err(_) => {}
        }
        for pid in fs::read_to_string(dir.join("cgroup.procs"))
            .unwrap_or_default()
            .lines()
        {
            if let Ok(pid) = pid.parse::<i32>() {
                // SAFETY: kill with integer arguments; the group holds processes of this sandbox alone.
                unsafe { libc::kill(pid, libc::SIGKILL) };
            }
        }
        std::thread::sleep(Duration::from_millis(2));
    }
}

fn write(path: &Path, value: &str) -> Result<(), SandboxError> {
    fs::write(path, value).map_err(|e| SandboxError::io(format!("write {value} to"), path, e))
}

/// Where this process may make groups; the text says why nowhere.
fn find_parents() -> Result<Parents, String> {
    let read = |path: &str| fs::read_to_string(path).map_err(|e| format!("{path}: {e}"));
    let parents = parse_parents(&read("/proc/self/cgroup")?, &read("/proc/self/mountinfo")?)?;
    if parents.version == 2 {
        let control = parents.memory.join("cgroup.subtree_control");
        let enabled = fs::read_to_string(&control).unwrap_or_default();
        if !["cpu", "memory", "pids"]
            .iter()
            .all(|c| enabled.split_whitespace().any(|e| e == *c))
        {
            fs::write(&control, "+cpu +memory +pids").map_err(|e| format!("{}: {e}", control.display()))?;
        }
    }
    Ok(parents)
}

/// Own group of each controller, from `/proc/self/cgroup` and `/proc/self/mountinfo`.
fn parse_parents(groups: &str, mounts: &str) -> Result<Parents, String> {
    // `4:memory:/path`; version 2 is `0::/path`.
    let path_of = |controller: &str| {
        groups.lines().find_map(|line| {
            let mut parts = line.splitn(3, ':');
            let (id, names, path) = (parts.next()?, parts.next()?, parts.next()?);
            let wanted = match controller {
                "" => id == "0",
                name => names.split(',').any(|n| n == name),
            };
            wanted.then_some(path)
        })
    };
    // Fields: id parent device root mount-point options … - type source super-options
    let mount_of = |kind: &str, controller: &str| {
        mounts.lines().find_map(|line| {
            let (left, right) = line.split_once(" - ")?;
            let (left, right): (Vec<&str>, Vec<&str>) =
                (left.split(' ').collect(), right.split(' ').collect());
            let wanted = right.first() == Some(&kind)
                && (controller.is_empty() || right.get(2)?.split(',').any(|o| o == controller));
            wanted.then(|| (left.get(3).copied(), left.get(4).copied()))
        })
    };
    let folder = |kind: &str, controller: &str| {
        let path = path_of(controller)?;
        let (root, point) = mount_of(kind, controller)?;
        // Inside a container the mount may show only the container's own part.
        let below = path.strip_prefix(root?.trim_end_matches('/')).unwrap_or(path);
        Some(PathBuf::from(format!("{}{below}", point?).trim_end_matches('/')))
    };
    if let (Some(memory), Some(pids), Some(cpu)) = (
        folder("cgroup", "memory"),
        folder("cgroup", "pids"),
        folder("cgroup", "cpu"),
    ) {
        return Ok(Parents {
            version: 1,
            memory,
            pids,
            cpu,
        });
    }
    match folder("cgroup2", "") {
        Some(own) => Ok(Parents {
            version: 2,
            memory: own.clone(),
            pids: own.clone(),
            cpu: own,
        }),
        None => Err("control groups are not mounted".into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn own_groups_are_found_in_both_versions_and_in_containers() {
        let v1 = parse_parents(
            "8:pids:/\n4:memory:/jobs/7\n1:cpu,cpuacct:/\n0::/\n",
            "30 29 0:26 / /sys/fs/cgroup/cpu,cpuacct rw shared:9 - cgroup cgroup rw,cpu,cpuacct\n\
             33 29 0:29 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n\
             36 29 0:32 / /sys/fs/cgroup/pids rw - cgroup cgroup rw,pids\n\
             39 29 0:35 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n",
        );
        let dir = |p: &str| PathBuf::from(format!("/sys/fs/cgroup/{p}"));
        assert_eq!(
            v1,
            Ok(Parents {
                version: 1,
                memory: dir("memory/jobs/7"),
                pids: dir("pids"),
                cpu: dir("cpu,cpuacct"),
            })
        );
        let v2 = parse_parents(
            "0::/user.slice/app.scope\n",
            "35 24 0:30 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n",
        );
        assert_eq!(
            v2.map(|p| (p.version, p.memory)),
            Ok((2, dir("user.slice/app.scope")))
        );
        let container = parse_parents(
            "0::/docker/abc/job\n",
            "35 24 0:30 /docker/abc /sys/fs/cgroup ro - cgroup2 cgroup rw\n",
        );
        assert_eq!(container.map(|p| p.cpu), Ok(dir("job")));
        assert!(parse_parents("", "").is_err());
    }

    #[test]
    fn absurd_limits_are_refused() {
        let mut spec = SandboxSpec::new("s");
        spec.cpus = Some(f64::NAN);
        assert!(check(&spec).is_err());
        spec.cpus = Some(0.5);
        assert!(check(&spec).is_ok());
        spec.memory_mb = Some(1);
        assert!(check(&spec).unwrap_err().to_string().contains("memory_mb"));
    }
}
