//! Sizes an instance and loads its runner.

use std::fmt::Display;
use std::num::NonZeroUsize;
use std::path::Path;
use std::thread;

use super::configured_model::ConfiguredModel;
use super::engine_config::engine_config_within;
use super::host_memory::{self, InstanceMemory};
#[cfg(feature = "cuda")]
use super::load_on_gpu::load_on_gpu;
use super::loading::{
    LoadedRunner, available, bytes_per_block, check_host_memory, connect_ranks, host_bytes,
    kv_bytes, limits, rank_limits, state_bytes,
};
use super::rank_cpus::rank_cpus;
use crate::step_cost::measure_costs;
use inflight_base::LoadError;
use inflight_collective::{Grid, MAX_RANKS};
use inflight_config::{ModelConfig, RankCpus, Settings, WeightOnlyPrecision};
use inflight_device_cpu::{CpuOptions, Simd};
use inflight_machines::{lead_on_cpus, load_on_cpus};
use inflight_runner::{
    AdapterRoom, KvFile, ModelSource, Runner, RunnerLimits, SyntheticOptions, SyntheticRunner,
};
use inflight_threads::Topology;

/// The memory that an adapter takes at most where it is cut, by its size: both of its matrices are cut, but each only
/// where the projection is, so that tiles have copies of the other one, and rank 0 keeps what it has sent.
const ADAPTER_COPIES: u64 = 4;

/// Sizes the KV cache by the memory that is free, and loads the weights, on a GPU or on the CPU. Without a checkpoint
/// the runner is the synthetic one, which runs on the CPU; files that the configuration names are relative to `folder`,
/// the model's folder. Memory for `adapters` is left on the host, and on the GPU that they are computed on. Of several
/// ranks, all but the first are processes of `rank_program`, or of `mpirun` by the plug-in beside it.
///
/// # Errors
/// Settings that contradict each other, a checkpoint that cannot be loaded, a GPU that is not there, or memory that
/// does not suffice.
pub fn load_runner(
    config: &ModelConfig,
    source: Option<&ModelSource>,
    folder: &Path,
    gpu: Option<usize>,
    adapters: AdapterRoom,
    rank_program: &Path,
) -> Result<LoadedRunner, LoadError> {
    let model = ConfiguredModel {
        settings: &config.settings,
        source,
        gpu,
    };
    check_kv_file(&config.settings)?;
    check_ranks(&model)?;
    check_draft_model(&model)?;
    let mut loaded = match (source, gpu) {
        (Some(source), Some(gpu)) => {
            load_on_gpu(config, &model, source, gpu, adapters, rank_program)
        }
        _ => load_on_cpu(config, &model, folder, adapters, rank_program),
    }?;
    if config.settings.enable_adaptive_drafts {
        measure_costs(&mut loaded.config, &mut *loaded.runner)?;
    }
    Ok(LoadedRunner {
        kv_file: kv_file(&model, &loaded, folder),
        ..loaded
    })
}

/// Refuses: this build has no CUDA.
#[cfg(not(feature = "cuda"))]
fn load_on_gpu(
    _config: &ModelConfig,
    _model: &ConfiguredModel<'_>,
    _source: &ModelSource,
    gpu: usize,
    _adapters: AdapterRoom,
    _rank_program: &Path,
) -> Result<LoadedRunner, LoadError> {
    Err(LoadError::Config {
        problem: format!("the instance is on GPU {gpu}, and this build of the library has no CUDA"),
        remedy: "write KIND_CPU, or build the library with the feature `cuda`".to_owned(),
    })
}

/// Refuses weights and activations that only GPUs multiply with.
fn check_products_on_cpu(settings: &Settings) -> Result<(), LoadError> {
    if settings.fp8_activations {
        return Err(LoadError::Config {
            problem: "fp8_activations is true, and only GPUs multiply FP8".to_owned(),
            remedy: "leave it out, or serve the model on a GPU".to_owned(),
        });
    }
    match settings.weight_only_precision {
        Some(WeightOnlyPrecision::Fp8) => Err(LoadError::Config {
            problem: "weight_only_precision is fp8, which only GPUs compute with".to_owned(),
            remedy: "write int8 or int4, or serve the model on a GPU".to_owned(),
        }),
        Some(WeightOnlyPrecision::Int8 | WeightOnlyPrecision::Int4) | None => Ok(()),
    }
}

/// Refuses a file without the memory that it is read into.
fn check_kv_file(settings: &Settings) -> Result<(), LoadError> {
    match (&settings.kv_cache_file, settings.kv_cache_host_memory_bytes) {
        (Some(path), 0) => Err(LoadError::Config {
            problem: format!(
                "kv_cache_file is {}, and kv_cache_host_memory_bytes is 0",
                path.display()
            ),
            remedy: "set kv_cache_host_memory_bytes to the largest size of the file".to_owned(),
        }),
        _ => Ok(()),
    }
}

/// Refuses what cannot be split over ranks yet. The runner refuses models and precisions.
pub(crate) fn check_ranks(model: &ConfiguredModel<'_>) -> Result<(), LoadError> {
    let grid = model.grid();
    let Grid {
        num_stages,
        ranks_per_stage,
    } = grid;
    if grid.num_ranks() == 1 {
        return Ok(());
    }
    if grid.checked_num_ranks().is_none() {
        return Err(LoadError::Config {
            problem: format!(
                "pipeline_parallel_size is {num_stages} and tensor_parallel_size {ranks_per_stage}, which makes {} processes; \
                 a model has at most {MAX_RANKS}",
                grid.num_ranks()
            ),
            remedy: "lower one of them".to_owned(),
        });
    }
    let num_layers = model.source.map(|source| source.spec().num_layers());
    if let Some(num_layers) = num_layers.filter(|&num_layers| num_stages > num_layers) {
        return Err(LoadError::Config {
            problem: format!(
                "pipeline_parallel_size is {num_stages}, and the model has {num_layers} layers"
            ),
            remedy: format!("set it to at most {num_layers}"),
        });
    }
    let key = match num_stages {
        1 => "tensor_parallel_size",
        _ => "pipeline_parallel_size",
    };
    let refusals = [
        (
            model.source.is_none(),
            "the synthetic runner has no weights to split",
        ),
        (
            model.settings.task.is_pooling(),
            "a pooling model is computed by one process",
        ),
        (
            model.settings.kv_cache_file.is_some(),
            "kv_cache_file would have the KV cache of one rank only",
        ),
    ];
    match refusals.into_iter().find(|(is_refused, _)| *is_refused) {
        None => Ok(()),
        Some((_, reason)) => Err(LoadError::Config {
            problem: format!("{key} is above 1, and {reason}"),
            remedy: format!("leave out {key}"),
        }),
    }
}

/// Refuses what a draft model cannot have yet.
pub(crate) fn check_draft_model(model: &ConfiguredModel<'_>) -> Result<(), LoadError> {
    let kind = model.settings.speculation;
    if !kind.is_by_model() {
        return Ok(());
    }
    let refusals = [
        (
            model.gpu.is_some(),
            "a draft model is computed on a CPU, and this instance is on a GPU",
            "set instance_group to KIND_CPU, or speculation to prompt_lookup",
        ),
        (
            model.grid().num_ranks() > 1,
            "a draft model is computed by one process, and tensor_parallel_size or pipeline_parallel_size is above 1",
            "leave these out, or set speculation to prompt_lookup",
        ),
        (
            model.settings.kv_cache_file.is_some(),
            "kv_cache_file would not have the KV cache of the draft model",
            "leave out kv_cache_file, or set speculation to prompt_lookup",
        ),
    ];
    match refusals.into_iter().find(|(is_refused, ..)| *is_refused) {
        None => Ok(()),
        Some((_, reason, remedy)) => Err(LoadError::Config {
            problem: format!("speculation is {}, and {reason}", kind.name()),
            remedy: remedy.to_owned(),
        }),
    }
}

/// The file that the configuration names, with all that keys and values depend on.
fn kv_file(model: &ConfiguredModel<'_>, loaded: &LoadedRunner, folder: &Path) -> Option<KvFile> {
    let path = folder.join(model.settings.kv_cache_file.as_ref()?);
    let made_from = format!(
        "inflight {}, {}, {:?}, {:?}, {:?}, deterministic {}, fp8_activations {}\n{}",
        env!("CARGO_PKG_VERSION"),
        loaded.runner.description(),
        model.kv_dtype(),
        model.weights(),
        model.attention(),
        model.settings.deterministic,
        model.settings.fp8_activations,
        model.source.map_or_else(String::new, ModelSource::stamps),
    );
    Some(KvFile::new(path, made_from))
}

fn load_on_cpu(
    config: &ModelConfig,
    model: &ConfiguredModel<'_>,
    folder: &Path,
    adapters: AdapterRoom,
    rank_program: &Path,
) -> Result<LoadedRunner, LoadError> {
    let settings = &config.settings;
    if model.source.is_some() {
        model.kv_dtype().on_cpu()?;
        check_products_on_cpu(settings)?;
    }
    // Both are taken at load.
    let weight_bytes = model.num_weight_bytes()? + model.num_scratch_bytes();
    let ranks = match model.grid().num_ranks() {
        1 => None,
        _ => Some(connect_ranks(settings, model.grid(), rank_program)?),
    };
    let is_cut = ranks.is_some() || settings.deterministic && !settings.task.is_pooling();
    let on_this_host = |num_bytes| match &ranks {
        None => num_bytes,
        Some(ranks) => ranks.bytes_of_own_host(num_bytes),
    };
    let (engine, reservation) = host_memory::reserve(|free| {
        let (available_bytes, limit) = available(ranks.as_ref(), free);
        let limit = limit.as_ref().map(|memory| memory as &dyn Display);
        // The KV cache shares what the weights, the host blocks and the adapters leave.
        let adapter_bytes = match is_cut {
            false => adapters.num_bytes,
            true => adapters.num_bytes.saturating_mul(ADAPTER_COPIES),
        };
        let taken = weight_bytes + settings.kv_cache_host_memory_bytes;
        let taken = taken.saturating_add(adapter_bytes);
        check_host_memory(settings, 1, available_bytes, limit)?;
        let left = available_bytes.map(|bytes| bytes.saturating_sub(taken));
        let engine = engine_config_within(config, model, left, limit)?;
        let num_bytes = weight_bytes + kv_bytes(model, &engine) + host_bytes(model, &engine);
        let num_bytes = num_bytes.saturating_add(state_bytes(model, &engine));
        Ok::<_, LoadError>((engine, on_this_host(num_bytes)))
    })?;
    let weight_bytes = on_this_host(weight_bytes);
    let bytes_per_block = on_this_host(bytes_per_block(model, &engine));
    let state_bytes = state_bytes(model, &engine);
    if is_cut && settings.weight_cache_dir.is_some() {
        log::warn!(
            "weight_cache_dir has no effect with tensor_parallel_size or pipeline_parallel_size, nor with deterministic: true: \
             each process rounds its own parts of the weights; leave it out"
        );
    }
    let limits = limits(model, &engine, adapters);
    let (runner, rank_watch): (Box<dyn Runner>, _) = match model.source {
        Some(source) => {
            let options = cpu_options(settings)?;
            match ranks {
                None => (load_on_cpus(source, limits, &options)?, None),
                Some(ranks) => {
                    let time_limits = rank_limits(settings);
                    let (runner, watch) =
                        lead_on_cpus(ranks, source, limits, &options, time_limits)?;
                    (runner, Some(watch))
                }
            }
        }
        None => (Box::new(synthetic(settings, &limits, folder)?), None),
    };
    Ok(LoadedRunner {
        config: engine,
        runner,
        rank_watch,
        // States are written at load, as weights are.
        memory: InstanceMemory::new(reservation, weight_bytes + state_bytes, bytes_per_block),
        kv_file: None,
        adapters,
    })
}

fn synthetic(
    settings: &Settings,
    limits: &RunnerLimits,
    folder: &Path,
) -> Result<SyntheticRunner, LoadError> {
    let options = SyntheticOptions {
        vocab_size: settings.synthetic_vocab_size,
        step_base_us: settings.synthetic_step_us,
        step_per_token_us: settings.synthetic_token_us,
    };
    let gate = settings.synthetic_gate.as_ref();
    Ok(SyntheticRunner::new(options, limits)?
        .failing_after(settings.synthetic_fail_after)
        .gated_by(gate.map(|path| folder.join(path))))
}

pub(crate) fn cpu_options(settings: &Settings) -> Result<CpuOptions, LoadError> {
    let simd = settings.cpu_instruction_set.as_deref().map(|name| {
        name.parse::<Simd>().map_err(|_| LoadError::Knob {
            key: "cpu_instruction_set".to_owned(),
            value: name.to_owned(),
            expected: "one that this build has".to_owned(),
        })
    });
    let num_ranks = (settings.tensor_parallel_size * settings.pipeline_parallel_size) as usize;
    let rank_cpus = rank_cpus(settings, num_ranks, Topology::of_caller)?;
    // By default the ranks share the cores, or have a thread for each CPU that they are given.
    let is_given = matches!(settings.rank_cpus, RankCpus::Sets(_));
    let shared = |num: NonZeroUsize| NonZeroUsize::new(num.get() / num_ranks);
    let num_threads = match (settings.num_threads, num_ranks) {
        (None, 2..) if !is_given => {
            let of_all = thread::available_parallelism().ok();
            of_all.map(|num| shared(num).unwrap_or(NonZeroUsize::MIN))
        }
        (given, _) => given,
    };
    Ok(CpuOptions {
        num_threads,
        simd: simd.transpose()?,
        rank_cpus,
        deterministic: settings.deterministic,
    })
}

#[cfg(test)]
mod tests {
    use super::super::engine_config::ModelDimensions;
    use super::*;
    use inflight_base::{BlockSize, Tokens};
    use inflight_runner::GroupedLayers;

    #[test]
    fn blocks_have_room_for_the_layers_of_a_group_in_each_stage() {
        let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures");
        let source = ModelSource::open(&fixtures.join("llama3")).expect("the checkpoint opens");
        let block_size = BlockSize::new(16).expect("not zero");
        let blocks = |gpu: Option<usize>, parameters: &[(&str, &str)]| {
            let windows = ("max_attention_window_size", "96,13");
            let parameters = parameters.iter().copied().chain([windows]);
            let settings = Settings::parse(parameters).expect("valid");
            let model = ConfiguredModel {
                settings: &settings,
                source: Some(&source),
                gpu,
            };
            let max_seq_len = Tokens(source.spec().max_seq_len() as u32);
            let groups = model.layer_groups(max_seq_len, true);
            let num_layers = groups.layers().num_layers();
            let one = GroupedLayers::one(num_layers, None);
            let of_blocks = [&groups, &one].map(|it| model.kv_bytes_per_block(block_size, it));
            let sizes = [&groups, &one].map(|it| it.layers().layers_per_group());
            (groups.windows().num_groups(), of_blocks, sizes)
        };
        let (num_groups, [grouped, whole], [in_group, in_all]) = blocks(None, &[]);
        assert!(num_groups > 1);
        assert_eq!(grouped * in_all as u64, whole * in_group as u64);
        assert_eq!(blocks(Some(0), &[]).0, num_groups);
        // Two ranks have the same layers, and half of each.
        assert_eq!(
            blocks(None, &[("tensor_parallel_size", "2")]),
            (num_groups, [grouped, whole], [in_group, in_all])
        );
        // Stages have a layer of each group more, at most.
        let (_, [of_stages, of_all], _) = blocks(None, &[("pipeline_parallel_size", "2")]);
        assert_eq!(of_all, whole);
        let of_layer = whole / in_all as u64;
        assert!(
            (grouped..=grouped + of_layer).contains(&of_stages),
            "{of_stages} of {whole}"
        );
    }

    #[test]
    fn each_rank_with_an_indexer_has_its_scratch_memory() {
        let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures");
        let bytes = |name: &str, parameters: [(&str, &str); 1]| {
            let source = ModelSource::open(&fixtures.join(name)).expect("the checkpoint opens");
            let settings = Settings::parse(parameters).expect("valid");
            let model = ConfiguredModel {
                settings: &settings,
                source: Some(&source),
                gpu: None,
            };
            model.num_scratch_bytes()
        };
        let ranks = |num_ranks| ("tensor_parallel_size", num_ranks);
        assert_eq!(bytes("deepseek-v32", [ranks("1")]), 32 << 20);
        assert_eq!(bytes("deepseek-v32", [ranks("2")]), 64 << 20);
        let stages = ("pipeline_parallel_size", "2");
        assert_eq!(bytes("deepseek-v32", [stages]), 64 << 20);
        assert_eq!(bytes("deepseek-v3", [ranks("1")]), 0);
    }

    #[test]
    fn a_tower_has_its_activations_its_cache_and_its_rows() {
        let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/images");
        let bytes = |name: &str, has_images| {
            let source = ModelSource::open(&fixtures.join(name)).expect("the checkpoint opens");
            let source = match has_images {
                true => source.with_images().expect("it has a tower"),
                false => source,
            };
            let settings = Settings::default();
            let model = ConfiguredModel {
                settings: &settings,
                source: Some(&source),
                gpu: None,
            };
            model.num_scratch_bytes() as usize
        };
        // Rows of 36 elements: the stream, its summand, queries, keys and values; the norm, queries, what attention
        // makes of them, and the inside of the feed-forward block.
        let of_layers = |num_rows: usize| num_rows * (4 * 5 * 36 + 2 * (3 * 36 + 52));
        // Patches, squares of four, and rows; of LLaVA with a class token, and the inside of the projector.
        let smolvlm = of_layers(36) + 6 * (36 * 48 + 9 * (144 + 32));
        let llava = of_layers(17) + 6 * (17 * 48 + 16 * (36 + 32)) + 2 * 16 * 32;
        for (name, num_rows, expected) in [("smolvlm", 36usize, smolvlm), ("llava", 17, llava)] {
            assert_eq!(bytes(name, false), 0);
            let rows = 8192 * 2 * 32;
            let cache = bytes(name, true) - expected - rows;
            let block_size = Settings::default().tokens_per_block.tokens().index();
            // Keys and values of one layer, in whole blocks. Of three heads, 12 elements of keys are padded to 16.
            let of_position = 2 * 3 * (16 + 12);
            let num_positions = num_rows.next_multiple_of(block_size);
            assert_eq!(cache, num_positions * of_position, "{name}");
        }
    }

    #[test]
    fn layers_with_recurrent_states_have_no_part_of_blocks() {
        let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures");
        let source = ModelSource::open(&fixtures.join("qwen3-5")).expect("the checkpoint opens");
        let block_size = BlockSize::new(16).expect("not zero");
        for windows in ["1000", "96,13"] {
            let parameters = [("max_attention_window_size", windows)];
            let settings = Settings::parse(parameters).expect("valid");
            let model = ConfiguredModel {
                settings: &settings,
                source: Some(&source),
                gpu: None,
            };
            let groups = model.layer_groups(Tokens(128), true);
            assert_eq!(groups.layers().num_layers(), 1);
            assert_eq!(groups.windows().num_groups(), 1);
            let one = GroupedLayers::one(1, None);
            let [found, expected] =
                [&groups, &one].map(|it| model.kv_bytes_per_block(block_size, it));
            assert_eq!(found, expected);
            assert_eq!(model.state_bytes(), Some(source.spec().state_bytes()));
        }
    }

    /// A layer has inputs of a convolution for two keys of 20 elements and four values of 7, and a state of 70 for each
    /// value.
    #[test]
    fn ranks_have_states_of_their_heads_and_stages_of_their_layers() {
        let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures");
        let source = ModelSource::open(&fixtures.join("qwen3-5")).expect("the checkpoint opens");
        let bytes = |gpu, parameters: [(&str, &str); 1]| {
            let settings = Settings::parse(parameters).expect("valid");
            let model = ConfiguredModel {
                settings: &settings,
                source: Some(&source),
                gpu,
            };
            model.state_bytes()
        };
        let of_layer = |num_keys: u64, num_values: u64| {
            4 * (4 * (20 * num_keys + 7 * num_values) + 70 * num_values)
        };
        let whole = 3 * of_layer(2, 4);
        for (ranks, of_all, of_one) in [
            (("tensor_parallel_size", "1"), whole, whole),
            (("tensor_parallel_size", "2"), whole, 3 * of_layer(1, 2)),
            // Two ranks have each key.
            (
                ("tensor_parallel_size", "4"),
                4 * 3 * of_layer(1, 1),
                3 * of_layer(1, 1),
            ),
            (("pipeline_parallel_size", "4"), whole, of_layer(2, 4)),
        ] {
            assert_eq!(bytes(None, [ranks]), Some(of_all), "{ranks:?}");
            assert_eq!(bytes(Some(0), [ranks]), Some(of_one), "{ranks:?}");
        }
    }

    #[test]
    fn the_cache_has_more_of_a_gpus_memory_than_of_the_hosts() {
        let settings = Settings::default();
        let fraction = |gpu| {
            let model = ConfiguredModel {
                settings: &settings,
                source: None,
                gpu,
            };
            model.default_kv_fraction()
        };
        assert_eq!([None, Some(0)].map(fraction), [0.5, 0.9]);
    }
}
