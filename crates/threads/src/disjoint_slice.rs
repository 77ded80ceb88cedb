//! One slice, written by several threads.

/// A slice that several threads write disjoint parts of at once.
pub struct DisjointSlice<T>(*mut T, usize);

// SAFETY: the only accesses are `slice`, whose callers promise that the parts do not overlap, and `read`, whose callers
// promise that nobody writes.
unsafe impl<T: Send> Sync for DisjointSlice<T> {}

impl<T> DisjointSlice<T> {
    /// Wraps a slice for the duration of a parallel operation.
    pub fn new(slice: &mut [T]) -> Self {
        Self(slice.as_mut_ptr(), slice.len())
    }

    /// The `len` elements starting at `start`.
    ///
    /// # Safety
    ///
    /// The wrapped slice is still mutably borrowed, and no two live parts overlap.
    #[allow(clippy::mut_from_ref, reason = "the caller promises disjoint parts")]
    pub unsafe fn slice(&self, start: usize, len: usize) -> &mut [T] {
        assert!(
            start <= self.1 && len <= self.1 - start,
            "a part of the slice"
        );
        // SAFETY: the bounds were checked, and the caller promises that nobody else has this part.
        unsafe { std::slice::from_raw_parts_mut(self.0.add(start), len) }
    }

    /// These elements to read, which several threads may do at once.
    ///
    /// # Safety
    ///
    /// The wrapped slice is still mutably borrowed, and nobody writes to this part.
    pub unsafe fn read(&self, start: usize, len: usize) -> &[T]
    where
        T: Sync,
    {
        assert!(
            start <= self.1 && len <= self.1 - start,
            "a part of the slice"
        );
        // SAFETY: the bounds were checked, and the caller promises that nobody writes.
        unsafe { std::slice::from_raw_parts(self.0.add(start), len) }
    }
}
