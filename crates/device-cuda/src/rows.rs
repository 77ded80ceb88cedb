//! Buffers of activations.

use std::marker::PhantomData;
use std::sync::Arc;

use cudarc::driver::CudaStream;

use super::gemm;
use super::memory::DeviceMemory;
use inflight_base::LoadError;

/// Memory for `max_rows` rows of `width` elements, of which a step uses the first ones. Behind the last row there is
/// room for the rows that a matrix product is rounded up by.
pub struct Rows<T> {
    memory: DeviceMemory,
    width: usize,
    element: PhantomData<T>,
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

    /// Their memory.
    pub(super) fn memory(&self) -> &DeviceMemory {
        &self.memory
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
