//! Memory read bandwidth.

use std::hint::black_box;

use inflight_device_cpu::Simd;

use super::timing::seconds_on;

/// Several times the size of a large server's caches: reading 256 MiB repeatedly measured 1.5 times the memory's
/// bandwidth. Less in a build for tests, whose limits nobody reports.
const NUM_BYTES: usize = if cfg!(debug_assertions) {
    1 << 26
} else {
    1 << 30
};

/// The buffer that is read.
pub(crate) struct Memory(memmap2::MmapMut);

impl Memory {
    /// # Panics
    /// If the memory cannot be allocated.
    pub(crate) fn new() -> Self {
        // On huge pages, like the weights. Written once, so that the pages are not all the shared zero page.
        let mut map = memmap2::MmapMut::map_anon(NUM_BYTES).expect("memory");
        #[cfg(target_os = "linux")]
        let _ = map.advise(memmap2::Advice::HugePage);
        map.fill(1);
        Self(map)
    }

    /// Read bandwidth in bytes/s; each thread reads its own part.
    pub(crate) fn read_bytes_per_s(&self, num_threads: usize, simd: Simd) -> f64 {
        let data: &[u64] = bytemuck::cast_slice(&self.0);
        let share = data.len() / num_threads;
        let seconds = seconds_on(num_threads, |thread| {
            black_box(read(simd, &data[thread * share..][..share]));
        });
        (share * num_threads * size_of::<u64>()) as f64 / seconds
    }
}

/// Reads `data` with the widest loads of the instruction set.
fn read(simd: Simd, data: &[u64]) -> u64 {
    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx512f")]
    fn fold_avx512(data: &[u64]) -> u64 {
        fold(data)
    }
    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx2")]
    fn fold_avx2(data: &[u64]) -> u64 {
        fold(data)
    }
    match simd {
        // SAFETY: `MachineLimits::measure` checks that the CPU has these instructions.
        #[cfg(target_arch = "x86_64")]
        Simd::AmxBf16 | Simd::Avx512Bf16 => unsafe { fold_avx512(data) },
        // SAFETY: as above.
        #[cfg(target_arch = "x86_64")]
        Simd::Avx2 => unsafe { fold_avx2(data) },
        _ => fold(data),
    }
}

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
