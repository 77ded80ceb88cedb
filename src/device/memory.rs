//! Large buffers: zeroed, on huge pages where the system has them, without physical memory until they are written.

use memmap2::{MmapMut, MmapOptions};

use crate::base::LoadError;

/// `u16` elements (the bits of bf16), initially zero. They take no physical memory until they are written.
#[derive(Debug)]
pub(super) struct Buffer {
    map: MmapMut,
    len: usize,
}

impl Buffer {
    /// A buffer of `len` elements, page-aligned.
    ///
    /// # Errors
    ///
    /// If the system refuses the address space.
    pub fn zeroed(len: usize) -> Result<Self, LoadError> {
        let refused = |reason: &str| {
            LoadError::Resource(format!(
                "cannot reserve {:.1} GB of memory: {reason}",
                2.0 * len as f64 / 1e9
            ))
        };
        let num_bytes = len
            .checked_mul(2)
            .filter(|&bytes| isize::try_from(bytes).is_ok())
            .ok_or_else(|| refused("too large"))?;
        let map = MmapOptions::new()
            .len(num_bytes.max(1))
            .no_reserve_swap()
            .map_anon()
            .map_err(|error| refused(&error.to_string()))?;
        // For fewer page faults and TLB misses. A kernel without huge pages gives small ones.
        #[cfg(target_os = "linux")]
        let _ = map.advise(memmap2::Advice::HugePage);
        Ok(Self { map, len })
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        self.len
    }

    /// The first element.
    pub fn as_ptr(&self) -> *const u16 {
        self.map.as_ptr().cast()
    }

    /// The first element, mutably.
    pub fn as_mut_ptr(&mut self) -> *mut u16 {
        self.map.as_mut_ptr().cast()
    }

    /// All elements.
    pub fn as_slice(&self) -> &[u16] {
        // SAFETY: the map has that many elements, is page-aligned, and lives as long as the slice; all
        // bit patterns are elements.
        unsafe { std::slice::from_raw_parts(self.as_ptr(), self.len) }
    }

    /// All elements, mutably.
    pub fn as_mut_slice(&mut self) -> &mut [u16] {
        // SAFETY: the map has that many elements, is page-aligned, and is borrowed as a whole; all bit
        // patterns are elements.
        unsafe { std::slice::from_raw_parts_mut(self.as_mut_ptr(), self.len) }
    }
}
