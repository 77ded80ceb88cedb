//! Host memory for what the KV cache gives up: blocks, and snapshots of recurrent states.

use inflight_base::{Blocks, LoadError};
use inflight_config::MAX_STATE_SNAPSHOTS;

/// The most blocks of a pool that is larger than what sequences in flight can use: the index of prefixes has an entry
/// in host memory for each.
pub(crate) const MAX_PREFIX_BLOCKS: u64 = 1 << 20;

/// How many of each are kept there.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct HostCache {
    pub(super) num_blocks: Blocks,
    pub(super) num_snapshots: u32,
}

impl HostCache {
    /// Cuts `num_bytes` (`kv_cache_host_memory_bytes`) into blocks of `bytes_per_block` and, where `snapshot_bytes` are
    /// given, snapshots of so many bytes: a quarter of the memory, as on the device, but at least one. Blocks without
    /// keys and values take no memory; there are as many as the `num_blocks_each` of the longest sequence for each
    /// snapshot.
    ///
    /// # Errors
    /// There is no room for one of each.
    pub(super) fn new(
        num_bytes: u64,
        bytes_per_block: u64,
        snapshot_bytes: Option<u64>,
        num_blocks_each: u32,
    ) -> Result<Self, LoadError> {
        if num_bytes == 0 {
            return Ok(Self::default());
        }
        let needed = bytes_per_block.saturating_add(snapshot_bytes.unwrap_or(0));
        if needed == 0 {
            return Err(LoadError::Config {
                problem: format!(
                    "kv_cache_host_memory_bytes is {num_bytes}, and no layer of the model has keys and values"
                ),
                remedy: "leave it out".to_owned(),
            });
        }
        if num_bytes < needed {
            let of_one = match snapshot_bytes {
                None => format!("{bytes_per_block} bytes of one block"),
                Some(state) => format!(
                    "{needed} bytes of one block ({bytes_per_block}) and one snapshot of recurrent states ({state})"
                ),
            };
            return Err(LoadError::Config {
                problem: format!(
                    "kv_cache_host_memory_bytes is {num_bytes}, less than the {of_one}"
                ),
                remedy: format!("raise it to {needed} or more, or set it to 0"),
            });
        }
        let snapshot_bytes = snapshot_bytes.unwrap_or(0);
        let for_snapshots = match bytes_per_block {
            0 => num_bytes,
            _ => num_bytes / 4,
        };
        let num_snapshots = for_snapshots
            .checked_div(snapshot_bytes)
            .map_or(0, |fitting| fitting.clamp(1, MAX_STATE_SNAPSHOTS.into()));
        let left = num_bytes - num_snapshots * snapshot_bytes;
        let num_blocks = left.checked_div(bytes_per_block).unwrap_or_else(|| {
            let of_all = num_snapshots.saturating_mul(num_blocks_each.into());
            of_all.min(MAX_PREFIX_BLOCKS)
        });
        Ok(Self {
            num_blocks: Blocks(u32::try_from(num_blocks).unwrap_or(u32::MAX)),
            num_snapshots: num_snapshots as u32,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cut(num_bytes: u64, bytes_per_block: u64, snapshot_bytes: Option<u64>) -> (u32, u32) {
        let cache = HostCache::new(num_bytes, bytes_per_block, snapshot_bytes, 32);
        let cache = cache.expect("there is room");
        (cache.num_blocks.0, cache.num_snapshots)
    }

    #[test]
    fn memory_is_cut_into_blocks_and_snapshots() {
        assert_eq!(cut(0, 3200, Some(1000)), (0, 0));
        assert_eq!(cut(10_000, 3200, None), (3, 0));
        assert_eq!(cut(10_000, 3200, Some(1000)), (2, 2));
        assert_eq!(cut(4200, 3200, Some(1000)), (1, 1), "one of each");
        let of_all = u64::from(MAX_STATE_SNAPSHOTS) * 10;
        let cut = cut(5 * of_all, 10, Some(10));
        assert_eq!(cut, (4 * MAX_STATE_SNAPSHOTS, MAX_STATE_SNAPSHOTS));
    }

    #[test]
    fn blocks_without_keys_and_values_are_as_many_as_snapshots_sum_up() {
        assert_eq!(cut(5000, 0, Some(1000)), (5 * 32, 5));
        assert_eq!(cut(1 << 40, 0, Some(1000)), (4096 * 32, 4096));
    }

    #[test]
    fn what_holds_nothing_is_refused() {
        let refused = |num_bytes, bytes_per_block, snapshot_bytes, words: &[&str]| {
            let cache = HostCache::new(num_bytes, bytes_per_block, snapshot_bytes, 32);
            let error = cache.expect_err("refused").to_string();
            for word in words {
                assert!(error.contains(word), "'{error}' does not say '{word}'");
            }
        };
        let words = "no layer of the model has keys and values";
        refused(10_000, 0, None, &[words]);
        refused(3199, 3200, None, &["is 3199", "3200 bytes of one block"]);
        let of_each = "4200 bytes of one block (3200) and one snapshot of recurrent states (1000)";
        refused(
            4199,
            3200,
            Some(1000),
            &["is 4199", of_each, "4200 or more"],
        );
        refused(999, 0, Some(1000), &["is 999", "(1000)"]);
    }
}
