//! Large buffers: zeroed, on huge pages where the system has them, without physical memory until they are written.
//!
//! ```text
//! chunk 1: | buffer | buffer |    buffer    | buffer | - |      chunk 2: | buffer | ...
//!          ^         each of its 2 MiB is one huge page
//! ```

use std::sync::Arc;

use memmap2::{MmapOptions, MmapRaw};

use inflight_base::LoadError;

/// Bytes of a huge page. A kernel with larger ones gives smaller ones.
const HUGE_PAGE: usize = 2 << 20;
/// Bytes of address space of which buffers are cut.
const CHUNK: usize = 128 << 20;
/// Buffers of more bytes have a chunk of their own.
const MAX_SHARED: usize = CHUNK / 8;
/// Elements of a cache line: where a buffer may start.
const LINE: usize = 32;

/// `u16` elements (the bits of bf16), initially zero. They take no physical memory until they are written.
#[derive(Debug)]
pub struct Buffer {
    chunk: Arc<Chunk>,
    /// The first of its elements in the chunk, which no other buffer has.
    start: usize,
    len: usize,
}

/// Buffers of about the same lifetime. Small ones share huge pages; the memory of a chunk is returned when all its
/// buffers are gone.
#[derive(Default)]
pub struct Arena {
    chunk: Option<Arc<Chunk>>,
    /// Elements of the chunk that belong to buffers.
    used: usize,
}

/// Address space for `u16` elements.
#[derive(Debug)]
struct Chunk {
    map: MmapRaw,
    /// The element at a boundary of huge pages.
    first: usize,
}

impl Arena {
    /// A buffer of `len` elements, aligned to a cache line.
    ///
    /// # Errors
    ///
    /// If the system refuses the address space.
    pub fn zeroed(&mut self, len: usize) -> Result<Buffer, LoadError> {
        if len > MAX_SHARED / 2 {
            return Buffer::zeroed(len);
        }
        let chunk = match self.chunk.take() {
            Some(chunk) if self.used + len <= CHUNK / 2 => chunk,
            _ => {
                self.used = 0;
                Arc::new(Chunk::new(CHUNK / 2)?)
            }
        };
        let start = self.used;
        self.used = (start + len).next_multiple_of(LINE);
        self.chunk = Some(Arc::clone(&chunk));
        Ok(Buffer { chunk, start, len })
    }
}

impl Chunk {
    fn new(len: usize) -> Result<Self, LoadError> {
        let refused = |reason: &str| {
            LoadError::Resource(format!(
                "cannot reserve {:.1} GB of memory: {reason}",
                2.0 * len as f64 / 1e9
            ))
        };
        let num_bytes = len
            .checked_mul(2)
            .and_then(|bytes| bytes.checked_add(HUGE_PAGE))
            .filter(|&bytes| isize::try_from(bytes).is_ok())
            .ok_or_else(|| refused("too large"))?;
        let map = MmapOptions::new()
            .len(num_bytes)
            .no_reserve_swap()
            .map_anon()
            .map_err(|error| refused(&error.to_string()))?;
        let map = MmapRaw::from(map);
        let skipped = map.as_ptr().align_offset(HUGE_PAGE);
        // For fewer page faults and TLB misses. A kernel without huge pages gives small ones.
        #[cfg(target_os = "linux")]
        let _ = map.advise_range(memmap2::Advice::HugePage, skipped, 2 * len);
        let first = skipped / 2;
        Ok(Self { map, first })
    }

    fn element(&self, index: usize) -> *mut u16 {
        self.map
            .as_mut_ptr()
            .cast::<u16>()
            .wrapping_add(self.first + index)
    }
}

impl Buffer {
    /// A buffer of `len` elements with a chunk of its own.
    ///
    /// # Errors
    ///
    /// If the system refuses the address space.
    pub fn zeroed(len: usize) -> Result<Self, LoadError> {
        let chunk = Arc::new(Chunk::new(len)?);
        Ok(Self {
            chunk,
            start: 0,
            len,
        })
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it has no elements.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The first element.
    pub fn as_ptr(&self) -> *const u16 {
        self.chunk.element(self.start)
    }

    /// The first element, mutably.
    pub fn as_mut_ptr(&mut self) -> *mut u16 {
        self.chunk.element(self.start)
    }

    /// All elements.
    pub fn as_slice(&self) -> &[u16] {
        // SAFETY: the chunk has that many elements from `start` on, is aligned, and lives as long as the slice; all bit
        // patterns are elements. They are written through this buffer only.
        unsafe { std::slice::from_raw_parts(self.as_ptr(), self.len) }
    }

    /// All elements, mutably.
    pub fn as_mut_slice(&mut self) -> &mut [u16] {
        // SAFETY: as above, and this buffer, which is borrowed as a whole, is the only one that has them.
        unsafe { std::slice::from_raw_parts_mut(self.as_mut_ptr(), self.len) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_of_an_arena_are_zeroed_aligned_and_apart() {
        let mut arena = Arena::default();
        // The third one does not fit into what is left of the chunk after many of them, and one is too large to share.
        let lens = [1, 0, 33, MAX_SHARED / 2, MAX_SHARED / 2 + 1, 1_000_000];
        let mut buffers: Vec<_> = (0..60)
            .map(|index| arena.zeroed(lens[index % lens.len()]).expect("memory"))
            .collect();
        for (index, buffer) in buffers.iter_mut().enumerate() {
            assert_eq!(buffer.len(), lens[index % lens.len()]);
            assert!(buffer.as_ptr().addr().is_multiple_of(64));
            if let [first, .., last] = buffer.as_mut_slice() {
                assert_eq!([*first, *last], [0, 0], "buffer {index}");
                (*first, *last) = (index as u16 + 1, index as u16 + 1);
            }
        }
        drop(arena);
        for (index, buffer) in buffers.iter().enumerate() {
            if let [first, .., last] = buffer.as_slice() {
                assert_eq!([*first, *last], [index as u16 + 1; 2], "buffer {index}");
            }
        }
        let num_chunks = |buffers: &[Buffer]| {
            let mut chunks: Vec<_> = buffers.iter().map(|it| Arc::as_ptr(&it.chunk)).collect();
            chunks.sort();
            chunks.dedup();
            chunks.len()
        };
        // Ten have a chunk of their own; the others have 180 MB.
        assert_eq!(num_chunks(&buffers), 12);
        assert_eq!(Arc::strong_count(&buffers[4].chunk), 1);
        // What one buffer needs stays when the others are gone.
        buffers.truncate(3);
        assert_eq!(buffers[2].as_slice()[0], 3);
    }
}
