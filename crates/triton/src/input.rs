//! An input tensor of a request.

use std::borrow::Cow;
use std::ffi::{CStr, c_void};
use std::marker::PhantomData;
use std::ops::Range;
use std::ptr::{self, NonNull};
use std::slice;

use super::error::{check, to_utf8};
use super::{DataType, Element, Error, sys};

/// An input tensor, borrowed from its request. Its data may be in several buffers.
#[derive(Debug)]
pub struct Input<'request> {
    raw: NonNull<sys::TRITONBACKEND_Input>,
    name: &'request str,
    data_type: DataType,
    shape: &'request [i64],
    num_bytes: usize,
    num_buffers: u32,
    request: PhantomData<&'request sys::TRITONBACKEND_Request>,
}

/// A copy of an input tensor.
#[derive(Clone, Debug)]
pub struct OwnedInput {
    name: String,
    data_type: DataType,
    shape: Vec<i64>,
    bytes: Vec<u8>,
}

impl OwnedInput {
    /// The tensor's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The type of its elements.
    pub fn data_type(&self) -> DataType {
        self.data_type
    }

    /// The data.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// The elements as numbers. Errors as of [`Input::num_elements`].
    pub fn elements<T: Element>(&self) -> Result<Vec<T>, Error> {
        num_elements::<T>(&self.name, self.data_type, &self.shape, self.bytes.len())?;
        Ok(elements_of(&self.bytes))
    }
}

impl<'request> Input<'request> {
    /// Reads the properties of a tensor.
    ///
    /// # Safety
    /// `raw` is an input of a request that lives, unreleased, for `'request`.
    pub(super) unsafe fn from_raw(raw: NonNull<sys::TRITONBACKEND_Input>) -> Result<Self, Error> {
        let mut name = ptr::null();
        let mut data_type = sys::TRITONSERVER_DataType::TRITONSERVER_TYPE_INVALID;
        let mut shape = ptr::null();
        let mut num_dims = 0;
        let mut byte_size = 0;
        let mut num_buffers = 0;
        // SAFETY: the input is alive and every out-parameter points to a variable of its type.
        unsafe {
            check(sys::TRITONBACKEND_InputProperties(
                raw.as_ptr(),
                &raw mut name,
                &raw mut data_type,
                &raw mut shape,
                &raw mut num_dims,
                &raw mut byte_size,
                &raw mut num_buffers,
            ))
        }?;
        // SAFETY: the name is a C string that lives as long as the request.
        let name = to_utf8(unsafe { CStr::from_ptr(name) }, "an input's name")?;
        let shape = if num_dims == 0 {
            &[][..]
        } else {
            // SAFETY: it points to `num_dims` sizes, which live as long as the request.
            unsafe { slice::from_raw_parts(shape, num_dims as usize) }
        };
        let data_type = DataType::from_sys(data_type)
            .ok_or_else(|| Error::invalid(format!("input '{name}' has an unknown data type")))?;
        Ok(Self {
            raw,
            name,
            data_type,
            shape,
            num_bytes: byte_size as usize,
            num_buffers,
            request: PhantomData,
        })
    }

    /// The tensor's name.
    pub fn name(&self) -> &'request str {
        self.name
    }

    /// The type of its elements.
    pub fn data_type(&self) -> DataType {
        self.data_type
    }

    /// Bytes of the data.
    pub fn num_bytes(&self) -> usize {
        self.num_bytes
    }

    /// The first dimension, which is the batch's in a model with a batch dimension; 0 for a scalar.
    pub fn batch_size(&self) -> i64 {
        self.shape.first().copied().unwrap_or_default()
    }

    /// The data: borrowed from a single buffer, or gathered from several.
    ///
    /// # Errors
    /// A part of it is in GPU memory (CUDA shared memory of a client).
    pub fn bytes(&self) -> Result<Cow<'request, [u8]>, Error> {
        if self.num_buffers == 1 {
            return self.buffer(0).map(Cow::Borrowed);
        }
        let mut bytes = Vec::new();
        for index in 0..self.num_buffers {
            bytes.extend_from_slice(self.buffer(index)?);
        }
        Ok(Cow::Owned(bytes))
    }

    /// The data from the byte `start` on, as far as it lies in one buffer; nothing behind the end.
    ///
    /// # Errors
    /// It is in GPU memory.
    pub fn bytes_from(&self, start: usize) -> Result<&'request [u8], Error> {
        let mut first = 0;
        for index in 0..self.num_buffers {
            let buffer = self.buffer(index)?;
            if start < first + buffer.len() {
                return Ok(&buffer[start - first..]);
            }
            first += buffer.len();
        }
        Ok(&[])
    }

    /// The shape, in elements of so many bytes.
    ///
    /// # Errors
    /// The tensor's bytes do not match it.
    pub fn shape(&self, element_bytes: usize) -> Result<Vec<usize>, Error> {
        shape_of(
            self.name,
            self.data_type,
            self.shape,
            element_bytes,
            self.num_bytes,
        )
    }

    /// The number of elements of type `T`.
    ///
    /// # Errors
    /// The tensor has another type, or its bytes do not match its shape.
    pub fn num_elements<T: Element>(&self) -> Result<usize, Error> {
        num_elements::<T>(self.name, self.data_type, self.shape, self.num_bytes)
    }

    /// A copy that is independent of the request.
    pub fn to_owned(&self) -> Result<OwnedInput, Error> {
        Ok(OwnedInput {
            name: self.name.to_owned(),
            data_type: self.data_type,
            shape: self.shape.to_vec(),
            bytes: self.bytes()?.into_owned(),
        })
    }

    /// A range of the elements.
    ///
    /// # Panics
    /// The range exceeds the tensor.
    pub fn elements_in<T: Element>(&self, places: Range<usize>) -> Result<Vec<T>, Error> {
        let num_elements = self.num_elements::<T>()?;
        assert!(places.end <= num_elements, "{places:?} of {num_elements}");
        let bytes = self.bytes()?;
        let bytes = &bytes[places.start * size_of::<T>()..places.end * size_of::<T>()];
        Ok(elements_of(bytes))
    }

    fn buffer(&self, index: u32) -> Result<&'request [u8], Error> {
        use sys::TRITONSERVER_MemoryType as Memory;
        let mut data: *const c_void = ptr::null();
        let mut byte_size = 0;
        // In: the preferred memory. Out: the memory that the data is in.
        let mut memory = Memory::TRITONSERVER_MEMORY_CPU;
        let mut device = 0;
        // SAFETY: the input is alive and every out-parameter points to a variable of its type.
        unsafe {
            check(sys::TRITONBACKEND_InputBuffer(
                self.raw.as_ptr(),
                index,
                &raw mut data,
                &raw mut byte_size,
                &raw mut memory,
                &raw mut device,
            ))
        }?;
        if byte_size == 0 {
            return Ok(&[]);
        }
        if !matches!(
            memory,
            Memory::TRITONSERVER_MEMORY_CPU | Memory::TRITONSERVER_MEMORY_CPU_PINNED
        ) {
            return Err(Error::invalid(format!(
                "input '{}' lies in the memory of GPU {device}; send it from system memory",
                self.name
            )));
        }
        if data.is_null() {
            return Err(Error::internal(format!(
                "input '{}': buffer {index} of {byte_size} bytes is null",
                self.name
            )));
        }
        // SAFETY: `data` points to `byte_size` bytes in host memory, which do not change while the request is ours.
        Ok(unsafe { slice::from_raw_parts(data.cast::<u8>(), byte_size as usize) })
    }
}

/// The number of elements of type `T` in a tensor.
///
/// # Errors
/// The tensor has another type, or its bytes do not match its shape.
fn num_elements<T: Element>(
    name: &str,
    data_type: DataType,
    shape: &[i64],
    num_bytes: usize,
) -> Result<usize, Error> {
    if data_type != T::DATA_TYPE {
        return Err(Error::invalid(format!(
            "input '{name}' holds {data_type}, not {}",
            T::DATA_TYPE
        )));
    }
    let shape = shape_of(name, data_type, shape, size_of::<T>(), num_bytes)?;
    Ok(shape.iter().product())
}

/// The sizes of a tensor's dimensions, whose product is known to be as many elements as there are bytes for.
fn shape_of(
    name: &str,
    data_type: DataType,
    shape: &[i64],
    element_bytes: usize,
    num_bytes: usize,
) -> Result<Vec<usize>, Error> {
    let sizes = shape.iter().map(|&size| usize::try_from(size).ok());
    let sizes: Option<Vec<_>> = sizes.collect();
    let fits = |sizes: &Vec<usize>| {
        let mut all = sizes.iter().chain([&element_bytes]);
        all.try_fold(1_usize, |product, &size| product.checked_mul(size)) == Some(num_bytes)
    };
    sizes.filter(fits).ok_or_else(|| {
        Error::invalid(format!(
            "input '{name}' of shape {shape:?} and type {data_type} has {num_bytes} bytes"
        ))
    })
}

/// The elements in these bytes, with any alignment.
fn elements_of<T: Element>(bytes: &[u8]) -> Vec<T> {
    let mut elements = vec![T::zeroed(); bytes.len() / size_of::<T>()];
    bytemuck::cast_slice_mut(&mut elements).copy_from_slice(bytes);
    elements
}
