//! The GPU of a rank, which only a process of its host can ask.

use serde::{Deserialize, Serialize};

use crate::base::LoadError;
use crate::device::cuda::{free_memory_bytes, num_gpus, uuid};

/// Which GPU a rank is to have, as the driver of its host counts them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum GpuChoice {
    /// This one.
    Given(usize),
    /// This one, modulo the number that its process sees: a batch system may show each process no other GPU than its own.
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
    pub fn of(choice: GpuChoice) -> Result<Self, LoadError> {
        let gpu = match choice {
            GpuChoice::Given(gpu) => gpu,
            GpuChoice::Wrapped(gpu) => gpu.checked_rem(num_gpus()).unwrap_or(gpu),
        };
        Ok(Self {
            gpu,
            uuid: uuid(gpu)?,
            free_bytes: free_memory_bytes(gpu)?,
        })
    }
}
