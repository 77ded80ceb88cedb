//! The block tables of a step. They stay in it from step to step, because most of them do not change.
//!
//! ```text
//! slot 0   [ 7 | 2 | 5 |   |   |   ]     a row is as long as the table of the longest sequence;
//! slot 1   [ 7 | 2 | 1 | 4 |   |   ]     the entries behind a table are undefined
//! ...
//! ```

use std::ops::Range;

use crate::EngineConfig;
use crate::kv::BlockTable;
use inflight_base::{BlockId, SeqSlot, StateRow};

/// A row of blocks for each sequence or, with beam search, for each beam.
pub(super) struct TableRows {
    /// `[num_rows, row_len]`, with as many rows as were needed so far.
    blocks: Vec<BlockId>,
    row_len: usize,
    /// The version of the table in each row.
    versions: Vec<u64>,
    max_beam_width: usize,
}

impl TableRows {
    /// No rows.
    pub(super) fn new(config: &EngineConfig) -> Self {
        Self {
            blocks: Vec::with_capacity(config.num_blocks.index()),
            row_len: config.max_table_len().index(),
            versions: Vec::new(),
            max_beam_width: config.max_beam_width as usize,
        }
    }

    /// All rows, end to end.
    pub(super) fn blocks(&self) -> &[BlockId] {
        &self.blocks
    }

    /// Updates the row of a beam of the sequence in `slot` from its table. Returns the range of the table in
    /// [`blocks`](Self::blocks).
    #[inline]
    pub(super) fn put(&mut self, slot: SeqSlot, beam: u32, table: &BlockTable) -> Range<u32> {
        let row = slot.index() * self.max_beam_width + beam as usize;
        if self.versions.get(row) != Some(&table.version()) {
            self.copy(row, table);
        }
        let start = row * self.row_len;
        debug_assert!(self.blocks[start..].starts_with(table.blocks()));
        start as u32..start as u32 + table.blocks().len() as u32
    }

    /// The row of the recurrent states of a beam of the sequence in `slot`, by their index among its beams.
    #[inline]
    pub(super) fn state_row(&self, slot: SeqSlot, state: u32) -> StateRow {
        slot.state_row(state, self.max_beam_width as u32)
    }

    // Once a block: kept out of the loop over all sequences.
    #[cold]
    fn copy(&mut self, row: usize, table: &BlockTable) {
        if row >= self.versions.len() {
            self.versions.resize(row + 1, 0);
            self.blocks.resize((row + 1) * self.row_len, BlockId::NONE);
        }
        let start = row * self.row_len;
        self.blocks[start..start + table.blocks().len()].copy_from_slice(table.blocks());
        self.versions[row] = table.version();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kv::KvCacheManager;
    use crate::{AttentionWindow, KvGroups};
    use inflight_base::{BlockSize, Blocks, Tokens};

    #[test]
    fn a_row_follows_its_table_whatever_becomes_of_it() {
        let config = EngineConfig {
            block_size: BlockSize::new(4).expect("not zero"),
            num_blocks: Blocks(32),
            max_seq_len: Tokens(32),
            max_num_tokens: Tokens(16),
            max_beam_width: 2,
            groups: KvGroups::new(&[
                None,
                Some(AttentionWindow {
                    size: Tokens(5),
                    num_sinks: Tokens(0),
                }),
            ]),
            ..EngineConfig::default()
        };
        let mut kv = KvCacheManager::new(config.kv_cache());
        let mut rows = TableRows::new(&config);
        let tokens: Vec<_> = (0..32).collect();
        let (mut table, mut beam) = (BlockTable::default(), BlockTable::default());
        let mut check = |beam, table: &BlockTable| {
            let row = rows.put(SeqSlot(3), beam, table);
            assert_eq!(
                rows.blocks()[row.start as usize..row.end as usize],
                *table.blocks()
            );
        };

        kv.reserve(&mut table, &tokens[..9], &Default::default(), Tokens(9));
        check(0, &table);
        kv.commit(&mut table, &tokens, Tokens(9));
        assert_eq!(table.at(0, 1), BlockId::NONE, "outside of the window");
        check(0, &table);
        kv.grow(&mut table, Tokens(13));
        check(0, &table);
        kv.commit(&mut table, &tokens, Tokens(13));
        check(0, &table);
        kv.fork(&table, &mut beam);
        check(1, &beam);
        kv.own_next(&mut beam, Tokens(13));
        assert_ne!(beam.blocks(), table.blocks());
        check(1, &beam);
        check(0, &table);

        // Others get the row, with as many blocks.
        check(0, &beam);
        kv.release(&mut table);
        kv.reserve(&mut table, &tokens[5..18], &Default::default(), Tokens(9));
        assert_eq!(table.len(), beam.len());
        check(0, &table);
    }
}
