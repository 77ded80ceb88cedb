//! What a rank is told before it loads its share of the model.

use std::io;
use std::num::NonZeroU32;
use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::rank_device::RankDeviceOptions;
use super::rank_gpu::GpuChoice;
use inflight_base::{BlockSize, Blocks, Tokens};
use inflight_collective::{Channel, Grid};
use inflight_device::{
    KvDtype, LayerGroups, available_host_bytes, available_process_bytes, host_id,
};
use inflight_engine::MAX_KV_GROUPS;
use inflight_numbers::CodeBits;
use inflight_runner::{AdapterRoom, AttentionWindows, RunnerLimits, WeightPrecision};

/// The version of this library, and a hash of its sources: processes of different builds may compute different bits,
/// and understand each other wrong.
pub(super) const BUILD: &str = concat!(env!("CARGO_PKG_VERSION"), " ", env!("INFLIGHT_BUILD"));

/// What a process sends first. Only the build is certain to be there: others may say something else.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Greeting {
    pub(super) build: String,
    #[serde(default)]
    pub(super) host: HostMemory,
}

/// The host of a rank, and the memory that the rank may have there.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct HostMemory {
    /// See [`host_id`].
    pub(super) id: String,
    /// Free memory, if the system tells.
    pub(super) available_bytes: Option<u64>,
    /// What the process of the rank may take of it, if that is limited.
    #[serde(default)]
    pub(super) limit_bytes: Option<u64>,
}

impl HostMemory {
    /// The host of this process.
    pub(super) fn own() -> Self {
        Self {
            id: host_id(),
            available_bytes: available_host_bytes(),
            limit_bytes: available_process_bytes(),
        }
    }
}

/// What it gets then, until it has a task.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Instruction {
    /// To answer with this GPU, or why it cannot have it: a `Result<RankGpu, String>`.
    ReportGpu(GpuChoice),
    /// To load its share of a model.
    Load(Box<Task>),
}

/// A share of a model.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Task {
    pub(super) rank: usize,
    num_stages: usize,
    ranks_per_stage: usize,
    /// The checkpoint.
    pub(super) folder: PathBuf,
    /// Its files, as rank 0 has opened them.
    pub(super) stamps: String,
    /// Of loading, and of an operation between ranks after that.
    pub(super) load_limit: Duration,
    pub(super) time_limit: Duration,
    pub(super) device: RankDeviceOptions,
    limits: Limits,
}

/// What it sends then, when it takes part in the operations between ranks, and once more if it has failed.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Report {
    Ready,
    Failed(String),
}

/// [`RunnerLimits`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Limits {
    max_num_tokens: u32,
    max_num_requests: u32,
    num_state_rows: u32,
    num_state_snapshots: u32,
    num_host_state_snapshots: u32,
    max_draft_tokens: u32,
    max_sampled_rows: u32,
    max_seq_len: u32,
    block_size: u32,
    num_blocks: u32,
    num_host_blocks: u32,
    /// The group of each layer.
    layer_groups: Option<Vec<usize>>,
    kv_dtype: String,
    weights: Option<Weights>,
    windows: Vec<NonZeroU32>,
    num_sinks: u32,
    shifts_sinks: bool,
    adapters: Room,
}

/// [`AdapterRoom`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Room {
    max_rank: usize,
    num_bytes: u64,
    page_bytes: u64,
    num_running_pages: u32,
}

/// [`WeightPrecision`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Weights {
    /// Of integers; `None`: floats.
    num_bits: Option<u8>,
    group_size: usize,
}

impl Weights {
    fn new(precision: WeightPrecision) -> Self {
        Self {
            num_bits: match precision.bits {
                CodeBits::Four => Some(4),
                CodeBits::Eight => Some(8),
                CodeBits::Fp8 => None,
            },
            group_size: precision.group_size,
        }
    }

    fn precision(self) -> Option<WeightPrecision> {
        Some(WeightPrecision {
            bits: match self.num_bits {
                Some(4) => CodeBits::Four,
                Some(8) => CodeBits::Eight,
                Some(_) => return None,
                None => CodeBits::Fp8,
            },
            group_size: self.group_size,
        })
    }
}

impl Task {
    /// The task of rank 1, for runners with these limits.
    pub(super) fn new(
        grid: Grid,
        folder: PathBuf,
        stamps: String,
        limits: &RunnerLimits,
        device: RankDeviceOptions,
        [load_limit, time_limit]: [Duration; 2],
    ) -> Self {
        Self {
            rank: 1,
            num_stages: grid.num_stages,
            ranks_per_stage: grid.ranks_per_stage,
            folder,
            stamps,
            load_limit,
            time_limit,
            limits: Limits {
                max_num_tokens: limits.max_num_tokens.0,
                max_num_requests: limits.max_num_requests,
                num_state_rows: limits.num_state_rows,
                num_state_snapshots: limits.num_state_snapshots,
                num_host_state_snapshots: limits.num_host_state_snapshots,
                max_draft_tokens: limits.max_draft_tokens,
                max_sampled_rows: limits.max_sampled_rows.0,
                max_seq_len: limits.max_seq_len.0,
                block_size: limits.block_size.tokens().0,
                num_blocks: limits.num_blocks.0,
                num_host_blocks: limits.num_host_blocks.0,
                layer_groups: limits.layer_groups.as_ref().map(|it| it.groups().collect()),
                kv_dtype: limits.kv_dtype.as_str().to_owned(),
                weights: limits.weights.map(Weights::new),
                windows: limits.attention.windows.clone(),
                num_sinks: limits.attention.num_sinks.0,
                shifts_sinks: limits.attention.shifts_sinks,
                adapters: Room {
                    max_rank: limits.adapters.max_rank,
                    num_bytes: limits.adapters.num_bytes,
                    page_bytes: limits.adapters.page_bytes,
                    num_running_pages: limits.adapters.num_running_pages,
                },
            },
            device,
        }
    }

    /// All ranks; `None` if they are none.
    pub(super) fn grid(&self) -> Option<Grid> {
        let grid = Grid {
            num_stages: self.num_stages,
            ranks_per_stage: self.ranks_per_stage,
        };
        grid.checked_num_ranks().map(|_| grid)
    }

    /// The limits; `None` if they are none.
    pub(super) fn limits(&self) -> Option<RunnerLimits> {
        let limits = &self.limits;
        let mut dtypes = KvDtype::ALL.into_iter();
        Some(RunnerLimits {
            max_num_tokens: Tokens(limits.max_num_tokens),
            max_num_requests: limits.max_num_requests,
            num_state_rows: limits.num_state_rows,
            num_state_snapshots: limits.num_state_snapshots,
            num_host_state_snapshots: limits.num_host_state_snapshots,
            max_draft_tokens: limits.max_draft_tokens,
            max_sampled_rows: Tokens(limits.max_sampled_rows),
            max_seq_len: Tokens(limits.max_seq_len),
            block_size: BlockSize::new(limits.block_size)?,
            num_blocks: Blocks(limits.num_blocks),
            num_host_blocks: Blocks(limits.num_host_blocks),
            layer_groups: match &limits.layer_groups {
                Some(groups) => Some(layer_groups(groups)?),
                None => None,
            },
            kv_dtype: dtypes.find(|dtype| dtype.as_str() == limits.kv_dtype)?,
            weights: match limits.weights {
                Some(weights) => Some(weights.precision()?),
                None => None,
            },
            attention: AttentionWindows {
                windows: limits.windows.clone(),
                num_sinks: Tokens(limits.num_sinks),
                shifts_sinks: limits.shifts_sinks,
            },
            adapters: AdapterRoom {
                max_rank: limits.adapters.max_rank,
                num_bytes: limits.adapters.num_bytes,
                page_bytes: limits.adapters.page_bytes,
                num_running_pages: limits.adapters.num_running_pages,
            },
        })
    }
}

/// The groups of layers; `None` if they are none.
fn layer_groups(groups: &[usize]) -> Option<LayerGroups> {
    let is_known = |group: &usize| *group < MAX_KV_GROUPS;
    let groups = groups
        .iter()
        .all(is_known)
        .then(|| LayerGroups::new(groups))?;
    (groups.num_layers() > 0).then_some(groups)
}

/// Sends a message of this kind.
///
/// # Errors
/// As [`Channel::send`].
pub(super) fn send(channel: &mut dyn Channel, message: &impl Serialize) -> io::Result<()> {
    channel.send(&serde_json::to_vec(message)?)
}

/// The next message of this kind; `None` if there will be none.
///
/// # Errors
/// As [`Channel::receive`], or the message is of another kind.
pub(super) fn receive<T: for<'de> Deserialize<'de>>(
    channel: &mut dyn Channel,
) -> io::Result<Option<T>> {
    let mut message = Vec::new();
    match channel.receive(&mut message)? {
        true => Ok(Some(serde_json::from_slice(&message)?)),
        false => Ok(None),
    }
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroUsize;

    use super::*;
    use crate::rank_device::{OpenedOptions, RankDevice};
    use inflight_collective::Link;
    use inflight_device_cpu::{Cpu, CpuOptions, Simd};
    use inflight_engine::EngineConfig;

    #[test]
    fn a_task_says_all_that_a_runner_depends_on() {
        let limits = RunnerLimits {
            kv_dtype: KvDtype::Int8,
            weights: Some(WeightPrecision::new(CodeBits::Four)),
            num_host_blocks: Blocks(7),
            num_state_snapshots: 5,
            num_host_state_snapshots: 4,
            max_draft_tokens: 3,
            layer_groups: Some(LayerGroups::new(&[1, 0, 1, 2])),
            adapters: AdapterRoom {
                max_rank: 16,
                num_bytes: 1 << 40,
                page_bytes: 4096,
                num_running_pages: 9,
            },
            attention: AttentionWindows {
                windows: vec![NonZeroU32::new(16).expect("not zero")],
                num_sinks: Tokens(4),
                shifts_sinks: true,
            },
            ..RunnerLimits::of(&EngineConfig::default())
        };
        let options = CpuOptions {
            num_threads: NonZeroUsize::new(3),
            simd: Some(Simd::detect()),
            rank_cpus: ["0", "1,3-4"]
                .map(|cpus| cpus.parse().expect("CPUs"))
                .to_vec(),
            deterministic: true,
        };
        let seconds = [9, 5].map(Duration::from_secs);
        let grid = Grid {
            num_stages: 2,
            ranks_per_stage: 3,
        };
        let task = Task::new(
            grid,
            "folder".into(),
            "stamps".into(),
            &limits,
            Cpu::of_rank(&options, 1),
            seconds,
        );
        let (mut here, mut there) = Link::pair().expect("a connection");
        send(&mut here, &task).expect("it is sent");
        let read: Task = receive(&mut there)
            .expect("a message")
            .expect("one is there");
        assert_eq!(read, task);
        assert_eq!(read.grid(), Some(grid));
        assert_eq!(read.limits(), Some(limits));
        let Some(OpenedOptions::Cpu(read)) = read.device.options() else {
            panic!("it is a CPU");
        };
        assert_eq!(
            (read.num_threads, read.simd, &read.rank_cpus[..]),
            (options.num_threads, options.simd, &options.rank_cpus[1..])
        );
        assert!(read.deterministic);
        drop(here);
        assert_eq!(receive::<Task>(&mut there).expect("the end"), None);
    }

    #[cfg(feature = "cuda")]
    #[test]
    fn the_task_of_a_gpu_names_the_gpu_of_its_rank() {
        use inflight_device_cuda::{Cuda, CudaOptions};

        let options = CudaOptions {
            gpu: 3,
            rank_gpus: vec![3, 1],
            deterministic: true,
            max_graphs: 5,
            ..CudaOptions::default()
        };
        let Some(OpenedOptions::Gpu(second)) = Cuda::of_rank(&options, 1).options() else {
            panic!("it is a GPU");
        };
        assert_eq!((second.gpu, &second.rank_gpus), (1, &options.rank_gpus));
        assert!(second.deterministic && second.max_graphs == 5);
    }
}
