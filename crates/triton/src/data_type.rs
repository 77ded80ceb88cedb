//! Element types of tensors: Triton's names, and the Rust types that match.

use std::fmt;

use bytemuck::Pod;

use super::sys;

/// The element type of a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DataType {
    /// One byte, 0 or 1.
    Bool,
    /// Unsigned 8-bit integer.
    Uint8,
    /// Unsigned 16-bit integer.
    Uint16,
    /// Unsigned 32-bit integer.
    Uint32,
    /// Unsigned 64-bit integer.
    Uint64,
    /// Signed 8-bit integer.
    Int8,
    /// Signed 16-bit integer.
    Int16,
    /// Signed 32-bit integer.
    Int32,
    /// Signed 64-bit integer.
    Int64,
    /// IEEE half precision.
    Fp16,
    /// IEEE single precision.
    Fp32,
    /// IEEE double precision.
    Fp64,
    /// Strings, each preceded by its length: [`super::strings`].
    Bytes,
    /// The upper half of an IEEE single.
    Bf16,
}

/// A Rust type of tensor elements.
pub trait Element: Pod {
    /// Triton's name for it.
    const DATA_TYPE: DataType;
}

macro_rules! elements {
    ($($rust:ty => $triton:ident),* $(,)?) => {
        $(impl Element for $rust {
            const DATA_TYPE: DataType = DataType::$triton;
        })*
    };
}

elements! {
    u8 => Uint8,
    i32 => Int32,
    u32 => Uint32,
    i64 => Int64,
    u64 => Uint64,
    f32 => Fp32,
}

use sys::TRITONSERVER_DataType as Raw;

/// Each type with Triton's number and the name that clients and config.pbtxt (`TYPE_...`) use.
const TABLE: [(DataType, Raw, &str); 14] = [
    (DataType::Bool, Raw::TRITONSERVER_TYPE_BOOL, "BOOL"),
    (DataType::Uint8, Raw::TRITONSERVER_TYPE_UINT8, "UINT8"),
    (DataType::Uint16, Raw::TRITONSERVER_TYPE_UINT16, "UINT16"),
    (DataType::Uint32, Raw::TRITONSERVER_TYPE_UINT32, "UINT32"),
    (DataType::Uint64, Raw::TRITONSERVER_TYPE_UINT64, "UINT64"),
    (DataType::Int8, Raw::TRITONSERVER_TYPE_INT8, "INT8"),
    (DataType::Int16, Raw::TRITONSERVER_TYPE_INT16, "INT16"),
    (DataType::Int32, Raw::TRITONSERVER_TYPE_INT32, "INT32"),
    (DataType::Int64, Raw::TRITONSERVER_TYPE_INT64, "INT64"),
    (DataType::Fp16, Raw::TRITONSERVER_TYPE_FP16, "FP16"),
    (DataType::Fp32, Raw::TRITONSERVER_TYPE_FP32, "FP32"),
    (DataType::Fp64, Raw::TRITONSERVER_TYPE_FP64, "FP64"),
    (DataType::Bytes, Raw::TRITONSERVER_TYPE_BYTES, "BYTES"),
    (DataType::Bf16, Raw::TRITONSERVER_TYPE_BF16, "BF16"),
];

impl DataType {
    pub(super) fn to_sys(self) -> Raw {
        self.row().1
    }

    /// `None` for INVALID and for types that a newer server may add.
    pub(super) fn from_sys(raw: Raw) -> Option<Self> {
        TABLE
            .iter()
            .find(|(_, number, _)| *number == raw)
            .map(|(data_type, ..)| *data_type)
    }

    fn row(self) -> &'static (DataType, Raw, &'static str) {
        // The table is in the order of the enum, which a test below checks.
        &TABLE[self as usize]
    }
}

impl fmt::Display for DataType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.row().2)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_type_finds_its_own_row() {
        for (data_type, raw, name) in TABLE {
            assert_eq!(data_type.to_sys(), raw);
            assert_eq!(DataType::from_sys(raw), Some(data_type));
            assert_eq!(data_type.to_string(), name);
        }
        assert_eq!(DataType::from_sys(Raw::TRITONSERVER_TYPE_INVALID), None);
        assert_eq!(DataType::from_sys(Raw(1000)), None);
    }
}
