//! Which layers of a model share the blocks of its KV cache.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::num::NonZeroU32;

use crate::base::Tokens;
use crate::device::LayerGroups;
use crate::engine::{AttentionWindow, KvGroups, MAX_KV_GROUPS};

/// The most memory that groups of unequal sizes may waste for the sake of fewer groups, as a part of what layers need.
const MAX_WASTE: f64 = 0.05;

/// The most memory of a sequence of the largest length, as a part of what it needs in one group, that is worth having
/// several.
const MAX_NEED: f64 = 0.9;

/// The layers of a model, in groups with a window each.
///
/// ```text
/// Gemma 3 12B: 8 layers see everything, 40 a window. In groups of 8, no block wastes anything:
///
/// group 0       1          2          3          4          5
/// whole 1..8 |  local 1..8 | 9..16  | 17..24   | 25..32   | 33..40
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GroupedLayers {
    layers: LayerGroups,
    windows: KvGroups,
}

impl GroupedLayers {
    /// All layers in one group, which keeps what any of them sees: `window`, or everything.
    pub fn one(num_layers: usize, window: Option<AttentionWindow>) -> Self {
        Self {
            layers: LayerGroups::one(num_layers),
            windows: KvGroups::one(window),
        }
    }

    /// Groups layers with these windows, so that a sequence of `max_seq_len` tokens takes little memory. There is one group
    /// unless several save a tenth.
    pub fn new(
        windows: impl Iterator<Item = Option<NonZeroU32>>,
        num_sinks: Tokens,
        max_seq_len: Tokens,
    ) -> Self {
        let kinds = Kinds::new(windows, num_sinks, max_seq_len);
        let grouping = kinds.grouping().unwrap_or_else(|| kinds.one());
        let window = |size: Tokens| AttentionWindow { size, num_sinks };
        let windows: Vec<_> = grouping
            .windows
            .iter()
            .map(|size| size.map(window))
            .collect();
        Self {
            layers: LayerGroups::new(&grouping.groups),
            windows: KvGroups::new(&windows),
        }
    }

    /// The group of each layer.
    pub fn layers(&self) -> &LayerGroups {
        &self.layers
    }

    /// The window of each group.
    pub fn windows(&self) -> KvGroups {
        self.windows
    }
}

/// A group for each layer, and a window for each group.
struct Grouping {
    groups: Vec<usize>,
    windows: Vec<Option<Tokens>>,
}

/// Layers by how far they see.
struct Kinds {
    /// The layers of each window, the largest first; `None` is first.
    layers: BTreeMap<Reverse<Tokens>, Vec<usize>>,
    num_layers: usize,
    num_sinks: Tokens,
    max_seq_len: Tokens,
}

impl Kinds {
    /// The window of layers that see everything.
    const ALL: Tokens = Tokens(u32::MAX);

    fn new(
        windows: impl Iterator<Item = Option<NonZeroU32>>,
        num_sinks: Tokens,
        max_seq_len: Tokens,
    ) -> Self {
        let mut layers: BTreeMap<_, Vec<_>> = BTreeMap::new();
        let mut num_layers = 0;
        for (layer, window) in windows.enumerate() {
            let size = window.map_or(Self::ALL, |window| Tokens(window.get()));
            let sees_all = max_seq_len.saturating_sub(size) <= num_sinks;
            let size = if sees_all { Self::ALL } else { size };
            layers.entry(Reverse(size)).or_default().push(layer);
            num_layers += 1;
        }
        Self {
            layers,
            num_layers,
            num_sinks,
            max_seq_len,
        }
    }

    /// One group, with the largest window.
    fn one(&self) -> Grouping {
        let largest = self.layers.first_key_value();
        Grouping {
            groups: vec![0; self.num_layers],
            windows: vec![largest.and_then(|(size, _)| size_of(*size))],
        }
    }

    /// The groups that save most, if it is worth it.
    fn grouping(&self) -> Option<Grouping> {
        let sizes = 1..=self.layers.values().map(Vec::len).max()?;
        let least = self.need(|num_layers| num_layers);
        // Of the longest sequences, and of short ones, of which every layer sees everything.
        let waste = |size: usize| {
            let padded = |num_layers: usize| num_layers.div_ceil(size) * size;
            let long = self.need(padded) / least;
            let short = (self.num_groups(size) * size) as f64 / self.num_layers as f64;
            long.max(short) - 1.0
        };
        let possible = sizes.filter(|&size| self.num_groups(size) <= MAX_KV_GROUPS);
        let size = possible.min_by(|&a, &b| {
            let rank = |size: usize| (waste(size).max(MAX_WASTE), self.num_groups(size));
            let (a, b) = (rank(a), rank(b));
            a.0.total_cmp(&b.0).then(a.1.cmp(&b.1))
        })?;
        let (Reverse(largest), _) = self.layers.first_key_value()?;
        let in_one = self.num_layers as f64 * self.num_seen(*largest);
        let need = self.need(|num_layers| num_layers.div_ceil(size) * size);
        (need <= MAX_NEED * in_one).then(|| self.in_groups_of(size))
    }

    /// Layers of one kind in groups of up to `size`, as equal as can be.
    fn in_groups_of(&self, size: usize) -> Grouping {
        let mut groups = vec![0; self.num_layers];
        let mut windows = Vec::new();
        for (window, layers) in &self.layers {
            let num_groups = layers.len().div_ceil(size);
            for (index, &layer) in layers.iter().enumerate() {
                groups[layer] = windows.len() + index * num_groups / layers.len();
            }
            windows.extend((0..num_groups).map(|_| size_of(*window)));
        }
        Grouping { groups, windows }
    }

    fn num_groups(&self, size: usize) -> usize {
        let kinds = self.layers.values();
        kinds.map(|layers| layers.len().div_ceil(size)).sum()
    }

    /// Positions of all layers of the longest sequence, if a kind takes as many layers as `padded` says.
    fn need(&self, padded: impl Fn(usize) -> usize) -> f64 {
        let kinds = self.layers.iter();
        kinds
            .map(|(Reverse(size), layers)| padded(layers.len()) as f64 * self.num_seen(*size))
            .sum()
    }

    /// Positions of the longest sequence that a layer with this window sees.
    fn num_seen(&self, size: Tokens) -> f64 {
        let seen = u64::from(size.0) + u64::from(self.num_sinks.0);
        seen.min(u64::from(self.max_seq_len.0)) as f64
    }
}

/// The size of a window; `None` if it has everything.
fn size_of(Reverse(size): Reverse<Tokens>) -> Option<Tokens> {
    (size != Kinds::ALL).then_some(size)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Layers of which every `interval`-th sees everything, and the others a window.
    fn interleaved(num_layers: usize, interval: usize, window: u32) -> Vec<Option<NonZeroU32>> {
        let window_of = |layer: usize| match (layer + 1).is_multiple_of(interval) {
            true => None,
            false => NonZeroU32::new(window),
        };
        (0..num_layers).map(window_of).collect()
    }

    fn grouped(windows: &[Option<NonZeroU32>], max_seq_len: u32) -> GroupedLayers {
        GroupedLayers::new(windows.iter().copied(), Tokens(0), Tokens(max_seq_len))
    }

    #[test]
    fn models_of_mixed_windows_waste_little() {
        for (name, windows, num_groups) in [
            ("Gemma 3 1B", interleaved(26, 6, 512), 13),
            ("Gemma 3 4B", interleaved(34, 6, 1024), 7),
            ("Gemma 3 12B", interleaved(48, 6, 1024), 6),
            ("Gemma 3 27B", interleaved(62, 6, 1024), 13),
            ("Gemma 2 9B", interleaved(42, 2, 4096), 2),
            ("GPT-OSS 120B", interleaved(36, 2, 128), 2),
            ("Command R7B", interleaved(32, 4, 4096), 4),
        ] {
            let grouped = grouped(&windows, 32768);
            let (layers, groups) = (grouped.layers(), grouped.windows());
            assert_eq!(groups.num_groups(), num_groups, "{name}");
            let in_blocks = layers.num_groups() * layers.layers_per_group();
            let waste = in_blocks as f64 / windows.len() as f64 - 1.0;
            assert!(waste <= MAX_WASTE, "{name}: {waste}");
            for (layer, window) in windows.iter().enumerate() {
                let of_group = groups.windows()[layers.place(layer).group];
                let size = of_group.map(|it| it.size.0);
                assert_eq!(size, window.map(NonZeroU32::get), "{name}, layer {layer}");
            }
        }
    }

    #[test]
    fn what_several_groups_do_not_save_is_one() {
        let alike = [NonZeroU32::new(100); 5];
        let one = |size| AttentionWindow {
            size: Tokens(size),
            num_sinks: Tokens(0),
        };
        for (windows, max_seq_len, window) in [
            (alike.to_vec(), 1000, Some(one(100))),
            (vec![None; 5], 1000, None),
            // No sequence is longer than all windows.
            (alike.to_vec(), 100, None),
            // The window hides too little of the longest sequence.
            (interleaved(6, 2, 900), 1000, None),
        ] {
            let expected = GroupedLayers::one(windows.len(), window);
            assert_eq!(grouped(&windows, max_seq_len), expected);
        }
    }

    #[test]
    fn layers_of_all_windows_find_a_group() {
        // Too many kinds for a group each.
        let sizes = (1..=20).map(|n| NonZeroU32::new(10 * n));
        let many: Vec<_> = sizes.collect();
        assert_eq!(grouped(&many, 1000).windows().num_groups(), 1);
        // One layer of a kind does not make blocks of one layer.
        let mut windows = interleaved(31, 100, 64);
        windows.push(None);
        let few = grouped(&windows, 4096);
        assert!(few.windows().num_groups() <= MAX_KV_GROUPS);
        assert!(few.layers().layers_per_group() > 1);
    }
}
