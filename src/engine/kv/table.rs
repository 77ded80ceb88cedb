//! The blocks of one sequence in the order of its positions, and how far they can be found by others.

use super::prefix::{Content, PrefixIndex};
use super::roots::RootId;
use crate::base::{BlockId, Blocks, Tokens};

/// A sequence's blocks: position `p` lies in block `p / block_size`, at offset `p % block_size`.
///
/// It grows at its end. A place in it keeps its index when its block is given back because of the
/// attention window: then [`BlockId::NONE`] is there.
#[derive(Debug, Default)]
pub(in crate::engine) struct BlockTable {
    pub(super) blocks: Vec<BlockId>,
    /// Places that are not `NONE`.
    pub(super) num_held: Blocks,
    /// Places before it that are not the window's sinks are `NONE`.
    pub(super) hidden_to: usize,
    /// Until so many positions are computed there is nothing to commit.
    pub(super) next_commit: Tokens,
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
        Self {
            blocks: Vec::with_capacity(max_blocks.index()),
            ..Self::default()
        }
    }

    /// Places that it has room for.
    pub(in crate::engine) fn capacity(&self) -> Blocks {
        Blocks(self.blocks.capacity() as u32)
    }

    /// Places in it: blocks held, and blocks given back.
    pub(in crate::engine) fn len(&self) -> Blocks {
        Blocks(self.blocks.len() as u32)
    }

    /// Blocks held.
    pub(in crate::engine) fn num_held(&self) -> Blocks {
        self.num_held
    }

    /// All places.
    pub(in crate::engine) fn blocks(&self) -> &[BlockId] {
        &self.blocks
    }

    /// Blocks held, the last first.
    pub(super) fn held_from_the_end(&self) -> impl Iterator<Item = BlockId> + '_ {
        let places = self.blocks.iter().rev().copied();
        places.filter(|&block| block != BlockId::NONE)
    }

    pub(super) fn push(&mut self, block: BlockId) {
        self.blocks.push(block);
        self.num_held += Blocks(1);
    }

    /// Takes the block at `place` out.
    pub(super) fn hide(&mut self, place: usize) -> BlockId {
        self.num_held -= Blocks(1);
        std::mem::replace(&mut self.blocks[place], BlockId::NONE)
    }

    /// Empties it; its memory stays.
    pub(super) fn clear(&mut self) {
        self.blocks.clear();
        self.num_held = Blocks::ZERO;
        self.hidden_to = 0;
        self.next_commit = Tokens::ZERO;
        self.chain = None;
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
