//! The messages of a session.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use super::super::error::CollectiveError;
use super::plugin::{Plugin, Sending, Tag};
use super::wait::wait_for;
use super::world::MpiWorld;

/// How long the sending of a few words may take that nobody has to wait for.
const GRACE: Duration = Duration::from_millis(500);

/// What a message is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum Kind {
    /// The number of the session that begins; 0 if there will be no more.
    Session = 0,
    /// Between rank 0 and another one.
    Call = 1,
    /// Of a round of a stage.
    Round = 2,
    /// From one stage to the next.
    Stage = 3,
    /// The sender has failed, and says why; or it is rank 0, which has ended the session.
    End = 4,
}

/// The end of a session, as a rank tells it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum End {
    /// Rank 0 needs no more of the model.
    Closed,
    /// A rank has failed.
    Failed { by: usize, reason: String },
}

impl End {
    /// The error of an operation that the end interrupts.
    pub(super) fn into_error(self) -> CollectiveError {
        match self {
            Self::Closed => CollectiveError::Closed,
            Self::Failed { by, reason } => CollectiveError::Aborted { by, reason },
        }
    }
}

/// A session, as one of its ranks has it.
pub(super) struct Session {
    pub(super) plugin: Plugin,
    pub(super) rank: usize,
    pub(super) size: usize,
    pub(super) number: u32,
    /// Of rank 0.
    pub(super) world: Option<MpiWorld>,
    /// Whether rank 0 has told this rank that it needs no more of the model.
    pub(super) is_closed: AtomicBool,
}

impl Session {
    pub(super) fn tag(&self, kind: Kind) -> Tag {
        Tag::new(self.number, kind as u8)
    }

    /// All ranks but this one.
    pub(super) fn others(&self) -> impl Iterator<Item = usize> + use<> {
        let own = self.rank;
        (0..self.size).filter(move |rank| *rank != own)
    }

    /// Tells a rank that this one, rank 0, needs no more of the model.
    pub(super) fn tell_closed(&self, to: usize) {
        self.tell_end(std::iter::once(to), "");
    }

    /// Tells all others that this rank has failed.
    pub(super) fn tell_failure(&self, reason: &str) {
        let reason = if reason.is_empty() {
            "for no reason"
        } else {
            reason
        };
        self.tell_end(self.others(), reason);
    }

    /// No `reason` means that rank 0 has ended the session.
    fn tell_end(&self, to: impl Iterator<Item = usize>, reason: &str) {
        let tag = self.tag(Kind::End);
        let mut words = vec![self.rank as u32];
        push_bytes(&mut words, reason.as_bytes());
        if let Err(error) = self.send_at_once(to, tag, words) {
            log::warn!("the other ranks are not told that this one has ended ({reason}): {error}");
        }
    }

    /// How the session has ended, if a rank has told it.
    pub(super) fn ended(&self, from: Option<usize>) -> Result<Option<End>, CollectiveError> {
        let tag = self.tag(Kind::End);
        let Some(mut receiving) = self.plugin.receive(from, tag, &mut Vec::new())? else {
            return Ok(None);
        };
        let words = wait_for(Some(GRACE), || receiving.words())?;
        let end = words.as_deref().and_then(<[u32]>::split_first);
        let Some((by, text)) = end else {
            return Err(CollectiveError::World(
                "a rank has ended the model, and its message does not arrive".to_owned(),
            ));
        };
        let mut bytes = Vec::new();
        read_bytes(text, &mut bytes);
        if bytes.is_empty() {
            self.is_closed.store(true, Ordering::Release);
            return Ok(Some(End::Closed));
        }
        Ok(Some(End::Failed {
            by: *by as usize,
            reason: String::from_utf8_lossy(&bytes).into_owned(),
        }))
    }

    /// Sends a few words, and waits for a moment until they were sent.
    pub(super) fn send_at_once(
        &self,
        to: impl Iterator<Item = usize>,
        tag: Tag,
        words: Vec<u32>,
    ) -> Result<(), CollectiveError> {
        let words = Arc::new(words);
        let sending = to.map(|rank| self.plugin.send(rank, tag, &words));
        let mut sending = sending.collect::<Result<Vec<_>, _>>()?;
        wait_for(Some(GRACE), || Ok(are_done(&mut sending)?.then_some(())))?;
        Ok(())
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        if let Some(world) = &self.world {
            world.give_back();
        }
    }
}

/// Whether all messages were sent.
pub(super) fn are_done(sending: &mut [Sending]) -> Result<bool, CollectiveError> {
    for one in sending {
        if !one.is_done()? {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Appends bytes and their number.
pub(super) fn push_bytes(words: &mut Vec<u32>, bytes: &[u8]) {
    words.push(bytes.len() as u32);
    let (whole, rest) = bytes.as_chunks();
    words.extend(whole.iter().map(|word| u32::from_ne_bytes(*word)));
    if !rest.is_empty() {
        let mut last = [0; size_of::<u32>()];
        last[..rest.len()].copy_from_slice(rest);
        words.push(u32::from_ne_bytes(last));
    }
}

/// Replaces `bytes` by those that were appended to no words.
pub(super) fn read_bytes(words: &[u32], bytes: &mut Vec<u8>) {
    bytes.clear();
    if let Some((len, words)) = words.split_first() {
        let all: &[u8] = bytemuck::cast_slice(words);
        bytes.extend_from_slice(&all[..all.len().min(*len as usize)]);
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::super::plugin::tests::plugin_of_one_thread;
    use super::*;

    /// A session of two ranks, all of whose messages go to this thread.
    pub(crate) fn session(rank: usize) -> Session {
        Session {
            plugin: plugin_of_one_thread(),
            rank,
            size: 2,
            number: 5,
            world: None,
            is_closed: AtomicBool::new(false),
        }
    }

    #[test]
    fn bytes_of_any_length_are_read_as_they_were_written() {
        let text = b"a message";
        for len in 0..text.len() {
            let mut words = Vec::new();
            push_bytes(&mut words, &text[..len]);
            let mut bytes = vec![7];
            read_bytes(&words, &mut bytes);
            assert_eq!(bytes, text[..len]);
        }
        let mut bytes = vec![7];
        read_bytes(&[], &mut bytes);
        assert!(bytes.is_empty());
        read_bytes(&[100, u32::from_ne_bytes(*b"1234")], &mut bytes);
        assert_eq!(bytes, b"1234");
    }

    #[test]
    fn tags_of_sessions_are_within_the_bits_that_mpi_promises() {
        assert_eq!(Tag::new(0, Kind::Session as u8), Tag::new(4096, 0));
        assert_ne!(Tag::new(1, Kind::End as u8), Tag::new(2, Kind::End as u8));
        assert_ne!(
            Tag::new(1, Kind::Round as u8),
            Tag::new(1, Kind::Stage as u8)
        );
    }
}
