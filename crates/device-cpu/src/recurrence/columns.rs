//! Columns of a state that are computed together.

use crate::Simd;

/// A computation on a state whose columns do not depend on each other.
pub(super) trait EachColumn {
    /// Computes `first..first + N`, with sums that stay in registers.
    fn compute<const N: usize>(&mut self, first: usize);
}

/// Computes all columns, as many together as there are registers for. Whole rows are read as memory is: their
/// prefetching is worth twice the speed where states are not in a cache.
///
/// ```text
/// AVX-512   | 128 | 128 | 64 | 32 | 1 | 1 |
/// others    | 64 | 64 | 64 | 64 | 64 | 32 | 1 | 1 |
/// ```
#[inline(always)]
pub(super) fn for_each_column(simd: Simd, num_columns: usize, columns: &mut impl EachColumn) {
    let mut first = 0;
    if matches!(simd, Simd::AmxBf16 | Simd::Avx512Bf16) {
        first = compute::<128>(first, num_columns, columns);
    }
    first = compute::<64>(first, num_columns, columns);
    first = compute::<32>(first, num_columns, columns);
    compute::<1>(first, num_columns, columns);
}

/// Computes runs of `N` columns while there are so many; returns the first column behind them.
#[inline(always)]
fn compute<const N: usize>(
    mut first: usize,
    num_columns: usize,
    columns: &mut impl EachColumn,
) -> usize {
    while first + N <= num_columns {
        columns.compute::<N>(first);
        first += N;
    }
    first
}
