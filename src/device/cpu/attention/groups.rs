//! The groups of 16 positions that a tile consists of: in place where they can be, else copied.

use super::super::kv_cache::{GROUP, KvGroup, KvLayer};
use super::TILE_GROUPS;
use super::copies::Room;
use super::task::Task;
use crate::base::BlockId;
use crate::device::KvLayout;

/// The groups of a tile, as far as they are of the sequence and in one place.
pub(super) type Groups<'a> = [Option<KvGroup<'a>>; TILE_GROUPS];

/// 16 positions of a sequence.
#[derive(Clone, Copy)]
pub(super) struct Lanes<'a> {
    /// The first one.
    pub start: usize,
    /// Those that any row of the task sees, a bit each. The others do not count: a block that has none
    /// of them is not read.
    pub seen: u16,
    /// Where they all are.
    pub in_place: Option<KvGroup<'a>>,
}

impl<'a> Lanes<'a> {
    /// The group in its place, if any row sees of it.
    pub fn seen_in_place(&self) -> Option<KvGroup<'a>> {
        self.in_place.filter(|_| self.seen != 0)
    }
}

/// Keys and values of a group in bf16, in place or copied to `room`. Groups that no row sees have zeros for values.
/// What was copied has them for positions that are not seen; what is in place may have there what a former owner
/// of the block left, which may not even be a number.
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

/// The same with values of zero beyond the sequence; keys may be anything there.
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

/// The places of the groups of the tile at `start`.
pub(super) fn groups_in_place<'a>(
    cache: &'a KvLayer<'_>,
    task: &Task<'_>,
    start: usize,
) -> Groups<'a> {
    let block_size = cache.layout().positions_per_block();
    let (mut index, mut offset) = (start / block_size, start % block_size);
    let mut groups = [None; TILE_GROUPS];
    for (i, group) in groups.iter_mut().enumerate() {
        let len = GROUP.min(task.kv_len.saturating_sub(start + i * GROUP));
        if len > 0 && offset.is_multiple_of(GROUP) && offset + len <= block_size {
            let block = task.block_table[index];
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

/// Calls `copy(group, from, to)` with the stored group of each position that is seen, its lane there,
/// and its lane among these.
pub(super) fn for_each_position(
    cache: &KvLayer<'_>,
    task: &Task<'_>,
    lanes: Lanes<'_>,
    mut copy: impl FnMut(KvGroup<'_>, usize, usize),
) {
    let block_size = cache.layout().positions_per_block();
    for lane in (0..GROUP).filter(|lane| lanes.seen & (1 << lane) != 0) {
        let position = lanes.start + lane;
        let (index, offset) = (position / block_size, position % block_size);
        let block = task.block_table[index];
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
    for pair in 0..layout.head_dim / 2 {
        for i in 0..2 {
            keys[(pair * GROUP + to) * 2 + i] = key_group[(pair * GROUP + from) * 2 + i];
        }
    }
    let stride = 2 * layout.padded_dim();
    for d in 0..layout.head_dim {
        values[to / 2 * stride + 2 * d + to % 2] =
            value_group[from / 2 * stride + 2 * d + from % 2];
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
