//! Groups of keys whose first elements are the values.
//!
//! Kernels take keys by pairs of elements and values by pairs of positions, so values are copied, once for all rows of
//! a task: with one key head, the rows of all heads.
//!
//! ```text
//! keys      [element pair][position][2 elements]        k0 k1 of position 0, k0 k1 of position 1, ...
//! values    [position pair][element][2 positions]       k0 of positions 0 and 1, k1 of positions 0 and 1, ...
//! ```

use super::super::Simd;
use super::super::kv_cache::{GROUP, KvGroup, KvLayer};
use super::super::simd::for_each_simd;
use super::copies::Room;
use super::groups::{Lanes, copy_key, for_each_position};
use super::task::Task;
use crate::kv_cache::GroupedLayout;

/// Pairs of elements that are copied at a time: a line of the values of each pair of positions.
const BLOCK: usize = 8;

/// The keys of a group in bf16, in place or copied to `room`, and the values in them, copied to `room`. Values of
/// positions that no row sees are zero.
pub(super) fn group_of_keys<'a>(
    simd: Simd,
    cache: &KvLayer<'_>,
    task: &Task<'_>,
    lanes: Lanes<'a>,
    room: Room<'a>,
) -> KvGroup<'a> {
    let Room {
        keys: copied,
        values,
        ..
    } = room;
    let layout = cache.layout();
    let keys: &'a [u16] = match lanes.seen_in_place() {
        Some(group) => group.keys,
        None => {
            for_each_position(cache, task, lanes, |source, from, to| {
                copy_key(layout.head_dim, source.keys, from, copied, to);
            });
            copied
        }
    };
    if lanes.seen == 0 {
        values.fill(0);
    } else {
        let (len, stride) = (layout.value_dim(), layout.padded_dim());
        let seen = lanes.seen;
        for_each_simd!(simd, copy_values, (keys: &[u16], len: usize, stride: usize, seen: u16, values: &mut [u16]));
    }
    KvGroup {
        keys,
        values,
        scales: &[],
    }
}

/// Copies the first `len` elements of a group of keys to a group of values, `[8][stride][2]`.
#[inline(always)]
fn copy_values(keys: &[u16], len: usize, stride: usize, seen: u16, values: &mut [u16]) {
    let seen_words: [u32; GROUP] =
        std::array::from_fn(|lane| if seen & (1 << lane) != 0 { u32::MAX } else { 0 });
    let pairs = keys.as_chunks::<{ 2 * GROUP }>().0;
    for first in (0..len / 2).step_by(BLOCK) {
        let end = (len / 2).min(first + BLOCK);
        for (position, values) in values.chunks_exact_mut(2 * stride).enumerate() {
            let seen = [seen_words[2 * position], seen_words[2 * position + 1]];
            let values = values.as_chunks_mut::<4>().0;
            for (pair, values) in pairs[first..end].iter().zip(&mut values[first..end]) {
                let word = |which: usize| {
                    let at = 2 * (2 * position + which);
                    let word = u32::from(pair[at]) | u32::from(pair[at + 1]) << 16;
                    word & seen[which]
                };
                let (even, odd) = (word(0), word(1));
                *values = [
                    even as u16,
                    odd as u16,
                    (even >> 16) as u16,
                    (odd >> 16) as u16,
                ];
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_the_first_elements_of_the_keys_that_are_seen() {
        let (head_dim, len, stride) = (70, 38, 48);
        let element = |position: usize, element: usize| (position * 100 + element + 1) as u16;
        let mut keys = vec![0; head_dim * GROUP];
        for (place, key) in keys.iter_mut().enumerate() {
            let (pair, position) = (place / (2 * GROUP), place % (2 * GROUP) / 2);
            *key = element(position, 2 * pair + place % 2);
        }
        let seen = 0b1010_0000_0111_1111;
        let mut values = vec![7; stride * GROUP];
        copy_values(&keys, len, stride, seen, &mut values);
        for (place, value) in values.into_iter().enumerate() {
            let (pair, rest) = (place / (2 * stride), place % (2 * stride));
            let (position, column) = (2 * pair + rest % 2, rest / 2);
            let expected = match (column < len, seen & (1 << position) != 0) {
                (false, _) => 7,
                (true, true) => element(position, column),
                (true, false) => 0,
            };
            assert_eq!(value, expected, "position {position}, element {column}");
        }
    }
}
