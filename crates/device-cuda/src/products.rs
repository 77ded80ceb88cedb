//! Matrix products with weights of any kind.

use super::Cuda;
use super::fp8_gemm::{Fp8Product, Fp8Products};
use super::gemm::{self, Elements, Operands};
use super::matrix::{Matrix, Weights};
use super::quantised_gemm::{self, QuantisedProduct, QuantisedProducts};
use inflight_base::LoadError;
use inflight_device::{Output, PackedWeights};

impl Cuda {
    /// Takes note of a quantised matrix, of which there will be products.
    pub(super) fn note_quantised(&mut self, matrix: &Matrix) -> Result<(), LoadError> {
        let (n, k) = (matrix.n(), matrix.k());
        match &matrix.weights {
            Weights::Bf16(_) => {}
            Weights::Fp8(_) => {
                let products = match &mut self.fp8 {
                    Some(products) => products,
                    none => none.insert(Fp8Products::new(&self.stream, &self.kernels)?),
                };
                products.add(n, k);
                self.gemm.add(gemm_weights(matrix, Elements::E4m3), 1);
            }
            Weights::Quantised(weights) => {
                let products = match &mut self.quantised {
                    Some(products) => products,
                    none => none.insert(QuantisedProducts::new(&self.stream, &self.kernels)?),
                };
                products.add(n, k, weights.input_order().is_some());
                if !self.gemm.is_deterministic() {
                    for num_outputs in quantised_gemm::dequantised_pieces(n, k) {
                        let weights = gemm::Weights {
                            n: num_outputs,
                            ..gemm_weights(matrix, Elements::Bf16)
                        };
                        self.gemm.add(weights, quantised_gemm::MAX_FUSED_ROWS + 1);
                    }
                }
            }
        }
        Ok(())
    }

    pub(super) fn multiply(
        &mut self,
        num_rows: usize,
        x: u64,
        matrix: &Matrix,
        output: Output,
        out: u64,
    ) {
        let num_rows = self.padded(num_rows);
        if num_rows == 0 {
            return;
        }
        let (n, k) = (matrix.n(), matrix.k());
        match &matrix.weights {
            Weights::Bf16(memory) => self.multiply_elements(
                num_rows,
                Operands {
                    x,
                    weights: memory.address(),
                    elements: Elements::Bf16,
                    n,
                    k,
                    output,
                    out,
                    out_width: n,
                },
            ),
            Weights::Quantised(weights) => self.multiply_quantised(QuantisedProduct {
                num_rows,
                x,
                weights,
                n,
                k,
                output,
                out,
            }),
            Weights::Fp8(weights) => self.multiply_fp8(Fp8Product {
                num_rows,
                x,
                weights,
                n,
                k,
                output,
                out,
            }),
        }
    }

    /// A product by cuBLASLt.
    pub(super) fn multiply_elements(&mut self, num_rows: usize, operands: Operands) {
        if self.is_launching() {
            let result = self.gemm.multiply(&self.stream, num_rows, operands);
            self.record("a matrix product", result);
        }
    }
}

/// What cuBLASLt's plans for a matrix depend on.
pub(super) fn gemm_weights(matrix: &Matrix, elements: Elements) -> gemm::Weights {
    gemm::Weights {
        n: matrix.n(),
        k: matrix.k(),
        elements,
        out_width: matrix.n(),
    }
}
