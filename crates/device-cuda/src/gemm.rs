//! Matrix products by cuBLASLt.

use std::collections::{HashMap, HashSet};
use std::ffi::c_void;
use std::mem::MaybeUninit;
use std::sync::Arc;

use cudarc::cublaslt::result::{self, CublasError};
use cudarc::cublaslt::sys;
use cudarc::driver::CudaStream;

use super::memory::DeviceMemory;
use inflight_base::LoadError;
use inflight_device::Output;

/// Bytes of the workspace; cuBLASLt's documentation recommends 32 MiB for Hopper.
pub(super) const WORKSPACE_BYTES: usize = 32 << 20;

/// The library's handle, its workspace, and a plan for each shape that was computed so far.
pub(super) struct Gemm {
    handle: sys::cublasLtHandle_t,
    workspace: DeviceMemory,
    /// Whether a row's sums do not depend on the number of rows.
    is_deterministic: bool,
    plans: HashMap<Shape, Plan>,
    /// Weights that plans will be made for, and the number of rows from which on there are such products.
    noted: HashSet<(Weights, usize)>,
    /// The algorithms of deterministic products, for any number of rows.
    algorithms: HashMap<Weights, sys::cublasLtMatmulAlgo_t>,
}

// SAFETY: a handle may be used by any thread; plans are only used with it, by one thread at a time.
unsafe impl Send for Gemm {}

/// What a product reads and writes.
#[derive(Clone, Copy)]
pub(super) struct Operands {
    /// The address of `[num_rows, k]`.
    pub x: u64,
    /// The address of `[n, k]`.
    pub weights: u64,
    /// What both are.
    pub elements: Elements,
    pub n: usize,
    pub k: usize,
    pub output: Output,
    /// The address of `[num_rows, n]` in f32.
    pub out: u64,
    /// Elements from a row of the output to the next one.
    pub out_width: usize,
}

/// The numbers that are multiplied.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Elements {
    Bf16,
    /// FP8, without scales. `n` and `k` are multiples of 16.
    E4m3,
}

/// The shape of a product `[m, k] x [n, k]^T`, `m` rounded up.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
struct Shape {
    m: usize,
    weights: Weights,
}

/// What does not depend on the number of rows.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Weights {
    /// Outputs.
    pub n: usize,
    /// Inputs.
    pub k: usize,
    pub elements: Elements,
    /// Elements from a row of the output to the next one.
    pub out_width: usize,
}

/// The number of rows that the algorithm of deterministic products is chosen for. It computes all other numbers of rows
/// as well: for a small one it has small tiles, of which generation steps need many to keep the GPU busy.
const DETERMINISTIC_ROWS: usize = 64;

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
    descriptors: Descriptors,
    algorithm: sys::cublasLtMatmulAlgo_t,
}

/// cuBLASLt's description of a product.
struct Descriptors {
    product: sys::cublasLtMatmulDesc_t,
    weights: sys::cublasLtMatrixLayout_t,
    inputs: sys::cublasLtMatrixLayout_t,
    outputs: sys::cublasLtMatrixLayout_t,
}

/// Plans that are made when a model is loaded, at most: each takes some ten microseconds and a few kilobytes of the
/// host.
const MAX_PREPARED_PLANS: usize = 8192;

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
            noted: HashSet::new(),
            algorithms: HashMap::new(),
        })
    }

    /// Whether the sums of a row do not depend on the number of rows.
    pub fn is_deterministic(&self) -> bool {
        self.is_deterministic
    }

    /// Takes note of weights, of products with at least `min_rows` rows.
    pub fn add(&mut self, weights: Weights, min_rows: usize) {
        self.noted.insert((weights, min_rows));
    }

    /// Makes the plans of all products with the noted weights and up to `max_rows` rows, so that no step does. If they
    /// are very many, the last ones are left to the first steps that need them.
    ///
    /// # Errors
    ///
    /// cuBLASLt has no algorithm for a shape.
    pub fn prepare(&mut self, max_rows: usize) -> Result<(), LoadError> {
        let mut nums_of_rows: Vec<_> = (1..=max_rows).map(rounded_rows).collect();
        nums_of_rows.dedup();
        let noted = std::mem::take(&mut self.noted);
        let shapes = nums_of_rows.iter().flat_map(|&m| {
            let weights = noted.iter().filter(move |(_, min_rows)| m >= *min_rows);
            weights.map(move |&(weights, _)| Shape { m, weights })
        });
        for shape in shapes.take(MAX_PREPARED_PLANS) {
            self.plan(shape).map_err(|error| {
                let Weights { n, k, elements, .. } = shape.weights;
                LoadError::Resource(format!(
                    "cuBLASLt cannot multiply {} rows with weights of {n} x {k} in {elements:?}: {error}",
                    shape.m
                ))
            })?;
        }
        Ok(())
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
            elements,
            n,
            k,
            output,
            out,
            out_width,
        } = operands;
        let shape = Shape {
            m: rounded_rows(num_rows),
            weights: Weights {
                n,
                k,
                elements,
                out_width,
            },
        };
        self.plan(shape)?;
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
                plan.descriptors.product,
                (&raw const one).cast(),
                (&raw const beta).cast(),
                weights as *const c_void,
                plan.descriptors.weights,
                x as *const c_void,
                plan.descriptors.inputs,
                out as *const c_void,
                plan.descriptors.outputs,
                out as *mut c_void,
                plan.descriptors.outputs,
                &raw const plan.algorithm,
                self.workspace.address() as *mut c_void,
                self.workspace.num_bytes(),
                stream.cu_stream().cast(),
            )
        }
    }
}

impl Gemm {
    /// Makes the plan of a shape, unless there is one.
    fn plan(&mut self, shape: Shape) -> Result<(), CublasError> {
        if self.plans.contains_key(&shape) {
            return Ok(());
        }
        let descriptors = Descriptors::new(shape)?;
        let algorithm = match self.is_deterministic {
            false => descriptors.best_algorithm(self.handle, false)?,
            true => self.algorithm_of(shape.weights)?,
        };
        if self.is_deterministic {
            descriptors.check(self.handle, &algorithm)?;
        }
        let plan = Plan {
            descriptors,
            algorithm,
        };
        self.plans.insert(shape, plan);
        Ok(())
    }

    /// The algorithm of deterministic products with these weights.
    ///
    /// Without split sums, algorithms still differ in the order in which they add up: of the tiles of a sum, and inside
    /// of the tensor cores' instructions. So one algorithm serves every row count.
    fn algorithm_of(&mut self, weights: Weights) -> Result<sys::cublasLtMatmulAlgo_t, CublasError> {
        if let Some(algorithm) = self.algorithms.get(&weights) {
            return Ok(*algorithm);
        }
        let m = DETERMINISTIC_ROWS;
        let descriptors = Descriptors::new(Shape { m, weights })?;
        let algorithm = descriptors.best_algorithm(self.handle, true)?;
        self.algorithms.insert(weights, algorithm);
        Ok(algorithm)
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

impl Descriptors {
    fn new(shape: Shape) -> Result<Self, CublasError> {
        let Shape { m, weights } = shape;
        let Weights {
            n,
            k,
            elements,
            out_width,
        } = weights;
        let compute = sys::cublasComputeType_t::CUBLAS_COMPUTE_32F;
        let f32_type = sys::cudaDataType_t::CUDA_R_32F;
        let input_type = match elements {
            Elements::Bf16 => sys::cudaDataType_t::CUDA_R_16BF,
            Elements::E4m3 => sys::cudaDataType_t::CUDA_R_8F_E4M3,
        };
        // Descriptors of a plan that fails half-way are not freed: the model does not load then.
        let product = result::create_matmul_desc(compute, f32_type)?;
        let weights = result::create_matrix_layout(input_type, k as u64, n as u64, k as i64)?;
        let inputs = result::create_matrix_layout(input_type, k as u64, m as u64, k as i64)?;
        let outputs = result::create_matrix_layout(f32_type, n as u64, m as u64, out_width as i64)?;
        // CUBLAS_OP_T of cublas_api.h; cuBLASLt's own header refers to it as a number of 32 bits.
        let transposed = 1_i32;
        // SAFETY: the object was created above, and the attribute has the size of its type.
        unsafe {
            result::set_matmul_desc_attribute(
                product,
                sys::cublasLtMatmulDescAttributes_t::CUBLASLT_MATMUL_DESC_TRANSA,
                (&raw const transposed).cast(),
                size_of_val(&transposed),
            )?;
        }
        Ok(Self {
            product,
            weights,
            inputs,
            outputs,
        })
    }

    /// The algorithm that cuBLASLt expects to be the fastest; of those that do not split sums, if these are wanted.
    fn best_algorithm(
        &self,
        handle: sys::cublasLtHandle_t,
        keeps_sums_whole: bool,
    ) -> Result<sys::cublasLtMatmulAlgo_t, CublasError> {
        let workspace_bytes = WORKSPACE_BYTES;
        let preference = result::create_matmul_pref()?;
        // SAFETY: all objects are valid, and the attributes have the sizes of their types.
        unsafe {
            result::set_matmul_pref_attribute(
                preference,
                sys::cublasLtMatmulPreferenceAttributes_t::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                (&raw const workspace_bytes).cast(),
                size_of::<usize>(),
            )?;
            if keeps_sums_whole {
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
                handle,
                self.product,
                self.weights,
                self.inputs,
                self.outputs,
                self.outputs,
                preference,
            );
            result::destroy_matmul_pref(preference)?;
            Ok(best?.algo)
        }
    }

    /// Whether an algorithm that was chosen for another number of rows computes this one.
    ///
    /// # Errors
    ///
    /// It does not.
    fn check(
        &self,
        handle: sys::cublasLtHandle_t,
        algorithm: &sys::cublasLtMatmulAlgo_t,
    ) -> Result<(), CublasError> {
        let mut checked = MaybeUninit::uninit();
        // SAFETY: all objects are valid, and the result has room.
        let status = unsafe {
            sys::cublasLtMatmulAlgoCheck(
                handle,
                self.product,
                self.weights,
                self.inputs,
                self.outputs,
                self.outputs,
                algorithm,
                checked.as_mut_ptr(),
            )
        };
        status.result()
    }
}

impl Drop for Descriptors {
    fn drop(&mut self) {
        // SAFETY: the descriptors are these.
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
