//! All blocks of the KV cache: how many tables hold each, and the list of free ones.
//!
//! The list is linked through the blocks' metadata: allocating, sharing and freeing are O(1) and use no other memory.
//! Cached blocks are behind blank ones, and retained ones behind those, so the front is always the right block to
//! allocate.
//!
//! ```text
//! front                                                                      back
//!   blank <-> blank <-> cached <-> cached <-> cached <-> retained <-> retained
//!   ^ freed last        ^ freed first         ^ last     ^ freed first ^ freed last
//! ```
//!
//! The blank block that was freed last comes first: its memory is most likely warm.

use inflight_base::{BlockId, Blocks};

/// The metadata of one block.
#[derive(Clone, Copy)]
struct PoolEntry {
    /// The number of tables that hold it. It is in the free list if that is zero.
    num_holders: u32,
    /// Whether its content can be found, and is worth keeping while the block is free.
    is_cached: bool,
    /// Whether a content that is worth keeping is to be kept before all others.
    is_retained: bool,
    /// Whether it was taken for layers with a window.
    is_windowed: bool,
    /// Its neighbours in the free list.
    previous: Option<BlockId>,
    next: Option<BlockId>,
}

/// All blocks, by id.
pub(super) struct BlockPool {
    blocks: Vec<PoolEntry>,
    front: Option<BlockId>,
    back: Option<BlockId>,
    /// The first retained block of the free list.
    first_retained: Option<BlockId>,
    num_free: Blocks,
    num_cached: Blocks,
    /// Held blocks that were taken for layers with a window.
    num_windowed: Blocks,
}

impl BlockPool {
    /// `num_blocks` blank blocks, which are taken in order of id.
    pub(super) fn new(num_blocks: Blocks) -> Self {
        let link = |id: u32| (id < num_blocks.0).then_some(BlockId(id));
        let blank = |id: u32| PoolEntry {
            num_holders: 0,
            is_cached: false,
            is_retained: false,
            is_windowed: false,
            previous: id.checked_sub(1).map(BlockId),
            next: link(id + 1),
        };
        Self {
            blocks: (0..num_blocks.0).map(blank).collect(),
            front: link(0),
            back: num_blocks.0.checked_sub(1).map(BlockId),
            first_retained: None,
            num_free: num_blocks,
            num_cached: Blocks::ZERO,
            num_windowed: Blocks::ZERO,
        }
    }

    pub(super) fn num_blocks(&self) -> Blocks {
        Blocks(self.blocks.len() as u32)
    }

    /// Free blocks.
    pub(super) fn num_free(&self) -> Blocks {
        self.num_free
    }

    /// Blocks whose content can be found, free or not.
    pub(super) fn num_cached(&self) -> Blocks {
        self.num_cached
    }

    /// Blocks that tables hold for layers with a window.
    pub(super) fn num_windowed(&self) -> Blocks {
        self.num_windowed
    }

    /// The number of tables that hold `id`.
    pub(super) fn num_holders(&self, id: BlockId) -> u32 {
        self.blocks[id.index()].num_holders
    }

    /// Takes the free block that will be missed least, for layers with a window or without. There is one: the capacity
    /// pass has counted.
    pub(super) fn take(&mut self, is_windowed: bool) -> BlockId {
        let id = self
            .front
            .expect("the capacity pass plans with free blocks only");
        self.blocks[id.index()].is_windowed = is_windowed;
        self.hold(id);
        id
    }

    /// One more table holds `id`, which may be free.
    pub(super) fn hold(&mut self, id: BlockId) {
        if self.blocks[id.index()].num_holders == 0 {
            self.unlink(id);
            self.num_windowed += self.if_windowed(id);
        }
        self.blocks[id.index()].num_holders += 1;
    }

    /// One table fewer holds `id`.
    pub(super) fn give_back(&mut self, id: BlockId) {
        let block = &mut self.blocks[id.index()];
        assert!(block.num_holders > 0, "{id:?} is free already");
        block.num_holders -= 1;
        if block.num_holders == 0 {
            self.link(id);
            self.num_windowed -= self.if_windowed(id);
        }
    }

    /// 1 if `id` was taken for layers with a window.
    fn if_windowed(&self, id: BlockId) -> Blocks {
        Blocks(u32::from(self.blocks[id.index()].is_windowed))
    }

    /// Sets whether the content of `id` is worth keeping. It is not retained.
    pub(super) fn set_cached(&mut self, id: BlockId, is_cached: bool) {
        let was_cached = self.blocks[id.index()].is_cached;
        self.num_cached += Blocks(u32::from(is_cached));
        self.num_cached -= Blocks(u32::from(was_cached));
        self.set_worth(id, is_cached, false);
    }

    /// Sets whether the content of `id`, which is worth keeping, is kept before all others that are not retained.
    pub(super) fn set_retained(&mut self, id: BlockId, is_retained: bool) {
        assert!(self.blocks[id.index()].is_cached, "{id:?} has no content");
        self.set_worth(id, true, is_retained);
    }

    /// Moves a free block to its new place in the free list.
    fn set_worth(&mut self, id: BlockId, is_cached: bool, is_retained: bool) {
        let is_free = self.blocks[id.index()].num_holders == 0;
        if is_free {
            self.unlink(id);
        }
        self.blocks[id.index()].is_cached = is_cached;
        self.blocks[id.index()].is_retained = is_retained;
        if is_free {
            self.link(id);
        }
    }

    /// Puts a block into the free list: a blank one to the front, a retained one to the back, and another cached one
    /// before those.
    fn link(&mut self, id: BlockId) {
        let block = &self.blocks[id.index()];
        let (previous, next) = match (block.is_cached, block.is_retained) {
            (false, _) => (None, self.front),
            (true, false) => match self.first_retained {
                None => (self.back, None),
                Some(first) => (self.blocks[first.index()].previous, Some(first)),
            },
            (true, true) => {
                self.first_retained.get_or_insert(id);
                (self.back, None)
            }
        };
        self.blocks[id.index()].previous = previous;
        self.blocks[id.index()].next = next;
        self.set_next_of(previous, Some(id));
        self.set_previous_of(next, Some(id));
        self.num_free += Blocks(1);
    }

    fn unlink(&mut self, id: BlockId) {
        let PoolEntry { previous, next, .. } = self.blocks[id.index()];
        if self.first_retained == Some(id) {
            self.first_retained = next;
        }
        self.set_next_of(previous, next);
        self.set_previous_of(next, previous);
        self.num_free -= Blocks(1);
    }

    /// `None` stands for the end of the list, on either side.
    fn set_next_of(&mut self, id: Option<BlockId>, next: Option<BlockId>) {
        match id {
            Some(id) => self.blocks[id.index()].next = next,
            None => self.front = next,
        }
    }

    fn set_previous_of(&mut self, id: Option<BlockId>, previous: Option<BlockId>) {
        match id {
            Some(id) => self.blocks[id.index()].previous = previous,
            None => self.back = previous,
        }
    }

    /// Panics unless every block is in the free list, blank before cached before retained, or in `held` as often as it
    /// says. `is_cached` says which content is worth keeping, and `is_retained` which of it before all others.
    pub(super) fn check_integrity(
        &self,
        held: impl Iterator<Item = BlockId>,
        is_cached: impl Fn(BlockId) -> bool,
        is_retained: impl Fn(BlockId) -> bool,
    ) {
        let mut num_holders = vec![0; self.blocks.len()];
        for id in held {
            num_holders[id.index()] += 1;
        }
        let mut is_listed = vec![false; self.blocks.len()];
        let mut worth = (false, false);
        let mut first_retained = None;
        let mut previous = None;
        let mut at = self.front;
        while let Some(id) = at {
            let block = &self.blocks[id.index()];
            let again = std::mem::replace(&mut is_listed[id.index()], true);
            assert!(!again, "{id:?} is twice in the free list");
            assert_eq!(block.previous, previous, "before {id:?} in the free list");
            let own = (block.is_cached, block.is_retained);
            assert!(worth <= own, "{id:?} is behind a block that is worth more");
            worth = own;
            if block.is_retained {
                first_retained.get_or_insert(id);
            }
            previous = at;
            at = block.next;
        }
        assert_eq!(self.back, previous, "the end of the free list");
        assert_eq!(self.first_retained, first_retained, "the first retained");
        let num_listed = is_listed.iter().filter(|&&is_listed| is_listed).count();
        assert_eq!(self.num_free.index(), num_listed, "free blocks");
        let num_cached = self.blocks.iter().filter(|block| block.is_cached).count();
        assert_eq!(self.num_cached.index(), num_cached, "cached blocks");
        let is_windowed = |block: &&PoolEntry| block.is_windowed && block.num_holders > 0;
        let num_windowed = self.blocks.iter().filter(is_windowed).count();
        assert_eq!(self.num_windowed.index(), num_windowed, "windowed blocks");
        for (index, block) in self.blocks.iter().enumerate() {
            let id = BlockId(index as u32);
            assert_eq!(block.num_holders, num_holders[index], "holders of {id:?}");
            assert_eq!(
                block.num_holders == 0,
                is_listed[index],
                "{id:?} is free if and only if nobody holds it"
            );
            assert_eq!(block.is_cached, is_cached(id), "whether {id:?} is cached");
            let is_retained = is_retained(id);
            assert_eq!(block.is_retained, is_retained, "whether {id:?} is retained");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_come_in_order_first_and_then_the_last_one_given_back() {
        let mut pool = BlockPool::new(Blocks(3));
        assert_eq!(
            [pool.take(false), pool.take(false)],
            [BlockId(0), BlockId(1)]
        );
        pool.give_back(BlockId(0));
        assert_eq!(
            [pool.take(false), pool.take(false)],
            [BlockId(0), BlockId(2)]
        );
        assert_eq!(pool.num_free(), Blocks(0));
    }

    #[test]
    fn cached_blocks_are_taken_after_blank_ones_and_the_first_given_back_first() {
        let mut pool = BlockPool::new(Blocks(4));
        for block in [pool.take(false), pool.take(false), pool.take(false)] {
            pool.set_cached(block, block != BlockId(1));
        }
        for block in [2, 1, 0] {
            pool.give_back(BlockId(block));
        }
        let is_cached = |block| block == BlockId(0) || block == BlockId(2);
        pool.check_integrity(std::iter::empty(), is_cached, |_| false);
        let taken: Vec<_> = (0..4).map(|_| pool.take(false).0).collect();
        assert_eq!(taken, [1, 3, 2, 0]);
    }

    #[test]
    fn retained_blocks_are_taken_last_until_they_are_no_longer_retained() {
        let mut pool = BlockPool::new(Blocks(5));
        let blocks: Vec<_> = (0..4).map(|_| pool.take(false)).collect();
        for &block in &blocks {
            pool.set_cached(block, true);
        }
        pool.set_retained(BlockId(0), true);
        for block in blocks {
            pool.give_back(block);
        }
        // Free blocks move, too.
        pool.set_retained(BlockId(1), true);
        pool.set_retained(BlockId(2), true);
        let is_retained = |block| block < BlockId(3);
        pool.check_integrity(std::iter::empty(), |block| block < BlockId(4), is_retained);
        pool.set_retained(BlockId(1), false);
        let taken: Vec<_> = (0..5).map(|_| pool.take(false).0).collect();
        assert_eq!(taken, [4, 3, 1, 0, 2]);
    }

    #[test]
    fn a_block_is_free_when_its_last_holder_gives_it_back() {
        let mut pool = BlockPool::new(Blocks(1));
        let block = pool.take(false);
        pool.hold(block);
        pool.give_back(block);
        assert_eq!(pool.num_free(), Blocks(0));
        pool.give_back(block);
        assert_eq!(pool.num_free(), Blocks(1));
    }

    #[test]
    #[should_panic(expected = "is free already")]
    fn a_block_cannot_be_given_back_twice() {
        let mut pool = BlockPool::new(Blocks(2));
        let block = pool.take(false);
        pool.give_back(block);
        pool.give_back(block);
    }
}
