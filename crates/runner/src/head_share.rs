//! The heads of a rank, each with the key that it reads.

use std::ops::Range;

use super::rank::{Rank, gcd, lcm, whole};
use inflight_device::HeadPlaces;

/// The heads of a rank, of attention or of a recurrence.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct HeadShare {
    /// Its query heads, or the value heads of a recurrence.
    pub(super) queries: Range<usize>,
    /// Query heads that share a key.
    group_size: usize,
    /// Its key heads, one for each group. A head is in it twice if the groups of the model are larger.
    pub(super) keys: Vec<usize>,
    /// Its query heads by tiles, counted from the first one.
    tiles: Vec<Range<usize>>,
}

impl HeadShare {
    /// With so many query heads together.
    pub(super) fn new(rank: Rank, num_heads: usize, num_kv_heads: usize, joined: usize) -> Self {
        let group_size = num_heads / num_kv_heads;
        // Whole groups where there is one for each tile.
        let unit = match num_kv_heads >= rank.num_tiles {
            true => group_size,
            false => 1,
        };
        let tiles = rank.cut_in_units(num_heads, lcm(unit, joined));
        let queries = whole(&tiles);
        // Groups of equal size, none of which has queries of two groups of the model.
        let ends = [queries.start, queries.end].map(|end| end % group_size);
        let own_size = ends
            .into_iter()
            .chain([queries.len()])
            .fold(group_size, gcd);
        let keys = queries.clone().step_by(own_size);
        Self {
            group_size: own_size,
            keys: keys.map(|query| query / group_size).collect(),
            tiles: tiles
                .iter()
                .map(|tile| tile.start - queries.start..tile.end - queries.start)
                .collect(),
            queries,
        }
    }

    /// The inputs of the projection behind its query heads, each of this width, by tiles.
    pub(super) fn inputs(&self, head_dim: usize) -> Vec<Range<usize>> {
        let first = self.queries.start;
        let inputs = |head: usize| (first + head) * head_dim;
        let tiles = self.tiles.iter();
        tiles
            .map(|tile| inputs(tile.start)..inputs(tile.end))
            .collect()
    }

    /// Its heads among the model's.
    pub(super) fn places(&self, num_heads: usize, num_kv_heads: usize) -> HeadPlaces {
        let group_size = num_heads / num_kv_heads;
        let queries = self.queries.clone().map(Some);
        // Several ranks may have a key, or one more than once: the first to need it counts it.
        let keys = self.keys.iter().enumerate().map(|(index, &key)| {
            let is_first =
                self.queries.contains(&(key * group_size)) && !self.keys[..index].contains(&key);
            is_first.then_some(num_heads + key)
        });
        HeadPlaces {
            num_heads: [num_heads, num_kv_heads],
            places: queries.chain(keys).collect(),
        }
    }

    /// Runs of consecutive key heads, in order.
    pub(super) fn key_runs(&self) -> Vec<Range<usize>> {
        let runs = self.keys.chunk_by(|a, b| a + 1 == *b);
        runs.map(|run| run[0]..run[0] + run.len()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SIZES: [(usize, usize); 9] = [
        (4, 2),
        (6, 3),
        (4, 4),
        (8, 1),
        (40, 10),
        (12, 3),
        (5, 5),
        (32, 8),
        (28, 4),
    ];

    #[test]
    fn ranks_have_all_heads_and_each_query_its_key() {
        for (num_heads, num_kv_heads) in SIZES {
            for num_ranks in 1..=4 {
                let mut next = 0;
                for index in 0..num_ranks {
                    let rank = Rank::new(index, num_ranks);
                    let share = HeadShare::new(rank, num_heads, num_kv_heads, 1);
                    assert_eq!(share.queries.start, next);
                    next = share.queries.end;
                    assert!(!share.queries.is_empty());
                    assert_eq!(share.queries.len(), share.keys.len() * share.group_size);
                    for (query, group) in share.queries.clone().zip(0..) {
                        let key = share.keys[group / share.group_size];
                        assert_eq!(key, query / (num_heads / num_kv_heads));
                    }
                    let of_runs = share.key_runs().into_iter().flatten();
                    assert!(of_runs.eq(share.keys.iter().copied()));
                }
                assert_eq!(next, num_heads);
            }
        }
    }

    #[test]
    fn one_rank_has_the_place_of_each_head() {
        for (num_heads, num_kv_heads) in SIZES {
            for num_ranks in 1..=4 {
                let places = (0..num_ranks).flat_map(|index| {
                    let rank = Rank::new(index, num_ranks);
                    let share = HeadShare::new(rank, num_heads, num_kv_heads, 1);
                    let HeadPlaces { places, .. } = share.places(num_heads, num_kv_heads);
                    assert_eq!(places.len(), share.queries.len() + share.keys.len());
                    places.into_iter().flatten()
                });
                let mut places: Vec<_> = places.collect();
                places.sort_unstable();
                assert!(places.into_iter().eq(0..num_heads + num_kv_heads));
            }
        }
    }

    #[test]
    fn groups_of_inputs_and_of_heads_stay_together() {
        let tiles = |num_ranks: usize, joined| -> Vec<Range<usize>> {
            let ranks = (0..num_ranks).map(|index| Rank::new(index, num_ranks));
            let shares = ranks.map(|rank| HeadShare::new(rank, 12, 3, joined));
            shares.map(|share| share.queries).collect()
        };
        assert_eq!(tiles(2, 8), [0..8, 8..12]);
        assert_eq!(tiles(4, 8), [0..0, 0..8, 8..8, 8..12]);
        let rank = Rank::new(0, 1);
        assert_eq!(rank.cut_in_units(96, 32), [0..0, 0..32, 32..64, 64..96]);
        assert_eq!(rank.cut_in_units(70, 32), [0..0, 0..32, 32..64, 64..70]);
    }

    #[test]
    fn keys_are_copied_only_where_they_must_be() {
        let keys = |index, num_ranks, num_heads, num_kv_heads| {
            HeadShare::new(Rank::new(index, num_ranks), num_heads, num_kv_heads, 1).keys
        };
        assert_eq!(keys(1, 2, 32, 8), [4, 5, 6, 7]);
        assert_eq!(keys(0, 4, 40, 10), [0, 1]);
        assert_eq!(keys(2, 4, 8, 2), [1]);
        assert_eq!(keys(3, 4, 8, 1), [0]);
        assert_eq!(keys(0, 1, 6, 3), [0, 1, 2]);
    }

    #[test]
    fn tiles_do_not_depend_on_the_number_of_ranks() {
        for (num_heads, num_kv_heads) in SIZES {
            let tiles = |num_ranks| -> Vec<Range<usize>> {
                let ranks = (0..num_ranks).map(|index| Rank::new(index, num_ranks));
                let tiles = ranks.flat_map(|rank| {
                    let share = HeadShare::new(rank, num_heads, num_kv_heads, 1);
                    let first = share.queries.start;
                    let own = share.tiles.into_iter();
                    own.map(move |tile| first + tile.start..first + tile.end)
                });
                tiles.collect()
            };
            assert_eq!(tiles(1).len(), 4);
            assert_eq!(tiles(1), tiles(2));
            assert_eq!(tiles(1), tiles(4));
        }
    }
}
