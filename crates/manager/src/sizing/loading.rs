//! Loading a runner: the parts that CPUs and GPUs share.

use std::fmt::Display;
use std::path::Path;
use std::time::Duration;

use super::configured_model::ConfiguredModel;
use super::engine_config::{ModelDimensions, num_states};
use super::host_memory::{FreeMemory, InstanceMemory};
use inflight_base::LoadError;
use inflight_collective::{Grid, MPI_LIBRARY, MpiWorld};
use inflight_config::{RankTransportKind, Settings};
use inflight_engine::EngineConfig;
use inflight_machines::{RankConnections, RankLimits, RankMemory, RankTransport, RankWatch};
use inflight_runner::{AdapterRoom, KvFile, Runner, RunnerLimits};

/// A runner, the engine configuration that it was sized for, and the memory that both may use.
pub struct LoadedRunner {
    /// The engine's configuration.
    pub config: EngineConfig,
    /// The runner, with its weights loaded.
    pub runner: Box<dyn Runner>,
    /// Tells whether the processes of the other ranks live; `None` if there are none.
    pub rank_watch: Option<RankWatch>,
    /// The memory reserved for weights and KV cache.
    pub memory: InstanceMemory,
    /// Where KV cache blocks are kept between loads.
    pub kv_file: Option<KvFile>,
    /// Memory for adapters.
    pub adapters: AdapterRoom,
}

/// Host memory that is available to all ranks together, or to the only one, and the limit that ranks have.
pub(super) fn available(
    ranks: Option<&RankConnections>,
    free: FreeMemory,
) -> (Option<u64>, Option<RankMemory>) {
    match ranks {
        None => (free.available_bytes(), None),
        Some(ranks) => {
            let memory = ranks.memory(free.host_bytes, free.process_bytes);
            (memory.map(|memory| memory.num_bytes), memory)
        }
    }
}

/// Refuses more host memory for KV cache blocks than there is: the machine would kill a process later. Each of
/// `num_gpus` GPUs has as much as the setting says; of the ranks on CPUs, for which it is 1, all have it together.
/// `limit` says which rank can have the least.
pub(super) fn check_host_memory(
    settings: &Settings,
    num_gpus: usize,
    available_bytes: Option<u64>,
    limit: Option<&dyn Display>,
) -> Result<(), LoadError> {
    let num_bytes = settings.kv_cache_host_memory_bytes;
    let Some(available) = available_bytes else {
        return Ok(());
    };
    if u128::from(num_bytes) * num_gpus as u128 <= u128::from(available) {
        return Ok(());
    }
    let of_each = match num_gpus {
        1 => String::new(),
        _ => format!(" for each of {num_gpus} GPUs"),
    };
    let limit = limit.map_or(String::new(), |limit| format!(": {limit}"));
    Err(LoadError::Config {
        problem: format!(
            "kv_cache_host_memory_bytes is {num_bytes}{of_each}, and {available} bytes of host memory are available{limit}"
        ),
        remedy: "lower it".to_owned(),
    })
}

pub(super) fn host_bytes(model: &ConfiguredModel<'_>, engine: &EngineConfig) -> u64 {
    let of_states = model.state_bytes().unwrap_or(0) * u64::from(engine.num_host_state_snapshots);
    u64::from(engine.num_host_blocks.0) * bytes_per_block(model, engine) + of_states
}

pub(super) fn kv_bytes(model: &ConfiguredModel<'_>, engine: &EngineConfig) -> u64 {
    u64::from(engine.num_blocks.0) * bytes_per_block(model, engine)
}

/// Bytes of the recurrent states of all sequences.
pub(super) fn state_bytes(model: &ConfiguredModel<'_>, engine: &EngineConfig) -> u64 {
    let of_one = model.state_bytes().unwrap_or(0);
    let of_sequences = num_states(engine.num_state_rows(), engine.speculation.as_ref());
    of_one.saturating_mul(of_sequences + u64::from(engine.num_state_snapshots))
}

pub(super) fn bytes_per_block(model: &ConfiguredModel<'_>, engine: &EngineConfig) -> u64 {
    let groups = model.layer_groups(engine.max_seq_len, engine.paged_kv);
    model.kv_bytes_per_block(engine.block_size, &groups)
}

pub(super) fn limits(
    model: &ConfiguredModel<'_>,
    engine: &EngineConfig,
    adapters: AdapterRoom,
) -> RunnerLimits {
    let groups = model.layer_groups(engine.max_seq_len, engine.paged_kv);
    let layers = groups.layers();
    RunnerLimits {
        layer_groups: (layers.num_groups() > 1).then(|| layers.clone()),
        adapters,
        kv_dtype: model.kv_dtype(),
        weights: model.weights(),
        attention: model.attention(),
        ..RunnerLimits::of(engine)
    }
}

/// Connects with the other ranks.
pub(super) fn connect_ranks(
    settings: &Settings,
    grid: Grid,
    rank_program: &Path,
) -> Result<RankConnections, LoadError> {
    let mpi_library = rank_program.with_file_name(MPI_LIBRARY);
    let transport = rank_transport(settings, rank_program, &mpi_library)?;
    transport.connect(grid, rank_limits(settings).load)
}

/// How the ranks reach each other: processes of this program, or of `mpirun` by this plug-in.
pub(crate) fn rank_transport(
    settings: &Settings,
    rank_program: &Path,
    mpi_library: &Path,
) -> Result<RankTransport, LoadError> {
    Ok(match settings.rank_transport {
        RankTransportKind::Processes => RankTransport::Processes(rank_program.to_owned()),
        RankTransportKind::Mpi => {
            let world = MpiWorld::join(mpi_library, Some(rank_limits(settings).load));
            let world = world.map_err(|error| LoadError::Resource(error.to_string()))?;
            RankTransport::Mpi(world)
        }
    })
}

pub(crate) fn rank_limits(settings: &Settings) -> RankLimits {
    let seconds = |seconds: u32| Duration::from_secs(seconds.into());
    RankLimits {
        load: seconds(settings.rank_load_timeout_seconds),
        step: seconds(settings.rank_timeout_seconds),
    }
}
