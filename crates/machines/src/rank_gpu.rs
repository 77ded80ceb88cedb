//! The GPU of a rank, which only a process of its host can ask.

use serde::{Deserialize, Serialize};

use inflight_base::LoadError;
#[cfg(feature = "cuda")]
use inflight_device_cuda::{num_gpus, uuid_and_free_bytes};

/// Which GPU a rank is to have, as the driver of its host counts them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum GpuChoice {
    /// This one.
    Given(usize),
    /// This one, modulo the number that its process sees: a batch system may show each process no other GPU than its
    /// own.
    Wrapped(usize),
}

/// The GPU of a rank.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RankGpu {
    /// Which one, as the driver of its host counts them.
    pub gpu: usize,
    /// The same on all hosts.
    pub uuid: String,
    /// Memory that nobody uses.
    pub free_bytes: u64,
}

impl RankGpu {
    /// Asks the driver.
    ///
    /// # Errors
    /// There is no such GPU, or it cannot be opened.
    #[cfg(feature = "cuda")]
    pub fn of(choice: GpuChoice) -> Result<Self, LoadError> {
        let gpu = match choice {
            GpuChoice::Given(gpu) => gpu,
            GpuChoice::Wrapped(gpu) => gpu.checked_rem(num_gpus()).unwrap_or(gpu),
        };
        let (uuid, free_bytes) = uuid_and_free_bytes(gpu)?;
        Ok(Self {
            gpu,
            uuid,
            free_bytes,
        })
    }

    /// Refuses: this build has no CUDA.
    #[cfg(not(feature = "cuda"))]
    pub fn of(_choice: GpuChoice) -> Result<Self, LoadError> {
        Err(LoadError::Resource(
            "this build of the library has no CUDA: build it with the feature `cuda`".to_owned(),
        ))
    }
}

/// The GPUs of ranks on these hosts, if those of a host have one after the other: from `own` on at the host of rank 0,
/// from 0 on at others.
pub(super) fn gpus_by_host(hosts: &[&str], own: usize) -> Vec<usize> {
    let gpu_of = |(rank, host): (usize, &&str)| {
        let first = if *host == hosts[0] { own } else { 0 };
        first + hosts[..rank].iter().filter(|it| *it == host).count()
    };
    hosts.iter().enumerate().map(gpu_of).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_of_a_host_have_one_gpu_after_the_other() {
        assert_eq!(gpus_by_host(&["a", "a", "a"], 1), [1, 2, 3]);
        assert_eq!(gpus_by_host(&["a", "a", "b", "b"], 0), [0, 1, 0, 1]);
        assert_eq!(gpus_by_host(&["a", "b", "a", "c", "b"], 2), [2, 0, 3, 0, 1]);
    }
}
