//! The view of the cache that a step has.

use std::ops::Range;

use super::KvCache;
use crate::base::{BlockId, BlockSize};

/// One sequence's share of a step, as the device sees it.
///
/// ```text
/// positions of the sequence   |------ in the cache before ------|------ tokens ------|
///                             0                                                   kv_len
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KvSpan {
    /// Its tokens in the step's packed arrays; those of the next sequence follow at once.
    pub tokens: Range<u32>,
    /// Positions in the cache after the step: the tokens are the last of them.
    pub kv_len: u32,
    /// Where its blocks lie in `block_tables`, in order of position. [`BlockId::NONE`] is the place of one
    /// that nothing of this step is stored in, and that no query of this step sees.
    pub block_table: Range<u32>,
}

/// The spans of a step, checked against a pool. Made by [`KvCache::batch`].
#[derive(Clone, Copy)]
pub struct KvBatch<'a> {
    spans: &'a [KvSpan],
    block_tables: &'a [BlockId],
    num_tokens: usize,
    block_size: BlockSize,
    num_blocks: usize,
}

impl<'a> KvBatch<'a> {
    /// Tokens of the step.
    pub fn num_tokens(&self) -> usize {
        self.num_tokens
    }

    /// The spans, in the order of their tokens.
    pub fn spans(&self) -> &'a [KvSpan] {
        self.spans
    }

    /// The blocks of a span, in order of position.
    pub(in super::super) fn block_table(&self, span: &KvSpan) -> &'a [BlockId] {
        &self.block_tables[span.block_table.start as usize..span.block_table.end as usize]
    }
}

impl KvCache {
    /// Checks a step's spans once, for all its operations.
    ///
    /// # Panics
    ///
    /// The spans are not packed, a block table is too short for its `kv_len` or leaves
    /// `block_tables`, or a block is neither of this pool nor [`BlockId::NONE`].
    pub fn batch<'a>(&self, spans: &'a [KvSpan], block_tables: &'a [BlockId]) -> KvBatch<'a> {
        let block_size = self.layout.positions_per_block();
        let mut num_tokens = 0;
        for span in spans {
            let table =
                &block_tables[span.block_table.start as usize..span.block_table.end as usize];
            assert!(
                span.tokens.start == num_tokens && span.tokens.end >= num_tokens,
                "tokens {:?} follow token {num_tokens}",
                span.tokens
            );
            num_tokens = span.tokens.end;
            assert!(
                span.tokens.len() <= span.kv_len as usize,
                "{span:?}: kv_len has the tokens"
            );
            assert!(
                table.len() * block_size >= span.kv_len as usize,
                "{span:?}: too few blocks"
            );
            for block in table {
                assert!(
                    block.index() < self.num_blocks || *block == BlockId::NONE,
                    "{block:?} of {}",
                    self.num_blocks
                );
            }
        }
        KvBatch {
            spans,
            block_tables,
            num_tokens: num_tokens as usize,
            block_size: self.layout.block_size,
            num_blocks: self.num_blocks,
        }
    }

    /// Whether `batch` was checked for a pool of this size and shape.
    pub(in super::super) fn fits(&self, batch: &KvBatch<'_>) -> bool {
        batch.num_blocks == self.num_blocks && batch.block_size == self.layout.block_size
    }
}
