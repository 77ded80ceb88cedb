//! The contents of a KV cache's blocks.

use std::fmt;
use std::str::FromStr;

use inflight_base::{BlockId, BlockSize, LoadError};

/// The element type that keys and values are stored in.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum KvDtype {
    /// bfloat16, as they are computed.
    #[default]
    Bf16,
    /// 8-bit integers, with one scale per vector (its largest magnitude divided by 127): bf16 on the CPU, f32 on GPUs.
    Int8,
    /// 8-bit floats of 4 bits of exponent and 3 of mantissa (E4M3), with one f32 scale per vector (its largest
    /// magnitude divided by 448). GPUs only.
    Fp8,
}

/// A [`KvDtype`] that the CPU stores.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CpuKvDtype {
    /// [`KvDtype::Bf16`].
    Bf16,
    /// [`KvDtype::Int8`].
    Int8,
}

impl KvDtype {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Bf16, Self::Int8, Self::Fp8];
    /// The types that the CPU stores.
    pub const ON_CPU: [Self; 2] = [Self::Bf16, Self::Int8];

    /// Its name.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Bf16 => "bf16",
            Self::Int8 => "int8",
            Self::Fp8 => "fp8",
        }
    }

    /// As one of those that the CPU [stores](Self::ON_CPU).
    ///
    /// # Errors
    ///
    /// It is for GPUs only.
    pub fn on_cpu(self) -> Result<CpuKvDtype, LoadError> {
        match self {
            Self::Bf16 => Ok(CpuKvDtype::Bf16),
            Self::Int8 => Ok(CpuKvDtype::Int8),
            Self::Fp8 => Err(LoadError::Config {
                problem: format!("kv_cache_dtype is {self}, which only GPUs store"),
                remedy: "write int8 or bf16, or serve the model on a GPU".to_owned(),
            }),
        }
    }
}

impl fmt::Display for KvDtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl FromStr for KvDtype {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        let named = Self::ALL.into_iter().find(|dtype| dtype.as_str() == name);
        named.ok_or_else(|| {
            let known = Self::ALL.map(Self::as_str).join(", ");
            format!("'{name}' is not a KV cache type; known types are {known}")
        })
    }
}

/// The contents of one block. A device chooses how they lie in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvLayout {
    /// Key/value heads.
    pub num_kv_heads: usize,
    /// Elements of a key, an even number.
    pub head_dim: usize,
    /// The values.
    pub values: KvValues,
    /// Elements of the key that an [indexer](super::IndexerShape) has of a position, an even number, in bf16. 0 without
    /// an indexer, and where values are not in the keys.
    pub indexer_dim: usize,
    /// Positions per block. On CPU, a multiple of 16 is read in place; other sizes work, but are slower
    /// and larger unless one block holds a whole sequence.
    pub block_size: BlockSize,
    /// The element type.
    pub dtype: KvDtype,
}

/// The values of a cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KvValues {
    /// Beside the keys, with this many elements.
    OfTheirOwn(usize),
    /// The first elements of the keys: this many.
    InKeys(usize),
}

impl KvLayout {
    /// Whether the cache stores values beside the keys.
    pub const fn stores_values(&self) -> bool {
        matches!(self.values, KvValues::OfTheirOwn(_))
    }

    /// Elements of a value.
    pub const fn value_dim(&self) -> usize {
        match self.values {
            KvValues::OfTheirOwn(len) | KvValues::InKeys(len) => len,
        }
    }

    /// Refuses copies of positions that would leave a pool of `num_blocks` blocks.
    ///
    /// # Panics
    ///
    /// A block is not in the pool, both are the same, or a block has fewer positions.
    pub fn check_copy(
        &self,
        num_blocks: usize,
        source: BlockId,
        target: BlockId,
        num_positions: usize,
    ) {
        for block in [source, target] {
            assert!(block.index() < num_blocks, "{block:?} of {num_blocks}");
        }
        assert!(source != target, "{source:?} onto itself");
        assert!(num_positions <= self.block_size.tokens().index());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_parse_back() {
        for dtype in KvDtype::ALL {
            assert_eq!(dtype.as_str().parse(), Ok(dtype));
        }
        let error = "fp4".parse::<KvDtype>().expect_err("unknown");
        assert!(error.contains("fp4") && error.contains("int8"), "{error}");
    }

    #[test]
    fn the_cpu_says_what_to_write_instead_of_fp8() {
        assert!(KvDtype::ON_CPU.iter().all(|dtype| dtype.on_cpu().is_ok()));
        let error = KvDtype::Fp8.on_cpu().expect_err("GPUs only");
        let error = error.to_string();
        assert!(
            error.contains("kv_cache_dtype is fp8") && error.contains("int8"),
            "{error}"
        );
    }
}
