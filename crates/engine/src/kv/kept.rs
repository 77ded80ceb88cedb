//! Contents that outlive the engine: host blocks as plain data.

use std::sync::Arc;

use inflight_base::{HostBlockId, TokenId};

/// A content in host memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeptBlock {
    /// The block that has it.
    pub block: HostBlockId,
    /// What is before it.
    pub parent: KeptParent,
    /// Its tokens, which fill the block.
    pub tokens: Box<[TokenId]>,
    /// The blocks that have it for the groups of layers but the first, where they are.
    pub beside: Box<[Option<HostBlockId>]>,
}

/// What is before a content.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum KeptParent {
    /// Nothing: it begins the sequences of a cache salt.
    Salt(Option<Arc<str>>),
    /// The content of another host block.
    Block(HostBlockId),
}
