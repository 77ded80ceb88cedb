//! The angles of rotary position embedding.
//!
//! ```text
//! a token's positions      [sequence, row, column]     equal for text
//! pairs of a head          s s s s r r r r c c c c     each rotated by the position on its axis
//! ```

use std::borrow::Cow;

use inflight_base::LoadError;

/// The three positions of a token: in the sequence, and the row and column of its place in an image (M-RoPE; Wang et
/// al., Qwen2-VL, arXiv:2409.12191). Equal for a token of text.
pub type AxisPositions = [u32; 3];

/// The cosines and sines of every position (RoFormer; Su et al., arXiv:2104.09864), for the rotation that
/// pairs element `i` of a head with element `i + head_dim / 2`, as Hugging Face stores Llama, Mistral and
/// Qwen checkpoints.
pub struct RopeTable {
    half_dim: usize,
    rotates: bool,
    /// `[position][cosines, sines]`.
    rows: Vec<f32>,
    /// The factors of rotated queries by their positions; empty for none.
    query_factors: Vec<f32>,
    /// The axis of each pair, as an index of [`AxisPositions`]; empty for tokens with one position.
    axes: Vec<u8>,
}

impl RopeTable {
    /// Computes the angles `position * frequency` of positions below `num_positions` in f32, as
    /// transformers does. Cosines and sines are multiplied by `scale`, which is 1 except with YaRN and LongRoPE.
    /// `frequencies` is `[head_dim / 2]`; a pair with a frequency of 0 is neither rotated nor scaled.
    ///
    /// # Errors
    ///
    /// If there is not enough memory for so many positions.
    pub fn new(frequencies: &[f32], scale: f32, num_positions: usize) -> Result<Self, LoadError> {
        let half_dim = frequencies.len();
        let mut rows = Vec::new();
        num_positions
            .checked_mul(2 * half_dim)
            .and_then(|len| rows.try_reserve_exact(len).ok())
            .ok_or_else(|| no_memory(num_positions))?;
        for position in 0..num_positions {
            let angles = frequencies.iter().map(|&frequency| {
                let scale = if frequency == 0.0 { 1.0 } else { scale };
                (position as f32 * frequency, scale)
            });
            rows.extend(angles.clone().map(|(angle, scale)| angle.cos() * scale));
            rows.extend(angles.map(|(angle, scale)| angle.sin() * scale));
        }
        Ok(Self {
            half_dim,
            rotates: frequencies.iter().any(|&frequency| frequency != 0.0),
            rows,
            query_factors: Vec::new(),
            axes: Vec::new(),
        })
    }

    /// Adds factors of rotated queries by their positions.
    ///
    /// # Errors
    ///
    /// If there is not enough memory for so many positions.
    pub fn with_query_factors(mut self, factor: impl Fn(usize) -> f32) -> Result<Self, LoadError> {
        let num_positions = self.num_positions();
        let memory = self.query_factors.try_reserve_exact(num_positions);
        memory.map_err(|_| no_memory(num_positions))?;
        self.query_factors.extend((0..num_positions).map(factor));
        Ok(self)
    }

    /// Sets the axis of each pair, `[half_dim]`, as an index of [`AxisPositions`].
    ///
    /// # Panics
    ///
    /// If an axis is above 2, or their number is another one.
    pub fn with_axes(mut self, axes: Vec<u8>) -> Self {
        assert_eq!(axes.len(), self.half_dim, "an axis for each pair");
        assert!(axes.iter().all(|&axis| axis < 3), "there are three axes");
        self.axes = axes;
        self
    }

    /// The cosines of a token, then its sines: `[2 * half_dim]`. `positions` has one entry for each token of the step,
    /// or is empty where each token is at its position in the sequence.
    pub fn row_of(
        &self,
        token: usize,
        position: usize,
        positions: &[AxisPositions],
    ) -> Cow<'_, [f32]> {
        let Some(of_token) = positions.get(token).filter(|_| !self.axes.is_empty()) else {
            return Cow::Borrowed(self.row(position));
        };
        let [first, others @ ..] = of_token;
        if others.iter().all(|other| other == first) {
            return Cow::Borrowed(self.row(*first as usize));
        }
        let rows = of_token.map(|position| self.row(position as usize));
        let [cosines, sines] = [0, self.half_dim].map(|start| {
            let pairs = self.axes.iter().enumerate();
            pairs.map(move |(pair, &axis)| rows[axis as usize][start + pair])
        });
        Cow::Owned(cosines.chain(sines).collect())
    }

    /// The factor of a rotated query at a position; `None` for 1 at all positions.
    pub fn query_factor(&self, position: usize) -> Option<f32> {
        match self.query_factors.is_empty() {
            true => None,
            false => Some(self.query_factors[position]),
        }
    }

    /// The factors of rotated queries, `[num_positions]`; empty for 1 at all positions.
    pub fn query_factors(&self) -> &[f32] {
        &self.query_factors
    }

    /// Pairs of elements that it rotates: half a head.
    pub fn half_dim(&self) -> usize {
        self.half_dim
    }

    /// Whether it rotates any pair. If not, heads stay as they are.
    pub fn rotates(&self) -> bool {
        self.rotates
    }

    /// Positions that it covers.
    pub fn num_positions(&self) -> usize {
        self.rows.len().checked_div(2 * self.half_dim).unwrap_or(0)
    }

    /// The rows of all positions, `[num_positions][2 * half_dim]`.
    pub fn values(&self) -> &[f32] {
        &self.rows
    }

    /// The cosines of a position, then its sines: `[2 * half_dim]`.
    pub fn row(&self, position: usize) -> &[f32] {
        &self.rows[position * 2 * self.half_dim..][..2 * self.half_dim]
    }
}

fn no_memory(num_positions: usize) -> LoadError {
    LoadError::Resource(format!(
        "no memory for the rotary angles of {num_positions} positions: lower max_seq_len"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pair_that_is_not_rotated_is_not_scaled() {
        let table = RopeTable::new(&[0.5, 0.0], 2.0, 3).expect("a table");
        let angle = 1.0f32;
        assert!(table.rotates());
        assert_eq!(
            table.row(2),
            [2.0 * angle.cos(), 1.0, 2.0 * angle.sin(), 0.0]
        );
        let table = RopeTable::new(&[0.0; 2], 2.0, 3).expect("a table");
        assert!(!table.rotates());
        assert_eq!(table.row(2), [1.0, 1.0, 0.0, 0.0]);
    }

    #[test]
    fn each_pair_is_rotated_by_the_position_on_its_axis() {
        let table = RopeTable::new(&[1.0, 0.5, 0.25], 1.0, 9).expect("memory");
        let table = table.with_axes(vec![0, 2, 1]);
        let positions = [[4, 4, 4], [5, 7, 8]];
        assert_eq!(&*table.row_of(1, 3, &[]), table.row(3));
        assert_eq!(&*table.row_of(0, 3, &positions), table.row(4));
        let row = table.row_of(1, 3, &positions);
        let expected: Vec<f32> = [5.0_f32, 4.0, 1.75].into_iter().map(f32::cos).collect();
        assert_eq!(row[..3], expected);
        assert_eq!(row[3..], [5.0_f32, 4.0, 1.75].map(f32::sin));
    }

    #[test]
    fn a_table_of_absurdly_many_positions_is_refused() {
        for num_positions in [usize::MAX, usize::MAX / 8] {
            let table = RopeTable::new(&[1.0, 0.5], 1.0, num_positions);
            assert!(matches!(table, Err(LoadError::Resource(_))));
        }
    }
}
