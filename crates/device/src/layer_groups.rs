//! Groups of layers whose keys and values are in blocks of their own.

use std::ops::Range;

use inflight_base::BlockId;

/// Which layers share blocks. A block of the KV cache holds positions of the layers of one group; all blocks are as
/// large as those of the group with the most layers.
///
/// ```text
/// layers     0 local  1 local  2 global  3 local  4 local  5 global
///
/// group 0    2, 5               tables are interleaved: the blocks of the first positions, a block for each group,
/// group 1    0, 1               then those of the next positions
/// group 2    3, 4
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LayerGroups {
    places: Vec<LayerPlace>,
    num_groups: usize,
    layers_per_group: usize,
}

/// Where the keys and values of a layer are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LayerPlace {
    /// The group.
    pub group: usize,
    /// Which of its layers.
    pub index: usize,
}

impl LayerGroups {
    /// All layers in one group.
    pub fn one(num_layers: usize) -> Self {
        Self::new(&vec![0; num_layers])
    }

    /// All layers in one group and in one place: each overwrites the keys and values of the one before it, as where no
    /// later step reads them.
    pub fn of_one_step(num_layers: usize) -> Self {
        let place = LayerPlace { group: 0, index: 0 };
        Self {
            places: vec![place; num_layers],
            num_groups: 1,
            layers_per_group: num_layers.min(1),
        }
    }

    /// `groups` has the group of each layer, counted from 0; each group has a layer.
    pub fn new(groups: &[usize]) -> Self {
        let mut sizes: Vec<usize> = Vec::new();
        let place = |&group: &usize| {
            if group >= sizes.len() {
                sizes.resize(group + 1, 0);
            }
            let index = sizes[group];
            sizes[group] += 1;
            LayerPlace { group, index }
        };
        let places: Vec<_> = groups.iter().map(place).collect();
        Self {
            places,
            num_groups: sizes.len().max(1),
            layers_per_group: sizes.into_iter().max().unwrap_or(0),
        }
    }

    /// The same groups with only these layers, some groups perhaps with none: tables stay as they are.
    ///
    /// # Panics
    ///
    /// There are no such layers.
    #[must_use]
    pub fn with_layers(&self, layers: Range<usize>) -> Self {
        let mut places = self.places[layers].to_vec();
        let mut firsts = vec![None; self.num_groups];
        for place in &mut places {
            place.index -= *firsts[place.group].get_or_insert(place.index);
        }
        Self {
            layers_per_group: places.iter().map(|it| it.index + 1).max().unwrap_or(0),
            num_groups: self.num_groups,
            places,
        }
    }

    /// The group of each layer.
    pub fn groups(&self) -> impl Iterator<Item = usize> {
        self.places.iter().map(|place| place.group)
    }

    /// The number of groups.
    pub fn num_groups(&self) -> usize {
        self.num_groups
    }

    /// Layers of the largest group, which all blocks have room for.
    pub fn layers_per_group(&self) -> usize {
        self.layers_per_group
    }

    /// The number of layers.
    pub fn num_layers(&self) -> usize {
        self.places.len()
    }

    /// Where a layer is.
    ///
    /// # Panics
    ///
    /// There is no such layer.
    pub fn place(&self, layer: usize) -> LayerPlace {
        self.places[layer]
    }
}

/// The blocks that a sequence has of one group, in order of position.
#[derive(Clone, Copy, Debug)]
pub struct GroupBlocks<'a> {
    /// The blocks of all groups, interleaved.
    blocks: &'a [BlockId],
    num_groups: usize,
    group: usize,
}

impl<'a> GroupBlocks<'a> {
    /// The blocks of `group` in a table of `num_groups`.
    pub fn new(blocks: &'a [BlockId], num_groups: usize, group: usize) -> Self {
        assert!(group < num_groups, "group {group} of {num_groups}");
        Self {
            blocks,
            num_groups,
            group,
        }
    }

    /// The block at a place.
    ///
    /// # Panics
    ///
    /// The table ends before it.
    #[inline]
    pub fn at(&self, place: usize) -> BlockId {
        self.blocks[place * self.num_groups + self.group]
    }

    /// All of them.
    pub fn iter(self) -> impl Iterator<Item = BlockId> + 'a {
        self.blocks
            .iter()
            .skip(self.group)
            .step_by(self.num_groups)
            .copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layers_are_counted_within_their_groups() {
        let groups = LayerGroups::new(&[1, 1, 0, 2, 2, 0, 1]);
        assert_eq!((groups.num_groups(), groups.layers_per_group()), (3, 3));
        let places: Vec<_> = (0..groups.num_layers())
            .map(|layer| groups.place(layer))
            .map(|LayerPlace { group, index }| (group, index))
            .collect();
        let expected = [(1, 0), (1, 1), (0, 0), (2, 0), (2, 1), (0, 1), (1, 2)];
        assert_eq!(places, expected);
        let last = groups.with_layers(4..7);
        assert_eq!((last.num_groups(), last.layers_per_group()), (3, 1));
        let places: Vec<_> = (0..3).map(|layer| last.place(layer)).collect();
        let expected = [2, 0, 1].map(|group| LayerPlace { group, index: 0 });
        assert_eq!(places, expected);
        assert_eq!(groups.with_layers(0..7), groups);
        let shared = LayerGroups::of_one_step(5);
        assert_eq!((shared.num_groups(), shared.layers_per_group()), (1, 1));
        assert_eq!(shared.num_layers(), 5);
        assert!((0..5).all(|layer| shared.place(layer).index == 0));
        assert_eq!(shared.with_layers(1..4), LayerGroups::of_one_step(3));
        let one = LayerGroups::one(5);
        assert_eq!((one.num_groups(), one.layers_per_group()), (1, 5));
    }

    #[test]
    fn a_group_has_every_so_many_blocks_of_a_table() {
        let table: Vec<_> = (0..6).map(BlockId).collect();
        let blocks = GroupBlocks::new(&table, 3, 1);
        assert_eq!((blocks.at(0), blocks.at(1)), (BlockId(1), BlockId(4)));
        assert!(blocks.iter().eq([BlockId(1), BlockId(4)]));
    }
}
