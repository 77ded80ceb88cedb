//! What ranks that exchange messages must agree on.

use std::fmt;

/// What a message belongs to: the same for all ranks of a round, and for sender and receiver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Label {
    /// The operation.
    pub operation: Operation,
    /// What distinguishes the step, such as a hash of its plan.
    pub step: u64,
    /// The values of all its messages.
    pub len: usize,
}

/// A collective operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Operation {
    /// A sum over all ranks.
    AllReduce = 1,
    /// The values of all ranks.
    Gather = 2,
    /// A message of one rank.
    Broadcast = 3,
    /// A message from a stage to the next one.
    Send = 4,
}

impl Operation {
    /// The operation with this number.
    pub(super) const fn from_number(number: u32) -> Option<Self> {
        match number {
            1 => Some(Self::AllReduce),
            2 => Some(Self::Gather),
            3 => Some(Self::Broadcast),
            4 => Some(Self::Send),
            _ => None,
        }
    }
}

impl fmt::Display for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::AllReduce => "an all-reduce",
            Self::Gather => "a gather",
            Self::Broadcast => "a broadcast",
            Self::Send => "a message to the next stage",
        })
    }
}

impl fmt::Display for Label {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            operation,
            step,
            len,
        } = self;
        write!(f, "{operation} of {len} values in step {step:016x}")
    }
}
