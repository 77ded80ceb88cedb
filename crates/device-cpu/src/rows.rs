//! Buffers of activations.

use std::ops::Range;

use bytemuck::Zeroable;

use super::lines::Lines;
use inflight_base::LoadError;

/// A matrix of which the first rows are in use. Memory is taken when it is first written.
pub struct Rows<T> {
    values: Lines<T>,
    width: usize,
}

impl<T: Zeroable + Copy> Rows<T> {
    /// Reserves `[max_rows, width]` elements.
    ///
    /// # Errors
    ///
    /// If there is not enough memory.
    pub fn new(max_rows: usize, width: usize) -> Result<Self, LoadError> {
        let values = max_rows
            .checked_mul(width)
            .and_then(Lines::zeroed)
            .ok_or_else(|| {
                LoadError::Resource(format!(
                    "no memory for a buffer of {max_rows} x {width} x {} bytes; lower max_num_tokens \
                     or max_batch_size",
                    size_of::<T>()
                ))
            })?;
        Ok(Self { values, width })
    }

    /// Elements of a row.
    pub fn width(&self) -> usize {
        self.width
    }

    /// All rows.
    pub fn all(&self) -> &[T] {
        &self.values
    }

    /// All rows, mutably.
    pub fn all_mut(&mut self) -> &mut [T] {
        &mut self.values
    }

    /// The first `num_rows` rows.
    pub fn first(&self, num_rows: usize) -> &[T] {
        &self.values[..num_rows * self.width]
    }

    /// The first `num_rows` rows, mutably.
    pub fn first_mut(&mut self, num_rows: usize) -> &mut [T] {
        &mut self.values[..num_rows * self.width]
    }

    /// Some rows.
    pub fn range(&self, rows: Range<usize>) -> &[T] {
        &self.values[rows.start * self.width..rows.end * self.width]
    }

    /// Moves the rows with these ascending indices to the front.
    pub fn keep(&mut self, rows: &[u32]) {
        for (to, &from) in rows.iter().enumerate() {
            let from = from as usize * self.width;
            self.values
                .copy_within(from..from + self.width, to * self.width);
        }
    }
}

/// The first elements of memory, which grows to have them.
pub(super) fn first_mut<T: Clone + Zeroable>(memory: &mut Vec<T>, len: usize) -> &mut [T] {
    if memory.len() < len {
        memory.resize(len, T::zeroed());
    }
    &mut memory[..len]
}
