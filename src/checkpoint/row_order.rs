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

impl RowSelection {
    /// The index in the file of a row.
    pub(super) fn stored_row(&self, row: usize) -> usize {
        self.first + self.order.stored_row(row)
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
    fn heads_that_are_rotated_as_a_whole_or_not_at_all_keep_their_order() {
        for rotary_dim in [0, 8] {
            let order = RowOrder::of_heads(8, rotary_dim, RotaryPairs::Halves);
            assert_eq!(order, RowOrder::Same);
        }
    }
}
