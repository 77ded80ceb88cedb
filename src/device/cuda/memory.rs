//! Device memory, and pinned memory of the host.

use std::sync::Arc;

use cudarc::driver::{
    CudaEvent, CudaSlice, CudaStream, DevicePtr, DriverError, PinnedHostSlice, result,
};

use super::gpu::load_error;
use crate::base::LoadError;

/// Device memory. It may hold anything until it is written.
pub(super) struct DeviceMemory {
    bytes: Option<CudaSlice<u8>>,
    address: u64,
    num_bytes: usize,
}

/// Pinned memory of the host, and its copy on the device.
pub(super) struct UploadBuffer {
    staging: PinnedHostSlice<u32>,
    /// The last upload has read the staging memory.
    uploaded: CudaEvent,
    device: DeviceMemory,
}

impl DeviceMemory {
    /// Reserves memory.
    ///
    /// # Errors
    ///
    /// There is not enough.
    pub fn new(stream: &Arc<CudaStream>, num_bytes: usize) -> Result<Self, LoadError> {
        if num_bytes == 0 {
            return Ok(Self {
                bytes: None,
                address: 0,
                num_bytes: 0,
            });
        }
        // SAFETY: kernels and copies write it before others read it; u8 has no invalid values.
        let bytes = unsafe { stream.alloc::<u8>(num_bytes) }.map_err(|error| {
            LoadError::Resource(format!(
                "no {num_bytes} bytes of GPU memory ({error}): lower max_num_tokens, max_batch_size or \
                 kv_cache_free_gpu_mem_fraction, or use a GPU with more memory"
            ))
        })?;
        let (address, guard) = bytes.device_ptr(stream);
        drop(guard);
        Ok(Self {
            bytes: Some(bytes),
            address,
            num_bytes,
        })
    }

    /// Memory with these contents.
    ///
    /// # Errors
    ///
    /// As [`DeviceMemory::new`].
    pub fn upload<T: bytemuck::NoUninit>(
        stream: &Arc<CudaStream>,
        values: &[T],
    ) -> Result<Self, LoadError> {
        let mut memory = Self::new(stream, size_of_val(values))?;
        memory.write(stream, 0, bytemuck::cast_slice(values))?;
        Ok(memory)
    }

    /// Writes some bytes, and waits until they have been read.
    ///
    /// # Errors
    ///
    /// The driver refuses.
    pub fn write(
        &mut self,
        stream: &Arc<CudaStream>,
        offset: usize,
        bytes: &[u8],
    ) -> Result<(), LoadError> {
        let Some(memory) = &mut self.bytes else {
            return Ok(());
        };
        let mut target = memory.slice_mut(offset..offset + bytes.len());
        stream
            .memcpy_htod(bytes, &mut target)
            .and_then(|()| stream.synchronize())
            .map_err(|error| load_error("copying weights to the GPU", &error))
    }

    /// The address of its first byte.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Its size.
    pub fn num_bytes(&self) -> usize {
        self.num_bytes
    }

    /// Copies the first bytes to the host, after the stream's other work.
    ///
    /// # Errors
    ///
    /// The driver refuses.
    ///
    /// # Panics
    ///
    /// `out` is larger than this memory.
    pub fn read(&self, stream: &CudaStream, out: &mut [u8]) -> Result<(), DriverError> {
        assert!(
            out.len() <= self.num_bytes,
            "{} of {} bytes",
            out.len(),
            self.num_bytes
        );
        if out.is_empty() {
            return Ok(());
        }
        stream.context().bind_to_thread()?;
        // SAFETY: the source holds as many bytes, and both are there until the stream has been waited for, which is next.
        unsafe { result::memcpy_dtoh_async(out, self.address, stream.cu_stream()) }?;
        stream.synchronize()
    }
}

/// Copies bytes of one buffer on the GPU to another one, after the stream's other work.
///
/// # Errors
///
/// The driver refuses.
pub(super) fn copy(
    stream: &CudaStream,
    target: u64,
    source: u64,
    num_bytes: usize,
) -> Result<(), DriverError> {
    stream.context().bind_to_thread()?;
    // SAFETY: both are addresses inside buffers of the device, with as many bytes behind them, and live longer than the
    // stream's work.
    unsafe { result::memcpy_dtod_async(target, source, num_bytes, stream.cu_stream()) }
}

impl UploadBuffer {
    /// Reserves `num_words` words on both sides.
    ///
    /// # Errors
    ///
    /// There is not enough memory.
    pub fn new(stream: &Arc<CudaStream>, num_words: usize) -> Result<Self, LoadError> {
        let num_words = num_words.max(1);
        let reserve = || {
            // SAFETY: it is written before it is read, and u32 has no invalid values.
            let staging = unsafe { stream.context().alloc_pinned::<u32>(num_words) }?;
            Ok((staging, stream.context().new_event(None)?))
        };
        let (staging, uploaded) = reserve().map_err(|error: DriverError| {
            LoadError::Resource(format!(
                "no {} bytes of pinned host memory ({error}): lower max_num_tokens or max_batch_size",
                4 * num_words
            ))
        })?;
        Ok(Self {
            staging,
            uploaded,
            device: DeviceMemory::new(stream, 4 * num_words)?,
        })
    }

    /// The words to be uploaded next, once the last upload has read them.
    ///
    /// # Errors
    ///
    /// The driver refuses.
    pub fn staging(&mut self) -> Result<&mut [u32], DriverError> {
        self.uploaded.synchronize()?;
        self.staging.as_mut_slice()
    }

    /// Uploads the first words.
    ///
    /// # Errors
    ///
    /// The driver refuses.
    pub fn upload(&mut self, stream: &CudaStream, num_words: usize) -> Result<(), DriverError> {
        let words = &self.staging.as_slice()?[..num_words];
        stream.context().bind_to_thread()?;
        // SAFETY: the target has room for as many words, and `staging` waits before they are overwritten.
        unsafe { result::memcpy_htod_async(self.device.address(), words, stream.cu_stream()) }?;
        self.uploaded.record(stream)
    }

    /// The address of a word on the device.
    pub fn address(&self, word: usize) -> u64 {
        self.device.address() + 4 * word as u64
    }
}
