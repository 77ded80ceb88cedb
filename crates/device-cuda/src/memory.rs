//! Device memory, and pinned memory of the host.

use std::ops::Range;
use std::ptr::NonNull;
use std::slice;
use std::sync::Arc;

use cudarc::driver::{
    CudaEvent, CudaSlice, CudaStream, DevicePtr, DeviceRepr, DriverError, PinnedHostSlice,
    ValidAsZeroBits, result, sys,
};

use super::gpu::load_error;
use inflight_base::LoadError;
use inflight_device::{PACKED_PIECE_BYTES, PackedReader};
use inflight_threads::DisjointSlice;
use inflight_threads::Pool;

/// Pieces of a file that are read at a time.
const STAGING_PIECES: usize = 32;

/// Some bytes of device memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct DeviceSpan {
    pub address: u64,
    pub num_bytes: usize,
}

/// Device memory. It may hold anything until it is written.
pub(super) struct DeviceMemory {
    bytes: Option<CudaSlice<u8>>,
    address: u64,
    num_bytes: usize,
}

/// Pinned memory of the host, zero at first. The bindings' own type asks the driver about an event at every access.
pub(super) struct PinnedMemory<T> {
    first: NonNull<T>,
    len: usize,
    /// Frees it.
    _memory: PinnedHostSlice<T>,
}

// SAFETY: it owns the memory, as a `Vec` does.
unsafe impl<T: Send> Send for PinnedMemory<T> {}

/// What decides the size of a step.
const SETTINGS_OF_STEPS: &str = "max_num_tokens or max_batch_size";

/// Memory on the device that is filled from the host, time and again.
pub(super) struct UploadBuffer {
    /// One is filled while the device may still read the other.
    stagings: [Staging; 2],
    /// The one to be filled next.
    next: usize,
    device: DeviceMemory,
}

struct Staging {
    words: PinnedMemory<u32>,
    /// The last upload has read it.
    uploaded: CudaEvent,
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
        self.write_pieces(stream, [(offset, bytes)])
    }

    /// Writes pieces from these offsets on, and waits until they have been read.
    ///
    /// # Errors
    ///
    /// The driver refuses.
    pub fn write_pieces<'a>(
        &mut self,
        stream: &Arc<CudaStream>,
        pieces: impl IntoIterator<Item = (usize, &'a [u8])>,
    ) -> Result<(), LoadError> {
        let Some(memory) = &mut self.bytes else {
            return Ok(());
        };
        let mut pieces = pieces.into_iter();
        let copied = pieces.try_for_each(|(offset, bytes)| {
            let mut target = memory.slice_mut(offset..offset + bytes.len());
            stream.memcpy_htod(bytes, &mut target)
        });
        // Those that were begun, if one was refused.
        let read = stream.synchronize();
        let written = copied.and(read);
        written.map_err(|error| load_error("copying weights to the GPU", &error))
    }

    /// Memory with the bytes of a file, which all threads read.
    ///
    /// # Errors
    ///
    /// As [`DeviceMemory::new`].
    pub fn read_from(
        stream: &Arc<CudaStream>,
        pool: &mut Pool,
        from: PackedReader<'_>,
    ) -> Result<Self, LoadError> {
        let mut memory = Self::new(stream, from.num_bytes)?;
        let mut staging = vec![0_u8; from.num_bytes.min(STAGING_PIECES * PACKED_PIECE_BYTES)];
        let mut states = vec![(); pool.num_threads()];
        for start in (0..from.num_bytes).step_by(staging.len().max(1)) {
            let num_bytes = staging.len().min(from.num_bytes - start);
            let bytes = &mut staging[..num_bytes];
            let pieces = DisjointSlice::new(bytes);
            let num_pieces = num_bytes.div_ceil(PACKED_PIECE_BYTES);
            pool.for_each(&mut states, num_pieces, |(), index| {
                let at = index * PACKED_PIECE_BYTES;
                let len = PACKED_PIECE_BYTES.min(num_bytes - at);
                // SAFETY: each piece belongs to one task.
                (from.read)(start + at, unsafe { pieces.slice(at, len) });
            });
            memory.write(stream, start, bytes)?;
        }
        Ok(memory)
    }

    /// All of its bytes, after the stream's other work.
    ///
    /// # Errors
    ///
    /// The driver refuses.
    pub fn to_host(&self, stream: &CudaStream) -> Result<Vec<u8>, LoadError> {
        let mut bytes = vec![0; self.num_bytes];
        self.read(stream, &mut bytes)
            .map_err(|error| load_error("copying weights from the GPU", &error))?;
        Ok(bytes)
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
        // SAFETY: the source holds as many bytes, and both are there until the stream has been waited for, which is
        // next.
        unsafe { result::memcpy_dtoh_async(out, self.address, stream.cu_stream()) }?;
        stream.synchronize()
    }

    /// Copies bytes from `offset` on to pinned memory, after the stream's other work. They are there once the stream
    /// has been waited for.
    ///
    /// # Errors
    ///
    /// The driver refuses.
    ///
    /// # Panics
    ///
    /// The bytes exceed this memory.
    pub fn read_later<T: bytemuck::Pod>(
        &self,
        stream: &CudaStream,
        offset: usize,
        out: &mut [T],
    ) -> Result<(), DriverError> {
        assert!(
            offset + size_of_val(out) <= self.num_bytes,
            "{} bytes from {offset} of {}",
            size_of_val(out),
            self.num_bytes
        );
        if out.is_empty() {
            return Ok(());
        }
        stream.context().bind_to_thread()?;
        let source = self.address + offset as u64;
        // SAFETY: the source holds as many bytes. The target is pinned memory of a buffer that lives as long as the
        // stream, whose owner waits for the stream before it reads or writes there.
        unsafe { result::memcpy_dtoh_async(out, source, stream.cu_stream()) }
    }
}

impl<T: bytemuck::Pod + DeviceRepr + ValidAsZeroBits> PinnedMemory<T> {
    /// Reserves memory that the host writes and reads.
    ///
    /// # Errors
    ///
    /// There is not enough.
    pub fn new(stream: &CudaStream, len: usize) -> Result<Self, LoadError> {
        Self::with_flags(stream, len, 0, SETTINGS_OF_STEPS)
    }

    /// The same for memory whose size another setting decides.
    ///
    /// # Errors
    ///
    /// There is not enough; the error names the setting.
    pub fn sized_by(stream: &CudaStream, len: usize, setting: &str) -> Result<Self, LoadError> {
        Self::with_flags(stream, len, 0, setting)
    }

    /// Reserves memory that the host only writes, one word after the other.
    ///
    /// # Errors
    ///
    /// There is not enough.
    pub fn for_writing(stream: &CudaStream, len: usize) -> Result<Self, LoadError> {
        let flags = sys::CU_MEMHOSTALLOC_WRITECOMBINED;
        Self::with_flags(stream, len, flags, SETTINGS_OF_STEPS)
    }

    /// The elements. Nothing on the device may write them now.
    pub fn as_slice(&self) -> &[T] {
        // SAFETY: the memory holds `len` elements, zeroed at first, and is ours.
        unsafe { slice::from_raw_parts(self.first.as_ptr(), self.len) }
    }

    /// The elements. Nothing on the device may access them now.
    pub fn as_mut_slice(&mut self) -> &mut [T] {
        // SAFETY: as above.
        unsafe { slice::from_raw_parts_mut(self.first.as_ptr(), self.len) }
    }

    /// The address of some elements, which the device may access, as long as nobody does who is in its way.
    ///
    /// # Panics
    ///
    /// There are fewer.
    pub fn address_of(&self, elements: Range<usize>) -> *mut T {
        assert!(elements.end <= self.len, "{elements:?} of {}", self.len);
        // SAFETY: the offset is inside the allocation.
        unsafe { self.first.as_ptr().add(elements.start) }
    }

    fn with_flags(
        stream: &CudaStream,
        len: usize,
        flags: u32,
        settings: &str,
    ) -> Result<Self, LoadError> {
        let len = len.max(1);
        let reserve = || {
            // SAFETY: it is zeroed below.
            let mut memory = unsafe { stream.context().alloc_pinned_with_flags::<T>(len, flags) }?;
            Ok((memory.as_mut_ptr()?, memory))
        };
        let (first, memory) = reserve().map_err(|error: DriverError| {
            LoadError::Resource(format!(
                "no {} bytes of pinned host memory ({error}): lower {settings}",
                len.saturating_mul(size_of::<T>())
            ))
        })?;
        // SAFETY: the memory holds `len` elements, and zeros are one.
        unsafe { first.write_bytes(0, len) };
        Ok(Self {
            first: NonNull::new(first).expect("memory has an address"),
            len,
            _memory: memory,
        })
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

/// Copies what is at an address on the GPU to pinned memory, after the stream's other work, and waits for it.
///
/// # Errors
///
/// The driver refuses.
pub(super) fn read_address(
    stream: &CudaStream,
    source: u64,
    out: &mut [f32],
) -> Result<(), DriverError> {
    stream.context().bind_to_thread()?;
    // SAFETY: the source is inside a buffer of the device with as many elements behind it. Both are there until the
    // stream has been waited for, which is next.
    unsafe { result::memcpy_dtoh_async(out, source, stream.cu_stream()) }?;
    stream.synchronize()
}

/// Copies pinned memory to an address on the GPU, after the stream's other work. It must not change before that is
/// done.
///
/// # Errors
///
/// The driver refuses.
pub(super) fn write_address(
    stream: &CudaStream,
    target: u64,
    values: &[f32],
) -> Result<(), DriverError> {
    stream.context().bind_to_thread()?;
    // SAFETY: the target is inside a buffer of the device with as many elements behind it. The source is pinned memory
    // of a buffer that lives as long as the stream and its graphs, whose owner waits for the stream before it writes
    // there again.
    unsafe { result::memcpy_htod_async(target, values, stream.cu_stream()) }
}

impl UploadBuffer {
    /// Reserves `num_words` words on both sides.
    ///
    /// # Errors
    ///
    /// There is not enough memory.
    pub fn new(stream: &Arc<CudaStream>, num_words: usize) -> Result<Self, LoadError> {
        let num_words = num_words.max(1);
        let staging = || {
            let uploaded = stream.context().new_event(None);
            Ok(Staging {
                words: PinnedMemory::for_writing(stream, num_words)?,
                uploaded: uploaded.map_err(|error| load_error("creating an event", &error))?,
            })
        };
        Ok(Self {
            stagings: [staging()?, staging()?],
            next: 0,
            device: DeviceMemory::new(stream, 4 * num_words)?,
        })
    }

    /// The words to be uploaded next, once the upload before the last one has read them. They have to be written before
    /// they are uploaded.
    ///
    /// # Errors
    ///
    /// The driver refuses.
    pub fn staging(&mut self) -> Result<&mut [u32], DriverError> {
        let staging = &mut self.stagings[self.next];
        staging.uploaded.synchronize()?;
        Ok(staging.words.as_mut_slice())
    }

    /// Uploads the first words.
    ///
    /// # Errors
    ///
    /// The driver refuses.
    pub fn upload(&mut self, stream: &CudaStream, num_words: usize) -> Result<(), DriverError> {
        let staging = &self.stagings[self.next];
        let words = &staging.words.as_slice()[..num_words];
        stream.context().bind_to_thread()?;
        // SAFETY: the target has room for as many words, and `staging` waits before they are overwritten.
        unsafe { result::memcpy_htod_async(self.device.address(), words, stream.cu_stream()) }?;
        staging.uploaded.record(stream)?;
        self.next = 1 - self.next;
        Ok(())
    }

    /// The address of a word on the device.
    pub fn address(&self, word: usize) -> u64 {
        self.device.address() + 4 * word as u64
    }
}
