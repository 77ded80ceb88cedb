//! Ranges of a buffer, of which those that were used least recently give way to others.

use std::ops::Range;

/// Ranges of a buffer, each with a key.
///
/// ```text
/// 0                                                                  len
/// |   range of a key   |      | range |  range   |                    |
/// ```
pub(super) struct LruArena<K> {
    len: usize,
    /// In the order of the buffer.
    used: Vec<Used<K>>,
}

struct Used<K> {
    key: K,
    range: Range<usize>,
    /// The step that has used it last.
    last_step: u64,
}

impl<K> LruArena<K> {
    /// A buffer of this length without ranges.
    pub fn new(len: usize) -> Self {
        Self {
            len,
            used: Vec::new(),
        }
    }

    /// Where the range begins whose key `is_it`, which the step uses from now on.
    pub fn find(&mut self, step: u64, is_it: impl Fn(&K) -> bool) -> Option<usize> {
        let used = self.used.iter_mut().find(|used| is_it(&used.key))?;
        used.last_step = step;
        Some(used.range.start)
    }

    /// Takes a range for a key that the step uses; for want of room, ranges of earlier steps give way, oldest first.
    /// Returns where it begins; `None` if even then no piece of the buffer is long enough.
    pub fn insert(&mut self, step: u64, key: K, len: usize) -> Option<usize> {
        loop {
            if let Some((index, start)) = self.gap(len) {
                let range = start..start + len;
                let last_step = step;
                self.used.insert(
                    index,
                    Used {
                        key,
                        range,
                        last_step,
                    },
                );
                return Some(start);
            }
            let earlier = (0..self.used.len()).filter(|&index| self.used[index].last_step != step);
            let oldest = earlier.min_by_key(|&index| self.used[index].last_step)?;
            self.used.remove(oldest);
        }
    }

    /// Drops the ranges whose keys are not to be kept.
    pub fn retain(&mut self, keep: impl Fn(&K) -> bool) {
        self.used.retain(|used| keep(&used.key));
    }

    /// The first piece between ranges that has this length: the index that its range will have, and its start.
    fn gap(&self, len: usize) -> Option<(usize, usize)> {
        let mut start = 0;
        for (index, used) in self.used.iter().enumerate() {
            if used.range.start - start >= len {
                return Some((index, start));
            }
            start = used.range.end;
        }
        (self.len - start >= len).then_some((self.used.len(), start))
    }
}

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::*;

    fn start(arena: &mut LruArena<u32>, step: u64, key: u32) -> Option<usize> {
        arena.find(step, |other| *other == key)
    }

    #[test]
    fn the_ranges_that_were_used_least_recently_give_way() {
        let mut arena = LruArena::new(100);
        for (step, key) in [(1, 1), (2, 2), (3, 3)] {
            assert_eq!(arena.insert(step, key, 30), Some(30 * (key as usize - 1)));
        }
        assert_eq!(start(&mut arena, 4, 1), Some(0), "1 is used again");
        assert_eq!(arena.insert(5, 4, 30), Some(30), "2 is the oldest now");
        assert_eq!(start(&mut arena, 5, 2), None);
        assert_eq!(
            arena.insert(6, 5, 10),
            Some(90),
            "there is room behind the last one"
        );
    }

    #[test]
    fn ranges_of_the_step_stay() {
        let mut arena = LruArena::new(100);
        assert_eq!(arena.insert(1, 1, 40), Some(0));
        assert_eq!(arena.insert(1, 2, 40), Some(40));
        assert_eq!(arena.insert(2, 3, 20), Some(80));
        // 1 gives way to it, and 2 then, for 60 are needed; 3 is of the step.
        assert_eq!(arena.insert(2, 4, 60), Some(0));
        assert_eq!(start(&mut arena, 2, 3), Some(80));
        assert_eq!(arena.insert(2, 5, 30), None, "20 are left");
        assert_eq!(arena.insert(2, 5, 20), Some(60));
    }

    proptest! {
        #[test]
        fn ranges_never_overlap(steps in vec((0..30_u32, 1..400_usize, 0..300_u32), 1..200)) {
            let mut arena = LruArena::new(1000);
            for (step, (key, len, dropped)) in (0..).zip(steps) {
                if start(&mut arena, step, key).is_none() {
                    arena.insert(step, key, len);
                }
                arena.retain(|key| *key != dropped);
                let mut end = 0;
                for used in &arena.used {
                    prop_assert!(end <= used.range.start && used.key != dropped);
                    end = used.range.end;
                }
                prop_assert!(end <= 1000);
            }
        }
    }
}
