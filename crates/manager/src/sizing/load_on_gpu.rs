//! Sizes an instance on a GPU, or on several, and loads its runner.

use std::fmt::Display;
use std::path::Path;

use parking_lot::Mutex;

use super::configured_model::ConfiguredModel;
use super::engine_config::engine_config_within;
use super::gpu_memory::GpuMemory;
use super::host_memory::{self, InstanceMemory};
use super::loading::{
    LoadedRunner, available, check_host_memory, connect_ranks, host_bytes, kv_bytes, limits,
    rank_limits, state_bytes,
};
use super::rank_gpus::rank_gpus;
use inflight_base::LoadError;
use inflight_collective::Grid;
use inflight_config::{ModelConfig, Settings};
use inflight_device_cuda::CudaOptions;
use inflight_engine::EngineConfig;
use inflight_machines::{lead_on_gpus, num_step_bytes};
use inflight_runner::spec::{LayerSpec, ModelSpec};
use inflight_runner::{AdapterRoom, ModelSource};

/// One instance after the other: what is free must not change between the question and the allocation.
pub(super) fn load_on_gpu(
    config: &ModelConfig,
    model: &ConfiguredModel<'_>,
    source: &ModelSource,
    gpu: usize,
    adapters: AdapterRoom,
    rank_program: &Path,
) -> Result<LoadedRunner, LoadError> {
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
    let _turn = ONE_AT_A_TIME.lock();
    let num_ranks = model.grid().num_ranks();
    let mut ranks = match num_ranks {
        1 => None,
        _ => Some(connect_ranks(&config.settings, model.grid(), rank_program)?),
    };
    let gpus = rank_gpus(&config.settings, gpu, ranks.as_mut())?;
    let options = CudaOptions {
        rank_gpus: gpus.iter().map(|it| it.gpu).collect(),
        ..cuda_options(&config.settings, gpu)
    };
    let weight_bytes = bytes_of_rank(model.num_weight_bytes()?, source.spec(), model.grid());
    let mut memory = GpuMemory::least_of(&gpus);
    memory.weight_bytes = weight_bytes;
    let adapters = adapters_on_gpu(&config.settings, adapters, memory.left_bytes());
    let sized = |memory: &GpuMemory| {
        engine_config_within(config, model, Some(memory.left_bytes()), Some(memory))
    };
    // The activations of a step come first, and how many there are is known from the configuration without them.
    let largest = limits(model, &sized(&memory)?, adapters);
    memory.step_bytes = num_step_bytes(source, &largest, &options)?;
    let engine = sized(&memory)?;
    let of_all = |of_rank: u64| num_ranks as u64 * of_rank;
    let on_this_host = |of_rank: u64| match &ranks {
        None => of_rank,
        Some(ranks) => ranks.bytes_of_own_host(of_all(of_rank)),
    };
    let pinned_bytes = on_this_host(host_bytes(model, &engine));
    let gpu_bytes =
        on_this_host(weight_bytes + kv_bytes(model, &engine) + state_bytes(model, &engine));
    let ((), reservation) = host_memory::reserve(|free| {
        let (available_bytes, limit) = available(ranks.as_ref(), free);
        let limit = limit.as_ref().map(|memory| memory as &dyn Display);
        check_host_memory(&config.settings, num_ranks, available_bytes, limit)?;
        Ok::<_, LoadError>(((), pinned_bytes))
    })?;
    let limits = limits(model, &engine, adapters);
    let (runner, rank_watch) = match ranks {
        None => (
            inflight_machines::load_on_gpu(source, limits, &options)?,
            None,
        ),
        Some(ranks) => {
            let time_limits = rank_limits(&config.settings);
            let (runner, watch) = lead_on_gpus(ranks, source, limits, &options, time_limits)?;
            (runner, Some(watch))
        }
    };
    let plan_ahead = engine.plan_ahead && runner.can_run_ahead();
    if engine.plan_ahead && !plan_ahead {
        let reason = match num_ranks {
            1 => format!("the vocabulary is too large for GPU {gpu} to sample from"),
            _ => "only rank 0 has sampled tokens".to_owned(),
        };
        log::warn!(
            "enable_trt_overlap is true and has no effect: {reason}, so that the host has to know the tokens of a step \
             before the next one; leave it out"
        );
    }
    // The system counts pinned memory as used from the beginning.
    drop(reservation);
    Ok(LoadedRunner {
        runner,
        rank_watch,
        memory: InstanceMemory::on_gpu(gpu_bytes, pinned_bytes),
        kv_file: None,
        adapters,
        config: EngineConfig {
            plan_ahead,
            ..engine
        },
    })
}

/// Bytes of the weights of any of the ranks, at most, where all have so many.
fn bytes_of_rank(weight_bytes: u64, spec: &ModelSpec, grid: Grid) -> u64 {
    let num_ranks = grid.num_ranks() as u64;
    if num_ranks == 1 {
        return weight_bytes;
    }
    // Shares differ by a token, a head, or the heads and inputs of a group of quantised weights, and each has the
    // norms.
    let even = weight_bytes.div_ceil(num_ranks) + weight_bytes / 32;
    if grid.num_stages == 1 {
        return even;
    }
    // A stage begins and ends with whole layers, and the first one has the embedding besides.
    let layers = || spec.layers.iter().map(LayerSpec::num_weights);
    let num_weights = layers().sum::<u64>() + spec.num_output_weights();
    let largest = u128::from(layers().max().unwrap_or(0)) * u128::from(weight_bytes)
        / u128::from(num_weights.max(1));
    let embedding = 2 * spec.num_output_weights();
    let uneven = largest as u64 + embedding;
    (even + uneven.div_ceil(grid.ranks_per_stage as u64)).min(weight_bytes + embedding)
}

/// The part of the room for adapters that a GPU gives them, whose weights leave `free_bytes`. The rule comes from
/// TensorRT-LLM's cache (`peftCacheManager.cpp`): a number of rows is taken instead of the fraction.
fn adapters_on_gpu(settings: &Settings, adapters: AdapterRoom, free_bytes: u64) -> AdapterRoom {
    if settings.lora_cache_num_device_module_layer != 0 || adapters.page_bytes == 0 {
        return adapters;
    }
    let max_bytes = free_bytes as f64 * settings.lora_cache_gpu_memory_fraction;
    let max_pages = u32::try_from(max_bytes as u64 / adapters.page_bytes).unwrap_or(u32::MAX);
    if max_pages < adapters.num_running_pages {
        log::info!(
            "adapters take {max_pages} pages of {} bytes of GPU memory: lora_cache_gpu_memory_fraction ({}) of the \
             {free_bytes} bytes that the weights leave",
            adapters.page_bytes,
            settings.lora_cache_gpu_memory_fraction,
        );
    }
    AdapterRoom {
        num_running_pages: adapters.num_running_pages.min(max_pages),
        ..adapters
    }
}

fn cuda_options(settings: &Settings, gpu: usize) -> CudaOptions {
    CudaOptions {
        gpu,
        rank_gpus: Vec::new(),
        num_threads: settings.num_threads,
        deterministic: settings.deterministic,
        fp8_activations: settings.fp8_activations,
        max_graphs: match settings.cuda_graph_mode {
            true => settings.cuda_graph_cache_size as usize,
            false => 0,
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_largest_stage_has_room() {
        let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures");
        for name in ["llama2", "qwen3-windows", "deepseek-v3"] {
            let source = ModelSource::open(&fixtures.join(name)).expect("the checkpoint opens");
            let grid = |num_stages, ranks_per_stage| Grid {
                num_stages,
                ranks_per_stage,
            };
            let bytes = |grid: Grid| {
                let all = source.num_weight_bytes_in(None, grid.num_stages);
                bytes_of_rank(all.expect("its tensors"), source.spec(), grid)
            };
            let whole = bytes(grid(1, 1));
            for num_stages in [2, source.spec().num_layers()] {
                let specs = source.specs_of_ranks(grid(num_stages, 1)).expect("stages");
                let layers = specs.iter().map(|spec| {
                    let layers = spec.layers.iter().map(LayerSpec::num_weights);
                    2 * layers.sum::<u64>()
                });
                let largest = layers.max().expect("a stage");
                let output = 2 * source.spec().num_output_weights();
                let of_rank = bytes(grid(num_stages, 1));
                assert!(of_rank >= largest.max(output), "{name}: {of_rank}");
                assert!(of_rank <= whole + output, "{name}: {of_rank} of {whole}");
                assert!(bytes(grid(num_stages, 2)) < of_rank, "{name}");
            }
        }
    }

    #[test]
    fn adapters_on_a_gpu_take_a_fraction_of_what_the_weights_leave_or_rows() {
        let room = AdapterRoom {
            max_rank: 64,
            num_bytes: 100_000,
            page_bytes: 1000,
            num_running_pages: 100,
        };
        let pages = |parameters: &[(&str, &str)], free_bytes| {
            let settings = Settings::parse(parameters.iter().copied()).expect("valid");
            adapters_on_gpu(&settings, room, free_bytes).num_running_pages
        };
        assert_eq!(pages(&[], 1_000_000), 50);
        assert_eq!(
            pages(&[], 1_000_000_000),
            100,
            "never more than on the host"
        );
        let half = ("lora_cache_gpu_memory_fraction", "0.5");
        assert_eq!(pages(&[half], 21_999), 10);
        assert_eq!(pages(&[half], 0), 0);
        let rows = ("lora_cache_num_device_module_layer", "7");
        assert_eq!(
            pages(&[half, rows], 21_999),
            100,
            "as many as the rows gave"
        );
    }
}
