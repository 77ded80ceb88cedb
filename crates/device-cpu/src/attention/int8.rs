//! Groups that are stored in int8.
//!
//! They are used as stored, or widened once for all queries of a task for a kernel that takes bf16, which represents
//! all elements of int8. Kernels apply the scales to scores and probabilities. Scales of positions that are not
//! seen may be NaN; elements cannot.

use super::super::Simd;
use super::super::kv_cache::{GROUP, KvGroup, KvLayer, widen};
use super::super::math::from_bf16_bits;
use super::super::simd::for_each_simd;
use super::copies::{GatheredGroup, Room};
use super::groups::{Lanes, copy_position, for_each_position};
use super::task::Task;
use crate::kv_cache::GroupedLayout;

/// A group as it is stored, in place or gathered into `room`.
pub(super) fn stored_group<'a>(
    cache: &KvLayer<'_>,
    task: &Task<'_>,
    lanes: Lanes<'a>,
    room: Room<'a>,
) -> KvGroup<'a> {
    if let Some(group) = lanes.seen_in_place() {
        return group;
    }
    gather(
        cache,
        task,
        lanes,
        room.keys,
        room.values,
        room.stored_scales,
    );
    KvGroup {
        keys: room.keys,
        values: room.values,
        scales: room.stored_scales,
    }
}

/// A group widened to bf16. Its scales are in `room`. Prefetches `ahead`.
pub(super) fn widen_group<'a>(
    simd: Simd,
    cache: &KvLayer<'_>,
    task: &Task<'_>,
    lanes: Lanes<'_>,
    ahead: Option<KvGroup<'_>>,
    gathered: &mut GatheredGroup,
    room: Room<'a>,
) -> KvGroup<'a> {
    if lanes.seen == 0 {
        room.values.fill(0);
    } else {
        let group = match lanes.in_place {
            Some(group) => group,
            None => gather_group(gathered, cache, task, lanes, room.stored_scales),
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
    }
    KvGroup {
        keys: room.keys,
        values: room.values,
        scales: &[],
    }
}

/// Copies the positions that are seen.
fn gather(
    cache: &KvLayer<'_>,
    task: &Task<'_>,
    lanes: Lanes<'_>,
    keys: &mut [u16],
    values: &mut [u16],
    scales: &mut [u16],
) {
    let keys: &mut [u8] = bytemuck::cast_slice_mut(keys);
    let values: &mut [u8] = bytemuck::cast_slice_mut(values);
    for_each_position(cache, task, lanes, |source, from, to| {
        let elements = (
            bytemuck::cast_slice(source.keys),
            bytemuck::cast_slice(source.values),
        );
        copy_position(cache.layout(), elements, from, (keys, values), to);
        for part in [0, GROUP] {
            scales[part + to] = source.scales[part + from];
        }
    });
}

/// Copies the positions that are seen into `to`, as they would be stored.
fn gather_group<'a>(
    to: &'a mut GatheredGroup,
    cache: &KvLayer<'_>,
    task: &Task<'_>,
    lanes: Lanes<'_>,
    scales: &'a mut [u16],
) -> KvGroup<'a> {
    let layout = cache.layout();
    // Two elements per word.
    to.keys.resize(layout.key_group_len() / 2, 0);
    to.values.resize(layout.value_group_len() / 2, 0);
    gather(cache, task, lanes, &mut to.keys, &mut to.values, scales);
    KvGroup {
        keys: &to.keys,
        values: &to.values,
        scales,
    }
}
