//! Triton's id of a sequence, owned, so that it outlives the request that carried it.

use std::ffi::CString;

use inflight_triton::CorrelationId;

/// An owned [`CorrelationId`].
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum CorrelationKey {
    /// A number, Triton's own or the client's.
    Number(u64),
    /// A string that the client chose.
    Text(Box<[u8]>),
    /// No id: the request belongs to no sequence, and we number it ourselves.
    Alone(u64),
}

impl CorrelationKey {
    /// Calls `tell` with Triton's id of the sequence, if it has one.
    pub fn tell<T>(&self, tell: impl FnOnce(CorrelationId<'_>) -> T) -> Option<T> {
        match self {
            Self::Number(number) => Some(tell(CorrelationId::Number(*number))),
            Self::Text(text) => {
                let text = CString::new(&**text).ok()?;
                Some(tell(CorrelationId::Text(&text)))
            }
            Self::Alone(_) => None,
        }
    }
}

impl From<CorrelationId<'_>> for CorrelationKey {
    fn from(id: CorrelationId<'_>) -> Self {
        match id {
            CorrelationId::Number(number) => Self::Number(number),
            CorrelationId::Text(text) => Self::Text(text.to_bytes().into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_tells_the_id_that_it_was_made_of() {
        for id in [CorrelationId::Number(7), CorrelationId::Text(c"seven")] {
            let told = CorrelationKey::from(id).tell(|told| told == id);
            assert_eq!(told, Some(true), "{id:?}");
        }
        assert_eq!(CorrelationKey::Alone(7).tell(|_| ()), None);
    }
}
