//! What a rank of several has of each layer.
//!
//! Queries, keys, values, gate and up are cut by their outputs, the projections behind them by their inputs, and the
//! embedding and the output layer by the vocabulary. What is cut by inputs is a sum over all ranks. For the same bits
//! on 1, 2 and 4 ranks, these inputs are cut into four tiles, whatever the number of ranks, and their products are
//! added in pairs:
//!
//! ```text
//! tiles     0     1     2     3
//!            \   /       \   /       on 4 ranks by the collective operation,
//!             \ /         \ /        on 2 ranks by each rank,
//!              \___     ___/
//!                  \___/             on 2 and 4 ranks by the collective operation
//! ```
//!
//! Heads and widths that do not divide are cut as evenly as whole heads, pairs of inputs, and the groups of quantised
//! weights allow, so that a rank may have nothing of a narrow block. Keys and values that the queries of several ranks
//! read are computed and stored by each of them; so are the latents of latent attention, which all heads read.

use std::ops::Range;

use super::spec::{FeedForward, ModelSpec};
use inflight_base::LoadError;
use inflight_device::HeadPlaces;
use inflight_numbers::GROUP_UNIT;

/// Tiles of inputs on 1, 2 and 4 ranks.
const NUM_TILES: usize = 4;

/// A rank, and the tiles that it sums.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Rank {
    index: usize,
    num_ranks: usize,
    /// Of all ranks; those of a rank are a power of two.
    num_tiles: usize,
}

/// What stays together in every tile: inputs of quantised weights whose groups have one scale.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct CutUnits {
    /// Query heads.
    pub(super) heads: usize,
    /// Inputs of projections behind the inside of a feed-forward block.
    pub(super) inner: usize,
}

/// The part of each layer, and of the vocabulary, that a rank has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ModelShare {
    rank: Rank,
    units: CutUnits,
    pub(super) heads: HeadShare,
    /// Its rows of the embedding and of the output layer.
    pub(super) vocabulary: Range<usize>,
    /// How many of these rows each rank has.
    pub(super) vocabulary_sizes: Vec<usize>,
}

/// The heads of a rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct HeadShare {
    /// Its query heads.
    pub(super) queries: Range<usize>,
    /// Query heads that share a key and a value head.
    group_size: usize,
    /// Its key and value heads, one for each group. A head is in it twice if the groups of the model are larger.
    pub(super) keys: Vec<usize>,
    /// Its query heads by tiles, counted from the first one.
    tiles: Vec<Range<usize>>,
}

impl Rank {
    /// One of `num_ranks`.
    pub(super) fn new(index: usize, num_ranks: usize) -> Self {
        Self {
            index,
            num_ranks,
            num_tiles: match NUM_TILES.is_multiple_of(num_ranks) {
                true => NUM_TILES,
                false => num_ranks,
            },
        }
    }

    /// The same, for devices that sum over all inputs of a rank at once.
    pub(super) fn without_tiles(self) -> Self {
        Self {
            num_tiles: self.num_ranks,
            ..self
        }
    }

    /// Its tiles.
    fn tiles(self) -> Range<usize> {
        let num_own = self.num_tiles / self.num_ranks;
        self.index * num_own..(self.index + 1) * num_own
    }

    /// The units of each of its tiles.
    fn cut(self, num_units: usize) -> Vec<Range<usize>> {
        let tiles = self.tiles();
        tiles
            .map(|tile| part(num_units, tile, self.num_tiles))
            .collect()
    }

    /// The same in units of several, the last of which may be smaller.
    fn cut_in_units(self, len: usize, unit: usize) -> Vec<Range<usize>> {
        let tiles = self.cut(len.div_ceil(unit)).into_iter();
        tiles
            .map(|tile| (tile.start * unit).min(len)..(tile.end * unit).min(len))
            .collect()
    }

    /// Whether it adds the bias to sums over all ranks. It has some of all inputs.
    fn is_last(self) -> bool {
        self.index + 1 == self.num_ranks
    }
}

impl CutUnits {
    /// The units of float weights.
    pub(super) const SINGLE: Self = Self { heads: 1, inner: 1 };

    /// Keeps so many query heads together.
    pub(super) fn join_heads(&mut self, num: usize) {
        self.heads = lcm(self.heads, num);
    }

    /// Keeps so many inputs together.
    pub(super) fn join_inner(&mut self, num: usize) {
        self.inner = lcm(self.inner, num);
    }
}

impl ModelShare {
    /// The share of a rank.
    ///
    /// # Errors
    /// The model cannot be split over so many ranks.
    pub(super) fn new(rank: Rank, spec: &ModelSpec, units: CutUnits) -> Result<Self, LoadError> {
        check(rank, spec, units)?;
        let cut = |index| part(spec.vocab_size, index, rank.num_ranks);
        Ok(Self {
            rank,
            units,
            heads: HeadShare::new(rank, spec.num_heads, spec.num_kv_heads, units.heads),
            vocabulary: cut(rank.index),
            vocabulary_sizes: (0..rank.num_ranks).map(|index| cut(index).len()).collect(),
        })
    }

    /// The same, for devices that sum over all inputs of a rank at once, and have no other operations for ranks.
    ///
    /// # Errors
    /// They cannot compute a share of the model.
    pub(super) fn without_tiles(&self, spec: &ModelSpec) -> Result<Self, LoadError> {
        check_without_tiles(self.rank, spec, self.units)?;
        Self::new(self.rank.without_tiles(), spec, self.units)
    }

    /// Whether it is all of the model.
    pub(super) fn is_whole(&self) -> bool {
        self.rank.num_ranks == 1
    }

    /// The tiles of its sums over inputs.
    pub(super) fn num_tiles(&self) -> usize {
        self.rank.tiles().len()
    }

    /// The first place in its weights of adapters, by that in those of the model. Its tiles follow one another.
    pub(super) fn place(&self, of_model: usize) -> usize {
        of_model * self.num_tiles()
    }

    /// Whether it adds the bias to sums over all ranks: in its last tile.
    pub(super) fn has_biases_of_sums(&self) -> bool {
        self.rank.is_last()
    }

    /// The inputs of the output projection of attention, by tiles.
    pub(super) fn attended(&self, head_dim: usize) -> Vec<Range<usize>> {
        let heads = &self.heads;
        let first = heads.queries.start;
        let inputs = |head: usize| (first + head) * head_dim;
        let tiles = heads.tiles.iter();
        tiles
            .map(|tile| inputs(tile.start)..inputs(tile.end))
            .collect()
    }

    /// Its part of the inside of a feed-forward block of this width, by tiles.
    pub(super) fn inner(&self, width: usize) -> Vec<Range<usize>> {
        // Kernels multiply pairs of inputs.
        let least = lcm(2, self.units.inner);
        // The groups of a matrix that is rounded are cut into smaller ones.
        let whole_groups = lcm(GROUP_UNIT, least);
        let unit = match width.div_ceil(whole_groups) >= self.rank.num_tiles {
            true => whole_groups,
            false => least,
        };
        self.rank.cut_in_units(width, unit)
    }

    /// The sizes of the model that this rank computes.
    pub(super) fn local_spec(&self, spec: &ModelSpec) -> ModelSpec {
        let mut local = spec.clone();
        local.num_heads = self.heads.queries.len();
        for layer in &mut local.layers {
            if let Some(latent) = &mut layer.attention.latent {
                latent.shape.num_heads = local.num_heads;
            }
        }
        // All heads of a rank read the same latents.
        if local.latent_shape().is_none() {
            local.num_kv_heads = self.heads.keys.len();
        }
        let downs = local.layers.iter_mut();
        for down in downs.flat_map(|layer| layer.feed_forward.downs_mut()) {
            down.num_inputs = whole(&self.inner(down.num_inputs)).len();
        }
        local
    }
}

impl HeadShare {
    /// With so many query heads together.
    fn new(rank: Rank, num_heads: usize, num_kv_heads: usize, joined: usize) -> Self {
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

/// The range that consecutive ranges cover.
pub(super) fn whole(parts: &[Range<usize>]) -> Range<usize> {
    match parts {
        [] => 0..0,
        [first, .., last] => first.start..last.end,
        [one] => one.clone(),
    }
}

/// One of `num_parts` parts of `num_units`, as even as whole units allow.
fn part(num_units: usize, index: usize, num_parts: usize) -> Range<usize> {
    index * num_units / num_parts..(index + 1) * num_units / num_parts
}

/// The greatest common divisor.
pub(super) fn gcd(a: usize, b: usize) -> usize {
    match b {
        0 => a,
        _ => gcd(b, a % b),
    }
}

fn lcm(a: usize, b: usize) -> usize {
    a / gcd(a, b) * b
}

/// Refuses models that cannot be split over so many ranks.
fn check(rank: Rank, spec: &ModelSpec, units: CutUnits) -> Result<(), LoadError> {
    let num_ranks = rank.num_ranks;
    let refuse = |problem: String| {
        Err(LoadError::Config {
            problem: format!("{num_ranks} ranks: {problem}"),
            remedy: "use fewer ranks".to_owned(),
        })
    };
    for (count, name) in [
        (spec.num_heads, "query heads"),
        (spec.vocab_size, "tokens in its vocabulary"),
    ] {
        if count < num_ranks {
            return refuse(format!("the model has only {count} {name}"));
        }
    }
    let mut ranks = (0..num_ranks).map(|index| Rank::new(index, num_ranks));
    let heads = |rank| HeadShare::new(rank, spec.num_heads, spec.num_kv_heads, units.heads);
    if ranks.any(|rank| heads(rank).queries.is_empty()) {
        return refuse(format!(
            "of the {} query heads of the model, {} have inputs of the same groups of quantised weights",
            spec.num_heads, units.heads
        ));
    }
    Ok(())
}

/// Refuses models that need more operations of ranks than sums.
fn check_without_tiles(rank: Rank, spec: &ModelSpec, units: CutUnits) -> Result<(), LoadError> {
    let num_ranks = rank.num_ranks;
    let refuse = |problem: String| {
        Err(LoadError::Config {
            problem: format!("{num_ranks} ranks on GPUs: {problem}"),
            remedy: "use one GPU, or instance_group [{ kind: KIND_CPU }]".to_owned(),
        })
    };
    // Of a shared expert a rank may have nothing.
    let widths = spec.layers.iter().map(|layer| match &layer.feed_forward {
        FeedForward::Experts(experts) => experts.down.num_inputs,
        block => block.width(),
    });
    let unit = lcm(2, units.inner);
    let num_units = widths.min().unwrap_or(0).div_ceil(unit);
    if num_units < num_ranks {
        return refuse(format!(
            "a down projection of the model has only {num_units} times {unit} inputs, which stay together"
        ));
    }
    Ok(())
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
