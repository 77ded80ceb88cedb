//! Which layers of a model share the blocks of its KV cache.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::num::NonZeroU32;
use std::ops::Range;

use inflight_base::Tokens;
use inflight_device::LayerGroups;
use inflight_engine::{AttentionWindow, KvGroups, MAX_KV_GROUPS};

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
/// group   0            1            2                 5
///         whole 1..8   local 1, 6,  local 2, 7,  ...  local 5, 10,
///                      ..., 36      ..., 37           ..., 40
/// ```
///
/// Those of a window take turns, so that each stage of a pipeline has about equally many of each group.
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

    /// All layers in one group, whose blocks are there for one step.
    pub fn of_one_step(num_layers: usize) -> Self {
        Self {
            layers: LayerGroups::of_one_step(num_layers),
            windows: KvGroups::one(None),
        }
    }

    /// Groups layers, each with its window and the width of its keys and values, so that a sequence of `max_seq_len`
    /// tokens takes little memory. There is one group unless several save a tenth. `stages` are the layers of each
    /// stage of a pipeline, which has blocks for them.
    ///
    /// # Panics
    /// A stage has other layers.
    pub fn new(
        layers: impl Iterator<Item = (Option<NonZeroU32>, usize)>,
        stages: &[Range<usize>],
        num_sinks: Tokens,
        max_seq_len: Tokens,
    ) -> Self {
        let kinds = Kinds::new(layers, stages, num_sinks, max_seq_len);
        let grouping = kinds.grouping().unwrap_or_else(|| kinds.one());
        let window = |size: Tokens| AttentionWindow { size, num_sinks };
        let windows: Vec<_> = grouping
            .windows
            .iter()
            .map(|size| size.map(window))
            .collect();
        Self {
            layers: grouping.layers,
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
    layers: LayerGroups,
    windows: Vec<Option<Tokens>>,
}

/// Layers by how far they see.
struct Kinds<'a> {
    /// The layers of each window, the largest first; `None` is first.
    layers: BTreeMap<Reverse<Tokens>, Vec<usize>>,
    /// Width of keys and values in each layer.
    widths: Vec<usize>,
    stages: &'a [Range<usize>],
    num_sinks: Tokens,
    max_seq_len: Tokens,
}

impl<'a> Kinds<'a> {
    /// The window of layers that see everything.
    const ALL: Tokens = Tokens(u32::MAX);

    fn new(
        of_layers: impl Iterator<Item = (Option<NonZeroU32>, usize)>,
        stages: &'a [Range<usize>],
        num_sinks: Tokens,
        max_seq_len: Tokens,
    ) -> Self {
        let mut layers: BTreeMap<_, Vec<_>> = BTreeMap::new();
        let mut widths = Vec::new();
        for (layer, (window, width)) in of_layers.enumerate() {
            let size = window.map_or(Self::ALL, |window| Tokens(window.get()));
            let sees_all = max_seq_len.saturating_sub(size) <= num_sinks;
            let size = if sees_all { Self::ALL } else { size };
            layers.entry(Reverse(size)).or_default().push(layer);
            widths.push(width);
        }
        Self {
            layers,
            widths,
            stages,
            num_sinks,
            max_seq_len,
        }
    }

    /// One group, with the largest window.
    fn one(&self) -> Grouping {
        let largest = self.layers.first_key_value();
        Grouping {
            layers: LayerGroups::one(self.widths.len()),
            windows: vec![largest.and_then(|(size, _)| size_of(*size))],
        }
    }

    /// The groups that save most, if it is worth it.
    fn grouping(&self) -> Option<Grouping> {
        let of_kinds = self.layers.values().map(|layers| self.width(layers));
        let total: usize = of_kinds.clone().sum();
        // Candidates: the total width of each kind, divided into 1 to MAX_KV_GROUPS groups.
        let mut widths: Vec<_> = of_kinds
            .flat_map(|width| (1..=MAX_KV_GROUPS).map(move |groups| width.div_ceil(groups)))
            .collect();
        widths.sort_unstable();
        widths.dedup();
        let needs = |(Reverse(size), layers): (&Reverse<Tokens>, &Vec<usize>)| {
            self.width(layers) as f64 * self.num_seen(*size)
        };
        let least: f64 = self.layers.iter().map(needs).sum();
        let possible = widths.into_iter().map(|width| self.in_groups_of(width));
        let possible = possible.filter(|grouping| grouping.windows.len() <= MAX_KV_GROUPS);
        let possible = possible.map(|grouping| {
            let need = self.need(&grouping);
            // Of the longest sequences, and of short ones, of which every layer sees everything.
            let num_groups = grouping.windows.len();
            let in_all = (num_groups * self.width_of_block(&grouping)) as f64;
            let waste = (need / least).max(in_all / total as f64) - 1.0;
            (waste.max(MAX_WASTE), num_groups, need, grouping)
        });
        let (_, _, need, grouping) =
            possible.min_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)))?;
        let (Reverse(largest), _) = self.layers.first_key_value()?;
        let in_one = total as f64 * self.num_seen(*largest);
        (need <= MAX_NEED * in_one).then_some(grouping)
    }

    /// Layers of one kind in groups of about `width`, as equal as can be, in all layers and in each stage.
    fn in_groups_of(&self, width: usize) -> Grouping {
        let mut groups = vec![0; self.widths.len()];
        let mut windows = Vec::new();
        for (window, layers) in &self.layers {
            let num_groups = self.width(layers).div_ceil(width).min(layers.len());
            for (index, &layer) in layers.iter().enumerate() {
                groups[layer] = windows.len() + index % num_groups;
            }
            windows.extend((0..num_groups).map(|_| size_of(*window)));
        }
        Grouping {
            layers: LayerGroups::new(&groups),
            windows,
        }
    }

    /// Total width of keys and values in some layers.
    fn width(&self, layers: &[usize]) -> usize {
        layers.iter().map(|&layer| self.widths[layer]).sum()
    }

    /// Width of a block in all stages together: of the largest group in each.
    fn width_of_block(&self, grouping: &Grouping) -> usize {
        let of_stage = |stage: &Range<usize>| {
            let mut widths = vec![0; grouping.windows.len()];
            for layer in stage.clone() {
                widths[grouping.layers.place(layer).group] += self.widths[layer];
            }
            widths.into_iter().max().unwrap_or(0)
        };
        self.stages.iter().map(of_stage).sum()
    }

    /// Memory of the blocks of the longest sequence, in widths times positions.
    fn need(&self, grouping: &Grouping) -> f64 {
        let seen = |window: &Option<Tokens>| self.num_seen(window.unwrap_or(Self::ALL));
        let of_groups: f64 = grouping.windows.iter().map(seen).sum();
        of_groups * self.width_of_block(grouping) as f64
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
    use std::slice;

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
        GroupedLayers::new(
            windows.iter().map(|&window| (window, 1)),
            slice::from_ref(&(0..windows.len())),
            Tokens(0),
            Tokens(max_seq_len),
        )
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
    fn blocks_waste_little_although_layers_have_other_widths() {
        for (name, num_layers, interval, widths) in [
            ("Gemma 4 31B", 60, 6, [4096, 2048]),
            ("Gemma 4 26B", 30, 6, [2048, 1024]),
            ("Gemma 4 E2B", 15, 5, [256, 512]),
            ("Gemma 4 E4B", 24, 6, [512, 1024]),
        ] {
            let windows = interleaved(num_layers, interval, 512);
            let width = |window: &Option<NonZeroU32>| widths[usize::from(window.is_none())];
            let of_layers: Vec<_> = windows.iter().map(|it| (*it, width(it))).collect();
            let grouped = GroupedLayers::new(
                of_layers.iter().copied(),
                slice::from_ref(&(0..num_layers)),
                Tokens(0),
                Tokens(32768),
            );
            let mut in_groups = vec![0; grouped.layers().num_groups()];
            for (layer, (_, width)) in of_layers.iter().enumerate() {
                in_groups[grouped.layers().place(layer).group] += width;
            }
            let in_blocks = in_groups.iter().max().expect("groups") * in_groups.len();
            let waste = in_blocks as f64 / in_groups.iter().sum::<usize>() as f64 - 1.0;
            assert!(in_groups.len() > 1, "{name}");
            // Of 25 layers and 5 that are half as wide, no grouping wastes less.
            let most = if num_layers == 30 { 0.1 } else { MAX_WASTE };
            assert!(waste <= most, "{name}: {waste}");
        }
    }

    #[test]
    fn stages_have_about_equally_many_layers_of_each_group() {
        let windows = interleaved(48, 6, 1024);
        let grouped = |stages: &[Range<usize>]| {
            let windows = windows.iter().map(|&window| (window, 1));
            GroupedLayers::new(windows, stages, Tokens(0), Tokens(32768))
        };
        for (stages, num_groups, in_stages) in [
            (vec![0..24, 24..48], 6, vec![4, 4]),
            (vec![0..12, 12..24, 24..36, 36..48], 6, vec![2; 4]),
            // A stage that begins within a round.
            (vec![0..26, 26..48], 6, vec![5, 4]),
            // Layer 5 is in no window, layers 6 to 10 are in each group with one.
            (vec![0..5, 5..11, 11..48], 6, vec![1, 1, 7]),
        ] {
            let grouped = grouped(&stages);
            assert_eq!(grouped.layers().num_groups(), num_groups, "{stages:?}");
            let of_stages = stages.iter().cloned().map(|layers| {
                let of_stage = grouped.layers().with_layers(layers);
                assert_eq!(of_stage.num_groups(), num_groups);
                of_stage.layers_per_group()
            });
            assert_eq!(of_stages.collect::<Vec<_>>(), in_stages, "{stages:?}");
        }
        // With a layer for each stage, a block of a stage has one layer, and each layer is in one group.
        let each: Vec<_> = (0..48).map(|layer| layer..layer + 1).collect();
        assert_eq!(grouped(&each).layers().num_groups(), 1);
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
