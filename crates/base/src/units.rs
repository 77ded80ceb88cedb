//! Units of the KV cache: tokens and blocks, with the conversions between them.

use std::fmt;
use std::iter::Sum;
use std::num::NonZeroU32;
use std::ops::{Add, AddAssign, Sub, SubAssign};

macro_rules! unit {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
        #[repr(transparent)]
        pub struct $name(pub u32);

        impl $name {
            /// Zero.
            pub const ZERO: Self = Self(0);

            /// The count as an index or a length.
            #[inline]
            pub const fn index(self) -> usize {
                self.0 as usize
            }

            /// `self - other`, or zero if `other` is larger.
            #[inline]
            pub const fn saturating_sub(self, other: Self) -> Self {
                Self(self.0.saturating_sub(other.0))
            }
        }

        impl Add for $name {
            type Output = Self;
            #[inline]
            fn add(self, other: Self) -> Self {
                Self(self.0 + other.0)
            }
        }

        impl Sub for $name {
            type Output = Self;
            #[inline]
            fn sub(self, other: Self) -> Self {
                Self(self.0 - other.0)
            }
        }

        impl AddAssign for $name {
            #[inline]
            fn add_assign(&mut self, other: Self) {
                *self = *self + other;
            }
        }

        impl SubAssign for $name {
            #[inline]
            fn sub_assign(&mut self, other: Self) {
                *self = *self - other;
            }
        }

        impl Sum for $name {
            fn sum<I: Iterator<Item = Self>>(iter: I) -> Self {
                iter.fold(Self::ZERO, Add::add)
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{}({})", stringify!($name), self.0)
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.fmt(f)
            }
        }
    };
}

unit! {
    /// A number of tokens or positions. A position holds the keys and values of one token.
    Tokens
}
unit! {
    /// A number of KV blocks.
    Blocks
}

/// Tokens per KV block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockSize(NonZeroU32);

impl BlockSize {
    /// A block size of `tokens` positions. None if `tokens` is zero.
    pub const fn new(tokens: u32) -> Option<Self> {
        match NonZeroU32::new(tokens) {
            Some(tokens) => Some(Self(tokens)),
            None => None,
        }
    }

    /// Positions in one block.
    #[inline]
    pub const fn tokens(self) -> Tokens {
        Tokens(self.0.get())
    }
}

impl Tokens {
    /// Blocks needed to hold this many tokens; the last may be partly filled.
    #[inline]
    pub const fn blocks_ceil(self, size: BlockSize) -> Blocks {
        Blocks(self.0.div_ceil(size.0.get()))
    }

    /// This count rounded down to a multiple of the block size.
    #[inline]
    pub const fn floor_to_block(self, size: BlockSize) -> Tokens {
        Tokens(self.0 - self.0 % size.0.get())
    }
}

impl Blocks {
    /// Positions in these blocks, capped at `u32::MAX`.
    #[inline]
    pub const fn tokens(self, size: BlockSize) -> Tokens {
        Tokens(self.0.saturating_mul(size.0.get()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rounds_tokens_up_and_down_to_blocks() {
        let size = BlockSize::new(16).expect("not zero");
        for (tokens, blocks, floor) in [(0, 0, 0), (1, 1, 0), (16, 1, 16), (17, 2, 16), (48, 3, 48)]
        {
            assert_eq!(Tokens(tokens).blocks_ceil(size), Blocks(blocks));
            assert_eq!(Tokens(tokens).floor_to_block(size), Tokens(floor));
        }
        assert_eq!(BlockSize::new(0), None);
    }
}
