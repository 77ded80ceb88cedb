//! Rows of the residual stream on their way between the GPUs of stages: through memory of the hosts.
//!
//! ```text
//! GPU of a stage       | layers of a step |                              stream, or a graph
//! its host                                | wait, copy, send |
//! host of the next one                               | receive |
//! its GPU                                                      | copy, layers |
//! ```
//!
//! A step of generation is a graph on both sides. What it copies from the host is always at one address; what is sent
//! is read when the graph has ended.

use super::Cuda;
use super::memory::{PinnedMemory, read_address, write_address};
use super::rows::Rows;
use inflight_base::LoadError;
use inflight_device::RankHost;

/// Memory for the rows.
pub(super) struct StageRows {
    received: PinnedMemory<f32>,
    sent: PinnedMemory<f32>,
    /// Values that are received, or sent, at a time.
    piece_len: usize,
    /// What is to be sent at the end of the step: its address, and how many values.
    outgoing: Option<(u64, usize)>,
    /// The last step whose rows were sent, for which the GPU was waited for.
    sent_step: u64,
}

impl Cuda {
    /// Reserves memory for rows between stages: a step has at most `max_rows`, and a graph no more than
    /// `max_graph_rows`.
    pub(super) fn reserve_stage_rows(
        &mut self,
        host: &RankHost,
        max_rows: usize,
        max_graph_rows: usize,
        width: usize,
    ) -> Result<(), LoadError> {
        let Some(ranks) = &mut self.ranks else {
            return Ok(());
        };
        let rounded =
            |num_rows: usize| (num_rows + super::gemm::MAX_ROUNDING).saturating_mul(width);
        // Hosts send so many values at once.
        let unit_len = (host.max_unread() / 2).max(1);
        let graph_len = rounded(max_graph_rows).next_multiple_of(unit_len);
        let piece_len = graph_len.min(rounded(max_rows));
        ranks.stage_rows = Some(StageRows {
            received: PinnedMemory::new(&self.stream, piece_len)?,
            sent: PinnedMemory::new(&self.stream, piece_len)?,
            piece_len,
            outgoing: None,
            sent_step: 0,
        });
        Ok(())
    }

    /// Has rows be sent at the end of the step.
    pub(super) fn send_later(&mut self, num_rows: usize, rows: &Rows<f32>) {
        let stage_rows = self.ranks.as_mut().and_then(|it| it.stage_rows.as_mut());
        if let Some(stage_rows) = stage_rows {
            stage_rows.outgoing = Some((rows.address(), num_rows * rows.width()));
        }
    }

    /// Sends the rows of the step that was launched, if there are some.
    pub(super) fn send_outgoing(&mut self, host: &mut RankHost) {
        let stage_rows = self.ranks.as_mut().and_then(|it| it.stage_rows.as_mut());
        let Some((address, len)) = stage_rows.and_then(|rows| rows.outgoing.take()) else {
            return;
        };
        // A failure is that of the step.
        if self.wait_for_ranks(host).is_err() {
            return;
        }
        let (stream, number) = (self.stream.clone(), self.num_steps);
        let stage_rows = self.ranks.as_mut().and_then(|it| it.stage_rows.as_mut());
        let Some(stage_rows) = stage_rows else {
            return;
        };
        stage_rows.sent_step = number;
        let mut copied = Ok(());
        for first in (0..len).step_by(stage_rows.piece_len) {
            let own = &mut stage_rows.sent.as_mut_slice()[..stage_rows.piece_len.min(len - first)];
            copied = copied.and_then(|()| read_address(&stream, address + 4 * first as u64, own));
            // After a failure of the GPU, too: others wait for the rows, and hear of it with the next step.
            host.send(own);
        }
        self.record("reading rows for the next stage", copied);
    }

    /// Whether the GPU was waited for in the current step, to send its rows.
    pub(super) fn has_sent(&self) -> bool {
        let stage_rows = self.ranks.as_ref().and_then(|it| it.stage_rows.as_ref());
        stage_rows.is_some_and(|rows| rows.sent_step == self.num_steps)
    }

    /// Receives the rows of the stage before. A graph copies as many as it has rows.
    pub(super) fn receive_from_stage(
        &mut self,
        host: &mut RankHost,
        num_rows: usize,
        rows: &Rows<f32>,
    ) {
        let padded_len = self.padded(num_rows) * rows.width();
        let (is_launching, stream) = (self.is_launching(), self.stream.clone());
        let stage_rows = self.ranks.as_mut().and_then(|it| it.stage_rows.as_mut());
        let Some(stage_rows) = stage_rows else {
            return;
        };
        let len = num_rows * rows.width();
        let mut copied = Ok(());
        for first in (0..len).step_by(stage_rows.piece_len) {
            let piece_len = stage_rows.piece_len.min(len - first);
            if first > 0 {
                // The piece before is still read.
                copied = copied.and_then(|()| stream.synchronize());
            }
            let received = stage_rows.received.as_mut_slice();
            host.receive(&mut received[..piece_len]);
            let copied_len = match piece_len == len {
                true => padded_len.min(stage_rows.piece_len),
                false => piece_len,
            };
            if is_launching {
                let target = rows.address() + 4 * first as u64;
                let piece = &stage_rows.received.as_slice()[..copied_len];
                copied = copied.and_then(|()| write_address(&stream, target, piece));
            }
        }
        self.record("copying rows of the stage before", copied);
    }
}
