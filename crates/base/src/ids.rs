//! Typed ids: an index of one kind cannot be used as another.

use std::fmt;

/// An entry of a model's vocabulary. A plain number, because tokens are bulk data: hashed, copied
/// and computed with. Ids that *address* something are newtypes.
pub type TokenId = u32;

macro_rules! id {
    ($(#[$doc:meta])* $name:ident($inner:ty)) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        #[repr(transparent)]
        pub struct $name(pub $inner);

        impl $name {
            /// The id as a slice index.
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
    /// A Triton request, numbered by the backend and never reused within the process. Not the client's request id.
    RequestId(u64)
}
id! {
    #[derive(Default)]
    /// A sequence: one text that the engine generates, including all its beams. A request has one or more.
    /// Unique among the sequences in an engine.
    SequenceId(u64)
}
id! {
    #[derive(Default)]
    /// A client's id, chosen by the client. Any number of requests may share it.
    ClientId(u64)
}
id! {
    /// A block of the KV cache pool: keys and values of `block_size` positions in every layer.
    BlockId(u32)
}
id! {
    /// A block in host memory: a copy of a KV cache block that the device gave up.
    HostBlockId(u32)
}
id! {
    /// A snapshot of the recurrent states of a sequence.
    SnapshotId(u32)
}
id! {
    /// A snapshot in host memory: a copy of one that the device gave up.
    HostSnapshotId(u32)
}
id! {
    /// The row of a sequence in the engine's table; reused after the sequence finishes.
    SeqSlot(u32)
}
id! {
    /// A row of recurrent states: of a sequence or, with beam search, of one of its beams.
    StateRow(u32)
}

impl SeqSlot {
    /// The row of its recurrent states with this index, of `num` that each slot has.
    #[inline]
    pub fn state_row(self, index: u32, num: u32) -> StateRow {
        StateRow(self.0 * num + index)
    }
}

impl BlockId {
    /// Marks an entry of a block table whose block was released.
    pub const NONE: Self = Self(u32::MAX);
}
