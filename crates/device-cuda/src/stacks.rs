//! The matrices of many experts, or heads, as one.

use super::Cuda;
use super::matrix::Matrix;
use super::quantised;
use inflight_base::LoadError;
use inflight_device::Stacks;
use inflight_numbers::{FloatRows, NotFinite, QuantisedRows, QuantisedShape};

/// How a GPU packs many experts, or heads, as one matrix.
#[derive(Clone, Copy, Debug)]
pub struct CudaStacks;

impl Stacks<Cuda> for CudaStacks {
    fn pack<M: FloatRows>(
        self,
        cuda: &mut Cuda,
        parts: &[M],
    ) -> Result<Result<Matrix, NotFinite>, LoadError> {
        // cuBLASLt does not multiply with them.
        Matrix::upload(&cuda.stream, &mut cuda.pool, parts)
    }

    fn pack_quantised(
        self,
        cuda: &mut Cuda,
        parts: &[&dyn QuantisedRows],
    ) -> Result<Result<Matrix, NotFinite>, LoadError> {
        Matrix::upload_experts(&cuda.stream, &mut cuda.pool, parts)
    }

    fn num_bytes(self, shape: QuantisedShape, are_twice_e2m1: bool) -> usize {
        quantised::num_expert_bytes(shape, are_twice_e2m1)
    }
}
