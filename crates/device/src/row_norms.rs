//! Norms of rows of queries and keys of which a rank has some heads.

use super::attention::{HeadPlaces, HeadShape, QkNorm};
use super::lacking::Lacking;
use super::load::Load;
use super::rank_host::RankHost;

/// Norms of [rows](super::QkNormKind::Row) over the heads of all ranks.
pub trait RowNormOps<D: Load>: Copy {
    /// Normalises queries and keys over all heads of the model, in `qkv`, `[num_rows, qkv_len]`, which has those of
    /// this rank. `squares`, `[num_rows, heads of the model]`, may hold anything afterwards.
    #[allow(clippy::too_many_arguments, reason = "each is an operand")]
    fn norm(
        self,
        device: &mut D,
        host: &mut RankHost,
        num_rows: usize,
        heads: HeadShape,
        norm: QkNorm<'_, D::Vector>,
        places: &HeadPlaces,
        qkv: &mut D::Sums,
        squares: &mut D::Sums,
    );
}

impl<D: Load> RowNormOps<D> for Lacking {
    fn norm(
        self,
        _: &mut D,
        _: &mut RankHost,
        _: usize,
        _: HeadShape,
        _: QkNorm<'_, D::Vector>,
        _: &HeadPlaces,
        _: &mut D::Sums,
        _: &mut D::Sums,
    ) {
        match self {}
    }
}
