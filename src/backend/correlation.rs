//! Triton's name of a sequence, kept beyond the request that carried it.

use crate::triton::CorrelationId;

/// An owned [`CorrelationId`].
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum CorrelationKey {
    /// A number, Triton's own or the client's.
    Number(u64),
    /// A client's text.
    Text(Box<[u8]>),
}

impl From<CorrelationId<'_>> for CorrelationKey {
    fn from(id: CorrelationId<'_>) -> Self {
        match id {
            CorrelationId::Number(number) => Self::Number(number),
            CorrelationId::Text(text) => Self::Text(text.to_bytes().into()),
        }
    }
}
