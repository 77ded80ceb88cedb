//! The unit of work of one thread.

use inflight_device::GroupBlocks;

/// A group of query heads of one sequence that share a key/value head, and a tile of their queries.
pub(super) struct Task<'a> {
    /// Positions of the sequence in the cache.
    pub kv_len: usize,
    pub block_table: GroupBlocks<'a>,
    /// The group of query heads.
    pub group: usize,
    /// Its key/value head.
    pub head: usize,
    /// Index of the first token in the packed arrays.
    pub first_token: usize,
    /// Position of the first token in the sequence.
    pub first_position: usize,
    pub num_tokens: usize,
    /// The only positions that its query sees, in order, if these are not all up to its own. The others are not
    /// counted: the sequence has as many positions as there are of these.
    pub selected: Option<&'a [u32]>,
}
