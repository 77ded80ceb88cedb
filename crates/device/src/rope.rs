//! The angles of rotary position embedding.

use inflight_base::LoadError;

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
    fn a_table_of_absurdly_many_positions_is_refused() {
        for num_positions in [usize::MAX, usize::MAX / 8] {
            let table = RopeTable::new(&[1.0, 0.5], 1.0, num_positions);
            assert!(matches!(table, Err(LoadError::Resource(_))));
        }
    }
}
