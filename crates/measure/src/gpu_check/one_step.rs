//! One step of a model with one layer.

use inflight_base::{BlockId, BlockSize, TokenId};
use inflight_device::{
    AdapterCapacity, HeadShape, KvDtype, KvLayout, KvLayouts, KvSpan, KvValues, LayerGroups, Load,
    StepCapacity, StepInputs,
};
use inflight_device_cuda::Cuda;
use inflight_sampling::DeviceSampling;

use crate::Result;

const BLOCK_SIZE: usize = 32;

/// One step of some sequences.
pub struct OneStep {
    max_seq_len: usize,
    /// Below the rows of the embedding.
    pub token_ids: Vec<TokenId>,
    spans: Vec<KvSpan>,
    block_tables: Vec<BlockId>,
    kept_rows: Vec<u32>,
    sampled_rows: Vec<u32>,
    /// As of [`StepInputs`].
    pub sampling: Vec<Option<DeviceSampling>>,
    /// As of [`StepInputs`].
    pub change_lists: Vec<u32>,
}

impl OneStep {
    /// Each sequence generates a token.
    pub fn generation(num_rows: usize, context_len: usize) -> Self {
        let num_blocks = context_len.div_ceil(BLOCK_SIZE) as u32;
        let rows = 0..num_rows as u32;
        let spans = rows.clone().map(|row| KvSpan {
            tokens: row..row + 1,
            kv_len: context_len as u32,
            block_table: row * num_blocks..(row + 1) * num_blocks,
        });
        Self {
            max_seq_len: context_len,
            token_ids: rows.clone().collect(),
            spans: spans.collect(),
            block_tables: (0..num_rows as u32 * num_blocks).map(BlockId).collect(),
            kept_rows: rows.clone().collect(),
            sampled_rows: rows.collect(),
            sampling: Vec::new(),
            change_lists: Vec::new(),
        }
    }

    /// The prompt of one sequence. Only its last row is kept.
    pub fn prompt(len: usize) -> Self {
        let num_blocks = len.div_ceil(BLOCK_SIZE) as u32;
        let num_tokens = len as u32;
        Self {
            max_seq_len: len,
            token_ids: vec![0; len],
            spans: vec![KvSpan {
                tokens: 0..num_tokens,
                kv_len: num_tokens,
                block_table: 0..num_blocks,
            }],
            block_tables: (0..num_blocks).map(BlockId).collect(),
            kept_rows: vec![num_tokens - 1],
            sampled_rows: vec![0],
            sampling: Vec::new(),
            change_lists: Vec::new(),
        }
    }

    /// Positions of its longest sequence.
    pub fn max_seq_len(&self) -> usize {
        self.max_seq_len
    }

    /// Positions of all sequences.
    pub fn num_positions(&self) -> usize {
        self.spans.iter().map(|span| span.kv_len as usize).sum()
    }

    /// A cache of one layer with all blocks, for which the device is ready.
    ///
    /// # Errors
    /// There is not enough memory.
    pub fn cache(&self, device: &mut Cuda, heads: HeadShape) -> Result<<Cuda as Load>::KvCache> {
        self.cache_of(device, heads, KvValues::OfTheirOwn(heads.value_dim))
    }

    /// The same with values that may be in the keys.
    ///
    /// # Errors
    /// There is not enough memory.
    pub fn cache_of(
        &self,
        device: &mut Cuda,
        heads: HeadShape,
        values: KvValues,
    ) -> Result<<Cuda as Load>::KvCache> {
        let layout = KvLayout {
            num_kv_heads: heads.num_kv_heads,
            head_dim: heads.head_dim,
            values,
            indexer_dim: 0,
            block_size: BlockSize::new(BLOCK_SIZE as u32).ok_or("a block has positions")?,
            dtype: KvDtype::Bf16,
        };
        let cache = device.alloc_kv_cache(
            &KvLayouts::alike(layout, 1),
            &LayerGroups::one(1),
            self.block_tables.len(),
        )?;
        let capacity = StepCapacity {
            max_num_tokens: self.token_ids.len(),
            max_num_sequences: self.spans.len(),
            max_seq_len: self.max_seq_len,
            max_blocks_per_sequence: self.max_seq_len.div_ceil(BLOCK_SIZE),
            num_layer_groups: 1,
            num_q_heads: heads.num_q_heads,
            has_slopes: false,
            adapters: AdapterCapacity::default(),
        };
        device.reserve(&cache, &capacity)?;
        Ok(cache)
    }

    /// The step as devices take it.
    pub fn inputs(&self) -> StepInputs<'_> {
        StepInputs {
            token_ids: &self.token_ids,
            spans: &self.spans,
            block_tables: &self.block_tables,
            kept_rows: &self.kept_rows,
            sampled_rows: &self.sampled_rows,
            sampling: &self.sampling,
            change_lists: &self.change_lists,
            ..StepInputs::default()
        }
    }
}
