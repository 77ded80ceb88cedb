//! Messages between rank 0 and another rank.

use std::io;
use std::time::Duration;

/// One end of a connection between rank 0 and another rank.
pub trait Channel: Send {
    /// Has a message that is not taken, or does not come, end in an error after this time; `None`: it is waited for.
    ///
    /// # Errors
    ///
    /// The system refuses it, or the time is zero.
    fn set_time_limit(&mut self, limit: Option<Duration>) -> io::Result<()>;

    /// Sends a message. May return before the other rank has read it.
    ///
    /// # Errors
    ///
    /// The other rank has ended, or does not read in time.
    fn send(&mut self, message: &[u8]) -> io::Result<()>;

    /// Replaces `message` by the next message. Returns `false` if there will be none.
    ///
    /// # Errors
    ///
    /// The connection ends within a message, or none comes in time.
    fn receive(&mut self, message: &mut Vec<u8>) -> io::Result<bool>;
}
