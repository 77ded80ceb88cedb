//! Load time of a checkpoint relative to reading its files once: `MODEL=DIR cargo bench --bench loading`.
//!
//! `PRECISION=int8` or `int4` rounds the weights. With `CACHE=FILE` they are also cached there: the first
//! round writes the file if it is missing, the others read it.
//!
//! Each round reads the checkpoint's weights into a small buffer, with as many threads as compute, and then
//! loads it. All rounds but the first find the files in the system's cache. Memory is the process's peak of
//! anonymous memory, minus its value before the load, sampled every millisecond.

mod support;

use std::fs::{self, File};
use std::io::{Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use inflight_base::{BlockSize, Blocks, Tokens};
use inflight_device_cpu::{Cpu, CpuOptions};
use inflight_engine::EngineConfig;
use inflight_numbers::CodeBits;
use inflight_runner::{CpuRunner, ModelSource, RunnerLimits, WeightPrecision};

const NUM_ROUNDS: usize = 4;

fn main() {
    let dir = std::env::var_os("MODEL").map_or_else(support::demo_folder, PathBuf::from);
    let files = weight_files(&dir);
    let num_bytes: u64 = files.iter().map(|(_, len)| len).sum();
    let num_threads = Cpu::new(&CpuOptions::default())
        .expect("a processor")
        .num_threads();
    // Minimal limits, so that only the weights are measured.
    let config = EngineConfig {
        max_num_requests: 1,
        max_seq_len: Tokens(32),
        max_num_tokens: Tokens(32),
        block_size: BlockSize::new(32).expect("not zero"),
        num_blocks: Blocks(1),
        ..EngineConfig::default()
    };
    let precision = std::env::var("PRECISION").ok().map(|name| match &*name {
        "int8" => WeightPrecision::new(CodeBits::Eight),
        "int4" => WeightPrecision::new(CodeBits::Four),
        other => panic!("PRECISION={other} is not int8 or int4"),
    });
    let cache = std::env::var_os("CACHE").map(PathBuf::from);
    println!("{:.1} MB, {num_threads} threads", num_bytes as f64 / 1e6);
    for _ in 0..NUM_ROUNDS {
        let start = Instant::now();
        read_once(&files, num_threads);
        let read = start.elapsed().as_secs_f64();
        let stop = AtomicBool::new(false);
        let (load, weight_bytes, peak_bytes) = std::thread::scope(|scope| {
            let watch = scope.spawn(|| watch(&stop));
            let start = Instant::now();
            let mut source = ModelSource::open(&dir).expect("the model opens");
            if let Some(path) = &cache {
                source = source.with_weight_cache(path.clone(), 0o600);
            }
            let limits = RunnerLimits {
                weights: precision,
                ..RunnerLimits::of(&config)
            };
            let runner = CpuRunner::new(&source, limits, &CpuOptions::default());
            let runner = runner.expect("the model loads");
            let load = start.elapsed().as_secs_f64();
            stop.store(true, Ordering::Relaxed);
            let peak_bytes = watch.join().expect("watched");
            drop(runner);
            let weight_bytes = source.num_weight_bytes(precision).expect("all tensors");
            (load, weight_bytes, peak_bytes)
        });
        println!(
            "loaded in {load:6.3} s, {:5.2} GB/s; read once in {read:6.3} s; ratio {:5.2}; {:5.3} bytes of \
             memory a byte of packed weights",
            num_bytes as f64 / load / 1e9,
            load / read,
            peak_bytes as f64 / weight_bytes as f64,
        );
    }
}

/// The checkpoint's weight files, and their sizes.
fn weight_files(dir: &Path) -> Vec<(PathBuf, u64)> {
    let entries = fs::read_dir(dir).expect("a folder");
    entries
        .map(|entry| entry.expect("an entry").path())
        .filter(|path| path.extension().is_some_and(|end| end == "safetensors"))
        .map(|path| {
            let len = fs::metadata(&path).expect("a file").len();
            (path, len)
        })
        .collect()
}

/// Reads all files; each thread reads its own part.
fn read_once(files: &[(PathBuf, u64)], num_threads: usize) {
    std::thread::scope(|scope| {
        for thread in 0..num_threads as u64 {
            scope.spawn(move || {
                let mut buffer = vec![0; 1 << 20];
                for (path, len) in files {
                    let piece = len.div_ceil(num_threads as u64);
                    let mut file = File::open(path).expect("a file");
                    file.seek(SeekFrom::Start(thread * piece)).expect("a place");
                    let mut file = file.take(piece);
                    while file.read(&mut buffer).expect("bytes") > 0 {}
                }
            });
        }
    });
}

/// Peak of the process's anonymous memory until `stop`, minus its current value.
fn watch(stop: &AtomicBool) -> u64 {
    let before = anonymous_bytes();
    let mut peak = before;
    while !stop.load(Ordering::Relaxed) {
        std::thread::sleep(Duration::from_millis(1));
        peak = peak.max(anonymous_bytes());
    }
    peak - before
}

fn anonymous_bytes() -> u64 {
    let status = fs::read_to_string("/proc/self/status").expect("Linux");
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix("RssAnon:"))
        .expect("a kernel that counts it");
    let kilobytes = line.trim().trim_end_matches(" kB");
    1024 * kilobytes.parse::<u64>().expect("a number")
}
