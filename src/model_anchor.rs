//! Keeps a model loaded for a moment after its last request.

use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

use inflight_triton::ResponseFactory;

/// Keeps the model alive for a moment after its last request was released.
///
/// For each sequence that ends, Triton's clean-up thread, at the lowest priority, still answers a null
/// request that knows its model by a bare pointer (`CancelRequests` in `sequence_batch_scheduler.cc`,
/// 24.10), while a model that is unloaded goes with its last request: that corrupts the server's heap.
/// A response factory keeps its model alive, so the last one is held for longer than that thread has been seen to take.
#[derive(Default)]
pub struct ModelAnchor(Option<(ResponseFactory, Instant)>);

impl ModelAnchor {
    const HOLD: Duration = Duration::from_secs(1);

    /// Keeps the model of this factory loaded for a moment.
    pub fn hold(&mut self, factory: ResponseFactory) {
        self.0 = Some((factory, Instant::now() + Self::HOLD));
    }

    /// The next work; releases the model if none arrives for a while. `None` when the channel is closed.
    pub fn receive<T>(&mut self, inbox: &Receiver<T>) -> Option<T> {
        if let Some((_, until)) = &self.0 {
            match inbox.recv_timeout(until.saturating_duration_since(Instant::now())) {
                Ok(work) => return Some(work),
                Err(RecvTimeoutError::Disconnected) => return None,
                Err(RecvTimeoutError::Timeout) => self.0 = None,
            }
        }
        inbox.recv().ok()
    }
}
