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
    bytes_of(meminfo, "MemAvailable:")
}

/// What stands behind a name in kB, in bytes.
fn bytes_of(text: &str, name: &str) -> Option<u64> {
    let kib = behind(text, name)?.strip_suffix("kB")?;
    kib.trim().parse::<u64>().ok()?.checked_mul(1024)
}

/// The rest of the line that begins with a name.
fn behind<'t>(text: &'t str, name: &str) -> Option<&'t str> {
    let rest = text.lines().find_map(|line| line.strip_prefix(name))?;
    Some(rest.trim())
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
    let cache: u64 = behind(stat, "inactive_file ")?.parse().ok()?;
    Some(max.saturating_sub(current.saturating_sub(cache)))
}

/// Bytes of address space that this process can still take (`RLIMIT_AS`, `ulimit -v`). `None` without a limit.
pub fn available_process_bytes() -> Option<u64> {
    let read = |name: &str| fs::read_to_string(format!("/proc/self/{name}")).ok();
    address_space_left(&read("limits")?, &read("status")?)
}

fn address_space_left(limits: &str, status: &str) -> Option<u64> {
    // The soft limit comes first.
    let limits = behind(limits, "Max address space")?;
    let limit: u64 = limits.split_whitespace().next()?.parse().ok()?;
    Some(limit.saturating_sub(bytes_of(status, "VmSize:")?))
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
