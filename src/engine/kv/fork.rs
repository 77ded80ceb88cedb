//! Sequences that go different ways from a common beginning: the beams of one request.
//!
//! All share the blocks by reference. Only the block that one is about to write has to be its own: it is
//! copied when others hold it too, so the last of them writes where it was.
//!
//! ```text
//! block_size = 4; both have computed 6 positions and write the next one
//!
//! table A   [ Block 7 , Block 2 ]     own_next      [ Block 7 , Block 9 ]     copy 2 -> 9, 2 positions
//! table B   [ Block 7 , Block 2 ]    --------->     [ Block 7 , Block 2 ]
//! ```

use super::{BlockTable, KvCacheManager};
use crate::base::{BlockId, Blocks, Tokens};
use crate::engine::BlockCopy;

impl KvCacheManager {
    /// Lets `to`, which is empty, hold all that `from` holds, no block of which is blank. What it computes
    /// later is nobody's to find.
    pub(in crate::engine) fn fork(&mut self, from: &BlockTable, to: &mut BlockTable) {
        to.copy_from(from);
        self.has_changed(to);
        for block in from.held_from_the_end() {
            self.pool.hold(block);
        }
    }

    /// Says that nobody is to find what the sequence of `table` computes from now on.
    pub(in crate::engine) fn stop_registering(&mut self, table: &mut BlockTable) {
        if let Some(chain) = table.places.chain.take() {
            let prefix = self.prefix.as_mut();
            prefix.expect("a chain is in an index").leave(chain.root);
        }
    }

    /// Sees to it that nobody else holds the block that position `computed`, the next one, lies in: if
    /// others do, its beginning goes to one of its own when `copies` are made.
    pub(in crate::engine) fn own_next(&mut self, table: &mut BlockTable, computed: Tokens) {
        let Some(place) = self.shared_next(table, computed) else {
            return;
        };
        let target = self.take();
        let source = table.replace(place, target);
        self.has_changed(table);
        self.pool.give_back(source);
        self.copies.push(BlockCopy {
            source,
            target,
            num_positions: computed.0 % self.config.block_size.tokens().0,
        });
    }

    /// Blocks that `tables` hold and nobody else does, those at their first `num_skipped` places left out.
    pub(in crate::engine) fn num_own<'a>(
        &self,
        tables: impl Iterator<Item = &'a BlockTable>,
        num_skipped: Blocks,
    ) -> Blocks {
        let places = tables.flat_map(|table| table.blocks().iter().skip(num_skipped.index()));
        let mut held: Vec<_> = places.filter(|&&id| id != BlockId::NONE).collect();
        held.sort_unstable();
        let is_own = |same: &&[&BlockId]| self.pool.num_holders(*same[0]) as usize == same.len();
        let num_own = held.chunk_by(|a, b| a == b).filter(is_own).count();
        Blocks(num_own as u32)
    }

    /// The place of position `computed` in `table`, if it is partly filled and others hold its block.
    pub(super) fn shared_next(&self, table: &BlockTable, computed: Tokens) -> Option<usize> {
        let block_size = self.config.block_size.tokens().0;
        let place = (computed.0 / block_size) as usize;
        let is_begun = !computed.0.is_multiple_of(block_size);
        let is_shared = || self.pool.num_holders(table.blocks()[place]) > 1;
        (is_begun && is_shared()).then_some(place)
    }
}
