//! Random operands, launches and comparisons.

mod gpu;
pub mod quantised_matrix;

use std::env;
use std::hash::{BuildHasher, RandomState};

use half::bf16;
use inflight_kernels_on_cpu::{Arg, Dims, launch};

/// Random shapes and numbers of one test. A failing test prints its seed; `KERNEL_SEED` runs it again.
pub struct Random(fastrand::Rng);

impl Random {
    pub fn new() -> Self {
        let seed = match env::var("KERNEL_SEED") {
            Ok(seed) => seed.parse().expect("KERNEL_SEED is a number"),
            Err(_) => RandomState::new().hash_one("seed"),
        };
        println!("KERNEL_SEED={seed}");
        Self(fastrand::Rng::with_seed(seed))
    }

    /// A number from `first` to `last`, both included.
    pub fn between(&mut self, first: usize, last: usize) -> usize {
        self.0.usize(first..=last)
    }

    pub fn one_of<T: Copy>(&mut self, values: &[T]) -> T {
        values[self.0.usize(..values.len())]
    }

    pub fn coin(&mut self) -> bool {
        self.0.bool()
    }

    pub fn seed(&mut self) -> u64 {
        self.0.u64(..)
    }

    /// A number between -`size` and `size`.
    pub fn float(&mut self, size: f32) -> f32 {
        (2.0 * self.0.f32() - 1.0) * size
    }

    pub fn floats(&mut self, len: usize, size: f32) -> Vec<f32> {
        (0..len).map(|_| self.float(size)).collect()
    }

    pub fn bf16s(&mut self, len: usize, size: f32) -> Vec<bf16> {
        (0..len).map(|_| bf16::from_f32(self.float(size))).collect()
    }

    /// Numbers below `end`.
    pub fn indices(&mut self, len: usize, end: usize) -> Vec<u32> {
        (0..len).map(|_| self.0.u32(..end as u32)).collect()
    }

    /// `len` different numbers below `end`, in a random order.
    pub fn different(&mut self, len: usize, end: usize) -> Vec<u32> {
        let mut all: Vec<u32> = (0..end as u32).collect();
        self.0.shuffle(&mut all);
        all.truncate(len);
        all
    }

    /// The width of a row: one of vectors of 8 elements, or another, for which kernels take a slower path.
    pub fn width(&mut self) -> usize {
        match self.between(0, 2) {
            0 => 8 * self.between(1, 40),
            1 => self.between(1, 300),
            _ => 8 * self.between(100, 300),
        }
    }

    /// A number of threads for a block: a multiple of 32.
    pub fn block(&mut self, max_warps: usize) -> usize {
        32 * self.between(1, max_warps)
    }

    /// Runs a kernel.
    ///
    /// # Safety
    ///
    /// As [`launch`].
    pub unsafe fn launch(&mut self, kernel: &str, dims: Dims, args: &mut [Arg<'_>]) {
        let seed = self.seed();
        let done = match gpu::Gpu::here() {
            // SAFETY: the caller vouches for the kernel.
            Some(gpu) => unsafe { gpu.launch(kernel, dims, args) },
            // SAFETY: as above.
            None => unsafe { launch(kernel, dims, seed, args) }.map_err(|error| error.to_string()),
        };
        if let Err(error) = done {
            panic!("{error}");
        }
    }
}

/// Whether kernels run on a real GPU, which reaches what tests allocate, and nothing else.
pub fn is_on_gpu() -> bool {
    gpu::Gpu::here().is_some()
}

/// Numbers the cases of a test. Threads take some ten times as long as fibers.
pub fn cases(num_cases: usize) -> std::ops::Range<usize> {
    let is_slow = cfg!(kernel_sanitizer = "thread");
    0..if is_slow {
        num_cases.div_ceil(8)
    } else {
        num_cases
    }
}

/// Elements that a kernel must not leave.
pub const UNWRITTEN: f32 = f32::NAN;

pub fn unwritten(len: usize) -> Vec<f32> {
    vec![UNWRITTEN; len]
}

pub fn unwritten_bf16(len: usize) -> Vec<bf16> {
    vec![bf16::NAN; len]
}

/// Half a unit in the last place of bf16, relative.
pub const BF16_ROUNDING: f64 = 1.0 / 256.0;

/// The largest relative error of the f32 arithmetic of a short formula.
pub const F32_ROUNDING: f64 = 1e-6;

/// Checks that elements are those of a reference up to an error relative to the element, or to `size` if that is
/// larger.
#[track_caller]
pub fn assert_close<T: Into<f64> + Copy>(actual: &[T], expected: &[f64], relative: f64, size: f64) {
    assert_eq!(actual.len(), expected.len());
    for (index, (actual, expected)) in actual.iter().zip(expected).enumerate() {
        let actual: f64 = (*actual).into();
        let error = (actual - expected).abs();
        assert!(
            error <= relative * expected.abs().max(size),
            "element {index} is {actual}, not {expected}"
        );
    }
}

/// The value of a code of 4 bits of exponent and 3 of mantissa: IEEE's interpretation with a bias of 7, but no
/// infinities.
pub fn e4m3(code: u8) -> f64 {
    let fraction = f64::from(code & 7) / 8.0;
    let magnitude = match i32::from(code >> 3 & 0xf) {
        0 => fraction * 2.0_f64.powi(-6),
        exponent => (1.0 + fraction) * 2.0_f64.powi(exponent - 7),
    };
    assert!(!is_nan_e4m3(code));
    if code & 0x80 == 0 {
        magnitude
    } else {
        -magnitude
    }
}

pub fn is_nan_e4m3(code: u8) -> bool {
    code & 0x7f == 0x7f
}

pub fn to_f64(x: &[f32]) -> Vec<f64> {
    x.iter().map(|x| f64::from(*x)).collect()
}

/// The bits of elements, so that NaN is equal to itself.
pub fn bits(x: &[f32]) -> Vec<u32> {
    x.iter().map(|x| x.to_bits()).collect()
}
