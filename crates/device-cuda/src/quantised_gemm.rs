//! Products with quantised weights.
//!
//! ```text
//! few rows    gemm_int4, _int8, ...     codes become bf16 in registers; parts of a sum are added by sum_splits
//! many rows   dequantise, cuBLASLt      some outputs at a time, so that their weights stay small
//! ```
//!
//! The first way gives a row the same bits in any batch. Deterministic products take it for any number of rows.

use std::sync::Arc;

use cudarc::driver::{CudaFunction, CudaStream, LaunchConfig, PushKernelArg};

use super::Cuda;
use super::gemm::{self, Elements, Operands};
use super::kernels::{Kernels, launch, shared_row_grid};
use super::memory::DeviceMemory;
use super::quantised::{CodeKind, QuantisedWeights, TILE_ROWS};
use inflight_base::LoadError;
use inflight_device::{Output, QuantisedWidths};

/// Rows that the kernels multiply at once; their names end with it.
const ROWS_AT_ONCE: [usize; 4] = [8, 16, 32, 64];
const MAX_ROWS_AT_ONCE: usize = 64;
/// Rows that are multiplied by the kernels for codes, unless products are deterministic; docs/src/gpus.md derives it.
pub(super) const MAX_FUSED_ROWS: usize = 128;
/// Threads of their blocks.
const BLOCK_THREADS: u32 = 256;
/// The kinds of codes, as kernels are named after them.
const KINDS: [&str; 4] = ["int4", "int8", "fp8", "e2m1"];
/// Bytes of the partial sums of a launch, if 64 rows need no more.
const PARTIAL_BYTES: usize = 64 << 20;
/// Bytes of the weights that are dequantised at a time.
const DEQUANTISED_BYTES: usize = 128 << 20;
/// Outputs of which some are dequantised at a time come in multiples of it: cuBLASLt's addresses are multiples of 256.
const OUTPUT_UNIT: usize = 64;

/// The kernels of quantised weights, and their scratch memory.
pub(super) struct QuantisedProducts {
    /// For [`KINDS`] of codes.
    gemms: [[CudaFunction; ROWS_AT_ONCE.len()]; KINDS.len()],
    dequantise: [CudaFunction; KINDS.len()],
    sum_splits: CudaFunction,
    gather_columns: CudaFunction,
    widths: QuantisedWidths,
    scratch: Scratch,
}

/// Memory of one product after the other.
struct Scratch {
    /// Activations in the order of the columns.
    inputs: DeviceMemory,
    partials: DeviceMemory,
    /// Weights in bf16.
    weights: DeviceMemory,
}

/// The bytes of [`Scratch`].
struct ScratchBytes {
    inputs: usize,
    partials: usize,
    weights: usize,
}

impl QuantisedProducts {
    /// Loads the kernels.
    ///
    /// # Errors
    ///
    /// None of them runs on this GPU.
    pub(super) fn new(stream: &Arc<CudaStream>, kernels: &Kernels) -> Result<Self, LoadError> {
        let function = |file, name: &str| kernels.function(file, name, 0);
        let gemms = |kind: &str| {
            let name = |rows: usize| format!("gemm_{kind}_m{rows}");
            let [m8, m16, m32, m64] = ROWS_AT_ONCE.map(name);
            let gemm = |name: String| function("quantised_gemm", &name);
            Ok::<_, LoadError>([gemm(m8)?, gemm(m16)?, gemm(m32)?, gemm(m64)?])
        };
        let dequantise = |kind: &str| function("dequantise", &format!("dequantise_{kind}"));
        let [int4, int8, fp8, e2m1] = KINDS;
        let empty = || DeviceMemory::new(stream, 0);
        Ok(Self {
            gemms: [gemms(int4)?, gemms(int8)?, gemms(fp8)?, gemms(e2m1)?],
            dequantise: [
                dequantise(int4)?,
                dequantise(int8)?,
                dequantise(fp8)?,
                dequantise(e2m1)?,
            ],
            sum_splits: function("sum_splits", "sum_splits")?,
            gather_columns: function("gather_columns", "gather_columns")?,
            widths: QuantisedWidths::default(),
            scratch: Scratch {
                inputs: empty()?,
                partials: empty()?,
                weights: empty()?,
            },
        })
    }

    /// Takes note of a matrix.
    pub(super) fn add(&mut self, n: usize, k: usize, is_reordered: bool) {
        self.widths.add(n, k, is_reordered);
    }

    /// Reserves the scratch memory for all matrices so far.
    ///
    /// # Errors
    ///
    /// There is not enough.
    pub(super) fn reserve(
        &mut self,
        stream: &Arc<CudaStream>,
        max_rows: usize,
    ) -> Result<(), LoadError> {
        let bytes = ScratchBytes::new(&self.widths, max_rows);
        self.scratch = Scratch {
            inputs: DeviceMemory::new(stream, bytes.inputs)?,
            partials: DeviceMemory::new(stream, bytes.partials)?,
            weights: DeviceMemory::new(stream, bytes.weights)?,
        };
        Ok(())
    }
}

/// Bytes of scratch memory of the products of a model, in steps of at most `max_rows` rows.
pub(super) fn num_scratch_bytes(widths: &QuantisedWidths, max_rows: usize) -> usize {
    let ScratchBytes {
        inputs,
        partials,
        weights,
    } = ScratchBytes::new(widths, max_rows);
    inputs + partials + weights
}

impl ScratchBytes {
    fn new(widths: &QuantisedWidths, max_rows: usize) -> Self {
        if widths.outputs == 0 {
            return Self {
                inputs: 0,
                partials: 0,
                weights: 0,
            };
        }
        let max_rows = max_rows.max(MAX_ROWS_AT_ONCE) + gemm::MAX_ROUNDING;
        let least_weights = 2 * OUTPUT_UNIT * widths.inputs;
        Self {
            inputs: 2 * max_rows * widths.reordered_inputs,
            partials: PARTIAL_BYTES.max(4 * MAX_ROWS_AT_ONCE * widths.outputs),
            weights: DEQUANTISED_BYTES.max(least_weights),
        }
    }
}

/// The number of parts that the sums over `k` are split into: so many that the blocks keep a large GPU busy, but not
/// depending on the number of rows.
fn num_splits(kind: CodeKind, n: usize, k: usize) -> usize {
    /// Blocks of a launch.
    const MANY_BLOCKS: usize = 256;
    /// Outputs of a block.
    const BLOCK_OUTPUTS: usize = 256;
    /// Tiles that a warp has on the way at once.
    const MIN_TILES: usize = 4;
    let num_tiles = k.div_ceil(kind.tile_columns());
    let most = (num_tiles / MIN_TILES).max(1);
    (MANY_BLOCKS / n.div_ceil(BLOCK_OUTPUTS).max(1)).clamp(1, most)
}

/// Rows of which a launch computes the partial sums.
fn rows_of_launch(n: usize, num_splits: usize) -> usize {
    let row_bytes = 4 * num_splits * n;
    let most = PARTIAL_BYTES / row_bytes;
    (most / MAX_ROWS_AT_ONCE).max(1) * MAX_ROWS_AT_ONCE
}

/// Outputs whose weights are dequantised at a time.
fn outputs_at_once(k: usize) -> usize {
    let most = DEQUANTISED_BYTES / (2 * k);
    (most / OUTPUT_UNIT).max(1) * OUTPUT_UNIT
}

/// The numbers of outputs that are dequantised at a time.
pub(super) fn dequantised_pieces(n: usize, k: usize) -> impl Iterator<Item = usize> {
    let outputs_at_once = outputs_at_once(k);
    (0..n)
        .step_by(outputs_at_once)
        .map(move |first| outputs_at_once.min(n - first))
}

fn index_of(kind: CodeKind) -> usize {
    match kind {
        CodeKind::Int4 => 0,
        CodeKind::Int8 => 1,
        CodeKind::Fp8 => 2,
        CodeKind::E2m1 => 3,
    }
}

/// A product with quantised weights: the addresses of `x` and `out`, and the shape.
#[derive(Clone, Copy)]
pub(super) struct QuantisedProduct<'a> {
    pub(super) num_rows: usize,
    pub(super) x: u64,
    pub(super) weights: &'a QuantisedWeights,
    pub(super) n: usize,
    pub(super) k: usize,
    pub(super) output: Output,
    pub(super) out: u64,
}

impl Cuda {
    /// `out = x * W^T`, or that added to `out`.
    pub(super) fn multiply_quantised(&mut self, product: QuantisedProduct<'_>) {
        let Some(products) = self.quantised.take() else {
            unreachable!("quantised weights have been packed");
        };
        let x = self.in_column_order(&products, &product);
        let product = QuantisedProduct { x, ..product };
        match product.num_rows <= MAX_FUSED_ROWS || self.gemm.is_deterministic() {
            true => self.multiply_codes(&products, product),
            false => self.multiply_dequantised(&products, product),
        }
        self.quantised = Some(products);
    }

    /// The address of the activations in the order of the columns.
    fn in_column_order(
        &mut self,
        products: &QuantisedProducts,
        product: &QuantisedProduct<'_>,
    ) -> u64 {
        let Some(order) = product.weights.input_order() else {
            return product.x;
        };
        let inputs = products.scratch.inputs.address();
        launch!(
            self,
            products.gather_columns,
            "gather_columns",
            shared_row_grid(product.num_rows, product.k),
            inputs,
            product.x,
            order,
            product.k as i32
        );
        inputs
    }

    fn multiply_codes(&mut self, products: &QuantisedProducts, product: QuantisedProduct<'_>) {
        let QuantisedProduct {
            num_rows,
            x,
            weights,
            n,
            k,
            output,
            out,
        } = product;
        let num_splits = num_splits(weights.kind, n, k);
        let addresses = weights.addresses(0, k);
        let partials = products.scratch.partials.address();
        let rows_of_launch = rows_of_launch(n, num_splits);
        for first in (0..num_rows).step_by(rows_of_launch) {
            let num_rows = rows_of_launch.min(num_rows - first);
            let variant = ROWS_AT_ONCE.iter().position(|&rows| num_rows <= rows);
            let variant = variant.unwrap_or(ROWS_AT_ONCE.len() - 1);
            let rows_at_once = ROWS_AT_ONCE[variant];
            // A warp has two tiles, or one with the most rows.
            let block_outputs = match rows_at_once == MAX_ROWS_AT_ONCE {
                true => 8 * TILE_ROWS,
                false => 16 * TILE_ROWS,
            };
            let config = LaunchConfig {
                grid_dim: (
                    n.div_ceil(block_outputs) as u32,
                    num_splits as u32,
                    num_rows.div_ceil(rows_at_once) as u32,
                ),
                block_dim: (BLOCK_THREADS, 1, 1),
                shared_mem_bytes: 0,
            };
            launch!(
                self,
                products.gemms[index_of(weights.kind)][variant],
                "quantised_gemm",
                config,
                partials,
                x + (2 * first * k) as u64,
                addresses.codes,
                addresses.scales,
                addresses.offsets,
                num_rows as i32,
                n as i32,
                k as i32,
                weights.group_size(k) as i32
            );
            launch!(
                self,
                products.sum_splits,
                "sum_splits",
                shared_row_grid(num_rows, n),
                out + (4 * first * n) as u64,
                partials,
                0_u64,
                num_splits as i32,
                n as i32,
                i32::from(output == Output::Add)
            );
        }
    }

    fn multiply_dequantised(
        &mut self,
        products: &QuantisedProducts,
        product: QuantisedProduct<'_>,
    ) {
        let QuantisedProduct {
            num_rows,
            x,
            weights,
            n,
            k,
            output,
            out,
        } = product;
        let dequantised = products.scratch.weights.address();
        let outputs_at_once = outputs_at_once(k);
        for first in (0..n).step_by(outputs_at_once) {
            let num_outputs = outputs_at_once.min(n - first);
            let addresses = weights.addresses(first, k);
            let num_tiles = k.div_ceil(weights.kind.tile_columns());
            let config = LaunchConfig {
                grid_dim: (
                    num_outputs.div_ceil(TILE_ROWS) as u32,
                    num_tiles.div_ceil(BLOCK_THREADS as usize / 32) as u32,
                    1,
                ),
                block_dim: (BLOCK_THREADS, 1, 1),
                shared_mem_bytes: 0,
            };
            launch!(
                self,
                products.dequantise[index_of(weights.kind)],
                "dequantise",
                config,
                dequantised,
                addresses.codes,
                addresses.scales,
                addresses.offsets,
                num_outputs as i32,
                k as i32,
                weights.group_size(k) as i32
            );
            self.multiply_elements(
                num_rows,
                Operands {
                    x,
                    weights: dequantised,
                    elements: Elements::Bf16,
                    n: num_outputs,
                    k,
                    output,
                    out: out + 4 * first as u64,
                    out_width: n,
                },
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_sums_of_a_launch_fit_the_scratch_memory() {
        for kind in [
            CodeKind::Int4,
            CodeKind::Int8,
            CodeKind::Fp8,
            CodeKind::E2m1,
        ] {
            for n in [
                1,
                16,
                255,
                4096,
                6144,
                28672,
                65536,
                65537,
                128_256,
                262_144,
                1 << 20,
            ] {
                for k in [32, 64, 4096, 14336, 1 << 17] {
                    let mut widths = QuantisedWidths::default();
                    widths.add(n, k, false);
                    let bytes = ScratchBytes::new(&widths, 8192);
                    let num_splits = num_splits(kind, n, k);
                    let num_rows = rows_of_launch(n, num_splits);
                    assert!(num_rows.is_multiple_of(MAX_ROWS_AT_ONCE));
                    assert!(4 * num_rows * num_splits * n <= bytes.partials, "{n} x {k}");
                    let num_outputs = outputs_at_once(k);
                    assert!(2 * num_outputs * k <= bytes.weights, "{n} x {k}");
                    assert!(
                        num_outputs.is_multiple_of(OUTPUT_UNIT)
                            && OUTPUT_UNIT.is_multiple_of(TILE_ROWS)
                    );
                    let most = k.div_ceil(kind.tile_columns()).div_ceil(4);
                    assert!((1..=most.max(1)).contains(&num_splits), "{n} x {k}");
                }
            }
        }
    }

    #[test]
    fn small_matrices_are_split_and_large_ones_are_not() {
        let splits = |n, k| num_splits(CodeKind::Int4, n, k);
        assert_eq!(
            [splits(4096, 4096), splits(6144, 4096), splits(28672, 4096)],
            [16, 10, 2]
        );
        assert_eq!([splits(128_256, 4096), splits(64, 64)], [1, 1]);
    }
}
