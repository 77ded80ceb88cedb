//! Calls of rank 0 to another rank, and answers.

use std::collections::VecDeque;
use std::io::{self, ErrorKind};
use std::sync::Arc;
use std::time::Duration;

use super::super::channel::Channel;
use super::super::error::CollectiveError;
use super::messages::{End, Kind, Session, push_bytes, read_bytes};
use super::plugin::Sending;
use super::wait::wait_for;

/// The messages that may be on their way at a time.
const MAX_UNSENT: usize = 4;

/// The connection of rank 0 with another rank, or of that one with rank 0. When rank 0 drops its end, the other one
/// reads that there will be no more messages.
pub struct MpiLink {
    session: Arc<Session>,
    other: usize,
    limit: Option<Duration>,
    unsent: VecDeque<Sending>,
    received: Vec<u32>,
}

impl MpiLink {
    pub(super) fn new(session: Arc<Session>, other: usize) -> Self {
        Self {
            session,
            other,
            limit: None,
            unsent: VecDeque::new(),
            received: Vec::new(),
        }
    }

    /// Waits until no more messages than these are on their way.
    fn wait_until_sent(&mut self, num: usize) -> io::Result<()> {
        while self.unsent.len() > num {
            let first = &mut self.unsent[0];
            let sent = wait_for(self.limit, || Ok(first.is_done()?.then_some(())));
            in_words(sent)?.ok_or_else(too_late)?;
            self.unsent.pop_front();
        }
        Ok(())
    }
}

impl Channel for MpiLink {
    fn set_time_limit(&mut self, limit: Option<Duration>) -> io::Result<()> {
        self.limit = limit;
        Ok(())
    }

    fn send(&mut self, message: &[u8]) -> io::Result<()> {
        self.wait_until_sent(MAX_UNSENT - 1)?;
        let mut words = Vec::with_capacity(message.len() / size_of::<u32>() + 2);
        push_bytes(&mut words, message);
        let (session, tag) = (&self.session, self.session.tag(Kind::Call));
        let sending = session.plugin.send(self.other, tag, &Arc::new(words));
        self.unsent.push_back(in_words(sending)?);
        Ok(())
    }

    fn receive(&mut self, message: &mut Vec<u8>) -> io::Result<bool> {
        let Self {
            session,
            other,
            limit,
            unsent,
            received,
        } = self;
        let tag = session.tag(Kind::Call);
        // Rank 0 alone ends a session; of others it knows by their reports.
        let is_told_of_end = *other == 0;
        let found = wait_for(*limit, || {
            // What is being sent goes on only while MPI is called for it.
            if let Some(first) = unsent.front_mut() {
                first.is_done()?;
            }
            if let Some(receiving) = session.plugin.receive(Some(*other), tag, received)? {
                return Ok(Some(Some(receiving)));
            }
            if !is_told_of_end {
                return Ok(None);
            }
            match session.ended(Some(*other))? {
                None => Ok(None),
                Some(End::Closed) => Ok(Some(None)),
                Some(end) => Err(end.into_error()),
            }
        });
        let Some(mut receiving) = in_words(found)?.ok_or_else(too_late)? else {
            return Ok(false);
        };
        let words = in_words(wait_for(*limit, || receiving.words()))?;
        *received = words.ok_or_else(too_late)?;
        read_bytes(received, message);
        Ok(true)
    }
}

impl Drop for MpiLink {
    fn drop(&mut self) {
        if self.session.rank == 0 {
            self.session.tell_closed(self.other);
        }
        // The last report of a rank.
        self.limit = Some(Duration::from_millis(500));
        let _ = self.wait_until_sent(0);
    }
}

fn in_words<T>(result: Result<T, CollectiveError>) -> io::Result<T> {
    result.map_err(io::Error::other)
}

fn too_late() -> io::Error {
    io::Error::new(ErrorKind::TimedOut, "no answer in time")
}
