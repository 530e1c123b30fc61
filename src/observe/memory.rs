//! Main memory that this process may use: the machine's, or less where a control group limits it.

use std::fs;

/// Where the limit of the control group that a container shows as its root is written, versions 2 and 1.
const GROUP_LIMITS: [&str; 2] = [
    "/sys/fs/cgroup/memory.max",
    "/sys/fs/cgroup/memory/memory.limit_in_bytes",
];

/// All of it, bytes. None where the system does not say.
pub fn total() -> Option<u64> {
    let machine = field(&fs::read_to_string("/proc/meminfo").ok()?, "MemTotal:")?;
    Some(group_limit().map_or(machine, |limit| limit.min(machine)))
}

/// What is free or can be freed without swapping, bytes.
pub fn available() -> Option<u64> {
    let free = field(&fs::read_to_string("/proc/meminfo").ok()?, "MemAvailable:")?;
    Some(group_limit().map_or(free, |limit| limit.min(free)))
}

fn group_limit() -> Option<u64> {
    let read = |path: &&str| fs::read_to_string(path).ok()?.trim().parse().ok();
    GROUP_LIMITS.iter().find_map(read)
}

/// A line of `/proc/meminfo`, in bytes.
fn field(text: &str, name: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    let kib: u64 = line.trim().trim_end_matches("kB").trim().parse().ok()?;
    Some(kib * 1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_machine_has_memory_and_some_of_it_is_free() {
        let (total, available) = (total().unwrap(), available().unwrap());
        assert!(total > 1 << 28 && available > 0 && available <= total);
        assert_eq!(field("MemTotal:  12 kB\nMemFree: 3 kB", "MemFree:"), Some(3072));
        assert_eq!(field("MemTotal: x kB", "MemTotal:"), None);
    }
}
