//! The matrices of many experts, or heads, as one.

use super::lacking::Lacking;
use super::load::Load;
use inflight_base::LoadError;
use inflight_numbers::{FloatRows, NotFinite, QuantisedRows, QuantisedShape};

/// Packs the matrices of all experts of a layer, or of all heads of [latent attention](super::LatentHeads), as one
/// matrix.
pub trait Stacks<D: Load>: Copy {
    /// Packs float matrices, one expert after the other, and gate in front of up.
    ///
    /// # Errors
    ///
    /// As [`Load::pack`].
    fn pack<M: FloatRows>(
        self,
        device: &mut D,
        parts: &[M],
    ) -> Result<Result<D::Matrix, NotFinite>, LoadError>;

    /// Packs quantised matrices, which can be packed together and have no input order, in the order of
    /// [`Stacks::pack`].
    ///
    /// # Errors
    ///
    /// As [`Load::pack_quantised`].
    fn pack_quantised(
        self,
        device: &mut D,
        parts: &[&dyn QuantisedRows],
    ) -> Result<Result<D::Matrix, NotFinite>, LoadError>;

    /// Bytes that [`Stacks::pack_quantised`] takes for one of the matrices. `are_twice_e2m1`: whether the
    /// [codes](QuantisedRows::are_twice_e2m1) of all of them are.
    fn num_bytes(self, shape: QuantisedShape, are_twice_e2m1: bool) -> usize;
}

impl<D: Load> Stacks<D> for Lacking {
    fn pack<M: FloatRows>(
        self,
        _: &mut D,
        _: &[M],
    ) -> Result<Result<D::Matrix, NotFinite>, LoadError> {
        match self {}
    }

    fn pack_quantised(
        self,
        _: &mut D,
        _: &[&dyn QuantisedRows],
    ) -> Result<Result<D::Matrix, NotFinite>, LoadError> {
        match self {}
    }

    fn num_bytes(self, _: QuantisedShape, _: bool) -> usize {
        match self {}
    }
}
