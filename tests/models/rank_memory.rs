//! Ranks that have different amounts of memory: the KV cache is the largest that all of them can hold, and one that
//! cannot hold a sequence is refused with the rank or the GPU that has the least.

use std::path::Path;

use inflight_base::LoadError;
use inflight_config::{AutoComplete, ModelConfig};
use inflight_cuda_stand_in::StandIn;
use inflight_device::available_host_bytes;
use inflight_manager::sizing::{ConfiguredModel, LoadedRunner, ModelDimensions, load_runner};
use inflight_runner::{AdapterRoom, ModelSource};
use serde_json::{Map, Value, json};

use crate::cuda::on_stand_in;
use crate::cuda_ranks::serve_on;
use crate::devices::requests;
use crate::rank_processes::{PATIENT, PROGRAM, Script, load};
use crate::ranks::assert_same;
use crate::support::{Setup, fixture, serve};

const MODEL: &str = "llama3";
const MIB: u64 = 1 << 20;

/// As many requests as have use for more memory than there is.
fn config(parameters: &[(&str, &str)]) -> ModelConfig {
    let usual = [
        ("max_num_requests", "1024"),
        ("num_threads", "1"),
        ("tensor_parallel_size", "2"),
    ];
    let parameters: Map<String, Value> = usual
        .iter()
        .chain(parameters)
        .map(|(key, value)| ((*key).to_owned(), json!({"string_value": value})))
        .collect();
    let given = json!({
        "max_batch_size": 1024,
        "sequence_batching": {"iterative_sequence": true, "max_sequence_idle_microseconds": 3_600_000_000_u64},
        "parameters": parameters,
    });
    let config = ModelConfig::complete(&given, false).expect("inputs are missing");
    ModelConfig::parse(&config, AutoComplete::Enabled).expect("a valid configuration")
}

/// The model on two ranks, and the bytes of the KV cache of both.
fn load_sized(
    parameters: &[(&str, &str)],
    gpu: Option<usize>,
    program: &Path,
) -> Result<(LoadedRunner, u64), LoadError> {
    let dir = fixture(MODEL);
    let source = ModelSource::open(&dir).expect("the checkpoint opens");
    let config = config(parameters);
    let room = AdapterRoom::default();
    let loaded = load_runner(&config, Some(&source), &dir, gpu, room, program)?;
    let model = ConfiguredModel {
        settings: &config.settings,
        source: Some(&source),
        gpu,
    };
    let engine = &loaded.config;
    let groups = model.layer_groups(engine.max_seq_len, engine.paged_kv);
    let of_block = model.kv_bytes_per_block(engine.block_size, &groups);
    // On GPUs it is that of each rank.
    let num_ranks = if gpu.is_some() { 2 } else { 1 };
    let num_bytes = num_ranks * u64::from(engine.num_blocks.0) * of_block;
    Ok((loaded, num_bytes))
}

/// The bytes that stand before some words in an error.
fn bytes_before(error: &str, words: &str) -> u64 {
    let before = error.split(words).next().expect("a text");
    let number = before.rsplit(' ').next().expect("a word");
    number
        .parse()
        .unwrap_or_else(|_| panic!("no number before '{words}': {error}"))
}

#[test]
fn the_process_with_the_lowest_limit_is_named() {
    let program = |limit_bytes: u64, rank: u32| {
        let limit = format!("ulimit -v {}", limit_bytes / 1024);
        Script::new(&format!(
            r#"case "$1" in rank={rank}) {limit};; esac; exec PROGRAM "$@""#
        ))
    };
    // A sequence has 32 KiB in both ranks, in four blocks. So much of what the program leaves of 1 GiB each is two of
    // them, as long as the program itself has 50 to 390 MB.
    let little = [("kv_cache_free_gpu_mem_fraction", "0.000012")];
    let limit_bytes = 1024 * MIB;
    for (rank, num_ranks) in [(1, "2"), (2, "3")] {
        let parameters = [&little[..], &[("tensor_parallel_size", num_ranks)]].concat();
        let script = program(limit_bytes, rank);
        let error = match load_sized(&parameters, None, &script.program()) {
            Ok((_, num_bytes)) => panic!("a KV cache of {num_bytes} bytes"),
            Err(error) => error.to_string(),
        };
        for part in [
            "the KV cache has 2 blocks of 32 tokens",
            "max_seq_len = 128",
            &format!(": the process of rank {rank} may take "),
            "bytes (ulimit -v), and each rank has as much; lower max_seq_len",
            "kv_cache_free_gpu_mem_fraction",
        ] {
            assert!(error.contains(part), "{part}: {error}");
        }
        let left = bytes_before(&error, " bytes (ulimit -v)");
        assert!(left > 0 && left < limit_bytes, "{error}");
        // More than all ranks can have, as each has no more than that one.
        let much = (3 * limit_bytes).to_string();
        let host_memory = [
            ("kv_cache_host_memory_bytes", &*much),
            ("tensor_parallel_size", num_ranks),
        ];
        let refused = load_sized(&host_memory, None, &script.program()).err();
        let error = refused.expect("so much memory").to_string();
        for part in [
            &format!("kv_cache_host_memory_bytes is {much}, and "),
            &format!(" bytes of host memory are available: the process of rank {rank} may take "),
            "lower it",
        ] {
            assert!(error.contains(part), "{part}: {error}");
        }
        // What has another reason says nothing of memory.
        let too_few = [
            ("max_tokens_in_paged_kv_cache", "32"),
            ("tensor_parallel_size", num_ranks),
        ];
        let refused = load_sized(&too_few, None, &script.program()).err();
        let error = refused.expect("one block").to_string();
        let is_of_memory = error.contains("ulimit");
        assert!(error.contains("1 blocks") && !is_of_memory, "{error}");
    }
    load_sized(&little, None, Path::new(PROGRAM)).expect("without a limit it has room");
}

#[test]
fn a_process_that_gets_no_memory_is_named() {
    for (limit_kib, parts) in [
        // The system cannot start the program.
        (2_000, &["rank 1", "it has ended"][..]),
        // The cache has no room.
        (4 << 20, &["rank 1", "cannot reserve", "for a KV cache of"]),
    ] {
        let script = Script::new(&format!("ulimit -v {limit_kib}; exec PROGRAM \"$@\""));
        let setup = Setup {
            num_blocks: 4 << 20,
            ..Setup::default()
        };
        match load(&script.program(), script.0.dir(), &setup, 2, PATIENT) {
            Ok(_) => panic!("it has no memory"),
            Err(error) => {
                let error = error.to_string();
                for part in parts {
                    assert!(error.contains(part), "{error}");
                }
            }
        }
    }
}

const ON_GPUS: [(&str, &str); 3] = [
    ("kv_cache_free_gpu_mem_fraction", "0.01"),
    ("cuda_graph_mode", "false"),
    ("deterministic", "true"),
];

/// Two GPUs, the second one with less memory.
fn unequal(other_mib: u64) -> StandIn {
    StandIn::new()
        .set("DEVICES", 2)
        .set("MEMORY_BYTES", 4096 * MIB)
        .set("OTHER_MEMORY_BYTES", other_mib * MIB)
}

fn on_gpus(gpu: usize, ids: &str) -> Result<(LoadedRunner, u64), LoadError> {
    let parameters = [&ON_GPUS[..], &[("gpu_device_ids", ids)]].concat();
    load_sized(&parameters, Some(gpu), Path::new(PROGRAM))
}

#[test]
fn the_gpu_with_the_least_memory_decides_on_the_kv_cache() {
    let test = "rank_memory::the_gpu_with_the_least_memory_decides_on_the_kv_cache";
    on_stand_in(unequal(2048), test, || {
        let setup = Setup {
            block_size: 32,
            max_num_tokens: 256,
            ..Setup::default()
        };
        let expected = serve_on(MODEL, &setup, &requests(), 2, (true, 0));
        let sizes = [(0, "0,1"), (1, "1,0")].map(|(gpu, ids)| {
            let (mut loaded, num_bytes) = on_gpus(gpu, ids).expect("it loads");
            assert!(loaded.rank_watch.is_some(), "it is on two GPUs");
            let (served, _) = serve(&mut loaded.runner, &setup, &requests());
            assert_same(ids, &expected, &served);
            num_bytes
        });
        assert_eq!(sizes[0], sizes[1], "whichever is rank 0");
        // NCCL and steps have more than 576 MiB of it. The other GPU has room for more.
        let [most, least] = [2048 - 576, 2048 - 1300].map(|left| 2 * left * MIB / 100);
        assert!((least..most).contains(&sizes[0]), "{}", sizes[0]);
    });
}

#[test]
fn each_gpu_has_host_memory_of_its_own() {
    let test = "rank_memory::each_gpu_has_host_memory_of_its_own";
    on_stand_in(unequal(4096), test, || {
        let available = available_host_bytes().expect("Linux tells");
        // One GPU could have so much.
        let most = (available / 100 * 60).to_string();
        let parameters = [&ON_GPUS[..], &[("kv_cache_host_memory_bytes", &*most)]].concat();
        let refused = load_sized(&parameters, Some(0), Path::new(PROGRAM)).err();
        let error = refused.expect("two have more than there is").to_string();
        let words = format!("kv_cache_host_memory_bytes is {most} for each of 2 GPUs, and ");
        assert!(error.contains(&words), "{error}");
    });
}

#[test]
fn the_gpu_that_has_no_memory_for_the_kv_cache_is_named() {
    let test = "rank_memory::the_gpu_that_has_no_memory_for_the_kv_cache_is_named";
    on_stand_in(unequal(600), test, || {
        for (gpu, ids) in [(0, "0,1"), (1, "1,0")] {
            let error = match on_gpus(gpu, ids) {
                Ok((_, num_bytes)) => panic!("a KV cache of {num_bytes} bytes"),
                Err(error) => error.to_string(),
            };
            for part in [
                "the KV cache has 0 blocks of 32 tokens",
                &format!(": GPU 1 of rank {} has ", 1 - gpu),
                " free bytes, the least of the 2 GPUs; weights take ",
                "fewer with a lower max_num_tokens",
                "kv_cache_free_gpu_mem_fraction",
            ] {
                assert!(error.contains(part), "{part}: {error}");
            }
            let free_bytes = bytes_before(&error, " free bytes");
            assert!((500 * MIB..=600 * MIB).contains(&free_bytes), "{error}");
        }
    });
}
