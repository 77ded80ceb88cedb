//! The paged KV cache's bookkeeping: which sequence holds which block. Keys and values are not here.
//!
//! One idea: memory is cut into blocks of `block_size` positions, and a sequence addresses its positions through a
//! table of block ids. So any free block will do, and a full block can be in several tables.
//!
//! ```text
//! block_size = 4; S1 has computed 10 positions, S2 began with the same 8 tokens
//!
//! position    0  1  2  3 | 4  5  6  7 | 8  9  -  -
//! table S1   [ Block 7   , Block 2    , Block 5 ]       position p is in table[p / 4], at p % 4
//! table S2   [ Block 7   , Block 2    , Block 1 ]
//!
//! prefix index      root --- 7 --- 2 --- 0              full blocks, by their tokens and those before
//!                              \-- 6
//! free list         4, 3, | 6, 0                        not held: blank blocks, then cached ones
//! ```
//!
//! A block's life:
//!
//! ```text
//!          reserve, grow               commit: it is full             release: the last holder
//! blank ------------------> held -----------------------> registered ----------------------> cached
//!   ^                        | release                      ^   | reserve: one more holder     |  |
//!   |                        v                              +---+<----- reserve: found --------+  |
//!   +------------------------+<-------- taken for something else: evicted (see tiers.rs) ---------+
//! ```
//!
//! ```text
//! manager.rs      KvCacheManager: reserve, grow, commit, release, fork
//! lookup.rs       what of a prompt is in the cache
//! tiers.rs        the blocks of the device and those in host memory, and what moves between them
//! pool.rs         the blocks of one of them: who holds each, and the free list
//! prefix.rs       the prefix index: which block holds which tokens after which others
//! roots.rs        its roots, one for each cache salt
//! snapshots.rs    snapshots of recurrent states, by the contents that they sum up
//! next_block.rs   the name of a block's content before it is written
//! table.rs        a sequence's block table
//! groups.rs       groups of layers, each with blocks of its own
//! window.rs       the attention window
//! config.rs kept.rs retained.rs usage.rs    what goes in and out
//! ```

mod config;
mod groups;
mod kept;
mod lookup;
mod manager;
mod next_block;
mod pool;
mod prefix;
mod retained;
mod roots;
mod snapshots;
mod table;
mod tiers;
mod usage;
mod window;

#[cfg(test)]
mod host_tests;
#[cfg(test)]
mod snapshot_tests;
#[cfg(test)]
mod tests;
#[cfg(test)]
mod walks;

pub(super) use config::KvCacheConfig;
pub use config::ReuseOptions;
pub use groups::{KvGroups, MAX_KV_GROUPS};
pub use kept::{KeptBlock, KeptParent};
pub(super) use manager::KvCacheManager;
pub(super) use next_block::NextBlock;
pub use retained::RetainedPrefix;
pub(super) use table::BlockTable;
pub use usage::{KvUsage, ReuseTotals};
pub use window::AttentionWindow;
