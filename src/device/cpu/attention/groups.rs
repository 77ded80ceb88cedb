//! The groups of 16 positions that a tile consists of: in place where they can be, else copied.

use super::super::kv_cache::{GROUP, Group, KvLayout, Layer};
use super::copies::Room;
use super::task::Task;
use crate::base::BlockId;

/// 16 positions of a sequence.
#[derive(Clone, Copy)]
pub(super) struct Lanes {
    /// The first one.
    pub start: usize,
    /// Those that any row of the task sees, a bit each. The others do not count: a block that has none
    /// of them is not read.
    pub seen: u16,
}

/// Keys and values of a group in bf16, in place or copied to `room`. Values beyond the
/// sequence are zero, since what a former owner of the block left there may not even be a number; keys
/// need not be.
pub(super) fn group<'a>(
    cache: &'a Layer<'_>,
    task: &Task<'_>,
    lanes: Lanes,
    room: Room<'a>,
) -> (&'a [u16], &'a [u16]) {
    let Room { keys, values, .. } = room;
    if lanes.seen == 0 {
        values.fill(0);
        return (keys, values);
    }
    let len = GROUP.min(task.kv_len - lanes.start);
    if let Some(group) = group_in_place(cache, task, lanes.start) {
        if len == GROUP {
            return (group.keys, group.values);
        }
        copy_first_positions(group.values, values, len);
        return (group.keys, values);
    }
    values.fill(0);
    for_each_position(cache, task, lanes, |source, from, to| {
        let source = (source.keys, source.values);
        copy_position(cache.layout(), source, from, (keys, values), to);
    });
    (keys, values)
}

/// The place of the 16 positions from `start` on, as far as they are of the sequence, if all of them
/// are in one group of a block.
pub(super) fn group_in_place<'a>(
    cache: &'a Layer<'_>,
    task: &Task<'_>,
    start: usize,
) -> Option<Group<'a>> {
    let len = GROUP.min(task.kv_len.checked_sub(start)?);
    let block_size = cache.layout().positions_per_block();
    let offset = start % block_size;
    if len == 0 || !offset.is_multiple_of(GROUP) || offset + len > block_size {
        return None;
    }
    let block = task.block_table[start / block_size];
    (block != BlockId::NONE).then(|| cache.group(block, task.head, offset / GROUP))
}

/// Calls `copy(group, from, to)` with the stored group of each position that is seen, its lane there,
/// and its lane among these.
pub(super) fn for_each_position(
    cache: &Layer<'_>,
    task: &Task<'_>,
    lanes: Lanes,
    mut copy: impl FnMut(Group<'_>, usize, usize),
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
