//! The prefix index: which full block holds which tokens after which other tokens.
//!
//! A trie by content. A node is a block whose tokens are all computed. Its parent is the content before it, or the
//! root of a cache salt. Two prompts with a common beginning share a path.
//!
//! ```text
//! block_size = 2                  root of salt A            root of salt B
//!                                  |         |                   |
//! contents                        1 [a b]   4 [b b]             6 [a b]
//!                                  |     |
//!                                 2 [c d] 3 [c e]
//!
//! a b c e f  below root A: contents 1 and 3 are found, f is new
//! a b c f g  below root A: content 1 is found; its children 2 and 3 both share c
//! ```
//!
//! With several groups of layers, the nodes are blocks of the first group, whose window is the largest. Those of other
//! groups are beside them. They come and go by themselves, and go with their node at the latest.
//!
//! - Each content has a number that is never used again, so nothing is found below a block that was taken and filled
//!   anew. Tokens are compared, never only their hashes.
//! - Every registered block can be found: forgetting a block forgets all below it. A block is forgotten once for each
//!   time it is registered, so the amortised cost is O(1).
//! - Everything is sized at load. Buckets have a maximum length, so that no choice of tokens makes a look-up slow. What
//!   does not fit is not registered.

use std::sync::Arc;

use super::NextBlock;
use super::roots::{RootId, Roots};
use inflight_base::{BlockId, BlockSize, Blocks, TokenId, Tokens};

/// The most blocks in one bucket. Only tokens chosen to collide fill it.
pub(super) const MAX_BUCKET: usize = 32;

/// The most children that are compared for a common beginning: those registered last.
pub(super) const MAX_CHILDREN: usize = 64;

/// A content and where it is. It may be gone: then another, or none, is there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Content {
    place: NodeRef,
    id: u64,
}

impl Content {
    /// The block that it is in, or was; `None` for a root.
    pub(super) fn block(self) -> Option<BlockId> {
        match self.place {
            NodeRef::Root(_) => None,
            NodeRef::Block(block) => Some(block),
        }
    }
}

/// A node of the trie.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum NodeRef {
    Root(RootId),
    Block(BlockId),
}

/// What the index has of a sequence's tokens.
#[derive(Clone, Copy, Debug)]
pub(super) struct PrefixWalk {
    /// The full blocks, from the first.
    pub(super) num_blocks: usize,
    /// The content of the last, or the root.
    pub(super) tail: Content,
    /// A block below `tail` that begins with the next tokens, and how many they are; not zero.
    pub(super) partial: Option<(BlockId, u32)>,
}

impl PrefixWalk {
    /// The tokens that were found.
    pub(super) fn num_tokens(&self, block_size: BlockSize) -> Tokens {
        let full = Blocks(self.num_blocks as u32).tokens(block_size);
        full + Tokens(self.partial.map_or(0, |(_, num_positions)| num_positions))
    }
}

/// The node of one block. The links are valid while it is registered.
#[derive(Clone)]
struct Node {
    /// The content's number; `None` if the block is not registered.
    content: Option<u64>,
    /// Selects the bucket.
    key: u64,
    parent: NodeRef,
    next_in_bucket: Option<BlockId>,
    /// The child registered last; its older siblings follow.
    first_child: Option<BlockId>,
    newer_sibling: Option<BlockId>,
    older_sibling: Option<BlockId>,
    /// The prefixes with it that are retained.
    num_retainers: u32,
}

/// What a node has of another group of layers than the first.
#[derive(Clone, Copy)]
struct Beside {
    /// `NONE` if it is not in the cache.
    block: BlockId,
    /// The prefixes that retain it.
    num_retainers: u32,
}

impl Beside {
    const NOTHING: Self = Self {
        block: BlockId::NONE,
        num_retainers: 0,
    };
}

/// The registered blocks.
pub(super) struct PrefixIndex {
    block_size: usize,
    num_groups: usize,
    /// What is beside each node, `[num_blocks, num_groups - 1]`.
    beside: Vec<Beside>,
    /// For each block that is beside a node, the node and the group. Empty if there is one group.
    owners: Vec<Option<(BlockId, u32)>>,
    nodes: Vec<Node>,
    /// The tokens of each registered block, `[num_blocks, block_size]`.
    tokens: Vec<TokenId>,
    /// The first block of each bucket: registered blocks by the lowest bits of their keys.
    buckets: Vec<Option<BlockId>>,
    roots: Roots,
    num_contents: u64,
}

impl PrefixIndex {
    /// An empty index with room for all `num_blocks`.
    pub(super) fn new(num_blocks: Blocks, block_size: BlockSize, num_groups: usize) -> Self {
        let blank = Node {
            content: None,
            key: 0,
            parent: NodeRef::Block(BlockId::NONE),
            next_in_bucket: None,
            first_child: None,
            newer_sibling: None,
            older_sibling: None,
            num_retainers: 0,
        };
        let block_size = block_size.tokens().index();
        let num_buckets = (2 * num_blocks.index()).next_power_of_two();
        let num_owners = if num_groups > 1 {
            num_blocks.index()
        } else {
            0
        };
        Self {
            block_size,
            num_groups,
            beside: vec![Beside::NOTHING; num_blocks.index() * (num_groups - 1)],
            owners: vec![None; num_owners],
            nodes: vec![blank; num_blocks.index()],
            tokens: vec![0; num_blocks.index() * block_size],
            buckets: vec![None; num_buckets],
            roots: Roots::new(),
            num_contents: 0,
        }
    }

    /// A sequence enters below the root of `salt`, which stays until it has left.
    pub(super) fn enter(&mut self, salt: &Option<Arc<str>>) -> RootId {
        let num_contents = &mut self.num_contents;
        self.roots.enter(salt, || next_number(num_contents))
    }

    /// A sequence leaves that has entered.
    pub(super) fn leave(&mut self, root: RootId) {
        self.roots.leave(root);
    }

    /// The root of `salt`, if anything is below it.
    pub(super) fn find_root(&self, salt: &Option<Arc<str>>) -> Option<Content> {
        self.roots.find(salt).map(|root| self.root(root))
    }

    /// The content of a root.
    pub(super) fn root(&self, root: RootId) -> Content {
        Content {
            place: NodeRef::Root(root),
            id: self.roots[root].content(),
        }
    }

    /// Looks `tokens` up from `root`. At most `max_tokens` of them are found.
    ///
    /// ```text
    /// block_size = 4, max_tokens = 10
    ///
    /// tokens   |  full  |  full  | partial  - - |      a full block is found whole, or in part
    /// position  0        4        8         10
    /// ```
    pub(super) fn walk(
        &self,
        root: Content,
        tokens: &[TokenId],
        max_tokens: usize,
        enable_partial: bool,
    ) -> PrefixWalk {
        let mut walk = PrefixWalk {
            num_blocks: 0,
            tail: root,
            partial: None,
        };
        let mut rest = tokens;
        let mut max_rest = max_tokens;
        while max_rest >= self.block_size {
            let (block_tokens, after) = rest.split_at(self.block_size);
            let Some(child) = self.find(walk.tail, block_tokens) else {
                break;
            };
            walk.tail = child;
            walk.num_blocks += 1;
            rest = after;
            max_rest -= self.block_size;
        }
        if enable_partial {
            let num_comparable = max_rest.min(self.block_size);
            walk.partial = self.longest_beginning(walk.tail, rest, num_comparable);
        }
        walk
    }

    /// The blocks from `tail` up to its root.
    pub(super) fn path_up(&self, tail: Content) -> impl Iterator<Item = BlockId> + '_ {
        let mut at = tail.place;
        std::iter::from_fn(move || match at {
            NodeRef::Root(_) => None,
            NodeRef::Block(block) => {
                at = self.nodes[block.index()].parent;
                Some(block)
            }
        })
    }

    /// Registers `tokens`, which fill `block`, below `parent`. Returns where the content is: in `block`, or where it
    /// was before. `None` if no lookup could find it, because `parent` is gone or the bucket is full.
    pub(super) fn register(
        &mut self,
        parent: Content,
        tokens: &[TokenId],
        block: BlockId,
    ) -> Option<Content> {
        if !self.is_there(parent) {
            return None;
        }
        let key = self.next_block(parent, tokens).key();
        let bucket = self.bucket(key);
        if let Some(existing) = self.find_in_bucket(bucket, key, parent, tokens) {
            return Some(existing);
        }
        assert!(!self.has_content(block), "{block:?} has another content");
        if self.bucket_blocks(bucket).count() == MAX_BUCKET {
            return None;
        }
        let id = next_number(&mut self.num_contents);
        let older = self.first_child(parent.place).replace(block);
        if let Some(older) = older {
            self.nodes[older.index()].newer_sibling = Some(block);
        }
        self.nodes[block.index()] = Node {
            content: Some(id),
            key,
            parent: parent.place,
            next_in_bucket: self.buckets[bucket].replace(block),
            first_child: None,
            newer_sibling: None,
            older_sibling: older,
            num_retainers: 0,
        };
        let start = block.index() * self.block_size;
        self.tokens[start..start + self.block_size].copy_from_slice(tokens);
        Some(Content {
            place: NodeRef::Block(block),
            id,
        })
    }

    /// All registered blocks, each after the one above it.
    pub(super) fn registered(&self) -> Vec<BlockId> {
        let nodes = (0..).map(BlockId).zip(&self.nodes);
        let registered = nodes.filter_map(|(block, node)| Some((node.content?, block)));
        let mut by_number: Vec<_> = registered.collect();
        by_number.sort_unstable();
        by_number.into_iter().map(|(_, block)| block).collect()
    }

    /// The block above `block`, or the salt of the root that is.
    pub(super) fn above(&self, block: BlockId) -> Result<BlockId, Option<Arc<str>>> {
        match self.nodes[block.index()].parent {
            NodeRef::Block(parent) => Ok(parent),
            NodeRef::Root(root) => Err(self.roots[root].salt().clone()),
        }
    }

    /// The content above the one of `block`, which is registered.
    pub(super) fn parent(&self, block: BlockId) -> Content {
        match self.nodes[block.index()].parent {
            NodeRef::Root(root) => self.root(root),
            NodeRef::Block(parent) => {
                let content = self.content_of(parent);
                content.expect("what is above a content is registered")
            }
        }
    }

    /// The block of `group`, not the first, beside the node `block`.
    pub(super) fn beside(&self, block: BlockId, group: usize) -> Option<BlockId> {
        let found = self.beside[self.beside_index(block, group)].block;
        Some(found).filter(|&found| found != BlockId::NONE)
    }

    /// The node and the group that `block` is beside, if it is.
    pub(super) fn owner(&self, block: BlockId) -> Option<(BlockId, usize)> {
        let owner = self.owners.get(block.index())?.as_ref();
        owner.map(|&(node, group)| (node, group as usize))
    }

    /// Puts `block`, which is beside no node, beside `node`, which has none of `group`.
    pub(super) fn put_beside(&mut self, node: BlockId, group: usize, block: BlockId) {
        assert!(self.is_registered(node), "{node:?} has no content");
        assert!(!self.has_content(block), "{block:?} has another content");
        let index = self.beside_index(node, group);
        assert_eq!(self.beside[index].block, BlockId::NONE, "beside {node:?}");
        self.beside[index].block = block;
        self.owners[block.index()] = Some((node, group as u32));
    }

    /// Takes `block` away from its node, if it is beside one. Returns whether it was.
    pub(super) fn take_away(&mut self, block: BlockId) -> bool {
        let Some((node, group)) = self.owner(block) else {
            return false;
        };
        let index = self.beside_index(node, group);
        self.beside[index].block = BlockId::NONE;
        self.owners[block.index()] = None;
        true
    }

    /// Whether `block` is registered, or beside a node.
    pub(super) fn has_content(&self, block: BlockId) -> bool {
        self.is_registered(block) || self.owner(block).is_some()
    }

    /// Whether `block` is registered.
    pub(super) fn is_registered(&self, block: BlockId) -> bool {
        self.nodes[block.index()].content.is_some()
    }

    /// The content of `block`, if it is registered.
    pub(super) fn content_of(&self, block: BlockId) -> Option<Content> {
        let id = self.nodes[block.index()].content?;
        let place = NodeRef::Block(block);
        Some(Content { place, id })
    }

    /// Retains the content of `block` once more, and returns its number.
    pub(super) fn retain(&mut self, block: BlockId) -> u64 {
        let node = &mut self.nodes[block.index()];
        node.num_retainers += 1;
        node.content.expect("what is retained has a content")
    }

    /// Retains what is beside the node `block` in `group` once more, whether anything is or not.
    pub(super) fn retain_beside(&mut self, block: BlockId, group: usize) {
        let index = self.beside_index(block, group);
        self.beside[index].num_retainers += 1;
    }

    /// The same, once less.
    pub(super) fn release_beside(&mut self, block: BlockId, group: usize) {
        let index = self.beside_index(block, group);
        self.beside[index].num_retainers -= 1;
    }

    /// Retains the content of `block` once less, if it has the number that it had then. Returns whether it has.
    pub(super) fn release(&mut self, block: BlockId, content: u64) -> bool {
        let node = &mut self.nodes[block.index()];
        let is_there = node.content == Some(content);
        if is_there {
            node.num_retainers -= 1;
        }
        is_there
    }

    /// Whether the content of `block` is retained.
    pub(super) fn is_retained(&self, block: BlockId) -> bool {
        if let Some((node, group)) = self.owner(block) {
            return self.beside[self.beside_index(node, group)].num_retainers > 0;
        }
        let node = &self.nodes[block.index()];
        node.content.is_some() && node.num_retainers > 0
    }

    /// Whether `content` is still where it was.
    pub(super) fn is_there(&self, content: Content) -> bool {
        let id = match content.place {
            NodeRef::Root(root) => self.roots.get(root).map(|root| root.content()),
            NodeRef::Block(block) => self.nodes[block.index()].content,
        };
        id == Some(content.id)
    }

    /// Moves the content of `from`, with all below and beside it, to `to`, which has none. It keeps its number.
    // As many writes as it has children. Each is a block that a sequence has filled, and a move copies a block as well.
    pub(super) fn relocate(&mut self, from: BlockId, to: BlockId) {
        assert!(!self.has_content(to), "{to:?} has another content");
        if let Some((node, group)) = self.owner(from) {
            self.take_away(from);
            return self.put_beside(node, group, to);
        }
        let node = self.nodes[from.index()].clone();
        assert!(node.content.is_some(), "{from:?} has no content");
        *self.link_in_bucket(from) = Some(to);
        match node.newer_sibling {
            Some(newer) => self.nodes[newer.index()].older_sibling = Some(to),
            None => *self.first_child(node.parent) = Some(to),
        }
        if let Some(older) = node.older_sibling {
            self.nodes[older.index()].newer_sibling = Some(to);
        }
        let mut child = node.first_child;
        while let Some(at) = child {
            self.nodes[at.index()].parent = NodeRef::Block(to);
            child = self.nodes[at.index()].older_sibling;
        }
        self.nodes[from.index()].content = None;
        self.nodes[to.index()] = node;
        let start = from.index() * self.block_size;
        let tokens = start..start + self.block_size;
        self.tokens
            .copy_within(tokens, to.index() * self.block_size);
        for group in 1..self.num_groups {
            let (from, moved) = (self.beside_index(from, group), self.beside_index(to, group));
            self.beside[moved] = std::mem::replace(&mut self.beside[from], Beside::NOTHING);
            let block = self.beside[moved].block;
            if block != BlockId::NONE {
                self.owners[block.index()] = Some((to, group as u32));
            }
        }
    }

    /// Forgets `block` and all below it, and passes each to `forgotten`, the block itself last, after what is beside
    /// it.
    pub(super) fn forget(&mut self, block: BlockId, mut forgotten: impl FnMut(BlockId)) {
        let mut at = block;
        while self.is_registered(block) {
            if let Some(child) = self.nodes[at.index()].first_child {
                at = child;
                continue;
            }
            self.unlink(at);
            for group in 1..self.num_groups {
                let index = self.beside_index(at, group);
                let beside = std::mem::replace(&mut self.beside[index], Beside::NOTHING).block;
                if beside != BlockId::NONE {
                    self.owners[beside.index()] = None;
                    forgotten(beside);
                }
            }
            forgotten(at);
            match self.nodes[at.index()].parent {
                NodeRef::Block(parent) => at = parent,
                // Only the first block of a prefix is below a root: all below it are forgotten.
                NodeRef::Root(root) => self.roots.remove_if_unused(root),
            }
        }
    }

    /// The name of the content that `tokens` would have below `parent`.
    pub(super) fn next_block(&self, parent: Content, tokens: &[TokenId]) -> NextBlock {
        NextBlock::new(parent.id, tokens)
    }

    /// The content with `tokens` below `parent`.
    fn find(&self, parent: Content, tokens: &[TokenId]) -> Option<Content> {
        // Mostly the newest child, whose block often follows its parent's: a long walk then reads memory in order.
        if self.is_there(parent)
            && let Some(child) = self.children(parent.place).next()
            && self.tokens_of(child) == tokens
        {
            return self.content_of(child);
        }
        let key = self.next_block(parent, tokens).key();
        self.find_in_bucket(self.bucket(key), key, parent, tokens)
    }

    fn find_in_bucket(
        &self,
        bucket: usize,
        key: u64,
        parent: Content,
        tokens: &[TokenId],
    ) -> Option<Content> {
        let found = self.bucket_blocks(bucket).find(|&block| {
            let node = &self.nodes[block.index()];
            // The place is enough: what is below a content is forgotten before its place is used again.
            node.key == key && node.parent == parent.place && self.tokens_of(block) == tokens
        })?;
        self.content_of(found)
    }

    /// The child of `parent` that shares the most of the first `max_tokens` of `tokens`.
    fn longest_beginning(
        &self,
        parent: Content,
        tokens: &[TokenId],
        max_tokens: usize,
    ) -> Option<(BlockId, u32)> {
        if max_tokens == 0 {
            return None;
        }
        // The whole block is there, but must not be reused whole: no need to search.
        if let Some(block_tokens) = tokens.get(..self.block_size)
            && let Some(NodeRef::Block(block)) = self.find(parent, block_tokens).map(|it| it.place)
        {
            return Some((block, max_tokens as u32));
        }
        let tokens = &tokens[..max_tokens];
        let mut best = None;
        let mut best_len = 0;
        for child in self.children(parent.place).take(MAX_CHILDREN) {
            let pairs = self.tokens_of(child).iter().zip(tokens);
            let len = pairs.take_while(|(a, b)| a == b).count();
            if len > best_len {
                best_len = len;
                best = Some((child, len as u32));
            }
        }
        best
    }

    fn beside_index(&self, block: BlockId, group: usize) -> usize {
        debug_assert!((1..self.num_groups).contains(&group));
        block.index() * (self.num_groups - 1) + group - 1
    }

    fn bucket(&self, key: u64) -> usize {
        // The number of buckets is a power of two.
        key as usize & (self.buckets.len() - 1)
    }

    fn bucket_blocks(&self, bucket: usize) -> impl Iterator<Item = BlockId> + '_ {
        let next = |block: &BlockId| self.nodes[block.index()].next_in_bucket;
        std::iter::successors(self.buckets[bucket], next)
    }

    fn children(&self, place: NodeRef) -> impl Iterator<Item = BlockId> + '_ {
        let first = match place {
            NodeRef::Root(root) => self.roots[root].first_child(),
            NodeRef::Block(block) => self.nodes[block.index()].first_child,
        };
        let next = |block: &BlockId| self.nodes[block.index()].older_sibling;
        std::iter::successors(first, next)
    }

    fn first_child(&mut self, place: NodeRef) -> &mut Option<BlockId> {
        match place {
            NodeRef::Root(root) => self.roots[root].first_child_mut(),
            NodeRef::Block(block) => &mut self.nodes[block.index()].first_child,
        }
    }

    /// The tokens of a registered block.
    pub(super) fn tokens_of(&self, block: BlockId) -> &[TokenId] {
        let start = block.index() * self.block_size;
        &self.tokens[start..start + self.block_size]
    }

    /// Takes a block without children out of its bucket, and unlinks it from its siblings.
    fn unlink(&mut self, block: BlockId) {
        let Node {
            parent,
            next_in_bucket,
            newer_sibling,
            older_sibling,
            ..
        } = self.nodes[block.index()];
        *self.link_in_bucket(block) = next_in_bucket;
        match newer_sibling {
            Some(newer) => self.nodes[newer.index()].older_sibling = older_sibling,
            None => *self.first_child(parent) = older_sibling,
        }
        if let Some(older) = older_sibling {
            self.nodes[older.index()].newer_sibling = newer_sibling;
        }
        self.nodes[block.index()].content = None;
    }

    /// What points to `block` in its bucket.
    fn link_in_bucket(&mut self, block: BlockId) -> &mut Option<BlockId> {
        let bucket = self.bucket(self.nodes[block.index()].key);
        let is_before =
            |&before: &BlockId| self.nodes[before.index()].next_in_bucket == Some(block);
        let before = self.bucket_blocks(bucket).find(is_before);
        match before {
            Some(before) => &mut self.nodes[before.index()].next_in_bucket,
            None => &mut self.buckets[bucket],
        }
    }

    /// Panics if the index contradicts itself. `entered` are the roots of all sequences that have entered.
    pub(super) fn check_integrity(&self, entered: &[RootId]) {
        self.roots.check_integrity(entered);
        let num_registered = self.nodes.iter().filter(|it| it.content.is_some()).count();
        let mut num_in_buckets = 0;
        for bucket in 0..self.buckets.len() {
            let mut num_in_bucket = 0;
            for block in self.bucket_blocks(bucket) {
                num_in_bucket += 1;
                assert!(num_in_bucket <= MAX_BUCKET, "bucket {bucket} is too long");
                let node = &self.nodes[block.index()];
                assert!(node.content.is_some(), "{block:?} is in a bucket");
                let parent = match node.parent {
                    NodeRef::Root(root) => self.roots.get(root).map(|root| root.content()),
                    NodeRef::Block(parent) => self.nodes[parent.index()].content,
                };
                let parent = Content {
                    place: node.parent,
                    id: parent.unwrap_or_else(|| panic!("{block:?} is below nothing")),
                };
                assert!(
                    parent.id < node.content.unwrap_or(0),
                    "{block:?} is older than its parent"
                );
                let found = self.find(parent, self.tokens_of(block));
                assert_eq!(found.map(|it| it.place), Some(NodeRef::Block(block)));
                let siblings: Vec<_> = self.children(node.parent).collect();
                let place = siblings.iter().position(|&it| it == block);
                let place = place.unwrap_or_else(|| panic!("{block:?} is no child"));
                let newer = place.checked_sub(1).map(|newer| siblings[newer]);
                assert_eq!(node.newer_sibling, newer, "beside {block:?}");
            }
            num_in_buckets += num_in_bucket;
        }
        assert_eq!(num_in_buckets, num_registered, "registered blocks");
        let mut num_beside = 0;
        for block in (0..self.nodes.len() as u32).map(BlockId) {
            for group in 1..self.num_groups {
                let Beside {
                    block: beside,
                    num_retainers,
                } = self.beside[self.beside_index(block, group)];
                assert!(
                    self.is_registered(block) || (num_retainers == 0 && beside == BlockId::NONE),
                    "{beside:?} is beside {block:?}, which has no content"
                );
                if beside != BlockId::NONE {
                    num_beside += 1;
                    assert_eq!(self.owner(beside), Some((block, group)), "{beside:?}");
                    assert!(!self.is_registered(beside), "{beside:?} is a node");
                }
            }
        }
        let num_owners = self.owners.iter().flatten().count();
        assert_eq!(num_beside, num_owners, "blocks beside others");
    }
}

fn next_number(last: &mut u64) -> u64 {
    *last += 1;
    *last
}
