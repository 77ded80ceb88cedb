//! Which rows of a stored matrix a linear layer has, and in which order.
//!
//! In this project, RoPE rotates rows `i` and `i + head_dim / 2` of a head, as transformers stores Llama. Other
//! families store the rows of a pair next to each other, or rotate only the first rows of a head. Queries and keys
//! whose rows are reordered alike have the same products, so such heads are reordered when they are read:
//!
//! ```text
//! stored, halves    a0 a1 a2 b0 b1 b2 p0 p1        a and b: the rows of a pair; p: not rotated
//! stored, adjacent  a0 b0 a1 b1 a2 b2 p0 p1
//! read              a0 a1 a2 p0 b0 b1 b2 p1
//! ```
//!
//! Heads of values that share a key may be stored in another order too.

use std::ops::Range;

/// The order of the rows of a matrix in its file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RowOrder {
    /// As they are read.
    Same,
    /// Heads whose rows are ordered by what RoPE does to them.
    Heads {
        /// Rows of a head, even.
        head_dim: usize,
        /// Rows of a head that are rotated: the first ones, an even number.
        rotary_dim: usize,
        /// How they are paired.
        pairs: RotaryPairs,
    },
    /// Heads whose last rows are rotated in adjacent pairs, and read as halves. The others keep their places.
    AdjacentTails {
        /// Rows of a head.
        head_dim: usize,
        /// Rows of a head that are rotated: the last ones, an even number.
        rotary_dim: usize,
    },
    /// Heads in groups of equal length, which are read group by group and stored by their place in the group: the first
    /// head of each group, then the second one of each. Rows in front of the heads keep their places.
    Tiled {
        /// Rows in front of the first one that is read.
        num_skipped: usize,
        /// Rows in front of the heads.
        first: usize,
        /// Number of groups.
        num_groups: usize,
        /// Heads of a group.
        group_len: usize,
        /// Rows of a head.
        head_dim: usize,
    },
}

/// Where the two rows of a RoPE pair are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RotaryPairs {
    /// The first rows of all pairs, then the second ones.
    Halves,
    /// Next to each other.
    Adjacent,
}

/// Some rows of a matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RowSelection {
    /// The first one in the file.
    pub first: usize,
    /// Number of rows.
    pub len: usize,
    /// Their order in the file.
    pub order: RowOrder,
    /// Where they are, if rows of other layers are between them.
    pub runs: Option<RowRuns>,
}

/// Rows in runs of equal length, with rows of other layers between: of a module that holds queries, keys and values,
/// head by head.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RowRuns {
    /// Rows of a run: whole heads, unless the order is the same.
    len: usize,
    /// Rows from the beginning of a run to the beginning of the next one.
    stride: usize,
    /// Rows before the first one.
    num_skipped: usize,
}

/// A part of a range, by its place there.
///
/// # Panics
///
/// If the range does not have it.
pub(super) fn part_of(whole: &Range<usize>, part: Range<usize>) -> Range<usize> {
    assert!(
        part.start <= part.end && part.end <= whole.len(),
        "{part:?} of {whole:?}"
    );
    whole.start + part.start..whole.start + part.end
}

impl RowOrder {
    /// The order of heads with `head_dim` rows, the first `rotary_dim` of which are rotated in these pairs.
    pub fn of_heads(head_dim: usize, rotary_dim: usize, pairs: RotaryPairs) -> Self {
        let is_same = match pairs {
            RotaryPairs::Halves => rotary_dim == head_dim || rotary_dim == 0,
            RotaryPairs::Adjacent => rotary_dim == 0,
        };
        match is_same {
            true => Self::Same,
            false => Self::Heads {
                head_dim,
                rotary_dim,
                pairs,
            },
        }
    }

    /// The index in the file of a row.
    pub(super) fn stored_row(self, row: usize) -> usize {
        match self {
            Self::Same => row,
            Self::Tiled {
                num_skipped,
                first,
                num_groups,
                group_len,
                head_dim,
            } => match (num_skipped + row).checked_sub(first) {
                None => num_skipped + row,
                Some(row) => {
                    let (head, element) = (row / head_dim, row % head_dim);
                    let (group, place) = (head / group_len, head % group_len);
                    first + (place * num_groups + group) * head_dim + element
                }
            },
            Self::AdjacentTails {
                head_dim,
                rotary_dim,
            } => {
                let first = head_dim - rotary_dim;
                match (row % head_dim).checked_sub(first) {
                    None => row,
                    Some(rotated) => {
                        let half_dim = rotary_dim / 2;
                        let (half, pair) = (rotated / half_dim, rotated % half_dim);
                        row - rotated + 2 * pair + half
                    }
                }
            }
            Self::Heads {
                head_dim,
                rotary_dim,
                pairs,
            } => {
                let (head, row) = (row / head_dim, row % head_dim);
                let (half, pair) = (row / (head_dim / 2), row % (head_dim / 2));
                let num_rotated = rotary_dim / 2;
                let stored = match (pair.checked_sub(num_rotated), pairs) {
                    (Some(passed), _) => rotary_dim + half * (head_dim / 2 - num_rotated) + passed,
                    (None, RotaryPairs::Halves) => half * num_rotated + pair,
                    (None, RotaryPairs::Adjacent) => 2 * pair + half,
                };
                head * head_dim + stored
            }
        }
    }
}

impl RowRuns {
    /// Runs of `len` rows; the next one begins `stride` rows after the one before.
    pub fn new(len: usize, stride: usize) -> Self {
        Self {
            len,
            stride,
            num_skipped: 0,
        }
    }
}

impl RowSelection {
    /// Some of its rows, in the order that they are read in.
    ///
    /// # Panics
    ///
    /// If it does not have them, or they do not begin with a head.
    pub fn part(self, rows: Range<usize>) -> Self {
        assert!(
            rows.start <= rows.end && rows.end <= self.len,
            "rows {rows:?}"
        );
        if let RowOrder::Heads { head_dim, .. } | RowOrder::AdjacentTails { head_dim, .. } =
            self.order
        {
            assert!(rows.start.is_multiple_of(head_dim), "rows of whole heads");
        }
        let len = rows.len();
        let mut order = self.order;
        if let RowOrder::Tiled { num_skipped, .. } = &mut order {
            *num_skipped += rows.start;
            return Self { len, order, ..self };
        }
        match self.runs {
            None => Self {
                first: self.first + rows.start,
                len,
                ..self
            },
            Some(runs) => Self {
                runs: Some(RowRuns {
                    num_skipped: runs.num_skipped + rows.start,
                    ..runs
                }),
                len,
                ..self
            },
        }
    }

    /// The index in the file of a row.
    pub fn stored_row(&self, row: usize) -> usize {
        let row = self.order.stored_row(row);
        let place = match self.runs {
            None => row,
            Some(RowRuns {
                len,
                stride,
                num_skipped,
            }) => {
                let row = num_skipped + row;
                row / len * stride + row % len
            }
        };
        self.first + place
    }

    /// Whether they follow one another in the file.
    pub fn is_contiguous(&self) -> bool {
        self.order == RowOrder::Same && self.runs.is_none()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stored(order: RowOrder, len: usize) -> Vec<usize> {
        (0..len).map(|row| order.stored_row(row)).collect()
    }

    #[test]
    fn rows_of_adjacent_pairs_are_found() {
        let order = RowOrder::of_heads(6, 6, RotaryPairs::Adjacent);
        let expected = [0, 2, 4, 1, 3, 5, 6, 8, 10, 7, 9, 11];
        assert_eq!(stored(order, 12), expected);
    }

    #[test]
    fn rows_that_are_not_rotated_fill_both_halves() {
        let halves = RowOrder::of_heads(8, 6, RotaryPairs::Halves);
        assert_eq!(stored(halves, 8), [0, 1, 2, 6, 3, 4, 5, 7]);
        let adjacent = RowOrder::of_heads(8, 4, RotaryPairs::Adjacent);
        assert_eq!(stored(adjacent, 8), [0, 2, 4, 5, 1, 3, 6, 7]);
    }

    #[test]
    fn tails_of_adjacent_pairs_are_found() {
        let tails = RowOrder::AdjacentTails {
            head_dim: 7,
            rotary_dim: 4,
        };
        let expected = [0, 1, 2, 3, 5, 4, 6, 7, 8, 9, 10, 12, 11, 13];
        assert_eq!(stored(tails, 14), expected);
    }

    #[test]
    fn heads_that_are_stored_by_their_place_in_a_group_are_found() {
        let order = RowOrder::Tiled {
            num_skipped: 0,
            first: 1,
            num_groups: 2,
            group_len: 3,
            head_dim: 2,
        };
        // Heads 0, 1, 2 of the first group and 3, 4, 5 of the second one are stored as 0, 3, 1, 4, 2, 5.
        let expected = [0, 1, 2, 5, 6, 9, 10, 3, 4, 7, 8, 11, 12];
        assert_eq!(stored(order, 13), expected);
        let all = RowSelection {
            first: 20,
            len: 13,
            order,
            runs: None,
        };
        let part = all.part(3..9).part(1..6);
        let rows: Vec<_> = (0..part.len).map(|row| part.stored_row(row)).collect();
        assert_eq!(rows, [26, 29, 30, 23, 24]);
    }

    #[test]
    fn rows_in_runs_are_reordered_head_by_head() {
        // Of 2 heads, each with 4 rows of queries, of keys, and of values.
        let keys = RowSelection {
            first: 4,
            len: 8,
            order: RowOrder::of_heads(4, 2, RotaryPairs::Halves),
            runs: Some(RowRuns::new(4, 12)),
        };
        assert!(!keys.is_contiguous());
        let rows: Vec<_> = (0..8).map(|row| keys.stored_row(row)).collect();
        assert_eq!(rows, [4, 6, 5, 7, 16, 18, 17, 19]);
    }

    #[test]
    fn a_part_has_rows_in_the_order_of_the_whole() {
        let order = RowOrder::of_heads(8, 4, RotaryPairs::Adjacent);
        let whole = RowSelection {
            first: 5,
            len: 32,
            order,
            runs: None,
        };
        // Also one that begins in the middle of a run of two heads.
        let runs = Some(RowRuns::new(16, 40));
        for whole in [whole, RowSelection { runs, ..whole }] {
            let part = whole.part(8..32).part(8..16);
            let rows = (0..part.len).map(|row| part.stored_row(row));
            assert!(rows.eq((16..24).map(|row| whole.stored_row(row))));
        }
    }

    #[test]
    fn heads_that_are_rotated_as_a_whole_or_not_at_all_keep_their_order() {
        for rotary_dim in [0, 8] {
            let order = RowOrder::of_heads(8, rotary_dim, RotaryPairs::Halves);
            assert_eq!(order, RowOrder::Same);
        }
    }
}
