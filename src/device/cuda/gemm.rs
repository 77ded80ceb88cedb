//! Matrix products by cuBLASLt.

use std::collections::HashMap;
use std::ffi::c_void;
use std::sync::Arc;

use cudarc::cublaslt::result::{self, CublasError};
use cudarc::cublaslt::sys;
use cudarc::driver::CudaStream;

use super::memory::DeviceMemory;
use crate::base::LoadError;
use crate::device::Output;

/// Bytes of the workspace; cuBLASLt's documentation recommends 32 MiB for Hopper.
pub(super) const WORKSPACE_BYTES: usize = 32 << 20;

/// The library's handle, its workspace, and a plan for each shape that was computed so far.
pub(super) struct Gemm {
    handle: sys::cublasLtHandle_t,
    workspace: DeviceMemory,
    /// Whether sums are never split, which depends on the number of rows.
    is_deterministic: bool,
    plans: HashMap<Shape, Plan>,
}

// SAFETY: a handle may be used by any thread; plans are only used with it, by one thread at a time.
unsafe impl Send for Gemm {}

/// What a product reads and writes.
#[derive(Clone, Copy)]
pub(super) struct Operands {
    /// The address of `[num_rows, k]` in bf16.
    pub x: u64,
    /// The address of `[n, k]` in bf16.
    pub weights: u64,
    pub n: usize,
    pub k: usize,
    pub output: Output,
    /// The address of `[num_rows, n]` in f32.
    pub out: u64,
    /// Elements from a row of the output to the next one.
    pub out_width: usize,
}

/// The shape of a product `[m, k] x [n, k]^T`, `m` rounded up.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
struct Shape {
    m: usize,
    n: usize,
    k: usize,
    out_width: usize,
}

/// The descriptors of a shape, and the algorithm that cuBLASLt has chosen for it.
///
/// cuBLASLt has columns where we have rows, so it computes the transposed product:
///
/// ```text
/// weights     [n][k] row by row   = k x n, transposed to n x k     A
/// inputs      [m][k]              = k x m                          B
/// outputs     [m][n] of [m][width] = n x m                         C and D
/// ```
struct Plan {
    product: sys::cublasLtMatmulDesc_t,
    weights: sys::cublasLtMatrixLayout_t,
    inputs: sys::cublasLtMatrixLayout_t,
    outputs: sys::cublasLtMatrixLayout_t,
    algorithm: sys::cublasLtMatmulAlgo_t,
}

/// More rows than a product is rounded up by.
pub(super) const MAX_ROUNDING: usize = 64;

/// The number of rows that a product of `num_rows` is rounded up to, so that there are few plans. The rows beyond are
/// computed from whatever the buffers hold, and nobody reads them.
pub(super) const fn rounded_rows(num_rows: usize) -> usize {
    let unit = match num_rows {
        0..=8 => 1,
        9..=64 => 8,
        65..=256 => 16,
        _ => MAX_ROUNDING,
    };
    num_rows.next_multiple_of(unit)
}

impl Gemm {
    /// Starts cuBLASLt.
    ///
    /// # Errors
    ///
    /// It refuses, or there is no memory.
    pub fn new(stream: &Arc<CudaStream>, is_deterministic: bool) -> Result<Self, LoadError> {
        let handle = result::create_handle()
            .map_err(|error| LoadError::Resource(format!("cuBLASLt does not start: {error}")))?;
        Ok(Self {
            handle,
            workspace: DeviceMemory::new(stream, WORKSPACE_BYTES)?,
            is_deterministic,
            plans: HashMap::new(),
        })
    }

    /// Whether the sums of a row do not depend on the number of rows.
    pub fn is_deterministic(&self) -> bool {
        self.is_deterministic
    }

    /// `out = x * W^T`, or that added to `out`. `x` and `out` have room for [`rounded_rows`].
    ///
    /// # Errors
    ///
    /// cuBLASLt has no algorithm for the shape, or the launch fails.
    pub fn multiply(
        &mut self,
        stream: &CudaStream,
        num_rows: usize,
        operands: Operands,
    ) -> Result<(), CublasError> {
        let Operands {
            x,
            weights,
            n,
            k,
            output,
            out,
            out_width,
        } = operands;
        let shape = Shape {
            m: rounded_rows(num_rows),
            n,
            k,
            out_width,
        };
        if !self.plans.contains_key(&shape) {
            let plan = Plan::new(self.handle, shape, self.is_deterministic)?;
            self.plans.insert(shape, plan);
        }
        let plan = &self.plans[&shape];
        let one = 1.0_f32;
        let beta = match output {
            Output::Store => 0.0_f32,
            Output::Add => 1.0,
        };
        // SAFETY: the descriptors live as long as the plan, the factors until the call returns, and the addresses are
        // those of buffers of the shape, on the GPU of the stream.
        unsafe {
            result::matmul(
                self.handle,
                plan.product,
                (&raw const one).cast(),
                (&raw const beta).cast(),
                weights as *const c_void,
                plan.weights,
                x as *const c_void,
                plan.inputs,
                out as *const c_void,
                plan.outputs,
                out as *mut c_void,
                plan.outputs,
                &raw const plan.algorithm,
                self.workspace.address() as *mut c_void,
                self.workspace.num_bytes(),
                stream.cu_stream().cast(),
            )
        }
    }
}

impl Drop for Gemm {
    fn drop(&mut self) {
        self.plans.clear();
        // SAFETY: the handle is ours, and no plan uses it any more.
        if let Err(error) = unsafe { result::destroy_handle(self.handle) } {
            log::debug!("cuBLASLt does not stop: {error}");
        }
    }
}

impl Plan {
    fn new(
        handle: sys::cublasLtHandle_t,
        shape: Shape,
        is_deterministic: bool,
    ) -> Result<Self, CublasError> {
        let Shape { m, n, k, out_width } = shape;
        let compute = sys::cublasComputeType_t::CUBLAS_COMPUTE_32F;
        let f32_type = sys::cudaDataType_t::CUDA_R_32F;
        let bf16_type = sys::cudaDataType_t::CUDA_R_16BF;
        // Descriptors of a plan that fails half-way are not freed: the model does not load then.
        let product = result::create_matmul_desc(compute, f32_type)?;
        let weights = result::create_matrix_layout(bf16_type, k as u64, n as u64, k as i64)?;
        let inputs = result::create_matrix_layout(bf16_type, k as u64, m as u64, k as i64)?;
        let outputs = result::create_matrix_layout(f32_type, n as u64, m as u64, out_width as i64)?;
        // CUBLAS_OP_T of cublas_api.h; cuBLASLt's own header refers to it as a number of 32 bits.
        let transposed = 1_i32;
        let workspace_bytes = WORKSPACE_BYTES;
        let preference = result::create_matmul_pref()?;
        // SAFETY: all objects were created above, and the attributes have the sizes of their types.
        unsafe {
            result::set_matmul_desc_attribute(
                product,
                sys::cublasLtMatmulDescAttributes_t::CUBLASLT_MATMUL_DESC_TRANSA,
                (&raw const transposed).cast(),
                size_of_val(&transposed),
            )?;
            result::set_matmul_pref_attribute(
                preference,
                sys::cublasLtMatmulPreferenceAttributes_t::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                (&raw const workspace_bytes).cast(),
                size_of::<usize>(),
            )?;
            if is_deterministic {
                let no_splits =
                    sys::cublasLtReductionScheme_t::CUBLASLT_REDUCTION_SCHEME_NONE as u32;
                result::set_matmul_pref_attribute(
                    preference,
                    sys::cublasLtMatmulPreferenceAttributes_t::CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
                    (&raw const no_splits).cast(),
                    size_of_val(&no_splits),
                )?;
            }
            let best = result::get_matmul_algo_heuristic(
                handle, product, weights, inputs, outputs, outputs, preference,
            );
            result::destroy_matmul_pref(preference)?;
            Ok(Self {
                product,
                weights,
                inputs,
                outputs,
                algorithm: best?.algo,
            })
        }
    }
}

impl Drop for Plan {
    fn drop(&mut self) {
        // SAFETY: the descriptors are this plan's own.
        let freed = unsafe {
            [
                result::destroy_matmul_desc(self.product),
                result::destroy_matrix_layout(self.weights),
                result::destroy_matrix_layout(self.inputs),
                result::destroy_matrix_layout(self.outputs),
            ]
        };
        for error in freed.into_iter().filter_map(Result::err) {
            log::debug!("cuBLASLt keeps a descriptor: {error}");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_rounded_up_to_few_numbers() {
        let rounded = [0, 1, 8, 9, 64, 65, 256, 257, 8192].map(rounded_rows);
        assert_eq!(rounded, [0, 1, 8, 16, 64, 80, 256, 320, 8192]);
        let mut all: Vec<_> = (1..=8192).map(rounded_rows).collect();
        assert!(all.is_sorted());
        all.dedup();
        assert_eq!(all.len(), 8 + 7 + 12 + 124);
    }
}
