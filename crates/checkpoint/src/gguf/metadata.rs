//! The keys and values of a GGUF file, and the reader of its header.

use std::collections::HashMap;
use std::fmt;
use std::ops::Range;

/// The longest key or name, and the longest string, in bytes. (Vocabularies are arrays, which are skipped at first.)
const MAX_NAME_BYTES: u64 = 1 << 16;
const MAX_TEXT_BYTES: u64 = 1 << 22;

/// A value. Integers of all widths share a variant.
#[derive(Clone, Debug, PartialEq)]
pub enum MetadataValue {
    /// An unsigned integer.
    Unsigned(u64),
    /// A signed integer.
    Signed(i64),
    /// A float.
    Float(f64),
    /// A boolean.
    Bool(bool),
    /// A string.
    Text(String),
    /// An array: only its place is kept.
    Array(ArrayPlace),
}

/// Where the elements of an array are in the file.
#[derive(Clone, Debug, PartialEq)]
pub struct ArrayPlace {
    kind: ValueType,
    len: u64,
    bytes: Range<u64>,
}

impl ArrayPlace {
    /// The bytes of its elements.
    pub fn bytes(&self) -> Range<u64> {
        self.bytes.clone()
    }

    /// The elements of an array of strings, from its bytes; `None` if it holds something else.
    pub fn texts(&self, bytes: &[u8]) -> Option<Vec<String>> {
        let elements = self.elements(bytes)?.into_iter();
        let texts = elements.map(|element| match element {
            MetadataValue::Text(text) => Some(text),
            _ => None,
        });
        texts.collect()
    }

    /// The elements of an array of numbers, from its bytes, or of truth values, as 0 and 1; `None` if it holds
    /// something else.
    pub fn numbers(&self, bytes: &[u8]) -> Option<Vec<f64>> {
        let elements = self.elements(bytes)?.into_iter();
        let numbers = elements.map(|element| match element {
            MetadataValue::Unsigned(number) => Some(number as f64),
            MetadataValue::Signed(number) => Some(number as f64),
            MetadataValue::Float(number) => Some(number),
            MetadataValue::Bool(value) => Some(value.into()),
            _ => None,
        });
        numbers.collect()
    }

    fn elements(&self, bytes: &[u8]) -> Option<Vec<MetadataValue>> {
        let mut reader = Reader::new(bytes, bytes.len() as u64);
        let elements = (0..self.len).map(|_| reader.value(self.kind).ok());
        elements.collect()
    }
}

impl fmt::Display for MetadataValue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unsigned(number) => number.fmt(f),
            Self::Signed(number) => number.fmt(f),
            Self::Float(number) => number.fmt(f),
            Self::Bool(value) => value.fmt(f),
            Self::Text(text) => write!(f, "'{text}'"),
            Self::Array(place) => write!(f, "an array of {}", place.len),
        }
    }
}

/// Reads little-endian values in sequence. Errors say what is wrong with the file.
pub struct Reader<'a> {
    /// The beginning of the file.
    bytes: &'a [u8],
    num_file_bytes: u64,
    position: usize,
    is_too_short: bool,
}

impl<'a> Reader<'a> {
    pub fn new(bytes: &'a [u8], num_file_bytes: u64) -> Self {
        Self {
            bytes,
            num_file_bytes,
            position: 0,
            is_too_short: false,
        }
    }

    /// The length of the whole file.
    pub fn num_file_bytes(&self) -> u64 {
        self.num_file_bytes
    }

    /// Whether a read failed only because the reader holds too little of the file.
    pub fn is_too_short(&self) -> bool {
        self.is_too_short
    }

    /// Bytes read so far.
    pub fn position(&self) -> usize {
        self.position
    }

    pub fn take(&mut self, len: u64) -> Result<&'a [u8], String> {
        let rest = &self.bytes[self.position..];
        match usize::try_from(len).ok().and_then(|len| rest.get(..len)) {
            Some(taken) => {
                self.position += taken.len();
                Ok(taken)
            }
            None => {
                let end = (self.position as u64).saturating_add(len);
                self.is_too_short = end <= self.num_file_bytes;
                Err(format!(
                    "is cut short, or damaged: {len} bytes are needed at byte {}, and it has {}; fetch it again",
                    self.position, self.num_file_bytes
                ))
            }
        }
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], String> {
        let bytes = self.take(N as u64)?;
        Ok(*bytes.first_chunk().expect("as many as were taken"))
    }

    pub fn u32(&mut self) -> Result<u32, String> {
        self.array().map(u32::from_le_bytes)
    }

    pub fn u64(&mut self) -> Result<u64, String> {
        self.array().map(u64::from_le_bytes)
    }

    /// Reads a key or a tensor's name.
    pub fn name(&mut self) -> Result<&'a str, String> {
        self.text(MAX_NAME_BYTES)
    }

    fn text(&mut self, max_bytes: u64) -> Result<&'a str, String> {
        let (at, len) = (self.position, self.u64()?);
        if len > max_bytes {
            return Err(format!(
                "has a text of {len} bytes at byte {at}, where at most {max_bytes} are expected; it is damaged"
            ));
        }
        std::str::from_utf8(self.take(len)?)
            .map_err(|_| format!("has a text at byte {at} that is not UTF-8; it is damaged"))
    }

    fn value(&mut self, kind: ValueType) -> Result<MetadataValue, String> {
        Ok(match kind {
            ValueType::U8 => MetadataValue::Unsigned(self.array::<1>()?[0].into()),
            ValueType::I8 => MetadataValue::Signed(i8::from_le_bytes(self.array()?).into()),
            ValueType::U16 => MetadataValue::Unsigned(u16::from_le_bytes(self.array()?).into()),
            ValueType::I16 => MetadataValue::Signed(i16::from_le_bytes(self.array()?).into()),
            ValueType::U32 => MetadataValue::Unsigned(self.u32()?.into()),
            ValueType::I32 => MetadataValue::Signed(i32::from_le_bytes(self.array()?).into()),
            ValueType::F32 => MetadataValue::Float(f32::from_le_bytes(self.array()?).into()),
            ValueType::Bool => MetadataValue::Bool(self.array::<1>()?[0] != 0),
            ValueType::Text => MetadataValue::Text(self.text(MAX_TEXT_BYTES)?.to_owned()),
            ValueType::Array => MetadataValue::Array(self.skip_array()?),
            ValueType::U64 => MetadataValue::Unsigned(self.u64()?),
            ValueType::I64 => MetadataValue::Signed(i64::from_le_bytes(self.array()?)),
            ValueType::F64 => MetadataValue::Float(f64::from_le_bytes(self.array()?)),
        })
    }

    /// Skips an array.
    fn skip_array(&mut self) -> Result<ArrayPlace, String> {
        let kind = self.kind()?;
        let len = self.u64()?;
        let start = self.position as u64;
        match kind.size() {
            Some(size) => {
                // A product that overflows exceeds any file.
                self.take(len.saturating_mul(size))?;
            }
            None if kind == ValueType::Text => {
                for _ in 0..len {
                    self.text(MAX_TEXT_BYTES)?;
                }
            }
            None => {
                return Err(
                    "has an array of arrays, which no known key has; it is damaged".to_owned(),
                );
            }
        }
        let bytes = start..self.position as u64;
        Ok(ArrayPlace { kind, len, bytes })
    }

    fn kind(&mut self) -> Result<ValueType, String> {
        let number = self.u32()?;
        ValueType::ALL.get(number as usize).copied().ok_or_else(|| {
            format!(
                "has a value of type {number}, which GGUF 3 does not have; it is damaged or too new"
            )
        })
    }

    /// Reads `num_keys` keys with their values.
    pub fn metadata(&mut self, num_keys: u64) -> Result<HashMap<String, MetadataValue>, String> {
        let mut metadata = HashMap::new();
        for _ in 0..num_keys {
            let key = self.name()?;
            let kind = self.kind()?;
            let value = self
                .value(kind)
                .map_err(|reason| format!("{reason} (the value of {key})"))?;
            metadata.insert(key.to_owned(), value);
        }
        Ok(metadata)
    }
}

/// The type of a value, in the order of the format's numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ValueType {
    U8,
    I8,
    U16,
    I16,
    U32,
    I32,
    F32,
    Bool,
    Text,
    Array,
    U64,
    I64,
    F64,
}

impl ValueType {
    const ALL: [Self; 13] = [
        Self::U8,
        Self::I8,
        Self::U16,
        Self::I16,
        Self::U32,
        Self::I32,
        Self::F32,
        Self::Bool,
        Self::Text,
        Self::Array,
        Self::U64,
        Self::I64,
        Self::F64,
    ];

    /// Bytes of a value, if all have the same size.
    const fn size(self) -> Option<u64> {
        match self {
            Self::U8 | Self::I8 | Self::Bool => Some(1),
            Self::U16 | Self::I16 => Some(2),
            Self::U32 | Self::I32 | Self::F32 => Some(4),
            Self::U64 | Self::I64 | Self::F64 => Some(8),
            Self::Text | Self::Array => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(name: &str, kind: u32, value: &[u8]) -> Vec<u8> {
        let len = (name.len() as u64).to_le_bytes();
        [&len, name.as_bytes(), &kind.to_le_bytes(), value].concat()
    }

    #[test]
    fn values_of_every_type_are_read() {
        let bytes = [
            key("a", 0, &[200]),
            key("b", 3, &(-2_i16).to_le_bytes()),
            key("c", 6, &0.5_f32.to_le_bytes()),
            key("d", 7, &[1]),
            key("e", 8, &[2, 0, 0, 0, 0, 0, 0, 0, b'o', b'k']),
            key(
                "f",
                9,
                &[&[4, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0], &[0; 8][..]].concat(),
            ),
            key("g", 12, &1e-5_f64.to_le_bytes()),
        ]
        .concat();
        let mut reader = Reader::new(&bytes, bytes.len() as u64);
        let metadata = reader.metadata(7).expect("whole");
        assert_eq!(reader.position(), bytes.len());
        for (key, value) in [
            ("a", MetadataValue::Unsigned(200)),
            ("b", MetadataValue::Signed(-2)),
            ("c", MetadataValue::Float(0.5)),
            ("d", MetadataValue::Bool(true)),
            ("e", MetadataValue::Text("ok".to_owned())),
            ("g", MetadataValue::Float(1e-5)),
        ] {
            assert_eq!(metadata[key], value, "{key}");
        }
        let MetadataValue::Array(place) = &metadata["f"] else {
            panic!("{}", metadata["f"]);
        };
        let range = place.bytes();
        let elements = &bytes[range.start as usize..range.end as usize];
        assert_eq!(place.numbers(elements), Some(vec![0.0, 0.0]));
        assert_eq!(place.texts(elements), None);
        for len in 0..bytes.len() {
            for num_file_bytes in [len, bytes.len()] {
                let mut reader = Reader::new(&bytes[..len], num_file_bytes as u64);
                let error = reader.metadata(7).expect_err("cut short");
                assert!(error.contains("is cut short"), "{error}");
                assert_eq!(reader.is_too_short(), num_file_bytes > len);
            }
        }
    }

    #[test]
    fn lies_about_lengths_cost_nothing() {
        let many = u64::MAX.to_le_bytes();
        for (bytes, reason) in [
            (many.to_vec(), "a text of 18446744073709551615 bytes"),
            (key("a", 8, &many), "a text of 18446744073709551615 bytes"),
            (
                key("a", 9, &[&[10, 0, 0, 0], &many[..]].concat()),
                "is cut short",
            ),
            (
                key("a", 9, &[&[8, 0, 0, 0], &many[..]].concat()),
                "is cut short",
            ),
            (
                key("a", 9, &[&[9, 0, 0, 0], &many[..]].concat()),
                "an array of arrays",
            ),
            (key("a", 13, &[]), "a value of type 13"),
            (key("a", 8, &[1, 0, 0, 0, 0, 0, 0, 0, 0xff]), "is not UTF-8"),
        ] {
            let mut reader = Reader::new(&bytes, bytes.len() as u64);
            let error = reader.metadata(u64::MAX).expect_err("refused");
            assert!(!reader.is_too_short(), "{error}");
            assert!(error.contains(reason), "{error}");
        }
    }
}
