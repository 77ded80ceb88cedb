//! Sums between ranks of an MPI world, and messages between stages.

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use super::super::error::CollectiveError;
use super::super::exchange::{Exchange, NUM_UNREAD, check_label};
use super::super::grid::{Grid, MAX_RANKS};
use super::super::label::{Label, Operation};
use super::messages::{End, Kind, Session, are_done};
use super::plugin::Sending;
use super::wait::wait_for;

/// The most words of a message, in a round and between stages.
const MAX_WORDS: usize = 64 * 1024;
/// The words before a message's own.
const HEADER_LEN: usize = 5;

/// A rank of an MPI world, in a session.
pub struct Mpi {
    session: Arc<Session>,
    grid: Grid,
    time_limit: Duration,
    /// What this rank has published in the current round.
    label: Option<Label>,
    round: u32,
    num_sent: u32,
    /// The messages of even and odd rounds.
    published: [Outgoing; 2],
    /// The messages to the next stage.
    sent: [Outgoing; NUM_UNREAD],
    /// The messages of the stage's ranks in this round.
    received: Vec<Vec<u32>>,
    /// How the session has ended.
    end: Option<End>,
}

/// A message to several ranks. Its memory is used again when all have it.
#[derive(Default)]
struct Outgoing {
    words: Arc<Vec<u32>>,
    sending: Vec<Sending>,
}

impl Mpi {
    pub(super) fn new(session: Arc<Session>, grid: Grid, time_limit: Duration) -> Self {
        Self {
            session,
            grid,
            time_limit,
            label: None,
            round: 0,
            num_sent: 0,
            published: Default::default(),
            sent: Default::default(),
            received: vec![Vec::new(); grid.ranks_per_stage],
            end: None,
        }
    }

    fn rank(&self) -> usize {
        self.session.rank
    }

    /// Whether the session goes on.
    fn check_end(&mut self) -> Result<(), CollectiveError> {
        if self.end.is_none() {
            self.end = self.session.ended(None)?;
        }
        match self.end.clone() {
            None => Ok(()),
            Some(end) => Err(end.into_error()),
        }
    }

    /// Waits for something that `missing` has to do.
    fn wait_for<T>(
        &mut self,
        missing: usize,
        mut look: impl FnMut(&Session) -> Result<Option<T>, CollectiveError>,
    ) -> Result<T, CollectiveError> {
        let limit = self.time_limit;
        let mut num_looks = 0_u32;
        let found = wait_for(Some(limit), || {
            num_looks = num_looks.wrapping_add(1);
            if num_looks.is_multiple_of(16) {
                self.check_end()?;
            }
            look(&self.session)
        })?;
        found.ok_or(CollectiveError::TimedOut {
            rank: self.rank(),
            missing,
            limit,
        })
    }

    /// Receives the next message of a rank, which must be of this operation, into `words`.
    fn receive_from(
        &mut self,
        other: usize,
        kind: Kind,
        own: Label,
        words: &mut Vec<u32>,
    ) -> Result<(), CollectiveError> {
        let tag = self.session.tag(kind);
        let mut receiving = self.wait_for(other, |session| {
            session.plugin.receive(Some(other), tag, words)
        })?;
        *words = self.wait_for(other, |_| receiving.words())?;
        let theirs = words.first_chunk().and_then(read_label).ok_or_else(|| {
            CollectiveError::World(format!("an operation of rank {other} is unknown"))
        })?;
        check_label(self.rank(), own, other, theirs)
    }

    /// Sends a message, when the memory of the one before is free.
    fn send_to(
        &mut self,
        mut outgoing: Outgoing,
        to: impl Iterator<Item = usize> + Clone,
        kind: Kind,
        label: Label,
        len: usize,
        write: &mut dyn FnMut(&mut [u32]),
    ) -> Result<Outgoing, CollectiveError> {
        let missing = to.clone().next().unwrap_or(0);
        self.wait_until_sent(missing, &mut outgoing)?;
        write(message_of(&mut outgoing.words, label, len));
        let tag = self.session.tag(kind);
        for rank in to {
            let sent = self.session.plugin.send(rank, tag, &outgoing.words);
            outgoing.sending.push(sent?);
        }
        Ok(outgoing)
    }

    /// Sends each other rank of the stage its part of a message, when the memory of the one before is free. This rank
    /// keeps its own.
    fn send_parts(
        &mut self,
        mut outgoing: Outgoing,
        label: Label,
        words: &[u32],
        part: &dyn Fn(usize) -> Range<usize>,
    ) -> Result<Outgoing, CollectiveError> {
        let stage = self.grid.stage_of(self.rank());
        self.wait_until_sent(stage.start, &mut outgoing)?;
        let tag = self.session.tag(Kind::Round);
        for (place, rank) in stage.enumerate() {
            let words = &words[part(place)];
            if rank == self.rank() {
                message_of(&mut outgoing.words, label, words.len()).copy_from_slice(words);
                continue;
            }
            let mut message = Arc::default();
            message_of(&mut message, label, words.len()).copy_from_slice(words);
            let sent = self.session.plugin.send(rank, tag, &message);
            outgoing.sending.push(sent?);
        }
        Ok(outgoing)
    }

    /// Waits until all ranks have what was sent, which `missing` is the first of.
    fn wait_until_sent(
        &mut self,
        missing: usize,
        outgoing: &mut Outgoing,
    ) -> Result<(), CollectiveError> {
        let sending = &mut outgoing.sending;
        self.wait_for(missing, |_| Ok(are_done(sending)?.then_some(())))?;
        sending.clear();
        Ok(())
    }

    fn read_all(
        &mut self,
        own: Label,
        visit: &mut dyn FnMut(&[&[u32]]),
    ) -> Result<(), CollectiveError> {
        let stage = self.grid.stage_of(self.rank());
        for (index, other) in stage.clone().enumerate() {
            if other != self.rank() {
                let mut words = std::mem::take(&mut self.received[index]);
                self.receive_from(other, Kind::Round, own, &mut words)?;
                self.received[index] = words;
            }
        }
        let mut messages: [&[u32]; MAX_RANKS] = [&[]; MAX_RANKS];
        for ((message, rank), received) in
            messages.iter_mut().zip(stage.clone()).zip(&self.received)
        {
            let words = match rank == self.rank() {
                true => &*self.published[parity(self.round)].words,
                false => received,
            };
            *message = &words[HEADER_LEN..];
        }
        visit(&messages[..stage.len()]);
        Ok(())
    }

    /// Has the others know of a failure.
    fn noticed<T>(&mut self, result: Result<T, CollectiveError>) -> Result<T, CollectiveError> {
        if let Err(error) = &result {
            Exchange::abort(self, &error.to_string());
        }
        result
    }
}

impl Exchange for Mpi {
    fn grid(&self) -> Grid {
        self.grid
    }

    fn rank(&self) -> usize {
        self.session.rank
    }

    fn is_shared(&self) -> bool {
        false
    }

    fn max_words(&self) -> usize {
        MAX_WORDS
    }

    fn max_sent_words(&self) -> usize {
        MAX_WORDS
    }

    fn set_time_limit(&mut self, limit: Duration) {
        self.time_limit = limit;
    }

    fn publish_with(
        &mut self,
        label: Label,
        len: usize,
        write: &mut dyn FnMut(&mut [u32]),
    ) -> Result<(), CollectiveError> {
        self.check_end()?;
        let own = Exchange::rank(self);
        let others = self.grid.stage_of(own).filter(|rank| *rank != own);
        let parity = parity(self.round);
        let outgoing = std::mem::take(&mut self.published[parity]);
        let published = self.send_to(outgoing, others, Kind::Round, label, len, write);
        self.published[parity] = self.noticed(published)?;
        self.label = Some(label);
        Ok(())
    }

    fn publish_parts(
        &mut self,
        label: Label,
        words: &[u32],
        part: &dyn Fn(usize) -> Range<usize>,
    ) -> Result<(), CollectiveError> {
        self.check_end()?;
        let parity = parity(self.round);
        let outgoing = std::mem::take(&mut self.published[parity]);
        let published = self.send_parts(outgoing, label, words, part);
        self.published[parity] = self.noticed(published)?;
        self.label = Some(label);
        Ok(())
    }

    fn read(&mut self, visit: &mut dyn FnMut(&[&[u32]])) -> Result<(), CollectiveError> {
        let own = self.label.take().expect("a rank publishes, then reads");
        let read = self.read_all(own, visit);
        self.noticed(read)?;
        self.round = self.round.wrapping_add(1);
        Ok(())
    }

    fn send(&mut self, label: Label, words: &[u32]) -> Result<(), CollectiveError> {
        self.check_end()?;
        let next = std::iter::once(self.grid.next(Exchange::rank(self)));
        let parity = parity(self.num_sent);
        let outgoing = std::mem::take(&mut self.sent[parity]);
        let mut write = |message: &mut [u32]| message.copy_from_slice(words);
        let sent = self.send_to(outgoing, next, Kind::Stage, label, words.len(), &mut write);
        self.sent[parity] = self.noticed(sent)?;
        self.num_sent = self.num_sent.wrapping_add(1);
        Ok(())
    }

    fn receive(
        &mut self,
        label: Label,
        visit: &mut dyn FnMut(&[u32]),
    ) -> Result<(), CollectiveError> {
        let previous = self.grid.previous(Exchange::rank(self));
        let mut words = std::mem::take(&mut self.received[0]);
        let received = self.receive_from(previous, Kind::Stage, label, &mut words);
        self.noticed(received)?;
        visit(&words[HEADER_LEN..]);
        self.received[0] = words;
        Ok(())
    }

    fn check(&mut self) -> Result<(), CollectiveError> {
        self.check_end()
    }

    fn abort(&mut self, reason: &str) {
        if self.check_end().is_ok() {
            self.end = Some(End::Failed {
                by: Exchange::rank(self),
                reason: reason.to_owned(),
            });
            self.session.tell_failure(reason);
        }
    }
}

/// The words of a message, behind its header. Nobody else may have its memory.
fn message_of(memory: &mut Arc<Vec<u32>>, label: Label, len: usize) -> &mut [u32] {
    assert!(len <= MAX_WORDS, "{len} words");
    let message = Arc::make_mut(memory);
    message.resize(HEADER_LEN + len, 0);
    let (head, words) = message.split_at_mut(HEADER_LEN);
    head.copy_from_slice(&header(label));
    words
}

/// The words before a message's own.
fn header(label: Label) -> [u32; HEADER_LEN] {
    let len = label.len as u64;
    let low = |value: u64| value as u32;
    let high = |value: u64| (value >> 32) as u32;
    [
        label.operation as u32,
        low(label.step),
        high(label.step),
        low(len),
        high(len),
    ]
}

fn read_label(header: &[u32; HEADER_LEN]) -> Option<Label> {
    let [operation, step_low, step_high, len_low, len_high] = *header;
    let whole = |low: u32, high: u32| u64::from(low) | u64::from(high) << 32;
    Some(Label {
        operation: Operation::from_number(operation)?,
        step: whole(step_low, step_high),
        len: usize::try_from(whole(len_low, len_high)).ok()?,
    })
}

/// The memory of a round or of a message: even and odd ones take turns.
fn parity(number: u32) -> usize {
    (number % 2) as usize
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::Ordering;

    use super::super::messages::tests::session;
    use super::*;

    /// Rank 1 of two, with a message in a round of which rank 0 sends none.
    fn waiting() -> Mpi {
        let limit = Duration::from_secs(60);
        let mut mpi = Mpi::new(Arc::new(session(1)), Grid::from(2), limit);
        let label = Label {
            operation: Operation::Gather,
            step: 3,
            len: 1,
        };
        mpi.publish_with(label, 1, &mut |words| words[0] = 7)
            .expect("nobody has ended");
        // It is for rank 0.
        let tag = mpi.session.tag(Kind::Round);
        let taken = mpi.session.plugin.receive(Some(1), tag, &mut Vec::new());
        assert!(taken.expect("it works").is_some());
        mpi
    }

    #[test]
    fn rank_0_may_end_a_model_while_another_rank_still_waits() {
        let mut mpi = waiting();
        session(0).tell_closed(1);
        assert_eq!(mpi.read(&mut |_| {}), Err(CollectiveError::Closed));
        assert!(mpi.session.is_closed.load(Ordering::Acquire));
    }

    #[test]
    fn a_failure_of_rank_0_is_no_end_of_the_model() {
        let mut mpi = waiting();
        session(0).tell_failure("it is out of memory");
        let error = CollectiveError::Aborted {
            by: 0,
            reason: "it is out of memory".to_owned(),
        };
        assert_eq!(mpi.read(&mut |_| {}), Err(error));
        assert!(!mpi.session.is_closed.load(Ordering::Acquire));
    }

    #[test]
    fn a_label_is_read_as_it_was_written() {
        let label = Label {
            operation: Operation::Gather,
            step: 0x1234_5678_9abc_def0,
            len: 5_000_000_000,
        };
        assert_eq!(read_label(&header(label)), Some(label));
        assert_eq!(read_label(&[77, 0, 0, 0, 0]), None);
    }
}
