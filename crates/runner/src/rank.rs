//! One of several ranks, and the tiles of the sums that it computes.

use std::ops::Range;

use inflight_numbers::GROUP_UNIT;

/// Tiles of inputs on 1, 2 and 4 ranks.
const NUM_TILES: usize = 4;

/// A rank, and the tiles that it sums.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Rank {
    pub(super) index: usize,
    pub(super) num_ranks: usize,
    /// Of all ranks; those of a rank are a power of two.
    pub(super) num_tiles: usize,
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
    pub(super) fn tiles(self) -> Range<usize> {
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

    /// Cuts `len` elements into tiles of whole units of `unit` elements; the last unit may be smaller.
    pub(super) fn cut_in_units(self, len: usize, unit: usize) -> Vec<Range<usize>> {
        let tiles = self.cut(len.div_ceil(unit)).into_iter();
        tiles
            .map(|tile| (tile.start * unit).min(len)..(tile.end * unit).min(len))
            .collect()
    }

    /// The inputs of a block of this width that stay together, of which quantised weights keep so many together.
    pub(super) fn unit_of_inputs(self, width: usize, joined: usize) -> usize {
        // Kernels multiply pairs of inputs.
        let least = lcm(2, joined);
        // The groups of a matrix that is rounded are cut into smaller ones.
        let whole_groups = lcm(GROUP_UNIT, least);
        match width.div_ceil(whole_groups) >= self.num_tiles {
            true => whole_groups,
            false => least,
        }
    }

    /// Whether it adds the bias to sums over all ranks. It has some of all inputs.
    pub(super) fn is_last(self) -> bool {
        self.index + 1 == self.num_ranks
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
pub(super) fn part(num_units: usize, index: usize, num_parts: usize) -> Range<usize> {
    index * num_units / num_parts..(index + 1) * num_units / num_parts
}

/// The greatest common divisor.
pub(super) fn gcd(a: usize, b: usize) -> usize {
    match b {
        0 => a,
        _ => gcd(b, a % b),
    }
}

/// The least common multiple.
pub(super) fn lcm(a: usize, b: usize) -> usize {
    a / gcd(a, b) * b
}
