//! The blocks of one sequence in order of position, and how far others can find them.

use super::prefix::{Content, PrefixIndex};
use super::roots::RootId;
use crate::base::{BlockId, Blocks, Tokens};

/// The block table of a sequence: position `p` is in block `p / block_size`, at offset `p % block_size`.
///
/// It grows at its end. A block that is freed because of the attention window leaves [`BlockId::NONE`] at its
/// place.
///
/// What every step reads is here, the rest behind a pointer: most steps change nothing in most tables.
#[derive(Debug, Default)]
pub(in crate::engine) struct BlockTable {
    version: u64,
    len: Blocks,
    next_commit: Tokens,
    places: Box<Places>,
}

/// The content of a [`BlockTable`].
#[derive(Debug, Default)]
struct Places {
    blocks: Vec<BlockId>,
    /// Places that are not `NONE`.
    num_held: Blocks,
    /// The places before it, except the window's sinks, are `NONE`.
    hidden_to: usize,
    /// `None` if others cannot reuse the sequence's blocks.
    chain: Option<Chain>,
}

/// The path of a sequence's full blocks in the prefix index.
#[derive(Debug)]
pub(super) struct Chain {
    root: RootId,
    /// The content below which its next block is registered; `None` if no lookup could find it there.
    tail: Option<Content>,
    /// The number of blocks above that.
    num_committed: usize,
}

impl BlockTable {
    /// An empty table that takes `max_blocks` without allocating.
    pub(in crate::engine) fn with_capacity(max_blocks: Blocks) -> Self {
        let mut table = Self::default();
        table.places.blocks.reserve_exact(max_blocks.index());
        table
    }

    /// Places that it has room for.
    pub(in crate::engine) fn capacity(&self) -> Blocks {
        Blocks(self.places.blocks.capacity() as u32)
    }

    /// A number that changes whenever a place does and that no other table has, so that a copy can be compared by
    /// it. 0 if the table is empty.
    #[inline]
    pub(in crate::engine) fn version(&self) -> u64 {
        self.version
    }

    /// The number of places: blocks held, and blocks freed.
    #[inline]
    pub(in crate::engine) fn len(&self) -> Blocks {
        self.len
    }

    /// The number of blocks held.
    pub(in crate::engine) fn num_held(&self) -> Blocks {
        self.places.num_held
    }

    /// All places.
    pub(in crate::engine) fn blocks(&self) -> &[BlockId] {
        &self.places.blocks
    }

    /// The blocks held, the last first.
    pub(super) fn held_from_the_end(&self) -> impl Iterator<Item = BlockId> + '_ {
        let places = self.blocks().iter().rev().copied();
        places.filter(|&block| block != BlockId::NONE)
    }

    /// Sets its [`version`](Self::version), because a place has changed.
    pub(super) fn set_version(&mut self, version: u64) {
        self.version = version;
    }

    /// The number of computed positions below which there is nothing to commit.
    #[inline]
    pub(super) fn next_commit(&self) -> Tokens {
        self.next_commit
    }

    pub(super) fn set_next_commit(&mut self, next_commit: Tokens) {
        self.next_commit = next_commit;
    }

    /// The place up to which blocks were freed, except the window's sinks.
    pub(super) fn hidden_to(&self) -> usize {
        self.places.hidden_to
    }

    /// Appends a block.
    pub(super) fn push(&mut self, block: BlockId) {
        self.places.blocks.push(block);
        self.places.num_held += Blocks(1);
        self.len += Blocks(1);
    }

    /// Fills an empty table with `num_blocks` blocks, which come from the last to the first.
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

    /// Makes an empty table the same as `other`, without its chain.
    pub(super) fn copy_from(&mut self, other: &Self) {
        debug_assert!(self.len == Blocks::ZERO && self.places.chain.is_none());
        self.places.blocks.extend_from_slice(other.blocks());
        self.places.num_held = other.num_held();
        self.places.hidden_to = other.places.hidden_to;
        self.len = other.len;
    }

    /// Puts another block in `place`. Returns the one that was there.
    pub(super) fn replace(&mut self, place: usize, block: BlockId) -> BlockId {
        std::mem::replace(&mut self.places.blocks[place], block)
    }

    /// Removes the blocks at `places`, the last first, and passes each to `give_back`.
    pub(super) fn hide(
        &mut self,
        places: std::ops::Range<usize>,
        mut give_back: impl FnMut(BlockId),
    ) {
        self.places.hidden_to = places.end;
        for place in places.rev() {
            self.places.num_held -= Blocks(1);
            give_back(self.replace(place, BlockId::NONE));
        }
    }

    /// Empties it and keeps its memory.
    pub(super) fn clear(&mut self) {
        self.places.blocks.clear();
        self.places.num_held = Blocks::ZERO;
        self.places.hidden_to = 0;
        self.places.chain = None;
        (self.version, self.len, self.next_commit) = (0, Blocks::ZERO, Tokens::ZERO);
    }

    /// The path of its blocks in the prefix index; `None` if others cannot reuse them.
    pub(super) fn chain(&self) -> Option<&Chain> {
        self.places.chain.as_ref()
    }

    /// All places, and the path of the blocks.
    pub(super) fn blocks_and_chain(&mut self) -> (&[BlockId], Option<&mut Chain>) {
        (&self.places.blocks, self.places.chain.as_mut())
    }

    /// Sets the path of its blocks.
    pub(super) fn set_chain(&mut self, chain: Chain) {
        self.places.chain = Some(chain);
    }

    /// Takes the path out: what the sequence computes from now on is not registered.
    pub(super) fn take_chain(&mut self) -> Option<Chain> {
        self.places.chain.take()
    }
}

impl Chain {
    /// The path of `num_committed` blocks from `root` to `tail`.
    pub(super) fn new(root: RootId, tail: Content, num_committed: usize) -> Self {
        Self {
            root,
            tail: Some(tail),
            num_committed,
        }
    }

    /// Where it begins.
    pub(super) fn root(&self) -> RootId {
        self.root
    }

    /// The content below which the next block is registered; `None` if no lookup could find it there.
    pub(super) fn tail(&self) -> Option<Content> {
        self.tail
    }

    /// Sets it, because the content of the last block has moved.
    pub(super) fn set_tail(&mut self, tail: Option<Content>) {
        self.tail = tail;
    }

    /// The number of blocks in it.
    pub(super) fn num_committed(&self) -> usize {
        self.num_committed
    }

    /// Appends a block, whose content is at `tail`.
    pub(super) fn advance(&mut self, tail: Option<Content>) {
        self.tail = tail;
        self.num_committed += 1;
    }

    /// Goes back to the last of `blocks` that can still be found, because the tail is gone: it was in another
    /// sequence's block, or below one, that was evicted. The blocks of this sequence after it can be registered
    /// instead, unless one between was freed.
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
