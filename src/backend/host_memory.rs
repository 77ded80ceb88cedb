//! How much memory the machine, or the container, can still give, and who has been promised it.
//!
//! A KV cache is paid for when it is first written to, so the system counts the cache of a model that has
//! just been loaded as free. Every instance therefore holds a [`Promise`] over what it was given and has
//! not written to yet, and the next one is sized by what is left without it.
//!
//! ```text
//! |-- used, says the system --|-------------------- available, says the system --------------------|
//!                             |-- promised, not yet written --|-- what a new instance may share in --|
//! ```

use std::fs;
use std::ops::Add;

use parking_lot::Mutex;
use serde::Serialize;

use crate::base::Blocks;

/// The promises of this process.
static PROMISES: Promises = Promises(Mutex::new(0));

/// Sizes an instance by the memory that is left, and promises it that memory.
///
/// `size` gets the bytes that are available to nobody else, `None` where the system does not say, and
/// returns what it makes of them and how many bytes that needs. Two instances are never sized at once.
///
/// # Errors
/// Those of `size`.
pub fn promise<T, E>(
    size: impl FnOnce(Option<u64>) -> Result<(T, u64), E>,
) -> Result<(T, Promise), E> {
    PROMISES.promise(available_bytes, size)
}

/// Bytes promised and not yet written to, over all instances.
struct Promises(Mutex<u64>);

/// Memory promised to one instance; dropped with it.
pub struct Promise {
    promises: &'static Promises,
    bytes: u64,
    /// Bytes of it that are known to be written to, and so no longer counted as available.
    written: u64,
}

impl Promises {
    fn promise<T, E>(
        &'static self,
        available: impl FnOnce() -> Option<u64>,
        size: impl FnOnce(Option<u64>) -> Result<(T, u64), E>,
    ) -> Result<(T, Promise), E> {
        let mut promised = self.0.lock();
        let left = available().map(|bytes| bytes.saturating_sub(*promised));
        let (sized, bytes) = size(left)?;
        *promised += bytes;
        let promise = Promise {
            promises: self,
            bytes,
            written: 0,
        };
        Ok((sized, promise))
    }
}

impl Promise {
    /// Says that at least `bytes` of it have been written to by now.
    pub fn wrote(&mut self, bytes: u64) {
        let written = bytes.min(self.bytes);
        if let Some(more) = written.checked_sub(self.written).filter(|more| *more > 0) {
            *self.promises.0.lock() -= more;
            self.written = written;
        }
    }
}

impl Drop for Promise {
    fn drop(&mut self) {
        *self.promises.0.lock() -= self.bytes - self.written;
    }
}

/// The memory of an instance: its weights, and a KV cache that fills as it is used.
pub struct InstanceMemory {
    promise: Promise,
    weight_bytes: u64,
    bytes_per_block: u64,
}

impl InstanceMemory {
    /// The memory of an instance whose weights are loaded.
    pub fn new(mut promise: Promise, weight_bytes: u64, bytes_per_block: u64) -> Self {
        promise.wrote(weight_bytes);
        Self {
            promise,
            weight_bytes,
            bytes_per_block,
        }
    }

    /// Weights and KV cache together.
    pub fn usage(&self) -> MemoryUsage {
        MemoryUsage {
            host_bytes: self.promise.bytes,
            ..MemoryUsage::default()
        }
    }

    /// Says that so many blocks of the KV cache are in use, and so were written to.
    pub fn uses(&mut self, blocks: Blocks) {
        let kv_bytes = u64::from(blocks.0) * self.bytes_per_block;
        self.promise.wrote(self.weight_bytes + kv_bytes);
    }
}

/// What an instance takes of the machine's memory, in bytes, under the Batch Manager's names.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct MemoryUsage {
    /// Weights and KV cache in host memory.
    #[serde(rename = "Runtime CPU Memory Usage")]
    pub host_bytes: u64,
    /// The same on GPUs.
    #[serde(rename = "Runtime GPU Memory Usage")]
    pub gpu_bytes: u64,
    /// Host memory that GPUs read.
    #[serde(rename = "Runtime Pinned Memory Usage")]
    pub pinned_bytes: u64,
}

impl Add for MemoryUsage {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self {
            host_bytes: self.host_bytes + other.host_bytes,
            gpu_bytes: self.gpu_bytes + other.gpu_bytes,
            pinned_bytes: self.pinned_bytes + other.pinned_bytes,
        }
    }
}

/// Bytes that can be taken without swapping: of the machine, or of the container if that is less.
/// `None` where neither says.
fn available_bytes() -> Option<u64> {
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

/// What a cgroup v2 memory limit leaves; `None` without a limit.
fn container_available() -> Option<u64> {
    let read = |name: &str| fs::read_to_string(format!("/sys/fs/cgroup/{name}")).ok();
    remaining(
        &read("memory.max")?,
        &read("memory.current")?,
        &read("memory.stat")?,
    )
}

/// The page cache counts as used, but it gives way: a checkpoint that was read must not be in the way.
fn remaining(max: &str, current: &str, stat: &str) -> Option<u64> {
    let max: u64 = max.trim().parse().ok()?;
    let current: u64 = current.trim().parse().ok()?;
    let cache = stat
        .lines()
        .find_map(|line| line.strip_prefix("inactive_file "))?;
    let cache: u64 = cache.trim().parse().ok()?;
    Some(max.saturating_sub(current.saturating_sub(cache)))
}

#[cfg(test)]
mod tests {
    use super::*;

    const STAT: &str = "anon 20\ninactive_file 5\nactive_file 7\n";

    /// Half of what is left, as a KV cache takes it.
    fn half(left: Option<u64>) -> Result<(u64, u64), ()> {
        let half = left.expect("known") / 2;
        Ok((half, half))
    }

    #[test]
    fn what_is_promised_is_left_to_whom_it_was_promised() {
        static PROMISES: Promises = Promises(Mutex::new(0));
        let system = || Some(1000);
        let (first, promise) = PROMISES.promise(system, half).expect("sized");
        let (second, _other) = PROMISES.promise(system, half).expect("sized");
        assert_eq!((first, second), (500, 250));
        drop(promise);
        let (third, _) = PROMISES.promise(system, half).expect("sized");
        assert_eq!(third, 375, "750 are left");
    }

    #[test]
    fn what_is_written_to_is_not_counted_twice() {
        static PROMISES: Promises = Promises(Mutex::new(0));
        let (_, mut promise) = PROMISES.promise(|| Some(1000), half).expect("sized");
        for written in [200, 100, 200] {
            promise.wrote(written);
        }
        // The system has seen them go.
        let (next, _) = PROMISES.promise(|| Some(800), half).expect("sized");
        assert_eq!(next, 250);
        promise.wrote(9999);
        drop(promise);
        assert_eq!(*PROMISES.0.lock(), 0);
    }

    #[test]
    fn an_instance_has_written_its_weights_and_the_most_blocks_that_were_in_use() {
        static PROMISES: Promises = Promises(Mutex::new(0));
        let (_, promise) = PROMISES
            .promise(|| None, |_| Ok::<_, ()>(((), 1000)))
            .expect("sized");
        let mut memory = InstanceMemory::new(promise, 400, 10);
        assert_eq!(*PROMISES.0.lock(), 600);
        for (blocks, promised) in [(7, 530), (3, 530), (9, 510)] {
            memory.uses(Blocks(blocks));
            assert_eq!(*PROMISES.0.lock(), promised);
        }
        assert_eq!(memory.usage().host_bytes, 1000);
    }

    #[test]
    fn nothing_is_promised_to_what_cannot_be_loaded() {
        static PROMISES: Promises = Promises(Mutex::new(0));
        let refused = PROMISES.promise(|| Some(1000), |_| Err::<((), u64), _>("too small"));
        assert_eq!(refused.err(), Some("too small"));
        assert_eq!(*PROMISES.0.lock(), 0);
    }

    #[test]
    fn more_may_be_promised_than_there_is() {
        static PROMISES: Promises = Promises(Mutex::new(0));
        let all = |_| Ok::<_, ()>(((), 900));
        let (_, _first) = PROMISES.promise(|| Some(1000), all).expect("sized");
        let (left, _second) = PROMISES
            .promise(|| Some(500), |left| Ok::<_, ()>((left, 0)))
            .expect("sized");
        assert_eq!(left, Some(0));
    }

    #[test]
    fn the_machines_figure_is_read_in_kibibytes() {
        let text = "MemTotal:       24576 kB\nMemAvailable:    2048 kB\n";
        assert_eq!(mem_available(text), Some(2 << 20));
        assert_eq!(mem_available("MemTotal: 1 kB\n"), None);
    }

    #[test]
    fn a_container_without_a_limit_has_no_figure() {
        assert_eq!(remaining("max\n", "10\n", STAT), None);
        assert_eq!(remaining("100\n", "30\n", STAT), Some(75));
        assert_eq!(remaining("100\n", "300\n", STAT), Some(0));
    }

    #[test]
    fn this_machine_says_something() {
        assert!(available_bytes().expect("Linux has /proc/meminfo") > 0);
    }
}
