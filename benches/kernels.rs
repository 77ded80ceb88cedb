//! How near the CPU kernels come to the machine: `cargo bench --bench kernels [-- FILTER]`. The environment
//! may name THREADS, SIMD and, for attention, the positions of a BLOCK_SIZE and a KV_DTYPE.
//!
//! Each figure stands beside the limit measured in the same run on the same threads: the rate at which
//! registers can be multiplied, and the rate at which memory can be read. Weights are taken from several
//! matrices in turn, so that they come from memory as in a model and not from the cache.

use std::hint::black_box;
use std::num::NonZeroUsize;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use half::bf16;
use triton_inflight::base::{BlockId, BlockSize};
use triton_inflight::device::cpu::{
    AttentionParams, Cpu, CpuOptions, Dtype, HeadShape, KvCache, KvDtype, KvLayout, KvSpan, Output,
    Pool, RawMatrix, RopeTable, Simd,
};

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
    };
    let mut cpu = Cpu::new(&options).expect("a processor");
    println!("{}, {} threads", cpu.simd(), cpu.num_threads());
    ALONE.store(cpu.num_threads() == 1, Ordering::Relaxed);
    let limits = Limits::measure(&cpu);
    println!(
        "limits: {:.0} GFLOP/s, {:.1} GB/s read",
        limits.flops / 1e9,
        limits.bytes / 1e9
    );
    if "gemm".contains(&filter) {
        for (k, n) in [
            (768, 1280),
            (768, 768),
            (768, 6144),
            (3072, 768),
            (2048, 8192),
            (8192, 2048),
        ] {
            gemm(&mut cpu, &limits, k, n);
        }
    }
    if "attention".contains(&filter) {
        attention(&mut cpu, &limits);
    }
    if "small".contains(&filter) {
        small(&mut cpu);
    }
}

/// An option of the run.
fn env(name: &str) -> Option<String> {
    std::env::var(name).ok()
}

/// What the machine can do.
struct Limits {
    /// Multiplications and additions a second, in registers.
    flops: f64,
    /// Bytes read from memory a second.
    bytes: f64,
}

impl Limits {
    fn measure(cpu: &Cpu) -> Self {
        let mut pool = Pool::new(cpu.num_threads()).expect("threads");
        let n = cpu.num_threads();
        let mut units = vec![(); n];
        let simd = cpu.simd();
        let peak = time(|| pool.for_each(&mut units, n, |(), _| multiply_registers(simd)));
        // On huge pages like the weights, and written once, so that it is not one page of zeros.
        let mut map = memmap2::MmapMut::map_anon(256 << 20).expect("memory");
        #[cfg(target_os = "linux")]
        let _ = map.advise(memmap2::Advice::HugePage);
        map.fill(1);
        let data: &[u64] = bytemuck::cast_slice(&map);
        let share = data.len() / n;
        let read = time(|| {
            pool.for_each(&mut units, n, |(), task| {
                black_box(read(simd, &data[task * share..][..share]));
            });
        });
        Self {
            flops: (n * PEAK_FLOPS) as f64 / peak,
            bytes: (data.len() * 8) as f64 / read,
        }
    }

    fn row(&self, what: &str, seconds: f64, flops: f64, bytes: f64) {
        // The time that the nearer limit would allow.
        let best = (flops / self.flops).max(bytes / self.bytes);
        println!(
            "{what:44} {:9.1} us  {:7.1} GFLOP/s ({:3.0} %)  {:6.1} GB/s ({:3.0} %)  {:4.0} % of the limit",
            seconds * 1e6,
            flops / seconds / 1e9,
            100.0 * flops / seconds / self.flops,
            bytes / seconds / 1e9,
            100.0 * bytes / seconds / self.bytes,
            100.0 * best / seconds,
        );
    }
}

/// Reads memory as fast as the instruction set can.
fn read(simd: Simd, data: &[u64]) -> u64 {
    #[inline(always)]
    fn fold(data: &[u64]) -> u64 {
        let mut lanes = [0; 64];
        for chunk in data.as_chunks::<64>().0 {
            for (lane, value) in lanes.iter_mut().zip(chunk) {
                *lane ^= value;
            }
        }
        lanes.into_iter().fold(0, |a, b| a ^ b)
    }
    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx512f")]
    fn fold_avx512(data: &[u64]) -> u64 {
        fold(data)
    }
    match simd {
        // SAFETY: the Cpu that names the instruction set has checked that the machine has it.
        #[cfg(target_arch = "x86_64")]
        Simd::Avx512Bf16 => unsafe { fold_avx512(data) },
        _ => fold(data),
    }
}

/// Seconds of one call: the tenth percentile of many, since what else runs on the machine only adds.
fn time(mut body: impl FnMut()) -> f64 {
    body();
    let start = Instant::now();
    let mut samples = Vec::new();
    while samples.len() < 9 || (start.elapsed() < BUDGET && samples.len() < 2000) {
        let start = clock();
        body();
        samples.push(clock() - start);
    }
    samples.sort_by(f64::total_cmp);
    samples[samples.len() / 10]
}

/// Whether this thread does all the work.
static ALONE: AtomicBool = AtomicBool::new(false);

/// Seconds since some moment: of this thread's processor time if it works alone, so that a busy machine
/// disturbs the figures less, or else of the clock on the wall.
fn clock() -> f64 {
    let clock = if ALONE.load(Ordering::Relaxed) {
        libc::CLOCK_THREAD_CPUTIME_ID
    } else {
        libc::CLOCK_MONOTONIC
    };
    let mut time = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: a valid place for the result.
    unsafe { libc::clock_gettime(clock, &mut time) };
    time.tv_sec as f64 + time.tv_nsec as f64 * 1e-9
}

/// How long one figure may take.
const BUDGET: Duration = Duration::from_millis(300);

const PEAK_ROUNDS: usize = 20_000;
/// 24 registers of 16 pairs.
const PEAK_FLOPS: usize = PEAK_ROUNDS * 24 * 16 * 4;

/// Multiplies as fast as the instruction set can: the yardstick of the kernels.
fn multiply_registers(simd: Simd) {
    match simd {
        // SAFETY: the Cpu that names the instruction set has checked that the machine has it.
        #[cfg(target_arch = "x86_64")]
        Simd::Avx512Bf16 => unsafe { multiply_registers_avx512() },
        // SAFETY: as above.
        #[cfg(target_arch = "x86_64")]
        _ if Simd::Avx2.is_supported() => unsafe { multiply_registers_avx2() },
        _ => multiply_registers_portable(),
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bf16")]
fn multiply_registers_avx512() {
    use std::arch::x86_64::*;
    let mut sums = [_mm512_setzero_ps(); 24];
    let a = _mm512_cvtne2ps_pbh(
        _mm512_set1_ps(black_box(0.5)),
        _mm512_set1_ps(black_box(0.5)),
    );
    for _ in 0..PEAK_ROUNDS {
        for sum in &mut sums {
            *sum = _mm512_dpbf16_ps(*sum, a, a);
        }
    }
    black_box(sums.map(|sum| _mm512_reduce_add_ps(sum)));
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
fn multiply_registers_avx2() {
    use std::arch::x86_64::*;
    let mut sums = [_mm256_setzero_ps(); 12];
    let a = _mm256_set1_ps(black_box(0.5));
    for _ in 0..PEAK_ROUNDS * 8 {
        for sum in &mut sums {
            *sum = _mm256_fmadd_ps(*sum, a, a);
        }
    }
    black_box(sums.map(|sum| _mm256_cvtss_f32(sum)));
}

fn multiply_registers_portable() {
    let mut sums = [0.0_f32; 48];
    let a = black_box(0.5);
    for _ in 0..PEAK_ROUNDS * 16 {
        for sum in &mut sums {
            *sum = *sum * a + a;
        }
    }
    black_box(sums);
}

fn numbers(len: usize) -> Vec<bf16> {
    (0..len)
        .map(|i| bf16::from_f32((i * 7919 % 1000) as f32 / 1000.0 - 0.5))
        .collect()
}

fn gemm(cpu: &mut Cpu, limits: &Limits, k: usize, n: usize) {
    let bytes: Vec<u8> = numbers(n * k)
        .iter()
        .flat_map(|value| value.to_le_bytes())
        .collect();
    let raw = RawMatrix::new(Dtype::Bf16, n, k, &bytes);
    // Together larger than any last-level cache that this is likely to run on.
    let num_copies = (192 << 20) / bytes.len() + 2;
    let copies: Vec<_> = (0..num_copies)
        .map(|_| cpu.pack(&[raw]).expect("memory").expect("finite"))
        .collect();
    for m in [1, 8, 32, 128, 512] {
        let x = numbers(m * k);
        let mut out = vec![0.0; m * n];
        let mut next = 0;
        let seconds = time(|| {
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
        limits.row(&format!("gemm m={m} k={k} n={n}"), seconds, flops, traffic);
    }
}

fn attention(cpu: &mut Cpu, limits: &Limits) {
    let shape_160m = HeadShape {
        num_q_heads: 12,
        num_kv_heads: 4,
        head_dim: 64,
    };
    let shape_1b = HeadShape {
        num_q_heads: 32,
        num_kv_heads: 8,
        head_dim: 64,
    };
    let shape_8b = HeadShape {
        num_q_heads: 32,
        num_kv_heads: 8,
        head_dim: 128,
    };
    let mha = HeadShape {
        num_q_heads: 32,
        num_kv_heads: 32,
        head_dim: 128,
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
            attend(cpu, limits, shape, num_sequences, chunk, kv_len);
        }
    }
}

fn attend(
    cpu: &mut Cpu,
    limits: &Limits,
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
        block_size: BlockSize::new(block_size as u32).expect("not zero"),
        dtype: env("KV_DTYPE").map_or(KvDtype::Bf16, |name| name.parse().expect("a type")),
    };
    let layer_bytes = layout.bytes_per_block(1) * blocks * num_sequences;
    let num_layers = (96 << 20) / layer_bytes + 2;
    let mut cache = KvCache::new(layout, num_layers, blocks * num_sequences).expect("memory");
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
        cpu.rope_and_store(&qkv, shape, None, &rope, &batch, &mut cache, layer, &mut q);
    }
    let spans = spans(chunk);
    let q = &q[..num_sequences * chunk * shape.q_len()];
    let mut out = q.to_vec();
    let params = AttentionParams {
        shape,
        scale: 1.0 / (shape.head_dim as f32).sqrt(),
        window: None,
        num_sinks: 0,
    };
    let mut layer = 0;
    let seconds = time(|| {
        let batch = cache.batch(&spans, &tables);
        cpu.paged_attention(q, &params, &batch, &cache, layer, &mut out);
        layer = (layer + 1) % num_layers;
    });
    // Scores and weighted values of what each query sees.
    let seen: usize = (0..chunk).map(|i| kv_len - i).sum();
    let flops = (num_sequences * seen * shape.q_len() * 4) as f64;
    let bytes_per_position = layout.bytes_per_block(1) as f64 / block_size as f64;
    let bytes = (num_sequences * kv_len) as f64 * bytes_per_position;
    let HeadShape {
        num_q_heads,
        num_kv_heads,
        head_dim,
    } = shape;
    let what = format!(
        "attention {num_q_heads}/{num_kv_heads}x{head_dim} {num_sequences} x {chunk} over {kv_len}"
    );
    limits.row(&what, seconds, flops, bytes);
}

/// The operations between, whose limit is not worth naming: their time is.
fn small(cpu: &mut Cpu) {
    let report = |what: &str, m: usize, seconds: f64| {
        println!("{:44} {:9.2} us", format!("{what} m={m}"), seconds * 1e6);
    };
    let mut pool = Pool::new(cpu.num_threads()).expect("threads");
    let mut units = vec![(); cpu.num_threads()];
    let num_tasks = cpu.num_threads();
    report(
        "an empty run of the pool",
        0,
        time(|| pool.for_each(&mut units, num_tasks, |(), _| {})),
    );
    let (d, inter) = (768, 3072);
    for m in [1, 32, 512] {
        let x: Vec<f32> = numbers(m * inter * 2).iter().map(|v| v.to_f32()).collect();
        let mut out = vec![bf16::ZERO; m * inter];
        let weight = vec![1.0; d];
        let seconds = time(|| cpu.rms_norm(&x[..m * d], &weight, 1e-5, &mut out[..m * d]));
        report("rms_norm d=768", m, seconds);
        report(
            "silu_mul inter=3072",
            m,
            time(|| cpu.silu_mul(&x, inter, &mut out)),
        );
        let shape = HeadShape {
            num_q_heads: 12,
            num_kv_heads: 4,
            head_dim: 64,
        };
        let layout = KvLayout {
            num_kv_heads: 4,
            head_dim: 64,
            block_size: BlockSize::new(32).expect("not zero"),
            dtype: env("KV_DTYPE").map_or(KvDtype::Bf16, |name| name.parse().expect("a type")),
        };
        // Sequences of one token each, as in generation.
        let mut cache = KvCache::new(layout, 1, m).expect("memory");
        let tables: Vec<_> = (0..m as u32).map(BlockId).collect();
        let spans: Vec<_> = (0..m as u32)
            .map(|i| KvSpan {
                tokens: i..i + 1,
                kv_len: 1 + i % 32,
                block_table: i..i + 1,
            })
            .collect();
        let rope = RopeTable::new(&[0.1; 32], 1.0, 32).expect("memory");
        let seconds = time(|| {
            let batch = cache.batch(&spans, &tables);
            let (qkv, q) = (&x[..m * shape.qkv_len()], &mut out[..m * shape.q_len()]);
            cpu.rope_and_store(qkv, shape, None, &rope, &batch, &mut cache, 0, q);
        });
        report("rope_and_store 12/4x64", m, seconds);
    }
}
