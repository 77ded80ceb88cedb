//! Which blocks the tokens of a step read and write.

use std::ops::Range;

use super::GroupBlocks;
use inflight_base::{BlockId, BlockSize};

/// One sequence's share of a step, as the device sees it.
///
/// ```text
/// positions of the sequence   |------ in the cache before ------|------ tokens ------|
///                             0                                                   kv_len
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KvSpan {
    /// Its tokens in the step's packed arrays, directly after those of the span before it.
    pub tokens: Range<u32>,
    /// Positions in the cache after the step; the tokens are the last of them.
    pub kv_len: u32,
    /// Its part of `block_tables`, in order of position, and for the same positions in order of
    /// [group](super::LayerGroups). [`BlockId::NONE`] stands for a block that this step neither writes nor reads.
    pub block_table: Range<u32>,
}

/// The spans of a step, checked against the pool that they are for.
#[derive(Clone, Copy)]
pub struct KvBatch<'a> {
    spans: &'a [KvSpan],
    /// Runs of tokens that see each other, in order.
    mutual: &'a [Range<u32>],
    block_tables: &'a [BlockId],
    num_groups: usize,
    num_tokens: usize,
    block_size: BlockSize,
    num_blocks: usize,
}

impl<'a> KvBatch<'a> {
    /// Checks the spans against a pool of `num_blocks` blocks for `num_groups` groups of layers.
    ///
    /// # Panics
    ///
    /// If the spans are not packed, a block table is too short for its `kv_len` or exceeds `block_tables`,
    /// or a block is neither in the pool nor [`BlockId::NONE`].
    pub fn new(
        spans: &'a [KvSpan],
        block_tables: &'a [BlockId],
        num_groups: usize,
        block_size: BlockSize,
        num_blocks: usize,
    ) -> Self {
        let positions_per_block = block_size.tokens().index();
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
                "{span:?}: kv_len includes the tokens"
            );
            assert!(
                table.len() / num_groups * positions_per_block >= span.kv_len as usize,
                "{span:?}: too few blocks"
            );
            for block in table {
                assert!(
                    block.index() < num_blocks || *block == BlockId::NONE,
                    "{block:?} of {num_blocks}"
                );
            }
        }
        Self {
            spans,
            mutual: &[],
            block_tables,
            num_groups,
            num_tokens: num_tokens as usize,
            block_size,
            num_blocks,
        }
    }

    /// This batch, in which each token of these runs also sees the tokens behind it in its run. In front of it, the
    /// token sees what [`AttentionParams`](super::AttentionParams) say.
    ///
    /// ```text
    /// run 3..7, window 2    0  1  2 |3  4  5  6| 7  8
    /// seen by 4                      ^  *  ^  ^
    /// seen by 7                               ^  *
    /// ```
    ///
    /// # Panics
    ///
    /// If the runs are not in order, or if one is not within the tokens of a span.
    #[must_use]
    pub fn with_mutual(self, mutual: &'a [Range<u32>]) -> Self {
        let mut end = 0;
        for run in mutual {
            let place = self.spans.partition_point(|it| it.tokens.end <= run.start);
            let span = self.spans.get(place);
            assert!(
                end <= run.start
                    && run.start < run.end
                    && span.is_some_and(|it| run.end <= it.tokens.end),
                "tokens {run:?} behind token {end} are of {span:?}"
            );
            end = run.end;
        }
        Self { mutual, ..self }
    }

    /// How many tokens behind it a token sees: the others of its run.
    pub fn num_seen_ahead(&self, token: usize) -> usize {
        let runs = self.mutual;
        let place = runs.partition_point(|run| run.end as usize <= token);
        match runs.get(place) {
            Some(run) if run.start as usize <= token => run.end as usize - 1 - token,
            _ => 0,
        }
    }

    /// Whether there are tokens that see each other.
    pub fn has_mutual(&self) -> bool {
        !self.mutual.is_empty()
    }

    /// Other spans of the same block tables, checked against the same pool.
    ///
    /// # Panics
    ///
    /// As [`KvBatch::new`], or if there are [runs](Self::with_mutual) of tokens that see each other.
    #[must_use]
    pub fn with_spans<'s>(&self, spans: &'s [KvSpan]) -> KvBatch<'s>
    where
        'a: 's,
    {
        assert!(!self.has_mutual(), "their tokens are in other places");
        KvBatch::new(
            spans,
            self.block_tables,
            self.num_groups,
            self.block_size,
            self.num_blocks,
        )
    }

    /// Tokens of the step.
    pub fn num_tokens(&self) -> usize {
        self.num_tokens
    }

    /// Positions per block.
    pub fn block_size(&self) -> BlockSize {
        self.block_size
    }

    /// The groups of layers that it has blocks for.
    pub fn num_groups(&self) -> usize {
        self.num_groups
    }

    /// The spans, in the order of their tokens.
    pub fn spans(&self) -> &'a [KvSpan] {
        self.spans
    }

    /// The blocks of a span for a group of layers, in order of position.
    pub fn block_table(&self, span: &KvSpan, group: usize) -> GroupBlocks<'a> {
        let blocks =
            &self.block_tables[span.block_table.start as usize..span.block_table.end as usize];
        GroupBlocks::new(blocks, self.num_groups, group)
    }

    /// The span of a token, and its position in the sequence.
    pub fn place(&self, token: usize) -> (&'a KvSpan, usize) {
        let spans = self.spans;
        let span = &spans[spans.partition_point(|span| span.tokens.end as usize <= token)];
        let position = span.kv_len as usize - (span.tokens.end as usize - token);
        (span, position)
    }

    /// Whether it was checked for a pool of this size and block size, for so many groups of layers.
    pub fn is_for(&self, num_groups: usize, block_size: BlockSize, num_blocks: usize) -> bool {
        self.num_groups == num_groups
            && self.block_size == block_size
            && self.num_blocks == num_blocks
    }
}
