//! Learned positions of patches, interpolated in a square of positions.

use bytemuck::allocation::try_zeroed_vec;

use inflight_base::LoadError;
use inflight_checkpoint::Matrix;
use inflight_device::AxisPositions;
use inflight_images::TileGrid;

/// The rows of a square of positions, `[side^2, width]`.
pub(super) struct PositionSquare {
    pub side: usize,
    pub rows: Vec<f32>,
}

impl PositionSquare {
    /// Reads the rows of a square.
    ///
    /// # Errors
    /// A value is not finite, or memory is short.
    pub(super) fn load(side: usize, source: &Matrix<'_>) -> Result<Self, LoadError> {
        source.preload()?;
        let len = source.rows() * source.columns();
        let mut rows = try_zeroed_vec::<f32>(len).map_err(|()| {
            LoadError::Resource(format!("no memory for {len} values of positions"))
        })?;
        for (index, row) in rows.chunks_exact_mut(source.columns()).enumerate() {
            source.read_row(index, row);
            if !row.iter().all(|value| value.is_finite()) {
                return Err(source.not_finite(index));
            }
        }
        Ok(Self { side, rows })
    }

    /// The positions of the patches of a tile, `[num_patches, width]`: between the four nearest rows, linear in each
    /// direction. `patches` has the row and the column of each.
    pub(super) fn of_patches(&self, tile: TileGrid, patches: &[AxisPositions]) -> Vec<f32> {
        let width = self.rows.len() / self.side.pow(2);
        let rows = self.places(tile.rows);
        let columns = self.places(tile.columns);
        let mut all = vec![0.0; patches.len() * width];
        for (&[_, row, column], out) in patches.iter().zip(all.chunks_exact_mut(width)) {
            let (rows, columns) = (rows[row as usize], columns[column as usize]);
            for (row, of_row) in rows {
                for (column, of_column) in columns {
                    let weight = of_row * of_column;
                    let values = &self.rows[(row * self.side + column) * width..][..width];
                    for (out, value) in out.iter_mut().zip(values) {
                        *out += weight * value;
                    }
                }
            }
        }
        all
    }

    /// Of each of `len` places from the first to the last of the square's side, the two nearest rows or columns, each
    /// with its weight.
    fn places(&self, len: usize) -> Vec<[(usize, f32); 2]> {
        let last = self.side - 1;
        let step = match len {
            0 | 1 => 0.0,
            _ => last as f32 / (len - 1) as f32,
        };
        let place = |index: usize| {
            let place = index as f32 * step;
            let floor = (place as usize).min(last);
            let share = place - floor as f32;
            [(floor, 1.0 - share), ((floor + 1).min(last), share)]
        };
        (0..len).map(place).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn corners_are_at_corners_and_the_rest_is_between() {
        let square = PositionSquare {
            side: 2,
            rows: vec![0.0, 1.0, 2.0, 3.0],
        };
        let tile = TileGrid {
            rows: 3,
            columns: 2,
        };
        let patches = [[0, 0, 0], [0, 0, 1], [0, 1, 0], [0, 1, 1], [0, 2, 1]];
        let expected = [0.0, 1.0, 1.0, 2.0, 3.0];
        assert_eq!(square.of_patches(tile, &patches), expected);
        let one = TileGrid {
            rows: 1,
            columns: 1,
        };
        assert_eq!(square.of_patches(one, &[[0, 0, 0]]), [0.0]);
    }
}
