//! The GPU: what it is, and what it can do.

use std::sync::Arc;
use std::time::Instant;

use cudarc::driver::CudaContext;
use half::bf16;
use inflight_device::{Linear, Load, Ops, Output, StepIo};
use inflight_device_cuda::{Cuda, CudaOptions, has_kernels, num_gpus};
use inflight_numbers::{Dtype, RawMatrix, Stacking};
use serde_json::json;

use super::check::Check;
use super::report::Report;
use crate::Result;
use crate::figures::four_digits;
use crate::limits::MachineLimits;

/// Measures the GPU.
pub fn run(check: &mut Check, report: &mut Report) -> Result<()> {
    let gpu = check.options.gpu;
    if !has_kernels() {
        return Err(
            "this program was built without CUDA kernels: build it after `cargo xtask kernels`"
                .into(),
        );
    }
    if num_gpus() <= gpu {
        return Err(format!("there is no driver, or no GPU {gpu}").into());
    }
    let context = CudaContext::new(gpu)?;
    let (free_bytes, memory_bytes) = context.mem_get_info()?;
    let (major, minor) = context.compute_capability()?;
    report.figures(
        "gpu",
        json!({
            "name": context.name()?,
            "compute_capability": format!("{major}.{minor}"),
            "memory_bytes": memory_bytes,
            "free_bytes": free_bytes,
        }),
    )?;
    let bytes_per_s = copy_bytes_per_s(&context, check.options.quick)?;
    report.figures(
        "copy on the GPU",
        json!({ "gb_per_s": four_digits(bytes_per_s / 1e9) }),
    )?;
    let flops = product_flops(gpu, &context, check.options.quick)?;
    report.figures(
        "bf16 product",
        json!({ "tflop_per_s": four_digits(flops / 1e12) }),
    )?;
    check.limits = Some(MachineLimits {
        read_bytes_per_s: bytes_per_s,
        // Steps and operations are measured in bf16 alone.
        f32_flops: flops,
        bf16_flops: flops,
        int8_ops: flops,
    });
    Ok(())
}

/// Bytes read and written in a second by copies from one half of some memory to the other.
fn copy_bytes_per_s(context: &Arc<CudaContext>, is_quick: bool) -> Result<f64> {
    let num_bytes = if is_quick { 1 << 20 } else { 2 << 30 };
    let stream = context.new_stream()?;
    let source = stream.alloc_zeros::<u8>(num_bytes)?;
    let mut target = stream.alloc_zeros::<u8>(num_bytes)?;
    let seconds = best_of(&mut || {
        stream.memcpy_dtod(&source, &mut target)?;
        Ok(stream.synchronize()?)
    })?;
    Ok(2.0 * num_bytes as f64 / seconds)
}

/// Operations per second of a product of square matrices.
fn product_flops(gpu: usize, context: &CudaContext, is_quick: bool) -> Result<f64> {
    let n = if is_quick { 64 } else { 8192 };
    let mut device = open(gpu)?;
    let linear = Linear {
        matrix: random_matrix(&mut device, n, n)?,
        bias: None,
        place: None,
    };
    let x = device.alloc_inputs(n, n)?;
    let mut out = device.alloc_sums(n, n)?;
    let seconds = best_of(&mut || {
        device.project(n, &x, &linear, Output::Store, None, &mut out);
        Ok(context.synchronize()?)
    })?;
    check_device(&mut device)?;
    Ok(2.0 * (n as f64).powi(3) / seconds)
}

/// The seconds of the fastest of several runs, after one that is not counted.
pub fn best_of(body: &mut dyn FnMut() -> Result<()>) -> Result<f64> {
    const NUM_RUNS: usize = 10;
    body()?;
    let mut best = f64::INFINITY;
    for _ in 0..NUM_RUNS {
        let start = Instant::now();
        body()?;
        best = best.min(start.elapsed().as_secs_f64());
    }
    Ok(best)
}

/// A device of its own, which launches every operation by itself.
pub fn open(gpu: usize) -> Result<Cuda> {
    Ok(Cuda::open(&CudaOptions {
        gpu,
        max_graphs: 0,
        ..CudaOptions::default()
    })?)
}

/// An error if an operation has failed.
pub fn check_device(device: &mut Cuda) -> Result<()> {
    let mut logits = device.alloc_logits(1, 8)?;
    device.host_logits(&mut logits, 0)?;
    Ok(())
}

/// A matrix of small numbers, which repeat themselves.
pub fn random_matrix(device: &mut Cuda, n: usize, k: usize) -> Result<<Cuda as Load>::Matrix> {
    const NUM_DIFFERENT: usize = 65_521;
    let numbers = (0..NUM_DIFFERENT).map(|i| bf16::from_f32((i * 7919 % 251) as f32 / 251.0 - 0.5));
    let block: Vec<u8> = numbers.flat_map(bf16::to_le_bytes).collect();
    let mut bytes = block.repeat((n * k).div_ceil(NUM_DIFFERENT));
    bytes.truncate(2 * n * k);
    let rows = RawMatrix::new(Dtype::Bf16, n, k, &bytes);
    device
        .pack(&[rows], Stacking::Concatenated)?
        .map_err(|_| "a matrix of finite numbers is not finite".into())
}
