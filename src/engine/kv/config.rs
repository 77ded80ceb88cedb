//! What a KV cache is, and whom a request shares it with.

use std::sync::Arc;

use super::AttentionWindow;
use crate::base::{BlockSize, Blocks, Tokens};

/// Whether and with whom a request shares blocks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReuseOptions {
    /// `false`: it neither takes over blocks nor leaves any to others.
    pub enabled: bool,
    /// It shares only with requests of the same salt.
    pub salt: Option<Arc<str>>,
}

impl Default for ReuseOptions {
    fn default() -> Self {
        Self {
            enabled: true,
            salt: None,
        }
    }
}

/// What a cache is, all known at load.
#[derive(Clone, Copy, Debug)]
pub(in crate::engine) struct KvCacheConfig {
    pub(in crate::engine) num_blocks: Blocks,
    pub(in crate::engine) block_size: BlockSize,
    /// `None` if every position is seen to the end.
    pub(in crate::engine) window: Option<AttentionWindow>,
    /// Tokens of one sequence in one step, at most; not zero.
    pub(in crate::engine) max_chunk: Tokens,
    /// Whether full blocks are kept for others.
    pub(in crate::engine) enable_reuse: bool,
    /// Whether the beginning of a block is copied where the whole block does not fit.
    pub(in crate::engine) enable_partial_reuse: bool,
}
