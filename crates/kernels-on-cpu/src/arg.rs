//! Arguments of a kernel.

use std::ffi::c_void;
use std::marker::PhantomData;

use bytemuck::Pod;

/// An argument: a number, or a pointer to a slice, which stays borrowed.
pub struct Arg<'a> {
    /// Its bytes; the first ones of a number with fewer.
    bytes: [u8; 8],
    num_bytes: usize,
    borrowed: PhantomData<&'a mut ()>,
}

impl Arg<'_> {
    /// A pointer to nothing.
    pub const NULL: Self = Self {
        bytes: [0; 8],
        num_bytes: 8,
        borrowed: PhantomData,
    };

    /// A pointer to memory that the caller keeps alive.
    pub fn pointer<T>(pointer: *const T) -> Self {
        Self::number(pointer as usize)
    }

    fn number(number: impl Pod) -> Self {
        let source = bytemuck::bytes_of(&number);
        let mut bytes = [0; 8];
        bytes[..source.len()].copy_from_slice(source);
        Self {
            bytes,
            num_bytes: source.len(),
            borrowed: PhantomData,
        }
    }

    pub(crate) fn address(&mut self) -> *mut c_void {
        self.bytes.as_mut_ptr().cast()
    }

    pub(crate) fn num_bytes(&self) -> usize {
        self.num_bytes
    }
}

impl<'a, T: Pod> From<&'a [T]> for Arg<'a> {
    fn from(slice: &'a [T]) -> Self {
        Self::pointer(slice.as_ptr())
    }
}

impl<'a, T: Pod> From<&'a mut [T]> for Arg<'a> {
    fn from(slice: &'a mut [T]) -> Self {
        Self::pointer(slice.as_mut_ptr())
    }
}

/// The null pointer if there is no slice.
impl<'a, T: Pod> From<Option<&'a [T]>> for Arg<'a> {
    fn from(slice: Option<&'a [T]>) -> Self {
        slice.map_or(Self::NULL, Self::from)
    }
}

macro_rules! numbers {
    ($($number:ty),*) => {$(
        impl From<$number> for Arg<'_> {
            fn from(number: $number) -> Self {
                Self::number(number)
            }
        }
    )*};
}

numbers!(f32, i32, u32, u64);
