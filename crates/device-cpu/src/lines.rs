//! Memory that begins at a cache line: what crosses lines takes twice as long to load, and most of it is loaded by rows
//! of whole lines.

use std::ops::{Deref, DerefMut};

use bytemuck::Zeroable;
use bytemuck::allocation::try_zeroed_vec;

/// Bytes of a cache line.
const LINE: usize = 64;

/// Elements that begin at a cache line, initially zero.
pub(super) struct Lines<T> {
    memory: Vec<T>,
    /// Where in the memory a line begins.
    first: usize,
    len: usize,
}

impl<T: Zeroable + Copy> Lines<T> {
    /// Elements that are before a line at most.
    const SPARE: usize = LINE / size_of::<T>();

    /// So many elements; `None` if there is not enough memory. It is taken when it is first written.
    pub fn zeroed(len: usize) -> Option<Self> {
        const { assert!(LINE.is_multiple_of(size_of::<T>())) };
        let memory: Vec<T> = try_zeroed_vec(len.checked_add(Self::SPARE)?).ok()?;
        let first = memory.as_ptr().align_offset(LINE).min(Self::SPARE);
        Some(Self { memory, first, len })
    }

    /// Changes the number of elements. New ones have any values.
    ///
    /// # Panics
    ///
    /// If there is not enough memory.
    pub fn resize(&mut self, len: usize) {
        if len > self.memory.len().saturating_sub(Self::SPARE) {
            let mut larger = Self::zeroed(len.next_power_of_two()).expect("memory");
            larger[..self.len].copy_from_slice(self);
            *self = larger;
        }
        self.len = len;
    }

    /// Appends elements.
    pub fn extend(&mut self, values: &[T]) {
        let before = self.len;
        self.resize(before + values.len());
        self[before..].copy_from_slice(values);
    }
}

impl<T> Default for Lines<T> {
    fn default() -> Self {
        Self {
            memory: Vec::new(),
            first: 0,
            len: 0,
        }
    }
}

impl<T> Deref for Lines<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        &self.memory[self.first..][..self.len]
    }
}

impl<T> DerefMut for Lines<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        &mut self.memory[self.first..][..self.len]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn elements_begin_at_a_line_and_stay_when_there_are_more() {
        let mut lines = Lines::default();
        for len in [1_u16, 30, 31, 32, 33, 1000] {
            let values: Vec<_> = (0..len).collect();
            let before = lines.len();
            lines.extend(&values);
            assert_eq!(lines.as_ptr() as usize % LINE, 0);
            assert_eq!(lines[before..], values);
            assert_eq!(lines[0], 0);
        }
        lines.resize(3);
        assert_eq!(lines[..], [0, 0, 1]);
        assert!(Lines::<u16>::zeroed(usize::MAX).is_none());
    }

    #[test]
    fn zeroed_elements_are_zero() {
        for len in [0, 1, 16, 77] {
            let lines = Lines::<f32>::zeroed(len).expect("memory");
            assert_eq!(lines[..], vec![0.0; len]);
            assert_eq!(lines.as_ptr() as usize % LINE, 0);
        }
    }
}
