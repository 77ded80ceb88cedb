//! Throughput of the CPU kernels relative to the machine: `cargo bench --bench kernels [-- FILTER]`. The
//! environment variables THREADS and SIMD set the machine's part; BLOCK_SIZE (positions per block) and
//! KV_DTYPE apply to attention.
//!
//! Each figure is compared with a limit measured in the same run on the same threads: peak arithmetic
//! throughput and memory read bandwidth. Each call uses the next of several weight matrices, so that weights
//! come from memory, as in a model, and not from the cache.

use std::num::NonZeroUsize;

use half::bf16;
use inflight_base::{BlockId, BlockSize};
use inflight_device::{
    AttentionParams, HeadBiases, HeadShape, KvDtype, KvLayout, KvLayouts, KvSpan, KvValues,
    LayerGroups, Output, RopeTable,
};
use inflight_device_cpu::{Cpu, CpuOptions, KvCache, Simd};
use inflight_measure::limits::{Clock, MachineLimits, seconds_of};
use inflight_numbers::{Dtype, RawMatrix, Stacking};
use inflight_threads::Pool;

fn main() {
    let filter = std::env::args()
        .skip(1)
        .find(|arg| !arg.starts_with('-'))
        .unwrap_or_default();
    let options = CpuOptions {
        num_threads: env("THREADS")
            .and_then(|n| n.parse().ok())
            .and_then(NonZeroUsize::new),
        simd: env("SIMD").map(|name| name.parse::<Simd>().expect("SIMD names an instruction set")),
        ..CpuOptions::default()
    };
    let mut cpu = Cpu::new(&options).expect("a processor");
    println!("{}, {} threads", cpu.simd(), cpu.num_threads());
    let limits = MachineLimits::measure(cpu.num_threads(), cpu.simd());
    println!(
        "limits: {:.0} GFLOP/s, {:.1} GB/s read",
        limits.bf16_flops / 1e9,
        limits.read_bytes_per_s / 1e9
    );
    let bench = Bench {
        limits,
        clock: Clock::of(cpu.num_threads()),
    };
    if "gemm".contains(&filter) {
        for (k, n) in [
            (768, 1280),
            (768, 768),
            (768, 6144),
            (3072, 768),
            (2048, 8192),
            (8192, 2048),
        ] {
            gemm(&mut cpu, &bench, k, n);
        }
    }
    if "attention".contains(&filter) {
        attention(&mut cpu, &bench);
    }
    if "pool".contains(&filter) {
        barrier(cpu.num_threads(), &bench);
    }
    if "small".contains(&filter) {
        small(&mut cpu, &bench);
    }
}

/// An option from the environment.
fn env(name: &str) -> Option<String> {
    std::env::var(name).ok()
}

/// The machine's limits, to compare figures with.
struct Bench {
    limits: MachineLimits,
    clock: Clock,
}

impl Bench {
    /// Time of one call, in seconds.
    fn time(&self, body: impl FnMut()) -> f64 {
        seconds_of(self.clock, body)
    }

    fn row(&self, what: &str, seconds: f64, flops: f64, bytes: f64) {
        // The time at the limit that binds.
        let limits = &self.limits;
        let best = limits.seconds(bytes, flops, limits.bf16_flops);
        println!(
            "{what:44} {:9.1} us  {:7.1} GFLOP/s ({:3.0} %)  {:6.1} GB/s ({:3.0} %)  {:4.0} % of the limit",
            seconds * 1e6,
            flops / seconds / 1e9,
            100.0 * flops / seconds / limits.bf16_flops,
            bytes / seconds / 1e9,
            100.0 * bytes / seconds / limits.read_bytes_per_s,
            100.0 * best / seconds,
        );
    }
}

fn numbers(len: usize) -> Vec<bf16> {
    (0..len)
        .map(|i| bf16::from_f32((i * 7919 % 1000) as f32 / 1000.0 - 0.5))
        .collect()
}

fn gemm(cpu: &mut Cpu, bench: &Bench, k: usize, n: usize) {
    let bytes: Vec<u8> = numbers(n * k)
        .iter()
        .flat_map(|value| value.to_le_bytes())
        .collect();
    let raw = RawMatrix::new(Dtype::Bf16, n, k, &bytes);
    // Together larger than any likely last-level cache.
    let num_copies = (192 << 20) / bytes.len() + 2;
    let copies: Vec<_> = (0..num_copies)
        .map(|_| {
            cpu.pack(&[raw], Stacking::Concatenated)
                .expect("memory")
                .expect("finite")
        })
        .collect();
    for m in [1, 8, 32, 128, 512] {
        let x = numbers(m * k);
        let mut out = vec![0.0; m * n];
        let mut next = 0;
        let seconds = bench.time(|| {
            cpu.gemm(
                &x,
                m,
                &copies[next % num_copies],
                None,
                Output::Store,
                &mut out,
            );
            next += 1;
        });
        let flops = 2.0 * (m * k * n) as f64;
        let traffic = (copies[0].num_bytes() + m * k * 2 + m * n * 4) as f64;
        bench.row(&format!("gemm m={m} k={k} n={n}"), seconds, flops, traffic);
    }
}

fn attention(cpu: &mut Cpu, bench: &Bench) {
    let shape_160m = HeadShape {
        num_q_heads: 12,
        num_kv_heads: 4,
        head_dim: 64,
        value_dim: 64,
    };
    let shape_1b = HeadShape {
        num_q_heads: 32,
        num_kv_heads: 8,
        head_dim: 64,
        value_dim: 64,
    };
    let shape_8b = HeadShape {
        num_q_heads: 32,
        num_kv_heads: 8,
        head_dim: 128,
        value_dim: 128,
    };
    let mha = HeadShape {
        num_q_heads: 32,
        num_kv_heads: 32,
        head_dim: 128,
        value_dim: 128,
    };
    for shape in [shape_160m, shape_1b, shape_8b, mha] {
        for (num_sequences, chunk, kv_len) in [
            (1, 1, 192),
            (32, 1, 192),
            (8, 1, 2048),
            (1, 512, 512),
            (1, 512, 4096),
            (32, 1, 2048),
        ] {
            attend(cpu, bench, shape, num_sequences, chunk, kv_len);
        }
    }
}

fn attend(
    cpu: &mut Cpu,
    bench: &Bench,
    shape: HeadShape,
    num_sequences: usize,
    chunk: usize,
    kv_len: usize,
) {
    let block_size = env("BLOCK_SIZE").map_or(32, |size| size.parse().expect("a number"));
    let blocks = kv_len.div_ceil(block_size);
    let layout = KvLayout {
        num_kv_heads: shape.num_kv_heads,
        head_dim: shape.head_dim,
        values: KvValues::OfTheirOwn(shape.value_dim),
        indexer_dim: 0,
        block_size: BlockSize::new(block_size as u32).expect("not zero"),
        dtype: env("KV_DTYPE").map_or(KvDtype::Bf16, |name| name.parse().expect("a type")),
    };
    let layer_bytes = KvCache::bytes_per_block(&KvLayouts::alike(layout, 1), &LayerGroups::one(1))
        * blocks
        * num_sequences;
    let num_layers = (96 << 20) / layer_bytes + 2;
    let mut cache = KvCache::new(
        KvLayouts::alike(layout, num_layers),
        LayerGroups::one(num_layers),
        blocks * num_sequences,
    )
    .expect("memory");
    let tables: Vec<_> = (0..(blocks * num_sequences) as u32).map(BlockId).collect();
    let spans = |chunk: usize| -> Vec<KvSpan> {
        (0..num_sequences)
            .map(|i| KvSpan {
                tokens: (i * chunk) as u32..((i + 1) * chunk) as u32,
                kv_len: kv_len as u32,
                block_table: (i * blocks) as u32..((i + 1) * blocks) as u32,
            })
            .collect()
    };
    let rope = RopeTable::new(&vec![0.1; shape.head_dim / 2], 1.0, kv_len).expect("memory");
    let all = spans(kv_len);
    let num_tokens = num_sequences * kv_len;
    let qkv: Vec<f32> = numbers(num_tokens * shape.qkv_len())
        .iter()
        .map(|v| v.to_f32())
        .collect();
    let mut q = numbers(num_tokens * shape.q_len());
    for layer in 0..num_layers {
        let batch = cache.batch(&all, &tables);
        cpu.rope_and_store(
            &qkv,
            shape,
            None,
            (&rope, &[]),
            &batch,
            &mut cache,
            layer,
            &mut q,
            None,
        );
    }
    let spans = spans(chunk);
    let q = &q[..num_sequences * chunk * shape.q_len()];
    let mut out = q.to_vec();
    let params = AttentionParams {
        shape,
        scale: 1.0 / (shape.head_dim as f32).sqrt(),
        soft_cap: None,
        window: None,
        chunk: None,
        is_bidirectional: false,
        num_sinks: 0,
        shifts_sinks: false,
    };
    let mut layer = 0;
    let seconds = bench.time(|| {
        let batch = cache.batch(&spans, &tables);
        cpu.paged_attention(
            (q, None),
            (&params, HeadBiases::NONE),
            &batch,
            &cache,
            layer,
            &mut out,
        );
        layer = (layer + 1) % num_layers;
    });
    // Scores and weighted values over the positions that each query attends to.
    let seen: usize = (0..chunk).map(|i| kv_len - i).sum();
    let flops = (num_sequences * seen * shape.q_len() * 4) as f64;
    let bytes_per_position =
        KvCache::bytes_per_block(&KvLayouts::alike(layout, 1), &LayerGroups::one(1)) as f64
            / block_size as f64;
    let bytes = (num_sequences * kv_len) as f64 * bytes_per_position;
    let HeadShape {
        num_q_heads,
        num_kv_heads,
        head_dim,
        ..
    } = shape;
    let what = format!(
        "attention {num_q_heads}/{num_kv_heads}x{head_dim} {num_sequences} x {chunk} over {kv_len}"
    );
    bench.row(&what, seconds, flops, bytes);
}

/// The cost of starting work on the pool and waiting for all threads, within a turn and with a turn for each
/// run.
fn barrier(num_threads: usize, bench: &Bench) {
    let mut pool = Pool::new(num_threads).expect("threads");
    let mut units = vec![(); num_threads];
    for has_turn in [true, false] {
        let _turn = has_turn.then(|| pool.turn());
        let what = if has_turn {
            "in a turn"
        } else {
            "and its turn"
        };
        let seconds = bench.time(|| pool.for_each(&mut units, num_threads, |(), _| {}));
        println!(
            "an empty run of the pool {what:19} {:9.2} us",
            seconds * 1e6
        );
    }
}

/// The small operations in between. Their time matters, not their distance from a limit.
fn small(cpu: &mut Cpu, bench: &Bench) {
    let report = |what: &str, m: usize, seconds: f64| {
        println!("{:44} {:9.2} us", format!("{what} m={m}"), seconds * 1e6);
    };
    let d = 768;
    let shape = HeadShape {
        num_q_heads: 12,
        num_kv_heads: 4,
        head_dim: 64,
        value_dim: 64,
    };
    for m in [1, 32, 512] {
        let x: Vec<f32> = numbers(m * shape.qkv_len())
            .iter()
            .map(|v| v.to_f32())
            .collect();
        let mut out = vec![bf16::ZERO; m * d];
        let weight = vec![1.0; d];
        let seconds = bench.time(|| cpu.rms_norm(&x[..m * d], &weight, 1e-5, &mut out[..m * d]));
        report("rms_norm d=768", m, seconds);
        let layout = KvLayout {
            num_kv_heads: 4,
            head_dim: 64,
            values: KvValues::OfTheirOwn(shape.value_dim),
            indexer_dim: 0,
            block_size: BlockSize::new(32).expect("not zero"),
            dtype: env("KV_DTYPE").map_or(KvDtype::Bf16, |name| name.parse().expect("a type")),
        };
        // Sequences with one token each, as in generation.
        let mut cache =
            KvCache::new(KvLayouts::alike(layout, 1), LayerGroups::one(1), m).expect("memory");
        let tables: Vec<_> = (0..m as u32).map(BlockId).collect();
        let spans: Vec<_> = (0..m as u32)
            .map(|i| KvSpan {
                tokens: i..i + 1,
                kv_len: 1 + i % 32,
                block_table: i..i + 1,
            })
            .collect();
        let rope = RopeTable::new(&[0.1; 32], 1.0, 32).expect("memory");
        let seconds = bench.time(|| {
            let batch = cache.batch(&spans, &tables);
            let (qkv, q) = (&x[..m * shape.qkv_len()], &mut out[..m * shape.q_len()]);
            cpu.rope_and_store(
                qkv,
                shape,
                None,
                (&rope, &[]),
                &batch,
                &mut cache,
                0,
                q,
                None,
            );
        });
        report("rope_and_store 12/4x64", m, seconds);
    }
}
