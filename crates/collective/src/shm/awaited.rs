//! What a rank waits for.

/// A counter of a rank, which has to be beyond a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Awaited {
    pub(super) rank: usize,
    pub(super) kind: Kind,
    pub(super) value: u32,
}

/// Which of its counters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Published = 1,
    Sent = 2,
    Received = 3,
}

impl Awaited {
    /// All of it in a word that is not 0.
    pub(super) fn to_word(self) -> u64 {
        (self.kind as u64) << 48 | (self.rank as u64) << 32 | u64::from(self.value)
    }

    /// What is in such a word; `None` if it is none.
    pub(super) fn from_word(word: u64) -> Option<Self> {
        let kinds = [Kind::Published, Kind::Sent, Kind::Received];
        let kind = kinds.into_iter().find(|&kind| kind as u64 == word >> 48)?;
        Some(Self {
            rank: usize::from((word >> 32) as u16),
            kind,
            value: word as u32,
        })
    }
}
