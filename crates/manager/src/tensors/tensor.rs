//! A tensor: type, shape and bytes.

use std::collections::BTreeMap;

/// The element type of a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum TensorType {
    /// A byte, 0 or 1.
    Bool = 1,
    /// A signed integer of 32 bits.
    Int32 = 2,
    /// An unsigned integer of 64 bits.
    Uint64 = 3,
    /// A floating-point number of 32 bits.
    Fp32 = 4,
}

impl TensorType {
    /// All types.
    pub const ALL: [Self; 4] = [Self::Bool, Self::Int32, Self::Uint64, Self::Fp32];

    /// The size of an element.
    pub const fn num_bytes(self) -> usize {
        match self {
            Self::Bool => 1,
            Self::Int32 | Self::Fp32 => 4,
            Self::Uint64 => 8,
        }
    }

    /// The name that errors use.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Bool => "BOOL",
            Self::Int32 => "INT32",
            Self::Uint64 => "UINT64",
            Self::Fp32 => "FP32",
        }
    }
}

/// A tensor in host memory.
#[derive(Clone, Debug, PartialEq)]
pub struct HostTensor {
    /// The element type.
    pub data_type: TensorType,
    /// The dimensions.
    pub shape: Vec<i64>,
    /// The elements, row by row, in the machine's byte order.
    pub bytes: Vec<u8>,
}

/// Tensors by name.
pub type HostTensors = BTreeMap<String, HostTensor>;

/// A Rust type that can be a tensor element.
pub(super) trait Element: Copy {
    const DATA_TYPE: TensorType;
    fn from_bytes(bytes: &[u8]) -> Self;
    fn append_to(self, bytes: &mut Vec<u8>);
}

macro_rules! element {
    ($type:ty, $data_type:ident) => {
        impl Element for $type {
            const DATA_TYPE: TensorType = TensorType::$data_type;

            fn from_bytes(bytes: &[u8]) -> Self {
                let mut element = [0; size_of::<Self>()];
                element.copy_from_slice(bytes);
                Self::from_ne_bytes(element)
            }

            fn append_to(self, bytes: &mut Vec<u8>) {
                bytes.extend_from_slice(&self.to_ne_bytes());
            }
        }
    };
}

element!(i32, Int32);
element!(u64, Uint64);
element!(f32, Fp32);

impl Element for bool {
    const DATA_TYPE: TensorType = TensorType::Bool;

    fn from_bytes(bytes: &[u8]) -> Self {
        bytes.iter().any(|byte| *byte != 0)
    }

    fn append_to(self, bytes: &mut Vec<u8>) {
        bytes.push(self.into());
    }
}

impl HostTensor {
    /// A tensor of these elements, as many as `shape` has.
    pub(super) fn of<T: Element>(shape: &[usize], elements: impl IntoIterator<Item = T>) -> Self {
        let num_elements: usize = shape.iter().product();
        let mut bytes = Vec::with_capacity(num_elements * T::DATA_TYPE.num_bytes());
        let elements = elements.into_iter();
        elements.for_each(|element| element.append_to(&mut bytes));
        debug_assert_eq!(bytes.len(), num_elements * T::DATA_TYPE.num_bytes());
        Self {
            data_type: T::DATA_TYPE,
            shape: shape.iter().map(|&size| size as i64).collect(),
            bytes,
        }
    }

    /// The number of elements.
    ///
    /// # Errors
    /// The bytes do not match type and shape.
    pub(super) fn num_elements(&self) -> Result<usize, String> {
        let mut sizes = self.shape.iter().map(|&size| usize::try_from(size).ok());
        let num_elements = sizes.try_fold(1usize, |product, size| product.checked_mul(size?));
        let num_bytes = num_elements.and_then(|num| num.checked_mul(self.data_type.num_bytes()));
        match (num_elements, num_bytes) {
            (Some(num_elements), Some(num_bytes)) if num_bytes == self.bytes.len() => {
                Ok(num_elements)
            }
            _ => Err(format!(
                "has {} bytes, which does not match {} {:?}",
                self.bytes.len(),
                self.data_type.name(),
                self.shape
            )),
        }
    }

    /// The elements.
    ///
    /// # Errors
    /// They have another type, or as for [`HostTensor::num_elements`].
    pub(super) fn elements<T: Element>(&self) -> Result<impl Iterator<Item = T>, String> {
        if self.data_type != T::DATA_TYPE {
            return Err(format!(
                "is {}, and must be {}",
                self.data_type.name(),
                T::DATA_TYPE.name()
            ));
        }
        self.num_elements()?;
        let elements = self.bytes.chunks_exact(T::DATA_TYPE.num_bytes());
        Ok(elements.map(T::from_bytes))
    }

    /// The only element.
    ///
    /// # Errors
    /// There is none or more than one, or as for [`HostTensor::elements`].
    pub(super) fn element<T: Element>(&self) -> Result<T, String> {
        let num_elements = self.num_elements()?;
        let mut elements = self.elements()?;
        match (elements.next(), num_elements) {
            (Some(element), 1) => Ok(element),
            _ => Err(format!("has {num_elements} elements, and must have 1")),
        }
    }
}
