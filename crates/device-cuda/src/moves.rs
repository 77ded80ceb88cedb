//! Rows and positions of the cache that move.

use std::sync::Arc;

use cudarc::driver::{CudaStream, LaunchConfig, PushKernelArg};

use super::Cuda;
use super::kernels::{launch, shared_row_grid};
use super::kv_cache::KvCache;
use super::memory::{self, UploadBuffer};
use super::rows::Rows;
use inflight_base::{BlockId, LoadError};

/// Copies of blocks that are uploaded at a time.
const MAX_COPIES: usize = 1024;
/// `u32` words of a copy: source, target, number of positions.
const COPY_WORDS: usize = 3;
/// Threads of a block that copies positions.
const COPY_THREADS: u32 = 256;

impl Cuda {
    /// Copies positions of blocks, one after the other.
    pub(super) fn copy_all_positions(
        &mut self,
        cache: &KvCache,
        copies: impl Iterator<Item = (BlockId, BlockId, usize)>,
    ) {
        let mut copies = copies.peekable();
        while copies.peek().is_some() && self.failure.is_none() {
            self.copy_some(cache, copies.by_ref().take(MAX_COPIES));
        }
    }

    /// Moves the rows with these indices to the front.
    pub(super) fn gather<T>(&mut self, num_rows: usize, indices: u64, rows: &mut Rows<T>) {
        if num_rows == 0 {
            return;
        }
        let row_bytes = rows.row_bytes();
        let (kernel, unit) = match row_bytes.is_multiple_of(16) {
            true => (&self.kernels.gather_rows, 16),
            false => (&self.kernels.gather_rows_4, 4),
        };
        assert!(row_bytes.is_multiple_of(unit), "rows of {row_bytes} bytes");
        let units = row_bytes / unit;
        let scratch = self.scratch.address();
        launch!(
            self,
            kernel,
            "gather_rows",
            shared_row_grid(num_rows, units),
            scratch,
            rows.address(),
            indices,
            units as i32
        );
        self.copy(rows.address(), scratch, num_rows * row_bytes);
    }

    /// Copies bytes of one buffer to another one.
    pub(super) fn copy(&mut self, target: u64, source: u64, num_bytes: usize) {
        if self.is_launching() {
            let copied = memory::copy(&self.stream, target, source, num_bytes);
            self.record("moving rows", copied);
        }
    }

    /// Copies positions of at most [`MAX_COPIES`] blocks, one after the other: a later copy may overwrite what an
    /// earlier one has read.
    fn copy_some(
        &mut self,
        cache: &KvCache,
        copies: impl Iterator<Item = (BlockId, BlockId, usize)>,
    ) {
        let Some(mut buffer) = self.copies.take() else {
            unreachable!("reserve comes before steps");
        };
        let mut num_copies = 0;
        let filled = buffer.staging().map(|words| {
            for ((source, target, num_positions), words) in
                copies.zip(words.chunks_exact_mut(COPY_WORDS))
            {
                cache
                    .layout
                    .check_copy(cache.num_blocks, source, target, num_positions);
                words.copy_from_slice(&[
                    source.index() as u32,
                    target.index() as u32,
                    num_positions as u32,
                ]);
                num_copies += 1;
            }
        });
        let uploaded = filled.and_then(|()| buffer.upload(&self.stream, COPY_WORDS * num_copies));
        self.record("uploading copies", uploaded);
        let (regions, num_regions) = cache.device_regions();
        let num_heads = cache.layout.num_kv_heads;
        for copy in 0..num_copies {
            let config = LaunchConfig {
                grid_dim: ((num_regions * num_heads) as u32, 1, 1),
                block_dim: (COPY_THREADS, 1, 1),
                shared_mem_bytes: 0,
            };
            launch!(
                self,
                self.kernels.copy_positions,
                "copy_positions",
                config,
                cache.address(),
                regions,
                buffer.address(COPY_WORDS * copy),
                num_heads as i32
            );
        }
        self.copies = Some(buffer);
    }
}

/// What copies are uploaded through.
///
/// # Errors
///
/// There is not enough memory.
pub(super) fn copy_buffer(stream: &Arc<CudaStream>) -> Result<UploadBuffer, LoadError> {
    UploadBuffer::new(stream, COPY_WORDS * MAX_COPIES)
}
