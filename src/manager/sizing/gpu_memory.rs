//! Free memory of GPUs, and what it is for besides the KV cache.

use std::fmt::{self, Display, Formatter};

use crate::base::LoadError;
use crate::device::cuda::free_memory_bytes;

/// The memory of the GPU that has the least, in bytes.
#[derive(Clone, Copy, Debug)]
pub struct GpuMemory {
    gpu: usize,
    /// What nobody uses.
    free_bytes: u64,
    /// Weights of a rank.
    pub weight_bytes: u64,
    /// The largest step, with adapters and what NCCL takes; 0 before it is known.
    pub step_bytes: u64,
    num_gpus: usize,
}

impl GpuMemory {
    /// That of a GPU.
    ///
    /// # Errors
    /// It cannot be opened.
    pub fn of(gpu: usize) -> Result<Self, LoadError> {
        Ok(Self {
            gpu,
            free_bytes: free_memory_bytes(gpu)?,
            weight_bytes: 0,
            step_bytes: 0,
            num_gpus: 1,
        })
    }

    /// That of the GPU which has the least, of those of all ranks: each has as many blocks as that one.
    ///
    /// # Errors
    /// One of them cannot be opened.
    pub fn least_of(self, rank_gpus: &[usize]) -> Result<Self, LoadError> {
        let mut least = self;
        for &gpu in rank_gpus {
            let free_bytes = free_memory_bytes(gpu)?;
            if free_bytes < least.free_bytes {
                (least.gpu, least.free_bytes) = (gpu, free_bytes);
            }
        }
        least.num_gpus = rank_gpus.len().max(1);
        Ok(least)
    }

    /// What the KV cache has a share of.
    pub fn left_bytes(&self) -> u64 {
        let taken = self.weight_bytes.saturating_add(self.step_bytes);
        self.free_bytes.saturating_sub(taken)
    }
}

/// Says what the KV cache has no more than.
impl Display for GpuMemory {
    fn fmt(&self, formatter: &mut Formatter<'_>) -> fmt::Result {
        let Self {
            gpu,
            free_bytes,
            weight_bytes,
            step_bytes,
            num_gpus,
        } = self;
        match num_gpus {
            1 => write!(formatter, "GPU {gpu} has {free_bytes} free bytes")?,
            _ => write!(
                formatter,
                "GPU {gpu} has {free_bytes} free bytes, the least of the {num_gpus} GPUs"
            )?,
        }
        write!(formatter, "; weights take {weight_bytes} of them")?;
        match step_bytes {
            0 => Ok(()),
            _ => write!(
                formatter,
                ", and steps {step_bytes}, fewer with a lower max_num_tokens"
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_names_the_gpu_and_what_takes_its_memory() {
        let memory = GpuMemory {
            gpu: 1,
            free_bytes: 1000,
            weight_bytes: 300,
            step_bytes: 90,
            num_gpus: 2,
        };
        assert_eq!(memory.left_bytes(), 610);
        assert_eq!(
            memory.to_string(),
            "GPU 1 has 1000 free bytes, the least of the 2 GPUs; weights take 300 of them, and steps 90, fewer with a lower \
             max_num_tokens"
        );
        let full = GpuMemory {
            weight_bytes: u64::MAX,
            step_bytes: 0,
            num_gpus: 1,
            ..memory
        };
        assert_eq!(full.left_bytes(), 0);
        let says = format!(
            "GPU 1 has 1000 free bytes; weights take {} of them",
            u64::MAX
        );
        assert_eq!(full.to_string(), says);
    }
}
