//! Typed ids: an index of one kind cannot be used as another.

use std::fmt;

/// An entry of a model's vocabulary. A plain number, because tokens are data that is hashed,
/// copied and multiplied through; everything that *addresses* something is a newtype.
pub type TokenId = u32;

macro_rules! id {
    ($(#[$doc:meta])* $name:ident($inner:ty)) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        #[repr(transparent)]
        pub struct $name(pub $inner);

        impl $name {
            /// The id as an index into a slice.
            #[inline]
            pub const fn index(self) -> usize {
                self.0 as usize
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

id! {
    #[derive(Default)]
    /// A request of Triton, numbered by us: never reused while the process lives. Not the client's request id.
    RequestId(u64)
}
id! {
    #[derive(Default)]
    /// A sequence: one text that the engine generates, with all its beams. A request asks for one or several.
    /// Unique among the sequences that an engine holds.
    SequenceId(u64)
}
id! {
    #[derive(Default)]
    /// A client, named by itself: as many of its requests as it likes may have its id.
    ClientId(u64)
}
id! {
    /// A block of the KV pool: `block_size` positions of every layer's keys and values.
    BlockId(u32)
}
id! {
    /// The row of a sequence in the engine's table; reused after the sequence has finished.
    SeqSlot(u32)
}

impl BlockId {
    /// No block: the place in a block table of one that was given back.
    pub const NONE: Self = Self(u32::MAX);
}
