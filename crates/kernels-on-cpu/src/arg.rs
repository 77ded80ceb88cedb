//! Arguments of a kernel.

use std::ffi::c_void;
use std::marker::PhantomData;

use bytemuck::Pod;

/// An argument: a number, a struct, or a pointer to a slice, which stays borrowed.
pub struct Arg<'a> {
    /// Its bytes, the first `num_bytes` of these.
    words: [u64; MAX_WORDS],
    num_bytes: usize,
    is_pointer: bool,
    borrowed: PhantomData<&'a mut ()>,
}

/// The size of the largest argument.
const MAX_WORDS: usize = 19;

impl Arg<'_> {
    /// A pointer to nothing.
    pub const NULL: Self = Self {
        words: [0; MAX_WORDS],
        num_bytes: 8,
        is_pointer: true,
        borrowed: PhantomData,
    };

    /// A pointer to memory that the caller keeps alive.
    pub fn pointer<T>(pointer: *const T) -> Self {
        Self {
            is_pointer: true,
            ..Self::value(pointer as usize)
        }
    }

    /// A number or a struct, whose pointers are to memory that the caller keeps alive.
    ///
    /// # Panics
    ///
    /// If it has more than 152 bytes.
    pub fn value(value: impl Pod) -> Self {
        let source = bytemuck::bytes_of(&value);
        let mut words = [0; MAX_WORDS];
        bytemuck::cast_slice_mut(&mut words)[..source.len()].copy_from_slice(source);
        Self {
            words,
            num_bytes: source.len(),
            is_pointer: false,
            borrowed: PhantomData,
        }
    }

    /// Where its bytes are.
    pub fn address(&mut self) -> *mut c_void {
        self.words.as_mut_ptr().cast()
    }

    /// How many they are.
    pub fn num_bytes(&self) -> usize {
        self.num_bytes
    }

    /// The address that it points to; nothing if it is a number or a struct.
    pub fn target(&self) -> Option<usize> {
        self.is_pointer.then_some(self.words[0] as usize)
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
                Self::value(number)
            }
        }
    )*};
}

numbers!(f32, i32, u32, u64);
