//! The devices that ranks compute with, and what their processes are told of them.

use std::num::NonZeroUsize;

use serde::{Deserialize, Serialize};

use inflight_base::CpuSet;
use inflight_device::Device;
use inflight_device_cpu::{Cpu, CpuOptions, Simd};
#[cfg(feature = "cuda")]
use inflight_device_cuda::{Cuda, CudaOptions};

/// A device that several ranks have one each of.
pub trait RankDevice: Device {
    /// The device of a rank, given the options of all.
    fn of_rank(options: &Self::Options, rank: usize) -> RankDeviceOptions;
}

/// The device of a rank.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum RankDeviceOptions {
    /// A share of the CPUs.
    Cpu {
        /// Its threads.
        num_threads: Option<NonZeroUsize>,
        /// The name of its instruction set.
        simd: Option<String>,
        /// Its CPUs, if it is to use only some.
        cpus: Option<String>,
        /// As in [`CpuOptions`].
        deterministic: bool,
    },
    /// A GPU.
    Gpu {
        /// Which one, as the driver counts them.
        gpu: usize,
        /// How many there are in all ranks.
        rank_gpus: Vec<usize>,
        /// Threads of its host.
        num_threads: Option<NonZeroUsize>,
        /// As in `CudaOptions`, as are those that follow.
        deterministic: bool,
        /// Whether activations are rounded.
        fp8_activations: bool,
        /// Graphs that are kept.
        max_graphs: usize,
    },
}

/// The options of the device of a rank.
pub(super) enum OpenedOptions {
    Cpu(CpuOptions),
    #[cfg(feature = "cuda")]
    Gpu(CudaOptions),
}

impl RankDeviceOptions {
    /// The options for opening the device; `None` if they are none.
    pub(super) fn options(&self) -> Option<OpenedOptions> {
        Some(match self {
            Self::Cpu {
                num_threads,
                simd,
                cpus,
                deterministic,
            } => {
                let simd = simd.as_deref().map(str::parse::<Simd>);
                let cpus = cpus.as_deref().map(str::parse::<CpuSet>);
                OpenedOptions::Cpu(CpuOptions {
                    num_threads: *num_threads,
                    simd: simd.transpose().ok()?,
                    rank_cpus: Vec::from_iter(cpus.transpose().ok()?),
                    deterministic: *deterministic,
                })
            }
            #[cfg(not(feature = "cuda"))]
            Self::Gpu { .. } => return None,
            #[cfg(feature = "cuda")]
            Self::Gpu {
                gpu,
                rank_gpus,
                num_threads,
                deterministic,
                fp8_activations,
                max_graphs,
            } => OpenedOptions::Gpu(CudaOptions {
                gpu: *gpu,
                rank_gpus: rank_gpus.clone(),
                num_threads: *num_threads,
                deterministic: *deterministic,
                fp8_activations: *fp8_activations,
                max_graphs: *max_graphs,
            }),
        })
    }
}

impl RankDevice for Cpu {
    fn of_rank(options: &CpuOptions, rank: usize) -> RankDeviceOptions {
        RankDeviceOptions::Cpu {
            num_threads: options.num_threads,
            simd: options.simd.map(|simd| simd.to_string()),
            cpus: options.rank_cpus.get(rank).map(CpuSet::to_string),
            deterministic: options.deterministic,
        }
    }
}

#[cfg(feature = "cuda")]
impl RankDevice for Cuda {
    /// # Panics
    ///
    /// There is no GPU for the rank.
    fn of_rank(options: &CudaOptions, rank: usize) -> RankDeviceOptions {
        RankDeviceOptions::Gpu {
            gpu: options.rank_gpus[rank],
            rank_gpus: options.rank_gpus.clone(),
            num_threads: options.num_threads,
            deterministic: options.deterministic,
            fp8_activations: options.fp8_activations,
            max_graphs: options.max_graphs,
        }
    }
}
