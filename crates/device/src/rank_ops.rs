//! Operations of a device that is one of the ranks of a model.

use super::lacking::Lacking;
use super::linear::{EmbeddingTable, Linear};
use super::operands::Output;
use super::ops::Ops;
use super::rank_host::RankHost;
use inflight_base::{LoadError, StepError};

/// Collective operations of a device that has [joined](super::Device::join_ranks) ranks, with the connection of this
/// rank's host to the others. All ranks of a stage call them in one order. A failure between ranks is an error of
/// [`RankOps::wait`].
pub trait RankOps<D: Ops>: Copy {
    /// Checks that all ranks of the stage have equal arithmetic, such as one instruction set: each rank routes the rows
    /// to experts by itself.
    ///
    /// # Errors
    ///
    /// Others may give other bits, or a rank has failed.
    fn check_alike(self, device: &mut D, host: &mut RankHost) -> Result<(), LoadError>;

    /// Reserves buffers for rows between stages: at most `max_rows` of this width in a step, and `max_sequences` in a
    /// generation step. None, by default.
    ///
    /// # Errors
    ///
    /// There is not enough memory.
    fn reserve_rows_between_stages(
        self,
        _device: &mut D,
        _host: &RankHost,
        _max_rows: usize,
        _max_sequences: usize,
        _width: usize,
    ) -> Result<(), LoadError> {
        Ok(())
    }

    /// Waits for what has been launched, where that needs the other ranks. [`StepIo::results`](super::StepIo::results)
    /// and [`Ops::context_logits`] of a rank come behind it.
    ///
    /// # Errors
    ///
    /// An operation between ranks has failed.
    fn wait(self, device: &mut D, host: &mut RankHost) -> Result<(), StepError>;

    /// Sums rows over all ranks of the stage, `[num_rows, width]`.
    fn all_reduce(self, device: &mut D, host: &mut RankHost, num_rows: usize, rows: &mut D::Sums);

    /// `out = x * W^T + bias`, summed over all ranks of the stage: [`Ops::project`] and [`RankOps::all_reduce`], of
    /// which a device may do some rows of each at one time. `x` is `[num_rows, inputs]`, `out` is `[num_rows,
    /// outputs]`.
    fn project_and_sum(
        self,
        device: &mut D,
        host: &mut RankHost,
        num_rows: usize,
        x: &D::Inputs,
        linear: &Linear<D>,
        out: &mut D::Sums,
    ) {
        device.project(num_rows, x, linear, Output::Store, None, out);
        self.all_reduce(device, host, num_rows, out);
    }

    /// As [`Ops::embed`], with this rank's part of the table, whose first row is `first_token`'s. The embeddings
    /// of other tokens become -0, which changes no sum over all ranks.
    fn embed_part(
        self,
        device: &mut D,
        step: &D::Step<'_>,
        table: EmbeddingTable<'_, D>,
        first_token: usize,
        scale: f32,
        out: &mut D::Sums,
    );

    /// Collects the logits of all ranks of the stage, each of which has the logits of some tokens: `widths` are the
    /// numbers of tokens of all ranks, `part` has this one's, `[num_rows, own width]`, and `out` is `[num_rows,
    /// vocab_size]`. A rank that does not sample does not get them. Of the `greedy_rows` the device may collect the
    /// largest logits only, and return their tokens as [`StepResults::samples`](super::StepResults::samples).
    #[allow(clippy::too_many_arguments, reason = "each is an operand")]
    fn gather_logits(
        self,
        device: &mut D,
        host: &mut RankHost,
        num_rows: usize,
        greedy_rows: &[u32],
        widths: &[usize],
        part: &mut D::Logits,
        out: &mut D::Logits,
    );

    /// Sends rows to the next stage, at the latest in [`RankOps::end_step`].
    fn send_rows(self, device: &mut D, host: &mut RankHost, num_rows: usize, rows: &D::Sums);

    /// Waits for the rows of the previous stage.
    fn receive_rows(self, device: &mut D, host: &mut RankHost, num_rows: usize, rows: &mut D::Sums);

    /// Sends the rows that have waited for the end of a step. By default there are none.
    fn end_step(self, _device: &mut D, _host: &mut RankHost) {}
}

impl<D: Ops> RankOps<D> for Lacking {
    fn check_alike(self, _: &mut D, _: &mut RankHost) -> Result<(), LoadError> {
        match self {}
    }

    fn wait(self, _: &mut D, _: &mut RankHost) -> Result<(), StepError> {
        match self {}
    }

    fn all_reduce(self, _: &mut D, _: &mut RankHost, _: usize, _: &mut D::Sums) {
        match self {}
    }

    fn embed_part(
        self,
        _: &mut D,
        _: &D::Step<'_>,
        _: EmbeddingTable<'_, D>,
        _: usize,
        _: f32,
        _: &mut D::Sums,
    ) {
        match self {}
    }

    fn gather_logits(
        self,
        _: &mut D,
        _: &mut RankHost,
        _: usize,
        _: &[u32],
        _: &[usize],
        _: &mut D::Logits,
        _: &mut D::Logits,
    ) {
        match self {}
    }

    fn send_rows(self, _: &mut D, _: &mut RankHost, _: usize, _: &D::Sums) {
        match self {}
    }

    fn receive_rows(self, _: &mut D, _: &mut RankHost, _: usize, _: &mut D::Sums) {
        match self {}
    }
}
