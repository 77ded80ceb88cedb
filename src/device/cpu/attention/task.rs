//! The part of a sequence that one thread computes at a time.

use crate::base::BlockId;

/// One key/value head of one sequence, and a tile of its queries.
pub(super) struct Task<'a> {
    /// Positions in the cache.
    pub kv_len: usize,
    pub block_table: &'a [BlockId],
    /// The key/value head.
    pub head: usize,
    /// In the packed arrays.
    pub first_token: usize,
    /// In the sequence.
    pub first_position: usize,
    pub num_tokens: usize,
}
