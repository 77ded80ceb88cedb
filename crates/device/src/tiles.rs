//! Sums over the inputs of products, cut into tiles.

use std::ops::Range;

use super::lacking::Lacking;
use super::linear::{Linear, Tile};
use super::load::Load;
use super::low_rank::AdaptedRows;
use super::operands::Output;
use super::rank_host::RankHost;

/// Products whose inputs are cut into tiles, each of which is summed by itself, so that the sums of 1, 2 and 4 ranks
/// are of the same bits. `x` is `[num_rows, inputs of the rank]`, `out` is `[num_rows, outputs]`.
pub trait TileOps<D: Load>: Copy {
    /// `out` becomes the sum over all tiles of all ranks of `x[inputs] * W^T + bias`, in pairs. `None` is a tile
    /// without inputs.
    fn sum(
        self,
        device: &mut D,
        host: &mut RankHost,
        num_rows: usize,
        x: &D::Inputs,
        tiles: &[Option<Tile<D>>],
        out: &mut D::Sums,
    );

    /// `out = x[inputs] * W^T + bias`, or this added to `out`. Adapters may change rows, by the same inputs.
    #[allow(clippy::too_many_arguments, reason = "each is an operand")]
    fn project(
        self,
        device: &mut D,
        num_rows: usize,
        x: &D::Inputs,
        inputs: Range<usize>,
        linear: &Linear<D>,
        adapted: Option<AdaptedRows<'_>>,
        output: Output,
        out: &mut D::Sums,
    );

    /// Makes all of `rows` -0, which changes no sum over all ranks.
    fn clear(self, device: &mut D, num_rows: usize, rows: &mut D::Sums);
}

impl<D: Load> TileOps<D> for Lacking {
    fn sum(
        self,
        _: &mut D,
        _: &mut RankHost,
        _: usize,
        _: &D::Inputs,
        _: &[Option<Tile<D>>],
        _: &mut D::Sums,
    ) {
        match self {}
    }

    fn project(
        self,
        _: &mut D,
        _: usize,
        _: &D::Inputs,
        _: Range<usize>,
        _: &Linear<D>,
        _: Option<AdaptedRows<'_>>,
        _: Output,
        _: &mut D::Sums,
    ) {
        match self {}
    }

    fn clear(self, _: &mut D, _: usize, _: &mut D::Sums) {
        match self {}
    }
}
