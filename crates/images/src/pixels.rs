//! Decoded images.

use crate::error::ImageError;
use crate::limits::ImageLimits;

/// Values of a pixel.
pub const NUM_CHANNELS: usize = 3;

/// An upright image in RGB, 8 bits a channel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pixels {
    height: usize,
    width: usize,
    /// `[height][width][3]`.
    values: Vec<u8>,
}

impl Pixels {
    /// Takes values of the shape `[height, width, 3]`, such as a tensor has.
    ///
    /// # Errors
    /// The shape is another one, does not fit the values, or is above the limits.
    pub fn from_tensor(
        shape: &[usize],
        values: &[u8],
        limits: &ImageLimits,
    ) -> Result<Self, ImageError> {
        let &[height, width, NUM_CHANNELS] = shape else {
            return Err(ImageError::Shape {
                shape: shape.to_vec(),
            });
        };
        limits.check_size(height, width)?;
        let num_expected = height * width * NUM_CHANNELS;
        if values.len() != num_expected {
            return Err(ImageError::NumValues {
                num_values: values.len(),
                num_expected,
            });
        }
        Ok(Self::new(height, width, values.to_vec()))
    }

    /// An image of these values.
    pub(crate) fn new(height: usize, width: usize, values: Vec<u8>) -> Self {
        debug_assert_eq!(values.len(), height * width * NUM_CHANNELS);
        Self {
            height,
            width,
            values,
        }
    }

    /// The rows.
    pub fn height(&self) -> usize {
        self.height
    }

    /// The columns.
    pub fn width(&self) -> usize {
        self.width
    }

    /// The rows and the columns.
    pub fn size(&self) -> (usize, usize) {
        (self.height, self.width)
    }

    /// `[height][width][3]`.
    pub fn values(&self) -> &[u8] {
        &self.values
    }

    /// A row: `[width][3]`.
    pub(crate) fn row(&self, y: usize) -> &[u8] {
        let len = self.width * NUM_CHANNELS;
        &self.values[y * len..][..len]
    }

    /// The rectangle of `height` x `width` whose first pixel is at (`top`, `left`). Pixels outside of the image have
    /// the colour `fill`.
    pub(crate) fn framed(
        &self,
        (top, left): (isize, isize),
        (height, width): (usize, usize),
        fill: [u8; NUM_CHANNELS],
    ) -> Self {
        let mut values = Vec::with_capacity(height * width * NUM_CHANNELS);
        for y in 0..height {
            let source = top.checked_add_unsigned(y).filter(|&y| y >= 0);
            let row = source
                .map(isize::unsigned_abs)
                .filter(|&y| y < self.height)
                .map(|y| self.row(y));
            let Some(row) = row else {
                values.extend(fill.repeat(width));
                continue;
            };
            let num_left = left.min(0).unsigned_abs().min(width);
            let start = left.max(0).unsigned_abs().min(self.width);
            let end = (start + width - num_left).min(self.width);
            values.extend(fill.repeat(num_left));
            values.extend_from_slice(&row[start * NUM_CHANNELS..end * NUM_CHANNELS]);
            values.extend(fill.repeat(width - num_left - (end - start)));
        }
        Self::new(height, width, values)
    }

    /// The image in the middle of a square of its longest side.
    pub(crate) fn squared(&self, fill: [u8; NUM_CHANNELS]) -> Self {
        let side = self.height.max(self.width);
        let before = |length: usize| -((side - length) / 2).cast_signed();
        let place = (before(self.height), before(self.width));
        self.framed(place, (side, side), fill)
    }

    /// The tiles of an image whose size is a multiple of theirs, row after row.
    pub(crate) fn tiles(&self, (height, width): (usize, usize)) -> Vec<Self> {
        let (rows, columns) = (self.height / height, self.width / width);
        let places = (0..rows * columns).map(|tile| (tile / columns, tile % columns));
        places
            .map(|(row, column)| {
                let top = (row * height).cast_signed();
                let left = (column * width).cast_signed();
                self.framed((top, left), (height, width), [0; NUM_CHANNELS])
            })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_frame_may_lie_beyond_each_side() {
        let image = Pixels::new(1, 2, vec![1, 2, 3, 4, 5, 6]);
        let frame = image.framed((-1, -1), (3, 4), [9; 3]);
        let expected = [
            vec![9; 12],
            vec![9, 9, 9, 1, 2, 3, 4, 5, 6, 9, 9, 9],
            vec![9; 12],
        ];
        assert_eq!(frame.values(), expected.concat());
        assert_eq!(image.framed((0, 1), (1, 1), [0; 3]).values(), [4, 5, 6]);
        assert_eq!(image.framed((5, 5), (1, 1), [7; 3]).values(), [7; 3]);
    }

    #[test]
    fn a_tensor_has_the_shape_of_its_values() {
        let limits = ImageLimits::default();
        let read = |shape: &[usize], num_values| {
            let read = Pixels::from_tensor(shape, &vec![0; num_values], &limits);
            read.map(|_| ()).map_err(|error| error.to_string())
        };
        assert_eq!(read(&[2, 1, 3], 6), Ok(()));
        let wrong = [
            (&[2, 1, 4][..], 8, "[2, 1, 4]"),
            (&[2, 3], 6, "[2, 3]"),
            (&[2, 1, 3], 7, "7 values"),
            (&[0, 1, 3], 0, "0 x 1"),
            (&[1 << 40, 1 << 40, 3], 0, "1099511627776"),
        ];
        for (shape, num_values, named) in wrong {
            let error = read(shape, num_values).expect_err("a wrong shape");
            assert!(error.contains(named), "{error}");
        }
    }
}
