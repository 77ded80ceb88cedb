//! Buffers of activations.

use std::marker::PhantomData;
use std::sync::Arc;

use cudarc::driver::{CudaStream, DriverError, PinnedHostSlice};

use super::gemm;
use super::memory::DeviceMemory;
use crate::base::LoadError;

/// Memory for `max_rows` rows of `width` elements, of which a step uses the first ones. Behind the last row there is
/// room for the rows that a matrix product is rounded up by.
pub struct Rows<T> {
    memory: DeviceMemory,
    width: usize,
    element: PhantomData<T>,
}

/// Rows of logits, and where the host reads them.
pub struct Logits {
    pub(super) rows: Rows<f32>,
    /// The step whose rows the host has.
    fetched_step: u64,
    host: PinnedHostSlice<f32>,
}

impl<T> Rows<T> {
    /// Reserves the rows.
    ///
    /// # Errors
    ///
    /// There is not enough memory.
    pub(super) fn new(
        stream: &Arc<CudaStream>,
        max_rows: usize,
        width: usize,
    ) -> Result<Self, LoadError> {
        let len = (max_rows + gemm::MAX_ROUNDING).saturating_mul(width);
        Ok(Self {
            memory: DeviceMemory::new(stream, len.saturating_mul(size_of::<T>()))?,
            width,
            element: PhantomData,
        })
    }

    /// The address of the first row.
    pub(super) fn address(&self) -> u64 {
        self.memory.address()
    }

    /// The address of a row.
    pub(super) fn row_address(&self, row: usize) -> u64 {
        self.address() + (row * self.row_bytes()) as u64
    }

    /// Elements per row.
    pub(super) fn width(&self) -> usize {
        self.width
    }

    /// Bytes per row.
    pub(super) fn row_bytes(&self) -> usize {
        self.width * size_of::<T>()
    }

    /// Bytes of all rows.
    pub(super) fn num_bytes(&self) -> usize {
        self.memory.num_bytes()
    }
}

impl Logits {
    /// Reserves the rows on both sides.
    ///
    /// # Errors
    ///
    /// There is not enough memory.
    pub(super) fn new(
        stream: &Arc<CudaStream>,
        max_rows: usize,
        width: usize,
    ) -> Result<Self, LoadError> {
        // SAFETY: it is written before it is read, and f32 has no invalid values. Without flags the host caches it.
        let host = unsafe {
            stream
                .context()
                .alloc_pinned_with_flags::<f32>((max_rows * width).max(1), 0)
        };
        Ok(Self {
            rows: Rows::new(stream, max_rows, width)?,
            fetched_step: 0,
            host: host.map_err(|error| {
                LoadError::Resource(format!(
                    "no pinned host memory for {max_rows} x {width} logits ({error}): lower max_batch_size"
                ))
            })?,
        })
    }

    /// Waits for the work of the last step, and copies the first `len` logits to the host, unless that has been done.
    /// Steps count from 1.
    ///
    /// # Errors
    ///
    /// Any of the work has failed.
    pub(super) fn fetch(
        &mut self,
        stream: &CudaStream,
        step: u64,
        len: usize,
    ) -> Result<&mut [f32], DriverError> {
        let host = &mut self.host.as_mut_slice()?[..len];
        if self.fetched_step != step {
            match host.is_empty() {
                true => stream.synchronize()?,
                false => self
                    .rows
                    .memory
                    .read(stream, bytemuck::cast_slice_mut(host))?,
            }
            self.fetched_step = step;
        }
        Ok(host)
    }
}
