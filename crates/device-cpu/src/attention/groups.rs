//! The groups of 16 positions of a tile: read in place if possible, otherwise copied.

use super::super::kv_cache::{GROUP, KvGroup, KvLayer};
use super::TILE_GROUPS;
use super::copies::Room;
use super::task::Task;
use crate::kv_cache::GroupedLayout;
use inflight_base::BlockId;
use inflight_device::KvLayout;

/// The groups of a tile that can be read in place.
pub(super) type Groups<'a> = [Option<KvGroup<'a>>; TILE_GROUPS];

/// A group of 16 positions of a sequence.
#[derive(Clone, Copy)]
pub(super) struct Lanes<'a> {
    /// The first position.
    pub start: usize,
    /// A mask of the positions that any row of the task sees. A block without any of them is not read.
    pub seen: u16,
    /// The stored group, if it has all of them.
    pub in_place: Option<KvGroup<'a>>,
}

impl<'a> Lanes<'a> {
    /// The stored group, if any row sees a position of it.
    pub fn seen_in_place(&self) -> Option<KvGroup<'a>> {
        self.in_place.filter(|_| self.seen != 0)
    }
}

/// The keys and values of a group in bf16, in place or copied to `room`. In a copy, values of positions that no row
/// sees are zero; in place, they may be remnants of an earlier owner of the block, even NaN.
pub(super) fn group<'a>(
    cache: &KvLayer<'_>,
    task: &Task<'_>,
    lanes: Lanes<'a>,
    room: Room<'a>,
) -> KvGroup<'a> {
    if let Some(group) = lanes.seen_in_place() {
        return group;
    }
    let Room { keys, values, .. } = room;
    values.fill(0);
    for_each_position(cache, task, lanes, |source, from, to| {
        let source = (source.keys, source.values);
        copy_position(cache.layout(), source, from, (keys, values), to);
    });
    KvGroup {
        keys,
        values,
        scales: &[],
    }
}

/// As [`group`], with zero values beyond the end of the sequence. The keys there are unspecified.
pub(super) fn whole_group<'a>(
    cache: &KvLayer<'_>,
    task: &Task<'_>,
    lanes: Lanes<'a>,
    room: Room<'a>,
) -> KvGroup<'a> {
    let len = GROUP.min(task.kv_len - lanes.start);
    match lanes.seen_in_place() {
        Some(group) if len < GROUP => {
            copy_first_positions(group.values, room.values, len);
            KvGroup {
                values: room.values,
                ..group
            }
        }
        _ => group(cache, task, lanes, room),
    }
}

/// The groups of the tile at `start` that can be read in place.
pub(super) fn groups_in_place<'a>(
    cache: &'a KvLayer<'_>,
    task: &Task<'_>,
    start: usize,
) -> Groups<'a> {
    let block_size = cache.layout().positions_per_block();
    let (mut index, mut offset) = (start / block_size, start % block_size);
    let mut groups = [None; TILE_GROUPS];
    if task.selected.is_some() {
        return groups;
    }
    for (i, group) in groups.iter_mut().enumerate() {
        let len = GROUP.min(task.kv_len.saturating_sub(start + i * GROUP));
        if len > 0 && offset.is_multiple_of(GROUP) && offset + len <= block_size {
            let block = task.block_table.at(index);
            if block != BlockId::NONE {
                *group = Some(cache.group(block, task.head, offset / GROUP));
            }
        }
        offset += GROUP;
        while offset >= block_size {
            (index, offset) = (index + 1, offset - block_size);
        }
    }
    groups
}

/// Calls `copy(group, from, to)` for each position that is seen, with its stored group, its lane there, and its
/// lane in this group.
pub(super) fn for_each_position(
    cache: &KvLayer<'_>,
    task: &Task<'_>,
    lanes: Lanes<'_>,
    mut copy: impl FnMut(KvGroup<'_>, usize, usize),
) {
    let block_size = cache.layout().positions_per_block();
    for lane in (0..GROUP).filter(|lane| lanes.seen & (1 << lane) != 0) {
        let place = lanes.start + lane;
        let position = task
            .selected
            .map_or(place, |selected| selected[place] as usize);
        let (index, offset) = (position / block_size, position % block_size);
        let block = task.block_table.at(index);
        let source = cache.group(block, task.head, offset / GROUP);
        copy(source, offset % GROUP, lane);
    }
}

/// Copies one position from lane `from` of a group to lane `to` of another.
pub(super) fn copy_position<T: Copy>(
    layout: &KvLayout,
    (key_group, value_group): (&[T], &[T]),
    from: usize,
    (keys, values): (&mut [T], &mut [T]),
    to: usize,
) {
    copy_key(layout.head_dim, key_group, from, keys, to);
    let stride = 2 * layout.padded_dim();
    for d in 0..layout.value_dim() {
        values[to / 2 * stride + 2 * d + to % 2] =
            value_group[from / 2 * stride + 2 * d + from % 2];
    }
}

/// Copies the key of one position.
pub(super) fn copy_key<T: Copy>(
    head_dim: usize,
    group: &[T],
    from: usize,
    keys: &mut [T],
    to: usize,
) {
    let (group, keys) = (group.as_chunks::<2>().0, keys.as_chunks_mut::<2>().0);
    for pair in 0..head_dim / 2 {
        keys[pair * GROUP + to] = group[pair * GROUP + from];
    }
}

/// Copies the first `len` positions of a group of values and clears the others.
fn copy_first_positions(source: &[u16], values: &mut [u16], len: usize) {
    let pair_len = source.len() / (GROUP / 2);
    let whole = len / 2 * pair_len;
    values[..whole].copy_from_slice(&source[..whole]);
    values[whole..].fill(0);
    if !len.is_multiple_of(2) {
        let half_pair = source[whole..][..pair_len].iter().step_by(2);
        for (value, out) in half_pair.zip(values[whole..].iter_mut().step_by(2)) {
            *out = *value;
        }
    }
}
