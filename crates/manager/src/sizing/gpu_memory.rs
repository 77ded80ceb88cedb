//! Free memory of GPUs, and what weights and steps take of it.

use std::fmt::{self, Display, Formatter};

use inflight_machines::RankGpu;

/// Memory of the GPU with the least free memory.
#[derive(Clone, Copy, Debug)]
pub struct GpuMemory {
    /// The rank whose GPU it is.
    rank: usize,
    /// The index of the GPU, as the driver of its host counts them.
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
    /// The least of the GPUs of all ranks, since all ranks have the same number of blocks.
    ///
    /// # Panics
    /// There is none.
    pub fn least_of(gpus: &[RankGpu]) -> Self {
        let of_ranks = gpus.iter().enumerate();
        let (rank, least) = of_ranks.min_by_key(|(_, it)| it.free_bytes).expect("a GPU");
        Self {
            rank,
            gpu: least.gpu,
            free_bytes: least.free_bytes,
            weight_bytes: 0,
            step_bytes: 0,
            num_gpus: gpus.len(),
        }
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
            rank,
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
                "GPU {gpu} of rank {rank} has {free_bytes} free bytes, the least of the {num_gpus} GPUs"
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
        let gpu = |gpu, free_bytes| RankGpu {
            gpu,
            uuid: gpu.to_string(),
            free_bytes,
        };
        let memory = GpuMemory {
            weight_bytes: 300,
            step_bytes: 90,
            ..GpuMemory::least_of(&[gpu(3, 2000), gpu(1, 1000)])
        };
        assert_eq!(memory.left_bytes(), 610);
        assert_eq!(
            memory.to_string(),
            "GPU 1 of rank 1 has 1000 free bytes, the least of the 2 GPUs; weights take 300 of them, and steps 90, fewer with a lower \
             max_num_tokens"
        );
        let full = GpuMemory {
            weight_bytes: u64::MAX,
            ..GpuMemory::least_of(&[gpu(1, 1000)])
        };
        assert_eq!(full.left_bytes(), 0);
        let says = format!(
            "GPU 1 has 1000 free bytes; weights take {} of them",
            u64::MAX
        );
        assert_eq!(full.to_string(), says);
    }
}
