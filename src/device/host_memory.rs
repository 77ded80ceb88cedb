//! The memory of the host.

use std::fs;

/// Bytes that can be allocated without swapping, on the machine or in the container, whichever has less.
/// `None` if neither reports it.
pub fn available_host_bytes() -> Option<u64> {
    let machine = fs::read_to_string("/proc/meminfo")
        .ok()
        .and_then(|text| mem_available(&text));
    let container = container_available();
    match (machine, container) {
        (Some(machine), Some(container)) => Some(machine.min(container)),
        (one, other) => one.or(other),
    }
}

/// `MemAvailable` of `/proc/meminfo` (proc(5)), in bytes.
fn mem_available(meminfo: &str) -> Option<u64> {
    let line = meminfo
        .lines()
        .find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kib.checked_mul(1024)
}

/// Bytes left below the cgroup v2 memory limit; `None` without a limit.
fn container_available() -> Option<u64> {
    let read = |name: &str| fs::read_to_string(format!("/sys/fs/cgroup/{name}")).ok();
    remaining(
        &read("memory.max")?,
        &read("memory.current")?,
        &read("memory.stat")?,
    )
}

/// Inactive page cache counts as used but can be reclaimed, so a checkpoint that was just read does not count.
fn remaining(max: &str, current: &str, stat: &str) -> Option<u64> {
    let max: u64 = max.trim().parse().ok()?;
    let current: u64 = current.trim().parse().ok()?;
    let cache = stat
        .lines()
        .find_map(|line| line.strip_prefix("inactive_file "))?;
    let cache: u64 = cache.trim().parse().ok()?;
    Some(max.saturating_sub(current.saturating_sub(cache)))
}

/// Bytes of address space that this process can still take (`RLIMIT_AS`, `ulimit -v`). `None` without a limit.
pub fn available_process_bytes() -> Option<u64> {
    let read = |name: &str| fs::read_to_string(format!("/proc/self/{name}")).ok();
    address_space_left(&read("limits")?, &read("status")?)
}

fn address_space_left(limits: &str, status: &str) -> Option<u64> {
    let value = |text: &str, name: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(name))?;
        line.split_whitespace().next()?.parse::<u64>().ok()
    };
    let limit = value(limits, "Max address space")?;
    let taken = value(status, "VmSize:")?.checked_mul(1024)?;
    Some(limit.saturating_sub(taken))
}

/// What tells this host from others, for processes in containers of one host, too. Empty if the system does not tell.
pub fn host_id() -> String {
    let id = fs::read_to_string("/proc/sys/kernel/random/boot_id");
    id.unwrap_or_default().trim().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    const STAT: &str = "anon 20\ninactive_file 5\nactive_file 7\n";

    #[test]
    fn meminfo_is_in_kibibytes() {
        let text = "MemTotal:       24576 kB\nMemAvailable:    2048 kB\n";
        assert_eq!(mem_available(text), Some(2 << 20));
        assert_eq!(mem_available("MemTotal: 1 kB\n"), None);
    }

    #[test]
    fn a_container_without_a_limit_reports_nothing() {
        assert_eq!(remaining("max\n", "10\n", STAT), None);
        assert_eq!(remaining("100\n", "30\n", STAT), Some(75));
        assert_eq!(remaining("100\n", "300\n", STAT), Some(0));
    }

    #[test]
    fn a_process_may_have_a_limit_of_its_own() {
        let limits = |soft: &str| {
            format!(
                "Limit  Soft Limit  Hard Limit  Units\nMax address space  {soft}  unlimited  bytes\n"
            )
        };
        let status = "VmPeak:\t 90 kB\nVmSize:\t    40 kB\n";
        assert_eq!(address_space_left(&limits("unlimited"), status), None);
        assert_eq!(
            address_space_left(&limits("65536"), status),
            Some(24 * 1024)
        );
        assert_eq!(address_space_left(&limits("1024"), status), Some(0));
    }

    #[test]
    fn this_machine_reports_free_memory() {
        assert!(available_host_bytes().expect("Linux has /proc/meminfo") > 0);
    }

    #[test]
    fn a_host_has_an_id() {
        assert!(!host_id().is_empty());
        assert_eq!(host_id(), host_id());
    }
}
