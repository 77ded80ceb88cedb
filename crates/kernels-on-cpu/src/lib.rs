//! Runs the CUDA kernels of `kernels/` on the CPU, to test them without a GPU.
//!
//! ```text
//! cpp/               CUDA C++ for g++: cuda_cpu.h says what it finds and what it cannot show
//! src/lib.rs         launches a kernel by its name
//! src/arg.rs         its arguments
//! tests/             each kernel against a reference in f64, on random shapes and schedules
//! tests/kernels/     small right and wrong kernels, which show that the machine finds what is wrong
//! ```
//!
//! The sanitizers of g++ run the same tests, each as a build of its own:
//!
//! ```sh
//! export INFLIGHT_KERNEL_SANITIZER=address     # accesses out of bounds
//! export INFLIGHT_KERNEL_SANITIZER=undefined   # misaligned accesses, overflows
//! export INFLIGHT_KERNEL_SANITIZER=thread      # races; every CUDA thread is a thread of its own
//! cargo test -p inflight-kernels-on-cpu
//! ```

mod arg;

use std::error::Error;
use std::ffi::{CStr, CString, c_char};
use std::fmt;

pub use arg::Arg;

/// The shape of a launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Dims {
    /// Blocks in x, y and z.
    pub grid: [u32; 3],
    /// Threads of a block in x, y and z.
    pub block: [u32; 3],
    /// Bytes of dynamic shared memory of a block.
    pub shared_bytes: usize,
}

impl Dims {
    /// A grid of two dimensions, and blocks of one, without dynamic shared memory.
    pub const fn new(grid_x: usize, grid_y: usize, block: usize) -> Self {
        Self {
            grid: [grid_x as u32, grid_y as u32, 1],
            block: [block as u32, 1, 1],
            shared_bytes: 0,
        }
    }
}

/// What is wrong with a launch, or what the kernel did wrong: its name, the place in its source, and the block.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LaunchError(String);

impl fmt::Display for LaunchError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl Error for LaunchError {}

/// Runs a kernel to its end. The `seed` decides the order of blocks and threads.
///
/// # Errors
///
/// If there is no such kernel, numbers and sizes of arguments or the shape are not what it takes, or threads wait
/// for each other in vain.
///
/// # Safety
///
/// The kernel reads and writes what its arguments and their contents say: lengths, indices and `dims` must be as its
/// source describes them.
pub unsafe fn launch(
    kernel: &str,
    dims: Dims,
    seed: u64,
    args: &mut [Arg<'_>],
) -> Result<(), LaunchError> {
    let name = CString::new(kernel).map_err(|error| LaunchError(error.to_string()))?;
    let addresses: Vec<_> = args.iter_mut().map(Arg::address).collect();
    let arg_bytes: Vec<_> = args.iter().map(Arg::num_bytes).collect();
    let launch = sys::Launch {
        name: name.as_ptr(),
        grid: dims.grid,
        block: dims.block,
        shared_bytes: dims.shared_bytes,
        seed,
        args: addresses.as_ptr(),
        arg_bytes: arg_bytes.as_ptr(),
        num_args: args.len(),
    };
    let mut error = [0; 1024];
    // SAFETY: all pointers are those of vectors that outlive the call, the error is as long as said, and the caller
    // vouches for the kernel.
    let is_done =
        unsafe { sys::cuda_cpu_launch(&raw const launch, error.as_mut_ptr(), error.len()) };
    if is_done {
        return Ok(());
    }
    // SAFETY: the function has written a C string.
    let error = unsafe { CStr::from_ptr(error.as_ptr()) };
    Err(LaunchError(error.to_string_lossy().into_owned()))
}

/// The names of all kernels.
pub fn kernel_names() -> Vec<&'static str> {
    // SAFETY: the function gives a C string that is never freed.
    let names = unsafe { CStr::from_ptr(sys::cuda_cpu_kernel_names()) };
    names.to_str().unwrap_or_default().lines().collect()
}

/// `cpp/launch.h`.
mod sys {
    use super::c_char;
    use std::ffi::c_void;

    #[repr(C)]
    pub struct Launch {
        pub name: *const c_char,
        pub grid: [u32; 3],
        pub block: [u32; 3],
        pub shared_bytes: usize,
        pub seed: u64,
        pub args: *const *mut c_void,
        pub arg_bytes: *const usize,
        pub num_args: usize,
    }

    unsafe extern "C" {
        pub fn cuda_cpu_launch(
            launch: *const Launch,
            error: *mut c_char,
            error_bytes: usize,
        ) -> bool;
        pub fn cuda_cpu_kernel_names() -> *const c_char;
    }
}
