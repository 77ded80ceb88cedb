//! Free memory of GPUs, and what weights and steps take of it.

use std::fmt::{self, Display, Formatter};

use crate::base::LoadError;
use crate::device::cuda::free_memory_bytes;

/// Memory of the GPU with the least free memory.
#[derive(Clone, Copy, Debug)]
pub struct GpuMemory {
    gpu: usize,
    /// Free before the model is loaded.
    free_bytes: u64,
    /// Weights of a rank.
    pub weight_bytes: u64,
    /// Buffers of the largest step, including adapters and NCCL; 0 until it is known.
    pub step_bytes: u64,
    num_gpus: usize,
}

impl GpuMemory {
    /// Memory of one GPU.
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

    /// The least of this GPU and those of all ranks, since all ranks have the same number of blocks.
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

    /// Memory left after weights and steps. The KV cache takes a fraction of it.
    pub fn left_bytes(&self) -> u64 {
        let taken = self.weight_bytes.saturating_add(self.step_bytes);
        self.free_bytes.saturating_sub(taken)
    }
}

/// The reason in a load error: the GPU that limits the KV cache.
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
