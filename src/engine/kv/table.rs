//! The blocks of one sequence in the order of its positions, and how far they can be found by others.

use super::prefix::{Content, PrefixIndex};
use super::roots::RootId;
use crate::base::{BlockId, Blocks, Tokens};

/// A sequence's blocks: position `p` lies in block `p / block_size`, at offset `p % block_size`.
///
/// It grows at its end. A place in it keeps its index when its block is given back because of the
/// attention window: then [`BlockId::NONE`] is there.
///
/// What every step asks is here, all else one pointer away: most steps change nothing in most tables.
#[derive(Debug, Default)]
pub(in crate::engine) struct BlockTable {
    /// See [`version`](Self::version).
    pub(super) version: u64,
    len: Blocks,
    /// Until so many positions are computed there is nothing to commit.
    pub(super) next_commit: Tokens,
    pub(super) places: Box<Places>,
}

/// What is in a [`BlockTable`].
#[derive(Debug, Default)]
pub(super) struct Places {
    blocks: Vec<BlockId>,
    /// Places that are not `NONE`.
    num_held: Blocks,
    /// Places before it that are not the window's sinks are `NONE`.
    pub(super) hidden_to: usize,
    /// `None` if the sequence leaves nothing for others.
    pub(super) chain: Option<Chain>,
}

/// How far a sequence's blocks are in the prefix index.
#[derive(Debug)]
pub(super) struct Chain {
    pub(super) root: RootId,
    /// Below which content its next block goes; `None` if nobody could find it there.
    pub(super) tail: Option<Content>,
    /// The blocks above that.
    pub(super) num_committed: usize,
}

impl BlockTable {
    /// An empty table that can take `max_blocks` without allocating.
    pub(in crate::engine) fn with_capacity(max_blocks: Blocks) -> Self {
        let mut table = Self::default();
        table.places.blocks.reserve_exact(max_blocks.index());
        table
    }

    /// Places that it has room for.
    pub(in crate::engine) fn capacity(&self) -> Blocks {
        Blocks(self.places.blocks.capacity() as u32)
    }

    /// Changes whenever a place does, and is no other table's, so that who has a copy knows whether it is
    /// still the same. 0 if it is empty.
    pub(in crate::engine) fn version(&self) -> u64 {
        self.version
    }

    /// Places in it: blocks held, and blocks given back.
    pub(in crate::engine) fn len(&self) -> Blocks {
        self.len
    }

    /// Blocks held.
    pub(in crate::engine) fn num_held(&self) -> Blocks {
        self.places.num_held
    }

    /// All places.
    pub(in crate::engine) fn blocks(&self) -> &[BlockId] {
        &self.places.blocks
    }

    /// All places, and how far they are in the prefix index.
    pub(super) fn blocks_and_chain(&mut self) -> (&[BlockId], Option<&mut Chain>) {
        (&self.places.blocks, self.places.chain.as_mut())
    }

    /// Blocks held, the last first.
    pub(super) fn held_from_the_end(&self) -> impl Iterator<Item = BlockId> + '_ {
        let places = self.blocks().iter().rev().copied();
        places.filter(|&block| block != BlockId::NONE)
    }

    pub(super) fn push(&mut self, block: BlockId) {
        self.places.blocks.push(block);
        self.places.num_held += Blocks(1);
        self.len += Blocks(1);
    }

    /// Puts `num_blocks` into it, which is empty: they come from the end.
    pub(super) fn fill_from_the_end(
        &mut self,
        num_blocks: usize,
        blocks: impl Iterator<Item = BlockId>,
    ) {
        self.places.blocks.resize(num_blocks, BlockId::NONE);
        let places = self.places.blocks.iter_mut().rev();
        for (place, block) in places.zip(blocks) {
            *place = block;
        }
        self.len = Blocks(num_blocks as u32);
        self.places.num_held = self.len;
    }

    /// Makes it, which is empty, the same as `other`.
    pub(super) fn copy_from(&mut self, other: &Self) {
        debug_assert!(self.len == Blocks::ZERO && self.places.chain.is_none());
        self.places.blocks.extend_from_slice(other.blocks());
        self.places.num_held = other.num_held();
        self.places.hidden_to = other.places.hidden_to;
        self.len = other.len;
    }

    /// Puts another block to `place`.
    pub(super) fn replace(&mut self, place: usize, block: BlockId) -> BlockId {
        std::mem::replace(&mut self.places.blocks[place], block)
    }

    /// Takes the block at `place` out.
    pub(super) fn hide(&mut self, place: usize) -> BlockId {
        self.places.num_held -= Blocks(1);
        self.replace(place, BlockId::NONE)
    }

    /// Empties it; its memory stays.
    pub(super) fn clear(&mut self) {
        self.places.blocks.clear();
        self.places.num_held = Blocks::ZERO;
        self.places.hidden_to = 0;
        self.places.chain = None;
        (self.version, self.len, self.next_commit) = (0, Blocks::ZERO, Tokens::ZERO);
    }
}

impl Chain {
    /// Goes back to the last of `blocks` that can still be found, because the tail is gone: it was in
    /// another sequence's block, or below one, that was evicted. What this sequence holds after it
    /// can be registered instead, unless something between is given back.
    pub(super) fn retreat(&mut self, blocks: &[BlockId], prefix: &PrefixIndex) {
        let mut committed = blocks[..self.num_committed].iter();
        let last = committed.rposition(|&it| it == BlockId::NONE || prefix.is_registered(it));
        self.num_committed = last.map_or(0, |last| last + 1);
        self.tail = match last {
            None => Some(prefix.root(self.root)),
            Some(last) if blocks[last] == BlockId::NONE => None,
            Some(last) => prefix.content_of(blocks[last]),
        };
    }
}
