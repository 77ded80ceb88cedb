//! How fast memory can be read.

use std::hint::black_box;

use triton_inflight::device::cpu::Simd;

use super::timing::seconds_on;

/// Some times what the caches of a large server keep of what is read over and over: 256 MiB came out half as
/// fast again as memory is.
const NUM_BYTES: usize = 1 << 30;

/// Memory to be read.
pub(crate) struct Memory(memmap2::MmapMut);

impl Memory {
    /// # Panics
    /// There is none.
    pub(crate) fn new() -> Self {
        // On huge pages like the weights, and written once, so that it is not one page of zeros.
        let mut map = memmap2::MmapMut::map_anon(NUM_BYTES).expect("memory");
        #[cfg(target_os = "linux")]
        let _ = map.advise(memmap2::Advice::HugePage);
        map.fill(1);
        Self(map)
    }

    /// Bytes a second, each thread a part of its own.
    pub(crate) fn read_bytes_per_s(&self, num_threads: usize, simd: Simd) -> f64 {
        let data: &[u64] = bytemuck::cast_slice(&self.0);
        let share = data.len() / num_threads;
        let seconds = seconds_on(num_threads, |thread| {
            black_box(read(simd, &data[thread * share..][..share]));
        });
        (share * num_threads * size_of::<u64>()) as f64 / seconds
    }
}

/// Reads as fast as the instruction set can.
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
        // SAFETY: `Limits::measure` has checked that the machine has them.
        #[cfg(target_arch = "x86_64")]
        Simd::Avx512Bf16 => unsafe { fold_avx512(data) },
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
