//! Groups that are stored in int8, widened for the kernels.
//!
//! A tile is widened once for all queries of a task. The elements become bf16, which has them all; their
//! scales stay apart, and the kernels apply them to scores and probabilities.

use super::super::Simd;
use super::super::kv_cache::{GROUP, Group, KvLayout, Layer, widen};
use super::super::math::from_bf16_bits;
use super::super::simd::for_each_simd;
use super::copies::Room;
use super::groups::{Lanes, copy_position, for_each_position, group_in_place};
use super::task::Task;

/// Scratch memory: a group whose positions are not in one place, as it would be stored.
#[derive(Default)]
pub(super) struct Gathered {
    keys: Vec<u16>,
    values: Vec<u16>,
    scales: Vec<u16>,
}

/// Widens a group. Its elements are always numbers, scales of what is not seen may not be. Asks for the
/// memory of `ahead`.
pub(super) fn widen_group<'a>(
    simd: Simd,
    cache: &Layer<'_>,
    task: &Task<'_>,
    lanes: Lanes,
    ahead: Option<Group<'_>>,
    gathered: &mut Gathered,
    room: Room<'a>,
) -> (&'a [u16], &'a [u16]) {
    if lanes.seen == 0 {
        room.values.fill(0);
        return (room.keys, room.values);
    }
    let group = match group_in_place(cache, task, lanes.start) {
        Some(group) => group,
        None => gathered.gather(cache, task, lanes),
    };
    let ahead = ahead.unwrap_or(group);
    for (words, ahead, out) in [
        (group.keys, ahead.keys, &mut *room.keys),
        (group.values, ahead.values, &mut *room.values),
    ] {
        for_each_simd!(simd, widen, (words: &[u16], ahead: &[u16], out: &mut [u16]));
    }
    let (keys, values) = group.scales.split_at(GROUP);
    for (scales, out) in [(keys, room.key_scales), (values, room.value_scales)] {
        for (bits, out) in scales.iter().zip(out) {
            *out = from_bf16_bits(*bits);
        }
    }
    (room.keys, room.values)
}

impl Gathered {
    fn gather(&mut self, cache: &Layer<'_>, task: &Task<'_>, lanes: Lanes) -> Group<'_> {
        let layout = cache.layout();
        self.make_room(layout);
        for_each_position(cache, task, lanes, |source, from, to| {
            let elements: (&[u8], _) = (
                bytemuck::cast_slice(source.keys),
                bytemuck::cast_slice(source.values),
            );
            let out: (&mut [u8], _) = (
                bytemuck::cast_slice_mut(&mut self.keys),
                bytemuck::cast_slice_mut(&mut self.values),
            );
            copy_position(layout, elements, from, out, to);
            for scales in [0, GROUP] {
                self.scales[scales + to] = source.scales[scales + from];
            }
        });
        Group {
            keys: &self.keys,
            values: &self.values,
            scales: &self.scales,
        }
    }

    /// Two elements a word, and the scales of keys and values.
    fn make_room(&mut self, layout: &KvLayout) {
        self.keys.resize(layout.key_group_len() / 2, 0);
        self.values.resize(layout.value_group_len() / 2, 0);
        self.scales.resize(2 * GROUP, 0);
    }
}
