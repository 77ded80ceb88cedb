//! Free host memory of the machine, container or process, less what other instances have reserved.
//!
//! The system allocates KV cache pages on first write, so the cache of a model that has just been loaded still counts
//! as free. Each instance therefore holds a [`Reservation`] for the memory that it has been given and has not written
//! yet, and the next instance is sized by the remainder.
//!
//! ```text
//! |-- used, by the system --|------------- available, by the system --------------|
//!                           |-- reserved, not yet written --|-- left for the next --|
//! ```

use std::ops::Add;

use parking_lot::Mutex;
use serde::Serialize;

use inflight_base::Blocks;
use inflight_device::{available_host_bytes, available_process_bytes};

/// The reservations of this process.
static RESERVATIONS: Reservations = Reservations(Mutex::new(0));

/// Sizes an instance by the memory that is left, and reserves what it needs.
///
/// `size` returns its result and the bytes to reserve. Calls are serialised.
///
/// # Errors
/// The errors of `size`.
pub fn reserve<T, E>(
    size: impl FnOnce(FreeMemory) -> Result<(T, u64), E>,
) -> Result<(T, Reservation), E> {
    RESERVATIONS.reserve(available_host_bytes, |host_bytes| {
        size(FreeMemory {
            host_bytes,
            // Of its own address space a process has taken what it has reserved.
            process_bytes: available_process_bytes(),
        })
    })
}

/// Memory that nobody has reserved.
#[derive(Clone, Copy, Debug)]
pub struct FreeMemory {
    /// Free bytes of the host; `None` if the system does not report them.
    pub host_bytes: Option<u64>,
    /// Address space left to this process, if it is limited.
    pub process_bytes: Option<u64>,
}

impl FreeMemory {
    /// Memory that this process can use.
    pub fn available_bytes(self) -> Option<u64> {
        self.host_bytes.into_iter().chain(self.process_bytes).min()
    }
}

/// Bytes that are reserved and not yet written, over all instances.
struct Reservations(Mutex<u64>);

/// The memory reserved for one instance, released on drop.
pub struct Reservation {
    reservations: &'static Reservations,
    bytes: u64,
    /// Bytes known to have been written, which the system no longer counts as available.
    written: u64,
}

impl Reservations {
    fn reserve<T, E>(
        &'static self,
        available: impl FnOnce() -> Option<u64>,
        size: impl FnOnce(Option<u64>) -> Result<(T, u64), E>,
    ) -> Result<(T, Reservation), E> {
        let mut reserved = self.0.lock();
        let left = available().map(|bytes| bytes.saturating_sub(*reserved));
        let (sized, bytes) = size(left)?;
        *reserved += bytes;
        let reservation = Reservation {
            reservations: self,
            bytes,
            written: 0,
        };
        Ok((sized, reservation))
    }
}

impl Reservation {
    /// Records that at least `bytes` of it have been written.
    pub fn mark_written(&mut self, bytes: u64) {
        let written = bytes.min(self.bytes);
        if let Some(more) = written.checked_sub(self.written).filter(|more| *more > 0) {
            *self.reservations.0.lock() -= more;
            self.written = written;
        }
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        *self.reservations.0.lock() -= self.bytes - self.written;
    }
}

/// The memory of an instance: its weights, and a KV cache that is written as it is used.
pub struct InstanceMemory {
    /// `None` on a GPU, whose memory is taken at load.
    reservation: Option<Reservation>,
    gpu_bytes: u64,
    pinned_bytes: u64,
    weight_bytes: u64,
    bytes_per_block: u64,
}

impl InstanceMemory {
    /// The memory of an instance whose weights are loaded.
    pub fn new(mut reservation: Reservation, weight_bytes: u64, bytes_per_block: u64) -> Self {
        reservation.mark_written(weight_bytes);
        Self {
            reservation: Some(reservation),
            gpu_bytes: 0,
            pinned_bytes: 0,
            weight_bytes,
            bytes_per_block,
        }
    }

    /// The memory of an instance on a GPU, with the pinned memory for what its KV cache gives up.
    pub fn on_gpu(gpu_bytes: u64, pinned_bytes: u64) -> Self {
        Self {
            reservation: None,
            gpu_bytes,
            pinned_bytes,
            weight_bytes: 0,
            bytes_per_block: 0,
        }
    }

    /// Weights and KV cache together.
    pub fn usage(&self) -> MemoryUsage {
        MemoryUsage {
            host_bytes: self.reservation.as_ref().map_or(0, |it| it.bytes),
            gpu_bytes: self.gpu_bytes,
            pinned_bytes: self.pinned_bytes,
        }
    }

    /// Records that `blocks` of the KV cache and of its host blocks are in use, and so have been written.
    pub fn mark_used(&mut self, blocks: Blocks) {
        let kv_bytes = u64::from(blocks.0) * self.bytes_per_block;
        if let Some(reservation) = &mut self.reservation {
            reservation.mark_written(self.weight_bytes + kv_bytes);
        }
    }
}

/// Memory of an instance in bytes, under the Batch Manager's JSON names.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct MemoryUsage {
    /// Weights and KV cache in host memory.
    #[serde(rename = "Runtime CPU Memory Usage")]
    pub host_bytes: u64,
    /// Weights and KV cache in GPU memory.
    #[serde(rename = "Runtime GPU Memory Usage")]
    pub gpu_bytes: u64,
    /// Pinned host memory for KV cache blocks.
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

#[cfg(test)]
mod tests {
    use super::*;

    /// Takes half of what is left, as a KV cache does.
    fn half(left: Option<u64>) -> Result<(u64, u64), ()> {
        let half = left.expect("known") / 2;
        Ok((half, half))
    }

    #[test]
    fn reserved_memory_is_not_given_to_others() {
        static RESERVATIONS: Reservations = Reservations(Mutex::new(0));
        let system = || Some(1000);
        let (first, reservation) = RESERVATIONS.reserve(system, half).expect("sized");
        let (second, _other) = RESERVATIONS.reserve(system, half).expect("sized");
        assert_eq!((first, second), (500, 250));
        drop(reservation);
        let (third, _) = RESERVATIONS.reserve(system, half).expect("sized");
        assert_eq!(third, 375, "750 are left");
    }

    #[test]
    fn written_memory_is_not_counted_twice() {
        static RESERVATIONS: Reservations = Reservations(Mutex::new(0));
        let (_, mut reservation) = RESERVATIONS.reserve(|| Some(1000), half).expect("sized");
        for written in [200, 100, 200] {
            reservation.mark_written(written);
        }
        // The system counts them as used.
        let (next, _) = RESERVATIONS.reserve(|| Some(800), half).expect("sized");
        assert_eq!(next, 250);
        reservation.mark_written(9999);
        drop(reservation);
        assert_eq!(*RESERVATIONS.0.lock(), 0);
    }

    #[test]
    fn an_instance_has_written_its_weights_and_its_peak_of_used_blocks() {
        static RESERVATIONS: Reservations = Reservations(Mutex::new(0));
        let (_, reservation) = RESERVATIONS
            .reserve(|| None, |_| Ok::<_, ()>(((), 1000)))
            .expect("sized");
        let mut memory = InstanceMemory::new(reservation, 400, 10);
        assert_eq!(*RESERVATIONS.0.lock(), 600);
        for (blocks, reserved) in [(7, 530), (3, 530), (9, 510)] {
            memory.mark_used(Blocks(blocks));
            assert_eq!(*RESERVATIONS.0.lock(), reserved);
        }
        assert_eq!(memory.usage().host_bytes, 1000);
    }

    #[test]
    fn a_failed_load_reserves_nothing() {
        static RESERVATIONS: Reservations = Reservations(Mutex::new(0));
        let refused = RESERVATIONS.reserve(|| Some(1000), |_| Err::<((), u64), _>("too small"));
        assert_eq!(refused.err(), Some("too small"));
        assert_eq!(*RESERVATIONS.0.lock(), 0);
    }

    #[test]
    fn reservations_may_exceed_what_the_system_has() {
        static RESERVATIONS: Reservations = Reservations(Mutex::new(0));
        let all = |_| Ok::<_, ()>(((), 900));
        let (_, _first) = RESERVATIONS.reserve(|| Some(1000), all).expect("sized");
        let (left, _second) = RESERVATIONS
            .reserve(|| Some(500), |left| Ok::<_, ()>((left, 0)))
            .expect("sized");
        assert_eq!(left, Some(0));
    }
}
