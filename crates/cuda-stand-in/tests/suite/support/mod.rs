//! What the tests of the stand-in share.

use std::os::unix::process::ExitStatusExt;
use std::process::Output;
use std::sync::Arc;

use cudarc::driver::{
    CudaContext, CudaFunction, CudaSlice, CudaStream, DriverError, LaunchConfig, PushKernelArg, sys,
};
use cudarc::nvrtc::Ptx;

/// Threads of a block of the test kernels.
const BLOCK_LEN: u32 = 256;

/// What NaN poison looks like in f32.
pub const POISON: u32 = 0xffa5_ffa5;

/// Device 0. Nothing orders streams unless the test does.
pub fn context() -> Arc<CudaContext> {
    let context = CudaContext::new(0).expect("a device");
    // SAFETY: the tests order their work themselves, or show what happens if they do not.
    unsafe { context.disable_event_tracking() };
    context
}

pub fn kernel(context: &Arc<CudaContext>, name: &str) -> CudaFunction {
    let module = context.load_module(Ptx::from_binary(b"an image".to_vec()));
    let module = module.expect("every image loads");
    module
        .load_function(name)
        .expect("a kernel of the stand-in")
}

/// `out[i] += factor * x[i]`.
pub fn scale_add(
    stream: &CudaStream,
    kernel: &CudaFunction,
    out: &mut CudaSlice<f32>,
    x: &CudaSlice<f32>,
    factor: f32,
) -> Result<(), DriverError> {
    let len = out.len() as i32;
    let config = LaunchConfig {
        grid_dim: (out.len().div_ceil(BLOCK_LEN as usize) as u32, 1, 1),
        block_dim: (BLOCK_LEN, 1, 1),
        shared_mem_bytes: 0,
    };
    let mut launch = stream.launch_builder(kernel);
    launch.arg(out).arg(x).arg(&factor).arg(&len);
    // SAFETY: the arguments are those of the kernel, which stays within both slices.
    unsafe { launch.launch(config) }.map(|_| ())
}

pub fn error<T>(result: Result<T, DriverError>) -> sys::CUresult {
    match result {
        Ok(_) => sys::CUresult::CUDA_SUCCESS,
        Err(DriverError(error)) => error,
    }
}

/// What a process said that the stand-in has ended: `signal` is how.
pub fn ended_by(signal: i32, output: &Output) -> String {
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(
        output.status.signal(),
        Some(signal),
        "{:?}\n{text}",
        output.status
    );
    text
}
