//! The states of all positions in the KV cache.

use bytemuck::allocation::try_zeroed_vec;
use half::bf16;
use half::slice::HalfFloatSliceExt;

use crate::limits::RunnerLimits;
use inflight_base::{BlockId, BlockSize, LoadError};
use inflight_device::KvSpan;
use inflight_engine::BlockMove;

/// A state of `width` elements for each position of each block, and of each block in host memory.
pub(super) struct StateStore {
    width: usize,
    block_size: BlockSize,
    blocks: Vec<bf16>,
    host_blocks: Vec<bf16>,
}

/// Bytes of the states of a block.
pub(crate) fn bytes_per_block(width: usize, block_size: BlockSize) -> usize {
    block_size.tokens().index() * width * size_of::<bf16>()
}

impl StateStore {
    pub(super) fn new(width: usize, limits: &RunnerLimits) -> Result<Self, LoadError> {
        let block_size = limits.block_size;
        let alloc = |num_blocks: usize| {
            let len = num_blocks * block_size.tokens().index() * width;
            try_zeroed_vec(len).map_err(|()| {
                LoadError::Resource(format!(
                    "no memory for the states of {num_blocks} blocks of the KV cache, {} bytes each; lower \
                     max_tokens_in_paged_kv_cache",
                    bytes_per_block(width, block_size)
                ))
            })
        };
        Ok(Self {
            width,
            block_size,
            blocks: alloc(limits.num_blocks.index())?,
            host_blocks: alloc(limits.num_host_blocks.index())?,
        })
    }

    /// Keeps the states of the tokens of a step, `[num_tokens, width]`.
    pub(super) fn store(&mut self, spans: &[KvSpan], block_tables: &[BlockId], states: &[f32]) {
        for span in spans {
            let tokens = span.tokens.start as usize..span.tokens.end as usize;
            let first = span.kv_len as usize - tokens.len();
            for (token, position) in tokens.zip(first..) {
                let table = &block_tables[span.block_table.start as usize..];
                let place = self.place(table, position);
                let state = &states[token * self.width..][..self.width];
                self.blocks[place..place + self.width].convert_from_f32_slice(state);
            }
        }
    }

    /// Appends the state at a position of a sequence, by its blocks.
    pub(super) fn append(&self, table: &[BlockId], position: usize, out: &mut Vec<f32>) {
        let place = self.place(table, position);
        let state = &self.blocks[place..place + self.width];
        let start = out.len();
        out.resize(start + self.width, 0.0);
        state.convert_to_f32_slice(&mut out[start..]);
    }

    /// Makes moves of blocks, one after the other.
    pub(super) fn move_blocks(&mut self, moves: &[BlockMove]) {
        let len = self.block_size.tokens().index() * self.width;
        for one in moves {
            match *one {
                BlockMove::Copy(copy) => {
                    let start = copy.source.index() * len;
                    let copied = start..start + copy.num_positions as usize * self.width;
                    self.blocks.copy_within(copied, copy.target.index() * len);
                }
                BlockMove::Offload { source, target } => {
                    let source = &self.blocks[source.index() * len..][..len];
                    self.host_blocks[target.index() * len..][..len].copy_from_slice(source);
                }
                BlockMove::Onboard { source, target } => {
                    let source = &self.host_blocks[source.index() * len..][..len];
                    self.blocks[target.index() * len..][..len].copy_from_slice(source);
                }
            }
        }
    }

    fn place(&self, table: &[BlockId], position: usize) -> usize {
        let block_size = self.block_size.tokens().index();
        let block = table[position / block_size].index();
        (block * block_size + position % block_size) * self.width
    }
}
